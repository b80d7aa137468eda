"""The processor's caches before a timed run."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rkmate import MeasureSettings, Settings
from rkmate.measure.costs import measure
from rkmate.measure.remembered import CostMemory
from rkmate.measure.runs import Caches, made_just_before, touched_bytes
from rkmate.pipeline.prepare import block, trace
from rkmate.support.progress import Progress
from tests.device.fake import FakeDevice

MODEL = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
X = torch.randn(4, 8)


class Fills(TorchDispatchMode):
    """Counts buffers of bytes that are overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.fill_.Scalar and args[0].dtype == torch.uint8
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("cold", "cache_bytes", "emptied"), [
    (None, 2**10, True), (None, 2**30, False), (True, 2**30, True), (False, 2**10, False),
    (None, 0, False), (True, 0, False)])
def test_caches_are_emptied_before_each_half_of_a_block_of_a_large_step(
        cold: bool | None, cache_bytes: int, emptied: bool) -> None:
    traced = trace(MODEL, (X,), {}, Settings(), Progress(False))
    blocked = block(traced)
    with FakeDevice(cache_bytes=cache_bytes) as device, Fills() as fills:
        measure(blocked.partition, blocked.texts, traced.tensors, CostMemory(None),
                MeasureSettings(cold=cold, passes=3, repeats=1), step_bytes=2**20)
    assert device.calls > 0
    assert fills.count == (3 * 2 * len(set(blocked.texts)) if emptied else 0)


def test_a_buffer_that_is_larger_than_the_budget_is_told(caplog: pytest.LogCaptureFixture) -> None:
    traced = trace(MODEL, (X,), {}, Settings(), Progress(False))
    blocked = block(traced)
    for limit in (5120, 5119, 5119):
        with FakeDevice(cache_bytes=2**12), caplog.at_level("INFO", logger="rkmate"):
            measure(blocked.partition, blocked.texts, traced.tensors, CostMemory(None), step_bytes=2**20,
                    limit=functools.partial(int, limit))
    (said,) = (record.getMessage() for record in caplog.records)
    assert "5,120 bytes" in said and "5,119 bytes" in said


def test_costs_of_both_kinds_are_remembered_apart() -> None:
    traced = trace(MODEL, (X,), {}, Settings(), Progress(False))
    blocked, memory = block(traced), CostMemory(None)
    calls = []
    for step_bytes in (1, 2**20, 1, 2**20):
        with FakeDevice(cache_bytes=2**10) as device:
            measure(blocked.partition, blocked.texts, traced.tensors, memory, step_bytes=step_bytes)
        calls.append(device.calls)
    assert min(calls[:2]) > 0 and calls[2:] == [0, 0]


def test_what_was_made_just_before_is_read_again() -> None:
    seen: Counter[tuple[int, ...]] = Counter()

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.sum.default:
                seen[tuple(args[0].shape)] += 1
            return func(*args, **(kwargs or {}))

    with FakeDevice(cache_bytes=2**10) as device:
        caches = Caches(device)
        with Reads():
            caches.empty([torch.ones(3), torch.ones(3, dtype=torch.int64), torch.ones(2**10)])
    assert seen == {(3,): 1}              # indices are small, and what is large has not stayed


def test_what_is_made_just_before() -> None:
    traced = trace(MODEL, (X,), {}, Settings(), Progress(False))
    cd = block(traced).partition.program.cd
    for i, node in enumerate(cd.c):
        found = made_just_before(cd, i)
        assert set(found) <= set(node.inputs)
        assert all(i - 3 <= cd.producer[j] < i for j in found)  # type: ignore[operator]
    assert any(made_just_before(cd, i) for i in range(len(cd.c)))
    last = max(i for i in range(len(cd.c)) if any(cd.producer[j] == 0 for j in cd.c[i].inputs))
    assert last <= 3 or 0 not in {cd.producer[j] for j in made_just_before(cd, last)}


def test_bytes_of_a_step() -> None:
    """Of forward and backward; views make nothing."""
    found = touched_bytes(trace(MODEL, (X,), {}, Settings(), Progress(False)).capture.graph)
    forward = 4 * 4 * (8 + 8 + 4)
    weights = 4 * (8 * 8 + 8 + 8 * 4 + 4)
    assert found >= forward + weights
    assert found <= 3 * (forward + weights)
