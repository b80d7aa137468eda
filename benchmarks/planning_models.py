"""Models whose planning is timed: a GPT-2 of any depth, and models without equal blocks, or with few."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def gpt(layers: int, width: int, length: int) -> tuple[Any, dict[str, Any]]:
    """The model, and the arguments of its forward."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=8, n_positions=length, vocab_size=4096, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False)
    model = transformers.GPT2LMHeadModel(config).train()
    ids = torch.randint(0, 4096, (4, length))
    return model, {"input_ids": ids, "labels": ids}


class Dense(nn.Module):
    """Layers of a DenseNet: each reads what all before it have made."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(16 + 8 * k), nn.ReLU(), nn.Conv2d(16 + 8 * k, 8, 3, padding=1))
            for k in range(layers))
        self.first = nn.Conv2d(3, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a scalar."""
        x = self.first(x)
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x.mean()


class Unrolled(nn.Module):
    """An LSTM, one step after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a scalar."""
        h = c = x.new_zeros(x.shape[1], 64)
        for step in x:
            h, c = self.cell(step, (h, c))
        return h.sum()


class Euler(nn.Module):
    """Equal steps of an ordinary differential equation."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.field = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a scalar."""
        for _ in range(self.steps):
            x = x + self.field(x) / self.steps
        return x.square().mean()


def _convolved(inward: int, outward: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inward, outward, 3, stride, 1, bias=False), nn.BatchNorm2d(outward),
                         nn.ReLU())


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = _convolved(width, width), _convolved(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = x + self.two(self.one(x))
        return made


class _Exchange(nn.Module):
    """Parallel branches, each at half of the resolution of the one before, that are then mixed."""

    def __init__(self, widths: Sequence[int], blocks: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(*(_Residual(width) for _ in range(blocks))) for width in widths)
        self.ways = nn.ModuleDict()
        for j, a in enumerate(widths):
            for i, b in enumerate(widths):
                if j < i:
                    self.ways[f"{j}{i}"] = nn.Sequential(*(
                        _convolved(a, b if k == i - 1 else a, 2) for k in range(j, i)))
                elif j > i:
                    self.ways[f"{j}{i}"] = nn.Sequential(nn.Conv2d(a, b, 1, bias=False), nn.BatchNorm2d(b))

    def forward(self, xs: list[torch.Tensor]) -> list[torch.Tensor]:
        xs = [branch(x) for branch, x in zip(self.branches, xs, strict=True)]
        mixed = []
        for i, own in enumerate(xs):
            for j, x in enumerate(xs):
                if j != i:
                    way = self.ways[f"{j}{i}"](x)
                    own = own + (nn.functional.interpolate(way, own.shape[-2:]) if j > i else way)
            mixed.append(own.relu())
        return mixed


class HighResolution(nn.Module):
    """The stages of HRNet-W48, with its numbers of branches, modules and blocks, in small widths."""

    def __init__(self, width: int = 8, modules: tuple[int, ...] = (1, 4, 3), blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(_convolved(3, width, 2), *(_Residual(width) for _ in range(blocks)))
        widths = [width]
        self.down, self.stages = nn.ModuleList(), nn.ModuleList()
        for count in modules:
            self.down.append(_convolved(widths[-1], 2 * widths[-1], 2))
            widths.append(2 * widths[-1])
            self.stages.append(nn.ModuleList(_Exchange(widths, blocks) for _ in range(count)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a scalar."""
        xs = [self.stem(x)]
        for down, stage in zip(self.down, self.stages, strict=True):
            xs = [*xs, down(xs[-1])]
            for exchange in stage:
                xs = exchange(xs)
        return torch.stack([x.mean() for x in xs]).sum()


def made(name: str, width: int, length: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A model by its number of layers or its name, and the arguments of its forward."""
    if name.isdigit():
        model, kwargs = gpt(int(name), width, length)
        return model, (), kwargs
    return _other(name)


def _other(name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    kind, _, number = name.partition("-")
    count = int(number or 0)
    images, labels = torch.randn(4, 3, 64, 64), torch.randint(0, 10, (4,))
    if kind == "densenet":
        return Dense(count).train(), (images,), {}
    if kind == "lstm":
        return Unrolled(), (torch.randn(count, 8, 64),), {}
    if kind == "ode":
        return Euler(count), (torch.randn(32, 64),), {}
    if kind == "hrnet":
        return HighResolution().train(), (images,), {}
    if kind == "unet":
        from rkmate.cli.demo_models import UNet
        return UNet().train(), (images,), {}
    if kind == "diffusers":
        from diffusers import UNet2DModel
        model: Any = UNet2DModel(
            sample_size=32, layers_per_block=2, block_out_channels=(16, 32, 32), norm_num_groups=8,
            down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"))
        return _Summed(model).train(), (torch.randn(4, 3, 32, 32), torch.tensor(10)), {}
    import transformers
    if kind == "large":
        config: Any = transformers.GPT2Config(n_layer=36, n_embd=1280, n_head=20, use_cache=False)
        ids = torch.randint(0, 50257, (2, 512))
        return transformers.GPT2LMHeadModel(config).train(), (), {"input_ids": ids, "labels": ids}
    if kind == "gpt":        # with dropout, as it is by default
        config = transformers.GPT2Config(n_layer=count, n_embd=256, n_head=8, n_positions=256,
                                         vocab_size=4096, bos_token_id=0, eos_token_id=0, use_cache=False)
        ids = torch.randint(0, 4096, (4, 256))
        return transformers.GPT2LMHeadModel(config).train(), (), {"input_ids": ids, "labels": ids}
    if kind == "efficientnet":
        config = transformers.EfficientNetConfig(image_size=64, num_labels=10, width_coefficient=0.5,
                                                 hidden_dim=640)
        model = transformers.EfficientNetForImageClassification(config)
        return model.train(), (), {"pixel_values": images, "labels": labels}
    if kind == "swin":
        config = transformers.SwinConfig(
            image_size=64, patch_size=2, embed_dim=32, depths=[2, 2, 2], num_heads=[2, 4, 8],
            window_size=4, num_labels=10)
        model = transformers.SwinForImageClassification(config)
        return model.train(), (), {"pixel_values": images, "labels": labels}
    if kind == "detr":
        backbone = transformers.ResNetConfig(
            embedding_size=16, hidden_sizes=[16, 32, 64, 64], depths=[2, 2, 2, 2], layer_type="basic",
            out_features=["stage4"])
        config = transformers.DetrConfig(
            use_timm_backbone=False, backbone_config=backbone, backbone=None, d_model=64, num_queries=10,
            encoder_ffn_dim=128, decoder_ffn_dim=128, encoder_attention_heads=4, decoder_attention_heads=4,
            use_pretrained_backbone=False)
        return _Summed(transformers.DetrModel(config)).train(), (images,), {}
    config = transformers.MixtralConfig(
        vocab_size=1024, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64, use_cache=False)
    ids = torch.randint(0, 1024, (4, 64))
    return transformers.MixtralForCausalLM(config).train(), (), {"input_ids": ids, "labels": ids}


class _Summed(nn.Module):
    """A model whose first output is summed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> torch.Tensor:
        return self.model(*args)[0].square().mean()       # type: ignore[no-any-return]
