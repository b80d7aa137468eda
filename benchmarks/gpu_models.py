"""Models of `gpu.py`, made on the GPU with random weights: sizes that people train, and tiny ones of the same
kinds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

HALF = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """A model and its inputs; the model returns its loss."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: bool = False

    def around(self) -> contextlib.AbstractContextManager[Any]:
        """What its forward runs in."""
        return torch.autocast("cuda", dtype=HALF) if self.autocast else contextlib.nullcontext()

    def checkpoint(self, on: bool) -> bool:
        """Checkpoint each block, or no longer; False for a model that cannot."""
        if not getattr(self.model, "supports_gradient_checkpointing", False):
            return False
        if on:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            self.model.gradient_checkpointing_disable()
        return True


def text(kind: str, batch: int, length: int, vocab: int, *, dtype: torch.dtype = torch.float32,
         autocast: bool = False, **config: Any) -> Case:
    """A language model: `kind` is what transformers calls its classes."""
    head = {"GPT2": "LMHeadModel", "Bert": "ForMaskedLM", "T5": "ForConditionalGeneration"}
    made = getattr(transformers, f"{kind}Config")(vocab_size=vocab, use_cache=False, bos_token_id=0,
                                                  eos_token_id=0, pad_token_id=0, **config)
    with torch.device("cuda"):
        model = getattr(transformers, kind + head.get(kind, "ForCausalLM"))(made)
        ids = torch.randint(1, vocab, (batch, length))
    return Case(model.to(dtype).train(), (), {"input_ids": ids, "labels": ids}, autocast)


def gpt2(batch: int, length: int, layers: int, width: int, heads: int, *, dropout: float = 0.1,
         vocab: int = 50257, autocast: bool = False) -> Case:
    """Of OpenAI's kind."""
    return text("GPT2", batch, length, vocab, autocast=autocast, n_layer=layers, n_embd=width, n_head=heads,
                n_positions=length, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)


def llama(batch: int, length: int, layers: int, width: int, heads: int, inner: int,
          vocab: int = 128256) -> Case:
    """In bfloat16, four queries to a key."""
    return text("Llama", batch, length, vocab, dtype=HALF, num_hidden_layers=layers, hidden_size=width,
                num_attention_heads=heads, num_key_value_heads=heads // 4, intermediate_size=inner,
                max_position_embeddings=length)


def images(kind: str, batch: int, size: int, *, channels_last: bool = False, autocast: bool = False,
           **config: Any) -> Case:
    """A classifier of a thousand classes."""
    made = getattr(transformers, f"{kind}Config")(num_labels=1000, **config)
    with torch.device("cuda"):
        model = getattr(transformers, f"{kind}ForImageClassification")(made).train()
        x, y = torch.randn(batch, 3, size, size), torch.randint(0, 1000, (batch,))
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    return Case(model, (), {"pixel_values": x, "labels": y}, autocast)


def vit(batch: int, layers: int, width: int, heads: int, size: int = 224, *, autocast: bool = False) -> Case:
    """Patches of 16 x 16, with dropout."""
    return images("ViT", batch, size, autocast=autocast, image_size=size, num_hidden_layers=layers,
                  hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width,
                  hidden_dropout_prob=0.1)


