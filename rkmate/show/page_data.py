"""The data of the report's page: for each plan that the page shows, what happens at each step, and what is in
memory then. The page's script draws the data, and searches in them.

Rows are the moments that take time (computations, waits for copies), the loss, and the peak. Times are whole
nanoseconds. Columns that change little from row to row hold differences, which compress well.
"""

from __future__ import annotations

import base64
import gzip
import itertools
import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rkmate.ir.plan import PlanData
from rkmate.ir.simulate import Peak
from rkmate.ir.summary import GraphSummary
from rkmate.show.amounts import count, duration, share, size
from rkmate.show.copies import copies_of
from rkmate.show.replay import KIND_NAMES, KINDS, WHOLE, Occupancy, replay, replay_baseline
from rkmate.show.words import ModuleRow, by_module, paragraphs

LOSS, WAIT, COPY = -1, -2, -3
"""Rows without a computation: the loss, a wait for a copy, another step at which the peak stands."""


@dataclass(frozen=True)
class Row:
    """A moment of a step, as the page shows it."""

    step: int
    """Index of the schedule's step."""
    what: int
    """The computation; or `LOSS`, `WAIT`, `COPY`."""
    start: float
    """Seconds since the beginning."""
    end: float
    bytes: tuple[int, ...]
    """Bytes by kind, in the order of `KINDS`."""
    again: bool = False
    kernel: int = 0


def rows_of(replayed: Occupancy) -> list[Row]:
    """Return the rows of a replayed plan, in the order of time."""
    rows = []
    before = replayed.moments[0]
    for k, m in enumerate(replayed.moments):
        if m.waited:
            rows.append(Row(k, WAIT, m.start - m.waited, m.start, before.after))
        if m.computation is not None:
            rows.append(Row(k, m.computation, m.start, m.end, m.bytes, m.again, m.kernel))
        elif k in (replayed.loss_at, replayed.peak_at):
            rows.append(Row(k, LOSS if k == replayed.loss_at else COPY, m.start, m.end, m.bytes))
        before = m
    return rows


def page_data(plan: PlanData, curve: Sequence[PlanData], measured: Peak[Any] | None) -> dict[str, Any]:
    """Return the data of a page about `plan`. `curve`: plans for other budgets that the page can show."""
    others = [p for p in curve if p.budget_bytes != plan.budget_bytes]
    views = sorted((plan, *others), key=lambda p: p.budget_bytes)
    graphs: list[GraphSummary] = []
    for p in views:
        if p.graph not in graphs:
            graphs.append(p.graph)
    plains = {k: replay_baseline(next(p for p in views if p.graph == g)) for k, g in enumerate(graphs)}
    return {
        "kinds": [[kind, KIND_NAMES[kind]] for kind in KINDS],
        "here": views.index(plan),
        "graphs": [_graph(g) | {"plain": _levels(plains[k])} for k, g in enumerate(graphs)],
        "views": [_view(p, graphs.index(p.graph), plains[graphs.index(p.graph)],
                        measured if p is plan else None) for p in views],
        "least": min((p.minimum_bytes for p in views if p.minimum_bytes is not None), default=0),
    }


def packed(data: dict[str, Any]) -> str:
    """Return data as the page holds them: JSON, compressed, as text."""
    content = json.dumps(data, separators=(",", ":")).encode()
    return base64.b64encode(gzip.compress(content, mtime=0)).decode()


def cards(plan: PlanData, replayed: Occupancy) -> list[tuple[str, str, str]]:
    """Return the figures at the top of the page: (name, value, note)."""
    copies = copies_of(replayed)
    sent = [] if copies is None else [
        ("sent away", size(copies.away_bytes), f"to {copies.place}; link busy "
         f"{share(copies.busy_seconds, copies.step_seconds)}, waits {duration(copies.stalled)}")]
    return [
        ("peak of a step", size(plan.peak_bytes), f"budget {size(plan.budget_bytes)}"),
        ("without rematerialization", size(plan.baseline_peak_bytes),
         f"the plan needs {share(plan.peak_bytes, plan.baseline_peak_bytes)} of it"),
        ("time of a step", f"{plan.overhead:+.1%}",
         f"{duration(plan.step_seconds)} for {duration(plan.baseline_seconds)}"),
        *sent,
        ("smallest budget", "-" if plan.minimum_bytes is None else size(plan.minimum_bytes),
         "not searched for this plan" if plan.minimum_bytes is None else
         f"{share(plan.minimum_bytes, plan.baseline_peak_bytes)} of the peak without")]


