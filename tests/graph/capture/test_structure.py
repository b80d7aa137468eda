"""The arguments of a call, taken apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from rkmate.graph.capture.structure import take_apart, take_call_apart

X, Y = torch.ones(2), torch.ones(3)
CALLS: dict[str, tuple[tuple[Any, ...], Mapping[str, Any]]] = {
    "nothing": ((), {}), "a tensor": ((X,), {}), "named": ((), {"x": X, "mask": None, "n": 2}),
    "twice": ((X, X), {"y": Y}), "a parameter": ((nn.Parameter(X), True, "mean", 0.5), {}),
    "a list": (([X, Y], X), {"n": 1}), "a number type": ((X, torch.float32), {}),
    "a part of a dictionary": ((), {"batch": {"x": X, "n": 3}})}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_of_leaves_is_taken_apart_like_any_other(call: str) -> None:
    args, kwargs = CALLS[call]
    tensors, spec, constants = take_call_apart(args, kwargs)
    expected, structure = take_apart((args, dict(kwargs)), result=False)
    assert len(tensors) == len(expected) and all(map(lambda a, b: a is b, tensors, expected))
    assert spec == structure.spec and constants == structure.constants()


def test_calls_of_other_forms_are_told_apart() -> None:
    specs = [take_call_apart(args, kwargs)[1] for args, kwargs in (
        ((X,), {}), ((X, Y), {}), ((), {"x": X}), ((), {"y": X}), ((), {"x": X, "y": Y}), (([X],), {}))]
    assert all(a != b for k, a in enumerate(specs) for b in specs[:k])
