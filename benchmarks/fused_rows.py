"""Rows of the benchmark of layouts and compiled groups, and the tables that are made of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Key = tuple[str, str, int]
"""What tells a row from others: model, method, threads."""


@dataclass(frozen=True)
class Turn:
    """Steps of one method on one model, in turns with those of all others."""

    model: str
    method: str
    threads: int
    peak: float | None = None
    """As a part of eager's."""
    seconds: float | None = None
    """Of a step, the median."""
    eager_seconds: float | None = None
    """The same of eager's."""
    rounds: int = 0
    """How often each method's turn came."""
    predicted_peak: float | None = None
    predicted_seconds: float | None = None
    seconds_then: float | None = None
    """Of its own step right after it was planned, which is what was predicted: no gradient stood before."""
    pages: float | None = None
    """Fresh ones that a step waits for, the median."""
    variant: str = ""
    error: float | None = None
    """Of all gradients together, relative to those in double precision: the median of several batches."""
    eager_error: float | None = None
    eager_bytes: int | None = None
    failed: str = ""
    """Why there are no figures."""

    @property
    def key(self) -> Key:
        """What tells it from others."""
        return self.model, self.method, self.threads

    @property
    def time(self) -> float | None:
        """As a part of eager's."""
        return self.seconds / self.eager_seconds if self.seconds and self.eager_seconds else None

    @property
    def predicted(self) -> float | None:
        """The time that was predicted, as a part of its own right after planning."""
        return self.predicted_seconds / self.seconds_then \
            if self.predicted_seconds and self.seconds_then else None


@dataclass(frozen=True)
class Ready:
    """How long one method takes to get ready for one model, in a process of its own."""

    model: str
    method: str
    threads: int
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
    failed: str = ""
    """Why there are no figures."""

    @property
    def key(self) -> Key:
        """What tells it from others."""
        return self.model, self.method, self.threads


Turns = dict[Key, Turn]
Waits = dict[Key, Ready]


@dataclass(frozen=True)
class Bar:
    """What a method's time is to be at most."""

    method: str
    most: float
    """As a part of the other's time."""
    of: str = "eager"
    """The other: ``eager``, or ``inductor``, torch.compile where its peak is smallest, which is not to be
    exceeded, either."""


def smallest(model: str, threads: int, turns: Turns) -> Turn | None:
    """Torch.compile's row of the smallest peak; none where there is none yet."""
    found = [t for t in turns.values() if (t.model, t.threads) == (model, threads)
             and t.method.startswith("inductor") and t.peak]
    return min(found, key=lambda t: t.peak or 0.0, default=None)


def _part(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _off(value: float | None) -> str:
    return "" if value is None else f"{value - 1:+.1%}"


def _count(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"


def _errors(row: Turn) -> str:
    return "" if row.error is None or not row.eager_error else f"{row.error / row.eager_error:.2f} of eager's"


def table(model: str, threads: int, turns: Turns) -> str:
    """The Markdown table of a model."""
    lines = ["| method | peak | time | fresh pages | predicted peak | predicted time | gradients' error | "
             "layout |", "|---|--:|--:|--:|--:|--:|--:|---|"]
    for row in turns.values():
        if (row.model, row.threads) != (model, threads):
            continue
        if row.failed:
            lines.append(f"| {row.method} | {row.failed} | | | | | | |")
            continue
        lines.append(f"| {row.method} | {_part(row.peak)} | {_ratio(row.time)} | "
                     f"{_count(row.pages)} | {_part(row.predicted_peak)} | {_off(row.predicted)} | "
                     f"{_errors(row)} | {row.variant} |")
    return "\n".join(lines)


def predictions(turns: Turns) -> str:
    """How well times were predicted, in a sentence."""
    off = [row.predicted - 1 for row in turns.values() if row.predicted]
    if not off:
        return ""
    within = [sum(abs(one) <= most for one in off) for most in (0.03, 0.05, 0.1)]
    return (f"Of {len(off)} predicted times, {within[0]} are within 3% of what was measured right after, "
            f"{within[1]} within 5% and {within[2]} within 10%; on average they are "
            f"{statistics.fmean(off):+.1%} off.")


def bars_table(models: Sequence[str], threads: int, turns: Turns, bars: Mapping[str, Sequence[Bar]]) -> str:
    """The Markdown table of what is to hold, and whether it does."""
    lines = ["| model | method | peak | time | of | at most | holds |", "|---|---|--:|--:|---|--:|---|"]
    for model in models:
        other = smallest(model, threads, turns)
        for bar in bars[model]:
            row = turns.get((model, bar.method, threads))
            if row is None or row.seconds is None or row.peak is None:
                why = "not measured" if row is None else row.failed
                lines.append(f"| {model} | {bar.method} | {why} | | {bar.of} | {bar.most:.2f} | |")
                continue
            time, within = row.time, True
            if bar.of == "inductor" and other is not None:
                time = row.seconds / (other.seconds or 0.0)
                within = row.peak <= (other.peak or 0.0)
            holds = within and time is not None and time <= bar.most
            lines.append(f"| {model} | {bar.method} | {row.peak:.1%} | {_ratio(time)} | {bar.of} | "
                         f"{bar.most:.2f} | {'yes' if holds else 'no'} |")
    return "\n".join(lines)


def waits_table(models: Sequence[str], threads: int, waits: Waits) -> str:
    """The Markdown table of how long models take to get ready."""
    lines = ["| model | method | first step done | of that, compiling | groups | in a second process | "
             "of that, loading groups |", "|---|---|--:|--:|--:|--:|--:|"]
    for model in models:
        for row in (r for r in waits.values() if (r.model, r.threads) == (model, threads)):
            groups = "" if row.groups is None else str(row.groups)
            lines.append(f"| {model} | {row.method} | {row.failed or _seconds(row.ready)} | "
                         f"{_seconds(row.compiling)} | {groups} | {_seconds(row.again)} | "
                         f"{_seconds(row.compiling_again)} |")
    return "\n".join(lines)
