"""The report's page: its style, its script, and pieces of HTML. Nothing is loaded from anywhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from rkmate.ir.plan import PlanData
from rkmate.show import styles
from rkmate.show.replay import replay
from rkmate.show.words import block_table, facts

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
    """A whole page."""
    # The policy holds the promise that nothing is loaded: a browser refuses to.
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    return (f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
            + "\n".join(body) + f"\n<script>{SCRIPT}</script>\n</body>\n</html>\n")


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: set[int]) -> str:
    """A table; columns in `numbers` are aligned to the right. On a narrow page each row is a card: its first
    cell is its title, the others follow with the names of their columns."""
    def row(cells: Sequence[str], tag: str) -> str:
        of = (f' data-of="{escape(h)}"' if tag == "td" else "" for h in head)
        return "<tr>" + "".join(f'<{tag}{" class=n" if k in numbers else ""}{name}>{escape(c)}</{tag}>'
                                for k, (c, name) in enumerate(zip(cells, of, strict=True))) + "</tr>"
    return f"<table><thead>{row(head, 'th')}</thead><tbody>" \
           f"{''.join(row(r, 'td') for r in rows)}</tbody></table>"


def summary_html(plan: PlanData) -> str:
    """What a notebook shows for a plan."""
    (head, *rows), numbers = block_table(plan, replay(plan))
    figures = "".join(f"<tr><td>{escape(a)}</td><td>{escape(b)}</td></tr>" for a, b in facts(plan))
    return (f"<div><b>rkmate plan</b><table>{figures}</table>"
            f"{html_table(head, rows, numbers)}</div>")


_COMMENT = re.compile(r"#\s.*?\b(forget|recompute|detach|in place)\b")
_COPY = re.compile(r"^    env\.(copy_out|leave|copy_in|arrive)\(")


def source_html(text: str) -> str:
    """Generated source, its kinds of statements marked."""
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
    """The same picture with identifiers that no other picture on the page has."""
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", svg)
    names = set(re.findall(rf'id="{prefix}-([^"]+)"', svg))
    return re.sub(r'(xlink:href|href)="#([^"]+)"',
                  lambda m: f'{m[1]}="#{prefix}-{m[2]}"' if m[2] in names else m[0], svg)
