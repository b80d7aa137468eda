"""The report: one HTML page about one plan. It needs no network, and loads nothing from anywhere.

First what the report says; then its page: style, script, and pieces of HTML, of which notebooks show one.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import graphviz

from rkmate.ir.plan import PlanData
from rkmate.ir.simulate import Peak
from rkmate.show import styles
from rkmate.show.amounts import count, duration, share, size
from rkmate.show.copies import block_sent, copied_rows, copies_of, copies_words
from rkmate.show.draw import NO_DOT, has_dot, pages_of, svg
from rkmate.show.graphs import block_graph, block_memory, chain_graph, plan_recomputed
from rkmate.show.plots import WithPoints, svg_text, time_memory
from rkmate.show.replay import KIND_NAMES, Occupancy, label, replay, replay_baseline
from rkmate.show.timeline import plot_timeline
from rkmate.show.words import block_table, by_module, facts, paragraphs

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
    """Return a picture drawn twice, broad and narrow; the page's width says which is shown."""
    return "".join(f'<figure class="{kind}">{own_ids(svg_text(draw(narrow)), f"{prefix}-{kind}")}</figure>'
                   for kind, narrow in (("broad", False), ("narrow", True)))


def _pane(graph: graphviz.Digraph, prefix: str, dot: bool) -> str:
    return f'<div class="pane">{_drawn(graph, prefix, dot)}</div>'


def _drawn(graph: graphviz.Digraph, prefix: str, dot: bool) -> str:
    if dot:
        return own_ids(svg(graph), prefix)
    return f'<div class="tall"><pre>{escape(graph.source)}</pre></div>'


STYLE = f"""
:root {{ color-scheme: light; --ink: {styles.INK}; --faint: {styles.SOFT}; --line: #d9dee3; }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; max-width: 1180px; padding: 24px; color: var(--ink); background: #fff;
  font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }}
h1 {{ font-size: 24px; margin: 0 0 2px; }}
h2 {{ font-size: 18px; margin: 36px 0 8px; border-bottom: 1px solid var(--line); }}
p, li {{ max-width: 80ch; }}
.faint {{ color: var(--faint); }}
a {{ color: #24598c; }}
nav a {{ display: inline-block; margin-right: 14px; }}
.cards {{ display: flex; flex-wrap: wrap; gap: 12px; margin: 16px 0; }}
.card {{ border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; flex: 1 1 190px; }}
.card b {{ display: block; font-size: 20px; }}
.bar {{ position: relative; height: 30px; background: #f1f3f5; border-radius: 4px; margin: 4px 0; }}
.bar i {{ position: absolute; inset: 0 auto 0 0; border-radius: 4px; background: {styles.KEPT_LINE}; }}
.bar u {{ position: absolute; top: -3px; bottom: -3px; width: 2px; background: {styles.BUDGET}; }}
figure {{ margin: 12px 0; overflow-x: auto; }}
figure > svg {{ max-width: 100%; height: auto; display: block; }}
figure.narrow {{ display: none; }}
h3 {{ font-size: 15px; margin: 14px 0 2px; }}
h3 + p {{ margin-top: 0; }}
p, li, td, dd, h1, summary {{ overflow-wrap: anywhere; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; margin: 10px 0; }}
dt {{ color: var(--faint); }}
dd {{ margin: 0; }}
.wide {{ overflow-x: auto; }}
.tall {{ max-height: 460px; overflow: auto; border: 1px solid var(--line); border-radius: 6px; }}
.list {{ max-height: 1200px; overflow: auto; }}
table {{ border-collapse: collapse; font-size: 13px; width: 100%; }}
th, td {{ text-align: left; padding: 3px 10px; border-bottom: 1px solid #eceff1; vertical-align: top; }}
th {{ position: sticky; top: 0; background: #fff; }}
td.n, th.n {{ text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }}
details {{ border: 1px solid var(--line); border-radius: 6px; margin: 4px 0; }}
summary {{ cursor: pointer; padding: 5px 10px; }}
summary span {{ display: inline-block; margin-right: 14px; }}
.swatch {{ width: 12px; height: 12px; border-radius: 3px; border: 1px solid #9aa5b1; margin: 0 4px 0 0; }}
.pane {{ position: relative; height: min(560px, 70vh); overflow: hidden; border-top: 1px solid var(--line);
  background: #fbfcfd; touch-action: none; }}
.pane svg {{ width: 100%; height: 100%; cursor: grab; }}
.tools {{ position: absolute; right: 8px; top: 8px; }}
.tools button {{ font: inherit; min-width: 32px; margin-left: 4px; background: #fff;
  border: 1px solid var(--line); border-radius: 4px; cursor: pointer; }}
pre {{ margin: 0; font: 12px/1.45 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }}
pre.source {{ padding: 10px; }}
pre.source span {{ display: block; min-width: max-content; padding: 0 6px; }}
pre.source span:empty::after {{ content: " "; }}
.forget {{ background: #f1f3f5; color: {styles.SOFT}; }}
.recompute {{ background: {styles.AGAIN_FILL}; }}
.detach {{ background: {styles.FORWARD}; }}
.place {{ background: {styles.BACKWARD}; }}
.copy {{ background: {styles.AWAY}; }}
.head {{ font-weight: 600; }}
@media (max-width: 900px) {{
  figure.broad {{ display: none; }}
  figure.narrow {{ display: block; }}
  figure.narrow > svg {{ width: 100%; max-width: 560px; }}
}}
@media (max-width: 640px) {{
  body {{ padding: 14px; }}
  .card {{ flex-basis: 140px; }}
  /* A row is a small card: its first cell on a line of its own, the others named and wrapped. */
  thead {{ display: none; }}
  tr {{ display: block; padding: 5px 8px; border-bottom: 1px solid var(--line); }}
  td, td.n {{ display: inline-block; text-align: left; border: 0; padding: 0 12px 0 0; }}
  td:first-child {{ display: block; font-weight: 600; }}
  td[data-of]:not(:empty)::before {{ content: attr(data-of) " "; color: var(--faint); font-weight: 400; }}
  td:first-child::before {{ content: none !important; }}
}}
.notice {{ background: {styles.AGAIN_FILL}; padding: 8px 12px; border-radius: 6px; }}
"""

