"""Snapshots of a module's plain attributes, and their stand-ins in keys."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rkmate.errors import ArgumentError
from rkmate.graph.capture.forward_code import MISSING
from rkmate.graph.capture.state import Assigned
from rkmate.runtime.snapshot import (
    Equivalents,
    Part,
    Same,
    attributes_of,
    before,
    by_content,
    by_value,
    snapshot,
)


def _model() -> nn.Module:
    model = nn.Sequential(nn.Dropout(0.1), nn.Linear(2, 2))
    model.scale = 2.0
    model.settings = model[1].settings = SimpleNamespace(kind="plain", deep=[1])
    model.tables = {"a": torch.zeros(2)}
    model.call = partial(torch.add, alpha=2)
    model.config = Configuration()
    model.merged_adapters = []
    model.handle = model.register_forward_hook(lambda *args: None)
    model.handle.remove()
    return model


def _replace_settings(model: nn.Module) -> None:
    model.settings = model[1].settings = SimpleNamespace(**vars(model.settings))


class Configuration:
    """As those of transformers: saving a model writes into it."""

    def __init__(self) -> None:
        self.width, self.dtype, self.architectures = 2, None, None

    def save_pretrained(self, folder: str) -> None:
        raise NotImplementedError


def _save(model: nn.Module) -> None:
    model.config.dtype, model.config.architectures = "float32", ("Sequential",)


def _put_a_hook_back(model: nn.Module) -> None:
    def hook(*args: Any) -> None:
        pass

    model.handle.remove()
    model.handle = model.register_forward_hook(hook)
    model.handle.remove()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "number": lambda m: setattr(m, "scale", 3.0),
    "number of another type": lambda m: setattr(m, "scale", 2),
    "of a submodule": lambda m: setattr(m[0], "p", 0.5),
    "forward": lambda m: setattr(m[1], "forward", torch.tanh),
    "of an object": lambda m: setattr(m.settings, "kind", "other"),
    "new, of an object": lambda m: setattr(m.settings, "more", 1),
    "deleted": lambda m: delattr(m, "scale"),
    "of a configuration": lambda m: setattr(m.config, "width", 3),
    "object apart": lambda m: setattr(m[1], "settings", SimpleNamespace(kind="plain", deep=[1])),
    "member of a dictionary": lambda m: m.tables.update(a=torch.zeros(2)),
    "object without content": lambda m: setattr(m, "call", object()),
    "other keywords": lambda m: setattr(m, "call", partial(torch.add, alpha=3)),
    "adapters that are merged": lambda m: m.merged_adapters.append("default"),
    "other function": lambda m: setattr(m, "call", partial(torch.sub, alpha=2)),
}
NO_CHANGES: dict[str, Callable[[Any], Any]] = {
    "equal": lambda m: setattr(m, "scale", float("2")),
    "an equal object in all places": _replace_settings,
    "its own forward": lambda m: setattr(m[1], "forward", m[1].forward),
    "train flag": lambda m: m.train(not m.training),
    "new attribute of a module": lambda m: setattr(m, "more", 1),
    "the same call of a function": lambda m: setattr(m, "call", partial(torch.add, alpha=2)),
    "what saving writes": _save,
    "a hook that was removed and put back": _put_a_hook_back,
    "deep in an object": lambda m: m.settings.deep.append(2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_another_state(change: str) -> None:
    model = _model()
    first = snapshot(attributes_of(model))
    assert first.is_now([])
    assert snapshot(first.attributes).part == first.part
    CHANGES[change](model)
    now = snapshot(first.attributes)
    assert now.part != first.part
    # An attribute that is new in an object is seen once something else has changed.
    assert first.is_now([]) == (change == "new, of an object")
    assert now.is_now([])


@pytest.mark.parametrize("change", NO_CHANGES)
def test_what_is_the_same_state(change: str) -> None:
    model = _model()
    first = snapshot(attributes_of(model))
    NO_CHANGES[change](model)
    assert snapshot(first.attributes).part == first.part


def test_hooks_are_part_of_it() -> None:
    first = snapshot(attributes_of(_model()), [print])
    assert first.is_now([print])
    assert not first.is_now([]) and not first.is_now([len])
    assert snapshot(first.attributes).part != first.part != snapshot(first.attributes, [len]).part


def test_the_state_before_a_forward_assigned() -> None:
    model = _model()
    first = snapshot(attributes_of(model))
    settings = model.settings
    settings.kind, settings.more = "other", 1
    now = snapshot(first.attributes)
    assigned = [Assigned("settings.kind", settings, "kind", "plain", "other"),
                Assigned("settings.more", settings, "more", MISSING, 1)]
    assert before(now, assigned).part == first.part != now.part
    assert settings.kind == "other"
    del settings.more
    assigned = [assigned[0], Assigned("settings.more", settings, "more", 1, MISSING)]
    was = dict(before(snapshot(first.attributes), assigned).part.content)
    assert was["settings.more"] == (int, 1) and was["settings.kind"] == (str, "plain")


def test_equivalents_lead_to_the_first() -> None:
    parts, known = [Part((k,)) for k in range(40)], Equivalents()
    known.add(parts[1], parts[0])
    assert known.of(Part((1,))) is parts[0]
    assert known.of(parts[2]) is parts[2]
    known.add(parts[3], parts[3])
    assert known.of(parts[3]) is parts[3]
    for p in parts[4:]:
        known.add(p, parts[0])
    assert known.of(parts[1]) is parts[1]           # long ago
    assert known.of(parts[39]) is parts[0]


# -- stand-ins ----------------------------------------------------------------------------


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def method(self) -> None: ...


def _itself() -> list[Any]:
    value: list[Any] = [1]
    value.append(value)
    return value


class Slotted:
    __slots__ = ("__hidden", "kind")

    def __init__(self, kind: str) -> None:
        self.kind = self.__hidden = kind


class Both(Slotted):
    """Its attributes are in two places."""

    def __init__(self, kind: str, number: int) -> None:
        super().__init__(kind)
        self.number = number


HOLDER, TENSOR = Holder(1), torch.zeros(2)


@pytest.mark.parametrize(("make", "equal"), [
    (lambda: 1, True), (lambda: (1, "a", None), True), (lambda: HOLDER.method, True),
    (lambda: TENSOR, True), (lambda: torch.zeros(2), False), (lambda: [1], False),
    (lambda: Holder(1), False)])
def test_by_value(make: Callable[[], Any], *, equal: bool) -> None:
    some, others = make(), make()
    assert (by_value(some) == by_value(others)) == equal
    hash(by_value(some))


@pytest.mark.parametrize("make", [
    lambda: [1, (2, {"a": Holder([3])})], _itself, lambda: HOLDER.method, lambda: torch.float32, lambda: len,
    lambda: nn.Module, lambda: Holder(None), lambda: Slotted("a"), lambda: {1, "b"},
    lambda: deque([1, [2]], 3),
    lambda: bytearray(b"ab"), lambda: np.arange(3.0), lambda: Path("a"), lambda: slice(1, None, 2),
    lambda: {"a": 1}.keys(), lambda: range(3), lambda: Holder(np.zeros(2)), SimpleNamespace,
    lambda: np.array(["2020-01-01"], "datetime64[D]")])
def test_by_content(make: Callable[[], Any]) -> None:
    some, others = make(), make()
    assert by_content(some) == by_content(others)
    hash(by_content(some))


@pytest.mark.parametrize(("a", "b"), [
    (1, 1.0), (True, 1), ([1], (1,)), ({"a": 1, "b": 2}, {"b": 2, "a": 1}), (Holder(1), Holder(2)),
    ({1}, {2}), (nn.Linear(1, 1), nn.Linear(1, 1)), (_itself(), [1, [1]]),
    (Slotted("a"), Slotted("b")), (Both("a", 1), Both("a", 2)), (Both("a", 1), Both("b", 1)),
    (np.zeros(2), np.zeros(2, np.float32)), (np.zeros(2), np.zeros((2, 1))),
    (np.zeros(2), np.ones(2)), (bytearray(b"a"), bytearray(b"b")), (deque([1]), deque([2])),
    (np.array([1], "datetime64[D]"), np.array([2], "datetime64[D]")),
    (np.array([1], "datetime64[D]"), np.array([1], "datetime64[s]")),
    (np.array([1], "datetime64[D]"), np.array([1])), (SimpleNamespace(), SimpleNamespace(a=1))])
def test_other_content(a: Any, b: Any) -> None:
    assert by_content(a) != by_content(b)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ArgumentError, match="ndarray, and rkmate cannot tell"):
        by_content(np.array([object()]))


def test_same_is_equal_to_these_objects_alone() -> None:
    a, b = [1], [1]
    assert Same((a, b)) == Same((a, b)) != Same((b, a))
    assert Same((a,)).is_of([a]) and not Same((a,)).is_of([b]) and not Same((a,)).is_of([a, b])


class Loop:
    """Runs a model, which refers to it."""

    def __init__(self, model: nn.Module | None) -> None:
        self.strategy = SimpleNamespace(module=model)
        self.since, self.seen, self.factor, self.asked, self._share = 0.0, 0, 2.0, 1, 0.5

    @property
    def share(self) -> float:
        return self._share


class Run(nn.Module):
    loop: Loop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.loop.factor * self.loop.share * getattr(self.loop, "asked", 1)


@pytest.mark.parametrize("whole", [True, False])
def test_of_an_object_that_runs_the_module_only_what_a_forward_reads_is_compared(whole: bool) -> None:
    run = Run()
    run.loop = loop = Loop(run if whole else nn.Sequential(nn.Sequential(run)))
    first = snapshot(attributes_of(run))
    loop.since, loop.seen = 1.5, 3
    assert first.is_now(()) and snapshot(first.attributes).part == first.part
    for name in ("factor", "asked", "_share"):
        before = vars(loop)[name]
        setattr(loop, name, 7)
        assert not first.is_now(()) and snapshot(first.attributes).part != first.part
        setattr(loop, name, before)
    run.loop = Loop(run)                    # the next one, at the same place of its training
    assert snapshot(first.attributes).part == first.part
    run.loop = Loop(None)                   # a description
    told = snapshot(attributes_of(run))
    run.loop.since = 1.5
    assert not told.is_now(())
