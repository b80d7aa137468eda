"""What is planned of a sharded model: the calls of its layers, and the rest of its forward.

Calls that are alike are one part, planned for a backward that comes for all of their outputs. If a step shows
that the loss depends on fewer (nothing reads the bias that the last layer hands on), that call is another
part, planned for this loss: what is measured and shared out is the training that goes on.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, cast

from torch import nn

from rkmate.graph.capture.refusals import refuse_what_cannot_repeat
from rkmate.parts.one_budget import (
    OneBudget,
    Part,
    drop_beginning,
    own_bytes,
    refuse_what_would_run_twice,
    undisturbed,
)
from rkmate.parts.sharded_rest import RestOfForward
from rkmate.parts.sharded_step import Follower, Signature
from rkmate.pipeline.part_plans import ways_of
from rkmate.pipeline.prepare import Blocked, block, estimated, trace
from rkmate.pipeline.variants import CHUNKED_LOSS, first, together
from rkmate.planners.several_calls import Way
from rkmate.runtime.guards import Guards, guards_of
from rkmate.runtime.kept_plans import Planning, Prototype, TangentMask
from rkmate.support.progress import Progress
from rkmate.torch_seam.modules import forward_hooks_of, forward_pre_hooks_of, inside_of_sharded, is_sharded

_SURELY = 1.1
"""The multiple of a budget, estimated from a fraction, that the first step has to exceed for a loss to be
computed in chunks at once: from then on, last bits differ."""


class ShardedParts(OneBudget):
    """The planned calls of a sharded model, and what each follows."""

    def __init__(self, model: nn.Module, planning: Planning) -> None:
        super().__init__(model, planning)
        self.units = [m for m in model.modules() if m is not model and is_sharded(m) and not any(
            m in above.modules() for above in model.modules()
            if above not in (m, model) and is_sharded(above))]
        """The outermost sharded modules."""
        self.inside = {inside for m in model.modules() if (inside := inside_of_sharded(m)) is not None}
        """The modules inside of those that are sharded and hold one other (FSDP1, torch.compile)."""
        self.rest = RestOfForward(model, self.units)
        self.tail: Follower | None = None
        """Plans for the rest of the forward; None where it is not planned."""
        self._parts: list[Part] = []
        self._chosen: dict[Follower, dict[Part, tuple[Way, Prototype]]] = {}
        """For each planned module, the schedule that it follows for each part, and the plan of it."""
        self._losses: dict[Follower, dict[Part, TangentMask]] = {}
        """For each planned module, the parts that its calls are not any more, and the outputs that a loss has
        taken instead of all."""
        self._now: Signature | None = None
        """The signature of the call that is running."""

    def _has_planned(self) -> None:
        """Note that a call has got a plan, in the middle of a step."""
        raise NotImplementedError

    @property
    def _gathered(self) -> int:
        """Bytes of the model's parameters that are gathered now."""
        raise NotImplementedError

    def provide(self, follower: Follower, key: Guards, args: tuple[Any, ...], kwargs: dict[str, Any]
                ) -> Guards:
        """Give a planned module a plan for a call that it has none for: the leanest, or what others like it
        follow. Returns the call's key, with what a library looks at in the arguments."""
        model, chosen = follower.original, self._chosen.setdefault(follower, {})
        if self._now is None:
            self._warn_once("elsewhere", (
                f"{self._type}: a sharded layer is called from elsewhere than the model's forward: no step "
                "shows what the budget leaves for it, so it holds as little as it can"))
        loss = next((taken for old, taken in self._losses.get(follower, {}).items()
                     if old.example.fits(model, key)), None)
        part = next((p for p in self._parts if p.loss == loss and p.example.fits(model, key)), None)
        if part in chosen:
            return key
        if part is None:
            part = self._new_part(follower, key, args, kwargs, loss)
            if part not in self._parts:
                self._parts.append(part)
        chosen[part] = part.first, part.example
        follower.cache.follow([p for _, p in chosen.values()])
        self._has_planned()
        seen = follower.cache.observations.with_kinds(*guards_of(follower.reader, args, kwargs))
        return key._replace(kinds=seen.kinds)

    def take_losses(self) -> set[tuple[Follower, Part]]:
        """Let calls be another part where the loss takes other outputs than they are planned for. Return the
        calls that are gone. Each call changes once: after that, only its plans follow the loss."""
        gone: set[tuple[Follower, Part]] = set()
        for follower, chosen in self._chosen.items():
            for known in follower.cache.kept.all():
                part = next((p for p in chosen if p.loss is None and p.traced.capture is known.capture), None)
                if part is not None and known.mask != part.traced.wanted:
                    self._losses.setdefault(follower, {})[part] = known.mask
                    del chosen[part]
                    gone.add((follower, part))
                    follower.cache.follow([p for _, p in chosen.values()])
        return gone

    def _new_part(self, follower: Follower, key: Guards, args: tuple[Any, ...], kwargs: dict[str, Any],
                  loss: TangentMask | None) -> Part:
        planning, model = follower.cache.planning, follower.original
        settings = replace(planning.settings, loss_bytes=0)
        with undisturbed():
            refuse_what_cannot_repeat(model, args, kwargs, hooks_outside=True)
            traced = trace(model, args, kwargs, settings, Progress(planning.progress))
            traced = traced if loss is None else replace(traced, wanted=loss)
            if follower is self.tail and self.units:
                refuse_what_would_run_twice(traced.capture)
                drop_beginning(traced.capture, len(self.rest.returned[-1][1]))
            key = follower.cache.observations.look(key, traced.capture.looked)
            known = next((p for p in self._parts if p.loss == loss and p.note(key, traced)), None)
            if known is not None:
                return known

            def limit(blocked: Blocked) -> int:
                own_peak = estimated(blocked).baseline_peak
                return max(1, self.planning.budget.of(self._about() + own_peak) // 2)

            ways = functools.partial(ways_of, traced, planning.planner, limit, 0.0,
                                     keeps_gradients=self._keeps_gradients)
            part = Part(model, key, traced, [ways()], not any(
                forward_hooks_of(m) or forward_pre_hooks_of(m) for m in model.modules() if m is not model),
                loss=loss)
            if traced.settings.chunked_loss == "auto" and block(traced).concerned.get(CHUNKED_LOSS.name):
                variant = together([*first(traced.settings).rows, CHUNKED_LOSS])
                part.forms.append(ways(variant=variant))
                part.is_changed_at_once = self._is_surely_too_large(part)
        cast(dict[Any, Any], traced.tensors).clear()         # they belong to this call
        return part

    def _about(self) -> int:
        """Return the bytes that the calls of this step save without recomputation, and those of own
        parameters."""
        return own_bytes(self._model, self.units) + sum(part.whole.saved for part in self._open)

    @property
    def _open(self) -> list[Part]:
        """Parts whose backward is still to come: the newest one of each planned module, once for each of
        its calls."""
        return [part for follower, chosen in self._chosen.items() for part in [*chosen][-1:]
                for _ in follower.cache.open_calls.now()]

    def _is_surely_too_large(self, loss: Part) -> bool:
        """Return whether a step that computes the loss as the original does exceeds the budget, even if all
        layers save as little as they can. Parameters that are gathered now are gathered in the backward,
        too."""
        given = self.planning.budget
        budget: float = given.of(self._about() + loss.whole.saved + loss.whole.extra)
        budget *= 1 if given.bytes else _SURELY
        least = min(w.saved + w.extra for w in loss.forms[0].ways) + sum(p.least_saved for p in self._open)
        return max(self._gathered, own_bytes(self._model, self.units)) + least > budget
