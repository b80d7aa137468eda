"""Captures of one call at several sizes, from which the capture at a further size is derived.

Two full captures of a call at different sizes, and dry runs of both, give the graph of a third (`resized`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rkmate.graph.capture.capture import Capture
from rkmate.graph.capture.structure import TensorForm, form_of, take_apart
from rkmate.graph.sizes.dry_run import Recording, dry_run
from rkmate.graph.sizes.resized import Known, SideBySide, resized, side_by_side


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


def known_call(capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any],
               recording: Recording | None = None) -> KnownCall:
    """Return a call, its capture and, where it was made, its dry run."""
    tensors, structure = take_apart((args, kwargs), result=False)
    return KnownCall(replace(capture, inputs=structure), tuple(map(form_of, tensors)), recording,
                     recording is not None)


def possible(shapes: Sequence[Sequence[int]], known: Sequence[Sequence[Sequence[int]]]) -> bool:
    """Return whether known calls' shapes, each of the same tensors, may tell the sizes of a new one: what is
    the same in all of them is the same in it."""
    if len(known) < 2:
        return False
    for places in zip(shapes, *known, strict=True):
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
            known: Sequence[KnownCall]) -> tuple[Capture | None, Recording | None]:
    """Return the capture of a call from known ones, if that is certain; and the dry run of the call.

    The calls differ in the sizes of their tensors alone, and arguments that libraries look at are of the same
    kinds; one thread at a time.
    """
    tensors, structure = take_apart((args, kwargs), result=False)
    new = dry_run(model, structure, [form_of(t) for t in tensors], looked=known[-1].capture.looked)
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
            k.recording, k.recorded = dry_run(model, k.capture.inputs, k.forms,
                                                 looked=k.capture.looked), True


def _alike(known: Sequence[KnownCall], new: Recording) -> tuple[list[Known], SideBySide | None]:
    """Return the known calls that do the operations of another one, and what they have in common, if it is at
    hand in whatever order they came; None where they are too few, or have nothing in common."""
    # A first call may set an attribute that later ones find set (transformers' `problem_type`).
    same = [k for k in known if k.recording is not None and k.recording.text == new.text
            and [a.path for a in k.capture.assigned] == [a.path for a in known[-1].capture.assigned]]
    pairs = {id(k.capture): Known(k.capture, k.recording) for k in same if k.recording is not None}
    if len(pairs) < 2:
        return [], None
    for k in same:
        if k.common is not None and {id(c) for c in k.common.captures} == set(pairs):
            return [pairs[id(c)] for c in k.common.captures], k.common
    same[0].common = side_by_side(list(pairs.values()))
    return list(pairs.values()), same[0].common

