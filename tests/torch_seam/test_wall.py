"""What is not torch's documented API stands in `rkmate/torch_seam`, and nowhere else in the package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import fx, nn

import rkmate
from rkmate.torch_seam import modules, nodes
from rkmate.torch_seam.schema import OpOverload

PACKAGE = Path(rkmate.__file__).parent
LIBRARIES = ("torch", "transformers", "accelerate", "peft", "diffusers", "lightning")
NAMED_TUPLE = ("_replace", "_fields", "_asdict")
OPERATORS = ("torch.ops.", "aten.")
"""Operators are named in full everywhere: their names are not attributes of torch's Python."""
METADATA = {nodes.VALUE, nodes.TENSOR_META, "partitioner_tag", "desc", "seq_nr", "nn_module_stack",
            "fwd_nn_module_stack"}
TORCHS = {name for owner in (torch.Tensor, nn.Module(), OpOverload, fx.Node, torch.UntypedStorage,
                             torch.autograd.Function, fx.Graph) for name in dir(owner)
          if name.startswith("_") and not name.startswith("__")} | {"_cdata", "_schema", "_op", "_opname"}
"""Underscore attributes of torch's objects."""


def own_names(trees: list[ast.Module]) -> set[str]:
    """Return the underscore names that the package defines as attributes or members of its own classes."""
    found: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) \
                    and ast.unparse(node.value) in ("self", "cls"):
                found.add(node.attr)
            elif isinstance(node, ast.Assign):
                found |= {t.id for t in node.targets if isinstance(t, ast.Name)}
                found |= {c.value for t in node.targets if isinstance(t, ast.Name) and t.id == "__slots__"
                          for c in ast.walk(node.value) if isinstance(c, ast.Constant)}
    return found


def is_private(path: str) -> bool:
    """Return whether a dotted path leads through a private part of a library."""
    parts = path.split(".")
    if parts[0] not in LIBRARIES or not all(map(str.isidentifier, parts)) or path.startswith("torch.ops."):
        return False
    return path.startswith("torch.fx.experimental") or any(
        p.startswith("_") and not p.startswith("__") for p in parts)


def is_foreign(node: ast.Attribute, own: set[str]) -> bool:
    """Return whether an underscore attribute is one of another library's object."""
    name, holder = node.attr, ast.unparse(node.value)
    return name.startswith("_") and not name.startswith("__") and name not in NAMED_TUPLE \
        and holder not in ("self", "cls", "super()") and not f"{holder}.".startswith(OPERATORS) \
        and (name in TORCHS or name not in own)


def constant(node: ast.AST | None) -> object:
    """Return the value of a constant; None for anything else."""
    return node.value if isinstance(node, ast.Constant) else None


def breaches(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Yield what a module uses that belongs into the seam."""
    for node in ast.walk(tree):
        names: list[str] = []
        wrong = False
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
            wrong = is_foreign(node, own) or "mock.patch" in (names[0], ast.unparse(node.value))
        elif isinstance(node, ast.Subscript):
            wrong = constant(node.slice) in (*METADATA, *modules.REGISTRIES)
        elif isinstance(node, ast.Call) and node.args:
            called, second = ast.unparse(node.func), node.args[1] if len(node.args) > 1 else None
            wrong = (called in ("getattr", "hasattr", "setattr") and constant(second) in TORCHS) \
                or (called.endswith(".get") and constant(node.args[0]) in METADATA)
        if wrong or any(map(is_private, names)):
            yield ast.unparse(node)


def sources() -> dict[str, ast.Module]:
    """Return the package's modules by their paths, the seam left out."""
    return {name: ast.parse(p.read_text(encoding="utf-8")) for p in sorted(PACKAGE.rglob("*.py"))
            if not (name := p.relative_to(PACKAGE).as_posix()).startswith("torch_seam/")}


ALLOWED = {"support/warn.py": {"sys._getframe"}, "show/plots.py": {"made._repr_png_"}}
"""File -> names that are documented though they look private: of Python's own library, and the method by
which an object shows itself in IPython."""


OPERATOR = re.compile(r"\b(?:torch\.ops\.)?aten\.\w+")
OF_OPERATORS = ("graph/ops/", "graph/passes/")
"""Where tables of torch's operators stand, next to the seam."""


def tables(tree: ast.Module) -> list[str]:
    """Return the names of a module that stand for more than one of torch's operators."""
    found = []
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            if len(set(OPERATOR.findall(ast.unparse(node.value)))) > 1:
                found.append(ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0]))
    return found


def test_nothing_private_and_no_table_of_operators_stands_elsewhere() -> None:
    trees = sources()
    own = own_names(list(trees.values()))
    found = {name: sorted(set(breaches(tree, own)) - ALLOWED.get(name, set()))
             for name, tree in trees.items()}
    assert {name: texts for name, texts in found.items() if texts} == {}
    found = {name: tables(tree) for name, tree in trees.items() if not name.startswith(OF_OPERATORS)}
    assert {name: texts for name, texts in found.items() if texts} == {}


@pytest.mark.parametrize("source", [
    "import torch._C", "from torch._ops import OpOverload", "import torch\ntorch._C._functorch.peek()",
    "from torch.nn.modules.batchnorm import _BatchNorm", "from torch.fx.experimental import proxy_tensor",
    "x._version", "node.target._schema", "m._parameters", "getattr(op, '_opname', '')", "a.b._never_heard_of",
    "node.meta['val']", "node.meta.get('seq_nr')", "module.__dict__['_buffers']",
    "with mock.patch.object(torch, 'add', f): pass", "import transformers\ntransformers.x._y"])
def test_a_breach_is_seen(source: str) -> None:
    assert list(breaches(ast.parse(source), set()))


@pytest.mark.parametrize("source", [
    "torch.ops.aten._softmax.default", "aten._unsafe_view.default", "self._x", "super()._run()",
    "t.__class__", "form._replace(a=1)", "import numpy._core", "node.meta[VALUE]", "made._field",
    "torch.relu(x)"])
def test_what_is_no_breach(source: str) -> None:
    assert not list(breaches(ast.parse(source), {"_field"}))


@pytest.mark.parametrize(("source", "seen"), [
    ("_OWN = {aten.mm.default, aten.bmm.default}", ["_OWN"]),
    ("RULES: dict = {torch.ops.aten.add: 1, torch.ops.aten.mul: 2}", ["RULES"]),
    ("aten = torch.ops.aten", []), ("_ADD = torch.ops.aten.add.Tensor", []), ("SIZES = {1: 2, 3: 4}", [])])
def test_a_table_of_operators_is_seen(source: str, seen: list[str]) -> None:
    assert tables(ast.parse(source)) == seen
