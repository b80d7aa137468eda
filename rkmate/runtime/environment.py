"""The values of a running step: where generated source reads and writes, data that is away, and gradients
that the backward adds by itself.

For the last, what can change after a module was wrapped is looked at before each forward and before each
backward: hooks on parameters, the form of what stands in ``.grad``, and what the backward was called for. A
step that fails half-way leaves a mark at the gradients that it has begun to add to: the next forward refuses
to add to them until they are zeroed, replaced or set to None.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.autograd.graph import increment_version

from rkmate import device as devices
from rkmate.device.random_state import RandomState, unchanged_random_state
from rkmate.errors import ArgumentError, BackwardError
from rkmate.offload.protocol import StepCopies
from rkmate.pipeline.model import IN_PLACE, RETURNED, obstacle
from rkmate.torch_seam.tensors import add_to_all, copy_all, storage_id, version_of, will_accumulate

# -- Gradients that a backward adds by itself ------------------------------------------------------

_MARK = "_rkmate_half_added"
"""Attribute of a gradient: a step failed that had begun to add."""

adding = threading.RLock()
"""Held around every addition to a parameter's gradient: another thread's step may add to the same one."""


class Held(dict[str, torch.Tensor]):
    """Tensors of the caller, by source key. A parameter's gradient is looked up at each access, and made (of
    zeros) if there is none."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().__init__(tensors)
        self.additions: Additions | None = None

    def with_others(self, others: Mapping[str, torch.Tensor]) -> Held:
        """Return the tensors with some of them replaced."""
        found = Held({**self, **others}.items())
        found.additions = self.additions
        return found

    def __missing__(self, key: str) -> torch.Tensor:
        kind, _, name = key.partition(":")
        if kind != "grad":
            raise KeyError(key)
        parameter = self[f"param:{name}"]
        if self.additions is not None:
            self.additions.begun = True
        with adding:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif why := obstacle(parameter):
                raise BackwardError(f"{IN_PLACE}: the parameter {name!r} {why}. {RETURNED}")
            return parameter.grad


class Additions:
    """The parameters whose gradients one call's backward adds to."""

    __slots__ = ("_names", "_parameters", "begun")

    def __init__(self, held: Held, names: Sequence[str]) -> None:
        """Begin with a forward. Raises `ArgumentError` if it is known that the backward may not add to
        gradients, or that a backward before this one failed half-way."""
        self.begun = False
        """Whether a gradient was looked up to be added to."""
        held.additions = self
        self._names = names
        self._parameters = [held[f"param:{name}"] for name in names]
        for name, parameter in zip(names, self._parameters, strict=True):
            if why := obstacle(parameter):
                raise ArgumentError(f"{IN_PLACE}: the parameter {name!r} {why}. {RETURNED}")
            if _is_half_added(parameter.grad):
                raise ArgumentError(f"{IN_PLACE}: a backward failed when it had added a part of its "
                                    f"gradients (for example, to that of {name!r}): zero them first "
                                    "(zero_grad), before anything else adds to them, or set them to None")

    def check(self) -> None:
        """Check the parameters before a backward adds anything. Raises `BackwardError` if a gradient is
        needed as a separate tensor."""
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if why := obstacle(parameter):
                raise BackwardError(f"{IN_PLACE}: the parameter {name!r} {why}. {RETURNED}")
            if not parameter.requires_grad or not will_accumulate(parameter):
                raise BackwardError(
                    f"{IN_PLACE}: this backward does not add to the gradient of {name!r}, as "
                    "torch.autograd.grad and backward(inputs=...) do not, or not to all; a planned one "
                    f"always does. Call loss.backward() alone. {RETURNED}")

    def count(self) -> None:
        """Count the gradients as written, after the backward."""
        if self.begun:
            increment_version([p.grad for p in self._parameters if p.grad is not None])

    def were_interrupted(self) -> None:
        """Mark the gradients after a failed backward, if it had begun to add to them."""
        self.count()
        for parameter in self._parameters if self.begun else ():
            if parameter.grad is not None:
                setattr(parameter.grad, _MARK, True)


def _is_half_added(grad: torch.Tensor | None) -> bool:
    """Return whether a gradient has a mark, and is anything but zeros; the mark of zeros is taken away."""
    if grad is None or not hasattr(grad, _MARK):
        return False
    if grad.any():
        return True
    delattr(grad, _MARK)
    return False


# -- The environment of a step ---------------------------------------------------------------------
#
# What generated source runs on: the environment of one call.


_random = threading.RLock()
"""Held around every random operation of a planned step: a replay moves the default generator back,
and no other planned module may draw meanwhile."""


