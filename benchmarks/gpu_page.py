"""Rows of `gpu.py` in files, and as tables in the documentation."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def _number(key: str, form: str = ".0f", factor: float = 1) -> Callable[[Row], str]:
    return lambda row: "" if row.get(key) is None else f"{row[key] * factor:{form}}"


def _mib(key: str) -> Callable[[Row], str]:
    """Whole MiB, or three digits where there are few."""
    return lambda row: "" if row.get(key) is None else f"{row[key]:{'.0f' if row[key] >= 100 else '.3g'}}"


PLAN, REQUESTED, RESERVED = ("plan, MiB", _mib("plan_mib")), ("requested, MiB", _mib("requested_mib")), \
    ("reserved, MiB", _mib("reserved_mib"))
LAUNCHES, WAITS, HOST = ("launches", _number("launches")), ("waits", _number("waits")), \
    ("host time, of eager's", _number("host", ".2f"))
COLUMNS: dict[str, tuple[tuple[str, Callable[[Row], str]], ...]] = {
    "first": (PLAN, REQUESTED, ("of eager's peak", _number("of_eager", ".0%")), WAITS,
              ("time, of eager's", _number("time", ".3f")), ("predicted", _number("predicted", ".3f")), HOST),
    "table": (PLAN, REQUESTED, ("compared with the plan", _number("requested_over_plan", "+.2%")), RESERVED,
              ("of eager's peak", _number("of_eager", ".0%")), LAUNCHES, WAITS, HOST),
    "auto": (("given, MiB", _mib("given_mib")), RESERVED, ("caches emptied", _number("retries")),
             ("budget, MiB", _mib("budget_mib")), PLAN, ("of its own peak", _number("of_own_peak", ".0%")),
             ("predicted time", _number("predicted", ".3f"))),
    "recorded": (PLAN, ("gradients, MiB", _mib("gradients_mib")), ("its pool, MiB", _mib("pool_mib")),
                 RESERVED, LAUNCHES, HOST),
    "reserved": (("allocated, MiB", _mib("allocated_mib")), REQUESTED, RESERVED),
}
"""For each piece: the titles of a table's columns, and functions that write a row's cells."""


def keep(path: Path, row: Row, order: Sequence[str] = ()) -> None:
    """Put a row into a file of rows. It replaces the row of the same model and way, and the model's failure.
    `order`: names of models, in the order of the file."""
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    name, way = row["model"], row.get("way")
    rows = [r for r in rows if r["model"] != name or r.get("way") not in (way, None)]
    rows.append(row)
    rows.sort(key=lambda r: order.index(r["model"]) if r["model"] in order else len(order))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def table(piece: str, rows: Sequence[Row]) -> str:
    """A piece's rows as a table of Markdown."""
    columns = COLUMNS[piece]
    lines = ["| model | way | " + " | ".join(title for title, _ in columns) + " |",
             "|---|---|" + "--:|" * len(columns)]
    for row in rows:
        failed = [row.get("failed", ""), *[""] * (len(columns) - 1)]
        cells = failed if "failed" in row else [f(row) for _, f in columns]
        lines.append("| " + " | ".join((row["model"], row.get("way", ""), *cells)) + " |")
    return "\n".join(lines)


def write(page: Path, folder: Path) -> None:
    """Put the rows of a folder, ``PIECE.json``, where the page has ``<!-- PIECE: begin -->`` and ``end``."""
    text = page.read_text(encoding="utf-8")
    for piece in COLUMNS:
        begin, end = f"<!-- {piece}: begin -->", f"<!-- {piece}: end -->"
        path = folder / f"{piece}.json"
        if begin in text and path.exists():
            rows = json.loads(path.read_text(encoding="utf-8"))
            before, _, rest = text.partition(begin)
            text = f"{before}{begin}\n\n{table(piece, rows)}\n\n{end}{rest.partition(end)[2]}"
    page.write_text(text, encoding="utf-8")
