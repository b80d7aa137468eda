"""Outputs that a plan leaves out and that are computed when they are read: their names, and the notes about
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from rkmate.graph.blocks.lower import storage_bytes
from rkmate.graph.capture.structure import Structure
from rkmate.graph.passes.joint import Joint
from rkmate.ir.plan import PlanData
from rkmate.pipeline.prepare import Blocked, Traced
from rkmate.show.amounts import size
from rkmate.torch_seam.nodes import VALUE


def name_of(result: Structure, number: int) -> str:
    """Return the model's name of an output tensor, such as ``logits``; without a name, its number."""
    return next((name for name, found in result.names().items() if found == {number}), str(number))


def names_of(blocked: Blocked) -> tuple[str, ...]:
    """Return the deferred outputs of a graph."""
    result = blocked.traced.capture.result
    return tuple(name_of(result, d.output) for d in blocked.partition.program.joint.deferred)


def note_of(blocked: Blocked) -> str:
    """Return a plan's note about its deferred outputs; empty if there are none."""
    joint = blocked.partition.program.joint
    if not joint.deferred:
        return ""
    names = " and ".join(names_of(blocked))
    several = len(joint.deferred) > 1
    return (f"the output{'s' if several else ''} {names} {'are' if several else 'is'} computed when somebody "
            f"reads {'them' if several else 'it'}, which takes {size(bytes_of(joint))} on top of the plan")


def bytes_of(joint: Joint) -> int:
    """Return the bytes that the deferred outputs take once they are read."""
    return sum(storage_bytes(d.result.meta[VALUE]) for d in joint.deferred)


def undeferred(traced: Traced) -> Traced:
    """Return a captured model whose steps compute all outputs."""
    return replace(traced, settings=replace(traced.settings, deferred_outputs="never"))


def as_planned(traced: Traced, plans: Sequence[PlanData]) -> list[Traced]:
    """Return a captured model with its outputs deferred, or not, as plans have them."""
    settings = traced.settings
    wanted: dict[Literal["auto", "never"], None] = dict.fromkeys(
        "auto" if plan.deferred else "never" for plan in plans)
    return [traced if settings.deferred_outputs == w else
            replace(traced, settings=replace(settings, deferred_outputs=w)) for w in wanted]
