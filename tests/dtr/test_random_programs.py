"""Random tensor programs under pressure give what eager gives."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rkmate.dtr

SIZE = 64
STEP = st.tuples(st.integers(0, 11), st.integers(0, 9), st.integers(0, 9))


def run(steps: list[tuple[int, int, int]]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    tensors = [torch.arange(SIZE).div(SIZE), torch.ones(SIZE)]
    for kind, first, second in steps:
        a, b = tensors[first % len(tensors)], tensors[second % len(tensors)]
        if kind == 0:
            tensors.append(a + b)
        elif kind == 1:
            tensors.append((a * b).sin())
        elif kind == 2:
            tensors.append(a.view(8, 8).t().reshape(-1))
        elif kind == 3:
            tensors.append(a.view(8, 8).transpose(0, 1).contiguous().view(-1).roll(3))
        elif kind == 4:
            a.add_(b, alpha=0.5)
        elif kind == 5:
            a.view(8, 8)[2:5].mul_(0.25)
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
            a[:32].copy_(b[32:])
        else:
            left, right = torch.chunk(a, 2)
            tensors.append(torch.cat([right, left.tanh()]))
    return tensors


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(STEP, min_size=5, max_size=60),
    heuristic=st.sampled_from(["dtr-eq", "dtr", "lru", "random", "msps"]),
    banish=st.booleans(),
)
def test_equal_to_eager(steps: list[tuple[int, int, int]], heuristic: str, banish: bool) -> None:
    expected = run(steps)
    random = torch.rand(3)
    live = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in expected}
    budget = max(sum(live.values()), 1) + 8 * SIZE * 4 + 16384
    with rkmate.dtr(
        budget=budget, heuristic=heuristic, overhead_limit=10_000, banish=banish
    ) as session:
        found = run(steps)
    assert session.report.peak_bytes <= budget
    assert len(found) == len(expected)
    for left, right in zip(found, expected, strict=True):
        assert torch.equal(left, right)
    assert torch.equal(torch.rand(3), random)
