"""Lengths planned ahead, and inputs padded to them.

Both are asked for: ``RunSettings(lengths=(128, 256), pad={"input_ids": 0})``. The sequence's dimension is the
second. The arguments that `pad` names (without it, all that have such a dimension) have one length there.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rkmate.errors import ArgumentError
from rkmate.graph.capture.structure import take_apart
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

    def fitted(self, args: tuple[Any, ...], kwargs: dict[str, Any]
               ) -> tuple[tuple[Any, ...], dict[str, Any], Callable[[Any], Any]]:
        """Return a call's arguments at the next planned length, and a function that cuts its output back. A
        call that has a planned length, or one above all of them, stays as it is."""
        if self.pad is None:
            return args, kwargs, _same
        named = {**dict(zip(self.names, args, strict=False)), **kwargs}
        length = _common_length({k: named[k] for k in self.pad if named.get(k) is not None})
        at = bisect_left(self.lengths, length)
        if at == len(self.lengths) or self.lengths[at] == length:
            return args, kwargs, _same
        longer = self.lengths[at]
        others = {f"argument {k}": a for k, a in enumerate(args) if k >= len(self.names)}
        for name, value in {**named, **others}.items():
            alone = isinstance(value, torch.Tensor)
            if (name not in self.pad or not alone) and any(_length(t) == length for t in tensors_in(value)):
                raise ArgumentError(
                    f"pad says nothing of {name!r}, which has the length {length} as the arguments that it "
                    "names: give it a padding value, too" if alone else
                    f"{name!r} holds a tensor of the length {length}, as the arguments have that pad names, "
                    "and only what is an argument by itself is padded: hand it over so, or pad it before")

        def fit(name: str, value: Any) -> Any:
            return _resized(value, longer, self.pad[name]) if self.pad and name in self.pad else value

        def cut(output: Any) -> Any:
            tensors, structure = take_apart(output, result=False)
            return structure.fill([t.narrow(DIMENSION, 0, length) if _length(t) == longer else t
                                   for t in tensors])

        count = len(self.names)
        return (tuple(fit(n, a) for n, a in zip(self.names, args, strict=False)) + args[count:],
                {k: fit(k, v) for k, v in kwargs.items()}, cut)

    def samples(self, args: tuple[Any, ...], kwargs: dict[str, Any]
                ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return the sample at every planned length: cut, or made longer by its own last elements (which are
        valid indices)."""
        named = {**dict(zip(self.names, args, strict=False)), **kwargs}
        length = _common_length({k: v for k, v in named.items() if self.pad is None or k in self.pad})

        def at(value: Any, longer: int) -> Any:
            return _resized(value, longer, None) if _length(value) == length else value

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


def _same(output: Any) -> Any:
    return output


def _length(value: Any) -> int | None:
    return value.shape[DIMENSION] if isinstance(value, torch.Tensor) and value.dim() > DIMENSION else None


def _common_length(values: Mapping[str, Any]) -> int:
    """Return the length of arguments that should have one. Raises `ArgumentError`."""
    found = {k: n for k, v in values.items() if (n := _length(v)) is not None}
    if len(set(found.values())) != 1:
        raise ArgumentError(f"lengths= needs arguments with one length in dimension {DIMENSION}, and there "
                            f"are {found or 'none'}: name those that have it with pad=")
    return next(iter(found.values()))


def _resized(value: Any, length: int, fill: float | None) -> Any:
    """Return a tensor of another length; longer by `fill`, or by its own last elements."""
    now = _length(value)
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
