"""Objects that the garbage collector knows."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from rkmate.support.planning_lock import gc_pause
from rkmate.torch_seam.memory import living


@pytest.mark.parametrize("generation", [None, 0, 1, 2])
def test_what_was_made_since_is_found_and_let_go_of(generation: int | None) -> None:
    """After no collection, and after one of each generation."""
    since: list[Any] = []
    made = torch.ones(3)
    if generation is not None:
        gc.collect(generation)
    assert any(t is made for t in living({torch.Tensor}, since))
    gone = weakref.ref(made)
    with gc_pause():
        del made
        assert gone() is None


def test_what_is_older_is_left_out_while_the_list_is_young() -> None:
    old = torch.ones(3)
    gc.collect()
    assert not any(t is old for t in living({torch.Tensor}, []))
    assert any(t is old for t in living({torch.Tensor}))