SCRIPT = """
"use strict";
function zoomable(pane) {
  const svg = pane.querySelector("svg");
  if (!svg || pane.dataset.ready) return;
  pane.dataset.ready = "1";
  svg.removeAttribute("width"); svg.removeAttribute("height");
  const whole = svg.viewBox.baseVal;
  const full = [whole.x, whole.y, whole.width, whole.height];
  let box = full.slice();
  const show = () => svg.setAttribute("viewBox", box.join(" "));
  const zoom = (factor, cx, cy) => {
    box = [cx - (cx - box[0]) * factor, cy - (cy - box[1]) * factor, box[2] * factor, box[3] * factor];
    show();
  };
  const middle = f => zoom(f, box[0] + box[2] / 2, box[1] + box[3] / 2);
  const width = () => {
    const r = pane.getBoundingClientRect();
    const unit = 10 / 12;                 // the smallest letters of a graph, 10 points, are 12 pixels high
    box = [full[0] + full[2] / 2 - r.width * unit / 2, full[1], r.width * unit, r.height * unit];
    show();
  };
  const tools = document.createElement("div");
  tools.className = "tools";
  for (const [name, title, act] of [["+", "zoom in", () => middle(0.7)],
      ["\\u2212", "zoom out", () => middle(1.4)], ["top", "readable, from the top", width],
      ["all", "show the whole graph", () => { box = full.slice(); show(); }]]) {
    const b = document.createElement("button");
    b.type = "button"; b.textContent = name; b.title = title; b.onclick = act;
    tools.append(b);
  }
  pane.append(tools);
  pane.addEventListener("wheel", e => {
    if (!(e.ctrlKey || e.metaKey)) return;
    e.preventDefault();
    const p = new DOMPoint(e.clientX, e.clientY).matrixTransform(svg.getScreenCTM().inverse());
    zoom(e.deltaY > 0 ? 1.15 : 0.87, p.x, p.y);
  }, {passive: false});
  let last = null;
  svg.addEventListener("pointerdown", e => {
    last = [e.clientX, e.clientY];
  });
  svg.addEventListener("pointermove", e => {
    if (!last || !(e.buttons & 1)) { last = null; return; }
    const m = svg.getScreenCTM();
    box[0] -= (e.clientX - last[0]) / m.a; box[1] -= (e.clientY - last[1]) / m.d;
    last = [e.clientX, e.clientY];
    show();
  });
  width();
}
function fill(details) {
  const pane = details.querySelector(".pane");
  if (!pane) return;
  if (pane.dataset.graph && !pane.firstElementChild)
    pane.append(document.getElementById(pane.dataset.graph).content.cloneNode(true));
  zoomable(pane);
}
function openTarget() {
  const found = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
  if (found instanceof HTMLDetailsElement) { found.open = true; fill(found); found.scrollIntoView(); }
}
document.querySelectorAll("details").forEach(d => d.addEventListener("toggle", () => d.open && fill(d)));
document.querySelectorAll("details[open]").forEach(fill);
window.addEventListener("hashchange", openTarget);
openTarget();
"""


