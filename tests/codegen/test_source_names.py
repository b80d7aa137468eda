"""Names in generated source: whatever parameters, buffers and operators are called."""

from __future__ import annotations

import copy
import keyword
from typing import Any

import pytest
import torch
from torch import nn

from rkmate.codegen.slices import RESERVED
from tests.equality import assert_same_step
from tests.models.sample import Sample
from tests.semantics.steps import planned, tightest


@torch.library.custom_op("rkmate_tests::tanh_2", mutates_args=())
def _tanh_2(x: torch.Tensor) -> torch.Tensor:
    return x.tanh() * 2


@torch.library.custom_op("take::forward", mutates_args=())
def _in_a_reserved_namespace(x: torch.Tensor) -> torch.Tensor:
    return x * 3


for _op, _backward in ((_tanh_2, lambda x, grad: 2 * grad * (1 - x.tanh() ** 2)),
                       (_in_a_reserved_namespace, lambda x, grad: grad * 3)):
    _op.register_fake(torch.empty_like)
    _op.register_autograd(lambda ctx, grad, f=_backward: f(ctx.saved_tensors[0], grad),
                          setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def _same(model: nn.Module, x: torch.Tensor) -> None:
    for make in (planned, tightest):
        module = make(copy.deepcopy(model), x)
        assert_same_step(copy.deepcopy(model), module, Sample(model, (x,), {}, lambda y: (y * y).sum()))


class _Numbered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = torch.tanh(self.layer(x))
        two = torch.tanh(one + 1)
        three: torch.Tensor = torch.ops.rkmate_tests.tanh_2(one * 3)
        return one * two + three


def test_an_operator_named_as_the_second_of_another() -> None:
    _same(_Numbered(), torch.randn(4, 5))


class _Called(nn.Module):
    """A parameter and a buffer of one name each, and dropout that runs again."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.part = nn.Module()
        for module, other in ((self, f"{name}_"), (self.part, "p")):
            module.register_parameter(name, nn.Parameter(torch.randn(6, 6)))
            module.register_buffer(other, torch.rand(6))
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in (self, self.part):
            x = self.dropout(torch.tanh(x @ getattr(module, self.name)))
            x = x * self.get_buffer(f"{self.name}_")
        result: torch.Tensor = (x @ getattr(self, self.name)).exp()
        return result


@pytest.mark.parametrize("name", ["give", "rng", "env", "input", *(
    pytest.param(name, marks=pytest.mark.slow) for name in ("take", "aten", "tanh", "_"))])
def test_parameters_of_any_name(name: str) -> None:
    _same(_Called(name), torch.randn(16, 6))


class _Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("rng", torch.rand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.dropout(torch.relu(self.layer(x))) * self.rng
        return x


def test_a_buffer_that_is_read_beside_recomputed_draws() -> None:
    model, x = _Buffered(), torch.randn(64, 8)
    module = planned(copy.deepcopy(model), x, planner="recompute-all")
    assert "env.replay" in module.source
    assert_same_step(model, module, Sample(model, (x,), {}, lambda y: (y * y).sum()))


class _Imported(nn.Module):
    """Operators in a namespace that is a word of generated source."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.tanh(torch.ops.take.forward(self.layer(x)))
        return result


def test_a_namespace_of_operators_of_any_name() -> None:
    model = _Imported()
    _same(model, torch.randn(3, 5))
    source = planned(copy.deepcopy(model), torch.randn(3, 5)).source
    assert "take_forward = torch.ops.take.forward.default\n" in source


class _Rows(nn.Module):
    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.copies = copies

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split: Any = torch.unbind_copy if self.copies else torch.unbind
        rows = split(torch.tanh(self.layer(x)))
        return torch.stack([torch.sin(r) * k for k, r in enumerate(rows)])


@pytest.mark.filterwarnings("ignore:the loss that is computed from the outputs")
@pytest.mark.parametrize("copies", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_operation_with_many_results(copies: bool) -> None:
    _same(_Rows(copies), torch.randn(40, 4))


def test_the_words_of_the_text_are_reserved() -> None:
    assert {*keyword.kwlist, "env", "torch", "take", "read", "give", "sources", "rng"} <= RESERVED
