"""Budgets as people write them."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from rkmate.errors import ArgumentError

_UNITS = {"b": 1, "": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
          "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_FRACTION = re.compile(r"\s*(0?\.[0-9]+|1\.0*)\s*")
_HELP = 'bytes (an int), text such as "600MiB", "1.5GB", "50%" or "0.5", a float in (0, 1], which is a ' \
        "fraction of the model's own peak, or \"auto\" for what is free on the CUDA device"


@dataclass(frozen=True)
class DeviceShare:
    """Memory that a training loop will hold on its device in addition to its steps, and that is not allocated
    yet."""

    parameters: tuple[int, ...] = ()
    """Bytes of each trained parameter."""
    states: int = 0
    """Number of tensors of a parameter's size that the optimizer keeps for each parameter."""


@dataclass(frozen=True)
class Budget:
    """A checked budget: an absolute number of bytes or a fraction of the baseline's peak."""

    bytes: int | None = None
    fraction: float | None = None
    least: int = 0
    """Lower limit, in bytes, of a fractional budget: the largest budget of an earlier plan."""
    device: DeviceShare | None = None
    """If given, `bytes` is an upper limit: the plan, with the memory that the device's allocator keeps in
    addition to tensors, must fit into the free memory."""

    def of(self, baseline: int) -> int:
        """Return the budget in bytes. `baseline`: the peak without rematerialization."""
        if self.bytes is not None:
            return self.bytes
        assert self.fraction is not None
        return max(self.least, math.floor(self.fraction * baseline))

    def at_least(self, least: int) -> Budget:
        """Return the budget for later plans, after a plan within `least` bytes was made.

        A fraction then stands for at least `least` bytes, so that a smaller batch may use them, too. On a
        device, the memory of the training loop is allocated by now and no longer reserved.
        """
        if self.device is not None:
            return replace(self, device=DeviceShare())
        return self if self.bytes is not None else replace(self, least=max(self.least, least))


def parse_budget(budget: Any) -> Budget:
    """Check a budget as a user writes it; return a `Budget` unchanged.

    Integers of any type (also numpy's) are bytes. Other real numbers, and text such as ``"0.5"``, are
    fractions. Raises `ArgumentError`.
    """
    if isinstance(budget, Budget):
        return budget
    if isinstance(budget, bool) or not isinstance(budget, (numbers.Real, str)):
        raise ArgumentError(f"budget is {budget!r}; it should be {_HELP}")
    if isinstance(budget, numbers.Integral):
        if budget <= 0:
            raise ArgumentError(f"budget is {budget}; it should be a positive number of bytes")
        return Budget(bytes=int(budget))
    if isinstance(budget, numbers.Real):
        fraction = float(budget)
        if not 0 < fraction <= 1:               # nan is refused too
            raise ArgumentError(f"budget is {budget}; a float is a fraction of the model's own peak "
                                "and should be in (0, 1]; for bytes, give an int")
        return Budget(fraction=fraction)
    if _FRACTION.fullmatch(budget):
        return parse_budget(float(budget))
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z]*|%)\s*", budget.lower())
    if match is None:
        raise ArgumentError(f"budget is {budget!r}; it should be {_HELP}")
    number, unit = float(match[1]), match[2]
    if unit == "%":
        return parse_budget(number / 100)
    if unit not in _UNITS:
        known = "B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"
        raise ArgumentError(f"budget is {budget!r}: the unit {match[2]!r} is unknown; use {known}")
    result = math.floor(number * _UNITS[unit])
    if result <= 0:
        raise ArgumentError(f"budget is {budget!r}; it should be a positive number of bytes")
    return Budget(bytes=result)


def listed(values: Any, name: str, of_what: str) -> list[Any]:
    """Return several budgets, or names, as a list. Raises `ArgumentError` for a single one, and for none.
    `name`: of the argument; `of_what`: what it lists."""
    found = list(values) if isinstance(values, Iterable) and not isinstance(values, str) else []
    if not found:
        raise ArgumentError(f"{name} is {values!r}; it should be a list of {of_what}")
    return found
