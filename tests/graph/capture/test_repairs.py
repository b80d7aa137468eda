"""The passes of a capture: when they work, and that they leave torch as it was."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import fx, nn
from torch._decomp import decomposition_table, decompositions
from torch.autograd.function import FunctionMeta
from torch.distributions import Distribution

from rkmate.errors import CaptureError
from rkmate.graph.capture import repairs
from rkmate.graph.capture.repairs import Patch, repaired, ways_to_export
from rkmate.torch_seam.nodes import is_backward
from rkmate.torch_seam.patches.autograd import (
    ClosedOverError,
    closed_over_as_buffers,
    lost_tensors_refused,
    tag_what_needs_the_loss,
)
from rkmate.torch_seam.patches.custom_functions import kept_whole, run_as_they_are
from rkmate.torch_seam.patches.modules import new_buffers_as_writes

aten = torch.ops.aten


def _noting(name: str, noted: list[str]) -> Callable[[Any], Any]:
    @contextmanager
    def context() -> Iterator[None]:
        noted.append(f"in {name}")
        yield
        noted.append(f"out {name}")
    return lambda model: context()


def test_contexts_are_entered_in_the_order_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[str] = []
    monkeypatch.setattr(repairs, "PATCHES", (
        Patch("a", "first", _noting("a", noted)), Patch("b", "", _noting("b", noted), around="forward"),
        Patch("none", "no such model", lambda model: None), Patch("c", "second", _noting("c", noted))))
    with repaired("trace", nn.Identity()):
        noted.append("work")
    assert noted == ["in a", "in c", "work", "out c", "out a"]


def test_an_export_is_tried_without_the_last_patches_that_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[str] = []
    monkeypatch.setattr(repairs, "PATCHES", (
        Patch("a", "", _noting("a", noted), around="export", may_fail=True),
        Patch("none", "", lambda model: None, around="export", may_fail=True),
        Patch("b", "", _noting("b", noted), around="export", may_fail=True),
        Patch("c", "", _noting("c", noted), around="export")))
    tried = []
    for way in ways_to_export(nn.Identity()):
        with way():
            tried.append(" ".join(noted))
        noted.clear()
    assert tried == ["in a in b in c", "in a in c", "in c"]


def _state_of_torch() -> dict[str, Any]:
    kernels = {op: dict(op.py_kernels) for op in (aten.prod.default, aten.dropout.default,
                                                  aten.softshrink.default)}
    return {"decompositions": dict(decomposition_table), "kernels": kernels,
            "gru": (decompositions.gru_cell, decompositions.gru_cell_data),
            "checks": Distribution._validate_args,
            "functions": FunctionMeta.__getattribute__, "checkpoint": dict(vars(torch.utils.checkpoint)),
            "hook": torch.Tensor.register_hook}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("each", [p for p in repairs.PATCHES if p.around != "forward"],
                         ids=lambda p: p.name)
def test_torch_is_left_as_it_was(each: Patch, fails: bool) -> None:
    model = nn.Sequential(nn.BatchNorm1d(2, momentum=None), nn.Linear(2, 2))
    attributes = [dict(m.__dict__) for m in model.modules()]
    before = _state_of_torch()
    try:
        with each.run(model) or nullcontext():
            if fails:
                raise ValueError("a failed trace")
    except ValueError:
        assert fails
    assert _state_of_torch() == before
    assert [dict(m.__dict__) for m in model.modules()] == attributes


class _Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.weight = nn.Parameter(torch.ones(2))


def test_a_new_buffer_is_written_into_the_old_one() -> None:
    model = _Counts()
    old = model.count
    with new_buffers_as_writes(model):
        model.count = model.count + 1
    assert model.count is old
    assert old.tolist() == [1, 1]


@pytest.mark.parametrize("name", ["count", "weight"])
def test_one_of_another_shape_and_a_new_parameter_are_refused(name: str) -> None:
    model = _Counts()
    with pytest.raises(CaptureError, match=f"replaces the .* '{name}'"), new_buffers_as_writes(model):
        setattr(model, name, nn.Parameter(torch.ones(3)) if name == "weight" else torch.ones(3))


def test_lost_tensors() -> None:
    taught, fixed = torch.ones(2, requires_grad=True), torch.ones(2)
    with lost_tensors_refused(nn.Module()):
        assert (fixed * 2).tolist() == [2, 2]
        with pytest.raises(ClosedOverError, match="requires a gradient"):
            taught * 2
        with pytest.raises(ClosedOverError, match="writes to a tensor"):
            fixed.add_(1)
    assert fixed.tolist() == [1, 1]


def test_closed_over_tensors_are_buffers_of_the_program() -> None:
    class Program(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = torch.ones(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.held

    program = fx.symbolic_trace(Program())
    name = next(n.target for n in program.graph.nodes if n.op == "get_attr")
    held = getattr(program, name)
    if name in program._buffers:            # as torch.fx registers plain tensors
        del program._buffers[name]
        program.__dict__[name] = held
    assert not dict(program.named_buffers())
    closed_over_as_buffers(program)
    assert dict(program.named_buffers())[name] is held
    assert not program.state_dict()


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


def test_a_custom_function_is_one_operation_and_then_itself_again() -> None:
    bound = _Twice.apply

    def forward(x: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = bound(x)
        second: torch.Tensor = _Twice.apply(first.exp())
        return first * _Twice.forward(None, x + second) + x  # type: ignore[no-any-return]

    from torch.fx.experimental.proxy_tensor import make_fx
    with kept_whole():
        program = make_fx(forward)(torch.randn(3))
    assert sum("rkmate_custom_function" in str(n.target) for n in program.graph.nodes) == 2
    run_as_they_are(program)
    x, y = (torch.arange(3.0, requires_grad=True) for _ in range(2))
    program(x).sum().backward()
    forward(y).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert x.grad.tolist() == y.grad.tolist()


def test_calls_in_another_thread_run_as_usual() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx
    x = torch.ones(3, requires_grad=True)

    def forward(y: torch.Tensor) -> torch.Tensor:
        other = threading.Thread(target=lambda: _Twice.apply(x).sum().backward())
        other.start()
        other.join()
        return y + 1

    with kept_whole():
        program = make_fx(forward)(torch.randn(3))
    assert not any("rkmate_custom_function" in str(n.target) for n in program.graph.nodes)
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]


def test_tags_of_the_backward() -> None:
    from torch._functorch._aot_autograd.descriptors import PlainAOTOutput, TangentAOTInput
    graph = fx.Graph()
    x, grad = graph.placeholder("x"), graph.placeholder("grad")
    grad.meta["desc"] = TangentAOTInput(PlainAOTOutput(0))
    first = graph.call_function(aten.neg.default, (x,))
    second = graph.call_function(aten.mul.Tensor, (first, grad))
    third = graph.call_function(aten.exp.default, (second,))
    tag_what_needs_the_loss(graph)
    assert [is_backward(n) for n in (first, second, third)] == [False, True, True]
