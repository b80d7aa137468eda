"""Convolutions of one pixel each, as products of matrices."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate.pipeline.prepare import block, trace
from rkmate.pipeline.settings import Settings
from rkmate.pipeline.variants import CHANNELS_LAST, PLAIN, Variant
from rkmate.support.progress import Progress
from tests.equality import measured_peak
from tests.graph.passes.test_channels_last import distance, step
from tests.models import Sample
from tests.threads import threads

aten = torch.ops.aten
COUNTED = Settings(costs="analytic", layouts="channels_last")


def network(dims: int = 2, bias: bool = True, **how: Any) -> nn.Module:
    """A convolution, and one of a pixel each."""
    kind = nn.Conv2d if dims == 2 else nn.Conv3d
    pixel = kind(8, 16, **{"kernel_size": 1, "bias": bias, **how})
    return nn.Sequential(kind(3, 8, 3, padding=1), nn.ReLU(), pixel, nn.ReLU(), kind(16, 4, 3))


def operations(model: nn.Module, x: torch.Tensor, variant: Variant = CHANNELS_LAST) -> list[Any]:
    here = trace(model, (x,), {}, COUNTED, Progress(False))
    return [n.target for n in block(here, variant).partition.program.joint.graph.nodes]


def images(dims: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 3, *[12] * dims, dtype=dtype)


@pytest.fixture
def two_threads() -> Iterator[None]:
    with threads(2):
        yield


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_they_are_products(two_threads: None, dims: int, bias: bool) -> None:
    """With one thread, torch's kernel for volumes returns them with the channels first."""
    found = operations(network(dims, bias), images(dims))
    assert found.count(aten.convolution.default) == found.count(aten.convolution_backward.default) == 2
    assert found.count(aten.addmm.default) == bias and found.count(aten.mm.default) == 3 - bias
    assert operations(network(dims, bias), images(dims), PLAIN).count(aten.convolution.default) == 3


@pytest.mark.parametrize("how", [{"stride": 2}, {"padding": 1}, {"groups": 2}, {"kernel_size": (1, 3)}])
def test_others_stay(how: dict[str, Any]) -> None:
    found = operations(network(**how), images())
    assert found.count(aten.convolution.default) == found.count(aten.convolution_backward.default) == 3


def test_a_transposed_one_stays() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 4, 1))
    assert aten.mm.default not in operations(model, images())


def test_half_precision_stays() -> None:
    assert aten.mm.default not in operations(network().bfloat16(), images(dtype=torch.bfloat16))


class Twice(nn.Module):
    """One weight for two convolutions, one of them frozen in its bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.pixel = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1)
        assert self.pixel.bias is not None
        self.pixel.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.pixel(torch.tanh(self.pixel(torch.tanh(self.first(x)))))
        return y


@pytest.mark.parametrize("budget", [1.0, 0.9])
@pytest.mark.parametrize("which", ["plain", "no bias", "volumes", "frozen weight", "twice", "first"])
def test_the_step_is_the_same(which: str, budget: float) -> None:
    torch.manual_seed(0)
    dims = 3 if which == "volumes" else 2
    model = Twice() if which == "twice" else nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3)) \
        if which == "first" else network(dims, which != "no bias")
    if which == "frozen weight":
        next(p for p in model.parameters() if p.shape[2:] == (1, 1)).requires_grad_(False)
    model, x = model.double(), images(dims, torch.float64)
    module = rkmate.wrap(copy.deepcopy(model), (x.clone().requires_grad_(),), budget=budget, settings=COUNTED,
                         progress=False)
    for a, b in zip(step(model, x), step(module, x), strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.stride() == b.stride() and distance(a, b) < 1e-10)


@pytest.mark.parametrize("gradients", ["returned", "in_place"])
def test_gradients_and_memory(gradients: Any) -> None:
    torch.manual_seed(0)
    model, x = network(), torch.randn(4, 3, 32, 32)
    module = rkmate.wrap(copy.deepcopy(model), (x,), budget=0.9, progress=False, settings=Settings(
        layouts="channels_last", gradients=gradients))
    for _ in range(2):
        module(x).square().mean().backward()
        model(x).square().mean().backward()
    for a, b in zip(module.parameters(), model.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert a.grad.stride() == b.grad.stride() and distance(b.grad, a.grad) < 1e-4
    assert measured_peak(module, Sample(module, (x,), {}, lambda y: y.square().mean())) \
        <= module.plan.peak_bytes
