"""Python numbers in a forward: those that it reads from its tensors, and those that it counts outside of the
model's objects."""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rkmate
from rkmate.errors import CaptureError

STEP = 0


class Logs(nn.Module):
    """Returns and keeps numbers of its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
        self.last, self.history = 0.0, list[float]()
        self.logs: dict[str, Any] = {}

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        found = self.net(x)
        loss = F.cross_entropy(found, y)
        self.last = loss.item()
        self.history.append(loss.detach().item())
        right = (found.argmax(1) == y).sum()
        self.logs["right"] = right.item()
        first = found[0].tolist()
        right += 1                          # what was read before stays
        return {"loss": loss, "logs": {"more": right.item(), "first": first}}


def test_numbers_that_a_forward_reads_and_hands_on() -> None:
    def trained(budget: float | None) -> list[Any]:
        torch.manual_seed(0)
        model, x, y = Logs(), torch.randn(16, 8), torch.arange(16) % 4
        if budget is not None:
            rkmate.apply(model, budget=budget, progress=False, settings=rkmate.Settings(
                costs="analytic", parts="never"))
        optimizer, left = torch.optim.SGD(model.parameters(), lr=0.5), []
        for _ in range(4):
            optimizer.zero_grad()
            out = model(x, y)
            out["loss"].backward()
            optimizer.step()
            left.append((out["loss"].item(), out["logs"], model.last, [*model.history], dict(model.logs)))
        if budget is not None:
            plans = rkmate.applied(model)
            assert plans is not None and plans.has_plan
        assert [type(v) for v in (model.last, model.history[-1], model.logs["right"])] == [float, float, int]
        return [*left, *(p.tolist() for p in model.parameters())]

    assert trained(None) == trained(1.0)


def _rounded(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model.last = round(x.sum().item(), 2)       # type: ignore[assignment]
    return x


@pytest.mark.parametrize(("forward", "said"), [
    (lambda model, x: x / x.abs().max().item(), r"test_numbers.py:\d+: .* value of a tensor decides"),
    (lambda model, x: (x, float(x.sum())), r"tensor decides .* tensor.item\(\) or tensor.tolist\(\)"),
    (lambda model, x: (x, f"{x.sum():.2f}"), r"value of a tensor into a text: return or keep the number"),
    (_rounded, r"keeps a number .* compute with it outside")])
def test_computing_with_such_a_number_is_refused(forward: Any, said: str) -> None:
    class Reads(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return forward(self, super().forward(x))

    with pytest.raises(CaptureError, match=said):
        rkmate.wrap(Reads(4, 4), (torch.randn(2, 4),), budget=1.0, progress=False)


def _endless() -> Iterator[float]:
    value = 1.0
    while True:
        yield value
        value *= 0.5


class Counts(nn.Linear):
    """Counts its calls in one of several ways."""

    calls = 0

    def __init__(self, way: str) -> None:
        super().__init__(4, 4)
        self.way, self.counter = way, Counter[str]()
        self.numbers: Any = {"count": itertools.count(1), "cycle": itertools.cycle([1.0, 2.0]),
                             "generator": _endless()}.get(way)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self._count()

    def _count(self) -> float:
        global STEP
        if self.numbers is not None:
            return float(next(self.numbers))
        if self.way == "global":
            STEP += 1
            return STEP
        if self.way == "class":
            Counts.calls += 1
            return Counts.calls
        self.counter["calls"] += 1
        return self.counter["calls"]


WAYS = {"count": "advances the iterator numbers", "cycle": "advances the iterator numbers",
        "generator": "advances the iterator numbers", "global": "changes the global variable STEP",
        "class": "changes Counts.calls", "counter": "assigns counter"}


class Elsewhere:
    """Is not a class of any module."""

    calls, rate = 0, 1.0


class Notes(nn.Linear):
    """Counts its calls in one of several ways, and computes with none of these numbers."""

    def __init__(self, way: str) -> None:
        super().__init__(4, 4)
        self.way, self.calls, self.seen = way, 0, [] if way != "ring" else deque[Any](maxlen=2)
        self.stats: dict[str, Any] = {"calls": 0, "rate": 0.5, "inside": {"rows": 0}, "last": 0.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global STEP
        y = super().forward(x)
        if self.way == "global":
            STEP += 2
        elif self.way == "class":
            Elsewhere.calls += 1
            Elsewhere.rate = 0.5
        elif self.way == "grows":
            Elsewhere.rate *= 0.5
        elif self.way == "sizes":
            self.seen.append(x.shape[0])
        elif self.way == "dictionary":
            self.stats["calls"] += 1
            self.stats["rate"] = 0.25
            self.stats["inside"]["rows"] += x.shape[0]
            self.stats["last"], self.stats["done"] = y.sum().item(), True
            self.stats["mean"] = y.detach().mean()
        elif self.way in ("numbered", "list"):
            self.seen.append((self.calls, y.detach().sum()) if self.way == "numbered" else self.calls)
            self.calls += 1
        else:
            self.seen.append(y.sum().item())
        return y


def _noted(model: Notes) -> Any:
    return STEP, Elsewhere.calls, Elsewhere.rate, model.calls, model.seen, repr(model.stats)


@pytest.mark.filterwarnings("error::rkmate.RkmateWarning")
@pytest.mark.parametrize("way", ["global", "class", "sizes", "dictionary"])
def test_counts_that_nothing_reads_are_what_they_are_without_a_plan(way: str) -> None:
    def counted(budget: float | None) -> Any:
        global STEP
        STEP, Elsewhere.calls, Elsewhere.rate = 0, 0, 1.0
        torch.manual_seed(0)
        model, x = Notes(way), torch.ones(2, 4)
        run = model if budget is None else rkmate.wrap(model, (x,), budget=budget, progress=False)
        for _ in range(3):
            run(x).sum().backward()
        assert budget is None or len(run._plans) == 1
        return _noted(model)

    assert counted(None) == counted(1.0)


def _add_one(held: Any) -> None:
    """Count one call in a list, a dictionary or an object."""
    if isinstance(held, list):
        held.append(1)
    elif isinstance(held, dict):
        held["calls"] = held.get("calls", 0) + 1
    else:
        held.calls += 1


@pytest.mark.filterwarnings("ignore::rkmate.RkmateWarning")
@pytest.mark.parametrize(("kind", "first"), [
    (Counter, False), (dict, False), (list, False), (partial(SimpleNamespace, calls=3), False), (dict, True)])
def test_counts_in_what_the_first_call_makes_are_what_they_are_without_a_plan(kind: Any, first: bool) -> None:
    """`first`: whether the dictionary is there before, and only its key is made."""
    class Lazy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if getattr(self, "held", None) is None:
                self.held = self.same = kind()
            _add_one(self.held)
            return super().forward(x)

    def counted(budget: float | None) -> Any:
        model, x = Lazy(4, 4), torch.ones(2, 4)
        if first:
            model.held = kind()
        run = model if budget is None else rkmate.wrap(model, (x,), budget=budget, progress=False)
        for _ in range(4):
            run(x).sum().backward()
        assert budget is None or len(run._plans) == 1
        return model.held

    assert counted(None) == counted(1.0)


@pytest.mark.parametrize(("way", "why"), [
    ("grows", "changes Elsewhere.rate"), ("numbered", "assigns calls, seen"), ("list", "assigns calls, seen"),
    ("ring", "puts values into the deque seen")])
def test_notes_that_differ_from_call_to_call_are_refused(way: str, why: str) -> None:
    model = Notes(way)
    before = copy.deepcopy(_noted(model))
    with pytest.raises(CaptureError, match=why):
        rkmate.wrap(model, (torch.ones(2, 4),), budget=1.0, progress=False)
    assert _noted(model) == before


@pytest.mark.parametrize("asks", [lambda n: n * 2 > 8, lambda n: 5 - n < 1, lambda n: int(n) & 3 == 3])
@pytest.mark.parametrize("place", ["attribute", "float", "dictionary", "new key", "class", "global"])
def test_counts_that_decide_in_a_later_call_are_refused(place: str, asks: Any) -> None:
    """In the calls that are traced, they decide as in the first one."""
    class Turns(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.calls, self.sum, self.stats, self.made = 0, 0.0, {"calls": 0}, Counter[str]()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            global STEP
            if place == "attribute":
                self.calls += 1
            elif place == "float":
                self.sum += 1.0
            elif place == "dictionary":
                self.stats["calls"] += 1
            elif place == "new key":
                self.made["calls"] += 1
            elif place == "class":
                Elsewhere.calls += 1
            else:
                STEP += 1
            n = {"attribute": self.calls, "float": self.sum, "dictionary": self.stats["calls"],
                 "new key": self.made["calls"], "class": Elsewhere.calls, "global": STEP}[place]
            return super().forward(x * 2 if asks(n) else x)

    global STEP
    STEP = Elsewhere.calls = 0
    model = Turns()
    with pytest.raises(CaptureError, match=r"the forward (changes|assigns) "):
        rkmate.wrap(model, (torch.ones(2, 4),), budget=1.0, progress=False)
    assert (model.calls, model.sum, model.stats, Elsewhere.calls, STEP) == (0, 0.0, {"calls": 0}, 0, 0)
    assert not model.made


class Slots:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Strict(OrderedDict[str, int]):
    """As results of transformers' models are: it is changed by single values."""

    calls = property(lambda self: self["calls"], lambda self, value: self.__setitem__("calls", value))

    def __init__(self, calls: int) -> None:
        super().__init__(calls=calls)

    def update(self, *_: Any, **values: Any) -> None:
        raise RuntimeError("one by one")


