"""Time against memory: plans for several budgets, and the points of other methods."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, overload

from rkmate.show import styles
from rkmate.show.amounts import duration, size
from rkmate.show.plan import Plan

_MIB = float(1 << 20)
_STEEP = 6
"""Greatest over middle extra time from which the axis of time is logarithmic."""


@dataclass(frozen=True)
class Point:
    """What another method costs, measured."""

    name: str
    peak_bytes: int
    step_seconds: float
    """On the same scale as the plans' ``baseline_seconds``: divide a measured time by the measured
    time without rematerialization, and multiply."""


@dataclass(frozen=True)
class Curve(Sequence[Plan]):
    """Plans from the largest budget to the smallest: a sequence that can be drawn."""

    plans: tuple[Plan, ...]
    points: tuple[Point, ...] = ()

    @overload
    def __getitem__(self, index: int) -> Plan: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Plan]: ...

    def __getitem__(self, index: int | slice) -> Plan | Sequence[Plan]:
        return self.plans[index]

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def with_point(self, name: str, peak_bytes: int, step_seconds: float) -> Curve:
        """The curve with another method's point: bytes, and seconds of a step."""
        return Curve(self.plans, (*self.points, Point(name, peak_bytes, step_seconds)))

    def __str__(self) -> str:
        lines = [f"{'budget':>10}  {'peak':>10}  {'time':>7}  step"]
        lines += [f"{size(p.budget_bytes):>10}  {size(p.peak_bytes):>10}  {p.overhead:>+7.1%}  "
                  f"{duration(p.step_seconds)}" for p in self.plans]
        lines += [f"{'':>10}  {size(q.peak_bytes):>10}  {self._overhead(q.step_seconds):>+7.1%}  "
                  f"{duration(q.step_seconds)}  {q.name}" for q in self.points]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<rkmate.Curve: {len(self.plans)} plans, {len(self.points)} other points>"

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><td>{size(p.budget_bytes)}</td><td>{size(p.peak_bytes)}</td>"
                       f"<td>{p.overhead:+.1%}</td><td>{p.planner}</td></tr>" for p in self.plans)
        rows += "".join(f"<tr><td></td><td>{size(q.peak_bytes)}</td>"
                        f"<td>{self._overhead(q.step_seconds):+.1%}</td><td>{escape(q.name)}</td></tr>"
                        for q in self.points)
        return ("<table><tr><th>budget</th><th>peak</th><th>time</th><th>by</th></tr>"
                f"{rows}</table>")

    def _overhead(self, seconds: float) -> float:
        base = self.plans[0].baseline_seconds if self.plans else 0.0
        return seconds / base - 1 if base else 0.0

    def plot(self, path: str | Path | None = None, *, here: Plan | None = None,
             title: str = "time against memory") -> Any:
        """Draw the curve.

        Args:
            path: where to write the picture (.svg, .png, .pdf); without it, nothing is written.
            here: a plan to mark.
            title: of the picture.

        Returns:
            The matplotlib figure.

        Raises:
            MissingExtra: matplotlib is not installed (``pip install "rkmate[plots]"``).
        """
        from rkmate.show.plots import figure, save, styled

        with styled():
            made, axes = figure(6.4, 3.6)
            self._draw(axes, here)
            axes.set_title(title)
        save(made, path)
        return made

    def _draw(self, axes: Any, here: Plan | None) -> None:
        plans = sorted(self.plans, key=lambda p: p.peak_bytes)
        axes.plot([p.peak_bytes / _MIB for p in plans], [100 * p.overhead for p in plans],
                  color=styles.FORWARD_LINE, marker="o", markersize=4, linewidth=1.2,
                  drawstyle="steps-post", label=", ".join(dict.fromkeys(p.planner for p in plans)))
        known = {p.minimum_bytes for p in plans if p.minimum_bytes is not None}
        if known:
            axes.axvspan(0, min(known) / _MIB, color="#f5d5d2", alpha=0.6, linewidth=0,
                         label=f"no schedule fits (under {size(min(known))})")
        if here is not None:
            axes.plot([here.peak_bytes / _MIB], [100 * here.overhead], marker="D", markersize=7,
                      color=styles.BUDGET, linestyle="none", label=f"this plan ({here.overhead:+.1%})")
        for k, q in enumerate(self.points):
            axes.plot([q.peak_bytes / _MIB], [100 * self._overhead(q.step_seconds)],
                      marker="sXP^v*"[k % 6], markersize=7, linestyle="none", color=styles.INK,
                      label=q.name)
        right = max([p.baseline_peak_bytes for p in plans] + [q.peak_bytes for q in self.points]
                    + ([here.peak_bytes] if here else []), default=1) / _MIB
        axes.set_xlim(0, right * 1.05)
        overheads = [100 * self._overhead(s) for s in
                     (*(p.step_seconds for p in plans), *(q.step_seconds for q in self.points))]
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
        axes.legend(fontsize=8)
