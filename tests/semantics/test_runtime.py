"""What a planned step leaves alone: other threads, the default device, memory that it no longer needs."""

from __future__ import annotations

import gc
import linecache
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.function import FunctionMeta

import rkmate
from rkmate.runtime.executable import PlannedStep
from rkmate.runtime.segments import Call
from tests.semantics.steps import Heads, Tower, assert_same_gradients, planned, tightest

# -- where it runs ------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_default_device_that_is_not_the_plans(device: str) -> None:
    model, x = Tower(dropout=0.2, depth=6), torch.randn(32, 16)
    module = tightest(model, x)
    assert module.source.count("\ndef backward_") > 1
    with torch.device(device):
        assert_same_gradients(model, module, lambda run: run(x).pow(2).sum())


@pytest.mark.gpu
def test_a_backward_runs_on_the_stream_of_its_forward() -> None:
    model, x = Tower(depth=6).cuda(), torch.randn(32, 16, device="cuda")
    module = tightest(model, x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        loss = module(x).pow(2).sum()
    seen = []
    run = Call.run

    def watched(call: Call, *args: Any) -> list[Any]:
        seen.append(torch.cuda.current_stream())
        return run(call, *args)

    with mock.patch.object(Call, "run", watched):
        loss.backward()
    assert len(seen) > 1
    assert all(s == stream for s in seen)


# -- other threads ------------------------------------------------------------------------


class _Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 3


class _Custom(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = _Tripled.apply(torch.tanh(layer(x)))
        return x


def test_two_threads_that_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    from rkmate.pipeline.prepare import capture

    models, x = [_Custom(2), _Custom(3)], torch.randn(4, 8)
    inside: list[int] = []
    most = 0

    def watched(*args: Any) -> Any:
        nonlocal most
        inside.append(1)
        most = max(most, len(inside))
        time.sleep(0.2)                     # time for the other thread to come in, where it can
        try:
            return capture(*args)
        finally:
            inside.pop()

    def make(model: nn.Module) -> rkmate.Plan:
        return rkmate.plan(model, (x,), budget=1.0, settings=rkmate.Settings(costs="analytic"),
                           progress=False)

    alone = [make(m) for m in models]
    attribute = FunctionMeta.__getattribute__
    monkeypatch.setattr("rkmate.pipeline.prepare.capture", watched)
    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(make, models))
    assert most == 1
    assert FunctionMeta.__getattribute__ is attribute
    for a, b in zip(alone, together, strict=True):
        assert a.fingerprint == b.fingerprint
        assert a.schedule == b.schedule
    leaf = torch.ones(3, requires_grad=True)
    _Tripled.apply(leaf).sum().backward()
    assert torch.equal(leaf.grad, torch.full((3,), 3.0))


def test_a_step_while_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Tower(), torch.randn(8, 16)
    module = planned(model, x)
    # Torch's own flag, which is one for all threads.
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    with mock.patch.object(PlannedStep, "__call__", autospec=True, side_effect=PlannedStep.__call__) as call:
        assert_same_gradients(model, module, lambda run: run(x).sum())
    assert call.call_count == 1


def test_an_export_takes_the_original() -> None:
    model, x = Tower(), torch.randn(8, 16)
    module = planned(model, x)
    with mock.patch.object(PlannedStep, "__call__", autospec=True, side_effect=PlannedStep.__call__) as call:
        program = torch.export.export(nn.Sequential(module), (x,), strict=False)
    assert call.call_count == 0
    torch.testing.assert_close(program.module()(x), model(x))


# -- what stays in memory -----------------------------------------------------------------


def watched_input() -> tuple[torch.Tensor, weakref.ref[Any]]:
    """A tensor, and a reference that is empty once nothing holds its memory."""
    array = np.random.default_rng(0).standard_normal((4, 8), dtype=np.float32)
    return torch.from_numpy(array), weakref.ref(array)


@pytest.mark.parametrize("with_loss", [True, False])
def test_inputs_go_with_the_backward(with_loss: bool) -> None:
    module = planned(Heads(dropout=0.2, loss=with_loss), torch.randn(4, 8))
    x, memory = watched_input()
    out = module(x)
    loss = out["loss"] if with_loss else out["left"].sum() + out["right"].sum()
    loss.backward()
    del x, out
    assert loss.requires_grad
    assert memory() is None


def test_inputs_go_with_a_backward_that_was_not_expected() -> None:
    module = planned(Heads(), torch.randn(4, 8))
    x, memory = watched_input()
    loss = module(x)["left"].sum()
    with pytest.warns(rkmate.RkmateWarning, match="a second time"):
        loss.backward()
    del x
    assert memory() is None


def test_a_second_backward_for_another_output() -> None:
    model, x = Heads(dropout=0.2, loss=True), torch.randn(4, 8)
    module = planned(model, x)

    def twice(run: Any) -> torch.Tensor:
        out = run(x)
        out["loss"].backward(retain_graph=True)
        return out["right"].sum()  # type: ignore[no-any-return]

    with pytest.warns(rkmate.RkmateWarning, match="a second time"):
        assert_same_gradients(model, module, twice, close=True)


def test_inputs_go_with_the_last_of_several_backwards() -> None:
    module = planned(Heads(loss=True), torch.randn(4, 8))
    x, memory = watched_input()
    out = module(x)
    out["loss"].backward(retain_graph=True)
    right = out["right"].sum()
    with pytest.warns(rkmate.RkmateWarning, match="a second time"):
        right.backward()
    del x, out
    assert memory() is None


def test_a_second_backward_through_a_graph_that_was_not_kept() -> None:
    model, x = Heads(loss=True), torch.randn(4, 8)
    out = planned(model, x)(x)
    out["loss"].backward()
    with pytest.raises(rkmate.BackwardError, match="retain_graph=True: the forward then runs"):
        out["right"].sum().backward()


def test_the_source_goes_with_its_plan() -> None:
    before = set(linecache.cache)
    module = planned(Tower(), torch.randn(8, 16))
    made = {name for name in set(linecache.cache) - before if name.startswith("<rkmate")}
    assert len(made) == 1
    del module
    gc.collect()
    assert not made & set(linecache.cache)


def test_an_error_as_the_backward_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = planned(Heads(), torch.randn(4, 8)), torch.randn(4, 8)
    out = module(x)

    def fails(*args: Any) -> Any:
        raise ValueError("no second run")

    monkeypatch.setattr(PlannedStep, "again", fails)
    with pytest.raises(ValueError, match="no second run"), pytest.warns(rkmate.RkmateWarning):
        out["left"].sum().backward(retain_graph=True)
    with pytest.raises(rkmate.BackwardError, match="through a backward already"):
        (out["left"].sum() + out["right"].sum()).backward()