def _with_default(count: list[int] = [0]) -> int:       # noqa: B006
    count[0] += 1
    return count[0]


def _advanced(held: Any) -> int:
    """Change a state, and return a number that depends on it."""
    if isinstance(held, random.Random):
        return held.choice([1, 2])
    if isinstance(held, np.random.Generator):
        return int(held.integers(1, 3))
    if isinstance(held, set):
        held.add(len(held))
        return len(held)
    if isinstance(held, (np.ndarray, bytearray)):
        held[0] += 1
        return int(held[0])
    if callable(held):
        return int(held())
    of = held if isinstance(held, Slots) else held.inside
    of.calls += 1
    return int(of.calls)


@pytest.mark.parametrize(("held", "named"), [
    (lambda: random.Random(0), "the random generator held"), (set, "the set held"), (Slots, "the Slots held"),
    (lambda: np.random.default_rng(0), "the random generator held"),
    (lambda: np.zeros(1), "the ndarray held"),
    (lambda: bytearray(1), "the bytearray held"),
    (lambda: SimpleNamespace(inside=SimpleNamespace(calls=0)), "the SimpleNamespace held.inside"),
    (lambda: SimpleNamespace(inside=Strict(0)), "the Strict held.inside"),
    (lambda: _with_default, "the list of a default of _with_default")])
