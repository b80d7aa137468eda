"""Recipes of values that a forward computes from its inputs' values, and that are computed again before each
planned step.

A `Recipe` is a straight line of calls from inputs to the values that a trace lacks: tensors whose shapes
depend on values, and values that Python reads. Each of these is an *observation*. A call with other inputs
follows the same recipe, and computes what the forward does, if its observations are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rkmate.torch_seam.containers import pytree

_SCALARS = (int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout,
            torch.memory_format, type(Ellipsis))


@dataclass(frozen=True)
class Slot:
    """Stands for a tensor: first the arguments, then the results of steps."""

    number: int


@dataclass(frozen=True, eq=False)
class Step:
    """A call of a recipe."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int, ...]
    """Slots of the tensors that it returns, in order; empty where the result is a value that Python reads."""

    def run(self, slots: dict[int, torch.Tensor]) -> Any:
        """Run the call and return its result; tensors are put into their slots."""
        args, kwargs = filled((self.args, self.kwargs), slots)
        out = self.function(*args, **kwargs)
        if self.results:
            found = [out] if isinstance(out, torch.Tensor) else tensors_of(out)
            slots.update(zip(self.results, found, strict=True))
        return out


@dataclass(frozen=True, eq=False)
class Segment:
    """The steps that lead to one observation, which is made of the last step."""

    steps: tuple[Step, ...]
    given: tuple[tuple[int, bool], ...]
    """Slots of the last step's results that the plan gets, each with whether it gets a copy."""
    held: tuple[tuple[int, Callable[[], torch.Tensor]], ...] = ()
    """Slots of tensors that are none of the arguments (buffers), each with what looks one up."""

    def run(self, slots: dict[int, torch.Tensor], given: list[torch.Tensor]) -> str:
        """Run the segment and return what is observed."""
        slots.update((n, get()) for n, get in self.held)
        for step in self.steps:
            out = step.run(slots)
        given += (slots[n].clone() if copied else slots[n] for n, copied in self.given)
        return observed(out, [slots[n] for n in step.results])


@dataclass(frozen=True, eq=False)
class Recipe:
    """The computation of a plan's inputs that are not arguments of the call."""

    segments: tuple[Segment, ...]
    observed: tuple[str, ...]
    """Observations after each segment."""
    bytes: int
    """Bytes of the computed inputs, which are in memory during the whole step."""

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the plan's inputs that are not arguments, for the arguments that the recipe was recorded
        with."""
        slots, given = dict(enumerate(tensors)), list[torch.Tensor]()
        with torch.no_grad():
            for segment in self.segments:
                segment.run(slots, given)
        return given


class Recipes:
    """The recipes of one signature: the observations on the way decide which recipe continues."""

    def __init__(self) -> None:
        self._next: dict[tuple[str, ...], Segment | None] = {}

    def add(self, recipe: Recipe) -> None:
        """Register the recipe of one capture."""
        for k, segment in enumerate(recipe.segments):
            self._next.setdefault(recipe.observed[:k], segment)
        self._next.setdefault(recipe.observed, None)

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[str, ...], list[torch.Tensor]] | None:
        """Return what is observed of a call, and the plan's inputs that are not arguments; None if no recipe
        has these observations."""
        slots, given = dict(enumerate(tensors)), list[torch.Tensor]()
        path: tuple[str, ...] = ()
        with torch.no_grad():
            while path in self._next:
                segment = self._next[path]
                if segment is None:
                    return path, given
                path = (*path, segment.run(slots, given))
        return None


def filled(value: Any, slots: dict[int, torch.Tensor]) -> Any:
    """Return the arguments of a step with tensors in their places."""
    if isinstance(value, Slot):
        return slots[value.number]
    if isinstance(value, (tuple, list)):
        return type(value)(filled(v, slots) for v in value)
    if isinstance(value, dict):
        return {k: filled(v, slots) for k, v in value.items()}
    return value


def is_plain(value: Any) -> bool:
    """Return whether a call can be repeated with the same arguments, except tensors."""
    if isinstance(value, slice):
        return is_plain((value.start, value.stop, value.step)) and not tensors_of(
            (value.start, value.stop, value.step))
    if isinstance(value, (tuple, list)):
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(map(is_plain, value.values()))
    return isinstance(value, (torch.Tensor, *_SCALARS))


def mapped(of: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return a value with its tensors replaced; containers become tuples, lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        return of(value)
    if isinstance(value, list):
        return [mapped(of, v) for v in value]
    if isinstance(value, tuple):
        return tuple(mapped(of, v) for v in value)
    if isinstance(value, dict):
        return {k: mapped(of, v) for k, v in value.items()}
    return value


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in what a call returns."""
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def observed(out: Any, tensors: Iterable[torch.Tensor]) -> str:
    """Return everything that decides how a forward continues after a call, as text."""
    forms = [(tuple(t.shape), t.stride(), str(t.dtype), str(t.device)) for t in tensors]
    return repr(forms) if forms else repr(out)


