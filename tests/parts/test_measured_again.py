"""Steps of a sharded model that seem to take too much are measured again before they are refused, on all
ranks alike."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import rkmate
from rkmate.parts import sharded
from rkmate.parts.one_budget import Part, Rest
from rkmate.parts.sharded import AGAIN, AGREED, Sharded
from rkmate.parts.sharded_step import CHECKS, EVALUATIONS, KEPT, PATIENCE, Signature, bounds, tied
from rkmate.pipeline.settings import Settings
from rkmate.planners.several_calls import Way

SEEN = Rest(10, 20, 30, 100)
MOMENTS = Rest(30, 20, 10, 200, {(None, ()): 10, (0, ()): 30, (1, (0,)): 5, (None, (0, 1)): 20})
"""A step of two calls: much is there while the first one runs, little while the second one does."""
WAYS = [Way(1.0, 40, 10), Way(2.0, 10, 20), Way(3.0, 0, 40)]


def _model(given: int, needed: Callable[[Rest], int]) -> Any:
    """A model with a budget of `given` bytes, whose smallest budget depends on a measurement."""
    found: Any = object.__new__(Sharded)
    found.planning = SimpleNamespace(budget=SimpleNamespace(of=lambda plain: given))
    found._exchanges, found._guests = SimpleNamespace(standing=0), set()
    found._model, found._signatures, found._agreed, found._again = nn.Linear(1, 1), {}, AGREED, AGAIN

    def share(now: Signature) -> None:
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
    model, now = _model(25, lambda rest: rest.early), Signature(rest=SEEN)
    model._share_out(now, _ranks())
    assert (now.rest, now.is_shared, model._agreed) == (None, False, AGREED + 1)
    now.rest = Rest(11, 19, 24, 110)                    # a buffer was let go in time
    model._share_out(now, _ranks())
    assert now.is_shared and now.rest == Rest(10, 19, 24, 100)


def test_it_is_refused_after_all() -> None:
    model, now = _model(25, lambda rest: rest.early), Signature(rest=SEEN)
    for _ in range(AGAIN):
        model._share_out(now, _ranks())
        now.rest = SEEN
    with pytest.raises(rkmate.InfeasibleBudget, match="takes 30"):
        model._share_out(now, _ranks())


@pytest.mark.parametrize(("taken", "told"), [(30, ["takes 30"]), (34, ["takes 30", "takes 34"])])
def test_the_smallest_budget_that_a_warning_names_is_checked(
        monkeypatch: pytest.MonkeyPatch, taken: int, told: list[str]) -> None:
    """Steps of a new shape, or of a rank's stages, take it: if they show more, another warning names that."""
    monkeypatch.setattr(sharded, "several_ranks", lambda: True)
    model, now = _model(15, lambda rest: rest.early), Signature(rest=SEEN)
    step: Any = SimpleNamespace(peak=taken, rest=lambda: SEEN._replace(early=taken))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(CHECKS + 2):
            model._share_out(now, None)
            if now.checks:
                now.note(step, False, 15, 0)
    assert [str(w.message) for w in caught] == [f"{each}. Its steps take that" for each in told]


def test_what_is_far_too_much_is_refused_at_once() -> None:
    with pytest.raises(rkmate.InfeasibleBudget, match="takes 30"):
        _model(15, lambda rest: rest.early)._share_out(Signature(rest=SEEN), _ranks())


def test_a_rank_measures_again_for_another() -> None:
    model, now = _model(40, lambda rest: rest.early), Signature(rest=SEEN)
    told = iter([["10,20,30,100"] * 2, ["", "45,40"]])
    model._share_out(now, cast(Any, SimpleNamespace(told=lambda text: next(told))))
    assert (now.rest, now.is_shared, model._agreed) == (None, False, AGREED + 1)


# -- Moments of a step -----------------------------------------------------------------------------


class _Part:
    """A part whose calls may follow `WAYS`."""

    ways, whole = WAYS, WAYS[0]

    def look(self, share: float) -> None:
        """There are no further schedules."""


class _Call:
    """A planned module."""

    def __init__(self, within: Any, original: nn.Module) -> None:
        self.within, self.original = within, original


def _shared(budget: int, rest: Rest, monkeypatch: pytest.MonkeyPatch, other: Rest | None = None) -> list[Any]:
    """Share a budget out among two calls. Returns what they follow: their ways, and what each may take on top
    of that; where there is no room, also the smallest budget, and when a step takes it. `other`: what another
    step takes that calls the first of them alone."""
    monkeypatch.setattr(Part, "prototype", lambda part, number, extra: (number, extra))
    found, followed, part = _model(budget, lambda rest: 0), [], _Part()
    found._type, found._model = "Model", nn.Sequential(nn.Identity(), nn.Identity())
    found._follow = lambda calls, shared: followed.append((shared.choice.ways, shared.extras))
    calls = [_Call(found, layer) for layer in found._model]
    now = Signature(rest=rest, observed=[(cast(Any, call), cast(Any, part)) for call in calls])
    found._signatures = {0: now}
    if other is not None:
        one = Signature(rest=other, observed=now.observed[:1], is_shared=True)
        found._signatures[1] = one
    try:
        Sharded._share(found, now)
    except rkmate.InfeasibleBudget as error:
        followed += [error.minimum_bytes, str(error).partition("Most is taken while ")[2]]
    return followed


