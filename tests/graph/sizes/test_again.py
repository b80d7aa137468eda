"""An equal call is captured once; whatever changes the step is noticed; nothing of the model is held."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rkmate
from rkmate.graph.capture.capture import capture as capture_whole
from rkmate.graph.capture.captured import Capture
from rkmate.graph.capture.structure import form_of, take_apart
from rkmate.graph.sizes import again, depth
from rkmate.graph.sizes.dry_run import dry_run
from rkmate.pipeline import prepare
from tests.equality import assert_same_step
from tests.graph.sizes.test_depth import text
from tests.models import Sample

SLOPE = [0.1]


class Block(nn.Module):
    """A layer with a flag, a number in a dictionary, one in the module's file, and a parameter that is not
    always trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(8, 8), nn.Dropout(0.1)
        self.scaled, self.table = False, {"power": 2}

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(F.leaky_relu(self.middle(self.first(x)), SLOPE[0]))
        return (2 * x if self.scaled else x) ** self.table["power"]


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that were captured."""
    seen: list[nn.Module] = []
    capture = depth.captured

    def watched(model: nn.Module, *rest: Any) -> Any:
        seen.append(model)
        return capture(model, *rest)

    monkeypatch.setattr(depth, "captured", watched)
    monkeypatch.setattr(again, "_known", [])
    return seen


@pytest.fixture(scope="module")
def whole() -> Capture:
    """The capture of a small model."""
    return capture_whole(Stack(2), (torch.randn(2, 8),), {})


@pytest.fixture
def recorded(whole: Capture, monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that were captured, each by a dry run of its own, and the graph of a small model."""
    seen: list[nn.Module] = []

    def watched(model: nn.Module, *call: Any) -> Any:
        seen.append(model)
        tensors, inputs = take_apart(call[:2], result=False)
        recording = dry_run(model, inputs, [form_of(t) for t in tensors])
        assert recording is not None
        return whole, recording

    monkeypatch.setattr(depth, "captured", watched)
    monkeypatch.setattr(again, "_known", [])
    return seen


@pytest.mark.parametrize(("layers", "captures"), [(7, 1), (2, 2)], ids=["repeated layers", "few layers"])
def test_an_equal_call_is_not_captured_again(layers: int, captures: int, captured: list[nn.Module]) -> None:
    model = Stack(layers)
    found = [again.capture(model, (torch.randn(2, 8),), {}) for _ in range(4)]
    assert len(captured) == captures
    assert found[-1].graph is found[captures - 1].graph
    assert text(found[-1]) == text(capture_whole(model, (torch.randn(2, 8),), {}))


def _replaced(model: Stack) -> None:
    model.layers[1].first = nn.Linear(8, 8, bias=False)


def _hooked(model: Stack) -> None:
    model.layers[1].register_forward_hook(lambda module, args, out: out + 1)


def _hooked_behind(model: Stack) -> None:
    model.layers[1].register_full_backward_hook(lambda module, into, out: (2 * into[0],))


def _method(model: Stack) -> None:
    model.layers[1].middle = torch.sin                                          # type: ignore[assignment]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a layer replaced": _replaced,
    "a layer appended": lambda model: model.layers.append(Block()),
    "eval": lambda model: model.layers[2].eval(),
    "requires_grad": lambda model: model.layers[1].first.weight.requires_grad_(False),
    "a hook": _hooked,
    "a backward hook": _hooked_behind,
    "an attribute": lambda model: setattr(model.layers[1], "scaled", True),
    "a number in an object": lambda model: setattr(model.layers[1].drop, "p", 0.2),
    "a dictionary": lambda model: model.layers[1].table.update(power=3),
    "a method": _method,
    "tied parameters": lambda model: setattr(model.layers[1].first, "weight", model.layers[0].first.weight),
    "other ties": lambda model: setattr(model.layers[1].first, "bias", model.layers[0].first.bias),
}


def test_what_changes_the_step_is_noticed(recorded: list[nn.Module]) -> None:
    model, x = Stack(3), torch.randn(2, 8)
    again.capture(model, (x,), {})
    for name, change in CHANGES.items():
        recorded.clear()
        change(model)
        for _ in range(2):
            again.capture(model, (x,), {})
            assert recorded == [model], name


