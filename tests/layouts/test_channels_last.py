"""Networks of convolutions with the channels last: the same step but for last bits, in the same layouts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import fx, nn

import rkmate
from rkmate.graph.passes.simplify import Joint
from rkmate.measure.made_up import made_up
from rkmate.measure.meter import measure_peak
from rkmate.pipeline.prepare import Traced, block, trace
from rkmate.pipeline.settings import Settings
from rkmate.pipeline.variants import CHANNELS_LAST
from rkmate.support.progress import Progress
from tests.layouts.models import BETWEEN

aten = torch.ops.aten
COUNTED = Settings(costs="analytic", layouts="channels_last")


def traced(model: nn.Module, *args: Any, settings: Settings = COUNTED) -> Traced:
    return trace(model, args, {}, settings, Progress(False))


def joint_of(here: Traced) -> Joint:
    return block(here, CHANNELS_LAST).partition.program.joint


def values(here: Traced, joint: Joint) -> dict[fx.Node, Any]:
    """What every operation returns, one after the other."""
    found: dict[fx.Node, Any] = {}
    for node in joint.graph.nodes:
        source = joint.sources.get(node)
        if source is not None:
            found[node] = here.tensors[source] if source in here.tensors else made_up(
                node.meta["val"], "grad")
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), found.__getitem__)
            with torch.no_grad():
                found[node] = node.target(*args, **kwargs)
    return found


def strides(value: Any) -> list[tuple[int, ...]]:
    """Those that say where elements are."""
    return [tuple(s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1)
            for t in (value if isinstance(value, (tuple, list)) else (value,)) if t is not None]


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output, gradients and buffers of a step from a known random state."""
    torch.manual_seed(3)
    x = x.detach().requires_grad_()
    out = model(x)
    (out * torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).reshape(out.shape)).sum().backward()
    return [out, x.grad, *(p.grad for p in model.parameters()), *model.buffers()]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, as a part of the largest number of the first."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-30))


@pytest.mark.parametrize("name", BETWEEN)
def test_what_stands_between_convolutions(name: str) -> None:
    torch.manual_seed(0)
    model, x = BETWEEN[name]().double(), torch.randn(2, 3, 16, 16, dtype=torch.float64)
    module = rkmate.wrap(copy.deepcopy(model), (x.clone().requires_grad_(),), budget=1.0, settings=COUNTED,
                         progress=False)
    assert module.plan.variant == "channels-last"
    for a, b in zip(step(model, x), step(module, x), strict=True):
        assert a.stride() == b.stride() and distance(a, b) < 1e-10


@pytest.mark.parametrize("name", BETWEEN)
def test_layouts_are_those_of_the_kernels(name: str) -> None:
    torch.manual_seed(0)
    here = traced(BETWEEN[name](), torch.randn(2, 3, 16, 16))
    joint = joint_of(here)
    for node, value in values(here, joint).items():
        if node.op == "call_function":
            assert strides(value) == strides(node.meta["val"]), node.format_node()
