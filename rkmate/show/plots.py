"""Figures by matplotlib, which is optional and imported when a picture is asked for; time against memory."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rkmate.errors import ArgumentError, MissingExtra
from rkmate.ir.plan import PlanData
from rkmate.show import styles
from rkmate.show.amounts import size

_SUFFIXES = (".svg", ".png", ".pdf")
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "rkmate", "font.size": 9.0, "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"],
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#7b8794",
    "axes.labelcolor": "#1f2933", "text.color": "#1f2933", "xtick.color": "#52606d",
    "ytick.color": "#52606d", "axes.titlesize": 10.0, "axes.titlelocation": "left",
    "legend.frameon": False, "figure.facecolor": "white", "hatch.linewidth": 0.5,
}

BESIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "alignment": "left"}
"""Place of a legend that would hide the picture."""


def figure(width: float, height: float, **subplots: Any) -> tuple[Any, Any]:
    """Return a figure of its own (no global state) and its axes. Sizes in inches. A notebook shows it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("pictures of time and memory need matplotlib: "
                           'pip install "rkmate[plots]"') from error
    made: Any = Figure(figsize=(width, height), layout="constrained")
    # matplotlib tells notebooks how to show a figure when `pyplot` is imported, which needs global state.
    made._repr_png_ = partial(_png, made)
    return made, made.subplots(**subplots)


def _png(made: Any) -> bytes:
    buffer = io.BytesIO()
    with styled():
        made.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()


@contextmanager
def styled() -> Iterator[None]:
    """Draw in this package's style inside the context."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtra("pictures of time and memory need matplotlib: "
                           'pip install "rkmate[plots]"') from error
    with matplotlib.rc_context(_STYLE):
        yield


def time_unit(seconds: float) -> tuple[float, str]:
    """Return the factor and the unit in which a span of time is drawn."""
    return (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")


def corners(times: Any, levels: Any) -> tuple[Any, Any]:
    """Return only the points where a level changes, of arrays of times and of levels (one row each)."""
    changes = (levels[:, 1:] != levels[:, :-1]).any(axis=0)
    kept = np.append(True, changes) | np.append(changes, True)
    kept[[0, -1]] = True
    return times[kept], levels[:, kept]


def save(made: Any, path: str | Path | None) -> None:
    """Write a figure, when a path is given. Raises `ArgumentError` for an unknown suffix."""
    if path is None:
        return
    path = check_suffix(path)
    with styled():
        made.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def check_suffix(path: str | Path) -> Path:
    """Return a path that a figure can be written to. Raises `ArgumentError`."""
    path = Path(path)
    if path.suffix not in _SUFFIXES:
        raise ArgumentError(f"path is {str(path)!r}; its suffix should be one of "
                            f"{', '.join(_SUFFIXES)}")
    return path


_MIB = float(1 << 20)
_STEEP = 6
"""Greatest over middle extra time from which the axis of time is logarithmic."""


@dataclass(frozen=True)
class Point:
    """Measured cost of another method."""

    name: str
    peak_bytes: int
    step_seconds: float
    """On the same scale as the plans' ``baseline_seconds``: divide a measured time by the measured
    time without rematerialization, and multiply."""


@runtime_checkable
class WithPoints(Protocol):
    """Plans that bring the points of other methods along."""

    points: tuple[Point, ...]


def overhead(plans: Sequence[PlanData], seconds: float) -> float:
    """Return the extra time of a step that takes `seconds`, on the scale of the plans."""
    base = plans[0].baseline_seconds if plans else 0.0
    return seconds / base - 1 if base else 0.0


def time_memory(plans: Sequence[PlanData], points: Sequence[Point], here: PlanData | None, title: str,
                beside: Mapping[str, Sequence[PlanData]] | None) -> Any:
    """Draw time against memory. `here`: a plan to mark; `beside`: other plans of the model, by name. Returns
    the figure. Raises `MissingExtra` without matplotlib."""
    with styled():
        made, axes = figure(6.4, 3.6)
        _draw(axes, plans, points, here, beside or {})
        axes.legend()
        axes.set_title(title)
    return made


def _draw(axes: Any, plans: Sequence[PlanData], points: Sequence[Point], here: PlanData | None,
          beside: Mapping[str, Sequence[PlanData]]) -> None:
    plans = sorted(plans, key=lambda p: p.peak_bytes)
    axes.plot([p.peak_bytes / _MIB for p in plans], [100 * p.overhead for p in plans],
              color=styles.FORWARD_LINE, marker="o", markersize=4, linewidth=1.2,
              drawstyle="steps-post", label=", ".join(dict.fromkeys(p.planner for p in plans)))
    others = [p for other in beside.values() for p in other]
    for k, (name, other) in enumerate(beside.items()):
        of = sorted(other, key=lambda p: p.peak_bytes)
        axes.plot([p.peak_bytes / _MIB for p in of], [100 * p.overhead for p in of],
                  color=styles.FAINT, marker="o", markersize=3, linewidth=1.0, drawstyle="steps-post",
                  linestyle=("--", ":", "-.")[k % 3], label=name)
    sending = [p for p in plans if p.schedule.copied]
    if sending:
        axes.plot([p.peak_bytes / _MIB for p in sending], [100 * p.overhead for p in sending], marker="o",
                  markersize=8, markerfacecolor="none", markeredgecolor=styles.AWAY_LINE, linestyle="none",
                  label="with copies away and back")
    known = {p.minimum_bytes for p in plans if p.minimum_bytes is not None}
    if known:
        axes.axvspan(0, min(known) / _MIB, color="#f5d5d2", alpha=0.6, linewidth=0,
                     label=f"no schedule fits (under {size(min(known))})")
    if here is not None:
        axes.plot([here.peak_bytes / _MIB], [100 * here.overhead], marker="D", markersize=7,
                  color=styles.BUDGET, linestyle="none", label=f"this plan ({here.overhead:+.1%})")
    for k, q in enumerate(points):
        axes.plot([q.peak_bytes / _MIB], [100 * overhead(plans, q.step_seconds)],
                  marker="sXP^v*"[k % 6], markersize=7, linestyle="none", color=styles.INK,
                  label=q.name)
    right = max([p.baseline_peak_bytes for p in (*plans, *others)] + [q.peak_bytes for q in points]
                + ([here.peak_bytes] if here else []), default=1) / _MIB
    axes.set_xlim(0, right * 1.05)
    overheads = [100 * p.overhead for p in (*plans, *others)] + [
        100 * overhead(plans, q.step_seconds) for q in points]
    low, high = min([0.0, *overheads]), max([1.0, *overheads])
    if high > _STEEP * (sorted(overheads)[len(overheads) // 2] + 1):
        # The last megabytes cost many times more than the others: both ends stay readable.
        axes.set_yscale("symlog", linthresh=5)
        ticks = [t for t in (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000) if t <= high * 2]
        axes.set_yticks(ticks, [str(t) for t in ticks])
        axes.minorticks_off()
        axes.set_ylim(low - 0.3, high * 1.6)
    else:
        axes.set_ylim(low - 0.03 * high, high * 1.12)
    axes.set_xlabel("peak of a step in MiB")
    axes.set_ylabel("extra time in %")
