"""Calls of parts in a step that is observed, and the figures of that step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rkmate.ir.simulate import LOSS_SCALARS

REST = 0
"""The number of what belongs to no part, where calls of parts have numbers from 1 on."""


@dataclass
class PartCall:
    """A call of a part."""

    number: int
    inputs: set[int]
    """Storages of its arguments."""
    edges: set[int]
    """Marks of the nodes of autograd's graph that its arguments come from."""
    sources: list[tuple[int, int]] = field(default_factory=list)
    """For each argument tensor, its node's mark and its number among the node's results; until the forward is
    over."""
    shared: set[int] = field(default_factory=set)
    """Numbers of the argument tensors that others use, too, and contribute gradients to; or may: the caller,
    where a tensor comes from outside of the module's call."""
    level: int = 0
    """Bytes that the rest held when it began."""
    peak: int = 0
    """Bytes that its forward took on top of that, at most; 0 where nothing was measured."""
    backward: int = 0
    """Bytes that the rest and its backward took together, at most, without what it has saved; 0 where nothing
    was measured."""
    saved: int = 0
    """Bytes that it alone has saved."""
    handed: dict[int, tuple[int, set[int]]] = field(default_factory=dict)
    """Storage of a result -> its bytes, and who holds it: `REST` where something else saves it, and the calls
    that take it as an argument and save nothing of it. Their plans hold it, to compute from it again."""
    outputs: list[tuple[int, int]] = field(default_factory=list)
    """For each output tensor, its node's mark and its number among the node's results; until the forward is
    over."""
    places: list[int] = field(default_factory=list)
    """For each output tensor, its number among the results of its node."""
    taught: set[int] = field(default_factory=set)
    """Numbers of the outputs through which gradients came."""
    living: dict[int, tuple[int, Callable[[], bool]]] = field(default_factory=dict)
    """Number of a new output -> its storage, and whether that still lives; until the forward is over."""
    dropped: set[int] = field(default_factory=set)
    """Numbers of the outputs that nothing holds after the forward."""
    strides: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Number of an output -> the strides of its gradient, if no two of its elements share a place."""


@dataclass(eq=False)
class Figures:
    """Bytes of a step, as far as it was observed."""

    unsaved: int = 0
    """Bytes of arguments of parts that the rest has made, and that nothing saves."""
    outputs: int = 0
    """Bytes of what the outermost calls return, apart from what is counted elsewhere."""
    beside: int = 0
    """Bytes that the rest takes while a part runs, at most."""
    alone: int = 0
    """Bytes that the rest takes while no part runs, at most."""
    early: int = 0
    """Bytes that the rest takes before the first part was called, or after the last one's backward."""
    loss: int = 0
    """Bytes that a loss takes that is computed from what the latest outermost call returns: three times the
    outputs, until it was measured."""
    between: int = LOSS_SCALARS
    """Bytes that the caller makes of what is returned, and keeps: a loss's numbers, and more of results that
    other calls follow."""
    kept: int = 0
    """Bytes that are kept for the backward, at most."""
    peak: int = 0
    """Bytes of the whole step as it is, at most."""
