"""The report: one page that needs nothing else, and works in a browser."""

from __future__ import annotations

import datetime
import functools
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import rkmate
from rkmate.show import draw, report
from rkmate.show.replay import label, replay
from rkmate.show.report import own_ids, source_html
from tests.show.models import curve, in_one_process, scores_plan, tower, wrapped

pytestmark = in_one_process

DATE = datetime.date(2026, 2, 3)
CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome", "chrome")
                 if (found := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or not draw.has_dot(),
    reason="no headless browser (Debian: apt-get install chromium) or no Graphviz is installed")

CHECK = """<script>
window.errors = [];
window.addEventListener("error", e => window.errors.push(String(e.message)));
document.addEventListener("securitypolicyviolation", e => window.errors.push(e.blockedURI));
window.addEventListener("load", () => setTimeout(() => {
  const result = {errors: window.errors, blocks: [], overlaps: [], small: [], wide: 0};
  document.querySelectorAll("details").forEach(d => { d.open = true; });
  setTimeout(() => {
    document.querySelectorAll("details[id^=block-]").forEach(d => {
      const svg = d.querySelector(".pane svg");
      result.blocks.push([d.id, svg ? svg.querySelectorAll("g.node").length : 0,
                          svg ? svg.getBoundingClientRect().height : 0,
                          d.querySelectorAll(".tools button").length]);
    });
    document.querySelectorAll("svg").forEach((svg, n) => {
      const boxes = [...svg.querySelectorAll("text")].filter(t => t.textContent.trim())
        .map(t => [t.getBoundingClientRect(), t.textContent]);
      for (let i = 0; i < boxes.length; i++) for (let k = i + 1; k < boxes.length; k++) {
        const [a, s] = boxes[i], [b, t] = boxes[k];
        const x = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        // Lines of one label touch by their ascenders; a third of a line is an overlap.
        if (x > 1 && y > Math.min(a.height, b.height) / 3) result.overlaps.push([n, s, t, x, y]);
      }
    });
    document.querySelectorAll("g.node").forEach(g => {
      const shape = g.querySelector("ellipse, path, polygon");
      if (!shape || g.querySelectorAll("polygon").length > 1) return;
      const a = shape.getBoundingClientRect();
      g.querySelectorAll("text").forEach(t => {
        const b = t.getBoundingClientRect();
        if (b.left < a.left - 1 || b.right > a.right + 1) result.overlaps.push([t.textContent]);
      });
    });
    // Text in panes is zoomed by the reader; what is not shown has no size.
    result.small = [...document.querySelectorAll("body *")].filter(e => !e.closest(".pane")
      && e.getClientRects().length && [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()))
      .map(e => {
        const svg = e.closest("svg");
        const scale = svg ? svg.getScreenCTM().a : 1;
        return [e.textContent.trim().slice(0, 40), parseFloat(getComputedStyle(e).fontSize) * scale];
      }).filter(([, pixels]) => pixels < 11.8);
    result.wide = document.documentElement.scrollWidth - window.innerWidth;
    const box = document.createElement("pre");
    box.id = "result";
    box.textContent = JSON.stringify(result);
    document.body.append(box);
  }, 300);
}, 300));
</script>"""