class Builder:
    """Collects steps while a forward is recorded, without those that no observation depends on."""

    def __init__(self, arguments: int) -> None:
        self._slots = arguments
        self._steps: list[_Recorded] = []
        self._of: dict[int, int] = {}
        """The step that a slot comes from."""
        self._observations: list[tuple[int, str, tuple[int, ...]]] = []
        """For each observation: its step, its text, and the slots that the plan may get."""
        self._held: dict[int, Callable[[], torch.Tensor]] = {}

    def hold(self, get: Callable[[], torch.Tensor]) -> int:
        """Return a number for a tensor that is none of the arguments, and is looked up at each call."""
        slot = self.new_slot()
        self._held[slot] = get
        return slot

    def new_slot(self) -> int:
        """Return a number for a tensor."""
        self._slots += 1
        return self._slots - 1

    def add(self, step: Step, reads: frozenset[int], writes: frozenset[int]) -> int:
        """Record a step. `reads`, `writes`: storages. Returns its number."""
        self._steps.append(_Recorded(step, reads, writes))
        for slot in step.results:
            self._of.setdefault(slot, len(self._steps) - 1)
        return len(self._steps) - 1

    def observe(self, number: int, what: str, given: Sequence[int] = ()) -> None:
        """Note that the rest of the forward depends on a step; the plan may get the slots in `given`."""
        self._observations.append((number, what, tuple(given)))

    def is_written_after(self, number: int, storage: int) -> bool:
        """Return whether a later step writes to it."""
        return any(storage in s.writes for s in self._steps[number + 1:])

    def recipe(self, copied: dict[int, bool], size: int) -> Recipe:
        """Return all that was observed. `copied`: the slots that the plan gets, and whether as copies;
        `size`: their bytes."""
        done: set[int] = set()
        segments: list[Segment] = []
        for number, _, given in self._observations:
            needed = self._needed(number) - done
            done |= needed
            steps = [self._steps[k].step for k in sorted(needed) if k != number]
            steps.append(self._steps[number].step)
            read = {s.number for step in steps for s in _slots((step.args, step.kwargs))}
            segments.append(Segment(tuple(steps), tuple((s, copied[s]) for s in given if s in copied),
                                    tuple((n, get) for n, get in self._held.items() if n in read)))
        return Recipe(tuple(segments), tuple(what for _, what, _ in self._observations), size)

    def _needed(self, number: int) -> set[int]:
        """Return a step and the steps before it that it depends on. If a step writes to a storage, earlier
        steps that read that storage come before it, too, needed or not, because they may be needed later."""
        found: set[int] = set()
        todo = [number]
        while todo:
            k = todo.pop()
            if k in found:
                continue
            found.add(k)
            here = self._steps[k]
            todo += [self._of[s.number] for s in _slots((here.step.args, here.step.kwargs))
                     if s.number in self._of]
            touched = here.reads | here.writes
            todo += [j for j in range(k) if self._steps[j].writes & touched
                     or self._steps[j].reads & here.writes]
        return found


@dataclass(frozen=True, eq=False)
class _Recorded:
    step: Step
    reads: frozenset[int]
    writes: frozenset[int]


def _slots(value: Any) -> list[Slot]:
    if isinstance(value, Slot):
        return [value]
    if isinstance(value, (tuple, list)):
        return [s for v in value for s in _slots(v)]
    if isinstance(value, dict):
        return [s for v in value.values() for s in _slots(v)]
    return []
