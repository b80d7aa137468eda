"""Views that only undo or repeat other views leave the graph; what the caller gets stays a view."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

import rkmate
from rkmate.graph.capture.capture import capture
from rkmate.graph.ops.properties import is_view
from rkmate.graph.passes.table import simplify
from tests.equality import assert_same_step
from tests.models import Sample

aten = torch.ops.aten
STEPS = ("t", "flat", "split", "wide", "extra", "same")


class Chain(nn.Module):
    """A product, looked at through many views, and another one."""

    def __init__(self, steps: tuple[str, ...]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(6, 4, bias=False)
        self.steps = steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        for step in self.steps:
            if step == "t":
                x = x.transpose(0, -1)
            elif step == "extra":
                x = x.unsqueeze(1)
            elif step == "same":
                x = x.reshape(x.shape)
            else:
                x = x.reshape({"flat": (48,), "split": (2, 3, 8), "wide": (4, 12)}[step])
        y: torch.Tensor = self.last(x.reshape(-1, 6)).sum(0)
        return y


def _views(model: nn.Module, x: torch.Tensor) -> list[fx.Node]:
    captured = capture(model, (x,), {})
    graph = simplify(captured, captured.differentiable).graph
    return [n for n in graph.nodes if n.op == "call_function" and is_view(n)]


@given(steps=st.lists(st.sampled_from(STEPS), max_size=8).map(tuple))
@settings(max_examples=3, deadline=None)
def test_any_chain(steps: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model, x = Chain(steps), torch.randn(6, 6)
    for node in _views(model, x):
        layout, base = node.meta["val"], node.args[0]
        while isinstance(base, fx.Node) and is_view(base):
            value = base.meta["val"]
            assert (value.shape, value.stride()) != (layout.shape, layout.stride())
            base = base.args[0]
    module = rkmate.wrap(copy.deepcopy(model), (x,), budget=1.0, progress=False)
    assert_same_step(model, module, Sample(model, (x,), {}, lambda y: (y * y).sum()))


def test_what_is_left() -> None:
    """Two linear layers with a batch dimension: the trace has a chain around each product."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    x = torch.randn(2, 3, 8)
    captured = capture(model, (x,), {})
    before = sum(is_view(n) for n in captured.graph.nodes)
    found = _views(model, x)
    assert len(found) < before
    pairs = [(n.target, n.args[0].target) for n in found if isinstance(n.args[0], fx.Node)]
    assert (aten.t.default, aten.t.default) not in pairs
    assert (aten.view.default, aten.view.default) not in pairs


class Round(nn.Module):
    """Returns a value, and a view of a view of it that looks the same."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x)
        return y, y.view(3, 8).view(4, 6)


@pytest.mark.parametrize("budget", [1.0, "100MiB"])
def test_outputs_stay_two_views(budget: float | str) -> None:
    model, x = Round(), torch.randn(4, 4)
    module = rkmate.wrap(copy.deepcopy(model), (x,), budget=budget, progress=False)
    for run in (model, module):
        y, z = run(x)
        assert y is not z
        assert y.data_ptr() == z.data_ptr()
        del y, z
    assert_same_step(model, module, Sample(model, (x,), {}, lambda out: (out[0] * out[1]).sum()))


class Unread(nn.Module):
    """A value seen through views, by a loss and by an output that no loss reads: its gradient's place is
    taken by another gradient, of other strides than were traced."""

    def __init__(self, view: Callable[[torch.Tensor], torch.Tensor], width: int) -> None:
        super().__init__()
        self.view = view
        self.first, self.head, self.aux = nn.Linear(width, width), nn.Linear(width, 1), nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.view(self.first(x))
        return self.head(h.transpose(1, 2)).pow(2).mean(), self.aux(h.transpose(1, 2).transpose(1, 2)) \
            if h.shape[1] != h.shape[2] else self.aux(h)


@pytest.mark.parametrize(("view", "width"), [
    (lambda y: y.transpose(1, 2), 8), (lambda y: y.view(4, 4, 6), 6)], ids=["transposed", "regrouped"])
def test_an_output_that_the_loss_leaves_out(view: Callable[[torch.Tensor], torch.Tensor],
                                            width: int) -> None:
    torch.manual_seed(0)
    model, x = Unread(view, width), torch.randn(2, 8, width)
    if width == 6:
        model.head, model.aux = nn.Linear(4, 1), nn.Linear(6, 3)
    module = rkmate.wrap(copy.deepcopy(model), (x,), budget=1.0, progress=False)
    for _ in range(3):                      # the loss of the first backward decides what is planned
        assert_same_step(model, module, Sample(model, (x,), {}, lambda out: out[0]))


class Columns(nn.Module):
    """A weight in columns, taken apart in ways that one in rows cannot be, and put together again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 6).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.weight.t().view(16, 3).unsqueeze(0).view(8, 2, 3)
        y: torch.Tensor = x @ parts.permute(1, 2, 0).view(6, 8)
        return y


def test_views_that_only_these_strides_have() -> None:
    model, x = Columns(), torch.randn(5, 6)
    module = rkmate.wrap(copy.deepcopy(model), (x,), budget=1.0, progress=False)
    assert_same_step(model, module, Sample(model, (x,), {}, lambda y: (y * y).sum()))


class Through(nn.Module):
    """Returns its input as well."""

    def __init__(self, way: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.way, self.linear = way, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(z), self.way(x)


@pytest.mark.parametrize("way", [lambda x: x, lambda x: x.clone(), lambda x: x.view(x.shape),
                                 lambda x: x.flatten(1).view(x.shape), lambda x: x.t().t()],
                         ids=["itself", "copy", "view", "round", "transposed twice"])
def test_an_input_whose_gradient_is_an_outputs(way: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = Through(way)
    x, z = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    module = rkmate.wrap(copy.deepcopy(model), (x, z), budget=1.0, progress=False)
    assert_same_step(model, module, Sample(model, (x, z), {}, lambda out: (out[0] * out[1]).sum()))