def page(title: str, body: Iterable[str]) -> str:
    """Return a whole page."""
    # The policy holds the promise that nothing is loaded: a browser refuses to.
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    return (f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
            + "\n".join(body) + f"\n<script>{SCRIPT}</script>\n</body>\n</html>\n")


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: set[int]) -> str:
    """Return a table; columns in `numbers` are aligned to the right. On a narrow page each row is a card: its
    first cell is its title, the others follow with the names of their columns."""
    def row(cells: Sequence[str], tag: str) -> str:
        of = (f' data-of="{escape(h)}"' if tag == "td" else "" for h in head)
        return "<tr>" + "".join(f'<{tag}{" class=n" if k in numbers else ""}{name}>{escape(c)}</{tag}>'
                                for k, (c, name) in enumerate(zip(cells, of, strict=True))) + "</tr>"
    return f"<table><thead>{row(head, 'th')}</thead><tbody>" \
           f"{''.join(row(r, 'td') for r in rows)}</tbody></table>"


def summary_html(plan: PlanData) -> str:
    """Return the HTML that a notebook shows for a plan."""
    (head, *rows), numbers = block_table(plan, replay(plan))
    figures = "".join(f"<tr><td>{escape(a)}</td><td>{escape(b)}</td></tr>" for a, b in facts(plan))
    return (f"<div><b>rkmate plan</b><table>{figures}</table>"
            f"{html_table(head, rows, numbers)}</div>")


_COMMENT = re.compile(r"#\s.*?\b(forget|recompute|detach|in place)\b")
_COPY = re.compile(r"^    env\.(copy_out|leave|copy_in|arrive)\(")


def source_html(text: str) -> str:
    """Return generated source as HTML, with its kinds of statements marked."""
    lines = []
    docstring = False
    for line in text.splitlines():
        quotes = line.count('"""')
        plain = docstring or quotes > 0
        docstring ^= quotes % 2 == 1
        found = None if plain else _COMMENT.search(line)
        kind = found[1].split()[-1] if found else "head" if line.startswith("def ") else \
            "copy" if not plain and _COPY.match(line) else ""
        lines.append(f'<span class="{kind}">{escape(line)}</span>' if kind
                     else f"<span>{escape(line)}</span>")
    return f'<div class="tall"><pre class="source">{"".join(lines)}</pre></div>'


def own_ids(svg: str, prefix: str) -> str:
    """Return the picture with identifiers that no other picture on the page has."""
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", svg)
    names = set(re.findall(rf'id="{prefix}-([^"]+)"', svg))
    return re.sub(r'(xlink:href|href)="#([^"]+)"',
                  lambda m: f'{m[1]}="#{prefix}-{m[2]}"' if m[2] in names else m[0], svg)