class Environment:
    """The storages that one forward has left, and what the caller holds.

    Consumed by one backward; the forward of another call has an environment of its own.
    """

    __slots__ = ("_away", "_buffer_bytes", "_rng", "_sources", "_values", "_versions", "_watched", "device",
                 "dry", "unrecorded")

    def __init__(self, sources: Mapping[str, torch.Tensor], versions: Mapping[str, int],
                 device: torch.device, *, dry: bool = False, away: StepCopies | None = None,
                 buffer_bytes: int = 0) -> None:
        """`sources`: the caller's tensors, by key. `versions`: their versions at the forward, except those of
        tensors without versions (inference tensors) and of tensors that may change before the backward
        because it does not depend on their values. `dry`: write nothing back. `away`: copies values away, if
        the step does that; closed at the end of the backward, or where the call is forgotten. `buffer_bytes`:
        bytes of the device that its buffers take."""
        self._values: dict[str, torch.Tensor] = {}
        self._sources = sources
        self._rng: dict[str, tuple[RandomState, RandomState]] = {}
        self._versions = versions
        self._watched: dict[str, int] = {}
        self._away, self._buffer_bytes = away, buffer_bytes
        self.device = device
        self.dry = dry
        self.unrecorded = False
        """Whether operations need nothing of autograd."""

    def take(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Return values that die where they are taken."""
        if self._watched and not self._watched.keys().isdisjoint(names):
            self._check_outputs(names)
        return [*map(self._values.pop, names)]

    def read(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Return values that stay."""
        if self._watched and not self._watched.keys().isdisjoint(names):
            self._check_outputs(names)
        return [*map(self._values.__getitem__, names)]

    def give(self, names: Sequence[str], *values: torch.Tensor) -> None:
        """Store values for later functions."""
        self._values.update(zip(names, values, strict=True))

    def drop(self, names: Sequence[str]) -> None:
        """Forget values that nobody takes."""
        for n in names:
            self._values.pop(n, None)

    def pop(self, name: str) -> torch.Tensor:
        """Remove a value and return it."""
        return self._values.pop(name)

    def copy_out(self, name: str) -> None:
        """Begin to copy a value away."""
        self._copies().out(name, self._values[name])

    def leave(self, name: str) -> None:
        """Wait for the end of that, and forget the value."""
        del self._values[name]
        self._copies().leave(name)

    def copy_in(self, name: str) -> None:
        """Make room for a value, and begin to copy it back."""
        self._values[name] = self._copies().back(name)

    def arrive(self, name: str) -> None:
        """Wait for the end of that."""
        self._copies().arrive(name)

    def _copies(self) -> StepCopies:
        assert self._away is not None, "nothing copies values away"
        return self._away

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._values[name]

    def sources(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Return parameters, buffers, constants and inputs.

        Raises `BackwardError` when one was changed in place since the forward.
        """
        found = [*map(self._sources.__getitem__, names)]
        if self._versions:
            check_versions(self._versions, names, found)
        return found

    def watch_sources(self, versions: Mapping[str, int]) -> None:
        """Require from now on that each of these sources has this version."""
        self._versions = versions

    def check_sources(self) -> None:
        """Raise `BackwardError` when one of them was changed."""
        self.sources([n for n in self._versions if n in self._sources])

    def source(self, name: str) -> torch.Tensor:
        """Return one parameter, buffer, constant or input; see `sources`."""
        return self.sources((name,))[0]

    def write(self, name: str, value: torch.Tensor) -> None:
        """Write back what the forward overwrites, once."""
        if not self.dry:
            self._sources[name].copy_(value)

    def write_all(self, names: Sequence[str], *values: torch.Tensor) -> None:
        """Write back several values that the forward overwrites, in few calls."""
        if not self.dry:
            copy_all([self._sources[n] for n in names], values)

    def count(self, names: Sequence[str], by: int) -> None:
        """Add a number to what the forward counts up."""
        if not self.dry:
            add_to_all([self._sources[n] for n in names], by)

    def watch(self, names: Iterable[str]) -> None:
        """Remember the versions of values that the user gets and may write into."""
        values = self._values
        self._watched = {n: version(values[n]) for n in names if n in values}

    def kept(self, names: Iterable[str], *, whole: bool) -> Kept:
        """Return what a further backward takes of this forward. `names`: of what the caller holds anyway.
        `whole`: copies of everything, as the forward cannot run again; those that are away are not among
        it."""
        found = {n: self._values[n] for n in names if n in self._values}
        if not whole or self._away is not None:
            return Kept(found, dict(self._watched), None)
        copies = Environment(self._sources, self._versions, self.device, dry=True)
        copies.unrecorded = self.unrecorded
        copies.give([*self._values], *copies_of(self.values()))
        copies._rng.update(self._rng)
        return Kept(found, dict(self._watched), copies)

    def take_over(self, kept: Kept) -> None:
        """Replace what was computed once more by what the caller holds anyway."""
        self._values.update((n, v) for n, v in kept.values.items() if n in self._values)
        self._watched = kept.watched

    def _check_outputs(self, names: Sequence[str]) -> None:
        for n in names:
            if n in self._watched and self._watched[n] != version(self._values[n]):
                raise BackwardError("an output of the module was changed in place after the forward, "
                                    "and the backward needs its value: change a copy of it")

    def draw(self) -> threading.RLock:
        """Return the lock around a random operation that runs once."""
        return _random

    def adding(self) -> threading.RLock:
        """Return the lock around an addition to a parameter's gradient."""
        return adding

    @contextmanager
    def remember(self, name: str) -> Iterator[None]:
        """Store the generator's state around a random operation that will run again."""
        with _random:
            before = generator_state(self.device)
            yield
            self._rng[name] = before, generator_state(self.device)

    @contextmanager
    def replay(self, name: str) -> Iterator[None]:
        """Run a random operation again with the draws of its first run."""
        before, after = self._rng[name]
        with generators_at(self.device, before):
            yield
            if generator_state(self.device) != after:
                raise BackwardError("another thread drew random numbers while a planned step "
                                    "drew or repeated its own: the gradients would be wrong. Draw before "
                                    "the forward or after the backward, or from a generator of that thread")

    def held(self) -> int:
        """Return bytes of the storages that the values stand in, without the caller's; and of buffers of
        copies."""
        theirs = {t.untyped_storage().data_ptr() for t in self._sources.values()}
        found = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in self._values.values())}
        buffers = 0 if self._away is None else self._buffer_bytes
        return buffers + sum(size for where, size in found.items() if where not in theirs)

    def values(self) -> list[torch.Tensor]:
        """Return all values."""
        return [*self._values.values()]

    def values_and_sources(self) -> list[torch.Tensor]:
        """Return all values, and the inputs, parameters and buffers that the call reads."""
        return [*self._values.values(), *self._sources.values()]

    def clear(self) -> None:
        """Free everything."""
        self._values.clear()
        self._sources = {}
        self._rng.clear()
        self._versions = {}
        self._watched = {}
        away, self._away = self._away, None
        if away is not None:
            away.close()


