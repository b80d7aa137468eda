"""The report: one page that needs nothing else, and works in a browser."""

from __future__ import annotations

import base64
import datetime
import functools
import gzip
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
from rkmate.ir.simulate import Peak
from rkmate.show import draw, report
from rkmate.show.amounts import duration, size
from rkmate.show.page_data import WAIT, page_data, rows_of
from rkmate.show.replay import KINDS, WHOLE, replay, replay_baseline
from rkmate.show.report import asset, own_ids, source_html
from rkmate.show.words import alike, by_module
from tests.show.models import PLANS, curve, in_one_process, long_plan, scores_plan, tower, wrapped
from tests.show.sending import sent_plan

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
    const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
    const light = colour => numbers(colour).slice(0, 3).map(c => c / 255)
      .map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
      .reduce((sum, c, k) => sum + c * [0.2126, 0.7152, 0.0722][k], 0);
    const behind = e => {
      const colour = getComputedStyle(e).backgroundColor, [, , , seen = 1] = numbers(colour);
      return seen === 1 && !colour.startsWith("color") || !e.parentElement ? colour : behind(e.parentElement);
    };
    result.pale = [...document.querySelectorAll("body *")].filter(e => !e.closest(".pane, script, noscript")
      && e.getClientRects().length && [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()))
      .map(e => {
        const style = getComputedStyle(e), text = light(e.closest("svg") ? style.fill : style.color);
        const [a, b] = [text, light(behind(e))].sort((a, b) => b - a);
        return [e.textContent.trim().slice(0, 40), (a + 0.05) / (b + 0.05)];
      }).filter(([, contrast]) => contrast < 4.5);
    result.width = window.innerWidth;
    result.back = getComputedStyle(document.body).backgroundColor;
    const box = document.createElement("pre");
    box.id = "result";
    box.textContent = JSON.stringify(result);
    if (window.parent !== window) window.parent.postMessage(box.textContent, "*");
    document.body.append(box);
  }, 300);
}, 300));
</script>"""


NARROW = """<!doctype html><html style="color-scheme: light dark"><body><script>
window.addEventListener("message", e => {
  const box = document.createElement("pre");
  box.id = "result";
  box.textContent = e.data;
  document.body.append(box);
});
</script><iframe src="checked.html" style="border: 0; width: 400px; height: 1000px"></iframe></body></html>"""
"""A page inside of a frame: the browser's own window is never narrower than 500 pixels."""


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


def data_of(page: str) -> dict[str, Any]:
    """The data that a page holds for its script."""
    found = re.search(r'<script type="application/gzip" id="data">(.*?)</script>', page)
    assert found
    content: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(found[1])))
    return content


def whole_text(page: str) -> str:
    """A page with the graphs that its script puts into it."""
    return page + "".join(data_of(page)["pictures"].values())


def sums(differences: list[int]) -> list[int]:
    result, total = [], 0
    for d in differences:
        total += d
        result.append(total)
    return result


