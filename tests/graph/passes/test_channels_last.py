"""Networks of convolutions with the channels last: the same step but for last bits, in the same layouts."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.utils import _pytree as pytree

import rkmate
from rkmate.budget import Budget
from rkmate.graph.blocks.partition import Partition
from rkmate.graph.passes.joint import Joint
from rkmate.ilp.settings import OptionSettings
from rkmate.measure.analytic import Costs, analytic_costs
from rkmate.measure.made_up import made_up
from rkmate.measure.step import measure_peak
from rkmate.pipeline import prepare
from rkmate.pipeline.following import follow
from rkmate.pipeline.prepare import Traced, block, trace, with_compiler
from rkmate.pipeline.search import make_curve, make_plan
from rkmate.pipeline.settings import Settings
from rkmate.pipeline.variants import CHANNELS_LAST, PLAIN, first, others
from rkmate.planners.settings import PlannerSettings
from rkmate.support.progress import Progress
from tests.equality import trace_step
from tests.graph.passes.convolutions import BETWEEN, Network
from tests.models import Sample, convolutions, vision

aten = torch.ops.aten
OPTIONS = OptionSettings(grid=(3, 3), time_limit=0.2, block_limit=1.0)
PLANNER = PlannerSettings(first_seconds=0, save_set_seconds=1e4, smallest_seconds=0)
COUNTED = Settings(costs="analytic", layouts="channels_last")
AUTO = Settings(costs="analytic", layouts="auto", options=OPTIONS, planner=PLANNER)
KINDS = ("conv", "deep", "up", "pool", "add", "cat", "relu", "rows")
QUICK = ("attention", "dropout")
ALL = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in BETWEEN]


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


def chain() -> nn.Module:
    """Three convolutions with batch norm, and one more."""
    layers: list[nn.Module] = []
    for channels in (3, 8, 8):
        layers += [nn.Conv2d(channels, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(8, 4, 3))


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, as a part of the largest number of the first."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-30))


@pytest.mark.parametrize("name", ALL)
def test_what_stands_between_convolutions(name: str) -> None:
    torch.manual_seed(0)
    model, x = BETWEEN[name]().double(), torch.randn(2, 3, 16, 16, dtype=torch.float64)
    module = rkmate.wrap(copy.deepcopy(model), (x.clone().requires_grad_(),), budget=1.0, settings=COUNTED,
                         progress=False)
    assert module.plan.variant == "channels-last"
    for a, b in zip(step(model, x), step(module, x), strict=True):
        assert a.stride() == b.stride() and distance(a, b) < 1e-10


@pytest.mark.parametrize("name", ALL)
def test_layouts_are_those_of_the_kernels(name: str) -> None:
    torch.manual_seed(0)
    here = traced(BETWEEN[name](), torch.randn(2, 3, 16, 16))
    joint = joint_of(here)
    for node, value in values(here, joint).items():
        if node.op == "call_function":
            assert strides(value) == strides(node.meta["val"]), node.format_node()


@pytest.mark.slow
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("make", [convolutions.densenet, convolutions.unet, convolutions.batch_norm_cnn,
                                  vision.resnet, vision.regnet])
def test_networks_in_double_precision(make: Callable[[], Sample], compile: bool) -> None:
    sample = make()
    double = Sample(sample.model.double(), *pytree.tree_map(
        lambda t: t.double() if t.is_floating_point() else t, (sample.args, sample.kwargs)), sample.loss)
    module = rkmate.wrap(copy.deepcopy(double.model), double.args, double.kwargs, budget=1.0, progress=False,
                         compile=compile, settings=COUNTED)
    expected, found = trace_step(double.model, double, 1), trace_step(module, double, 1)
    for name, grad in expected.gradients.items():
        other = found.gradients[name]
        assert (grad is None) == (other is None)
        if grad is not None and other is not None:
            assert grad.stride() == other.stride()
            assert float((grad - other).abs().max()) < 1e-10 * max(1e-3, float(grad.abs().max()))


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 7), st.integers(0, 7)), min_size=3,
                max_size=12), st.booleans())
@settings(max_examples=15, deadline=None)
def test_random_networks(program: list[tuple[str, int, int]], first: bool) -> None:
    torch.manual_seed(0)
    model, x = Network(program, first).double(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    module = rkmate.wrap(copy.deepcopy(model), (x.clone().requires_grad_(),), budget=1.0, settings=COUNTED,
                         progress=False)
    for a, b in zip(step(model, x), step(module, x), strict=True):
        assert (a is None) == (b is None)      # an operation whose image nobody reads
        if a is not None:
            assert a.stride() == b.stride()    # a bias before a softmax has a gradient of zero
            assert float((a - b).detach().abs().max()) < 1e-10 * max(1e-3, float(a.detach().abs().max()))


def test_budgets_hold_and_rounding_is_no_worse() -> None:
    torch.manual_seed(0)
    model, x = chain(), torch.randn(2, 3, 32, 32)
    module = rkmate.wrap(copy.deepcopy(model), (x,), budget=0.7, progress=False,
                         settings=Settings(layouts="channels_last", options=OPTIONS, planner=PLANNER))
    exact, ours = step(copy.deepcopy(model).double(), x.double())[2:], step(module, x)[2:]
    form = torch.channels_last
    eager = step(copy.deepcopy(model).to(memory_format=form), x.to(memory_format=form))[2:]
    largest = max(distance(a, b) for a, b in zip(exact, eager, strict=True))
    assert max(distance(a, b) for a, b in zip(exact, ours, strict=True)) <= 2 * largest
    module.zero_grad()
    step(module, x)
    peak = measure_peak(lambda: module(x).mean().backward()).peak
    assert module.plan.schedule.recomputed() and peak <= module.plan.budget_bytes


def test_gradients_in_place() -> None:
    torch.manual_seed(0)
    model, x = BETWEEN["transposed"]().double(), torch.randn(2, 3, 16, 16, dtype=torch.float64)
    module = rkmate.wrap(copy.deepcopy(model), (x.clone().requires_grad_(),), budget=1.0,
                         settings=replace(COUNTED, gradients="in_place"), progress=False)
    for a, b in zip(step(model, x), step(module, x), strict=True):
        assert a.stride() == b.stride() and distance(a, b) < 1e-10


def test_images_that_are_channels_last_have_nothing_to_gain() -> None:
    model = BETWEEN["grouped"]().to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last)
    assert joint_of(traced(model, x)).concerned["channels-last"] == ()


def test_small_images_beside_large_weights_keep_their_layout() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.MaxPool2d(4),
                          nn.Conv2d(8, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1))
    joint = joint_of(traced(model, torch.randn(1, 3, 18, 18)))
    assert joint.concerned["channels-last"] == ("0.weight",)
    found = [n.meta["val"].is_contiguous() for n in joint.graph.nodes if n.target is aten.convolution.default]
    assert found == [False, True, True]


# -- when it is taken ---------------------------------------------------------------------


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Counted costs, and how much longer the channels last take."""
    factor = {"last": 0.5}

    def costs(parts: Partition) -> Costs:
        turned = any(n.kwargs.get("memory_format") is torch.channels_last
                     for n in parts.program.joint.graph.nodes)
        times = factor["last"] if turned else 1.0
        return {i: c._replace(time=c.time * times) for i, c in analytic_costs(parts).items()}

    monkeypatch.setattr(prepare, "analytic_costs", costs)
    return factor