@dataclass(frozen=True)
class Kept:
    """State that a forward has left, for a backward after the first one."""

    values: Mapping[str, torch.Tensor]
    """Outputs, which the caller holds, too."""
    watched: dict[str, int]
    """Versions of tensors, by name."""
    copies: Environment | None
    """Copies of everything, if the forward cannot run again."""


def copies_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of tensors: those that share memory still do."""
    storages: dict[int, torch.UntypedStorage] = {}
    found = []
    for t in tensors:
        key = storage_id(t)
        if key not in storages:
            storages[key] = t.untyped_storage().clone()
        found.append(torch.empty(0, dtype=t.dtype, device=t.device).set_(
            storages[key], t.storage_offset(), t.shape, t.stride()))
    return found


def version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written in place; 0 for inference tensors, which do not count."""
    return 0 if tensor.is_inference() else version_of(tensor)


def check_versions(versions: Mapping[str, int], keys: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
    """Raise `BackwardError` if a tensor was changed in place since its version was noted."""
    for key, tensor in zip(keys, tensors, strict=True):
        noted = versions.get(key)
        if noted is not None and noted != version_of(tensor):
            raise BackwardError(
                f"{source_named(key)} was changed in place between the forward and its backward, so the "
                "gradients would be wrong: run the backward before the change, or change a copy")


def source_named(key: str) -> str:
    """Return the words of a message for a tensor that a step reads, by its key."""
    kind, _, name = key.partition(":")
    return {"param": f"the parameter {name!r}", "buffer": f"the buffer {name!r}",
            "input": f"input tensor number {name}", "kept": "another output"}.get(
        kind, f"the constant {name!r}")


@dataclass(frozen=True)
class RerunState:
    """Data that a second run of one forward needs."""

    sources: Mapping[str, torch.Tensor]
    """Tensors of the caller, by key: the very tensors of the first run, or copies of those that it has
    overwritten."""
    versions: Mapping[str, int]
    draws: RandomState | None
    """State of the generators before the forward; None if nothing is drawn."""
    copied: frozenset[str] = frozenset()
    """The tensors that are copies."""

    def check(self) -> None:
        """Raise `BackwardError` when one of the tensors was changed since the forward."""
        names = [n for n in self.versions if n in self.sources]
        check_versions(self.versions, names, [self.sources[n] for n in names])


def generator_state(device: torch.device) -> RandomState:
    """Return the states of the generators that a step on `device` draws from."""
    return RandomState.of(devices.of(device))


@contextmanager
def generators_at(device: torch.device, state: RandomState) -> Iterator[None]:
    """Run with the generators at a state from before; afterwards they are where they were."""
    with _random:
        with unchanged_random_state(devices.of(device)):
            state.restore()
            yield
