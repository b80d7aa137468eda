"""Convolutional networks written here: DenseNet, U-Net, and a plain one with batch norm."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.models.sample import Sample, weighted_mean


class DenseLayer(nn.Module):
    """Batch norm, ReLU, convolution; the result is appended to the input's channels."""

    def __init__(self, channels: int, growth: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, 2 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(2 * growth)
        self.conv2 = nn.Conv2d(2 * growth, growth, 3, padding=1, bias=False)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.relu(self.norm1(x), inplace=True))
        h = self.conv2(F.relu(self.norm2(h), inplace=True))
        if self.dropout:
            h = F.dropout(h, self.dropout, self.training)
        return torch.cat([x, h], dim=1)


def densenet(dropout: float = 0.0, seed: int = 0) -> Sample:
    """DenseNet: inside a stage every layer reads all the earlier ones."""
    torch.manual_seed(seed)
    growth, channels = 8, 16
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
    for stage in range(2):
        for _ in range(3):
            layers.append(DenseLayer(channels, growth, dropout))
            channels += growth
        if stage == 0:
            layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True),
                       nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
            channels //= 2
    layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
               nn.Linear(channels, 10)]
    return Sample(nn.Sequential(*layers).train(), (torch.randn(4, 3, 32, 32),), {},
                  weighted_mean(4, 10))


class UNet(nn.Module):
    """Three scales; what goes down at each is joined to what comes up."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(double(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in widths[1::-1])
        self.join = nn.ModuleList(double(2 * w, w) for w in widths[1::-1])
        self.dropout = nn.Dropout2d(dropout)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        for i, block in enumerate(self.down):
            x = block(x if i == 0 else F.max_pool2d(x, 2))
            kept.append(x)
        x = self.dropout(x)
        kept.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([kept.pop(), up(x)], dim=1))
        out: torch.Tensor = self.head(x)
        return out


def double(inputs: int, outputs: int) -> nn.Module:
    """Two convolutions with batch norm."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True), nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def unet(dropout: float = 0.0, seed: int = 0) -> Sample:
    """U-Net: long connections from the first layers to the last."""
    torch.manual_seed(seed)
    return Sample(UNet(8, dropout).train(), (torch.randn(2, 3, 64, 64),), {},
                  weighted_mean(2, 2, 64, 64))


def batch_norm_cnn(dropout: float = 0.0, seed: int = 0) -> Sample:
    """A chain of convolutions with batch norm; one of them is frozen, as in fine-tuning."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    channels = 3
    for _ in range(4):
        layers += [nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
        channels = 16
    model = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Dropout(dropout), nn.Flatten(),
                          nn.Linear(16 * 16 * 16, 10)).train()
    model[4].eval()
    return Sample(model, (torch.randn(4, 3, 32, 32),), {},
                  weighted_mean(4, 10))