@functools.cache
def network() -> Traced:
    torch.manual_seed(0)
    return traced(chain(), torch.randn(2, 3, 32, 32), settings=AUTO)


def test_the_faster_layout_is_taken_at_any_budget(speed: dict[str, float]) -> None:
    plan = make_plan(network(), Budget(fraction=1.0), "rockmate").plan
    assert plan.variant == "channels-last" and plan.peak_bytes <= plan.budget_bytes
    assert "have their channels last" in plan.note and "faster than the fastest schedule" in plan.note
    assert CHANNELS_LAST in follow(network(), plan).prepared.blocked.variant.rows
    curve = make_curve(network(), [Budget(fraction=1.0), Budget(fraction=1.5)], "rockmate")
    assert [p.variant for p in curve] == ["channels-last"] * 2
    speed["last"] = 0.995                                   # bits are worth more
    assert make_plan(network(), Budget(fraction=1.5), "rockmate").plan.variant == "plain"


def test_new_batches_take_the_layout_too(speed: dict[str, float]) -> None:
    torch.manual_seed(0)
    model = chain().double()
    module = rkmate.wrap(copy.deepcopy(model), (torch.randn(2, 3, 16, 16).double().requires_grad_(),),
                         budget=1.0, settings=AUTO, progress=False)
    for batch in (3, 4):
        x = torch.randn(batch, 3, 16, 16, dtype=torch.float64)
        for a, b in zip(step(model, x), step(module, x), strict=True):
            assert a.stride() == b.stride() and distance(a, b) < 1e-10
        assert module.plan.variant == "channels-last"


