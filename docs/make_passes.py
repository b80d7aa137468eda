"""Write docs/passes.md from the tables of passes: ``python docs/make_passes.py``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rkmate.graph.capture.repairs import PATCHES, PROGRAM_REWRITES, TRACE_REWRITES, Patch, Rewrite
from rkmate.graph.passes.table import REWRITES

PAGE = Path(__file__).parent / "passes.md"
Rows = Sequence[Patch | Rewrite[Any]]
SECTIONS: tuple[tuple[str, str, Rows], ...] = (
    ("Patches around the capture of a model", "", [p for p in PATCHES if p.around == "trace"]),
    ("Patches around the trace of its forward", "", [p for p in PATCHES if p.around == "forward"]),
    ("Patches around the export of its forward",
     "If the export fails, it is tried again without the last of the patches that may fail, then without "
     "the last two, and so on.\n\n",
     [p for p in PATCHES if p.around == "export"]),
    ("Rewrites of the exported forward", "", PROGRAM_REWRITES),
    ("Rewrites of the traced joint graph", "", TRACE_REWRITES),
    ("Rewrites of the joint graph that is planned",
     "After each of them, nodes that no other node reads are removed. A rewrite with a condition (`when`) "
     "works only on graphs with these choices: a variant of the graph, or a setting.\n\n", REWRITES),
)


def passes_text() -> str:
    """Return the text of the page."""
    parts = [
        "# Passes\n",
        "Made from the tables in `rkmate/graph/capture/repairs.py` and `rkmate/graph/passes/table.py` by "
        "`python docs/make_passes.py`.\n",
        "Passes change how torch traces a model, and the graph that it traces, before a plan is made. "
        "There are two types, in ordered tables. A `Patch` is a context around a stage of the capture: "
        "`run(model)` returns it. A `Rewrite` changes a graph: `run(graph)`. Each has a name and a reason.\n",
        "In tests, `verify` (`rkmate/graph/passes/verify.py`) checks the joint graph after each rewrite; "
        "`simplify(..., verify=True)` does so anywhere. How to add one: "
        "[adding a rewrite](adding-a-planner.md#adding-a-rewrite).\n",
    ]
    for heading, text, rows in SECTIONS:
        table = _table(("pass", "why", "in", "when"), [_row(p) for p in rows])
        parts += [f"## {heading}\n", text + table]
    return "\n".join(parts).rstrip() + "\n"


def _row(each: Patch | Rewrite[Any]) -> tuple[str, ...]:
    return each.name, each.why, f"`{each.place}`: `{each.run.__name__}`", _when(each)


def _when(each: Patch | Rewrite[Any]) -> str:
    if isinstance(each, Patch):
        return "may fail" if each.may_fail else ""
    return ", ".join([*(f"`{c}`" for c in each.when), *(f"not `{c}`" for c in each.unless)])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table, without columns that are empty."""
    said = [k for k in range(len(head)) if any(row[k] for row in rows)]
    lines = [[line[k] for k in said] for line in (head, ["---"] * len(head), *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(passes_text(), encoding="utf-8")
    print(PAGE)
