"""Generated text, compiled so that its calls take little time.

The text names an operator in full (``aten.mm.default``). Compiled, each operator is looked up once, where the
text is loaded, and called without the method of Python around it. What a decorator reads stays as it is.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from rkmate.torch_seam.own import record_of
from rkmate.torch_seam.schema import OpOverload, native_call

_SPACE = re.compile(r"^(\w+) = (torch\.ops\.\w+)$", re.MULTILINE)
_AS_THEY_ARE = "|".join((
    r"^@[\s\S]*?^def .*\n(?:(?:[ \t].*)?\n)*",
    r'"""[\s\S]*?"""', r"'(?:[^'\\\n]|\\.)*'", r'"(?:[^"\\\n]|\\.)*"', r"#.*"))
"""Decorated functions; strings; comments."""
_DOT = "\N{MIDDLE DOT}"
"""Names may have it, and those in generated text have none."""


def load(text: str, filename: str) -> dict[str, Any]:
    """Return the names that a module of this text has. Tracebacks show lines of the text."""
    spaces = {"torch": torch, **{name: eval(value) for name, value in _SPACE.findall(text)}}
    namespace: dict[str, Any] = {}

    def quick(found: re.Match[str]) -> str:
        called = found["called"]
        if not called:
            return found[0]
        name = called.replace(".", _DOT)
        if name not in namespace:
            namespace[name] = quickest(eval(called, spaces))
        return name

    calls = re.compile(rf"{_AS_THEY_ARE}|(?<![\w.])(?P<called>(?:{'|'.join(spaces)})(?:\.\w+)+)(?=\()",
                       re.MULTILINE)
    exec(compile(calls.sub(quick, text), filename, "exec"), namespace)
    return namespace


def quickest(function: Any) -> Any:
    """Return the function that an operator calls, if it is one function: calling it directly takes less
    time."""
    if not isinstance(function, OpOverload):
        return function
    record = record_of(function)
    return record.kernel if record is not None and record.direct else native_call(function)
