"""One capture, one preparation and one set of options for several plans of a model: most of a small test's
time goes into them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from rkmate.graph.capture.captured import Capture
from rkmate.graph.sizes.again import capture
from rkmate.pipeline import prepare as pipeline
from rkmate.pipeline import search as planning
from rkmate.pipeline.prepare import Blocked, Prepared, Traced, block, prepare
from rkmate.pipeline.solve import Solved, solve
from rkmate.pipeline.variants import Variant

_HERE = threading.local()
"""What the blocks of this thread have made."""


@dataclass
class _Made:
    """What was made of one model."""

    capture: Capture
    blocked: list[Blocked] = field(default_factory=list)
    prepared: list[Prepared] = field(default_factory=list)
    solved: list[Solved] = field(default_factory=list)


_LATEST: dict[str, _Made] = {}


@contextmanager
def captured_once(kind: str | None = None) -> Iterator[None]:
    """Inside, in this thread, a model is captured when it is first planned; to be called with the same
    inputs again. What is made of the capture under the same settings is made once, too.

    `kind`: one capture serves all models that are made this way, one after the other; the latest kind
    is remembered.
    """
    outer = getattr(_HERE, "found", None)
    if outer is None:
        _HERE.found, _HERE.kind = {}, kind
    try:
        yield
    finally:
        if outer is None:
            del _HERE.found, _HERE.kind


def _capture(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], opaque: Any = ()) -> Capture:
    found: dict[int, tuple[nn.Module, _Made]] | None = getattr(_HERE, "found", None)
    if found is None:
        return capture(model, args, kwargs, opaque)
    if id(model) not in found:
        made = _LATEST.get(_HERE.kind or "") or _Made(capture(model, args, kwargs, opaque))
        found[id(model)] = model, made
        if _HERE.kind:
            _LATEST.clear()
            _LATEST[_HERE.kind] = made
    return found[id(model)][1].capture


def _made_of(traced: Traced) -> _Made | None:
    found: dict[int, tuple[nn.Module, _Made]] = getattr(_HERE, "found", None) or {}
    return next((made for _, made in found.values() if made.capture is traced.capture), None)


def _is_of(known: Blocked, traced: Traced, variant: Variant | None) -> bool:
    before = known.traced
    return (before.wanted, before.settings) == (traced.wanted, traced.settings) and \
        known.variant == (variant or pipeline.first(traced.settings))


def _block(traced: Traced, variant: Variant | None = None) -> Blocked:
    made = _made_of(traced)
    if made is None:
        return block(traced, variant)
    for known in made.blocked:
        if _is_of(known, traced, variant):
            return known
    made.blocked.append(block(traced, variant))
    return made.blocked[-1]


def _prepare(traced: Traced, variant: Variant | None = None, *, blocked: Blocked | None = None,
             limit: Callable[[Blocked], int] | None = None) -> Prepared:
    made = _made_of(traced)
    if made is None:
        return prepare(traced, variant, blocked=blocked, limit=limit)
    for known in made.prepared:
        if _is_of(known.blocked, traced, blocked.variant if blocked is not None else variant):
            return known
    made.prepared.append(prepare(traced, variant, blocked=blocked))     # no limit: it serves all budgets
    return made.prepared[-1]


def _solve(prepared: Prepared) -> Solved:
    made = _made_of(prepared.blocked.traced)
    if made is None:
        return solve(prepared)
    for known in made.solved:
        if known.prepared is prepared:
            return known
    made.solved.append(solve(prepared))
    return made.solved[-1]


# For good: patched anew by each block, it would not come back where two threads' blocks overlap.
pipeline.capture = _capture  # type: ignore[attr-defined]
planning.block = _block  # type: ignore[attr-defined]
planning.prepare = _prepare  # type: ignore[attr-defined]
planning.solve = _solve  # type: ignore[attr-defined]
