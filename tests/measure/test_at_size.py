"""Measuring a large model takes a share of its step, and no more memory than the budget."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import rkmate
from rkmate.device.cpu import Cpu, EventsMeter
from rkmate.measure import costs, runs
from rkmate.measure.analytic import bytes_alone, hoisted, least_bytes
from rkmate.measure.remembered import CostMemory, form_of
from rkmate.measure.settings import MeasureSettings
from rkmate.measure.step import measure_peak
from rkmate.pipeline import prepare as pipeline
from rkmate.pipeline.prepare import Blocked, Traced, block, trace, with_operation_costs
from rkmate.pipeline.settings import Settings
from rkmate.pipeline.variants import CHUNKED_LOSS
from rkmate.support.progress import Progress
from tests.models import BANK

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> Iterator[None]:
    with mock.patch.object(pipeline, "cost_memory", side_effect=functools.partial(CostMemory, None)):
        yield


@pytest.fixture
def unmetered() -> Iterator[None]:
    """The meter that measuring uses and a test's own cannot run at once."""
    meter = mock.create_autospec(EventsMeter, instance=True)
    meter.running.side_effect, meter.part.side_effect = nullcontext, lambda number: nullcontext()
    meter.peaks.return_value = {}
    with mock.patch.object(Cpu, "parts_meter", return_value=meter):
        yield


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


def _stack(layers: int) -> Blocked:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(layers)))
    return block(trace(model, (torch.randn(8, 16),), {}, Settings(), Progress(False)))


def _products(blocked: Blocked, **settings: Any) -> int:
    """How many matrices are multiplied to measure a graph."""
    traced = blocked.traced
    with _Counting() as counting:
        costs.measure(blocked.partition, blocked.texts, traced.tensors, CostMemory(None),
                      MeasureSettings(**settings))
    return counting.calls[aten.mm.default] + counting.calls[aten.addmm.default]


def test_what_lies_between_new_blocks_does_not_run() -> None:
    assert _products(_stack(12)) == _products(_stack(6))


def test_what_takes_long_runs_once_or_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run for temporary memory seems to take ten seconds."""
    blocked = _stack(6)
    few = _products(blocked, passes=1, repeats=1)
    often = _products(blocked, least_seconds=1e9)
    clock = iter(range(10**6))
    monkeypatch.setattr(runs.time, "perf_counter", lambda: next(clock) * 10.0)
    assert _products(blocked, share=0.0) <= few < often


def test_equal_operations_of_different_blocks_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block and the last one differ from the others, and multiply matrices of the same form."""
    blocked = _stack(6)
    every = _products(blocked, passes=1, repeats=1)
    monkeypatch.setattr(costs, "LONG", 0.0)
    found = _products(blocked, passes=1, repeats=1)
    products = [n for n in blocked.partition.program.operation
                if n.target in (aten.mm.default, aten.addmm.default)]
    kinds = {str(n.target) + str([i.meta["val"].shape for i in n.all_input_nodes]) for n in products}
    assert len(kinds) * 2 <= found < every


@functools.cache
def _traced(name: str) -> Traced:
    sample = BANK[name](seed=0)
    once = Settings(measure=MeasureSettings(passes=1, repeats=1))
    return trace(sample.model, sample.args, sample.kwargs, once, Progress(False))


@pytest.mark.parametrize("name", [
    "lstm", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "resnet", "t5", "unet"))])
def test_no_more_memory_than_the_budget(name: str, request: pytest.FixtureRequest) -> None:
    """Of all budgets that can be met, none is smaller than what one operation takes."""
    blocked = block(_traced(name))
    graph, constants = with_operation_costs(blocked).graph, hoisted(blocked.partition)
    limit = max(bytes_alone(graph, i, constants) + c.overhead for i, c in enumerate(graph.c))
    request.getfixturevalue("unmetered")
    free = measure_peak(lambda: with_operation_costs(blocked)).peak
    bound = measure_peak(lambda: with_operation_costs(blocked, limit=lambda _: limit)).peak
    assert bound <= limit < free


def test_what_has_no_room_is_not_run(unmetered: None) -> None:
    blocked = _stack(3)
    with _Counting() as counting:
        found = with_operation_costs(blocked, limit=lambda _: 100)
    assert not counting.calls[aten.mm.default] and all(c.time > 0 for c in found.costs.values())
    whole = with_operation_costs(blocked, limit=lambda _: least_bytes(blocked.partition))
    assert {c.time for c in whole.costs.values()}.isdisjoint({c.time for c in found.costs.values()})


def test_the_smallest_budget_is_a_measured_one() -> None:
    """A convolution's scratch memory is not counted, and has to be known where a budget is named."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    x = torch.randn(4, 3, 24, 24)
    with pytest.raises(rkmate.InfeasibleBudget) as caught:
        rkmate.plan(model, (x,), budget=1, progress=False)
    least = caught.value.minimum_bytes
    assert rkmate.plan(model, (x,), budget=least, progress=False).peak_bytes <= least


def test_a_fraction_is_of_one_peak_whatever_was_measured_before(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch convolution takes several times more scratch memory than the rest of the step."""
    monkeypatch.setenv("RKMATE_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 192, 16, 16), nn.Flatten(2), nn.Tanh(), nn.Linear(4, 4))
    x = torch.randn(2, 3, 32, 32)
    named = set()
    for _ in range(2):
        try:
            plan = rkmate.plan(model, (x,), budget=0.95, progress=False)
            named.add((plan.budget_bytes, plan.baseline_peak_bytes))
        except rkmate.InfeasibleBudget as error:
            named.add((str(error), error.minimum_bytes))
    assert len(named) == 1


def _head(words: int) -> Blocked:
    """A head over a vocabulary, whose weight is tied to the embedding."""
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.inner = nn.Embedding(words, 16), nn.Linear(16, 16)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.inner(self.embedding(ids)).tanh()
            return nn.functional.cross_entropy(x @ self.embedding.weight.t(), ids)

    ids = torch.randint(0, words, (64,))
    return block(trace(Model(), (ids,), {}, Settings(), Progress(False)))


def test_what_variants_have_in_common_runs_once() -> None:
    """So that they are compared by the same numbers."""
    blocked, memory = _head(20_000), CostMemory(None)
    parts = [blocked, block(blocked.traced, CHUNKED_LOSS)]
    costs_of = [costs.measure(b.partition, b.texts, b.traced.tensors, memory, MeasureSettings())
                for b in parts]
    by_form = [{form_of(n): costs_of[k][i] for i, n in enumerate(b.partition.program.operation)}
               for k, b in enumerate(parts)]
    common = by_form[0].keys() & by_form[1].keys()
    assert len(common) > 5 and all(by_form[0][form] == by_form[1][form] for form in common)
    assert by_form[1].keys() - common
    with _Counting() as counting:
        costs.measure(parts[1].partition, ["", *parts[1].texts[1:]], blocked.traced.tensors, memory)
    assert not counting.calls[aten.mm.default]


def test_what_always_writes_over_a_value_is_measured_so() -> None:
    """The head's gradients are made for a gradient of one: nothing is left to do when that comes."""
    blocked = block(_head(20_000).traced, CHUNKED_LOSS)
    with _Counting() as counting:
        found = with_operation_costs(blocked)
    own = torch.ops.rkmate
    assert counting.calls[own.scale_.default] and not counting.calls[own.scale.default]
    scaled = [i for i, n in enumerate(blocked.partition.program.operation) if n.target is own.scale.default]
    assert scaled and all(found.graph.c[i].donors for i in scaled)
