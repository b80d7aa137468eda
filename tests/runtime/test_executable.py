"""Generated source, loaded: it does what it says, by fewer steps."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rkmate.codegen.emit import Generated
from rkmate.runtime.environment import Environment
from rkmate.runtime.executable import loaded
from rkmate.support.generated import load, show
from rkmate.torch_seam import own
from tests.semantics.steps import planned

TEXT = """
import torch

aten_mm = torch.ops.aten.mm.default
aten_sum = torch.ops.aten.sum.dim_IntList
torch_cat = torch.cat

def function(x):
    y = aten_mm(x, x.t())
    z = aten_sum(y, [0], keepdim=True)
    return torch_cat([z, z]).reshape([4])

def part(env, read):
    return env, read
"""
X = torch.arange(6.0).reshape(2, 3)
aten = torch.ops.aten


def _loaded(text: str = TEXT, **options: Any) -> dict[str, Any]:
    return loaded(Generated(text, ("part",), (), (), **options), "<text>")


def test_operators_are_what_they_call() -> None:
    names = _loaded()
    assert names["aten_mm"] is aten.mm.default._op and names["aten_sum"] is aten.sum.dim_IntList._op
    assert names["torch_cat"] is torch.cat
    assert torch.equal(names["function"](X), load(TEXT, "<text>")["function"](X))


def test_an_operator_that_is_python_is_called_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    record = own.OwnOperator("mm(Tensor a, Tensor b) -> Tensor", lambda a, b: a @ b + 1, direct=True)
    monkeypatch.setattr(own, "_records", {aten.mm.default: record})
    assert torch.equal(_loaded()["function"](X), torch.cat([(X @ X.t() + 1).sum(0)] * 2))


def test_modes_see_each_operation() -> None:
    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.found: list[Any] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.found.append(func)
            return func(*args, **(kwargs or {}))

    with Seen() as seen:
        _loaded()["function"](X)
    assert {aten.mm.default, aten.sum.dim_IntList, aten.cat.default} <= {*seen.found}


def test_only_what_computes_runs_below_autograd() -> None:
    env = Environment({}, {}, torch.device("cpu"))
    assert _loaded()["part"].__name__ == "part"
    names = _loaded(below_autograd=True)
    assert names["part"].__name__ != "part" and names["function"].__name__ == "function"
    names["part"](env, read=("x",))


def test_an_unknown_operator_fails_where_the_text_is_loaded() -> None:
    with pytest.raises(AttributeError):
        _loaded("import torch\n\ntorch_no = torch.no_such_operation\n")


def test_tracebacks_show_the_text() -> None:
    class Owner:
        pass

    owner = Owner()
    function = _loaded()["function"]
    show(TEXT, "<text>", owner)
    with pytest.raises(RuntimeError) as error:
        function(torch.ones(1))
    lines = [f.line for f in traceback.extract_tb(error.value.__traceback__) if f.filename == "<text>"]
    assert lines == ["y = aten_mm(x, x.t())"]
    del owner
    assert not [line for line in traceback.format_exception(error.value) if "aten_mm" in line]


def test_a_step_names_each_operator_once() -> None:
    module = planned(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU()), X)
    assert "\naten_gelu_backward = torch.ops.aten.gelu_backward.default\n" in module.source
    assert module.source.count("torch.ops.aten.gelu_backward") == 1
