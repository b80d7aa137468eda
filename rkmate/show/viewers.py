"""A plan in the formats of other viewers: a trace for Perfetto and chrome://tracing, and a snapshot for
PyTorch's memory viewer (https://pytorch.org/memory_viz).

Both are made from the replay of the schedule: predicted times, and the bytes that the plan counts.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rkmate.ir.allocator import SMALL_SEGMENT, Block, CachingAllocator
from rkmate.ir.plan import PlanData
from rkmate.show.amounts import size
from rkmate.show.copies import copies_of
from rkmate.show.page_data import WAIT, rows_of
from rkmate.show.replay import KIND_NAMES, KINDS, WHOLE, Kind, Occupancy, label, replay

Event = dict[str, Any]

# -- Chrome's trace event format: Perfetto, chrome://tracing ---------------------------------------

_PROCESS = 1
_COMPUTES, _OUT, _BACK = 1, 2, 3
"""Threads: the clock of computations, and those of copies away and back."""


def write_chrome_trace(plan: PlanData, path: str | Path) -> Path:
    """Write `chrome_trace` as JSON. Returns the path."""
    path = Path(path)
    path.write_text(json.dumps(chrome_trace(plan), separators=(",", ":")), encoding="utf-8")
    return path


def chrome_trace(plan: PlanData) -> dict[str, Any]:
    """Return a step as a trace: computations and waits, copies away and back, and counters of the memory."""
    replayed = replay(plan)
    about = {"planner": plan.planner, "budget_bytes": plan.budget_bytes, "peak_bytes": plan.peak_bytes,
             "times": "predicted"}
    return {"traceEvents": [*_names(plan, replayed), *_counters(replayed), *_slices(replayed),
                            *_copies(replayed)],
            "displayTimeUnit": "ms", "otherData": about}


def _names(plan: PlanData, replayed: Occupancy) -> Iterator[Event]:
    model = plan.origin.model if plan.origin else "model"
    yield _meta("process_name", 0, f"{model}: a planned training step")
    copies = copies_of(replayed)
    threads = {_COMPUTES: "computing"}
    if copies is not None:
        threads |= {_OUT: f"copies to {copies.place}", _BACK: f"copies back from {copies.place}"}
    for thread, name in threads.items():
        yield _meta("thread_name", thread, name)
        yield {**_meta("thread_sort_index", thread, ""), "args": {"sort_index": thread}}


def _meta(what: str, thread: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": _PROCESS, "tid": thread, "args": {"name": name}}


def _slices(replayed: Occupancy) -> Iterator[Event]:
    g = replayed.graph
    for row in rows_of(replayed):
        if row.what == WAIT:
            yield _slice("waits for a copy", "wait", _COMPUTES, row.start, row.end, {"step": row.step})
        if row.what < 0:
            continue
        c, of = g.cd.c[row.what], g.computations[row.what]
        made = {g.cd.d[j].name: f"{g.shapes[j]}, {size(g.cd.d[j].size)}" for j in c.outputs}
        yield _slice(of.operation, "recomputation" if row.again else c.phase, _COMPUTES, row.start, row.end,
                     {"step": row.step, "module": of.path or WHOLE, "name": c.name, "bytes": sum(row.bytes),
                      "makes": made, **({"kernel": row.kernel} if row.kernel else {})})


def _copies(replayed: Occupancy) -> Iterator[Event]:
    g = replayed.graph
    both = ((_OUT, replayed.simulation.copies_out), (_BACK, replayed.simulation.copies_in))
    for thread, copies in both:
        for j, start, end in copies:
            c = g.computations[g.cd.producer[j] or 0]
            yield _slice(g.cd.d[j].name, "copy", thread, start, end,
                         {"tensor": label(c.path, c.operation), "bytes": g.cd.d[j].size})


def _counters(replayed: Occupancy) -> Iterator[Event]:
    """Yield the level at each step of the schedule, at each wait, and at the end."""
    used = [k for k in range(len(KINDS)) if any(m.bytes[k] for m in replayed.moments)]
    before = replayed.moments[0]
    for m in replayed.moments:
        if m.waited:
            yield from _level(m.start - m.waited, before.after, used)
        yield from _level(m.start, m.bytes, used)
        before = m
    yield from _level(replayed.seconds, before.after, used)


def _level(seconds: float, by_kind: Sequence[int], used: Sequence[int]) -> Iterator[Event]:
    for name, values in (("memory", {"bytes": sum(by_kind)}),
                         ("memory by kind", {KIND_NAMES[KINDS[k]]: by_kind[k] for k in used})):
        yield {"ph": "C", "name": name, "pid": _PROCESS, "ts": _us(seconds), "args": values}


def _slice(name: str, category: str, thread: int, start: float, end: float, args: Event) -> Event:
    return {"ph": "X", "name": name, "cat": category, "pid": _PROCESS, "tid": thread, "ts": _us(start),
            "dur": round(_us(end) - _us(start), 3), "args": args}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


# -- Torch's snapshots of CUDA memory --------------------------------------------------------------

_BASE = 1 << 44
"""The first address: the viewer takes 0 for none."""
_PROTOCOL = 4
"""The viewer's own reader of pickles knows no newer one."""
_OTHER: Kind = "temporaries"
"""Kind that has the viewer's category ``unknown``, without which it draws no categories."""


def write_memory_snapshot(plan: PlanData, path: str | Path) -> Path:
    """Write `memory_snapshot` as a pickle. Returns the path."""
    path = Path(path)
    path.write_bytes(pickle.dumps(memory_snapshot(plan), protocol=_PROTOCOL))
    return path