def test_what_is_there_while_one_layer_runs_does_not_bound_another(monkeypatch: pytest.MonkeyPatch) -> None:
    # 30 + 40 + 10 while the first call runs, 5 + 40 + 10 + 20 while the second one does.
    assert _shared(80, MOMENTS, monkeypatch) == [((0, 1), (10, 25))]


def test_steps_without_room_take_as_little_as_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    held = "that planned calls hold until their backward"
    assert _shared(59, MOMENTS, monkeypatch) == [
        ((1, 1), (20, 35)), 60,
        f"0 runs: 30 bytes outside of all plans, 10 {held}, and 20 on top while it runs"]
    after = MOMENTS._replace(moments={**MOMENTS.moments, (None, (0, 1)): 41})
    assert _shared(59, after, monkeypatch)[1:] == [
        61, f"no planned layer runs: 41 bytes outside of all plans, 20 {held}"]
    ways, least, _ = _shared(59, MOMENTS._replace(moments={}), monkeypatch)    # as if all were there at once
    assert (ways[0], least) == ((1, 1), 70)


def test_steps_with_calls_of_the_same_modules_are_shared_out_together(monkeypatch: pytest.MonkeyPatch
                                                                      ) -> None:
    # While the first call runs in the other step: 25 + 40 + 10 = 75, and 65 + 10 + 20 = 95.
    assert _shared(80, MOMENTS, monkeypatch, Rest(0, 0, 0, 200, {(0, ()): 25})) == [((0, 1), (10, 25))]
    assert _shared(95, MOMENTS, monkeypatch, Rest(0, 0, 0, 200, {(0, ()): 65})) == [((1, 0), (20, 40))]
    a, b, c, d = (Signature(observed=cast(Any, [(k, k) for k in calls])) for calls in ("1", "2", "3", "12"))
    assert tied(a, [a, b, c, d]) == [a, d, b]


def test_moments_of_ranks_are_compared_where_steps_are_alike() -> None:
    other = MOMENTS._replace(moments={key: size + 1 for key, size in MOMENTS.moments.items()})
    assert MOMENTS.read(other.row()) == other
    assert MOMENTS.together(other).moments == other.moments
    assert MOMENTS.least(other).moments == MOMENTS.moments
    assert MOMENTS.read(SEEN.row()) == SEEN
    assert MOMENTS.together(SEEN) == Rest(30, 20, 30, 200)
    assert [(m.bytes, m.running, dict(m.held)) for m in bounds(MOMENTS, [0, 0])] == [
        (10, None, {}), (30, 0, {0: 1}), (5, 0, {0: 2}), (20, None, {0: 2})]


def test_a_call_that_is_planned_anew_can_be_observed_at_once() -> None:
    planned = rkmate.wrap(nn.Linear(2, 2), (torch.ones(1, 2),), budget=1.0, progress=False,
                          settings=Settings(costs="analytic"))
    assert planned._plans.kept


def test_a_step_that_makes_other_calls_is_measured_when_it_comes_again() -> None:
    usual = Signature()
    assert not usual.wanted(True)
    usual.ends(True, False, False)
    assert usual.wanted(True) == [usual]
    usual.rest, usual.is_shared = SEEN, True
    longer = usual.followed_by("a longer call")
    assert longer is usual.followed_by("a longer call") and not usual.wanted(True)
    longer.ends(True, False, False)
    assert usual.wanted(True) == [longer]
    for _ in range(PATIENCE):                           # it does not come again
        usual.has_come_for([longer])
    assert not usual.wanted(True)
    longer.ends(True, False, False)
    assert usual.wanted(True) == [longer] and longer.patience == 2 * PATIENCE
    longer.rest = SEEN
    assert usual.next_shared is longer and not usual.wanted(True)


def test_a_step_that_exchanges_no_gradients_is_measured_in_two_versions_of_the_parameters() -> None:
    now, step = Signature(), cast(Any, SimpleNamespace(peak=1, rest=lambda: SEEN, calls=[]))
    for version, rest in ((1, None), (1, None), (2, SEEN)):
        now.note(step, True, 100, version)
        now.ends(True, False, True)
        assert now.rest == rest and now.exchanges is (None if rest is None else False)
    now.is_shared = True
    now.ends(True, False, False)                        # it exchanges them after all
    assert now.wanted(True) == [now] and not now.is_shared
    for kept_whole in (True, False):
        now.note(step, kept_whole, 100, 3)
        assert now.rest == (None if kept_whole else SEEN)


def test_what_has_calls_without_plans_is_measured_again() -> None:
    usual = Signature(rest=SEEN, is_shared=True)
    usual.ends(True, True, False)
    assert usual.wanted(True) == [usual]


def test_evaluation_between_training_steps_does_not_end_the_measurement() -> None:
    usual = Signature()
    usual.ends(True, False, False)
    for _ in range(EVALUATIONS):
        assert usual.wanted(True) == [usual]
        usual.ends(False, False, False)
    assert not usual.wanted(True)


def test_the_number_of_known_steps_is_limited() -> None:
    usual = Signature()
    for k in range(2 * KEPT):
        usual.followed_by(k).followed_by("more")
        assert len(usual.family) <= KEPT + 1
