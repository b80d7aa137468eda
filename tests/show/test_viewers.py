"""A plan as a trace for Perfetto, and as a snapshot for PyTorch's memory viewer."""

from __future__ import annotations

import itertools
import json
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz as viewer

import rkmate
from rkmate.show.replay import KIND_NAMES, KINDS, WHOLE, replay
from tests.show.models import PLANS, in_one_process, wrapped
from tests.show.sending import sent_plan

pytestmark = in_one_process
NAMES = [*PLANS, "slow", "fast", "some"]
READ_BY_THE_VIEWER = {
    "APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPUT", "BINUNICODE", "DICT",
    "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LIST", "LONG1", "LONG_BINGET", "LONG_BINPUT", "MARK",
    "MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE", "PROTO", "SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP",
    "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
"""Opcodes of pickles that the script of PyTorch's viewer reads."""


def plan_of(name: str) -> rkmate.Plan:
    return PLANS[name]() if name in PLANS else sent_plan(name)


def trace_of(plan: rkmate.Plan, folder: Path) -> dict[str, Any]:
    path = plan.to_chrome_trace(folder / "step.json")
    trace: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return trace


def of(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [e for e in trace["traceEvents"] if e["ph"] == phase]


@pytest.mark.parametrize("name", NAMES)
def test_the_memory_counter_is_the_plans_curve(name: str, tmp_path: Path) -> None:
    plan = plan_of(name)
    replayed = replay(plan)
    trace = trace_of(plan, tmp_path)
    counter = [(e["ts"], e["args"]["bytes"]) for e in of(trace, "C") if e["name"] == "memory"]
    assert [ts for ts, _ in counter] == sorted(ts for ts, _ in counter)
    assert max(n for _, n in counter) == plan.peak_bytes

    def level(ts: float) -> int:
        return next(n for at, n in reversed(counter) if at <= ts)
    for k, m in enumerate(replayed.moments):
        if m.end - m.start > 1e-8:
            assert level((m.start + m.end) / 2 * 1e6) == replayed.simulation.timeline[k]
    # One event for each step of the schedule, in order; others at waits and at the end.
    rest = iter(n for _, n in counter)
    assert all(n in rest for n in replayed.simulation.timeline)
    assert len(counter) == len(replayed.moments) + sum(m.waited > 0 for m in replayed.moments) + 1
    kinds = [e["args"] for e in of(trace, "C") if e["name"] == "memory by kind"]
    assert [sum(args.values()) for args in kinds] == [n for _, n in counter]
    assert set(kinds[0]) <= set(KIND_NAMES.values())


@pytest.mark.parametrize("name", NAMES)
def test_both_clocks_are_in_the_trace(name: str, tmp_path: Path) -> None:
    plan = plan_of(name)
    replayed = replay(plan)
    trace = trace_of(plan, tmp_path)
    slices = of(trace, "X")
    threads = {e["tid"]: e["args"]["name"] for e in of(trace, "M") if e["name"] == "thread_name"}
    assert {e["tid"] for e in slices} <= set(threads)
    assert threads[1] == "computing"
    for tid in threads:
        mine = [(e["ts"], e["dur"]) for e in slices if e["tid"] == tid]
        assert all(a + d <= b + 1e-6 for (a, d), (b, _) in itertools.pairwise(mine))
        assert all(d >= 0 for _, d in mine)
    computing = [e for e in slices if e["tid"] == 1 and e["cat"] != "wait"]
    runs = [m for m in replayed.moments if m.computation is not None]
    assert [e["name"] for e in computing] == [plan.graph.computations[m.computation].operation for m in runs
                                              if m.computation is not None]
    assert [e["args"]["module"] for e in computing] == [plan.graph.computations[m.computation].path or WHOLE
                                                        for m in runs if m.computation is not None]
    assert sum(e["cat"] == "recomputation" for e in computing) == sum(m.again for m in runs)
    last = max(e["ts"] + e["dur"] for e in computing)
    assert last == pytest.approx(plan.step_seconds * 1e6, abs=2e-3)
    for tid, copies in ((2, replayed.simulation.copies_out), (3, replayed.simulation.copies_in)):
        there = [(e["name"], e["ts"]) for e in slices if e["tid"] == tid]
        assert there == [(plan.graph.cd.d[j].name, pytest.approx(start * 1e6, abs=1e-3))
                         for j, start, _ in copies]
    waits = sum(e["dur"] for e in slices if e["cat"] == "wait")
    assert waits == pytest.approx(replayed.simulation.stalled * 1e6, abs=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_a_snapshot_replays_to_the_peak(name: str, tmp_path: Path) -> None:
    plan = plan_of(name)
    snapshot = pickle.loads(plan.to_memory_snapshot(tmp_path / "step.pickle").read_bytes())
    (events,) = snapshot["device_traces"]
    alive: dict[int, int] = {}
    level = peak = 0
    for e in events:
        if e["action"] == "alloc":
            assert e["addr"] not in alive
            alive[e["addr"]] = e["size"]
            level += e["size"]
        elif e["action"] == "free_completed":
            level -= alive.pop(e["addr"])
        peak = max(peak, level)
    assert peak == plan.peak_bytes
    assert level == sum(replay(plan).moments[-1].after)
    held = {b["address"]: b["requested_size"] for s in snapshot["segments"] for b in s["blocks"]
            if b["state"] == "active_allocated"}
    assert held == alive
    for s in snapshot["segments"]:
        assert sum(b["size"] for b in s["blocks"]) == s["total_size"]
        assert [b["address"] for b in s["blocks"]] == sorted(b["address"] for b in s["blocks"])
    assert sum(e["size"] for e in events if e["action"] == "segment_alloc") == \
        sum(s["total_size"] for s in snapshot["segments"])


def test_a_snapshot_names_modules_and_kinds(tmp_path: Path) -> None:
    plan = wrapped().plan
    snapshot = pickle.loads(plan.to_memory_snapshot(tmp_path / "step.pickle").read_bytes())
    events = [e for e in snapshot["device_traces"][0] if e["action"] == "alloc"]
    paths = {f["filename"] for e in events for f in e["frames"]}
    assert {c.path or WHOLE for c in plan.graph.computations if c.block >= 0} <= paths
    used = {KIND_NAMES[kind] for k, kind in enumerate(KINDS) if any(m.bytes[k] for m in replay(plan).moments)}
    assert {e["category"] for e in events} == used - {KIND_NAMES["temporaries"]} | {"unknown"}
    again = [e for e in events if any(f["name"].endswith("(recomputation)") for f in e["frames"])]
    assert again


@pytest.mark.parametrize("name", ["half", "loss outside", "slow"])
def test_torchs_viewer_reads_a_snapshot(name: str, tmp_path: Path) -> None:
    plan = plan_of(name)
    content = plan.to_memory_snapshot(tmp_path / "step.pickle").read_bytes()
    assert {code.name for code, _, _ in pickletools.genops(content)} <= READ_BY_THE_VIEWER
    assert content[:2] == b"\x80\x04"
    snapshot = pickle.loads(content)
    assert f"segments: {len(snapshot['segments'])}" in viewer.segsum(snapshot)
    text = viewer.trace(snapshot)
    assert text.count("cudaMalloc") == len(snapshot["segments"])
    allocated = sum(e["action"] == "alloc" for e in snapshot["device_traces"][0])
    assert text.count(" = ") == allocated + len(snapshot["segments"])
    assert "MemoryViz.js" in viewer.trace_plot(snapshot)
    assert "Allocator State History" in viewer.segment_plot(snapshot)
