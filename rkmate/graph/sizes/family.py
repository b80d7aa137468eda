"""Captures of one call at several sizes, from which the capture at a further size is derived.

Two full captures of a call at different sizes, and dry runs of both, give the graph of a third (`resized`).
So do captures with other numbers, where operators compute with all of them in one way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rkmate.graph.capture.answers import Kinds
from rkmate.graph.capture.captured import Capture
from rkmate.graph.capture.structure import Structure, TensorForm, form_of, take_apart
from rkmate.graph.ops.properties import kind_of_number
from rkmate.graph.sizes.dry_run import Recording, dry_run
from rkmate.graph.sizes.resized import Known, Number, SideBySide, resized, side_by_side


@dataclass
class KnownCall:
    """A call that was captured in full."""

    capture: Capture
    forms: tuple[TensorForm, ...]
    """Forms of the arguments' tensors."""
    recording: Recording | None = None
    """The dry run; made when it is first needed."""
    recorded: bool = False
    common: SideBySide | None = None
    """Structure that its capture has in common with others, from the last time that it was needed."""
    numbers: tuple[float, ...] = ()
    """Numbers that the call was made with, other ones in other calls of the family: those of arguments and
    attributes."""


def known_call(capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any],
               recording: Recording | None = None, numbers: tuple[float, ...] = ()) -> KnownCall:
    """Return a call, its capture and, where it was made, its dry run."""
    tensors, structure = take_apart((args, kwargs), result=False)
    return KnownCall(replace(capture, inputs=structure), tuple(map(form_of, tensors)), recording,
                     recording is not None, numbers=numbers)


def possible(sizes: Sequence[Sequence[Number]], known: Sequence[Sequence[Sequence[Number]]]) -> bool:
    """Return whether the sizes and numbers of known calls, each of the same tensors, may tell those of a new
    one: what is the same in all of them is the same in it."""
    if len(known) < 2:
        return False
    for places in zip(sizes, *known, strict=True):
        for now, *before in zip(*places, strict=True):
            if now not in before and len(set(before)) == 1:
                return False
    return True


def one_family(known: KnownCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of contiguous tensors differs from a known one in their lengths at most, and in
    none that is 0 or 1, which torch treats otherwise (broadcasting, strides)."""
    tensors, structure = take_apart((args, kwargs), result=False)
    if not structure.is_plain or structure != known.capture.inputs:
        return False
    return all(
        a.dtype == b.dtype and a.device == b.device and a.requires_grad == b.requires_grad
        and len(a.shape) == len(b.shape)
        and _is_contiguous(a) and _is_contiguous(b)
        and all(m == n or min(m, n) > 1 for m, n in zip(a.shape, b.shape, strict=True))
        for a, b in zip(map(form_of, tensors), known.forms, strict=True))


def _is_contiguous(form: TensorForm) -> bool:
    return torch.empty_strided(form.shape, form.stride, device="meta").is_contiguous()


def derived(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
            known: Sequence[KnownCall], numbers: tuple[float, ...] = ()
            ) -> tuple[Capture | None, Recording | None]:
    """Return the capture of a call from known ones, if that is certain; and the dry run of the call.

    The calls differ in the sizes of their tensors and in their `numbers` alone, and arguments that libraries
    look at are of the same kinds; one thread at a time.
    """
    tensors, structure = take_apart((args, kwargs), result=False)
    new = _recorded(model, structure, [form_of(t) for t in tensors], known[-1].capture.looked, numbers)
    if new is None:
        return None, None
    _record(model, known)
    pairs, common = _alike(known, new)
    found = None if common is None else resized(pairs, new, common)
    return (None if found is None else replace(found, inputs=structure)), new


def compare(model: nn.Module, known: Sequence[KnownCall]) -> None:
    """Do what `derived` needs of known calls alone ahead of the first new one; one thread at a time."""
    _record(model, known)
    latest = known[-1].recording
    if latest is not None:
        _alike(known, latest)


def _record(model: nn.Module, known: Sequence[KnownCall]) -> None:
    for k in known:
        if not k.recorded:
            k.recording, k.recorded = _recorded(model, k.capture.inputs, k.forms, k.capture.looked,
                                                k.numbers), True


def _recorded(model: nn.Module, inputs: Structure, forms: Sequence[TensorForm], looked: Kinds,
              numbers: tuple[float, ...]) -> Recording | None:
    """Return a dry run, whose numbers end with those that the call was made with: a patched operation may
    read them as they are."""
    made = dry_run(model, inputs, forms, looked=looked)
    return None if made is None else replace(made, numbers=(*made.numbers, *numbers))


def _alike(known: Sequence[KnownCall], new: Recording) -> tuple[list[Known], SideBySide | None]:
    """Return the known calls that do the operations of another one in its ways, and what they have in common,
    if it is at hand in whatever order they came; None where they are too few, or have nothing in common."""
    # A first call may set an attribute that later ones find set (transformers' `problem_type`).
    same = [k for k in known if k.recording is not None and k.recording.text == new.text
            and all(a == b or type(a) is not float or kind_of_number(a) == kind_of_number(b)
                    for a, b in zip(k.recording.numbers, new.numbers, strict=True))
            and [a.path for a in k.capture.assigned] == [a.path for a in known[-1].capture.assigned]]
    pairs = {id(k.capture): Known(k.capture, k.recording) for k in same if k.recording is not None}
    if len(pairs) < 2:
        return [], None
    for k in same:
        if k.common is not None and {id(c) for c in k.common.captures} == set(pairs):
            return [pairs[id(c)] for c in k.common.captures], k.common
    same[0].common = side_by_side(list(pairs.values()))
    return list(pairs.values()), same[0].common