class Lstm(nn.Module):
    """Two layers over words."""

    def __init__(self, width: int, vocab: int, dropout: float) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab)
        self.layers = nn.LSTM(width, width, 2, dropout=dropout, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return nn.functional.cross_entropy(self.head(self.layers(self.words(ids))[0]).flatten(0, 1),
                                           ids.flatten())


class UNet(nn.Module):
    """Three scales, convolutions with batch norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = [width << k for k in range(4)]
        self.down = nn.ModuleList(_block(a, b) for a, b in zip([3, *wide[:2]], wide[:3], strict=True))
        self.middle = _block(wide[2], wide[3])
        self.up = nn.ModuleList(nn.ConvTranspose2d(wide[k + 1], wide[k], 2, 2) for k in (2, 1, 0))
        self.join = nn.ModuleList(_block(wide[k + 1], wide[k]) for k in (2, 1, 0))
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss."""
        kept = []
        for down in self.down:
            x = down(x)
            kept.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.middle(x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([up(x), kept.pop()], 1))
        return nn.functional.cross_entropy(self.head(x), y)


def _block(a: int, b: int) -> nn.Sequential:
    convolutions = [[nn.Conv2d(n, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)]
                    for n in (a, b)]
    return nn.Sequential(*convolutions[0], *convolutions[1])


def lstm(batch: int, length: int, width: int, vocab: int, *, dropout: float = 0.0) -> Case:
    """Two layers of an LSTM. `dropout`: between them."""
    with torch.device("cuda"):
        return Case(Lstm(width, vocab, dropout).train(), (torch.randint(0, vocab, (batch, length)),), {})


def unet(batch: int, size: int, width: int) -> Case:
    """A U-Net of three scales."""
    with torch.device("cuda"):
        x, y = torch.randn(batch, 3, size, size), torch.randint(0, 2, (batch, size, size))
        return Case(UNet(width).train(), (x, y), {})


BASIC = {"layer_type": "basic", "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "embedding_size": 8}
"""Of a tiny ResNet or RegNet."""


def _both(whole: Callable[[], Case], tiny: Callable[[], Case]) -> dict[bool, Callable[[], Case]]:
    return {False: whole, True: tiny}


def _gpt2(*whole: int, **more: Any) -> dict[bool, Callable[[], Case]]:
    return _both(lambda: gpt2(*whole, **more), lambda: gpt2(2, 64, 2, 64, 2, vocab=1000, **more))


def _resnet(batch: int, depths: list[int], **more: Any) -> dict[bool, Callable[[], Case]]:
    return _both(lambda: images("ResNet", batch, 224, depths=depths, **more),
                 lambda: images("ResNet", 2, 64, **BASIC, **more))


_50, _101 = [3, 4, 6, 3], [3, 4, 23, 3]
MODELS: dict[str, dict[bool, Callable[[], Case]]] = {
    "gpt2-fp32": _gpt2(8, 512, 12, 768, 12, dropout=0.0),
    "gpt2-dropout": _gpt2(8, 512, 12, 768, 12),
    "gpt2-autocast": _gpt2(8, 512, 12, 768, 12, dropout=0.0, autocast=True),
    "gpt2-medium": _gpt2(8, 1024, 24, 1024, 16, autocast=True),
    "gpt2-large": _gpt2(8, 1024, 36, 1280, 20, autocast=True),
    "llama": _both(lambda: llama(4, 512, 8, 1024, 16, 4096, 32000),
                   lambda: llama(2, 64, 2, 64, 4, 128, 1000)),
    "llama-1b": _both(lambda: llama(4, 2048, 16, 2048, 32, 8192), lambda: llama(2, 64, 2, 64, 4, 128, 1000)),
    "vit": _both(lambda: vit(32, 12, 384, 6), lambda: vit(2, 2, 64, 2, 64)),
    "vit-large": _both(lambda: vit(64, 24, 1024, 16, autocast=True),
                       lambda: vit(2, 2, 64, 2, 64, autocast=True)),
    "resnet50": _resnet(64, _50),
    "resnet50-channels-last": _resnet(64, _50, channels_last=True),
    "resnet50-bf16": _resnet(128, _50, channels_last=True, autocast=True),
    "resnet101-bf16": _resnet(128, _101, channels_last=True, autocast=True),
    "regnet": _both(lambda: images("RegNet", 64, 224), lambda: images(
        "RegNet", 2, 64, **{**BASIC, "layer_type": "y"}, groups_width=8)),
    "unet": _both(lambda: unet(4, 256, 32), lambda: unet(2, 64, 8)),
    "lstm": _both(lambda: lstm(32, 128, 512, 10000), lambda: lstm(4, 16, 32, 100)),
    "lstm-dropout": _both(lambda: lstm(32, 128, 512, 10000, dropout=0.1),
                          lambda: lstm(4, 16, 32, 100, dropout=0.1)),
    "bert": _both(lambda: text("Bert", 8, 512, 30522), lambda: text(
        "Bert", 2, 64, 1000, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=128)),
    "t5": _both(lambda: text("T5", 8, 512, 32128, decoder_start_token_id=0), lambda: text(
        "T5", 2, 64, 1000, d_model=64, d_kv=32, d_ff=128, num_layers=2, num_heads=2,
        decoder_start_token_id=0)),
}
"""Name -> (tiny?) -> what makes it."""
