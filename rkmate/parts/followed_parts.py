"""By parts: steps that follow plans are measured, and if one exceeds its budget, that is shared out again.

The shares come from steps that ran as they are. A step with plans may take more, and so may a step whose
calls differ from those that were observed: experts get other tokens, a layer runs that was left out. So the
first steps with plans are measured, and later ones now and then. If the model communicates, its ranks measure
the same steps, and all follow the rank that exceeds its budget most.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace

from torch import nn

from rkmate.errors import InfeasibleBudget
from rkmate.parts.kinds import Asked, over_in_words
from rkmate.parts.one_budget import OneBudget
from rkmate.parts.one_decision import OneDecision
from rkmate.runtime.followed_step import FollowedStep
from rkmate.runtime.kept_plans import Planning
from rkmate.support.planning_lock import planning_lock

logger = logging.getLogger("rkmate")

MEASURED = 3
"""The number of steps with plans that are measured in a row, at most: before `LATER`, until one keeps to its
budget."""
LATER = 2
"""The number of calls with plans after which a step is measured again; then twice as many, and so on."""
REFUSED = 3
"""The number of steps that are observed because a call had no room, at most: others keep their plans then."""


class FollowedParts(OneBudget):
    """The parts of one model, in steps that follow plans."""

    def __init__(self, model: nn.Module, planning: Planning) -> None:
        super().__init__(model, planning)
        self._one = OneDecision(model)
        self.planned: list[nn.Module] = []
        """The submodules that follow plans."""
        self._is_planned = False
        self._again = False
        """Whether the next step is observed, and the budget shared out again."""
        self._has_others = False
        """Whether a submodule was called that was not called in the steps that were observed."""
        self._looks_further = False
        """Whether an observed step goes on after its first backward, until parameters have changed."""
        self._refusals = 0
        """Steps that were observed because a call had no room."""
        self._asked: Asked | None = None
        """The observed step that the current plans were chosen for."""
        self._over = self._spare = 0
        """Bytes that a step with plans took over its budget, once it was measured; and bytes of the budget
        that the current plans leave."""
        self._shared_at = 0
        """Bytes of the step after which the budget was shared out again."""
        self._peak = self._more = 0
        """Bytes of a step with plans, measured or as they were shared out; and bytes that calls of the
        latest step asked for on top of their shares."""
        self._followed: FollowedStep | None = None
        self._calls = self._to_measure = 0
        """The number of calls that have followed plans, and of steps that are still to be measured."""

    def _share(self, asked: Asked, budget: int) -> bool:
        """Share a budget out, and put plans into the parts; False where the step needs none."""
        raise NotImplementedError

    def _share_measured(self, asked: Asked, followed: FollowedStep) -> None:
        """Share the budget out once a step as it is was measured: it may fit."""
        if not (followed.is_whole or self._one.is_of_ranks):
            self._followed = FollowedStep(self._model.parameters(), asked.step.meter)
        elif self._one.all_say(followed.backward_seen):
            self._followed, self._is_planned, known = None, False, asked.rest.plain
            peak, budget = followed.peak() or known, self.planning.budget.of(known)
            if max(known, budget) < peak and self._look_further(followed):
                return
            if known <= budget < peak:
                self._warn_once("over", over_in_words(self._type, peak, budget, peak))
            self._asked = replace(asked, rest=asked.rest._replace(plain=min(peak, known)), is_estimate=False)
            self._share(self._asked, self.planning.budget.of(self._asked.rest.plain))

    def _measure_followed(self) -> None:
        """Before a call from outside: measure a step with plans. Where it takes more than its budget, that is
        shared out again, or a warning says so. So is it where calls have asked for more than their shares."""
        asked, followed, of_ranks = self._asked, self._followed, self._one.is_of_ranks
        if followed is not None and not of_ranks and followed.backward_seen and followed.goes_on():
            return
        if asked is not None and followed is not None and not self.planned:
            return self._share_measured(asked, followed)
        if asked is None or not self.planned:
            return
        self._calls += 1
        if self._calls >= LATER and self._calls.bit_count() == 1:
            self._to_measure = MEASURED
        if not (self._to_measure or (self._more and not of_ranks)):     # ranks meet in the same calls
            return
        seen = followed is None or followed.backward_seen
        if not (seen or of_ranks):              # several calls come before a backward
            return
        budget = self.planning.budget.of(asked.rest.plain)
        peak = followed.peak() if followed is not None and seen else None
        more, self._more = self._more, 0
        found = peak or (self._peak + more if more else 0)
        told = self._one.told(seen, peak is not None, found - budget, more > 0, self._has_others)
        all_seen, all_known, *_ = map(all, zip(*told, strict=True))
        over = max(row[2] for row in told)
        if not all_seen:
            self._more = more
            if followed is not None and seen:
                self._followed = FollowedStep(self._model.parameters(), asked.step.meter)
            return
        self._again = self._again or (of_ranks and any(row[4] for row in told))
        self._has_others = False
        if followed is not None:
            self._to_measure -= not followed.only_looks
        if all_known and over <= 0:
            self._peak = peak or 0
            if self._calls < LATER:         # later ones are measured all: two lengths may take turns
                self._to_measure = 0
        if any(row[3] for row in told):
            self._to_measure = MEASURED
            self._observe_again(found, budget, over, "" if peak else "up to about ")
        elif over > 0:
            self._share_again(asked, budget, over, followed)
        if self.planning.settings.gradients == "in_place" or not any(True for _ in self._model.parameters()):
            self._to_measure = 0
        self._followed = None if not self._to_measure else FollowedStep(
            self._model.parameters(), None if followed is None else asked.step.meter)

    def _observe_again(self, found: int, budget: int, over: int, about: str) -> None:
        """Observe the next step where calls need more than their shares, and the step takes too much. `over`:
        by how much, on any rank."""
        if over <= 0 or self._again:
            return
        self._again = self._refusals < REFUSED
        self._refusals += self._again
        if found <= budget:                     # another rank says so
            return
        self._warn_once(f"over, {self._again}", (
            f"a step of {self._type}, planned by parts, takes {about}{found:,} bytes, and its budget is "
            f"{budget:,}: calls of its parts need more than those in the steps that were observed. " + (
                "The next step runs as it is and is observed, and the budget is shared out again"
                if self._again else f"A budget of {found:,} bytes leaves room for that")))

    @planning_lock
    def _share_again(self, asked: Asked, budget: int, over: int, followed: FollowedStep | None) -> None:
        """Share the budget out once more. `over`: bytes that a step with plans took on top of its budget;
        `followed`: that step."""
        self._over, peak = self._over + over, budget + over
        if followed is not None and followed.has_more_calls and peak == self._shared_at:
            self._over += self._spare           # plans that leave as much have changed nothing
        self._shared_at = peak
        if self._to_measure:
            with contextlib.suppress(InfeasibleBudget):
                logger.warning("A step of %s takes %s bytes with these plans, and may take %s: the budget is "
                               "shared out again", self._type, f"{peak:,}", f"{budget:,}")
                self._share(asked, budget - self._over)
                return
        if followed is not None and self._look_further(followed):
            return
        self._to_measure = 0
        self._warn_once("over", over_in_words(self._type, peak, budget, budget + self._over))

    def _look_further(self, followed: FollowedStep) -> bool:
        """Have a step observed once more, with all calls before its optimizer steps, if there are calls after
        its first backward (`followed` is such a step): they may take more. Returns whether there are, and
        that was not done before."""
        if self._looks_further or self._one.is_of_ranks or not followed.has_more_calls:
            return False
        self._looks_further = self._again = True
        logger.warning("A step of %s takes more than the one that was observed: one more step runs as it is, "
                       "and is observed until its optimizer steps", self._type)
        return True

    def _have_measured(self) -> None:
        """Have the next step measured: it may take more than its budget. Ranks do so in the same steps."""
        if not self._one.is_of_ranks:
            self._to_measure = max(self._to_measure, 1)
