"""Private names of torch stand where they are listed, and nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import rkmate
from rkmate.graph.passes.private_names import ELSEWHERE, FOLDERS, IN_CAPTURE, PUBLIC, SEEN_IN

PACKAGE = Path(rkmate.__file__).parent


def used(tree: ast.AST) -> set[str]:
    """The private names of torch that a file imports or reaches from ``torch``, the longest of each."""
    names = {name for name in _names(tree) if name.startswith("torch.") and any(
        p.startswith("_") and not p.startswith("__") for p in name.split(".")) and not name.startswith(
            ("torch.ops.", *PUBLIC))}
    return {n for n in names if not any(other.startswith(f"{n}.") for other in names)}


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{a.name}" for a in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.Attribute):
            path, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                path.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name):
                yield ".".join([inner.id, *reversed(path)])


def _found() -> dict[str, set[str]]:
    files = {p.relative_to(PACKAGE).as_posix(): p for p in sorted(PACKAGE.rglob("*.py"))}
    return {name: found for name, path in files.items()
            if (found := used(ast.parse(path.read_text(encoding="utf-8"))))}


def test_every_use_is_listed() -> None:
    found = _found()
    capture = {name.removeprefix("graph/capture/"): sorted(names) for name, names in found.items()
               if name.startswith("graph/capture/")}
    assert capture == {name: sorted(names) for name, names in IN_CAPTURE.items()}
    others = {name: sorted(names) for name, names in found.items()
              if not name.startswith(tuple(f"{f}/" for f in FOLDERS))}
    assert others == {name: sorted(names) for name, (names, _) in ELSEWHERE.items()}


@pytest.mark.parametrize("name", IN_CAPTURE)
def test_a_file_says_so_itself(name: str) -> None:
    about = ast.get_docstring(ast.parse((PACKAGE / "graph" / "capture" / name).read_text(encoding="utf-8")))
    assert about is not None
    assert "ses private names of torch" in " ".join(about.split())
    assert SEEN_IN in about


@pytest.mark.parametrize(("source", "names"), [
    ("import torch._C", {"torch._C"}),
    ("from torch._ops import OpOverload", {"torch._ops.OpOverload"}),
    ("from torch.nn.modules.batchnorm import _BatchNorm", {"torch.nn.modules.batchnorm._BatchNorm"}),
    ("import torch\ntorch._C._functorch.peek()", {"torch._C._functorch.peek"}),
    ("import torch\ntorch.ops.aten._softmax\ntorch.__version__\ntorch.relu", set()),
    ("from torch.utils import _pytree as pytree\nfrom torch.utils._pytree import tree_leaves", set()),
    ("self._C._x\nimport numpy._core", set()),
])
def test_the_reader(source: str, names: set[str]) -> None:
    assert used(ast.parse(source)) == names
