"""The clocks of a step side by side: computing, copying away, copying back; and how much is away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rkmate.show import styles
from rkmate.show.amounts import size
from rkmate.show.copies import copies_of
from rkmate.show.plots import corners, time_unit
from rkmate.show.replay import Occupancy

_MIB = float(1 << 20)
LANES = ("computing", "out", "back")
_SINGLE = 40
"""Copies of a direction up to which each is a bar of its own; more are drawn as one where they touch."""
Bars = list[tuple[float, float]]
"""(start, end) in seconds."""


def draw_lanes(axes: Any, replayed: Occupancy) -> None:
    """Three rows: when the step computes and when it waits for copies; when it copies away; when back."""
    scale, unit = time_unit(replayed.seconds)
    kinds: dict[str, Bars] = {"forward": [], "backward": [], "again": [], "waits": []}
    for m in replayed.moments:
        if m.waited:
            kinds["waits"].append((m.start - m.waited, m.start))
        if m.computation is not None and m.end > m.start:
            phase = replayed.graph.computations[m.computation].phase
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
    """How much is away and not in memory, over time."""
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
    """Bars that touch as one."""
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
