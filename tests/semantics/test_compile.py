"""torch.compile in its three places: as a front end, around, and inside."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rkmate
import rkmate.compile
from rkmate import device as devices
from rkmate.ir.link import Link
from rkmate.runtime.executable import PlannedStep
from tests.copying import BUFFERS, LateEngine, use
from tests.semantics.steps import Tower, assert_same_gradients, gradients, planned

pytestmark = [
    # Dynamo's own warnings, while it loads and traces.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]


def _compiled(model: nn.Module, budget: float = 0.9,
              backend: Any = rkmate.compile.backend) -> nn.Module:
    return torch.compile(model, backend=backend, dynamic=False,
                         options={"budget": budget, "settings": rkmate.Settings(costs="analytic")})


def test_as_a_backend() -> None:
    torch.manual_seed(0)
    model, x = Tower(dropout=0.2, depth=6), torch.randn(64, 16)
    run = _compiled(model)
    assert_same_gradients(model, run, lambda run: run(x).pow(2).sum())
    with torch.no_grad():
        assert not run(x).requires_grad


def test_as_a_backend_by_its_name() -> None:
    assert "rkmate" in {e.name for e in entry_points(group="torch_dynamo_backends")}
    torch.manual_seed(0)
    model, x = Tower(depth=6), torch.randn(64, 16)
    run = _compiled(model, backend="rkmate")
    assert_same_gradients(model, run, lambda run: run(x).pow(2).sum())


def test_custom_functions_through_the_backend() -> None:
    class Reversed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return -3 * grad

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Reversed.apply(super().forward(x)).tanh()  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, x = Model(8, 8), torch.randn(4, 8)
    assert_same_gradients(model, _compiled(model, 1.0), lambda run: run(x).pow(2).sum())


def test_a_compiled_function_around_a_planned_module() -> None:
    model, x = Tower(), torch.randn(8, 16)
    module = planned(model, x)
    run = torch.compile(module, backend="eager")
    assert_same_gradients(model, run, lambda run: run(x).sum())
    loss = torch.compile(lambda x: module(x).sum(), backend="eager")
    with mock.patch.object(PlannedStep, "__call__", autospec=True, side_effect=PlannedStep.__call__) as call:
        loss(x).backward()
    assert call.call_count == 1                # as planned
    assert model.layers[0].weight.grad is not None


def test_the_backend_plans_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[rkmate.PlannedModule] = []
    plain = rkmate.wrap

    def wrap(*args: Any, **kwargs: Any) -> rkmate.PlannedModule:
        made.append(plain(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(importlib.import_module("rkmate.compile"), "wrap", wrap)
    model, x = Tower(depth=6), torch.randn(64, 16)
    _compiled(model, 0.8)(x).sum().backward()
    assert len(made) == 1
    plan = made[0].plan
    assert plan.peak_bytes <= plan.budget_bytes == int(0.8 * plan.baseline_peak_bytes)


class _Broken(Tower):
    """A tower in which Dynamo gives up half-way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = len(self.layers) // 2
        for layer in self.layers[:half]:
            x = layer(x)
        torch._dynamo.graph_break()
        for layer in self.layers[half:]:
            x = layer(x)
        return x


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=(tmp_path / "meeting").as_uri(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["a break", "buckets"])
def test_graphs_of_one_step_share_the_budget(kind: str, request: pytest.FixtureRequest) -> None:
    torch.manual_seed(0)
    width = 512 if kind == "buckets" else 128
    model: nn.Module = (Tower if kind == "buckets" else _Broken)(width=width, depth=6)
    x, run = torch.randn(2 * width, width), model
    if kind == "buckets":
        request.getfixturevalue("one_rank")
        run = DistributedDataParallel(model, bucket_cap_mb=3)
    peak = devices.of(x).measure_peak(lambda: gradients(model, model, lambda run: run(x).pow(2).sum())).peak
    budget = int(0.7 * peak)
    compiled = torch.compile(run, backend=rkmate.compile.backend, dynamic=False, options={
        "budget": budget, "settings": rkmate.Settings(costs="analytic")})
    peaks = []
    for _ in range(4):
        assert_same_gradients(model, compiled, lambda run: run(x).pow(2).sum())
        peaks.append(devices.of(x).measure_peak(
            lambda: gradients(model, compiled, lambda run: run(x).pow(2).sum())).peak)
    assert max(peaks[1:]) <= budget < peak
    if kind == "buckets":
        torch._dynamo.reset()
        few = torch.compile(run, backend=rkmate.compile.backend, dynamic=False, options={
            "budget": 0.3, "settings": rkmate.Settings(costs="analytic")})
        few(x).pow(2).sum().backward()
        with pytest.raises(rkmate.InfeasibleBudget, match="several graphs, and no plans of them") as caught:
            few(x)
        assert caught.value.minimum_bytes < budget


