"""Tensors that nothing can compute again, and evicted ones that were made from them."""

from __future__ import annotations

import pytest
import torch

import rkmate.dtr
from rkmate.dtr import HEURISTICS


def press(tensors: int) -> None:
    """Make room for so many tensors of a thousand numbers, and give it back."""
    held = [torch.ones(1000) for _ in range(tensors)]
    del held


@pytest.mark.parametrize("heuristic", HEURISTICS)
@pytest.mark.parametrize("after", ["overwritten", "dropped", "dropped with its child"])
def test_an_evicted_tensor_outlives_its_origin(after: str, heuristic: str) -> None:
    x = torch.randn(1000)
    expected = (x.exp() + 1) * 2
    with rkmate.dtr(budget=16_100, heuristic=heuristic) as session:
        y = x.exp()
        x.zero_()  # From here on, nothing can compute y again.
        z = y + 1
        w = z * 2
        press(3)
        assert session.report.evictions > 0
        if after == "overwritten":
            y.mul_(2)
        elif after == "dropped":
            del y
        else:
            del z, y
        found = w + 0
    assert torch.equal(found, expected)
    assert torch.equal(w, expected)


def test_what_was_kept_for_an_evicted_tensor_goes_with_the_need() -> None:
    x = torch.randn(1000)
    expected = x.exp() + 1
    with rkmate.dtr(budget=12_100, heuristic="lru") as session:
        y = x.exp()
        x.zero_()
        z = y + 1
        press(2)
        memory = session.engine.memory
        del y
        assert memory.held == 4000  # y, which z needs
        found = z + 0
        del found
        assert memory.held == 4000  # z
    assert torch.equal(z, expected)


@pytest.mark.parametrize("heuristic", HEURISTICS)
def test_a_pinned_tensor_that_the_program_drops(heuristic: str) -> None:
    x = torch.rand(1000)
    expected = ((x + 1) * 2).sqrt()
    with rkmate.dtr(budget=16_100, heuristic=heuristic) as session:
        y = x + 1
        z = y * 2
        y.numpy()
        w = z.sqrt()
        del y, z
        press(4)
        assert session.report.evictions > 0
    assert torch.equal(w, expected)
