"""Sequence models of torch.nn, and an MLP-Mixer."""

from __future__ import annotations

import torch
from torch import nn

from tests.models.sample import Sample, cross_entropy, weighted_mean


class Mean(nn.Module):
    """Over the positions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(dim=1)


def transformer_encoder(dropout: float = 0.0, seed: int = 0) -> Sample:
    """nn.TransformerEncoder as a classifier."""
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    model = nn.Sequential(encoder, Mean(), nn.Linear(64, 10))
    return Sample(model.train(), (torch.randn(4, 64, 64),), {}, weighted_mean(4, 10))


def transformer_decoder(dropout: float = 0.0, seed: int = 0) -> Sample:
    """nn.TransformerDecoder: all layers read the encoder's memory, which wants a gradient."""
    torch.manual_seed(seed)
    layer = nn.TransformerDecoderLayer(64, 4, 128, dropout, batch_first=True, norm_first=True)
    model = nn.TransformerDecoder(layer, 2)
    target, memory = torch.randn(4, 48, 64), torch.randn(4, 64, 64, requires_grad=True)
    return Sample(model.train(), (target, memory), {}, weighted_mean(4, 48, 64))


class Transformer(nn.Module):
    """nn.Transformer on tokens, with a causal mask."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.transformer = nn.Transformer(64, 4, 2, 2, 128, dropout, batch_first=True)
        self.head = nn.Linear(64, 100)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        h = self.transformer(self.embedding(source), self.embedding(target), tgt_mask=mask,
                             tgt_is_causal=True)
        out: torch.Tensor = self.head(h)
        return out


def transformer(dropout: float = 0.0, seed: int = 0) -> Sample:
    """nn.Transformer: encoder and decoder, one embedding used twice."""
    torch.manual_seed(seed)
    source, target = torch.randint(100, (4, 48)), torch.randint(100, (4, 40))
    return Sample(Transformer(dropout).train(), (source, target), {}, cross_entropy(100, 4, 40))


class LSTMTagger(nn.Module):
    """Embedding, two LSTM layers, a linear head."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 32)
        self.lstm = nn.LSTM(32, 32, num_layers=2, dropout=dropout, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, _ = self.lstm(self.embedding(x))
        out: torch.Tensor = self.head(h)
        return out


def lstm(dropout: float = 0.0, seed: int = 0) -> Sample:
    """A recurrent network, short: its graph grows with the length."""
    torch.manual_seed(seed)
    return Sample(LSTMTagger(dropout).train(), (torch.randint(100, (16, 12)),), {},
                  cross_entropy(10, 16, 12))


class MixerBlock(nn.Module):
    """One MLP across the patches, one across the channels."""

    def __init__(self, patches: int, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across_patches = mlp(patches, 2 * patches, dropout)
        self.across_channels = mlp(width, 4 * width, dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.across_patches(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        out: torch.Tensor = x + self.across_channels(self.norm2(x))
        return out


def mlp(width: int, hidden: int, dropout: float) -> nn.Module:
    """Two linear layers."""
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Dropout(dropout),
                         nn.Linear(hidden, width), nn.Dropout(dropout))


class Mixer(nn.Module):
    """Patches, blocks, mean over the patches, classes."""

    def __init__(self, depth: int, width: int, dropout: float) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.Sequential(*(MixerBlock(64, width, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.blocks(self.patches(x).flatten(2).transpose(1, 2))
        out: torch.Tensor = self.head(self.norm(h).mean(dim=1))
        return out


def mlp_mixer(dropout: float = 0.0, seed: int = 0) -> Sample:
    """MLP-Mixer."""
    torch.manual_seed(seed)
    return Sample(Mixer(4, 48, dropout).train(), (torch.randn(4, 3, 32, 32),), {},
                  weighted_mean(4, 10))
