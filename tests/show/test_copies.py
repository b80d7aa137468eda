"""Plans that copy data away and back, as they are shown: in words, figures and pictures."""

from __future__ import annotations

import datetime
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

import rkmate
from rkmate.cli.commands import as_json
from rkmate.ir.schedule import CopyOut
from rkmate.ir.simulate import simulate
from rkmate.show import report
from rkmate.show.amounts import duration, size
from rkmate.show.copies import block_sent, copied_rows, copies_of
from rkmate.show.curve import Curve
from rkmate.show.graphs import block_graph, chain_graph
from rkmate.show.replay import KIND_NAMES, KINDS, replay, replay_baseline
from rkmate.show.report import source_html
from rkmate.show.timeline import LANES, copies_figure, joined
from rkmate.show.words import by_module
from tests.show.models import curve, in_one_process, wrapped
from tests.show.sending import BUFFERS, PLACE, sent_plan

pytestmark = in_one_process

SENT = ["slow", "fast", "some"]
MIB = 1 << 20


def legend(axes: Any) -> list[str]:
    return [t.get_text() for t in axes.get_legend().get_texts()]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "fast")) for n in SENT])
def test_levels_are_the_simulators(name: str) -> None:
    plan = sent_plan(name)
    judged = simulate(plan.graph.cd, plan.schedule)
    replayed = replay(plan)
    assert tuple(m.total for m in replayed.moments) == judged.timeline
    assert {m.bytes[KINDS.index("buffers")] for m in replayed.moments} == {BUFFERS}
    assert sum(plan.graph.cd.d[j].size for j in replayed.alive_at_loss) + BUFFERS == judged.saved
    assert sum(t.bytes for t in replayed.peak_tensors) == plan.peak_bytes == replayed.peak
    assert [t.bytes for t in replayed.peak_tensors if t.kind == "buffers"] == [BUFFERS]
    assert any(m.bytes[KINDS.index("back")] for m in replayed.moments)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "fast")) for n in SENT])
def test_moments_follow_the_clocks(name: str) -> None:
    plan = sent_plan(name)
    replayed = replay(plan)
    last = 0.0
    for m in replayed.moments:
        assert m.start == pytest.approx(last + m.waited) and m.end >= m.start
        last = m.end
    assert last == replayed.simulation.seconds == plan.step_seconds
    assert sum(m.waited for m in replayed.moments) == pytest.approx(replayed.simulation.stalled)
    computing = sum(m.end - m.start for m in replayed.moments)
    assert computing == pytest.approx(plan.schedule.seconds(plan.graph.cd))
    copies = copies_of(replayed)
    assert copies is not None and copies.waits == (name == "slow")


@pytest.mark.parametrize("name", SENT)
def test_a_storage_is_there_or_away(name: str) -> None:
    plan = sent_plan(name)
    replayed = replay(plan)
    assert {j for j, _, _ in replayed.absences} == replayed.copied == plan.schedule.copied
    for j, first, last in replayed.absences:
        spans = [s for s in replayed.spans if s.storage == j]
        assert [s.kind for s in spans if s.last == first] == ["kept"]
        assert [s.kind for s in spans if s.first == last] == ["back"]
        assert all(s.last <= first or last <= s.first for s in spans)
    levels = replayed.away_bytes()
    assert levels[0] == levels[-1] == 0
    assert max(levels) == levels[replayed.loss_at] == replayed.simulation.away
    assert replayed.away_at_loss == replayed.copied


@pytest.mark.parametrize("name", SENT)
def test_modules_and_blocks_say_what_they_send(name: str) -> None:
    plan = sent_plan(name)
    replayed, baseline = replay(plan), replay_baseline(plan)
    rows = by_module(replayed, baseline)
    assert sum(r.away_bytes for r in rows) == replayed.simulation.away
    assert sum(r.away_bytes + r.kept_bytes + r.forgotten_bytes for r in rows) >= \
        sum(plan.graph.cd.d[j].size for j in baseline.alive_at_loss)
    assert any(r.forgotten_bytes for r in rows) == (name == "some")
    assert sum(block_sent(plan, replayed).values()) == replayed.simulation.away


