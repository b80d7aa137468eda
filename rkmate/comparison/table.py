"""The result of a comparison: rows, a table, JSON, and a picture.

The picture is time against memory, one line a method (Rotor's figure 3, Rockmate's figures 5 and 6).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rkmate.errors import ArgumentError
from rkmate.show import styles
from rkmate.show.amounts import duration, size
from rkmate.show.plots import BESIDE, figure, save, styled
from rkmate.show.styles import look_of
from rkmate.support.defaults import DEFAULT_PLANNER

Status = Literal["ok", "infeasible", "timeout", "failed", "does not apply"]
SAME = 5e-4
"""Time ratios closer than this are called equal."""
_COLUMNS = (("method", 26), ("planning", 9), ("predicted peak", 15), ("measured peak", 14),
            ("predicted time", 15), ("measured time", 14))


@dataclass(frozen=True)
class Row:
    """A method at one budget."""

    method: str
    """Name of a planner, or of a method from outside this package."""
    budget_bytes: int | None
    """Budget in bytes; None for a method without a budget."""
    status: Status
    """``infeasible``: the method has no schedule within the budget. ``timeout``: the method found no schedule
    within its time limit. ``failed``: the measurement did not end; the note gives the reason."""
    planning_seconds: float | None
    """Seconds of planning for this budget. Work that a planner does once for all budgets counts at the
    smallest budget. Work that the planner requests from other planners of the comparison counts for these."""
    peak_bytes: int | None = None
    """Predicted peak of a step in bytes, on top of the memory in use before the step."""
    time_ratio: float | None = None
    """Predicted time of a step, divided by the time without rematerialization."""
    measured_peak_bytes: int | None = None
    measured_ratio: float | None = None
    """Median of the ratios of step times to the original model's; the steps of both alternate."""
    note: str = ""