class Collector(HTMLParser):
    """Every address on a page, and its identifiers."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and value is not None:
                self.addresses.append(value)
            if name == "id" and value is not None:
                self.ids.append(value)


@functools.cache
def page_text(folder: Path) -> str:
    plan = wrapped().plan
    points = curve().with_point("checkpoint", 1 << 20, 1.3 * plan.baseline_seconds)
    return plan.report(folder / "report.html", curve=points, date=DATE).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_text(tmp_path_factory.mktemp("report"))


def test_nothing_is_loaded_from_anywhere(page: str) -> None:
    found = Collector()
    found.feed(page)
    assert found.addresses
    assert all(a.startswith("#") for a in found.addresses)
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)
    assert "default-src 'none'" in page


def test_identifiers_are_unique_and_every_link_arrives(page: str) -> None:
    found = Collector()
    found.feed(page)
    assert len(found.ids) == len(set(found.ids))
    assert {a[1:] for a in found.addresses} <= set(found.ids)
    for b in range(len(wrapped().plan.blocks)):
        assert f"block-{b}" in found.ids


def test_the_page_says_what_the_plan_says(page: str) -> None:
    plan = wrapped().plan
    for paragraph in plan.explain().split("\n\n"):
        assert escape(paragraph) in page
    assert plan.origin is not None
    model, _ = tower(4)
    number = sum(p.numel() for p in model.parameters())
    for value in (f"Tower, {number:,} parameters (all trained)", "ids int64[4, 64]", "<dd>cpu</dd>",
                  f"torch {torch.__version__}", "2026-02-03"):
        assert value in page
    for line in plan.source.splitlines()[:200]:
        assert escape(line) in page


def test_every_tensor_at_the_peak_is_on_the_page(page: str) -> None:
    section = page[page.index('id="peak"'):page.index('id="modules"')]
    tensors = replay(wrapped().plan).peak_tensors
    assert len(tensors) > report._FIRST_TENSORS
    cells = re.findall(r"<tbody>(.*?)</tbody>", section, re.S)
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for part in cells for row in part.split("</tr>")[:-1]]
    assert [(row[0], row[-1]) for row in rows] == [
        (escape(label(t.path, t.operation) or t.name), escape(t.name)) for t in tensors]


def test_a_plan_without_origin_says_so(tmp_path: Path) -> None:
    text = replace(wrapped().plan, origin=None).report(tmp_path / "a.html", date=DATE).read_text()
    assert "did not note its model and inputs" in text
    assert DATE.isoformat() in text


def test_statements_of_the_source_are_marked() -> None:
    text = '"""About forget"""\ndef f(env):\n    x = g(y)   # recompute\n    del x   # forget\n    return 1'
    html = source_html(text)
    assert re.findall(r'span class="(\w+)">\s*(\w+)', html) == \
        [("head", "def"), ("recompute", "x"), ("forget", "del")]
    assert "<span>&quot;&quot;&quot;About forget" in html


def test_a_plan_without_source_or_curve_says_so(tmp_path: Path) -> None:
    text = scores_plan().report(tmp_path / "a.html").read_text()
    assert "without generating code" in text
    assert "rkmate.tradeoff" in text


@pytest.mark.slow
def test_a_loaded_plan_has_the_same_report(tmp_path: Path) -> None:
    plan = wrapped().plan
    plan.save(tmp_path / "plan.json")
    loaded = rkmate.Plan.load(tmp_path / "plan.json")
    first = plan.report(tmp_path / "a.html", date=DATE).read_text()
    assert loaded.report(tmp_path / "b.html", date=DATE).read_text() == first


def test_without_dot_the_report_shows_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "has_dot", lambda: False)
    text = wrapped().plan.report(tmp_path / "a.html").read_text()
    assert "apt-get install graphviz" in text
    assert "digraph" in text


def test_identifiers_of_pictures_are_told_apart() -> None:
    svg = '<svg><path id="p"/><use xlink:href="#p"/><g clip-path="url(#p)"/><a xlink:href="#other"/></svg>'
    assert own_ids(svg, "x") == ('<svg><path id="x-p"/><use xlink:href="#x-p"/>'
                                 '<g clip-path="url(#x-p)"/><a xlink:href="#other"/></svg>')


def browse(path: Path, folder: Path, width: int = 1240) -> tuple[dict[str, Any], str]:
    """What the check finds on a page, and what the browser writes on its console."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         f"--user-data-dir={folder / 'profile'}", f"--window-size={width},1000",
         "--virtual-time-budget=8000", "--enable-logging=stderr", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.S)
    assert found, done.stderr[-2000:]
    console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    text = found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    return json.loads(text), console


@needs_browser
@pytest.mark.parametrize("width", [pytest.param(1240, marks=pytest.mark.slow), 500])
def test_the_page_works_in_a_browser(page: str, width: int, tmp_path: Path) -> None:
    checked = tmp_path / "checked.html"
    checked.write_text(page.replace("</head>", CHECK + "</head>"), encoding="utf-8")
    result, console = browse(checked, tmp_path, width)
    assert not console
    assert result["errors"] == []
    assert len(result["blocks"]) == len(wrapped().plan.blocks)
    for name, nodes, height, buttons in result["blocks"]:
        assert nodes > 5, name
        assert height > 100, name
        assert buttons == 4, name
    assert result["overlaps"] == []
    assert result["small"] == []
    assert result["wide"] <= 0


@needs_browser
def test_the_check_sees_overlapping_text_and_errors(tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text("<!doctype html><html><head>" + CHECK + "</head><body><svg><text x='5' y='20'>one"
                   "</text><text x='7' y='22'>two</text></svg><script>missing();</script>"
                   "</body></html>", encoding="utf-8")
    result, console = browse(bad, tmp_path)
    assert len(result["overlaps"]) == 1
    assert result["errors"]
    assert "missing is not defined" in console