def test_a_value_outside_of_the_model_is_noticed(recorded: list[nn.Module],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Stack(3), torch.randn(2, 8)
    again.capture(model, (x,), {})
    monkeypatch.setitem(globals(), "SLOPE", [0.2])
    again.capture(model, (x,), {})
    monkeypatch.setattr(Block, "middle", lambda self, x: x.sin())
    again.capture(model, (x,), {})
    assert recorded == [model] * 3


def test_a_change_that_changes_no_operation_is_none(recorded: list[nn.Module]) -> None:
    model, x = Stack(3), torch.randn(2, 8)
    again.capture(model, (x,), {})
    model.layers[1].scaled = 0                                                  # type: ignore[assignment]
    again.capture(model, (x,), {})
    assert recorded == [model]


def test_other_arguments_are_other_calls(recorded: list[nn.Module]) -> None:
    model = Stack(3)
    for x in (torch.randn(2, 8), torch.randn(3, 8), torch.randn(2, 8), torch.randn(2, 8, requires_grad=True),
              torch.randn(8, 2).t(), torch.randn(3, 8)):
        again.capture(model, (x,), {})
    assert len(recorded) == 4


class Holding(Stack):
    """Reads a tensor that is its own, and no buffer."""

    def __init__(self) -> None:
        super().__init__(2)
        self.shift = torch.randn(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.shift)


class Marking(Stack):
    """Marks what is kept."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(rkmate.keep(2 * x))


@pytest.mark.parametrize("make", [Holding, lambda: Marking(2)], ids=["a constant", "a mark"])
def test_some_captures_are_not_kept(make: Callable[[], nn.Module], captured: list[nn.Module]) -> None:
    model = make()
    for _ in range(3):
        again.capture(model, (torch.randn(2, 8),), {})
    assert len(captured) == 3


def test_nothing_of_the_model_is_held(captured: list[nn.Module]) -> None:
    for layers in (7, 2):
        model, x = Stack(layers), torch.randn(2, 8)
        for _ in range(3):
            again.capture(model, (x,), {})
        held = [weakref.ref(t) for t in (*model.modules(), *model.parameters(), x)]
        assert again._known
        del model, x
        captured.clear()
        gc.collect()
        assert not any(ref() is not None for ref in held)
        assert not again._known


def test_the_oldest_captures_are_forgotten(recorded: list[nn.Module],
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "MOST_CALLS", 2)
    model = Stack(3)
    for length in (2, 3, 4, 2):
        again.capture(model, (torch.randn(length, 8),), {})
    assert len(recorded) == 4 and len(again._known) == 2
    monkeypatch.setattr(again, "MOST_NODES", 1)
    again.capture(model, (torch.randn(4, 8),), {})
    again.capture(model, (torch.randn(3, 8),), {})
    assert len(recorded) == 5 and len(again._known) == 1


def test_plans_for_several_budgets_take_one_capture_and_one_graph(captured: list[nn.Module],
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    simplify = prepare.simplify
    monkeypatch.setattr(prepare, "simplify", lambda *args: [made.append(args[1:]), simplify(*args)][1])
    torch.manual_seed(0)
    model, x = Stack(7), torch.randn(64, 8)
    settings = rkmate.Settings(costs="analytic")
    plain = copy.deepcopy(model)
    assert rkmate.plan(model, (x,), budget=0.8, progress=False, settings=settings).overhead > 0
    for budget in (0.8, 0.7):
        wrapped = rkmate.wrap(model, (x,), budget=budget, progress=False, settings=settings)
        assert_same_step(plain, wrapped, Sample(plain, (x,), {}, lambda loss: loss))
    assert captured == [model]
    assert made and len(made) == len(set(made))


def test_results_of_later_stages_go_with_the_model(captured: list[nn.Module]) -> None:
    model, x = Stack(7), torch.randn(64, 8)
    rkmate.plan(model, (x,), budget=0.9, progress=False, settings=rkmate.Settings(costs="analytic"))
    assert again._known[0].made
    found = again.capture(model, (x,), {})
    assert [again.once_of(found, "of this test", lambda n=n: n) for n in (1, 2)] == [1, 1]
    assert again.once_of(replace(found, repeats=(0,)), "of this test", lambda: 2) == 2
    held = [weakref.ref(t) for t in (*model.modules(), *model.parameters(), x)]
    del model, x, found
    captured.clear()
    gc.collect()
    assert not any(ref() is not None for ref in held)
