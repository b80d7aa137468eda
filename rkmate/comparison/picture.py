"""Time against memory, one line a method (Rotor's figure 3, Rockmate's figures 5 and 6)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rkmate.comparison.table import DEFAULT, Comparison
from rkmate.errors import ArgumentError
from rkmate.show import styles
from rkmate.show.plots import figure, save, styled

_MIB = float(1 << 20)
_COLOURS = ("#c0392b", "#4c9f70", "#8e6fb8", "#f2a541", "#16a2b8", "#8c564b", "#d87ab0", "#7b8794",
            "#9aa61c")
_MARKERS = "sXPv^D<>p"
_TOP = 100
"""Extra time in % above which a method says no more than that it is slow."""


def plot(comparison: Comparison, path: str | Path | None, title: str,
         methods: Sequence[str] | None) -> Any:
    """See `Comparison.plot`."""
    names = list(comparison.methods if methods is None else methods)
    unknown = [n for n in names if n not in comparison.methods]
    if unknown:
        raise ArgumentError(f"methods names {unknown[0]!r}, which is not in this comparison; it has "
                            f"{', '.join(comparison.methods)}")
    with styled():
        made, axes = figure(8.2, 4.4)
        top = 1.0
        others = [n for n in names if n != DEFAULT]
        for name in names:
            k = others.index(name) if name in others else 0
            look: dict[str, Any] = {"color": styles.FORWARD_LINE, "marker": "o", "linewidth": 2.2,
                                    "zorder": 5}
            if name != DEFAULT:
                look = {"color": _COLOURS[k % len(_COLOURS)],
                        "marker": _MARKERS[(k + k // 9) % len(_MARKERS)], "linewidth": 1.0}
            rows = comparison.of(name)
            found = sorted((r.peak_bytes / _MIB, 100 * (r.time_ratio - 1)) for r in rows
                           if r.peak_bytes is not None and r.time_ratio is not None)
            seen = [(r.measured_peak_bytes / _MIB, 100 * (r.measured_ratio - 1)) for r in rows
                    if r.measured_peak_bytes is not None and r.measured_ratio is not None]
            if not found and not seen:
                continue
            label: str | None = name
            if found:
                axes.plot(*zip(*found, strict=True), markersize=4, label=label, alpha=0.85, **look)
                label = None
            if seen:
                axes.plot(*zip(*seen, strict=True), linestyle="none", marker="x", markersize=7,
                          color=look["color"], label=f"{name} (measured)")
            top = max([top, *(y for _, y in (*found, *seen) if y <= _TOP)])
        axes.axvline(comparison.baseline_peak_bytes / _MIB, color=styles.FAINT, linewidth=0.8,
                     linestyle=":")
        axes.set_xlim(0, comparison.baseline_peak_bytes / _MIB * 1.05)
        axes.set_ylim(-0.04 * top, top * 1.1)
        axes.set_xlabel("peak of a step in MiB (dotted: without rematerialization)")
        axes.set_ylabel("extra time in %")
        axes.set_title(title or f"{comparison.model}, {comparison.costs} costs")
        axes.legend(fontsize=7.5, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    save(made, path)
    return made
