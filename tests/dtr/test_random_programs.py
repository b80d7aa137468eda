"""Random tensor programs under pressure give what eager gives."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rkmate.dtr

SIDE = 64
SIZE = SIDE * SIDE
BYTES = 4 * SIZE
KEPT = 3
"""Tensors that a program returns; the others it drops at its end."""
HEURISTICS = ["dtr-eq", "dtr", "lru", "random", "msps"]
Steps = list[tuple[int, int, int]]
STEP = st.tuples(st.integers(0, 13), st.integers(0, 9), st.integers(0, 9))


def run(steps: Steps, constants: list[torch.Tensor]) -> list[torch.Tensor]:
    """A program; the last two kinds of steps read and write over tensors made outside of it."""
    torch.manual_seed(0)
    tensors = [torch.arange(SIZE).div(SIZE), torch.ones(SIZE)]
    for kind, first, second in steps:
        a, b = tensors[first % len(tensors)], tensors[-1 - second % len(tensors)]
        if kind == 0:
            tensors.append(a + b)
        elif kind == 1:
            tensors.append((a * b).sin())
        elif kind == 2:
            tensors.append(a.view(SIDE, SIDE).t().reshape(-1))
        elif kind == 3:
            tensors.append(a.view(SIDE, SIDE).transpose(0, 1).contiguous().view(-1).roll(3))
        elif kind == 4:
            a.add_(b, alpha=0.5)
        elif kind == 5:
            a.view(SIDE, SIDE)[SIDE // 4 : SIDE // 2].mul_(0.25)
        elif kind == 6:
            tensors.append(torch.rand(SIZE) * a)
        elif kind == 7:
            tensors.append(torch.nn.functional.dropout(a, 0.5))
        elif kind == 8:
            values, _ = torch.sort(a)
            tensors.append(values)
        elif kind == 9 and len(tensors) > 3:
            del tensors[first % len(tensors)]
        elif kind == 10:
            a[: SIZE // 2].copy_(b[SIZE // 2 :])
        elif kind == 12 and constants:
            tensors.append(a * constants[second % len(constants)])
        elif kind == 13 and constants:
            constants[second % len(constants)].add_(a, alpha=0.5)
        else:
            left, right = torch.chunk(a, 2)
            tensors.append(torch.cat([right, left.tanh()]))
    return tensors[-KEPT:]


def check(
    steps: Steps, room: int, heuristic: str, *, banish: bool = False, constants: int = 0
) -> rkmate.dtr.Report:
    """Run inside a budget of ``room`` tensors: the results and the generator are eager's."""
    outside = [torch.linspace(0, 1, SIZE) for _ in range(constants)]
    expected = run(steps, outside)
    changed = [tensor.clone() for tensor in outside]
    drawn = torch.rand(3)
    outside = [torch.linspace(0, 1, SIZE) for _ in range(constants)]
    budget = room * BYTES
    with rkmate.dtr(
        budget=budget, heuristic=heuristic, overhead_limit=10_000, banish=banish
    ) as session:
        found = run(steps, outside)
    assert session.report.peak_bytes <= budget
    assert len(found) == len(expected)
    for left, right in zip([*found, *outside], [*expected, *changed], strict=True):
        assert torch.equal(left, right)
    assert torch.equal(torch.rand(3), drawn)
    return session.report


@settings(max_examples=15, deadline=None)
@given(
    steps=st.lists(STEP, min_size=30, max_size=60),
    heuristic=st.sampled_from(HEURISTICS),
    banish=st.booleans(),
    constants=st.sampled_from([0, 2]),
)
def test_equal_to_eager(steps: Steps, heuristic: str, banish: bool, constants: int) -> None:
    # What was made from banished tensors, or from constants before they changed, stays in memory,
    # and may be more than fits.
    pins = banish or constants
    with contextlib.suppress(rkmate.dtr.BudgetExceeded) if pins else contextlib.nullcontext():
        check(steps, 24 if pins else 18, heuristic, banish=banish, constants=constants)


@pytest.mark.parametrize("heuristic", HEURISTICS)
@pytest.mark.parametrize("seed", range(3))
def test_programs_that_evict(seed: int, heuristic: str) -> None:
    source = random.Random(seed)
    steps = [(source.randrange(12), source.randrange(10), source.randrange(10)) for _ in range(60)]
    report = check(steps, 14, heuristic)
    assert report.evictions > 0
    assert report.rematerializations > 0
