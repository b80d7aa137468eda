"""Time against memory, one line a method (Rotor's figure 3, Rockmate's figures 5 and 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rkmate.show import styles
from rkmate.show.plots import figure, save, styled

_MIB = float(1 << 20)
_COLOURS = ("#c0392b", "#4c9f70", "#8e6fb8", "#f2a541", "#16a2b8", "#8c564b", "#d87ab0", "#7b8794",
            "#9aa61c")
_MARKERS = "sXPv^D<>p"
_TOP = 100
"""Extra time in % above which a method says no more than that it is slow."""


@dataclass(frozen=True)
class Line:
    """One method."""

    name: str
    predicted: tuple[tuple[int, float], ...]
    """Peak in bytes, and time of a step over that without rematerialization; by peak."""
    measured: tuple[tuple[int, float], ...]
    """The same, measured."""
    first: bool
    """Drawn on top of the others."""


def plot(lines: Sequence[Line], baseline_peak_bytes: int, title: str, path: str | Path | None) -> Any:
    """Draw lines; see `rkmate.Comparison.plot`."""
    with styled():
        made, axes = figure(8.2, 4.4)
        top = 1.0
        others = [line for line in lines if not line.first]
        for line in lines:
            look: dict[str, Any] = {"color": styles.FORWARD_LINE, "marker": "o", "linewidth": 2.2,
                                    "zorder": 5}
            if not line.first:
                k = others.index(line)
                look = {"color": _COLOURS[k % len(_COLOURS)],
                        "marker": _MARKERS[(k + k // 9) % len(_MARKERS)], "linewidth": 1.0}
            found, seen = _in_axes(line.predicted), _in_axes(line.measured)
            if not found and not seen:
                continue
            label: str | None = line.name
            if found:
                axes.plot(*zip(*found, strict=True), markersize=4, label=label, alpha=0.85, **look)
                label = None
            if seen:
                axes.plot(*zip(*seen, strict=True), linestyle="none", marker="x", markersize=7,
                          color=look["color"], label=f"{line.name} (measured)")
            top = max([top, *(y for _, y in (*found, *seen) if y <= _TOP)])
        axes.axvline(baseline_peak_bytes / _MIB, color=styles.FAINT, linewidth=0.8, linestyle=":")
        axes.set_xlim(0, baseline_peak_bytes / _MIB * 1.05)
        axes.set_ylim(-0.04 * top, top * 1.1)
        axes.set_xlabel("peak of a step in MiB (dotted: without rematerialization)")
        axes.set_ylabel("extra time in %")
        axes.set_title(title)
        axes.legend(fontsize=7.5, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    save(made, path)
    return made


def _in_axes(points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """MiB, and extra time in %."""
    return [(peak / _MIB, 100 * (ratio - 1)) for peak, ratio in points]