def test_busy_is_what_either_direction_takes() -> None:
    for name in SENT:
        copies = copies_of(replay(sent_plan(name)))
        assert copies is not None
        assert max(copies.out_seconds, copies.in_seconds) <= copies.busy_seconds + 1e-12
        assert copies.busy_seconds <= copies.out_seconds + copies.in_seconds + 1e-12
        assert copies.out_seconds == pytest.approx(copies.link.seconds_out(copies.away_bytes))
        assert copies.in_seconds == pytest.approx(copies.link.seconds_in(copies.back_bytes))
    assert copies_of(replay(wrapped().plan)) is None


@pytest.mark.parametrize("name", SENT)
def test_words_say_what_is_sent_and_what_is_waited_for(name: str) -> None:
    plan = sent_plan(name)
    copies = copies_of(replay(plan))
    assert copies is not None
    text = plan.explain()
    assert f"{copies.tensors} tensors ({size(copies.away_bytes)}) are copied to {PLACE} in the forward " \
        "and back in the backward; the link is busy " in text
    waits = f"The step waits {duration(copies.stalled)} for them."
    assert (waits in text) == (name == "slow") == ("The step waits for no copy." not in text)
    assert ("aiting for copies adds" in text) == (name == "slow")
    assert ("Nothing is computed twice." in text) == (name != "some")
    assert f"{size(copies.away_bytes)} are away" in text
    assert "  " not in text
    head = next(line for line in str(plan).splitlines() if line.split()[:1] == ["block"]).split()
    assert head[-2:] == ["sends", "redoes"]
    fact = rf"sent away +{copies.tensors} tensors, {size(copies.away_bytes)}, to {PLACE}"
    assert re.search(fact, str(plan))
    assert plan._repr_html_().count(">sends<") == 1


def test_a_link_that_is_not_used_is_said_to_be() -> None:
    slow, whole = sent_plan("none"), sent_plan("whole")
    assert f"Nothing is sent to {PLACE}: no faster plan with copies was found." in slow.explain()
    assert f"Nothing is sent to {PLACE}: all that the backward reads fits into the budget." in whole.explain()
    assert f"nothing, to {PLACE}\n" in str(slow)
    assert "sends" not in str(slow)
    assert "sent away" not in str(wrapped().plan) and "sent to" not in wrapped().plan.explain()


def test_the_plan_has_a_row_for_its_clocks(tmp_path: Path) -> None:
    plan = sent_plan("slow")
    figure = plan.plot(tmp_path / "time.svg")
    ElementTree.parse(tmp_path / "time.svg")
    memory, lanes, _ = figure.axes
    assert KIND_NAMES["back"] in legend(memory)
    assert tuple(t.get_text() for t in lanes.get_yticklabels()) == LANES
    assert [text.partition(":")[0] for text in legend(lanes)] == ["forward", "backward", "waits", "copies"]
    assert len(wrapped().plan.plot().axes) == 2


@pytest.mark.parametrize("name", SENT)
def test_both_clocks_are_drawn_with_the_memory_beneath(name: str) -> None:
    plan = sent_plan(name)
    replayed = replay(plan)
    lanes, memory, away = copies_figure(plan, replayed).axes
    scale = 1e3 if replayed.seconds >= 1e-3 else 1e6
    found: dict[str, float] = {}
    for bars in lanes.containers:
        row = round(bars[0].get_y() + bars[0].get_height() / 2)
        what = LANES[row] if row else bars.get_label().partition(":")[0]
        found[what] = found.get(what, 0.0) + sum(bar.get_width() for bar in bars) / scale
    copies = copies_of(replayed)
    assert copies is not None
    assert found.pop("out") == pytest.approx(copies.out_seconds)
    assert found.pop("back") == pytest.approx(copies.in_seconds)
    assert found.pop("waits", 0.0) == pytest.approx(copies.stalled)
    assert sum(found.values()) == pytest.approx(plan.schedule.seconds(plan.graph.cd))
    assert max(v for path in away.collections[0].get_paths() for v in path.vertices[:, 1]) == \
        pytest.approx(copies.away_bytes / MIB)
    highest = max(v for c in memory.collections for path in c.get_paths() for v in path.vertices[:, 1])
    assert highest == pytest.approx(plan.peak_bytes / MIB)


