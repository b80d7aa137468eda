"""The report: one HTML page about one plan, which needs no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import graphviz

from rkmate.ir.peak import Peak
from rkmate.ir.plan import PlanData
from rkmate.show import styles
from rkmate.show.amounts import count, duration, share, size
from rkmate.show.draw import NO_DOT, has_dot, pages_of, svg
from rkmate.show.graphs import block_graph, block_memory, chain_graph, plan_recomputed
from rkmate.show.modules import by_module
from rkmate.show.page import html_table, own_ids, page, source_html
from rkmate.show.plots import svg_text
from rkmate.show.replay import KIND_NAMES, Occupancy, replay, replay_baseline
from rkmate.show.time_memory import WithPoints, time_memory
from rkmate.show.timeline import plot_timeline
from rkmate.show.words import explain, facts

_MOST_TENSORS = 40


def report(plan: PlanData, path: str | Path, curve: Sequence[PlanData],
           measured: Peak[Any] | None) -> Path:
    """See `rkmate.Plan.report`."""
    path = Path(path)
    replayed, baseline = replay(plan), replay_baseline(plan)
    body = [*_head(plan), *_curve(plan, curve), *_timeline(plan, measured), *_peak(replayed),
            *_modules(replayed, baseline), *_graphs(plan, replayed), *_source(plan)]
    path.write_text(page("rkmate report", body), encoding="utf-8")
    return path


def _head(plan: PlanData) -> Iterator[str]:
    yield "<header><h1>Training step inside a memory budget</h1>"
    yield f'<p class="faint">rkmate, planner {escape(plan.planner)}, ' \
          f"{count(len(plan.blocks), 'block')}, " \
          f"{count(len(plan.graph.computations), 'computation')}</p>"
    yield "<nav>" + "".join(f'<a href="#{a}">{t}</a>' for a, t in (
        ("curve", "time against memory"), ("timeline", "memory over time"), ("peak", "the peak"),
        ("modules", "modules"), ("chain", "blocks"), ("source", "source"))) + "</nav></header>"
    yield '<div class="cards">'
    for name, value, note in (
            ("peak of a step", size(plan.peak_bytes), f"budget {size(plan.budget_bytes)}"),
            ("without rematerialization", size(plan.baseline_peak_bytes),
             f"the plan needs {share(plan.peak_bytes, plan.baseline_peak_bytes)} of it"),
            ("time of a step", f"{plan.overhead:+.1%}",
             f"{duration(plan.step_seconds)} for {duration(plan.baseline_seconds)}"),
            ("smallest budget", "-" if plan.minimum_bytes is None else size(plan.minimum_bytes),
             "not searched for this plan" if plan.minimum_bytes is None else
             f"{share(plan.minimum_bytes, plan.baseline_peak_bytes)} of the peak without")):
        yield f'<div class="card">{escape(name)}<b>{escape(value)}</b>' \
              f'<span class="faint">{escape(note)}</span></div>'
    yield "</div>"
    whole = max(plan.baseline_peak_bytes, plan.budget_bytes, 1)
    yield (f'<div class="bar" title="peak, budget (red), peak without rematerialization (whole bar)">'
           f'<i style="width:{100 * plan.peak_bytes / whole:.2f}%"></i>'
           f'<u style="left:{100 * plan.budget_bytes / whole:.2f}%"></u></div>')
    for paragraph in explain(plan).split("\n\n"):
        yield f"<p>{escape(paragraph)}</p>"
    figures = [(a, b) for a, b in facts(plan) if a in ("lower bound", "planning took", "note")]
    figures += [(f"stage: {stage}", duration(s)) for stage, s in plan.stage_seconds.items()]
    figures += [(f"nodes: {name}", str(n)) for name, n in plan.nodes.items()]
    yield "<details><summary>how the plan was found</summary>" \
          f"{html_table(('what', 'value'), figures, set())}</details>"


def _curve(plan: PlanData, curve: Sequence[PlanData]) -> Iterator[str]:
    yield '<h2 id="curve">Time against memory</h2>'
    if not curve:
        yield ('<p class="faint">The plans for other budgets were not given to the report: '
               "<code>plan.report(path, curve=rkmate.tradeoff(model, args))</code>.</p>")
        return
    points = curve.points if isinstance(curve, WithPoints) else ()
    yield _figure(svg_text(time_memory(curve, points, plan, "")), "curve")
    rows = [(size(p.budget_bytes), size(p.peak_bytes), f"{p.overhead:+.1%}", duration(p.step_seconds))
            for p in curve]
    yield "<details><summary>the figures</summary>" + html_table(
        ("budget", "peak", "extra time", "time of a step"), rows, {0, 1, 2, 3}) + "</details>"


def _timeline(plan: PlanData, measured: Peak[Any] | None) -> Iterator[str]:
    yield '<h2 id="timeline">Memory over time</h2>'
    yield _figure(svg_text(plot_timeline(plan, None, measured, "")), "time")


def _peak(replayed: Occupancy) -> Iterator[str]:
    yield '<h2 id="peak">What stands at the peak</h2>'
    tensors = replayed.peak_tensors
    rest = tensors[_MOST_TENSORS:]
    rows = [(size(t.bytes), share(t.bytes, replayed.peak), t.path or "(the model)", t.operation,
             t.shape, KIND_NAMES[t.kind], t.name) for t in tensors[:_MOST_TENSORS]]
    if rest:
        total = sum(t.bytes for t in rest)
        rows.append((size(total), share(total, replayed.peak), count(len(rest), "smaller tensor"),
                     "", "", "", ""))
    yield '<div class="tall">' + html_table(
        ("bytes", "share", "module", "operation", "shape", "kind", "name"), rows, {0, 1}) + "</div>"


def _modules(replayed: Occupancy, baseline: Occupancy) -> Iterator[str]:
    yield '<h2 id="modules">What is forgotten and recomputed, by module</h2>'
    yield '<p class="faint">Bytes between forward and backward; time of one step.</p>'
    rows = [(r.path or "(the model)", size(r.kept_bytes), size(r.forgotten_bytes),
             duration(r.recomputed_seconds) if r.recomputed_seconds else "-",
             ", ".join(r.recomputed)) for r in by_module(replayed, baseline)]
    yield '<div class="tall">' + html_table(
        ("module", "keeps", "forgets", "redoes", "what runs again"), rows, {1, 2, 3}) + "</div>"


def _graphs(plan: PlanData, replayed: Occupancy) -> Iterator[str]:
    yield '<h2 id="chain">Blocks</h2>'
    dot = has_dot()
    if not dot:
        yield f'<p class="notice">Graphs are shown as DOT text: {escape(NO_DOT)}.</p>'
    yield ('<p class="faint">The model as a chain. Blocks of one colour are identical and were solved '
           "once. A block opens below; drag to move, Ctrl and the wheel to zoom.</p>")
    yield "<details open><summary>the chain</summary>" + _pane(
        chain_graph(plan, replayed, lambda b: f"#block-{b}"), "chain", dot) + "</details>"
    shared = pages_of(plan, replayed)
    for b in sorted(set(shared)):
        yield f'<template id="graph-{b}">{_drawn(block_graph(plan, b, replayed), f"g{b}", dot)}</template>'
    colours = styles.class_colours([i.label for i in plan.blocks])
    kept, whole = block_memory(plan, replayed)
    yield '<div class="list">'
    for b, info in enumerate(plan.blocks):
        again = plan_recomputed(replayed, b)
        same = "" if shared[b] == b else f"<span>run like block {shared[b]}</span>"
        yield (f'<details id="block-{b}"><summary>'
               f'<span class="swatch" style="background:{colours[info.label]}"></span>'
               f"<span><b>{b}</b> class {info.label}</span><span>{escape(info.path) or '(the model)'}"
               f"</span><span>keeps {size(kept[b])} of {size(whole[b])}</span>"
               f"<span>redoes {duration(again) if again else 'nothing'}</span>{same}</summary>"
               f'<div class="pane" data-graph="graph-{shared[b]}"></div></details>')
    yield "</div>"


def _source(plan: PlanData) -> Iterator[str]:
    yield '<h2 id="source">Generated source</h2>'
    if not plan.source:
        yield ('<p class="faint">This plan was made without generating code: '
               "<code>rkmate.wrap(...).plan.report(path)</code> shows it.</p>")
        return
    yield ('<p><span class="forget">forget</span> frees a storage, <span class="recompute">recompute'
           '</span> runs a computation again, <span class="detach">detach</span> is a boundary of '
           'autograd, <span class="place">in place</span> writes over an input that dies there.</p>')
    yield source_html(plan.source)


def _figure(text: str, prefix: str) -> str:
    return f"<figure>{own_ids(text, prefix)}</figure>"


def _pane(graph: graphviz.Digraph, prefix: str, dot: bool) -> str:
    return f'<div class="pane">{_drawn(graph, prefix, dot)}</div>'


def _drawn(graph: graphviz.Digraph, prefix: str, dot: bool) -> str:
    if dot:
        return own_ids(svg(graph), prefix)
    return f'<div class="tall"><pre>{escape(graph.source)}</pre></div>'
