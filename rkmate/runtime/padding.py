"""Lengths that are planned ahead, and calls padded to them.

``RunSettings(lengths=(128, 256), pad={"input_ids": 0})`` plans two lengths ahead. The length is the second
dimension. The arguments that `pad` names (without it, all that have such a dimension) have one length.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rkmate.errors import ArgumentError
from rkmate.graph.capture.structure import take_apart
from rkmate.runtime.adapters import Adapter, Arguments
from rkmate.torch_seam.containers import tensors_in

DIMENSION = 1
"""Dimension of a sequence, in arguments and outputs: the one after the batch."""


@dataclass(frozen=True)
class Lengths:
    """The lengths that are planned ahead, and how inputs are brought to them."""

    lengths: tuple[int, ...]
    """Planned lengths, in increasing order."""
    pad: Mapping[str, int | float | bool] | None
    """Argument name -> what it is padded with; None: nothing is padded."""
    names: tuple[str, ...]
    """Names of the positional arguments."""

    def named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name."""
        return {**dict(zip(self.names, args, strict=False)), **kwargs}

    def samples(self, args: tuple[Any, ...], kwargs: dict[str, Any]
                ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return the sample at every planned length: cut, or made longer by its own last elements (which are
        valid indices)."""
        named = self.named(args, kwargs)
        length = common_length({k: v for k, v in named.items() if self.pad is None or k in self.pad})

        def at(value: Any, longer: int) -> Any:
            return resized(value, longer, None) if length_of(value) == length else value

        return [(tuple(at(a, n) for a in args), {k: at(v, n) for k, v in kwargs.items()})
                for n in self.lengths]


def checked_lengths(model: nn.Module, lengths: Any, pad: Any) -> Lengths | None:
    """Check the arguments `lengths` and `pad` of a public call. Raises `ArgumentError`."""
    if lengths is None:
        if pad is not None:
            raise ArgumentError("pad says how inputs are brought to the next of some lengths: give lengths, "
                                "too")
        return None
    whole = isinstance(lengths, Sequence) and lengths and all(
        isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in lengths)
    if not whole:
        raise ArgumentError(f"lengths is {lengths!r}; it should be some numbers of elements: (128, 256, 512)")
    names = tuple(p.name for p in inspect.signature(model.forward).parameters.values()
                  if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    if pad is not None and (not isinstance(pad, Mapping) or not pad or not all(
            isinstance(k, str) and isinstance(v, (int, float)) for k, v in pad.items())):
        raise ArgumentError(f'pad is {pad!r}; it should name a padding value for each argument: '
                            '{"input_ids": 0, "attention_mask": 0, "labels": -100}')
    return Lengths(tuple(sorted(set(lengths))), None if pad is None else dict(pad), names)


def length_of(value: Any) -> int | None:
    """Return the length of a tensor that has one."""
    return value.shape[DIMENSION] if isinstance(value, torch.Tensor) and value.dim() > DIMENSION else None


def common_length(values: Mapping[str, Any]) -> int:
    """Return the length of arguments that should have one. Raises `ArgumentError`."""
    found = {k: n for k, v in values.items() if (n := length_of(v)) is not None}
    if len(set(found.values())) != 1:
        raise ArgumentError(f"lengths= needs arguments with one length in dimension {DIMENSION}, and there "
                            f"are {found or 'none'}: name those that have it with pad=")
    return next(iter(found.values()))


def resized(value: Any, length: int, fill: float | None) -> Any:
    """Return a tensor of another length; longer by `fill`, or by its own last elements."""
    now = length_of(value)
    if now is None or now == length:
        return value
    if now > length:
        made = value.detach().narrow(DIMENSION, 0, length).contiguous()
        return made.requires_grad_(value.requires_grad)
    shape = list(value.shape)
    shape[DIMENSION] = length - now
    end = value.new_full(shape, fill) if fill is not None else \
        value.detach().narrow(DIMENSION, now - 1, 1).expand(shape)
    made = torch.cat([value if fill is not None else value.detach(), end], DIMENSION)
    return made if fill is not None else made.requires_grad_(value.requires_grad)


class Padding(Adapter):
    """Pads the arguments that `pad` names to the next planned length. Calls of a planned length, and calls
    longer than all planned lengths, stay as they are."""

    def __init__(self, lengths: Lengths) -> None:
        self._pad = lengths.pad or {}
        self._lengths = lengths

    def apply(self, call: Arguments) -> tuple[Arguments, tuple[int, int] | None]:
        """Return the padded arguments, and the lengths before and after; None if the call stays as it is.
        Raises `ArgumentError`."""
        named = self._lengths.named(call.args, call.kwargs)
        length = common_length({k: named[k] for k in self._pad if named.get(k) is not None})
        planned = self._lengths.lengths
        at = bisect_left(planned, length)
        if at == len(planned) or planned[at] == length:
            return call, None
        names = self._lengths.names
        others = {f"argument {k}": a for k, a in enumerate(call.args) if k >= len(names)}
        for name, value in {**named, **others}.items():
            alone = isinstance(value, torch.Tensor)
            if (name not in self._pad or not alone) and any(
                    length_of(t) == length for t in tensors_in(value)):
                raise ArgumentError(
                    f"pad says nothing of {name!r}, which has the length {length} as the arguments that it "
                    "names: give it a padding value, too" if alone else
                    f"{name!r} holds a tensor of the length {length}, as the arguments have that pad names, "
                    "and only what is an argument by itself is padded: hand it over so, or pad it before")

        def fit(name: str, value: Any) -> Any:
            return resized(value, planned[at], self._pad[name]) if name in self._pad else value

        args = (*map(fit, names, call.args), *call.args[len(names):])
        return call._replace(args=args, kwargs={k: fit(k, v) for k, v in call.kwargs.items()}), \
            (length, planned[at])

    def invert(self, record: tuple[int, int] | None, outputs: Any) -> Any:
        """Return the outputs without the padding."""
        if record is None:
            return outputs
        length, padded = record
        tensors, structure = take_apart(outputs, result=False)
        return structure.fill([t.narrow(DIMENSION, 0, length) if length_of(t) == padded else t
                               for t in tensors])


def padding_to(lengths: Lengths | None) -> tuple[Padding, ...]:
    """Return the adapter that pads to planned lengths; none where nothing is padded."""
    return () if lengths is None or lengths.pad is None else (Padding(lengths),)
