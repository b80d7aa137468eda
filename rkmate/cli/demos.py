"""Small models to try the package on, without files: ``rkmate plan gpt2 --budget 50%``."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rkmate.errors import MissingExtra

if TYPE_CHECKING:
    from rkmate.cli.demo_models import Sample


@dataclass(frozen=True)
class Demo:
    """A built-in model."""

    make: str
    """Its factory in demo_models.py."""
    about: str
    needs: str | None = None
    """Package that brings the model."""

    @property
    def installed(self) -> bool:
        """Whether it can be made here."""
        return self.needs is None or importlib.util.find_spec(self.needs) is not None


DEMOS: dict[str, Demo] = {
    "mlp": Demo("mlp", "eight GELU layers, batch of 256"),
    "gpt2": Demo("gpt2", "GPT-2 of four layers, batch of 4, 128 tokens", "transformers"),
    "resnet": Demo("resnet", "ResNet-18, batch of 4, 96 pixels", "transformers"),
    "unet": Demo("unet", "U-Net of three scales, batch of 2, 96 pixels"),
}


def make_demo(name: str) -> Sample:
    """A built-in model with sample arguments. Raises `MissingExtra`."""
    demo = DEMOS[name]
    if not demo.installed:
        raise MissingExtra(f"the demo model {name!r} needs {demo.needs}: "
                           'pip install "rkmate[examples]"')
    import torch

    from rkmate.cli import demo_models

    torch.manual_seed(0)
    made: Sample = getattr(demo_models, demo.make)()
    return made
