"""Moments of steps that were observed, as bounds on the schedules of parts (`rkmate.planners.several_calls`).

While a late part runs, early ones hold what they save. While an early one runs, late ones hold nothing: not
yet, or not any more. So a large first layer may take much while it runs, and small last ones save much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from rkmate.parts.kinds import Kind
from rkmate.parts.observed_step import ObservedStep
from rkmate.parts.part_calls import REST, PartCall
from rkmate.planners.several_calls import Moment, Way

STEPS = 4
"""The number of observed steps that bound schedules: the latest ones."""


class SeenStep(NamedTuple):
    """The figures that are kept of a step that was observed."""

    moments: Mapping[tuple[int, frozenset[int]], int]
    """(the number of the call that runs, or 0; the calls that hold something) -> bytes of the rest."""
    between: int
    """Bytes that the caller makes of results, and keeps."""
    calls: Mapping[int, tuple[Kind, nn.Module, PartCall]]


def seen(step: ObservedStep, kinds: Sequence[Kind]) -> SeenStep:
    """Return what is kept of a step. `kinds`: those that were called in it."""
    return SeenStep(step.moments, step.between, {
        call.number: (kind, module, call) for kind in kinds for module, call in kind.calls})


def kept_of(call: PartCall, followed: Container[int]) -> int:
    """Return the bytes that a call without a plan keeps, with its results that others hold.

    `followed`: the numbers of the calls with plans, which hold their arguments.
    """
    return call.saved + sum(size for size, holders in call.handed.values()
                            if any(holder == REST or holder in followed for holder in holders))


def bounds(steps: Sequence[SeenStep], places: Sequence[tuple[Kind, nn.Module, int]], waiting: int
           ) -> list[Moment]:
    """Return the moments of steps; empty if those of a step are not known. They are not, either, if a step
    has called what is planned with other sizes, or others of its kind: no item tells what these hold.

    `places`: the kind and the submodule of each item that is planned, and how often that is called in a step.
    `waiting`: bytes of gradients that wait at any moment.
    """
    if not all(step.moments for step in steps):
        return []
    number_of = {(id(kind), id(module)): n for n, (kind, module, _) in enumerate(places)}
    planned = {id(x) for kind, module, _ in places for x in (kind, module)}
    if any((id(kind), id(module)) not in number_of and not planned.isdisjoint((id(kind), id(module)))
           for step in steps for kind, module, _ in step.calls.values()):
        return []
    alike = {n for n, (kind, module, _) in enumerate(places) if kind.sizes_of(module) == (1.0, 1.0)}
    found: dict[tuple[int | None, frozenset[tuple[int, int]]], int] = {}
    for step in steps:
        item_of = {number: number_of.get((id(kind), id(module)))
                   for number, (kind, module, _) in step.calls.items()}
        called = set(item_of.values())
        followed = {number for number, item in item_of.items() if item is not None}
        absent = Counter({n: calls for n, (*_, calls) in enumerate(places) if n not in called})
        most = 0
        for (running, held), level in step.moments.items():
            here, own = absent.copy(), item_of.get(running)
            outside = sum(kept_of(step.calls[c][2], followed) for c in held
                          if c in item_of and item_of[c] is None)
            for c in held | {running}:
                n = item_of.get(c)
                if n is not None:
                    here[n] = here[n] + 1 if n in alike else places[n][2]
            if own is None and running in step.calls:           # as it is
                call = step.calls[running][2]
                level = max(level + call.peak * (running not in held), call.backward)
            level += outside + step.between + waiting
            if own is not None:
                most = max(most, level)
            key = own, frozenset(here.items())
            found[key] = max(level, found.get(key, 0))
        everything = frozenset((n, calls) for n, (*_, calls) in enumerate(places))
        for n in absent:                        # at any place of the step, as far as is known
            found[n, everything] = max(most, found.get((n, everything), 0))
    return [Moment(level, dict(held), own) for (own, held), level in found.items()]


def room_for(wholes: Sequence[Way], moments: Sequence[Moment], budget: int) -> tuple[float, bool]:
    """Return the share of what calls hold without recomputation that they can hold at any moment within a
    budget, and whether all of it fits.

    `wholes`: the figures of each item without recomputation.
    """
    share = min(((budget - m.bytes) / max(1, m.taken(wholes) - m.bytes) for m in moments if m.held),
                default=1.0)
    return share, all(m.taken(wholes) <= budget for m in moments)
