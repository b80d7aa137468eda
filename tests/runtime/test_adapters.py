"""Adapters around calls: their order, and what each does before a step and after it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate.graph.capture.recipe import Recipe, Segment, Slot, Step
from rkmate.runtime.adapters import (
    MANY,
    Adapter,
    Arguments,
    Changes,
    Key,
    Observations,
    Repeats,
    Result,
    around_step,
    run_around,
)
from rkmate.runtime.guards import Guards
from rkmate.runtime.padding import Padding


class Named(Adapter):
    """Notes when it is applied and inverted."""

    def __init__(self, name: str, said: list[str]) -> None:
        self._name, self._said = name, said

    def apply(self, call: Arguments) -> tuple[Arguments, str]:
        self._said.append(f"apply {self._name}")
        return call._replace(args=(*call.args, self._name)), self._name

    def invert(self, record: str, outputs: Any) -> Any:
        self._said.append(f"invert {record}")
        return (*outputs, record)


def test_the_first_adapter_is_outermost() -> None:
    said: list[str] = []

    def run(call: Arguments) -> tuple[Any, ...]:
        said.append("run")
        return call.args

    found = run_around((Named("a", said), Named("b", said)), Arguments((), {}), run)
    assert said == ["apply a", "apply b", "run", "invert b", "invert a"]
    assert found == ("a", "b", "b", "a")


class Counting(nn.Module):
    """Attends to the first tokens, as many as the arguments say; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 4)
        self.calls = 0

    def forward(self, ids: torch.Tensor, count: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        return {"scores": self.head(self.embed(ids))[:, :, :int(count)]}


def test_a_call_goes_through_the_adapters_in_the_order_of_the_table() -> None:
    module = rkmate.wrap(Counting(), (torch.randint(0, 11, (2, 6)), torch.tensor(3)), budget=1.0,
                         progress=False, settings=rkmate.Settings(costs="analytic", run=rkmate.RunSettings(
                             lengths=(8,), pad={"ids": 0})))
    ids = torch.randint(0, 11, (2, 5))
    before = module.calls
    found = module(ids, torch.tensor(3))["scores"]
    assert module.calls == before + 1
    torch.testing.assert_close(found, module.original(ids, torch.tensor(3))["scores"], rtol=0, atol=0)
    assert found.shape == (2, 5, 3)
    assert list(map(type, module._around)) == [Padding, Key, Observations]
    assert module._latest is not None
    assert list(map(type, module._latest.compiled.around)) == [Result, Changes]


def test_inputs_that_repeat_come_last() -> None:
    a, b = torch.ones(1), torch.zeros(1)
    call, _ = Repeats((1,)).apply(Arguments((a, b), {}, None, [a, b], [a, b]))
    assert [id(t) for t in call.inputs] == [id(a), id(b), id(b)] and len(call.tensors) == 2


def test_a_step_without_effects_has_one_adapter() -> None:
    module = rkmate.wrap(nn.Linear(2, 2), (torch.ones(1, 2),), budget=1.0, progress=False,
                         settings=rkmate.Settings(costs="analytic"))
    assert module._latest is not None
    assert list(map(type, around_step(module._latest.compiled.capture))) == [Result]


# -- Observations of the values of inputs ----------------------------------------------------------

NOTHING: Any = None
KEY = Guards(**{name: NOTHING for name in Guards._fields if name not in Guards._field_defaults})


def _read(known: Observations, key: Guards, tensors: list[torch.Tensor]) -> tuple[Guards, list[torch.Tensor]]:
    call, _ = known.apply(Arguments((), {}, key, tensors, tensors))
    assert call.key is not None
    return call.key, [*call.inputs]


def _largest(value: int) -> Recipe:
    largest, read = Step(torch.max, (Slot(0),), {}, (1,)), Step(torch.Tensor.item, (Slot(1),), {}, ())
    return Recipe((Segment((largest, read), ()),), (str(value),), 0)


def test_a_signature_without_recipes_stays_as_it_is() -> None:
    known, tensors = Observations(), [torch.ones(2)]
    assert known.add(KEY, None) is not None
    assert _read(known, KEY, tensors) == (KEY, tensors)


def test_what_was_not_observed_yet_is_another_signature() -> None:
    known = Observations()
    first = known.add(KEY, _largest(3))
    assert _read(known, KEY, [torch.tensor([1, 3])])[0] == first
    new = _read(known, KEY, [torch.tensor([1, 4])])[0]
    assert new not in (KEY, first)
    assert known.add(new, _largest(4)) == _read(known, KEY, [torch.tensor([4])])[0] != first


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
    assert _read(known, KEY, tensors) == (KEY, tensors)
    assert _read(known, other, tensors)[0].values == ("3",)
