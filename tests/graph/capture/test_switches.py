"""A model that a value stops is told what to switch, where that is known."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import rkmate

X = torch.randn(4, 8)


class _Forward(nn.Module):
    """A linear layer, and what a function makes of its result."""

    def __init__(self, then: Callable[[Any, torch.Tensor], Any], **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.then = then
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> Any:
        return self.then(self, self.layer(x))


def _copied(self: Any, h: torch.Tensor) -> torch.Tensor:
    dropout_probability = torch.rand([])
    return h if dropout_probability < self.layerdrop else h.relu()


def _read(self: Any, h: torch.Tensor) -> torch.Tensor:
    skip_the_layer = self.training and torch.rand([]) < self.config.layerdrop
    if not skip_the_layer:
        h = h.relu()
    return h


def _drawn(self: Any, h: torch.Tensor) -> torch.Tensor:
    return h if torch.rand(()) < 0.5 else h.relu()


def _masked(self: Any, h: torch.Tensor) -> torch.Tensor:
    h = h.clone()
    h[torch.rand(4) < 0.5] = self.layer.bias
    return h


def _to_numpy(self: Any, h: torch.Tensor) -> torch.Tensor:
    return h * float(h.detach().numpy().mean())


def _nested(self: Any, h: torch.Tensor) -> torch.Tensor:
    rows = torch.nested.nested_tensor([*h], layout=torch.jagged)
    return self.layer(rows).values()


def _branch(self: Any, h: torch.Tensor) -> torch.Tensor:
    return h * 2 if h.sum() > 0 else h


def _fake_quantize() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.ao.quantization import FakeQuantize
    return nn.Sequential(nn.Linear(8, 8), FakeQuantize())


CONFIG = SimpleNamespace(layerdrop=0.1)
SPANS = SimpleNamespace(apply_spec_augment=True, mask_time_prob=0.1)
STOPPED: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "a copied probability": (r"set 0\.layerdrop = 0 on", lambda: nn.Sequential(_Forward(_copied,
                                                                                        layerdrop=0.1))),
    "a configured probability": (r"set config\.layerdrop = 0 on", lambda: _Forward(_read, config=CONFIG)),
    "a random branch": ("drawn mask instead of a branch", lambda: _Forward(_drawn)),
    "masked spans": (r"config\.apply_spec_augment = False", lambda: _Forward(_masked, config=SPANS)),
    "fake quantization": ("1 is a FakeQuantize.*FusedMovingAvgObsFakeQuantize", _fake_quantize),
    "numpy": ("compute it with torch", lambda: _Forward(_to_numpy)),
    "nested tensors": (r"pad instead \(torch", lambda: _Forward(_nested)),
    "a branch": (r"rkmate\.dtr runs such models\. Or write it without the value", lambda: _Forward(_branch)),
}


@pytest.mark.parametrize("name", STOPPED)
def test_the_way_out_is_named(name: str) -> None:
    message, make = STOPPED[name]
    with pytest.raises(rkmate.CaptureError, match=message):
        rkmate.plan(make(), (X,), budget=1.0, settings=rkmate.Settings(costs="analytic"))


def test_with_the_switch_a_plan_is_made() -> None:
    for model in (_Forward(lambda self, h: h.relu() if self.layerdrop == 0 else _copied(self, h),
                           layerdrop=0), _fused()):
        assert rkmate.plan(model, (X,), budget=1.0, settings=rkmate.Settings(costs="analytic")).peak_bytes > 0


def _fused() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.ao.quantization import FusedMovingAvgObsFakeQuantize
    return nn.Sequential(nn.Linear(8, 8), FusedMovingAvgObsFakeQuantize())


def test_a_scripted_submodule_is_named() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Linear(8, 8)))
    with pytest.raises(rkmate.CaptureError, match=r"Sequential\.1 is a TorchScript module"):
        rkmate.plan(model, (X,), budget=1.0, settings=rkmate.Settings(costs="analytic"))
