"""The report: one HTML page about one plan. It needs no network, and loads nothing from anywhere.

Sentences are in the page itself. Pictures and tables are drawn by the page's script from the page's data
(`rkmate.show.page_data`). Style and script are the files ``page.css`` and ``page.js`` next to this module.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import graphviz

from rkmate.ir.plan import PlanData
from rkmate.ir.simulate import Peak
from rkmate.show import styles
from rkmate.show.amounts import count, duration, size
from rkmate.show.copies import block_sent, copied_rows, copies_of, copies_words
from rkmate.show.draw import NO_DOT, has_dot, pages_of, svg
from rkmate.show.graphs import block_graph, block_memory, chain_graph, plan_recomputed
from rkmate.show.page_data import cards, packed, page_data
from rkmate.show.plots import WithPoints, overhead
from rkmate.show.replay import Occupancy, replay
from rkmate.show.words import facts, paragraphs

_FIRST_TENSORS = 15
"""Tensors that are away that stand open on the page; the others open with a click."""
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
    replayed = replay(plan)
    data = page_data(plan, curve, measured)
    points = curve.points if isinstance(curve, WithPoints) else ()
    data["points"] = [{"name": q.name, "peak": q.peak_bytes, "overhead": overhead(curve, q.step_seconds)}
                      for q in points]
    data["pictures"] = _pictures(plan, replayed)
    data["source"] = source_html(plan.source) if plan.source else ""
    body = [*_head(plan, date), *_cards(plan, replayed), *_timeline(replayed), *_moment(), *_MODULES,
            *_curve(curve), *_words(plan, replayed), *_away(replayed), *_graphs(plan, replayed),
            *_source(plan),
            f'<script type="application/gzip" id="data">{packed(data)}</script>']
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
    rows += [row for row in facts(plan) if row[0] == "distributed"]
    rows += [("report of", date.isoformat()),
             ("plan", f"planner {plan.planner}, {count(len(plan.blocks), 'block')}, "
                      f"{count(len(plan.graph.computations), 'computation')}")]
    yield from (f"<dt>{escape(what)}</dt><dd>{escape(value)}</dd>" for what, value in rows)
    yield "</dl>"
    if about is None:
        yield '<p class="faint">The plan was saved by a version that did not note its model and inputs.</p>'
    yield "<nav>" + "".join(f'<a href="#{a}">{t}</a> ' for a, t in (
        ("timeline", "memory over time"), ("peak", "the peak"), ("modules", "modules"),
        ("curve", "time against memory"), ("explained", "in words"), ("chain", "blocks"),
        ("code", "source"))) + "</nav></header>"
    asks = "search a module, operation or tensor"
    yield (f'<div class="bar"><input type="search" id="search" placeholder="{asks}" aria-label="{asks}">'
           '<label id="slider-label" hidden>budget <input type="range" id="slider" min="0" step="1">'
           '<output id="slider-words"></output></label></div>')
    yield '<noscript><p class="notice">The pictures and tables of this page need JavaScript.</p></noscript>'
    yield ('<p class="notice" id="other" hidden>Figures, memory and modules are those of the plan for this '
           "budget; graphs, copies and source those of the plan that the report was made for. "
           '<button type="button" id="to-own">Back to it</button></p>')


def _cards(plan: PlanData, replayed: Occupancy) -> Iterator[str]:
    yield '<div class="cards" id="cards">'
    for name, value, note in cards(plan, replayed):
        yield f'<div class="card">{escape(name)}<b>{escape(value)}</b>' \
              f'<span class="faint">{escape(note)}</span></div>'
    yield "</div>"


def _words(plan: PlanData, replayed: Occupancy) -> Iterator[str]:
    again = bool(plan.schedule.recomputed())
    why = f"{_WHY_AWAY}{_AND_AGAIN if again else ''}." if replayed.copied else _WHY if again else _WHY_WHOLE
    yield f'<h2 id="explained">In words</h2><p>{escape(_COUNTED + why)}</p>'
    yield '<div id="words">'
    for heading, text in paragraphs(plan):
        yield f"<h3>{escape(heading)}</h3><p>{escape(text)}</p>"
    yield "</div>"
    shown = ("lower bound", "searching gained", "planning took", "note")
    figures = [(a, b) for a, b in facts(plan) if a in shown]
    figures += [(f"stage: {stage}", duration(s)) for stage, s in plan.stage_seconds.items()]
    figures += [(f"nodes: {name}", str(n)) for name, n in plan.nodes.items()]
    yield "<details><summary>how the plan was found</summary>" \
          f"{html_table(('what', 'value'), figures, set())}</details>"


def _curve(curve: Sequence[PlanData]) -> Iterator[str]:
    yield '<h2 id="curve">Time against memory</h2>'
    if not curve:
        yield ('<p class="faint">The plans for other budgets were not given to the report: '
               "<code>plan.report(path, curve=rkmate.tradeoff(model, args))</code>.</p>")
    else:
        yield ("<p>Each point is a plan for another budget: the less memory, the more is computed twice. A "
               "click on a point shows its plan on this page, and so does the slider at the top; red is the "
               "plan of the report. No schedule fits into the shaded range.</p>")
    yield '<div class="chart" id="curve-chart"></div>'
    if curve:
        rows = [(size(p.budget_bytes), size(p.peak_bytes), f"{p.overhead:+.1%}", duration(p.step_seconds))
                for p in curve]
        yield "<details><summary>the figures</summary>" + html_table(
            ("budget", "peak", "extra time", "time of a step"), rows, {0, 1, 2, 3}) + "</details>"


def _timeline(replayed: Occupancy) -> Iterator[str]:
    yield '<h2 id="timeline">Memory over time</h2>'
    yield ("<p>The height is what is in memory. It grows through the forward, which leaves activations for "
           "the backward, and falls through the backward, which uses them up. What is orange was forgotten "
           "before and is computed again. Nothing coloured stands above the red line, the budget; the grey "
           "line is the step without rematerialization."
           + (_CLOCKS if replayed.copied else "") + "</p>")
    yield ('<div class="tools"><button type="button" id="nearer" title="zoom in">+</button>'
           '<button type="button" id="further" title="zoom out">\u2212</button>'
           '<button type="button" id="whole">whole step</button><span class="faint">Drag, or Ctrl and the '
           "wheel, to zoom.</span></div>")
    yield '<div class="chart" id="chart"></div><div class="legend" id="legend"></div>'
    yield '<div id="found" hidden><p id="found-words"></p><div class="tall" id="found-rows"></div></div>'


def _moment() -> Iterator[str]:
    yield '<h2 id="peak"><span id="moment-title">What is in memory at the peak</span></h2>'
    yield ('<p id="moment-words"></p><div class="tools"><button type="button" id="by-module">by module'
           '</button><button type="button" id="by-tensor">by tensor</button><button type="button" id="join">'
           'join alike</button><button type="button" id="to-peak" hidden>back to the peak</button></div>')
    yield '<div class="tall" id="moment"></div>'


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


_MODULES = (
    '<h2 id="modules">What is forgotten and recomputed, by module</h2>',
    '<p id="modules-words"></p><div class="tools"><button type="button" id="join-modules">join alike</button>'
    '<span class="faint">Bytes between forward and backward; time of one step. The head of a column sorts by '
    'it.</span></div><div class="tall" id="module-rows"></div>')


def _pictures(plan: PlanData, replayed: Occupancy) -> dict[str, str]:
    """Return the graphs by name: of the chain, and of each block that is not run like another one."""
    dot = has_dot()
    drawn = {"chain": _drawn(chain_graph(plan, replayed, lambda b: f"#block-{b}"), "chain", dot)}
    for b in sorted(set(pages_of(plan, replayed))):
        drawn[f"graph-{b}"] = _drawn(block_graph(plan, b, replayed), f"g{b}", dot)
    return drawn


def _graphs(plan: PlanData, replayed: Occupancy) -> Iterator[str]:
    yield '<h2 id="chain">Blocks</h2>'
    if not has_dot():
        yield f'<p class="notice">Graphs are shown as DOT text: {escape(NO_DOT)}.</p>'
    yield ('<p class="faint">The model as a chain. Blocks of one colour are identical and were solved '
           "once. A block opens below; drag to move, Ctrl and the wheel to zoom.</p>")
    yield '<details open><summary>the chain</summary><div class="pane" data-graph="chain"></div></details>'
    shared = pages_of(plan, replayed)
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
    yield '<h2 id="code">Generated source</h2>'
    if not plan.source:
        yield ('<p class="faint">This plan was made without generating code: '
               '<code>rkmate.wrap(...).plan.report(path)</code> shows it.</p><div id="listing"></div>')
        return
    yield ('<p class="key"><span class="forget">forget</span> frees a storage, '
           '<span class="recompute">recompute</span> runs a computation again, '
           '<span class="detach">detach</span> is a boundary of autograd, '
           '<span class="place">in place</span> writes over an input that dies there.'
           + (' <span class="copy">copy_out</span> begins a copy away.</p>' if "env.copy_out(" in plan.source
              else "</p>"))
    yield '<div id="listing"></div>'


def _drawn(graph: graphviz.Digraph, prefix: str, dot: bool) -> str:
    if dot:
        return own_ids(svg(graph), prefix)
    return f'<div class="tall"><pre>{escape(graph.source)}</pre></div>'


def _colours() -> str:
    """Return the colours of all pictures as variables of the page's style."""
    named = [("forward", styles.FORWARD_LINE), ("backward", styles.BACKWARD_LINE), ("wait", styles.WAIT),
             ("budget", styles.BUDGET), ("outline", styles.FAINT), *styles.KIND_COLOURS.items()]
    return ":root {" + "".join(f" --{name}: {colour};" for name, colour in named) + " }"


def asset(name: str) -> str:
    """Return the text of a file of the page."""
    return (files("rkmate.show") / name).read_text(encoding="utf-8")


def page(title: str, body: Iterable[str]) -> str:
    """Return a whole page."""
    # The policy holds the promise that nothing is loaded: a browser refuses to.
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    return (f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escape(title)}</title>\n<style>{_colours()}\n{asset('page.css')}</style>\n</head>\n<body>\n"
            + "\n".join(body) + f"\n<script>{asset('page.js')}</script>\n</body>\n</html>\n")


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: set[int]) -> str:
    """Return a table; columns in `numbers` are aligned to the right. On a narrow page each row is a card: its
    first cell is its title, the others follow with the names of their columns."""
    def row(cells: Sequence[str], tag: str) -> str:
        of = (f' data-of="{escape(h)}"' if tag == "td" else "" for h in head)
        return "<tr>" + "".join(f'<{tag}{" class=n" if k in numbers else ""}{name}>{escape(c)}</{tag}>'
                                for k, (c, name) in enumerate(zip(cells, of, strict=True))) + "</tr>"
    return f"<table><thead>{row(head, 'th')}</thead><tbody>" \
           f"{''.join(row(r, 'td') for r in rows)}</tbody></table>"


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
