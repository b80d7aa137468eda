"""What a forward observes of its inputs' values, as a part of its signature."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import rkmate
from rkmate.graph.capture.recipe import Recipe, Segment, Slot, Step
from rkmate.runtime.guards import MANY, Guards, Observations

NOTHING: Any = None
KEY = Guards(*(NOTHING,) * len(Guards._fields[:-1]))


def _largest(value: int) -> Recipe:
    largest, read = Step(torch.max, (Slot(0),), {}, (1,)), Step(torch.Tensor.item, (Slot(1),), {}, ())
    return Recipe((Segment((largest, read), ()),), (str(value),), 0)


def test_a_signature_without_recipes_stays_as_it_is() -> None:
    known, tensors = Observations(), [torch.ones(2)]
    assert known.add(KEY, None) is not None
    assert known.of(KEY, tensors) == (KEY, tensors)


def test_what_was_not_observed_yet_is_another_signature() -> None:
    known = Observations()
    first = known.add(KEY, _largest(3))
    assert known.of(KEY, [torch.tensor([1, 3])])[0] == first
    new = known.of(KEY, [torch.tensor([1, 4])])[0]
    assert new not in (KEY, first)
    assert known.add(new, _largest(4)) == known.of(KEY, [torch.tensor([4])])[0] != first


def test_it_is_said_once_that_many_values_take_many_plans() -> None:
    known = Observations()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for value in (*range(MANY - 1), 0, 1):
            known.add(KEY, _largest(value))
    with pytest.warns(rkmate.RkmateWarning, match="each takes a plan of its own"):
        known.add(KEY, _largest(MANY))
    known.add(KEY, _largest(MANY + 1))


def test_what_no_plan_is_kept_of_is_forgotten() -> None:
    known, other = Observations(), KEY._replace(default_dtype=torch.float64)
    for key in (KEY, other):
        known.add(key, _largest(3))
    known.keep([other._replace(values=("3",))])
    tensors = [torch.tensor([3])]
    assert known.of(KEY, tensors) == (KEY, tensors)
    assert known.of(other, tensors)[0].values == ("3",)
