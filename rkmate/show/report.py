"""The report: one HTML page about one plan, which needs no network."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import graphviz

from rkmate.ir.peak import Peak
from rkmate.ir.plan import PlanData
from rkmate.show import styles
from rkmate.show.amounts import count, duration, share, size
from rkmate.show.copies import block_sent, copied_rows, copies_of, copies_words
from rkmate.show.draw import NO_DOT, has_dot, pages_of, svg
from rkmate.show.graphs import block_graph, block_memory, chain_graph, plan_recomputed
from rkmate.show.labels import label
from rkmate.show.modules import by_module
from rkmate.show.page import html_table, own_ids, page, source_html
from rkmate.show.plots import svg_text
from rkmate.show.replay import KIND_NAMES, Occupancy, replay, replay_baseline
from rkmate.show.time_memory import WithPoints, time_memory
from rkmate.show.timeline import plot_timeline
from rkmate.show.words import facts, paragraphs

_FIRST_TENSORS = 15
"""Tensors at the peak that stand open on the page; the others open with a click."""
_CLOCKS = (" Blue came back from where it was sent. Below the memory, three rows: the step computes, data "
           "are copied away, data are copied back, each at its own pace; where a computation needs what is "
           "still on its way, it waits (red).")
_COUNTED = ("The step is replayed operation by operation before it ever runs, and every byte that it "
            "allocates is counted: the plan's highest level is the peak above. ")
_WHY = ("It stays under the budget because activations that the backward reads late are forgotten in the "
        "forward, and computed again when they are read.")
_WHY_AWAY = ("It stays under the budget because activations that the backward reads late are copied away "
             "while the step computes, and back before they are read")
_AND_AGAIN = "; others are forgotten in the forward, and computed again when they are read"
_WHY_WHOLE = "It is under the budget with every activation kept, so nothing is computed twice."


def report(plan: PlanData, path: str | Path, curve: Sequence[PlanData], measured: Peak[Any] | None,
           date: datetime.date) -> Path:
    """See `rkmate.Plan.report`."""
    path = Path(path)
    replayed, baseline = replay(plan), replay_baseline(plan)
    body = [*_head(plan, date), *_figures(plan, replayed), *_timeline(plan, replayed, measured),
            *_peak(replayed), *_away(replayed), *_modules(replayed, baseline), *_curve(plan, curve),
            *_graphs(plan, replayed), *_source(plan)]
    name = plan.origin.model if plan.origin else "rkmate report"
    path.write_text(page(f"{name} inside {size(plan.budget_bytes)}", body), encoding="utf-8")
    return path


def _head(plan: PlanData, date: datetime.date) -> Iterator[str]:
    about = plan.origin
    name = f"{about.model}: a training step" if about else "A training step"
    yield f"<header><h1>{escape(name)} inside {size(plan.budget_bytes)}</h1><dl>"
    trained = "" if about is None else "all" if about.trained == about.parameters else f"{about.trained:,}"
    rows = [] if about is None else [
        ("model", f"{about.model}, {count(about.parameters, 'parameter')} ({trained} trained)"),
        ("inputs", "; ".join(f"{n} {shape}" for n, shape in about.inputs)),
        ("device", about.device), ("planned by", ", ".join(f"{n} {v}" for n, v in about.versions))]
    rows += [("report of", date.isoformat()),
             ("plan", f"planner {plan.planner}, {count(len(plan.blocks), 'block')}, "
                      f"{count(len(plan.graph.computations), 'computation')}")]
    yield from (f"<dt>{escape(what)}</dt><dd>{escape(value)}</dd>" for what, value in rows)
    yield "</dl>"
    if about is None:
        yield '<p class="faint">The plan was saved by a version that did not note its model and inputs.</p>'
    yield "<nav>" + "".join(f'<a href="#{a}">{t}</a> ' for a, t in (
        ("timeline", "memory over time"), ("peak", "the peak"), ("modules", "modules"),
        ("curve", "time against memory"), ("chain", "blocks"), ("source", "source"))) + "</nav></header>"


def _figures(plan: PlanData, replayed: Occupancy) -> Iterator[str]:
    yield '<div class="cards">'
    copies = copies_of(replayed)
    sent = [] if copies is None else [
        ("sent away", size(copies.away_bytes), f"to {copies.place}; link busy "
         f"{share(copies.busy_seconds, copies.step_seconds)}, waits {duration(copies.stalled)}")]
    for name, value, note in (
            ("peak of a step", size(plan.peak_bytes), f"budget {size(plan.budget_bytes)}"),
            ("without rematerialization", size(plan.baseline_peak_bytes),
             f"the plan needs {share(plan.peak_bytes, plan.baseline_peak_bytes)} of it"),
            ("time of a step", f"{plan.overhead:+.1%}",
             f"{duration(plan.step_seconds)} for {duration(plan.baseline_seconds)}"),
            *sent,
            ("smallest budget", "-" if plan.minimum_bytes is None else size(plan.minimum_bytes),
             "not searched for this plan" if plan.minimum_bytes is None else
             f"{share(plan.minimum_bytes, plan.baseline_peak_bytes)} of the peak without")):
        yield f'<div class="card">{escape(name)}<b>{escape(value)}</b>' \
              f'<span class="faint">{escape(note)}</span></div>'
    yield "</div>"
    whole = max(plan.baseline_peak_bytes, plan.budget_bytes, 1)
    yield (f'<div class="bar"><i style="width:{100 * plan.peak_bytes / whole:.2f}%"></i>'
           f'<u style="left:{100 * plan.budget_bytes / whole:.2f}%"></u></div>')
    yield ('<p class="faint">Green: the peak under this plan. Red line: the budget. Whole bar: '
           f"{'without rematerialization' if whole == plan.baseline_peak_bytes else 'the budget'}.</p>")
    again = bool(plan.schedule.recomputed())
    why = f"{_WHY_AWAY}{_AND_AGAIN if again else ''}." if replayed.copied else _WHY if again else _WHY_WHOLE
    yield f"<h2>In short</h2><p>{escape(_COUNTED + why)}</p>"
    for heading, text in paragraphs(plan):
        yield f"<h3>{escape(heading)}</h3><p>{escape(text)}</p>"
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
    yield "<p>Each point is a plan for another budget: the less memory, the more is computed twice.</p>"
    points = curve.points if isinstance(curve, WithPoints) else ()
    yield _figures_of(lambda narrow: time_memory(curve, points, plan, "", narrow), "curve")
    rows = [(size(p.budget_bytes), size(p.peak_bytes), f"{p.overhead:+.1%}", duration(p.step_seconds))
            for p in curve]
    yield "<details><summary>the figures</summary>" + html_table(
        ("budget", "peak", "extra time", "time of a step"), rows, {0, 1, 2, 3}) + "</details>"


def _timeline(plan: PlanData, replayed: Occupancy, measured: Peak[Any] | None) -> Iterator[str]:
    yield '<h2 id="timeline">Memory over time</h2>'
    yield ("<p>The height is what is in memory. It grows through the forward, which leaves activations for "
           "the backward, and falls through the backward, which uses them up. What is orange was forgotten "
           "before and is computed again. Nothing coloured stands above the red line, the budget; the grey "
           "line is the step without rematerialization."
           + (_CLOCKS if replayed.copied else "") + "</p>")
    yield _figures_of(lambda narrow: plot_timeline(plan, None, measured, "", narrow), "time")


def _peak(replayed: Occupancy) -> Iterator[str]:
    tensors = replayed.peak_tensors
    yield '<h2 id="peak">What is in memory at the peak</h2>'
    yield f"<p>{count(len(tensors), 'tensor')}, {size(replayed.peak)}, the largest first.</p>"
    head = ("tensor (module: operation)", "bytes", "share", "kind", "shape", "name")
    rows = [(label(t.path, t.operation) or t.name, size(t.bytes), share(t.bytes, replayed.peak),
             KIND_NAMES[t.kind], t.shape, t.name) for t in tensors]
    rest = tensors[_FIRST_TENSORS:]
    yield f'<div class="wide">{html_table(head, rows[:_FIRST_TENSORS], {1, 2})}</div>'
    if rest:
        total = sum(t.bytes for t in rest)
        yield (f"<details><summary>{count(len(rest), 'smaller tensor')}: {size(total)}, "
               f"{share(total, replayed.peak)}</summary>"
               f'<div class="wide">{html_table(head, rows[_FIRST_TENSORS:], {1, 2})}</div></details>')


def _away(replayed: Occupancy) -> Iterator[str]:
    copies = copies_of(replayed)
    if copies is None:
        return
    yield '<h2 id="away">What is away when</h2>'
    if not copies.tensors:
        yield f"<p>{escape(copies_words(copies, bool(replayed.schedule.recomputed())))}</p>"
        return
    yield (f"<p>{count(copies.tensors, 'tensor')}, {size(copies.away_bytes)}, the largest first. Times are "
           "seconds since the step began: when each begins to leave and has left, and when it begins to come "
           "back and has come.</p>")
    head = ("tensor (module: operation)", "bytes", "leaves", "has left", "comes", "has come", "name")
    rows = copied_rows(replayed)
    yield f'<div class="wide">{html_table(head, rows[:_FIRST_TENSORS], {1, 2, 3, 4, 5})}</div>'
    rest = rows[_FIRST_TENSORS:]
    if rest:
        yield (f"<details><summary>{count(len(rest), 'smaller tensor')}</summary>"
               f'<div class="wide">{html_table(head, rest, {1, 2, 3, 4, 5})}</div></details>')


def _modules(replayed: Occupancy, baseline: Occupancy) -> Iterator[str]:
    sends = bool(replayed.copied)
    yield '<h2 id="modules">What is forgotten and recomputed, by module</h2>'
    yield '<p class="faint">Bytes between forward and backward; time of one step.</p>'
    rows = [(r.path or "(the model)", size(r.kept_bytes), *([size(r.away_bytes)] if sends else []),
             size(r.forgotten_bytes),
             duration(r.recomputed_seconds) if r.recomputed_seconds else "-",
             ", ".join(r.recomputed)) for r in by_module(replayed, baseline)]
    yield '<div class="tall">' + html_table(
        ("module", "keeps", *(["sends"] if sends else []), "forgets", "redoes", "what runs again"), rows,
        {1, 2, 3, *([4] if sends else [])}) + "</div>"


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
    sent = block_sent(plan, replayed)
    yield '<div class="list">'
    for b, info in enumerate(plan.blocks):
        again = plan_recomputed(replayed, b)
        same = "" if shared[b] == b else f"<span>run like block {shared[b]}</span>"
        yield (f'<details id="block-{b}"><summary>'
               f'<span class="swatch" style="background:{colours[info.label]}"></span>'
               f"<span><b>{b}</b> class {info.label}</span><span>{escape(info.path) or '(the model)'}"
               f"</span><span>keeps {size(kept[b])} of {size(whole[b])}</span>"
               f"{f'<span>sends {size(sent[b])} away</span>' if sent[b] else ''}"
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
           'autograd, <span class="place">in place</span> writes over an input that dies there.'
           + (' <span class="copy">copy_out</span> begins a copy away.</p>' if "env.copy_out(" in plan.source
              else "</p>"))
    yield source_html(plan.source)


def _figures_of(draw: Callable[[bool], Any], prefix: str) -> str:
    """A picture drawn twice, broad and narrow; the page's width says which is shown."""
    return "".join(f'<figure class="{kind}">{own_ids(svg_text(draw(narrow)), f"{prefix}-{kind}")}</figure>'
                   for kind, narrow in (("broad", False), ("narrow", True)))


def _pane(graph: graphviz.Digraph, prefix: str, dot: bool) -> str:
    return f'<div class="pane">{_drawn(graph, prefix, dot)}</div>'


def _drawn(graph: graphviz.Digraph, prefix: str, dot: bool) -> str:
    if dot:
        return own_ids(svg(graph), prefix)
    return f'<div class="tall"><pre>{escape(graph.source)}</pre></div>'