def test_settings_say_whether() -> None:
    found = {"channels-last": ("weight",)}
    assert first(Settings()) is PLAIN and others(Settings(), found) == ()
    auto, always = Settings(layouts="auto"), Settings(layouts="channels_last")
    assert others(auto, found) == (CHANNELS_LAST,) and others(auto, {}) == ()
    assert first(always) is CHANNELS_LAST and others(always, found) == ()
    head = others(auto, {**found, "chunked-loss": ("head",)})
    assert [v.name for v in head] == ["chunked-loss", "channels-last", "chunked-loss+channels-last"]
    assert [v.saves_memory for v in head] == [True, False, True]
    warning = head[-1].warning("because", "not", {"chunked-loss": ("head",)})
    assert "head" in warning and 'Settings(chunked_loss="never") not' in warning
    with pytest.raises(rkmate.ArgumentError, match="layouts is 'last'"):
        Settings(layouts="last")  # type: ignore[arg-type]


# -- together with compiled groups --------------------------------------------------------

def test_compiled_groups_bring_it_along_unless_the_settings_say_otherwise() -> None:
    cpu, place = torch.device("cpu"), {CHANNELS_LAST.name: ("conv",)}

    def compiled(**settings: Any) -> Settings:
        return with_compiler(Settings(costs="analytic", chunked_loss="never", **settings), cpu)

    assert compiled(compile=True).layouts == "auto"
    assert others(compiled(compile=True), place) == (CHANNELS_LAST,)
    for how in ({}, {"compile": True, "layouts": "keep"}, {"compile": True, "layouts": None}):
        assert others(compiled(**how), place) == () and first(compiled(**how)) is PLAIN
    assert Settings(layouts=None).layouts == "keep"
    assert first(compiled(compile=True, layouts="channels_last")) is CHANNELS_LAST
    assert compiled(layouts="auto").layouts == "auto"


def test_auto_brings_it_along_where_a_compiler_works(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = Settings(compile="auto")
    assert with_compiler(auto, torch.device("cpu")).layouts == "auto"
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.warns(rkmate.RkmateWarning, match="nothing is compiled"):
        assert others(with_compiler(auto, torch.device("cpu")), {CHANNELS_LAST.name: ("conv",)}) == ()


def test_a_compiled_network_of_convolutions_is_planned_as_with_both_switches() -> None:
    def plan(**layouts: Any) -> rkmate.Plan:
        sample = convolutions.unet()
        return rkmate.plan(sample.model, sample.args, sample.kwargs, budget=0.8, compile=True, progress=False,
                           settings=replace(AUTO, chunked_loss="never", **layouts))

    both, one = plan(layouts="auto"), plan(layouts=Settings().layouts)
    assert (one.variant, one.schedule, one.fused) == (both.variant, both.schedule, both.fused)
