"""Small networks of convolutions, for what stands between convolutions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F


class _Between(nn.Module):
    """Something between two convolutions with batch norm."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor], channels: int = 8,
                 after: int | None = None) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.between = between
        self.last = nn.Conv2d(channels if after is None else after, 4, 3, stride=2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.between(F.relu(self.norm(self.first(x)))))
        return out


class _Gate(nn.Module):
    """Squeeze and excitation, and a scale per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)
        self.scale = nn.Parameter(torch.rand(8, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))))
        return x * gate + self.scale * x


class _Attention(nn.Module):
    """Attention of the pixels to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Conv2d(8, 24, 1), nn.Conv2d(8, 8, 1)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(n, 3, 2, c // 2, h * w).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v).reshape(n, c, h, w)
        z = F.scaled_dot_product_attention(q.mT, k.mT, v.mT).mT.reshape(n, c, h, w)
        found: torch.Tensor = x + self.out(y + z)
        return found


class _Standardized(nn.Module):
    """Weights of mean zero, which are used twice, and read by something that is no convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, 3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        x = F.conv2d(x, weight, padding=1)
        return F.conv2d(x, weight, padding=1) * self.weight.square().sum()


class _Tied(nn.Module):
    """One convolution, called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.conv(x))
        return x


class _Flat(nn.Module):
    """An image as rows, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(256, 256), nn.LayerNorm(256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.mix(x.flatten(2))).reshape(x.shape)
        return out


class _Patches(nn.Module):
    """A block of ConvNeXt: a depthwise convolution, and the rest with the channels last by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(8, 8, 7, padding=3, groups=8)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        found: torch.Tensor = x + self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)
        return found


def _shuffled(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, 1)
    return torch.stack((a.sin(), b), 2).reshape(x.shape)


def _windows(x: torch.Tensor) -> torch.Tensor:
    y = x.unfold(2, 4, 4).unfold(3, 4, 4).sum((-1, -2))
    return x + F.interpolate(y, scale_factor=4.0, mode="nearest") + torch.fft.fft2(x).real / 16


BETWEEN: dict[str, Callable[[], nn.Module]] = {
    "gate": lambda: _Between(_Gate()),
    "attention": lambda: _Between(_Attention()),
    "standardized": lambda: _Between(_Standardized()),
    "tied": lambda: _Between(_Tied()),
    "flat": lambda: _Between(_Flat()),
    "patches": lambda: _Between(_Patches()),
    "group norm": lambda: _Between(nn.GroupNorm(4, 8)),
    "instance norm": lambda: _Between(nn.InstanceNorm2d(8, affine=True)),
    "prelu": lambda: _Between(nn.PReLU(8)),
    "grouped": lambda: _Between(nn.Conv2d(8, 16, 3, padding=1, groups=4), after=16),
    "transposed": lambda: _Between(nn.ConvTranspose2d(8, 4, 2, stride=2), after=4),
    "dilated": lambda: _Between(nn.Conv2d(8, 8, 3, padding=2, dilation=2, padding_mode="reflect")),
    "bilinear": lambda: _Between(nn.Upsample(scale_factor=2, mode="bilinear")),
    "bicubic": lambda: _Between(nn.Upsample(scale_factor=2, mode="bicubic")),
    "pools": lambda: _Between(nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2, 1), nn.LPPool2d(2, 2, 1))),
    "adaptive": lambda: _Between(nn.Sequential(nn.AdaptiveMaxPool2d(9), nn.AdaptiveAvgPool2d(6))),
    "pixel shuffle": lambda: _Between(nn.PixelShuffle(2), after=2),
    "channel shuffle": lambda: _Between(_shuffled),
    "windows": lambda: _Between(_windows),
    "softmax": lambda: _Between(nn.Softmax(1)),
    "one channel": lambda: _Between(nn.Sequential(nn.Conv2d(8, 1, 3), nn.Conv2d(1, 8, 3))),
    "padded": lambda: _Between(lambda x: F.pad(torch.cat([x, x.flip(1)], 1), (1, 2, 0, 3)), after=16),
    "dropout": lambda: _Between(nn.Sequential(nn.Dropout(0.5), nn.Conv2d(8, 8, 3), nn.Dropout2d(0.3))),
    "volume": lambda: _Volume(),
    "line": lambda: _Line(),
}
"""Name -> a network of images of three channels, sixteen pixels wide."""


class _Volume(nn.Module):
    """Convolutions of volumes, one of them transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv3d(3, 4, 3, padding=1, bias=False), nn.BatchNorm3d(4)
        self.up, self.last = nn.ConvTranspose3d(4, 4, 2, stride=2), nn.Conv3d(4, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool3d(F.relu(self.norm(self.first(x.unflatten(2, (4, 4))))), 2)
        out: torch.Tensor = self.last(F.interpolate(self.up(x), scale_factor=2.0, mode="trilinear"))
        return out


class _Line(nn.Module):
    """A convolution of one dimension, which has no such layout, after one that has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3), nn.Conv1d(4, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x).flatten(2))
        return out


class Network(nn.Module):
    """Operations on images of eight channels, each on one or two of the images before it."""

    def __init__(self, program: list[tuple[str, int, int]], first: bool) -> None:
        super().__init__()
        self.program = program
        self.first = nn.Conv2d(3, 8, 3, padding=1) if first else nn.Conv2d(3, 8, 1)
        self.convs = nn.ModuleList(
            nn.Conv2d(8, 8, 3, padding=1, groups=8 if kind == "deep" else 1) for kind, _, _ in program)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = [self.first(x), F.pad(x, (0, 0, 0, 0, 0, 5)).cos()]
        for (kind, a, b), conv in zip(self.program, self.convs, strict=True):
            one, other = images[a % len(images)], images[b % len(images)]
            if kind in ("conv", "deep"):
                one = conv(one)
            elif kind == "up":
                one = F.interpolate(one, scale_factor=2.0)[:, :, 4:12, 4:12]
            elif kind == "pool":
                one = F.max_pool2d(one, 3, 1, 1)
            elif kind == "add":
                one = one + 0.5 * other
            elif kind == "cat":
                one = torch.cat((one[:, :3], other[:, 3:]), 1)
            elif kind == "rows":
                one = one.flatten(2).softmax(-1).reshape(one.shape)
            else:
                one = F.relu(one)
            images.append(one)
        return images[-1] + images[len(images) // 2]
