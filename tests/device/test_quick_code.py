"""Generated text, compiled: it does what it says, by fewer steps."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from rkmate.device.quick_code import load
from rkmate.torch_seam import own

TEXT = """
import torch

aten = torch.ops.aten
others = [1, 2]

def function(x):
    sizes = [2, 3]
    sizes.append(1)
    y = aten.mm.default(x, x.t())
    z = aten.sum.dim_IntList(y, [0], keepdim=True)
    return torch.cat([z, z]).reshape([4]), sizes, others.copy()
"""
X = torch.arange(6.0).reshape(2, 3)


def test_the_same_results() -> None:
    plain: dict[str, Any] = {}
    exec(TEXT, plain)
    names = load(TEXT, "<text>")
    found, expected = names["function"](X), plain["function"](X)
    assert torch.equal(found[0], expected[0])
    assert found[1:] == expected[1:] == ([2, 3, 1], [1, 2])


def test_operators_are_looked_up_once() -> None:
    names = load(TEXT, "<text>")
    code = names["function"].__code__
    assert torch.ops.aten.mm.default._op in names.values()
    assert torch.ops.aten.sum.dim_IntList._op in names.values() and torch.cat in names.values()
    assert not {"aten", "torch", "mm", "cat"} & {*code.co_names}
    assert {"t", "reshape", "copy"} <= {*code.co_names}


def test_words_stay_as_they_are() -> None:
    text = '''
import torch

aten = torch.ops.aten

def function(x):
    """Calls aten.mm.default(x) and 'torch.cat(x)'."""
    # aten.mm.default(
    return x, "aten.mm.default(", 'say \\'torch.cat(', my_aten.mm(x), x.aten.mm(1)
'''
    function = load(text, "<text>")["function"]
    assert function.__doc__ == "Calls aten.mm.default(x) and 'torch.cat(x)'."
    assert {"aten.mm.default(", "say 'torch.cat("} <= {*function.__code__.co_consts}
    assert {"my_aten", "mm", "aten"} <= {*function.__code__.co_names}


def test_a_decorator_finds_what_is_written() -> None:
    written = "@torch.no_grad()\ndef written(x):\n\n    return aten.mm.default(x, x)\n\n"
    names = load(TEXT.replace("def function", f"{written}def function"), "<text>")
    assert {"aten", "mm"} <= {*names["written"].__wrapped__.__code__.co_names}
    assert "aten" not in names["function"].__code__.co_names


def test_modes_see_each_operation() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.found: list[Any] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.found.append(func)
            return func(*args, **(kwargs or {}))

    with Seen() as seen:
        load(TEXT, "<text>")["function"](X)
    aten = torch.ops.aten
    assert {aten.mm.default, aten.sum.dim_IntList, aten.cat.default} <= {*seen.found}


def test_tracebacks_show_the_text(tmp_path: Path) -> None:
    file = tmp_path / "text.py"
    file.write_text(TEXT)
    with pytest.raises(RuntimeError) as error:
        load(TEXT, str(file))["function"](torch.ones(1))
    frame = next(f for f in traceback.extract_tb(error.value.__traceback__) if f.filename == str(file))
    assert frame.line == "y = aten.mm.default(x, x.t())"


def test_an_operator_that_is_python_is_called_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    mm = torch.ops.aten.mm.default
    record = own.OwnOperator("mm(Tensor a, Tensor b) -> Tensor", lambda a, b: a @ b + 1, direct=True)
    monkeypatch.setattr(own, "_records", {mm: record})
    found, _, _ = load(TEXT, "<text>")["function"](X)
    assert torch.equal(found, torch.cat([(X @ X.t() + 1).sum(0)] * 2))


def test_an_unknown_operator_fails_where_the_text_is_loaded() -> None:
    with pytest.raises(AttributeError):
        load("import torch\n\ndef function(x):\n    return torch.no_such_operation(x)\n", "<text>")