def test_graphs_of_several_calls_share_the_budget() -> None:
    torch.manual_seed(0)
    model, x = _Broken(width=128, depth=6), torch.randn(512, 128)

    def loss(run: Any) -> Any:
        return run(x).pow(2).sum() + run(x.neg()).pow(2).sum()

    peak = devices.of(x).measure_peak(lambda: gradients(model, model, loss)).peak
    budget = int(0.6 * peak)
    compiled = torch.compile(model, backend=rkmate.compile.backend, dynamic=False, options={
        "budget": budget, "calls": 2, "settings": rkmate.Settings(costs="analytic")})
    peaks = []
    for _ in range(4):
        assert_same_gradients(model, compiled, loss)
        peaks.append(devices.of(x).measure_peak(lambda: gradients(model, compiled, loss)).peak)
    assert max(peaks[1:]) <= budget


def test_graphs_of_one_step_that_send_data_away_share_the_budget(monkeypatch: pytest.MonkeyPatch,
                                                                  tmp_path: Path) -> None:
    engine = use(monkeypatch, LateEngine())
    fast = Link(1e12, 1e12, 0.0, BUFFERS, None, str(tmp_path))
    monkeypatch.setattr("rkmate.offload.target.stated_link", lambda *_: fast)
    torch.manual_seed(0)
    model, x = _Broken(width=256, depth=8), torch.randn(1024, 256)
    peak = devices.of(x).measure_peak(lambda: gradients(model, model, lambda run: run(x).pow(2).sum())).peak
    budget = int(0.6 * peak)
    compiled = torch.compile(model, backend=rkmate.compile.backend, dynamic=False, options={
        "budget": budget, "offload": tmp_path, "settings": rkmate.Settings(costs="analytic")})
    for _ in range(3):
        assert_same_gradients(model, compiled, lambda run: run(x).pow(2).sum())
    assert devices.of(x).measure_peak(
        lambda: gradients(model, compiled, lambda run: run(x).pow(2).sum())).peak <= budget
    assert engine.opened and engine.words.count("out") > 2


def test_graphs_that_cannot_share_the_budget_say_so(tmp_path: Path) -> None:
    """Once, in the first step; a single graph says nothing."""
    torch.manual_seed(0)
    x = torch.randn(64, 16)

    def step(model: nn.Module) -> list[str]:
        compiled = torch.compile(model, backend=rkmate.compile.backend, dynamic=False, options={
            "budget": 0.9, "offload": rkmate.Offload(tmp_path, "1GiB"),
            "settings": rkmate.Settings(costs="analytic")})
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            for _ in range(2):
                compiled(x).sum().backward()
        return [str(w.message) for w in heard if issubclass(w.category, rkmate.RkmateWarning)]

    (told,) = step(_Broken(depth=4))
    assert "with a limit of offload each of them has the whole budget" in told
    assert not step(Tower(depth=4))


HOW = r"\(Module.compile or torch.compile\): planned steps run"


def test_wrapping_a_compiled_module() -> None:
    model, x = Tower(depth=3), torch.randn(8, 16)
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(rkmate.ArgumentError, match=r"was compiled .*plan the module itself"):
        rkmate.apply(compiled, budget=1.0)
    assert_same_gradients(model, compiled, lambda run: run(x).pow(2).sum())
    for kind, name in ((compiled, "Tower"), (nn.Sequential(compiled), "Sequential.0")):
        with pytest.warns(rkmate.RkmateWarning, match=rf"^{name} was compiled {HOW}"):
            module = planned(kind, x)
        assert_same_gradients(kind, module, lambda run: run(x).pow(2).sum())


