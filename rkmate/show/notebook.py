"""Pictures and tables that a notebook shows for a plan and for a curve.

Pictures are SVG without scripts; text has the colour of the notebook.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from rkmate.ir.plan import PlanData
from rkmate.show import styles
from rkmate.show.amounts import duration, size
from rkmate.show.page_data import Row, rows_of
from rkmate.show.plots import Point, overhead
from rkmate.show.replay import KIND_NAMES, KINDS, replay
from rkmate.show.words import block_table, facts

_WIDTH, _LEFT, _TOP, _TALL, _BOTTOM = 640, 64, 20, 200, 24
_COLUMNS = 280
"""Columns of the picture of memory, at most: of the rows of one column, the highest is drawn."""
_MOST_BLOCKS = 12
"""Blocks of a table that stands open; a longer one opens with a click."""


def plan_html(plan: PlanData) -> str:
    """Return the HTML of a plan."""
    (head, *rows), numbers = block_table(plan, replay(plan))
    blocks = _table(rows, head, numbers)
    if len(rows) > _MOST_BLOCKS:
        blocks = f"<details><summary>{len(rows)} blocks</summary>{blocks}</details>"
    return f"<div><b>rkmate plan</b>{memory_svg(plan)}{_table(facts(plan))}{blocks}</div>"


def curve_html(plans: Sequence[PlanData], points: Sequence[Point], head: Sequence[str],
               rows: Iterable[Sequence[str]]) -> str:
    """Return the HTML of a curve: its picture, and its table."""
    return f"<div>{curve_svg(plans, points)}{_table(rows, head, set(range(len(head) - 1)))}</div>"


def memory_svg(plan: PlanData) -> str:
    """Draw the memory over a step, by kind, with the budget."""
    replayed = replay(plan)
    columns = _columns(rows_of(replayed), replayed.seconds)
    top = 1.08 * max(plan.budget_bytes, plan.peak_bytes)
    right = _WIDTH - _LEFT - 8

    def x(t: float) -> float:
        return round(_LEFT + t / (replayed.seconds or 1.0) * right, 1)

    def y(b: float) -> float:
        return round(_TOP + (1 - b / top) * _TALL, 1)
    parts = []
    low = [0] * len(columns)
    used = [k for k in range(len(KINDS)) if any(c.bytes[k] for c in columns)]
    for k in used:
        high = [n + c.bytes[k] for n, c in zip(low, columns, strict=True)]
        up = [f"{x(c.start)} {y(n)}H{x(c.end)}" for c, n in zip(columns, high, strict=True)]
        down = [f"{x(c.end)} {y(n)}H{x(c.start)}" for c, n in zip(columns, low, strict=True)]
        parts.append(f'<path d="M{"L".join([*up, *reversed(down)])}Z" fill="{styles.KIND_COLOURS[KINDS[k]]}">'
                     f"<title>{KIND_NAMES[KINDS[k]]}</title></path>")
        low = high
    loss = x(replayed.loss_seconds)
    parts += [
        f'<path d="M{_LEFT} {y(plan.budget_bytes)}H{_WIDTH - 8}" stroke="{styles.BUDGET}" '
        'stroke-dasharray="6 4"/>',
        f'<path d="M{loss} {_TOP}V{_TOP + _TALL}" stroke="currentColor" stroke-dasharray="2 3"/>',
        _text(loss - 5, _TOP - 6, "forward", "end"), _text(loss + 5, _TOP - 6, "backward"),
        _text(_LEFT - 6, y(plan.budget_bytes) - 2, "budget", "end"),
        _text(_LEFT - 6, y(plan.budget_bytes) + 11, size(plan.budget_bytes), "end"),
        _text(_LEFT - 6, _TOP + _TALL, "0", "end"),
        _text(_WIDTH - 8, _TOP + _TALL + 16, duration(replayed.seconds), "end")]
    key = "".join(f'<span style="margin-right:14px"><span style="display:inline-block;width:10px;height:10px;'
                  f'background:{styles.KIND_COLOURS[KINDS[k]]}"></span> {KIND_NAMES[KINDS[k]]}</span>'
                  for k in used if max(c.bytes[k] for c in columns) > plan.peak_bytes / 1000)
    return f'{_svg(parts, "memory over a training step")}<div style="font-size:12px">{key}</div>'


def curve_svg(plans: Sequence[PlanData], points: Sequence[Point]) -> str:
    """Draw time against memory. The axis of time is logarithmic from some percent on: the last megabytes cost
    many times more than the others."""
    here = [(p.peak_bytes, p.overhead, f"budget {size(p.budget_bytes)}: peak {size(p.peak_bytes)}, "
             f"time {p.overhead:+.1%}") for p in sorted(plans, key=lambda p: p.peak_bytes)]
    others = [(q.peak_bytes, overhead(plans, q.step_seconds), q.name) for q in points]
    widest = 1.05 * max([p.baseline_peak_bytes for p in plans] + [b for b, *_ in others], default=1)
    high = 1.2 * max([0.02, *(t for _, t, _ in here + others)])

    def x(b: float) -> float:
        return round(_LEFT + b / widest * (_WIDTH - _LEFT - 8), 1)

    def y(t: float) -> float:
        return round(_TOP + (1 - math.asinh(max(t, 0.0) / 0.05) / math.asinh(high / 0.05)) * _TALL, 1)
    parts = []
    for t in (t for t in (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0) if t <= high):
        parts += [f'<path d="M{_LEFT} {y(t)}H{_WIDTH - 8}" stroke="currentColor" stroke-opacity=".15"/>',
                  _text(_LEFT - 6, y(t) + 4, f"{t:+.0%}", "end")]
    parts += [_text(x(share * widest / 1.05), _TOP + _TALL + 16, size(share * widest / 1.05),
                    "end" if share == 1 else "middle") for share in (0.25, 0.5, 0.75, 1.0)]
    steps = [f"{x(b)} {y(t)}{f'H{x(here[k + 1][0])}' if k + 1 < len(here) else ''}" for k, (b, t, _) in
             enumerate(here)]
    parts.append(f'<path d="M{"L".join(steps)}" stroke="{styles.FORWARD_LINE}" fill="none"/>')
    parts += [f'<circle cx="{x(b)}" cy="{y(t)}" r="4" fill="{styles.FORWARD_LINE}"><title>{escape(text)}'
              "</title></circle>" for b, t, text in here]
    for b, t, text in others:
        parts += [f'<path d="M{x(b)} {y(t) - 5}l5 5l-5 5l-5 -5Z" fill="currentColor"/>',
                  _text(x(b) + 8, y(t) + 4, text)]
    return _svg(parts, "time against memory")


def _columns(rows: Sequence[Row], seconds: float) -> list[Row]:
    """Join rows that are too short to be seen; the highest stands for all of its column."""
    columns: list[Row] = []
    for row in rows:
        last = columns[-1] if columns else None
        if last is not None and row.end - last.start < seconds / _COLUMNS:
            highest = max(last, row, key=lambda r: sum(r.bytes))
            columns[-1] = Row(last.step, last.what, last.start, row.end, highest.bytes)
        else:
            columns.append(row)
    return columns


def _svg(parts: Iterable[str], name: str) -> str:
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_TOP + _TALL + _BOTTOM}" '
            f'role="img" aria-label="{name}" style="display:block;width:100%;max-width:{_WIDTH}px">'
            f'{"".join(parts)}</svg>')


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return (f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="12" font-family="sans-serif" '
            f'fill="currentColor">{escape(text)}</text>')


def _table(rows: Iterable[Sequence[str]], head: Sequence[str] = (), numbers: Iterable[int] = ()) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f'<{tag} style="text-align:{"right" if k in numbers else "left"}">{escape(c)}'
                                f"</{tag}>" for k, c in enumerate(cells)) + "</tr>"
    return f"<table>{row(head, 'th') if head else ''}{''.join(row(r, 'td') for r in rows)}</table>"