def _graph(graph: GraphSummary) -> dict[str, Any]:
    c, of, d = graph.cd.c, graph.computations, graph.cd.d
    return {
        "names": [x.name for x in c], "operations": [x.operation for x in of], "paths": [x.path for x in of],
        "blocks": [x.block for x in of], "outputs": [list(x.outputs) for x in c], "loss": graph.cd.loss,
        "tensors": [x.name for x in d], "shapes": [*graph.shapes], "sizes": [x.size for x in d],
        "makers": [-1 if m is None else m for m in graph.cd.producer]}


def _view(plan: PlanData, graph: int, plain: Occupancy, measured: Peak[Any] | None) -> dict[str, Any]:
    replayed = replay(plan)
    rows = rows_of(replayed)
    # A span is a pair of rows: a wait comes before what its step makes and frees.
    order = [(r.step, r.what != WAIT) for r in rows]
    spans = [(s.storage, bisect_left(order, (s.first, True)), bisect_left(order, (s.last, True)),
              KINDS.index(s.kind)) for s in replayed.spans]
    ns = [(_ns(r.start), _ns(r.end)) for r in rows]
    last = measured.timeline[-1][0] if measured is not None and measured.timeline else 0.0
    return {
        "graph": graph, "budget": plan.budget_bytes, "peak": plan.peak_bytes, "planner": plan.planner,
        "plain": plan.baseline_peak_bytes, "overhead": plan.overhead, "seconds": plan.step_seconds,
        "steps": len(plan.schedule.steps), "peakRow": bisect_left(order, (replayed.peak_at, True)),
        "step": _differences(r.step for r in rows), "what": [r.what for r in rows],
        "again": [int(r.again) for r in rows], "kernel": [r.kernel for r in rows],
        "gap": [start - end for (_, end), (start, _) in itertools.pairwise([(0, 0), *ns])],
        "length": [end - start for start, end in ns],
        "levels": [_differences(r.bytes[k] for r in rows) for k in range(len(KINDS))],
        "spans": [list(column) for column in zip(*spans, strict=True)],
        "copies": [[[j, _ns(a), _ns(b)] for j, a, b in copies] for copies in
                   (replayed.simulation.copies_out, replayed.simulation.copies_in) if replayed.copied],
        "measured": [] if measured is None or not last else
        [[_ns(t / last * replayed.seconds), b] for t, b in measured.timeline],
        "cards": cards(plan, replayed), "words": paragraphs(plan),
        "blocks": [[b.label, b.path or WHOLE] for b in plan.blocks],
        "modules": [[r.path or WHOLE, r.kept_bytes, r.away_bytes, r.forgotten_bytes,
                     _ns(r.recomputed_seconds), ", ".join(r.recomputed), why(r)]
                    for r in by_module(replayed, plain)]}


def why(row: ModuleRow) -> str:
    """Return why a module's operations run again: the bytes that this saves, or what else needs them."""
    if not row.recomputed_seconds:
        return ""
    if row.forgotten_bytes:
        rate = row.forgotten_bytes / row.recomputed_seconds / 1e3
        return f"frees {size(row.forgotten_bytes)} for {duration(row.recomputed_seconds)}: {size(rate)} a ms"
    if not row.needed_by:
        return "kept for a part of the step only"
    more = len(row.needed_by) - 2
    others = f" and {count(more, 'other')}" if more > 0 else ""
    return f"on the way to {', '.join(row.needed_by[:2])}{others}"


def _levels(replayed: Occupancy) -> list[list[int]]:
    """Return the ends of the rows in nanoseconds, and the bytes of each row, as differences."""
    rows = rows_of(replayed)
    return [_differences(_ns(r.end) for r in rows), _differences(sum(r.bytes) for r in rows)]


def _differences(values: Iterable[int]) -> list[int]:
    return [b - a for a, b in itertools.pairwise([0, *values])]


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
