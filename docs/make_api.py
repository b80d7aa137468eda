"""Write docs/api.md from the docstrings of the public names: ``python docs/make_api.py``."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import rkmate
import rkmate.distributed
import rkmate.dtr
from rkmate.settings import MOVED

PAGE = Path(__file__).parent / "api.md"
_GROUPS = (
    ("Planning", ("wrap", "apply", "plan", "tradeoff", "compare", "auto_budget", "max_batch_size",
                  "measure_step", "shared_plan")),
    ("Before you train", ("doctor", "check")),
    ("Wishes", ("keep", "recompute")),
    ("What comes back", ("PlannedModule", "Plan", "Curve", "Comparison", "BatchSize", "Diagnosis", "Finding",
                         "Parity")),
    ("Options and settings", ("Options", "Settings", "RunSettings", "PlannerSettings", "MeasureSettings",
                              "CutSettings", "OptionSettings", "Offload")),
)
_DYNAMIC = ("Session", "wrap", "DynamicModule", "Report", "HEURISTICS", "simulate", "Result", "Trace",
            "read_log", "parse_log", "Program", "make_heuristic")


def api_text() -> str:
    """The whole page."""
    names = set(rkmate.__all__)
    parts = ["# API\n", "Made from the docstrings by `python docs/make_api.py`. Sizes are bytes, times "
             "are seconds.\n"]
    for title, group in _GROUPS:
        parts.append(f"## {title}\n")
        parts += [_entry(rkmate, n) for n in group if n in names]
        names -= set(group)
        if "Options" in group:
            parts += ["### Keywords of earlier versions\n",
                      "These work for one more version, with a warning.\n", "| keyword | now |\n|---|---|",
                      *(f"| `{k}=` | `{m.place}` |" for k, m in MOVED.items()), ""]
    errors = {n for n in names if isinstance(getattr(rkmate, n), type)
              and issubclass(getattr(rkmate, n), (Exception, Warning))}
    rest = sorted(names - errors)
    if rest:
        parts += ["## More\n", *(_entry(rkmate, n) for n in rest)]
    parts.append("## Errors and warnings\n")
    parts += [_entry(rkmate, n) for n in sorted(errors)]
    parts += ["## Sharded models\n",
              "Names of `rkmate.distributed`. [How to use them](tools-distributed.md).\n",
              *(_entry(rkmate.distributed, n) for n in rkmate.distributed.__all__)]
    parts += ["## Dynamic rematerialization\n",
              "`rkmate.dtr(...)` makes a `rkmate.dtr.Session`. [What it does, and how](dtr.md).\n"]
    rest = sorted(set(rkmate.dtr.__all__) - set(_DYNAMIC))
    parts += [_entry(rkmate.dtr, n) for n in (*_DYNAMIC, *rest)]
    return "\n".join(parts).rstrip() + "\n"


def _entry(home: ModuleType, name: str) -> str:
    value = getattr(home, name)
    heading = f"### `{home.__name__}.{name}`\n"
    if isinstance(value, dict):
        return f"{heading}\nIts keys: {', '.join(f'`{key}`' for key in value)}.\n"
    if not isinstance(value, type):
        return f"{heading}\n{_signature(name, inspect.signature(value))}\n{_markdown(value)}\n"
    if issubclass(value, Exception):
        bases = ", ".join(b.__name__ for b in value.__bases__)
        return f"{heading}\n{_markdown(value)}\n\nSubclass of {bases}.\n"
    parts = [heading]
    if "\nArgs:\n" in (inspect.getdoc(value) or ""):
        made = inspect.signature(value).replace(return_annotation=inspect.Signature.empty)
        parts.append(_signature(name, made))
    parts.append(f"{_markdown(value)}\n")
    fields = getattr(value, "__dataclass_fields__", None) or {
        k: None for k in value.__annotations__ if hasattr(value, "__optional_keys__")}
    classes = [c for c in reversed(value.__mro__) if c.__module__.split(".")[0] == "rkmate"]
    documented = {field: about for c in classes for field, about in _field_docs(c).items()}
    for field in fields:
        if not field.startswith("_"):
            about = documented.get(field, "")
            parts.append(f"- `{field}`{': ' if about else ''}{about}")
    if fields:
        parts.append("")
    for member, found in {m: f for c in classes for m, f in vars(c).items()}.items():
        if member.startswith("_") or member in fields:
            continue
        target = found.fget if isinstance(found, property) else \
            found.__func__ if isinstance(found, (staticmethod, classmethod)) else found
        if not inspect.isfunction(target) or not target.__doc__:
            continue
        if isinstance(found, property):
            parts.append(f"#### `.{member}`\n\n{_markdown(target)}\n")
        else:
            made = _signature(member, _of_class(value, inspect.signature(target), target.__module__))
            parts.append(f"#### `.{member}()`\n\n{made}\n{_markdown(target)}\n")
    return "\n".join(parts)


def _of_class(value: type, found: inspect.Signature, module: str) -> inspect.Signature:
    """A method's signature in the class `value`: what returns an object of its own class says so."""
    if isinstance(getattr(sys.modules[module], str(found.return_annotation), None), TypeVar):
        return found.replace(return_annotation=value.__name__)
    return found


def _signature(name: str, found: inspect.Signature) -> str:
    kept = [p for p in found.parameters.values() if p.name not in ("self", "cls")]
    lines = []
    starred = False
    for p in kept:
        if p.kind is p.KEYWORD_ONLY and not starred:
            lines.append("*")
            starred = True
        text = str(p.replace(annotation=p.annotation if isinstance(p.annotation, str)
                             else p.empty))
        lines.append(re.sub(r": '([^']*)'", r": \1", text))
    returned = found.return_annotation
    arrow = "" if returned is inspect.Signature.empty else f" -> {returned}"
    inside = ", ".join(lines)
    if len(inside) + len(name) + len(arrow) < 92:
        return f"```text\n{name}({inside}){arrow}\n```\n"
    body = "".join(f"    {line},\n" for line in lines)
    return f"```text\n{name}(\n{body}){arrow}\n```\n"


def _field_docs(cls: type) -> dict[str, str]:
    """The string under each field of a dataclass."""
    source = inspect.getsource(cls)
    pattern = re.compile(r'^    (\w+): [^\n]*\n    """(.*?)"""', re.M | re.S)
    return {m[1]: _inline(" ".join(m[2].split())) for m in pattern.finditer(source)}


def _inline(text: str) -> str:
    return text.replace("``", "`")


def _markdown(value: Any) -> str:
    """A docstring as Markdown: its sections become bold lines and lists."""
    text = inspect.getdoc(value) or ""
    text = re.sub(r"(?<=^Returns:\n)((?:    .*\n?)+)", lambda m: textwrap.dedent(m[1]), text, flags=re.M)
    lines: list[str] = []
    listing = False
    for line in text.splitlines():
        if re.fullmatch(r"(Args|Returns|Raises):", line):
            listing = line != "Returns:"
            lines += [f"**{line[:-1]}**", ""]
        elif listing and re.match(r" {4}\S", line):
            item = line.strip()
            match = re.match(r"([\w, ]+): (.*)", item)
            lines.append(f"- `{match[1]}`: {match[2]}" if match and not item.startswith("`") else
                         f"- {item}")
        elif listing and line.strip():
            if line.startswith(" "):
                lines.append(f"  {line.strip()}")
            else:
                listing = False
                lines.append(line)
        else:
            lines.append(line)
    return _inline("\n".join(lines)).rstrip()


if __name__ == "__main__":
    PAGE.write_text(api_text(), encoding="utf-8")
    print(PAGE)
