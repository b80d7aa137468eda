"""What notebooks show for a plan and a curve, and when a kernel sees progress."""

from __future__ import annotations

import io
import pickle
import re
import sys
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest

from rkmate.show.amounts import size
from rkmate.show.notebook import curve_svg, memory_svg
from rkmate.show.replay import KIND_NAMES, KINDS, replay
from rkmate.support.progress import Progress
from tests.show.models import PLANS, curve, in_one_process, long_plan, wrapped
from tests.show.sending import sent_plan

pytestmark = in_one_process
SVG = "{http://www.w3.org/2000/svg}"


def picture(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(html[html.index("<svg"):html.index("</svg>") + len("</svg>")])


@pytest.mark.parametrize("name", [*PLANS, "slow"])
def test_the_picture_of_memory_reaches_the_peak(name: str) -> None:
    plan = PLANS[name]() if name in PLANS else sent_plan(name)
    replayed = replay(plan)
    drawn = picture(memory_svg(plan))
    areas = [p for p in drawn.iter(f"{SVG}path") if p.get("fill")]
    assert [p[0].text for p in areas] == [
        KIND_NAMES[kind] for k, kind in enumerate(KINDS) if any(m.bytes[k] for m in replayed.moments)]
    heights = [float(y) for p in areas for y in re.findall(r"[ML]?[\d.]+ ([\d.]+)H", p.get("d", ""))]
    (budget,) = (float(found[1]) for p in drawn.iter(f"{SVG}path") if p.get("stroke-dasharray") == "6 4"
                 and (found := re.match(r"M\d+ ([\d.]+)H", p.get("d", ""))))
    floor = max(heights)
    part = (floor - min(heights)) / (floor - budget)
    assert part == pytest.approx(plan.peak_bytes / plan.budget_bytes, abs=0.01)


def test_a_plan_shows_its_picture_its_figures_and_its_blocks() -> None:
    html = wrapped().plan._repr_html_()
    assert "<script" not in html
    assert size(wrapped().plan.peak_bytes) in html
    assert "<details" not in html
    assert len(html) < 60_000
    deep = long_plan()
    assert f"<summary>{len(deep.blocks)} blocks</summary>" in deep._repr_html_()
    assert len(memory_svg(deep)) < 60_000


def test_a_curve_shows_a_point_for_each_plan() -> None:
    plans = curve().with_point("a <checkpoint>", 1 << 20, 1.3 * curve()[0].baseline_seconds)
    drawn = picture(plans._repr_html_())
    circles = list(drawn.iter(f"{SVG}circle"))
    assert len(circles) == len(plans)
    # More memory, less time: further to the right, further down.
    places = [(float(c.get("cx", 0)), float(c.get("cy", 0))) for c in circles]
    assert places == sorted(places)
    assert [y for _, y in places] == sorted(y for _, y in places)
    assert "a <checkpoint>" in {t.text for t in drawn.iter(f"{SVG}text")}
    assert "<script" not in curve_svg(plans, plans.points)


def test_a_figure_shows_itself_without_pyplot() -> None:
    for figure in (wrapped().plan.plot(), curve().plot()):
        assert figure._repr_png_().startswith(b"\x89PNG")
        assert pickle.loads(pickle.dumps(figure))._repr_png_() == figure._repr_png_()


class Kernel:
    """A notebook's IPython, as far as progress needs it: what each cell shows, by the display's number."""

    def __init__(self, shell: object) -> None:
        self.shell = shell
        self.lines: list[list[str]] = []

    def get_ipython(self) -> object:
        return self.shell

    def display(self, data: dict[str, str], *, raw: bool, display_id: bool) -> SimpleNamespace:
        assert raw and display_id
        mine = [data["text/plain"]]
        self.lines.append(mine)
        return SimpleNamespace(update=lambda data, raw: mine.append(data["text/plain"]))


@pytest.mark.parametrize(("shell", "shown"), [
    (SimpleNamespace(kernel=object()), True), (SimpleNamespace(), False), (None, False)])
def test_progress_is_shown_in_a_kernel(shell: object, shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`shell`: a notebook's, a terminal's IPython, none."""
    kernel, out = Kernel(shell), io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setattr("rkmate.support.progress.DELAY", 0.0)
    for name in ("IPython", "IPython.display"):
        monkeypatch.setitem(sys.modules, name, kernel)
    progress = Progress(True)
    for stage in ("capturing", "solving"):
        with progress.stage(stage, 4) as tick:
            tick(2)
    assert out.getvalue() == ""
    assert len(kernel.lines) == shown, "both stages in one place"
    if shown:
        assert all(any(stage in line for line in kernel.lines[0]) for stage in ("capturing", "solving"))
        assert kernel.lines[0][-1] == "", "and at the end it is empty"
    with Progress(False).stage("capturing", 4):
        pass
    assert len(kernel.lines) == shown
