"""Plans for several budgets, and the points of other methods: a sequence that can be drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from rkmate.show.amounts import duration, size
from rkmate.show.copies import away_bytes
from rkmate.show.notebook import curve_html
from rkmate.show.plan import Plan
from rkmate.show.plots import Point, overhead, save, time_memory

_SENT = "sent away"


@dataclass(frozen=True)
class Curve(Sequence[Plan]):
    """A sequence of plans, from the largest budget to the smallest, that prints as a table and can be
    drawn."""

    plans: tuple[Plan, ...]
    """Plans, from the largest budget to the smallest."""
    points: tuple[Point, ...] = ()
    """Points of other methods, drawn and printed next to the plans."""

    @overload
    def __getitem__(self, index: int) -> Plan: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Plan]: ...

    def __getitem__(self, index: int | slice) -> Plan | Sequence[Plan]:
        return self.plans[index]

    def __len__(self) -> int:
        return len(self.plans)

    def with_point(self, name: str, peak_bytes: int, step_seconds: float) -> Curve:
        """Return the curve with a point of another method: its peak in bytes, and seconds of a step."""
        return Curve(self.plans, (*self.points, Point(name, peak_bytes, step_seconds)))

    def __str__(self) -> str:
        sends = any(p.schedule.copied for p in self.plans)
        lines = [f"{'budget':>10}  {'peak':>10}  {'time':>7}{f'  {_SENT:>10}' if sends else ''}  step"]
        lines += [f"{size(p.budget_bytes):>10}  {size(p.peak_bytes):>10}  {p.overhead:>+7.1%}"
                  f"{f'  {_sent(p):>10}' if sends else ''}  {duration(p.step_seconds)}" for p in self.plans]
        lines += [f"{'':>10}  {size(q.peak_bytes):>10}  {overhead(self.plans, q.step_seconds):>+7.1%}"
                  f"{' ' * 12 * sends}  {duration(q.step_seconds)}  {q.name}" for q in self.points]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<rkmate.Curve: {len(self.plans)} plans, {len(self.points)} other points>"

    def _repr_html_(self) -> str:
        sends = any(p.schedule.copied for p in self.plans)
        rows = [(size(p.budget_bytes), size(p.peak_bytes), f"{p.overhead:+.1%}",
                 *([_sent(p)] if sends else []), p.planner) for p in self.plans]
        rows += [("", size(q.peak_bytes), f"{overhead(self.plans, q.step_seconds):+.1%}",
                  *([""] if sends else []), q.name) for q in self.points]
        return curve_html(self.plans, self.points,
                          ("budget", "peak", "time", *([_SENT] if sends else []), "by"), rows)

    def plot(self, path: str | Path | None = None, *, here: Plan | None = None,
             title: str = "time against memory",
             beside: Mapping[str, Sequence[Plan]] | None = None) -> Any:
        """Draw time against memory, with a point for each plan.

        Args:
            path: where to write the picture (.svg, .png, .pdf); without it, nothing is written.
            here: a plan to mark.
            title: title of the picture.
            beside: other curves of the same model by name, for example curves without `offload`.

        Returns:
            The matplotlib figure.

        Raises:
            MissingExtra: matplotlib is not installed (``pip install "rkmate[plots]"``).
        """
        made = time_memory(self.plans, self.points, here, title, beside=beside)
        save(made, path)
        return made


def _sent(plan: Plan) -> str:
    return size(away_bytes(plan)) if plan.schedule.copied else "-"
