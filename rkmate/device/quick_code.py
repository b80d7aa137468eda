"""Generated text, compiled so that its calls take little time.

The text names an operator in full (``aten.mm.default``), and writes lists of numbers as lists. Compiled,
each operator is looked up once, where the text is loaded, and called without the method of Python around it;
numbers stand in constants.

Uses a private name of torch (what an overload calls); tested with torch 2.13.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection
from typing import Any

from torch._ops import OpOverload

_directly: dict[OpOverload, Callable[..., Any]] = {}
"""Operators that are written in Python, and what they call."""


def call_directly(operator: OpOverload, function: Callable[..., Any]) -> None:
    """Let generated code call the function of an operator itself: the dispatcher would choose that, too."""
    _directly[operator] = function


def load(text: str, filename: str) -> dict[str, Any]:
    """The names that a module of this text has. Tracebacks show lines of the text."""
    tree = ast.parse(text, filename)
    spaces = {"torch", *(n.id for s in tree.body if isinstance(s, ast.Assign)
                         and ast.unparse(s.value).startswith("torch.ops.")
                         for n in s.targets if isinstance(n, ast.Name))}
    namespace: dict[str, Any] = {}
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef):
            _Quick(spaces, namespace).visit(statement)
        exec(compile(ast.Module([statement], []), filename, "exec"), namespace)
    return namespace


class _Quick(ast.NodeTransformer):
    """Rewrites the calls of a function."""

    def __init__(self, spaces: Collection[str], namespace: dict[str, Any]) -> None:
        """`spaces`: names of modules and of namespaces of operators. `namespace`: where they stand."""
        self._spaces, self._namespace = spaces, namespace

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """One call of an operator, or of a method."""
        self.generic_visit(node)
        if not isinstance(node.func, ast.Attribute):
            return node
        node.args = [*map(_constant, node.args)]
        for keyword in node.keywords:
            keyword.value = _constant(keyword.value)
        if _root(node.func) in self._spaces:
            name = ast.unparse(node.func)
            if name not in self._namespace:             # has a dot: no name of the text
                self._namespace[name] = _quickest(eval(name, self._namespace))
            node.func = ast.copy_location(ast.Name(name, ast.Load()), node.func)
        return node


def _quickest(function: Any) -> Any:
    if not isinstance(function, OpOverload):
        return function
    return _directly.get(function, function._op)


def _constant(node: ast.expr) -> ast.expr:
    """A list of numbers as a constant; anything else as it is."""
    if not isinstance(node, ast.List):
        return node
    found: Any = tuple(e.value for e in node.elts
                       if isinstance(e, ast.Constant) and isinstance(e.value, (int, float)))
    return ast.copy_location(ast.Constant(found), node) if len(found) == len(node.elts) > 0 else node


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
