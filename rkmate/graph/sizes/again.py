"""Captures that serve an equal call once more: another budget for the same model, say.

Whether a model is still what was captured is asked of its own Python. Its training step runs dry again
(`rkmate.graph.sizes.dry_run`): if that does the same operations on the same numbers, in the same order, for
modules and tensors of the same names, then a trace would give the same graph. So a layer that was replaced, a
train flag, a hook, or a value that the forward reads from anywhere is noticed if it changes the step.

If the capture made no dry run of the whole model, the second equal call makes one, and the third is served.
Captures that hold something of the model are not kept: constants, attributes that the forward assigns, values
that it reads, and marks of `rkmate.keep`. So nothing that is kept refers to the model.
"""

from __future__ import annotations

import hashlib
import marshal
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from rkmate import device as devices
from rkmate.graph.capture.captured import Capture
from rkmate.graph.capture.effects import Effects
from rkmate.graph.capture.hints import hints_in
from rkmate.graph.capture.opaque import Opaque
from rkmate.graph.capture.structure import Structure, TensorForm, form_of, take_apart
from rkmate.graph.sizes import depth
from rkmate.graph.sizes.dry_run import Recording, dry_run
from rkmate.torch_seam.modules import buffers_by_path, parameters_by_path

T = TypeVar("T")

MOST_NODES = 20_000
"""Nodes of all captures that are kept, and of what was made of them, except the latest capture; a node takes
about 3 KiB."""
MOST_CALLS = 4
"""Calls that are known, with a capture or without."""


class _Call(NamedTuple):
    """The key by which a capture is found again."""

    tensors: tuple[TensorForm, ...]
    inputs: Structure
    modules: tuple[tuple[str, str], ...]
    """Path and class of each module."""
    names: tuple[tuple[str, int], ...]
    """Names of the parameters and buffers; a tensor with several names has one number."""
    deterministic: bool


class _Step(NamedTuple):
    """The summary of a dry run."""

    text: bytes
    numbers: bytes
    result: Structure


@dataclass(eq=False)
class _Known:
    """A call that was captured."""

    owner: weakref.ref[nn.Parameter]
    """A parameter of the model: the entry goes when the parameter does."""
    call: _Call
    step: _Step | None
    capture: Capture | None
    made: dict[Hashable, Any] = field(default_factory=dict)
    """Results of later stages; each takes about as much memory as the capture."""

    @property
    def nodes(self) -> int:
        return 0 if self.capture is None else len(self.capture.graph.nodes) * (1 + len(self.made))


_known: list[_Known] = []
"""The calls that were captured last, the latest at the end."""


def capture(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], opaque: Opaque = ()) -> Capture:
    """Return the joint graph of one training step: that of an equal call before, or a new one
    (`rkmate.graph.sizes.depth.captured`). One thread at a time. Raises `CaptureError`, `ArgumentError`."""
    tensors, inputs = take_apart((args, kwargs), result=False)
    held = [*parameters_by_path(model), *buffers_by_path(model)]
    owner = next(model.parameters(), None)
    if opaque or owner is None or not inputs.is_plain or not _are_plain([*tensors, *(t for _, t in held)]):
        return depth.captured(model, args, kwargs, opaque)[0]
    numbers: dict[int, int] = {}
    call = _Call(tuple(map(form_of, tensors)), inputs,
                 tuple((path, f"{type(m).__module__}.{type(m).__qualname__}")
                       for path, m in model.named_modules(remove_duplicate=False)),
                 tuple((name, numbers.setdefault(id(t), len(numbers))) for name, t in held),
                 torch.are_deterministic_algorithms_enabled())
    before = next((k for k in _known if k.owner() is owner and k.call == call), None)
    if before is not None and before.capture is not None:
        step = _step_of(dry_run(model, inputs, call.tensors))
        if step is not None and step == before.step:
            return replace(before.capture, inputs=inputs)
    found, recording = depth.captured(model, args, kwargs, opaque)
    if not _holds_something(found):
        if recording is None and before is not None:
            recording = dry_run(model, inputs, call.tensors)
        step = _step_of(recording)
        _keep(_Known(weakref.ref(owner, _forget), call, step, None if step is None else found))
    return found


def once_of(capture: Capture, key: Hashable, make: Callable[[], T]) -> T:
    """Return what a later stage makes of a capture. If the capture is kept for equal calls, so is the result,
    under a key that tells it from other results of the capture, as long as `MOST_NODES` allows."""
    known = next((k for k in _known if k.capture is not None
                  and replace(k.capture, inputs=capture.inputs) == capture), None)
    if known is None:
        return make()
    if key in known.made:
        return known.made[key]              # type: ignore[no-any-return]
    found = make()
    if known.nodes + len(capture.graph.nodes) <= MOST_NODES:
        known.made[key] = found
    return found


def _are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all are ordinary tensors, on devices that are present."""
    return all(type(t) in (torch.Tensor, nn.Parameter) and t.layout is torch.strided and not t.is_nested
               for t in tensors) and all(devices.of(d).elsewhere is None for d in {t.device for t in tensors})


def _holds_something(found: Capture) -> bool:
    """Return whether a capture refers to the model, or whether a dry run does not tell all that it has."""
    return bool(found.constants or found.assigned or found.completed or found.effects != Effects()
                or found.repeats or found.recipe is not None or hints_in(found.graph))


def _step_of(recording: Recording | None) -> _Step | None:
    # Bytes, as equal numbers may differ in their types or signs.
    return None if recording is None else _Step(
        recording.text, hashlib.sha256(marshal.dumps(recording.numbers, 2)).digest(), recording.result)


def _keep(known: _Known) -> None:
    """Keep a call, which replaces an equal one; forget the oldest."""
    owner = known.owner()
    _known[:] = [*(k for k in _known if k.owner() is not owner or k.call != known.call), known]
    while len(_known) > MOST_CALLS or (len(_known) > 1 and sum(k.nodes for k in _known) > MOST_NODES):
        del _known[0]


def _forget(_: Any) -> None:
    """Forget the calls of models that are gone."""
    _known[:] = [k for k in _known if k.owner() is not None]
