"""Steps of a sharded model that seem to take too much are measured again before they are refused, on all
ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import nn

import rkmate
from rkmate.runtime.one_budget import Rest
from rkmate.runtime.sharded import AGAIN, AGREED, Sharded, _Signature

SEEN = Rest(10, 20, 30, 100)


def _model(given: int, needed: Callable[[Rest], int]) -> Any:
    """A model with a budget of `given` bytes, whose smallest budget depends on a measurement."""
    found: Any = object.__new__(Sharded)
    found.planning = SimpleNamespace(budget=SimpleNamespace(of=lambda plain: given))
    found._model, found._signatures, found._agreed, found._again = nn.Linear(1, 1), {}, AGREED, AGAIN

    def share(now: _Signature) -> None:
        assert now.rest is not None
        now.is_shared = True
        if needed(now.rest) > given:
            raise rkmate.InfeasibleBudget(f"takes {needed(now.rest)}", needed(now.rest))

    found._share = share
    return found


def _ranks(*others: str) -> Any:
    """The ranks, of which others tell these texts instead of what they have measured."""
    return SimpleNamespace(told=lambda text: [text, *others])


def test_the_least_of_the_measurements_counts() -> None:
    model, now = _model(25, lambda rest: rest.early), _Signature(rest=SEEN)
    model._share_out(now, _ranks())
    assert (now.rest, now.is_shared, model._agreed) == (None, False, AGREED + 1)
    now.rest = Rest(11, 19, 24, 110)                    # a buffer was let go in time
    model._share_out(now, _ranks())
    assert now.is_shared and now.rest == Rest(10, 19, 24, 100)


def test_it_is_refused_after_all() -> None:
    model, now = _model(25, lambda rest: rest.early), _Signature(rest=SEEN)
    for _ in range(AGAIN):
        model._share_out(now, _ranks())
        now.rest = SEEN
    with pytest.raises(rkmate.InfeasibleBudget, match="takes 30"):
        model._share_out(now, _ranks())


def test_what_is_far_too_much_is_refused_at_once() -> None:
    with pytest.raises(rkmate.InfeasibleBudget, match="takes 30"):
        _model(15, lambda rest: rest.early)._share_out(_Signature(rest=SEEN), _ranks())


def test_a_rank_measures_again_for_another() -> None:
    model, now = _model(40, lambda rest: rest.early), _Signature(rest=SEEN)
    told = iter([["10,20,30,100"] * 2, ["", "45,40"]])
    model._share_out(now, cast(Any, SimpleNamespace(told=lambda text: next(told))))
    assert (now.rest, now.is_shared, model._agreed) == (None, False, AGREED + 1)