@dataclass(frozen=True)
class Comparison(Sequence[Row]):
    """Rows of all methods at all budgets: a sequence that prints as a table and can be drawn."""

    rows: tuple[Row, ...]
    """Budget by budget, the methods in the registry's order; methods without a budget at the end."""
    model: str
    """Name of the model's class."""
    costs: str
    """``measured`` or ``analytic``: the source of the costs."""
    baseline_peak_bytes: int
    """Predicted peak without rematerialization."""
    baseline_seconds: float
    """Predicted time of a step without rematerialization."""
    shared_seconds: Mapping[str, float]
    """Seconds, by stage, of the work done once for all planners."""

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def budgets(self) -> tuple[int, ...]:
        """Budgets in bytes, in the requested order."""
        return tuple(dict.fromkeys(r.budget_bytes for r in self.rows if r.budget_bytes is not None))

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods, in the order of the table."""
        return tuple(dict.fromkeys(r.method for r in self.rows))

    def at(self, budget: int) -> tuple[Row, ...]:
        """Return the rows of one budget, in bytes."""
        return tuple(r for r in self.rows if r.budget_bytes == budget)

    def of(self, method: str) -> tuple[Row, ...]:
        """Return the rows of one method."""
        return tuple(r for r in self.rows if r.method == method)

    def best(self, budget: int) -> Row | None:
        """Return the row with the least predicted time; None if no method fits. Among equal rows, return the
        default planner's, then the row with the shortest planning."""
        fits = [(r.time_ratio, r) for r in self.at(budget) if r.time_ratio is not None]
        if not fits:
            return None
        least = min(ratio for ratio, _ in fits)
        equal = [r for ratio, r in fits if ratio <= least + SAME]
        return min(equal, key=lambda r: (r.method != DEFAULT_PLANNER, r.planning_seconds or 0.0))

    def beaten(self, method: str = DEFAULT_PLANNER) -> tuple[tuple[Row, Row], ...]:
        """Return pairs of a method's row and the best row, for each budget at which the method is not the
        best."""
        pairs = []
        for budget in self.budgets:
            winner = self.best(budget)
            own = next((r for r in self.at(budget) if r.method == method), None)
            if winner is not None and own is not None and (
                    own.time_ratio is None or own.time_ratio > (winner.time_ratio or 0.0) + SAME):
                pairs.append((own, winner))
        return tuple(pairs)

    def __repr__(self) -> str:
        return (f"<rkmate.Comparison of {self.model}: {len(self.methods)} methods, "
                f"{len(self.budgets)} budgets>")

    def __str__(self) -> str:
        measured = any(r.measured_peak_bytes is not None or r.status in ("failed", "does not apply")
                       for r in self.rows)
        columns = [c for c in _COLUMNS if measured or not c[0].startswith("measured")]
        shared = ", ".join(f"{k} {duration(v)}" for k, v in self.shared_seconds.items())
        lines = [f"{self.model}: without rematerialization {size(self.baseline_peak_bytes)}, "
                 f"{duration(self.baseline_seconds)} a step ({self.costs} costs)",
                 f"once for all planners: {shared}", "",
                 "".join(f"{n:<{w}}" if n == "method" else f"{n:>{w}}" for n, w in columns)]
        for budget in self.budgets:
            share = budget / self.baseline_peak_bytes
            lines += ["", f"budget {size(budget)} ({share:.0%} of the peak without)"]
            winner = self.best(budget)
            lines += [_line(r, measured, r is winner) for r in self.at(budget)]
        others = [r for r in self.rows if r.budget_bytes is None]
        if others:
            lines += ["", "without a budget", *(_line(r, measured, False) for r in others)]
        return "\n".join([*lines, "", "* least predicted time within the budget"])

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"

    def to_json(self) -> str:
        """Return the whole result as one JSON object."""
        return json.dumps({
            "model": self.model, "costs": self.costs,
            "baseline_peak_bytes": self.baseline_peak_bytes,
            "baseline_seconds": self.baseline_seconds, "shared_seconds": dict(self.shared_seconds),
            "rows": [asdict(r) for r in self.rows]}, indent=1)

    def plot(self, path: str | Path | None = None, *, title: str = "",
             methods: Sequence[str] | None = None) -> Any:
        """Draw time against memory, one line a method; hollow marks are measured.

        Args:
            path: where to write the picture (.svg, .png, .pdf); without it, nothing is written.
            title: title of the picture; by default, the model's name.
            methods: methods to draw; by default, all.

        Returns:
            The matplotlib figure.

        Raises:
            MissingExtra: matplotlib is not installed (``pip install "rkmate[plots]"``).
            ArgumentError: the path's suffix is unknown, or a method is not in the comparison.
        """
        names = list(self.methods if methods is None else methods)
        unknown = [n for n in names if n not in self.methods]
        if unknown:
            raise ArgumentError(f"methods names {unknown[0]!r}, which is not in this comparison; it has "
                                f"{', '.join(self.methods)}")
        return plot([self._line(name) for name in names], self.baseline_peak_bytes,
                    title or f"{self.model}, {self.costs} costs", path)

    def _line(self, method: str) -> Line:
        rows = self.of(method)
        predicted = sorted((r.peak_bytes, r.time_ratio) for r in rows
                           if r.peak_bytes is not None and r.time_ratio is not None)
        measured = [(r.measured_peak_bytes, r.measured_ratio) for r in rows
                    if r.measured_peak_bytes is not None and r.measured_ratio is not None]
        return Line(method, tuple(predicted), tuple(measured), first=method == DEFAULT_PLANNER)


def _line(row: Row, measured: bool, winner: bool) -> str:
    cells = [f"{'* ' if winner else '  '}{row.method}",
             "" if row.planning_seconds is None else duration(row.planning_seconds)]
    if row.status not in ("ok", "failed"):
        words = row.status if row.status != "timeout" else "timed out"
        text = f"{cells[0]:<26}{cells[1]:>9}   {words}"
        return f"{text}: {row.note}" if row.note else text
    cells += [_size(row.peak_bytes), _size(row.measured_peak_bytes), _ratio(row.time_ratio),
              _ratio(row.measured_ratio)]
    text = "".join(
        f"{cell:<{w}}" if name == "method" else f"{cell:>{w}}"
        for cell, (name, w) in zip(cells, _COLUMNS, strict=True)
        if measured or not name.startswith("measured"))
    return f"{text}   failed: {row.note}" if row.status == "failed" else text


def _size(n: int | None) -> str:
    return "" if n is None else size(n)


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}"


_MIB = float(1 << 20)
_TOP = 100
"""Extra time in % above which a method says no more than that it is slow."""


@dataclass(frozen=True)
class Line:
    """A method in the picture."""

    name: str
    predicted: tuple[tuple[int, float], ...]
    """Peak in bytes, and time of a step over that without rematerialization; by peak."""
    measured: tuple[tuple[int, float], ...]
    """Measured peak in bytes, and time of a step over that without rematerialization; by peak."""
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
    """Return points in MiB and in percent of extra time."""
    return [(peak / _MIB, 100 * (ratio - 1)) for peak, ratio in points]