def memory_snapshot(plan: PlanData) -> dict[str, Any]:
    """Return a step as torch records it on a device: each allocation with its module and operation, and the
    segments that torch's allocator would take."""
    return _History(replay(plan)).snapshot()


class _History:
    """Runs a step through the model of torch's allocator, and notes its events."""

    def __init__(self, replayed: Occupancy) -> None:
        self.replayed = replayed
        self.allocator = CachingAllocator()
        self.events: list[Event] = []
        self.segments: list[tuple[int, int]] = []
        """(address, bytes)."""
        self.held: dict[object, tuple[Block, Event]] = {}
        self.now = 0.0
        self._run()

    def _run(self) -> None:
        first: dict[int, list[tuple[int, Kind]]] = {}
        last: dict[int, list[int]] = {}
        moments = self.replayed.moments
        for span in self.replayed.spans:
            first.setdefault(span.first, []).append((span.storage, span.kind))
            if span.last < len(moments):
                last.setdefault(span.last, []).append(span.storage)
        stays = 0
        temporaries, loss, buffers = map(KINDS.index, ("temporaries", "loss", "buffers"))
        about = [_frame("", 0, KIND_NAMES["buffers"])]
        self._allocate("buffers", moments[0].bytes[buffers], "buffers", about)
        for k, m in enumerate(moments):
            self.now = m.start
            if k and m.bytes[buffers] != moments[k - 1].bytes[buffers]:
                self._free("buffers")
                self._allocate("buffers", m.bytes[buffers], "buffers", about)
            for j in last.get(k, ()):
                self._free(j)
            for j, kind in first.get(k, ()):
                self._allocate(j, self.replayed.graph.cd.d[j].size, kind, self._frames(k, j))
            if k == self.replayed.loss_at:
                stays = moments[k + 1].bytes[loss] if k + 1 < len(moments) else 0
                self._allocate("loss", stays, "loss", self._frames(k, None))
            self._allocate("inside", m.bytes[temporaries], "temporaries", self._frames(k, None))
            self._allocate("inside the loss", m.bytes[loss] - stays, "loss", self._frames(k, None))
            self.now = m.end
            self._free("inside")
            self._free("inside the loss")

    def _frames(self, k: int, storage: int | None) -> list[Event]:
        """Return what stands where a stack trace does: the tensor, and below it the operation that runs."""
        g, i = self.replayed.graph, self.replayed.moments[k].computation
        frames = []
        if storage is not None:
            maker = g.cd.producer[storage]
            path = "" if maker is None else g.computations[maker].path
            frames.append(_frame(path, k, f"{g.cd.d[storage].name} {g.shapes[storage]}"))
        if i is not None:
            c = g.computations[i]
            phase = "recomputation" if self.replayed.moments[k].again else g.cd.c[i].phase
            frames.append(_frame(c.path, k, f"{c.operation} ({phase})"))
        return frames or [_frame("", k, KIND_NAMES["loss"])]

    def _allocate(self, key: object, bytes: int, kind: Kind, frames: list[Event]) -> None:
        before = self.allocator.reserved
        block = self.allocator.allocate(bytes)
        if block is None:
            return
        more = self.allocator.reserved - before
        if more:
            self.segments.append((_BASE + block.address, more))
            self._note("segment_alloc", _BASE + block.address, more, frames, category="unknown")
        category = "unknown" if kind == _OTHER else KIND_NAMES[kind]
        event = self._note("alloc", _BASE + block.address, bytes, frames, category=category)
        self.held[key] = block, event

    def _free(self, key: object) -> None:
        block, event = self.held.pop(key, (None, {}))
        if block is None:
            return
        for action in ("free_requested", "free_completed"):
            self._note(action, event["addr"], event["size"], event["frames"])
        self.allocator.free(block)

    def _note(self, action: str, address: int, bytes: int, frames: list[Event], **more: str) -> Event:
        event = {"action": action, "addr": address, "size": bytes, "stream": 0, "frames": frames,
                 "time_us": round(self.now * 1e6), **more}
        self.events.append(event)
        return event

    def snapshot(self) -> dict[str, Any]:
        """Return the events, and the segments as they are at the end of the step."""
        alive = sorted(self.held.values(), key=lambda held: held[0].address)
        segments = []
        for address, total in sorted(self.segments):
            blocks, at = [], address
            mine = [(b, e) for b, e in alive if address <= e["addr"] < address + total]
            for block, event in mine:
                blocks += [_free_block(at, event["addr"])] if at < event["addr"] else []
                blocks.append({"address": event["addr"], "size": block.size, "requested_size": event["size"],
                               "state": "active_allocated", "frames": event["frames"]})
                at = event["addr"] + block.size
            blocks += [_free_block(at, address + total)] if at < address + total else []
            active = sum(b.size for b, _ in mine)
            segments.append({
                "device": 0, "address": address, "total_size": total, "allocated_size": active,
                "active_size": active, "requested_size": sum(e["size"] for _, e in mine), "stream": 0,
                "segment_type": "small" if total == SMALL_SEGMENT else "large", "segment_pool_id": (0, 0),
                "is_expandable": False, "frames": [], "blocks": blocks})
        return {"segments": segments, "device_traces": [self.events], "allocator_settings": {},
                "external_annotations": []}


def _frame(path: str, step: int, name: str) -> Event:
    return {"filename": path or WHOLE, "line": step, "name": name}


def _free_block(start: int, end: int) -> Event:
    return {"address": start, "size": end - start, "requested_size": 0, "state": "inactive", "frames": []}