def test_bars_that_touch_are_one() -> None:
    assert joined([(0, 1), (1, 2), (3, 4), (3.5, 3.6), (4, 5)]) == [(0, 2), (3, 5)]
    assert joined([]) == []


def test_copies_are_drawn_to_a_file_where_there_are_any(tmp_path: Path) -> None:
    path = sent_plan("fast").draw(tmp_path / "copies.svg", "copies")
    ElementTree.parse(path)
    with pytest.raises(rkmate.ArgumentError, match="copies nothing away"):
        wrapped().plan.draw(tmp_path / "none.svg", "copies")
    with pytest.raises(rkmate.ArgumentError, match="no graph"):
        sent_plan("fast").draw(tmp_path / "copies.dot", "copies")


def test_graphs_show_what_is_sent() -> None:
    plan = sent_plan("slow")
    replayed = replay(plan)
    sent = block_sent(plan, replayed)
    chain = chain_graph(plan, replayed).source
    assert chain.count("sends ") == sum(bool(n) for b, n in sent.items() if b >= 0)
    block = block_graph(plan, 1, replayed).source
    assert "data copied away and back" in block and "sent away" in block
    plain = wrapped().plan
    assert "copied away" not in block_graph(plain, 1, replay(plain)).source


def test_the_report_says_what_is_away_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "has_dot", lambda: False)
    plan = sent_plan("some")
    text = plan.report(tmp_path / "a.html", date=datetime.date(2026, 2, 3)).read_text()
    section = text[text.index('id="away"'):text.index('id="chain"')]
    rows = copied_rows(replay(plan))
    assert len(rows) == 5
    found = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in section.split("</tr>")[1:-1]]
    assert [tuple(row) for row in found] == rows
    assert all(float(r[2]) <= float(r[3]) <= float(r[4]) <= float(r[5]) for r in rows)
    assert "copied away while the step computes" in text
    none = "".join(report._away(replay(sent_plan("none"))))
    assert "no faster plan with copies was found" in none and "<table" not in none


def test_copies_in_the_source_are_marked() -> None:
    html = source_html("def forward(env):\n    env.copy_out('a')\n    env.leave('a')\n    f_1(env)")
    assert re.findall(r'span class="(\w+)">\s*([^<\s]+)', html) == \
        [("head", "def"), ("copy", "env.copy_out(&#x27;a&#x27;)"), ("copy", "env.leave(&#x27;a&#x27;)")]


def test_a_curve_says_which_plans_send() -> None:
    plans = Curve((*curve()[:2], sent_plan("slow"))).with_point("checkpoint", MIB, 1.0)
    lines = str(plans).splitlines()
    assert "sent away" in lines[0] and size(replay(plans[2]).simulation.away) in lines[3]
    assert len({line.rindex(word) for line, word in
                zip(lines[1:4], (duration(p.step_seconds) for p in plans), strict=True)}) == 1
    assert plans._repr_html_().count("<th ") == 5
    assert "with copies away and back" in legend(plans.plot().axes[0])
    assert "sent away" not in str(curve())


def test_a_saved_plan_brings_its_copies_back(tmp_path: Path) -> None:
    plan = sent_plan("slow")
    plan.save(tmp_path / "plan.json")
    loaded = rkmate.Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.graph.cd.link == plan.graph.cd.link
    assert any(isinstance(s, CopyOut) for s in loaded.schedule.steps)
    assert loaded.explain() == plan.explain()


def test_json_has_the_figures() -> None:
    plan = sent_plan("slow")
    found = as_json(plan)["offload"]
    judged = replay(plan).simulation
    assert (found["place"], found["away_bytes"]) == (PLACE, judged.away)
    assert found["stalled_seconds"] == judged.stalled
    assert found["tensors"] == len(judged.copies_out)
    assert "offload" not in as_json(wrapped().plan)


def test_a_curve_is_drawn_beside_one_that_sends() -> None:
    figure = Curve((sent_plan("fast"),)).plot(beside={"recomputation alone": curve().plans})
    line = next(line for line in figure.axes[0].lines if line.get_label() == "recomputation alone")
    assert sorted(line.get_xdata()) == sorted(p.peak_bytes / MIB for p in curve())
