"""Memory over time, predicted and measured; which block is in memory when; the clocks of a step, next to each
other.

The clocks are *lanes*: computing, copying away, copying back. Below them, how much is away.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rkmate.errors import ArgumentError
from rkmate.ir.plan import PlanData
from rkmate.ir.simulate import Peak
from rkmate.show import styles
from rkmate.show.amounts import size
from rkmate.show.copies import copies_of
from rkmate.show.graphs import block_memory, block_name
from rkmate.show.plots import BESIDE, corners, figure, save, styled, time_unit
from rkmate.show.replay import (
    KIND_NAMES,
    KINDS,
    Occupancy,
    label,
    replay,
    replay_baseline,
    short_path,
    shortened,
)

_MIB = float(1 << 20)
_MOST_ROWS = 40
"""Blocks in the lower picture; of longer chains, every second, third, ... is shown."""
_VISIBLE = 1e-3
"""Share of the peak that a kind needs to be named next to the picture."""
_HIGHEST_OUTLINE = 5
"""Over the budget: a plain step that is still drawn. A higher one would press the rest flat."""


def plot_timeline(plan: PlanData, path: str | Path | None, measured: Peak[Any] | None,
                  title: str) -> Any:
    """See `rkmate.Plan.plot`."""
    replayed = replay(plan)
    every = -(-len(plan.blocks) // _MOST_ROWS)
    rows = list(range(0, len(plan.blocks), every))
    height = max(1.2, 0.24 * len(rows) + 0.7)
    ratios = [3.6, *([1.1] if replayed.copied else []), height]
    with styled():
        made, (top, *middle, bottom) = figure(9.0, sum(ratios), nrows=len(ratios), sharex=True,
                                              height_ratios=ratios)
        draw_memory(top, plan, replayed, measured)
        for axes in middle:
            draw_lanes(axes, replayed)
        draw_blocks(bottom, plan, replayed, rows)
        for axes in (*middle, bottom):
            axes.set_xlim(top.get_xlim())
        for axes in (top, *middle, bottom):
            axes.legend(**BESIDE, **_title_of_legend(axes is top, measured))
        top.set_title(title or (f"{plan.planner}: peak {size(plan.peak_bytes)}, budget "
                                f"{size(plan.budget_bytes)}, time {plan.overhead:+.1%}"))
    save(made, path)
    return made


def draw_memory(axes: Any, plan: PlanData, replayed: Occupancy, measured: Peak[Any] | None) -> None:
    """Draw stacked levels by kind, the step without rematerialization, the budget and the peak."""
    scale, unit = time_unit(replayed.seconds)
    edges, levels = _steps(replayed)
    used = [k for k in range(len(KINDS)) if levels[k].any()]
    axes.stackplot(edges * scale, *(levels[k] / _MIB for k in used), step=None, linewidth=0,
                   colors=[styles.KIND_COLOURS[KINDS[k]] for k in used],
                   labels=[KIND_NAMES[KINDS[k]] if levels[k].max() > replayed.peak * _VISIBLE else
                           "_too little to be seen" for k in used])
    highest, last = max(plan.budget_bytes, replayed.peak), replayed.seconds
    if highest < plan.baseline_peak_bytes <= _HIGHEST_OUTLINE * highest:
        plain = replay_baseline(plan)
        times, kinds = _steps(plain)
        axes.plot(times * scale, kinds.sum(axis=0) / _MIB, color=styles.FAINT, linewidth=0.9,
                  label=f"without rematerialization:\n{size(plain.peak)}")
        highest, last = max(highest, plain.peak), max(last, plain.seconds)
    if measured is not None:
        times, heights = _measured(measured, replayed.seconds)
        axes.step(times * scale, heights / _MIB, where="post", color=styles.MEASURED, linewidth=0.9,
                  label=f"measured: {size(measured.peak)}")
        highest = max(highest, measured.peak)
    top = highest / _MIB * 1.16
    axes.axhline(plan.budget_bytes / _MIB, color=styles.BUDGET, linewidth=1.0, linestyle="--",
                 label=f"budget: {size(plan.budget_bytes)}")
    end = replayed.loss_seconds * scale
    axes.axvline(end, color=styles.INK, linewidth=0.8, linestyle=":")
    gap = replayed.seconds * scale * 0.008
    axes.text(end - gap, top * 0.99, "forward", ha="right", va="top", color=styles.SOFT)
    axes.text(end + gap, top * 0.99, "backward", ha="left", va="top", color=styles.SOFT)
    peak = replayed.moments[replayed.peak_at]
    axes.plot([(peak.start + peak.end) / 2 * scale], [replayed.peak / _MIB], marker="v", markersize=6,
              color=styles.INK, linestyle="none", label=f"peak: {size(replayed.peak)}", clip_on=False)
    axes.set_ylim(0, top)
    axes.set_xlim(0, last * scale)
    axes.set_ylabel("memory in MiB")
    axes.tick_params(labelbottom=True)
    axes.set_xlabel(f"predicted time in {unit}")


def _title_of_legend(memory: bool, measured: Peak[Any] | None) -> dict[str, str]:
    if not memory:
        return {}
    return {"title": "in memory" if measured is None else
            "in memory (the measured step is\nscaled to the predicted time)"}


def draw_blocks(axes: Any, plan: PlanData, replayed: Occupancy, rows: list[int]) -> None:
    """Draw, for each block, when it runs, and how much of the data that its backward may need is in
    memory."""
    scale, unit = time_unit(replayed.seconds)
    whole = block_memory(plan, replayed)[1]
    starts = np.array([m.start for m in replayed.moments])
    ends = np.append(starts[1:], replayed.seconds)
    for row, b in enumerate(rows):
        levels = np.array(replayed.block_bytes(b), dtype=float)
        most = max(float(levels.max(initial=0)), float(whole[b]), 1.0)
        edges, heights = corners(np.ravel(np.column_stack((starts, ends))) * scale,
                                 np.repeat(levels[None, :] / most, 2, axis=1))
        axes.fill_between(edges, row + 0.42, row + 0.42 - 0.8 * heights[0], color=styles.KEPT_LINE,
                          alpha=0.55, linewidth=0)
    place = {b: row for row, b in enumerate(rows)}
    runs: dict[str, list[tuple[float, float, float]]] = {"forward": [], "backward": [], "again": []}
    for m in replayed.moments:
        if m.computation is None:
            continue
        c = replayed.graph.computations[m.computation]
        if c.block in place:
            spans = runs["again" if m.again else replayed.graph.cd.c[m.computation].phase]
            begin = m.start
            if spans and spans[-1][1:] == (m.start, place[c.block]):
                begin = spans.pop()[0]                      # one bar for what runs without a break
            spans.append((begin, m.end, place[c.block]))
    for kind, colour, name in (("forward", styles.FORWARD_LINE, "forward"),
                               ("backward", styles.BACKWARD_LINE, "backward"),
                               ("again", styles.AGAIN, "recomputation")):
        spans = runs[kind]
        if spans:
            axes.barh([r + 0.42 for _, _, r in spans], [(e - s) * scale for s, e, _ in spans],
                      left=[s * scale for s, _, _ in spans], height=0.16, color=colour, label=name,
                      linewidth=0)
    axes.fill_between([], [], color=styles.KEPT_LINE, alpha=0.55, linewidth=0,
                      label="its activations in memory")
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [_row_name(plan, b) for b in rows])
    axes.tick_params(axis="y", length=0)
    axes.axvline(replayed.loss_seconds * scale, color=styles.INK, linewidth=0.8, linestyle=":")
    axes.set_xlabel(f"predicted time in {unit}")
    shown = "" if len(rows) == len(plan.blocks) else f" ({len(rows)} of {len(plan.blocks)} shown)"
    axes.set_title(f"blocks: when they run, and what of them is in memory{shown}", fontsize=9)


def draw_copies(plan: PlanData, path: Path) -> Path:
    """Draw the clocks of computing and copying, below them the memory, and below that the data that is away.
    Raises `ArgumentError` for a plan without copies."""
    replayed = replay(plan)
    if not replayed.copied:
        raise ArgumentError('what is "copies", and the plan copies nothing away')
    save(copies_figure(plan, replayed), path)
    return path


def copies_figure(plan: PlanData, replayed: Occupancy) -> Any:
    """Return the figure of `draw_copies`."""
    with styled():
        made, (lanes, memory, away) = figure(9.0, 7.0, nrows=3, sharex=True, height_ratios=[1.1, 3.6, 1.4])
        draw_memory(memory, plan, replayed, None)
        draw_lanes(lanes, replayed)
        draw_away(away, replayed)
        lanes.set_xlim(memory.get_xlim())
        for axes in (lanes, memory, away):
            axes.legend(**BESIDE)
        lanes.set_title(f"{plan.planner}: peak {size(plan.peak_bytes)}, budget {size(plan.budget_bytes)}, "
                        f"time {plan.overhead:+.1%}")
    return made


def draw_block_schedule(plan: PlanData, block: int, path: Path) -> Path:
    """Draw a table with a block's tensors as rows, and the steps that touch the block as columns, in
    order."""
    replayed = replay(plan)
    made = block_schedule(plan, block, replayed)
    save(made, path)
    return path


def block_schedule(plan: PlanData, block: int, replayed: Occupancy) -> Any:
    """Return the figure of `draw_block_schedule`."""
    g = plan.graph
    columns = [k for k, m in enumerate(replayed.moments) if m.computation is not None
               and g.computations[m.computation].block == block]
    mine = {j for i in g.block_c[block] for j in g.cd.c[i].outputs}
    storages = sorted((j for j in mine if g.cd.d[j].size), key=lambda j: (g.cd.producer[j] or 0, j))
    row = {j: r for r, j in enumerate(storages)}
    with styled():
        made, axes = figure(max(5.0, 0.22 * len(columns) + 4.0), max(2.0, 0.22 * len(row) + 2.6))
        for j, first, last, kind in replayed.spans:
            if j not in row:
                continue
            inside = [x for x, k in enumerate(columns) if first <= k < last]
            if not inside:
                continue
            axes.barh(row[j], inside[-1] - inside[0] + 1, left=inside[0] - 0.5, height=0.72,
                      color=styles.KIND_COLOURS[kind], linewidth=0)
        names, colours = [], []
        for k in columns:
            m = replayed.moments[k]
            assert m.computation is not None
            c = g.computations[m.computation]
            operation = f"{c.operation}, in larger parts" if m.kernel else c.operation
            names.append(shortened(label(short_path(c.path, plan.blocks[block].path), operation), 34))
            forward = m.computation < g.cd.loss
            colours.append(styles.AGAIN_TEXT if m.again else
                           styles.FORWARD_LINE if forward else styles.BACKWARD_LINE)
        axes.set_xticks(range(len(columns)), names, rotation=90)
        for tick, colour in zip(axes.get_xticklabels(), colours, strict=True):
            tick.set_color(colour)
        axes.set_yticks(range(len(storages)),
                        [f"{_maker_label(plan, block, j)}  {size(g.cd.d[j].size)}" for j in storages])
        axes.set_ylim(len(storages) - 0.4, -0.6)
        axes.set_xlim(-0.6, len(columns) - 0.4)
        passed = sum(k < replayed.loss_at for k in columns)
        axes.axvline(passed - 0.5, color=styles.INK, linewidth=0.8, linestyle=":")
        axes.grid(axis="x", color="#eceff1", linewidth=0.5)
        axes.set_axisbelow(True)
        axes.set_title(f"{block_name(plan, block)} {plan.blocks[block].path}: green kept, orange "
                       f"recomputed, {'blue copied back, ' if replayed.copied else ''}purple gradients",
                       fontsize=9)
    return made


def _maker_label(plan: PlanData, block: int, storage: int) -> str:
    maker = plan.graph.cd.producer[storage]
    assert maker is not None                    # the block's own
    c = plan.graph.computations[maker]
    path = short_path(c.path, plan.blocks[block].path)
    return shortened(label(path, plan.graph.cd.d[storage].name), 40)


def _steps(replayed: Occupancy) -> tuple[Any, Any]:
    """Return edges in seconds and, for each kind, the level at each edge: two edges for each step and for
    each wait, during which memory is as the step before left it."""
    times: list[float] = []
    levels: list[tuple[int, ...]] = []
    for before, m in itertools.pairwise((replayed.moments[0], *replayed.moments)):
        if m.waited:
            times += (m.start - m.waited, m.start)
            levels += (before.after, before.after)
        if m.computation is not None or m.bytes[-1]:
            times += (m.start, m.end)
            levels += (m.bytes, m.bytes)
    return corners(np.array(times), np.array(levels, dtype=float).T)


def _measured(measured: Peak[Any], seconds: float) -> tuple[Any, Any]:
    """Return measured levels on the time axis of the predicted step."""
    times = np.array([0.0, *(t for t, _ in measured.timeline)])
    last = times[-1] if times[-1] > 0 else 1.0
    return times / last * seconds, np.array([0.0, *(b for _, b in measured.timeline)])


def _row_name(plan: PlanData, block: int) -> str:
    info = plan.blocks[block]
    path = info.path or "(the model)"
    return f"{shortened(path, 28)}  {info.label}{block}"


LANES = ("computing", "out", "back")
_SINGLE = 40
"""Copies of a direction up to which each is a bar of its own; more are drawn as one where they touch."""
Bars = list[tuple[float, float]]
"""(start, end) in seconds."""


def draw_lanes(axes: Any, replayed: Occupancy) -> None:
    """Draw three rows: when the step computes and when it waits for copies; when it copies away; when it
    copies back."""
    scale, unit = time_unit(replayed.seconds)
    kinds: dict[str, Bars] = {"forward": [], "backward": [], "again": [], "waits": []}
    for m in replayed.moments:
        if m.waited:
            kinds["waits"].append((m.start - m.waited, m.start))
        if m.computation is not None and m.end > m.start:
            phase = replayed.graph.cd.c[m.computation].phase
            kinds["again" if m.again else phase].append((m.start, m.end))
    for kind, colour, name in (("forward", styles.FORWARD_LINE, "forward"),
                               ("backward", styles.BACKWARD_LINE, "backward"),
                               ("again", styles.AGAIN, "recomputation"),
                               ("waits", styles.WAIT, f"waits: {_waits(replayed)}")):
        _bars(axes, 0, joined(kinds[kind]), scale, color=colour, label=name, linewidth=0)
    for row, copies in enumerate((replayed.simulation.copies_out, replayed.simulation.copies_in), 1):
        bars: Bars = [(start, end) for _, start, end in copies]
        single = len(bars) <= _SINGLE
        _bars(axes, row, bars if single else joined(bars), scale, color=styles.AWAY_LINE,
              edgecolor="white", linewidth=0.4 if single else 0, label=_busy(replayed) if row == 1 else None)
    axes.set_yticks(range(len(LANES)), LANES)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(LANES) - 0.5, -0.5)
    axes.axvline(replayed.loss_seconds * scale, color=styles.INK, linewidth=0.8, linestyle=":")
    axes.set_xlim(0, replayed.seconds * scale)
    axes.tick_params(labelbottom=True)
    axes.set_xlabel(f"predicted time in {unit}")


def draw_away(axes: Any, replayed: Occupancy) -> None:
    """Draw how much is away and not in memory, over time."""
    scale, unit = time_unit(replayed.seconds)
    starts = np.array([m.start for m in replayed.moments])
    ends = np.append(starts[1:], replayed.seconds)
    levels = np.array([replayed.away_bytes()], dtype=float) / _MIB
    edges, heights = corners(np.ravel(np.column_stack((starts, ends))) * scale, np.repeat(levels, 2, axis=1))
    axes.fill_between(edges, heights[0], color=styles.AWAY_LINE, alpha=0.55, linewidth=0,
                      label=f"away, not in memory:\n{size(float(levels.max()) * _MIB)} at most")
    axes.axvline(replayed.loss_seconds * scale, color=styles.INK, linewidth=0.8, linestyle=":")
    axes.set_ylim(0, max(float(levels.max()), 1e-6) * 1.1)
    axes.set_xlim(0, replayed.seconds * scale)
    axes.set_ylabel("away in MiB")
    axes.set_xlabel(f"predicted time in {unit}")


def joined(bars: Sequence[tuple[float, float]]) -> Bars:
    """Join bars that touch."""
    result: Bars = []
    for start, end in bars:
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return result


def _bars(axes: Any, row: int, bars: Bars, scale: float, **looks: Any) -> None:
    if bars:
        axes.barh([row] * len(bars), [(end - start) * scale for start, end in bars],
                  left=[start * scale for start, _ in bars], height=0.62, **looks)


def _waits(replayed: Occupancy) -> str:
    scale, unit = time_unit(replayed.simulation.stalled)
    return f"{replayed.simulation.stalled * scale:.3g} {unit}"


def _busy(replayed: Occupancy) -> str:
    copies = copies_of(replayed)
    assert copies is not None                   # something is copied
    return (f"copies: {size(copies.away_bytes)},\n{copies.busy_seconds / copies.step_seconds:.0%} "
            "of the step")