def test_modules_that_were_compiled_in_place() -> None:
    def loss(run: Any) -> Any:
        return run(x).pow(2).sum()

    def never(graph: Any, examples: Any) -> Any:
        raise AssertionError

    model, x = Tower(depth=3), torch.randn(8, 16)
    expected = gradients(model, model, loss)
    model.layers[1].compile(backend=never)
    with pytest.warns(rkmate.RkmateWarning, match=rf"Tower.layers.1 was compiled {HOW}"):
        module = planned(model, x)
    torch.testing.assert_close(gradients(model, module, loss), expected, rtol=0, atol=0)
    model.compile(backend=never)
    call = model._compiled_call_impl
    with pytest.warns(rkmate.RkmateWarning, match=f"Tower was compiled {HOW}"):
        rkmate.apply(model, budget=1.0, progress=False, settings=rkmate.Settings(costs="analytic"))
    with pytest.warns(rkmate.RkmateWarning, match=rf"Tower.layers.1 was compiled {HOW}"):
        torch.testing.assert_close(gradients(model, model, loss), expected, rtol=0, atol=0)
    rkmate.remove(model)
    assert model._compiled_call_impl is call


def test_a_module_that_is_compiled_in_place_after_its_budget_was_applied() -> None:
    model, x = Tower(depth=3), torch.randn(8, 16)
    expected = gradients(model, model, lambda run: run(x).pow(2).sum())
    rkmate.apply(model, budget=0.9, progress=False, settings=rkmate.Settings(costs="analytic"))
    model.compile(backend="eager")
    with pytest.warns(rkmate.RkmateWarning, match=f"Tower was compiled {HOW}"):
        found = gradients(model, model, lambda run: run(x).pow(2).sum())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    shown = rkmate.applied(model)
    assert shown is not None and shown.has_plan


def _refused(message: str, **options: Any) -> bool:
    with pytest.raises(rkmate.ArgumentError, match=message):
        run = rkmate.compile.backend(torch.fx.symbolic_trace(Tower()), [], options={"budget": 0.9, **options})
        run(torch.randn(2, 16, requires_grad=True))
    return True


def test_the_backend_sends_data_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = use(monkeypatch, LateEngine())
    fast = Link(1e12, 1e12, 0.0, BUFFERS, None, str(tmp_path))
    monkeypatch.setattr("rkmate.offload.target.stated_link", lambda *_: fast)
    torch.manual_seed(0)
    model, x = Tower(depth=6), torch.randn(256, 16)
    run = torch.compile(model, backend=rkmate.compile.backend, dynamic=False, options={
        "budget": 0.5, "settings": rkmate.Settings(costs="analytic"),
        "offload": rkmate.Offload(tmp_path, "1GiB")})
    assert_same_gradients(model, run, lambda run: run(x).pow(2).sum())
    assert engine.opened and engine.words.count("out") > 2


def test_options_are_checked() -> None:
    graph = torch.fx.symbolic_trace(Tower())
    with pytest.raises(rkmate.ArgumentError, match="needs the option budget"):
        rkmate.compile.backend(graph, [torch.randn(2, 16)])
    with pytest.raises(rkmate.UnknownOption, match="takes no 'speed': it takes budget, calls, comp"):
        rkmate.compile.backend(graph, [torch.randn(2, 16)], options={"budget": 1.0, "speed": 1})
    assert _refused("offload is 3; it should be a folder", offload=3)
    recording = rkmate.Settings(run=rkmate.RunSettings(cuda_graph=True))
    assert _refused(r"RunSettings\(cuda_graph=...\): only rkmate.wrap follows this", settings=recording)
    assert _refused("where a model on the CPU is anyway", offload="host")
    with pytest.raises(rkmate.ArgumentError, match="dynamic=False"):
        rkmate.compile.backend(graph, [3], options={"budget": 1.0})


def test_a_smaller_last_batch_has_the_bytes_of_those_before() -> None:
    torch.manual_seed(0)
    model, asked = Tower(depth=6), {"budget": 0.5, "settings": rkmate.Settings(costs="analytic")}
    run = torch.compile(model, backend=rkmate.compile.backend, dynamic=False, options=asked)
    for size in (256, 4):
        x = torch.randn(size, 16)
        assert_same_gradients(model, run, lambda run, x=x: run(x).pow(2).sum())
    with pytest.raises(rkmate.InfeasibleBudget):        # which 4 alone do not have
        rkmate.plan(model, (torch.randn(4, 16),), progress=False, **asked)
