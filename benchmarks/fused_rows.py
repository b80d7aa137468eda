"""Rows of the benchmark of layouts and compiled groups, and the tables that are made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """What was measured of one method on one model; peaks and times are parts of eager's."""

    model: str
    method: str
    threads: int
    peak: float | None = None
    time: float | None = None
    of_inductor: float | None = None
    """The time as a part of torch.compile's at the fraction of its smallest peak, their steps in turns."""
    predicted_peak: float | None = None
    predicted_time: float | None = None
    ready: float | None = None
    """Seconds until the first step is done, nothing being on disk."""
    again: float | None = None
    """The same in a second process, which finds what was compiled, and follows a saved plan."""
    groups: int | None = None
    """Compiled; equal ones once."""
    compiling: float | None = None
    """Seconds of compiling, a part of `ready`."""
    compiling_again: float | None = None
    """The same in the second process."""
    variant: str = ""
    error: float | None = None
    """Of all gradients together, relative to those in double precision."""
    eager_error: float | None = None
    eager_bytes: int | None = None
    eager_seconds: float | None = None
    took: float | None = None
    """Seconds that measuring the row took, all in all."""
    failed: str = ""
    """Why there are no figures."""

    @property
    def key(self) -> tuple[str, str, int]:
        """What tells it from other rows."""
        return self.model, self.method, self.threads


Rows = dict[tuple[str, str, int], Row]


@dataclass(frozen=True)
class Bar:
    """What a method's time is to be at most."""

    method: str
    most: float
    """As a part of the other's time."""
    of: str = "eager"
    """The other: ``eager``, or ``inductor``, torch.compile where its peak is smallest, which is not to be
    exceeded, either."""


def _part(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"


def _errors(row: Row) -> str:
    return "" if row.error is None or not row.eager_error else f"{row.error / row.eager_error:.2f} of eager's"


def table(model: str, threads: int, rows: Rows) -> str:
    """The Markdown table of a model."""
    lines = ["| method | peak | time | predicted peak | gradients' error | first step done | in a second "
             "process | compiled |",
             "|---|--:|--:|--:|--:|--:|--:|--:|"]
    for row in rows.values():
        if (row.model, row.threads) != (model, threads):
            continue
        cells = (row.failed, "") if row.failed else (_part(row.peak), _ratio(row.time))
        compiled = "" if row.groups is None else f"{row.groups} groups, {_seconds(row.compiling)}"
        lines.append(f"| {row.method} | {' | '.join(cells)} | {_part(row.predicted_peak)} | "
                     f"{_errors(row)} | {_seconds(row.ready)} | {_seconds(row.again)} | {compiled} |")
    return "\n".join(lines)


def bars_table(models: Sequence[str], threads: int, rows: Rows, bars: Mapping[str, Sequence[Bar]]) -> str:
    """The Markdown table of what is to hold, and whether it does."""
    lines = ["| model | method | peak | time | of | steps in turns | at most | holds | measured in |",
             "|---|---|--:|--:|---|---|--:|---|--:|"]
    for model in models:
        for bar in bars[model]:
            row = rows.get((model, bar.method, threads))
            theirs = [r for r in rows.values() if (r.model, r.threads) == (model, threads) and r.time
                      and r.peak and r.method.split()[0] == bar.of == "inductor"]
            other = min(theirs, key=lambda r: r.peak or 0.0, default=None)
            if row is None or row.time is None or row.peak is None:
                why = "not measured" if row is None else row.failed
                lines.append(f"| {model} | {bar.method} | {why} | | {bar.of} | | {bar.most:.2f} | | |")
                continue
            time, turns = row.time, "of both"
            if other is not None and other.time is not None:
                turns = "of both" if row.of_inductor else "of each with eager's"
                time = row.of_inductor or row.time / other.time
            within = other is None or other.peak is None or row.peak <= other.peak
            lines.append(f"| {model} | {bar.method} | {row.peak:.1%} | {time:.2f} | {bar.of} | "
                         f"{turns} | {bar.most:.2f} | {'yes' if within and time <= bar.most else 'no'} | "
                         f"{_seconds(row.took)} |")
    return "\n".join(lines)


def depths_table(models: Sequence[str], threads: int, rows: Rows, methods: Sequence[str]) -> str:
    """The Markdown table of how long models of several depths take to get ready."""
    lines = ["| model | method | first step done | of that, compiling | groups | in a second process | "
             "of that, loading groups |", "|---|---|--:|--:|--:|--:|--:|"]
    for model in models:
        for method in methods:
            row = rows[model, method, threads]
            groups = "" if row.groups is None else str(row.groups)
            lines.append(f"| {model} | {method} | {row.failed or _seconds(row.ready)} | "
                         f"{_seconds(row.compiling)} | {groups} | {_seconds(row.again)} | "
                         f"{_seconds(row.compiling_again)} |")
    return "\n".join(lines)
