"""Time against memory, one line a method (Rotor's figure 3, Rockmate's figures 5 and 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rkmate.show import styles
from rkmate.show.plots import BESIDE, figure, save, styled
from rkmate.show.styles import look_of

_MIB = float(1 << 20)
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
    """Drawn broad and below the others: where they coincide, both are seen."""


def plot(lines: Sequence[Line], baseline_peak_bytes: int, title: str, path: str | Path | None) -> Any:
    """Draw lines; see `rkmate.Comparison.plot`."""
    with styled():
        made, axes = figure(8.2, 4.4)
        top = 1.0
        for line in lines:
            found, seen = _in_axes(line.predicted), _in_axes(line.measured)
            look = look_of(line.name).of_plot
            # A line without points brings the name of a method that was only measured.
            if found or seen:
                axes.plot(*zip(*found, strict=True) if found else ((), ()), label=line.name,
                          markersize=9 if line.first else 5, linewidth=3.5 if line.first else 1.2,
                          zorder=1.9 if line.first else 2.1, **look)
            if seen:
                axes.plot(*zip(*seen, strict=True), **{**look, "linestyle": "none"}, markersize=7,
                          markerfacecolor="white", zorder=6)
            top = max([top, *(y for _, y in (*found, *seen) if y <= _TOP)])
        if any(line.measured for line in lines):
            axes.plot([], [], color=styles.INK, marker="o", markerfacecolor="white", markersize=7,
                      linestyle="none", label="hollow: measured")
        axes.axvline(baseline_peak_bytes / _MIB, color=styles.FAINT, linewidth=0.8, linestyle=":")
        axes.set_xlim(0, baseline_peak_bytes / _MIB * 1.05)
        axes.set_ylim(-0.04 * top, top * 1.1)
        axes.set_xlabel("peak of a step in MiB (dotted: without rematerialization)")
        axes.set_ylabel("extra time in %")
        axes.set_title(title)
        axes.legend(**BESIDE, handlelength=3.5)
    save(made, path)
    return made


def _in_axes(points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """MiB, and extra time in %."""
    return [(peak / _MIB, 100 * (ratio - 1)) for peak, ratio in points]
