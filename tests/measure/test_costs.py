"""Costs are those of a machine that does nothing else, as near as can be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from rkmate.graph.blocks.identity import block_texts
from rkmate.measure.analytic import Costs
from rkmate.measure.costs import measure
from rkmate.measure.remembered import CostMemory
from rkmate.measure.settings import MeasureSettings
from rkmate.pipeline.prepare import Prepared, held_tensors, prepare, trace
from rkmate.pipeline.settings import Settings
from rkmate.support.progress import Progress
from tests.device.fake import FakeDevice

MODEL = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)))
X = torch.randn(4, 8)


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    """A small model's graph, as on an accelerator."""
    with FakeDevice():
        return prepare(trace(MODEL, (X,), {}, Settings(costs="analytic"), Progress(False)))


Measure = Callable[..., tuple[Costs, FakeDevice]]


@pytest.fixture
def measured(prepared: Prepared, tmp_path: Path) -> Measure:
    """Costs of all operations on a device whose n-th timed call takes `seconds(n)`. What is remembered
    lies in `folder`."""
    parts = prepared.partition
    texts = block_texts(parts)
    sources = held_tensors(prepared.capture, MODEL, [X])

    def run(seconds: Callable[[int], float], folder: str | None = None, name: str = "fake",
            **settings: float) -> tuple[Costs, FakeDevice]:
        memory = CostMemory(None if folder is None else tmp_path / folder)
        with FakeDevice(seconds=seconds, name=name) as device:
            return measure(parts, texts, sources, memory,
                           MeasureSettings(**settings)), device      # type: ignore[arg-type]
    return run


def greatest(costs: Costs) -> float:
    return max(cost.time for cost in costs.values())


def test_what_disturbs_one_pass_is_not_counted(measured: Measure) -> None:
    quiet, first = measured(lambda n: 0.25, passes=1)
    assert greatest(quiet) == 0.25
    times, device = measured(lambda n: 0.25 if n < first.calls else 0.0625, passes=2)
    assert device.calls > first.calls
    assert greatest(times) == 0.0625


def test_every_run_counts(measured: Measure) -> None:
    times, device = measured(lambda n: 0.03125 if n % 3 == 0 else 0.015625, passes=2)
    assert greatest(times) == 0.015625 and device.calls > 6


def test_what_takes_long_is_not_repeated(measured: Measure) -> None:
    _, often = measured(lambda n: 0.03, passes=1, repeats=3, enough_seconds=1.0)
    _, once = measured(lambda n: 0.03, passes=1, repeats=3, enough_seconds=0.02)
    assert often.calls == 3 * once.calls


def test_other_settings_measure_anew(measured: Measure) -> None:
    """Else a first, noisy measurement would stand for good."""
    noisy, _ = measured(lambda n: 0.5, "folder", passes=1)
    again, device = measured(lambda n: 0.25, "folder", passes=1)
    assert again == noisy and device.calls == 0
    better, device = measured(lambda n: 0.25, "folder", passes=3)
    assert greatest(better) == 0.25 and device.calls > 0


def test_another_device_measures_anew(measured: Measure) -> None:
    first, _ = measured(lambda n: 0.5, "folder")
    other, _ = measured(lambda n: 0.25, "folder", name="a newer one")
    assert greatest(other) == 0.25 < greatest(first)


def test_an_accelerators_rounding_and_counters(prepared: Prepared, measured: Measure) -> None:
    graph = prepared.graph
    costs, device = measured(lambda n: 0.5, passes=2)
    made = {j for c in graph.c for j in c.outputs}
    assert {graph.d[j].size for j in made} == {512}         # of 4 x 8 and of 8 floats
    classes = dict(zip(prepared.blocked.classes, prepared.partition.blocks, strict=True))
    assert device.statistics.resets == sum(len(b.c) for b in classes.values()), "once for each part"
    assert device.statistics.allocated() == 0
    # The generator's state, which is read around what draws, is the host's; nothing else is temporary here.
    assert any(c.random for c in graph.c)
    assert [costs[i].overhead for i in range(len(graph.c))] == [0] * len(graph.c)
    assert any(c.random for c in graph.c)


def test_the_generators_are_left_as_they_were(measured: Measure) -> None:
    before = torch.get_rng_state()
    measured(lambda n: 0.5)
    assert torch.equal(torch.get_rng_state(), before)
