"""Python's collector of garbage is as it was, whatever becomes of a plan."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import rkmate
from rkmate.support.planning_lock import gc_pause


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


@pytest.mark.parametrize("on", [True, False])
def test_as_it_was_after_planning(on: bool) -> None:
    (gc.enable if on else gc.disable)()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)))
    args = (torch.randn(64, 8),)
    rkmate.plan(model, args, budget=0.9, progress=False, settings=rkmate.Settings(costs="analytic"))
    assert gc.isenabled() is on
    with pytest.raises(rkmate.InfeasibleBudget):
        rkmate.plan(model, args, budget=1, progress=False, settings=rkmate.Settings(costs="analytic"))
    assert gc.isenabled() is on


def test_errors_pass_and_nesting_counts_once() -> None:
    with pytest.raises(KeyError), gc_pause():
        with gc_pause():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_what_lasts_counts_as_old_and_its_garbage_goes() -> None:
    class Made:
        other: Made

    with gc_pause(lasting=True):
        kept, gone = Made(), Made()
        gone.other = gone
        trace = weakref.ref(gone)
        del gone
        assert trace() is not None
    assert trace() is None
    assert any(o is kept for o in gc.get_objects(2))
