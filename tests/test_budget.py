"""Budgets as people write them."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from rkmate.budget import Budget, parse_budget
from rkmate.errors import ArgumentError


@pytest.mark.parametrize(("written", "meant"), [
    (1, Budget(bytes=1)), (np.int64(600), Budget(bytes=600)), (np.uint8(7), Budget(bytes=7)),
    (0.5, Budget(fraction=0.5)), (1.0, Budget(fraction=1.0)), (np.float64(0.25), Budget(fraction=0.25)),
    (np.float32(0.5), Budget(fraction=0.5)), (Fraction(1, 2), Budget(fraction=0.5)),
    ("0.5", Budget(fraction=0.5)), (" .5 ", Budget(fraction=0.5)), ("1.0", Budget(fraction=1.0)),
    ("50%", Budget(fraction=0.5)), ("1", Budget(bytes=1)), ("600MiB", Budget(bytes=600 << 20)),
    ("1.5GB", Budget(bytes=1_500_000_000)), ("2e3", Budget(bytes=2000))])
def test_what_is_meant(written: Any, meant: Budget) -> None:
    found = parse_budget(written)
    assert found == meant
    assert type(found.bytes) is type(meant.bytes) and type(found.fraction) is type(meant.fraction)


@pytest.mark.parametrize("wrong", [
    True, False, np.True_, None, 0, -1, np.int64(0), 0.0, 1.5, math.nan, np.float64("nan"), math.inf,
    -math.inf, 1j, "0.0", "nan", "lots", "5 parsecs", "150%", "0", [1], b"1"])
def test_what_means_nothing(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match="budget is"):
        parse_budget(wrong)


def test_bytes_of_a_baseline() -> None:
    assert parse_budget("50%").of(1001) == 500
    assert parse_budget(np.int32(64)).of(1001) == 64