def test_nothing_is_loaded_from_anywhere(page: str) -> None:
    found = Collector()
    found.feed(whole_text(page))
    assert found.addresses
    assert all(a.startswith("#") for a in found.addresses)
    for text in (whole_text(page), asset("page.css"), asset("page.js")):
        assert "@import" not in text
        assert not re.search(r"url\((?!#)", text)
        assert not re.search(r"\bfetch\(|XMLHttpRequest|\bimport\b", re.sub(r"<pre.*?</pre>", "", text))
    assert set(re.findall(r"https?://[^\"\s]+", asset("page.js") + asset("page.css"))) == {
        "http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page


def test_identifiers_are_unique_and_every_link_arrives(page: str) -> None:
    found = Collector()
    found.feed(whole_text(page))
    assert len(found.ids) == len(set(found.ids))
    assert {a[1:] for a in found.addresses} <= set(found.ids)
    for b in range(len(wrapped().plan.blocks)):
        assert f"block-{b}" in found.ids
    asked = set(re.findall(r'\$\("([\w-]+)"\)', asset("page.js")))
    assert len(asked) > 20
    assert asked <= set(found.ids)


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
    source = data_of(page)["source"]
    for line in plan.source.splitlines():
        assert escape(line) in source


@pytest.mark.parametrize("name", [*PLANS, "slow", "fast", "some"])
def test_the_data_are_the_replay(name: str) -> None:
    plan = PLANS[name]() if name in PLANS else sent_plan(name)
    replayed = replay(plan)
    (view,) = page_data(plan, (), None)["views"]
    levels = [sums(level) for level in view["levels"]]
    rows = rows_of(replayed)
    assert [sum(row) for row in zip(*levels, strict=True)] == [sum(r.bytes) for r in rows]
    assert sum(level[view["peakRow"]] for level in levels) == plan.peak_bytes
    assert {sum(r.bytes) for r in rows if r.what >= 0} == {
        replayed.simulation.timeline[k] for k, m in enumerate(replayed.moments) if m.computation is not None}
    assert (sum(view["gap"]) + sum(view["length"])) / 1e9 == pytest.approx(plan.step_seconds, abs=1e-9)
    # What is alive at a row, by kind, are the levels of the row, except for what belongs to no tensor.
    sizes = [d.size for d in plan.graph.cd.d]
    for r, row in enumerate(rows):
        for k, kind in enumerate(KINDS):
            alive = sum(sizes[j] for j, first, last, of in zip(*view["spans"], strict=True)
                        if first <= r < last and of == k)
            assert alive == levels[k][r] or kind in ("temporaries", "buffers", "loss"), (row, kind)
    waits = [r for r in rows if r.what == WAIT]
    assert sum(r.end - r.start for r in waits) == pytest.approx(replayed.simulation.stalled)
    assert bool(waits) or name != "slow"


def test_every_tensor_at_the_peak_is_in_the_data(page: str) -> None:
    data = data_of(page)
    view = data["views"][data["here"]]
    graph = data["graphs"][view["graph"]]
    at = view["peakRow"]
    there = sorted(graph["tensors"][j] for j, first, last, _ in zip(*view["spans"], strict=True)
                   if first <= at < last and graph["sizes"][j])
    named = {d.name for d in wrapped().plan.graph.cd.d}
    assert there == sorted(t.name for t in replay(wrapped().plan).peak_tensors if t.name in named)


def test_the_slider_has_every_budget_of_the_curve(page: str) -> None:
    data = data_of(page)
    plan = wrapped().plan
    assert [v["budget"] for v in data["views"]] == sorted(
        {plan.budget_bytes, *(p.budget_bytes for p in curve())})
    here = data["views"][data["here"]]
    assert (here["budget"], here["peak"]) == (plan.budget_bytes, plan.peak_bytes)
    assert data["points"] == [{"name": "checkpoint", "peak": 1 << 20, "overhead": pytest.approx(0.3)}]


def test_modules_say_why_they_run_again() -> None:
    plan = wrapped().plan
    rows = by_module(replay(plan), replay_baseline(plan))
    (view,) = page_data(plan, (), None)["views"]
    assert [m[0] for m in view["modules"]] == [r.path or WHOLE for r in rows]
    for row, shown in zip(rows, view["modules"], strict=True):
        reason = shown[-1]
        assert bool(reason) == bool(row.recomputed_seconds)
        if row.recomputed_seconds and row.forgotten_bytes:
            assert reason.startswith(
                f"frees {size(row.forgotten_bytes)} for {duration(row.recomputed_seconds)}: ")
    least = curve()[-1]
    passed = [r for r in by_module(replay(least), replay_baseline(least))
              if r.recomputed_seconds and not r.forgotten_bytes and r.needed_by]
    for row in passed:
        assert row.path not in row.needed_by


def test_a_measured_step_is_on_the_time_axis_of_the_plan() -> None:
    plan = wrapped().plan
    measured = Peak(3 << 20, 0, 0.5, None, ((0.1, 1 << 20), (0.2, 3 << 20), (0.5, 0)))
    (view,) = page_data(plan, (), measured)["views"]
    assert [b for _, b in view["measured"]] == [1 << 20, 3 << 20, 0]
    assert view["measured"][-1][0] == pytest.approx(plan.step_seconds * 1e9, abs=1)


@pytest.mark.parametrize("which", ["tower", "long"])
def test_a_page_is_small(which: str, page: str, tmp_path: Path) -> None:
    """More than 2,000 nodes, too."""
    text = page if which == "tower" else long_plan().report(tmp_path / "a.html").read_text()
    assert len(text.encode()) < 2e6
    assert len(asset("page.js").encode()) + len(asset("page.css").encode()) < 60e3


def test_the_files_of_the_page_are_packaged() -> None:
    root = Path(rkmate.__file__).parent
    declared = re.search(r"^rkmate = (\[.*?\])", (root.parent / "pyproject.toml").read_text(), re.M)
    assert declared
    there = {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()
             and "__pycache__" not in p.parts and p.suffix != ".py"}
    assert set(json.loads(declared[1])) == there


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
    assert "digraph" in data_of(text)["pictures"]["chain"]


def test_identifiers_of_pictures_are_told_apart() -> None:
    svg = '<svg><path id="p"/><use xlink:href="#p"/><g clip-path="url(#p)"/><a xlink:href="#other"/></svg>'
    assert own_ids(svg, "x") == ('<svg><path id="x-p"/><use xlink:href="#x-p"/>'
                                 '<g clip-path="url(#x-p)"/><a xlink:href="#other"/></svg>')


def browse(path: Path, folder: Path, width: int = 1240, dark: bool = False) -> tuple[dict[str, Any], str]:
    """What the check finds on a page, and what the browser writes on its console."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         f"--user-data-dir={folder / 'profile'}", f"--window-size={width},1000",
         f"--blink-settings=preferredColorScheme={0 if dark else 1}",
         "--virtual-time-budget=8000", "--enable-logging=stderr", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.S)
    assert found, done.stderr[-2000:]
    console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    text = found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    return json.loads(text), console


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [pytest.param(1240, False, marks=pytest.mark.slow), (400, True)])
def test_the_page_works_in_a_browser(page: str, width: int, dark: bool, tmp_path: Path) -> None:
    checked = tmp_path / "checked.html"
    checked.write_text(page.replace("</head>", CHECK + "</head>"), encoding="utf-8")
    if width < 500:
        checked = tmp_path / "narrow.html"
        checked.write_text(NARROW, encoding="utf-8")
    result, console = browse(checked, tmp_path, max(width, 500), dark)
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
    assert result["width"] == width
    assert result["pale"] == []
    assert result["back"] == ("rgb(20, 24, 29)" if dark else "rgb(255, 255, 255)")


LOOK = """<script>
window.errors = [];
window.addEventListener("error", e => window.errors.push(String(e.message)));
window.addEventListener("unhandledrejection", e => window.errors.push(String(e.reason)));
const look = setInterval(() => {
  if (!document.body || document.body.dataset.ready !== "1") return;
  clearInterval(look);
  const result = {errors: window.errors}, $ = id => document.getElementById(id);
  const chart = () => document.querySelector("#chart svg");
  const point = (kind, share, height = 120) => {
    const box = chart().getBoundingClientRect();
    const left = 64, width = box.width - 74;
    chart().dispatchEvent(new PointerEvent(kind, {bubbles: true, button: 0, buttons: 1,
      clientX: box.left + left + share * width, clientY: box.top + height}));
  };
  const cells = id => [...$(id).querySelectorAll("tbody tr")]
    .map(tr => [...tr.cells].map(td => td.textContent));
  const ticks = () => [...chart().querySelectorAll("text")].map(t => t.textContent)
    .filter(t => /^[\\d.]+ (s|ms|us)$/.test(t))
    .map(t => parseFloat(t) * {s: 1e3, ms: 1, us: 1e-3}[t.split(" ")[1]]);
  result.whole = ticks();
  result.peak = cells("moment");
  result.modules = cells("module-rows");
  // Hover.
  point("pointermove", SHARE);
  result.tip = document.querySelector(".tip").innerText;
  result.hidden = document.querySelector(".tip").hidden;
  point("pointerleave", SHARE);
  result.left = document.querySelector(".tip").hidden;
  // Click: what is in memory there.
  point("pointerdown", SHARE); point("pointerup", SHARE);
  result.title = $("moment-title").textContent;
  $("by-tensor").click();
  result.tensors = cells("moment");
  $("to-peak").click();
  result.back = $("moment-title").textContent;
  // Zoom by dragging, by keys, and back.
  point("pointerdown", 0.25); point("pointermove", 0.4); point("pointerup", 0.5);
  result.zoomed = ticks();
  chart().dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
  result.key = [$("moment-title").textContent, document.querySelector(".tip").hidden];
  $("whole").click();
  result.again = ticks();
  chart().dispatchEvent(new WheelEvent("wheel", {ctrlKey: true, deltaY: -100, clientX: 300,
    cancelable: true}));
  result.wheel = ticks();
  $("whole").click();
  // Search.
  $("search").value = "layers.2 gelu";
  $("search").dispatchEvent(new Event("input"));
  result.found = cells("found-rows");
  result.shown = Boolean(document.querySelector("#chart .found"));
  result.moment = cells("moment");
  $("found-rows").querySelector("tbody tr").click();
  result.life = ticks();
  $("search").value = "";
  $("search").dispatchEvent(new Event("input"));
  result.cleared = $("found").hidden && !document.querySelector("#chart .found");
  // The slider.
  result.views = [];
  for (let n = 0; n <= Number($("slider").max); n++) {
    $("slider").value = n;
    $("slider").dispatchEvent(new Event("input"));
    result.views.push([$("slider-words").textContent, document.querySelector("#cards b").textContent,
      $("moment-words").textContent, $("other").hidden]);
  }
  $("to-own").click();
  result.own = $("slider-words").textContent;
  $("join-modules").click();
  result.joined = cells("module-rows");
  $("join").click();
  // A column sorts.
  [...$("module-rows").querySelectorAll("th button")].find(b => b.textContent === "keeps").click();
  result.sorted = cells("module-rows").map(r => r[1]);
  const box = document.createElement("pre");
  box.id = "result";
  box.textContent = JSON.stringify(result);
  document.body.append(box);
}, 50);
</script>"""


def ms(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"s": 1e3, "ms": 1.0, "us": 1e-3}[unit]


@needs_browser
def test_hover_zoom_search_and_budgets_work_in_a_browser(page: str, tmp_path: Path) -> None:
    plan = wrapped().plan
    replayed = replay(plan)
    rows = rows_of(replayed)
    # In the middle of the longest computation, on the axis of the longer of both steps.
    longest = max((r for r in rows if r.what >= 0), key=lambda r: r.end - r.start)
    axis = max(replayed.seconds, replay_baseline(plan).seconds)
    checked = tmp_path / "checked.html"
    middle = (longest.start + longest.end) / 2 / axis
    checked.write_text(page.replace("</head>", LOOK.replace("SHARE", str(middle)) + "</head>"),
                       encoding="utf-8")
    result, console = browse(checked, tmp_path)
    assert not console
    assert result["errors"] == []

    c = plan.graph.computations[longest.what]
    (j, *_) = plan.graph.cd.c[longest.what].outputs
    made, shape = plan.graph.cd.d[j], plan.graph.shapes[j]
    assert not result["hidden"]
    assert result["left"]
    for part in (f"step {longest.step + 1} of {len(plan.schedule.steps)}", c.operation, c.path or WHOLE,
                 f"{size(sum(longest.bytes))} in memory", f"{made.name} {shape}, {size(made.size)}",
                 duration(longest.end - longest.start)):
        assert part in result["tip"], part
    assert result["title"] == f"What is in memory at step {longest.step + 1}"
    assert made.name in {row[-1] for row in result["tensors"]}
    assert result["back"] == "What is in memory at the peak"

    totals: dict[str, int] = {}
    for t in replayed.peak_tensors:
        module = "no module" if t.operation in ("", "gradient of an output") else t.path or WHOLE
        totals[module] = totals.get(module, 0) + t.bytes
    assert {row[0]: row[1] for row in result["peak"]} == {path: size(n) for path, n in totals.items()}
    assert [row[1] for row in result["peak"]] == [size(n) for n in sorted(totals.values(), reverse=True)]
    assert [row[0] for row in result["modules"]] == [
        r.path or WHOLE for r in by_module(replayed, replay_baseline(plan))]

    whole, zoomed = result["whole"], result["zoomed"]
    assert len(whole) > 3
    assert result["again"] == whole
    assert max(zoomed) - min(zoomed) < (max(whole) - min(whole)) / 2
    assert max(result["wheel"]) - min(result["wheel"]) < max(whole) - min(whole)
    assert result["key"][0] != "What is in memory at the peak"
    assert not result["key"][1]

    found = {plan.graph.cd.d[j].name for i, of in enumerate(plan.graph.computations) if "layers.2" in of.path
             and "gelu" in of.operation for j in plan.graph.cd.c[i].outputs if plan.graph.cd.d[j].size}
    assert found
    assert {row[-1] for row in result["found"]} == found
    assert result["shown"]
    assert {row[-1] for row in result["moment"]} <= {*found, *(f"inside {n}" for n in found)}
    begin = ms(result["found"][0][2].split(" to ")[0])
    assert min(result["life"]) - begin < max(whole) / 4
    assert result["cleared"]

    plans = sorted({p.budget_bytes: p for p in (*curve(), plan)}.values(), key=lambda p: p.budget_bytes)
    for p, (words, peak, moment, own) in zip(plans, result["views"], strict=True):
        assert words == f"{size(p.budget_bytes)}: time {p.overhead:+.1%}"
        assert peak == size(p.peak_bytes)
        assert f", {size(p.peak_bytes)}, while" in moment
        assert own == (p is plan)
    assert result["own"] == f"{size(plan.budget_bytes)}: time {plan.overhead:+.1%}"
    assert {row[0]: tuple(row[1:3]) for row in result["joined"]} == {
        r.path or WHOLE: (size(r.kept_bytes), size(r.forgotten_bytes))
        for r in alike(by_module(replayed, replay_baseline(plan)))}
    kept = sorted((r.kept_bytes for r in by_module(replayed, replay_baseline(plan))), reverse=True)
    assert result["sorted"] == [size(n) for n in kept]


@needs_browser
def test_the_check_sees_overlapping_text_and_errors(tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text("<!doctype html><html><head>" + CHECK + "</head><body style='background: #fff'><svg>"
                   "<text x='5' y='20'>one</text><text x='7' y='22'>two</text></svg>"
                   "<p style='color: #999'>pale</p><script>missing();</script></body></html>",
                   encoding="utf-8")
    result, console = browse(bad, tmp_path)
    assert len(result["overlaps"]) == 1
    assert [text for text, _ in result["pale"]] == ["pale"]
    assert result["errors"]
    assert "missing is not defined" in console
