"""Write docs/passes.md from the table of passes: ``python docs/make_passes.py``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rkmate.graph.capture.repairs import PHASES, SEEN, Pass
from rkmate.graph.passes.table import PASSES

PAGE = Path(__file__).parent / "passes.md"
_HEADINGS = {
    "trace": "While a model is captured",
    "forward": "While its forward is traced",
    "export": "While the forward is exported",
    "exported": "On the exported forward",
    "joint": "On the joint graph",
    "simplify": "Simplification",
    "emission": "When code is written",
}


def passes_text() -> str:
    """The whole page."""
    parts = [
        "# Passes\n",
        "Made from `PASSES` in `rkmate/graph/passes/table.py` by `python docs/make_passes.py`.\n",
        "Between what torch traces and what a plan runs stands one ordered table of passes. Each has a "
        "name, a phase that says when it works and how it is called, and its reason; `torch` says on "
        f"which versions it was seen needed (the tests run with {', '.join(SEEN)}), and is empty where torch "
        "is not what it makes up for. The rows up to the joint graph stand in "
        "`rkmate/graph/capture/repairs.py`, as a folder imports nothing that stands above it.\n",
        "In tests, `verify` (`rkmate/graph/passes/verify.py`) checks the graph after each pass of the "
        "simplification; `simplify(..., verify=True)` does so anywhere. How to add one: "
        "[adding a rewrite](adding-a-planner.md#adding-a-rewrite).\n",
    ]
    for phase, convention in PHASES.items():
        parts += [f"## {_HEADINGS[phase]} (`{phase}`)\n", f"{convention}\n",
                  _table(("pass", "why", "in", "torch"),
                         [_row(p) for p in PASSES if p.phase == phase])]
    return "\n".join(parts).rstrip() + "\n"


def _row(each: Pass) -> tuple[str, ...]:
    return each.name, each.why, f"`{each.place}`: `{each.run.__name__}`", ", ".join(each.torch_versions)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(passes_text(), encoding="utf-8")
    print(PAGE)