def test_a_state_that_no_plan_can_see_is_refused(held: Any, named: str) -> None:
    class Keeps(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * _advanced(self.held)

    model, x = Keeps(4, 4), torch.ones(2, 4)
    model.held = held()
    twin = Keeps(4, 4)
    twin.load_state_dict(model.state_dict())
    twin.held = held()
    with pytest.raises(CaptureError, match=f"Keeps: the forward changes {named}; "):
        rkmate.wrap(model, (x,), budget=1.0, progress=False)
    _with_default.__defaults__[0][0] = 0        # type: ignore[index]
    first = [twin(x) for _ in range(4)]
    _with_default.__defaults__[0][0] = 0        # type: ignore[index]
    assert all(torch.equal(model(x), y) for y in first), "a trace leaves the state as it was"


@pytest.mark.filterwarnings("error::rkmate.RkmateWarning")
def test_a_state_that_a_first_call_completes_is_planned() -> None:
    class Seen(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.shapes.add(x.shape)
            return super().forward(x)

    model = Seen(4, 4)
    model.shapes = set[Any]()
    planned = rkmate.wrap(model, (torch.ones(2, 4),), budget=1.0, progress=False)
    planned(torch.ones(2, 4)).sum().backward()
    assert len(planned._plans) == 1


@pytest.mark.parametrize("way", WAYS)
def test_counting_outside_of_the_model_is_refused(way: str) -> None:
    global STEP
    STEP = Counts.calls = 0
    model, x = Counts(way), torch.ones(2, 4)
    with pytest.raises(CaptureError, match=WAYS[way]):
        rkmate.wrap(model, (x,), budget=1.0, progress=False)
    assert torch.equal(model(x), nn.Linear.forward(model, x)), "a trace leaves counts as they were"
