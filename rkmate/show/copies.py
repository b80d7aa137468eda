"""Figures of a plan's copies: how much is copied, how busy the link is, how long the step waits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rkmate.ir.link import Link
from rkmate.ir.plan import PlanData
from rkmate.show.amounts import count, duration, share, size
from rkmate.show.replay import Occupancy, label

_NOTHING = 1e-5
"""Share of a step: shorter waits are not mentioned."""


@dataclass(frozen=True)
class Copies:
    """The copies of one step. Bytes and seconds."""

    link: Link
    tensors: int
    """Number of tensors that are copied away."""
    away_bytes: int
    """Bytes of the tensors that are copied away; the copies stay there to the end of the step."""
    back_bytes: int
    """Bytes that are copied back: more than `away_bytes` if some come back several times."""
    out_seconds: float
    """Seconds in which something is copied away."""
    in_seconds: float
    """Seconds in which something is copied back."""
    busy_seconds: float
    """Seconds in which something is copied in one direction, or in both."""
    stalled: float
    """Seconds in which the step waits for copies."""
    step_seconds: float
    out_before_loss: bool
    """Whether all copies away begin in the forward."""
    in_after_loss: bool
    """Whether all copies back begin in the backward."""

    @property
    def waits(self) -> bool:
        """Whether the step waits for copies for longer than nobody would see."""
        return self.stalled > _NOTHING * self.step_seconds

    @property
    def place(self) -> str:
        """The place that data are copied to, in words."""
        return place_of(self.link)


def place_of(link: Link) -> str:
    """Return a link's other end in words: ``/scratch``, ``host memory``."""
    return "host memory" if link.place == "host" else link.place or "another memory"


def copies_of(replayed: Occupancy) -> Copies | None:
    """Return the figures of a plan's copies; None if the graph has no link."""
    link, judged = replayed.graph.cd.link, replayed.simulation
    if link is None:
        return None
    sizes, end = [d.size for d in replayed.graph.cd.d], replayed.loss_seconds
    return Copies(
        link, len(judged.copies_out), judged.away, sum(sizes[j] for j, _, _ in judged.copies_in),
        _covered(judged.copies_out), _covered(judged.copies_in),
        _covered(sorted((*judged.copies_out, *judged.copies_in), key=lambda c: c[1])), judged.stalled,
        judged.seconds, all(start < end for _, start, _ in judged.copies_out),
        all(start >= end for _, start, _ in judged.copies_in))


def _covered(spans: Iterable[tuple[int, float, float]]) -> float:
    """Return seconds in which at least one of the spans, which are in order of their starts, runs."""
    total = until = 0.0
    for _, start, end in spans:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def away_bytes(plan: PlanData) -> int:
    """Return the bytes that a plan copies away."""
    return plan.graph.cd.bytes(plan.schedule.copied)


def block_sent(plan: PlanData, replayed: Occupancy) -> dict[int, int]:
    """Return, for each block, the bytes of its forward storages that are copied away."""
    g = plan.graph
    sent: dict[int, int] = dict.fromkeys(g.block_c, 0)
    for j in replayed.copied:
        maker = g.cd.producer[j]
        if maker is not None and maker < g.cd.loss:
            sent[g.computations[maker].block] += g.cd.d[j].size
    return sent


def copied_rows(replayed: Occupancy) -> list[tuple[str, ...]]:
    """Return, for each tensor that is copied away, the largest first: a description, its bytes, the seconds
    since the step's beginning at which it begins to leave, has left, begins to come back and is back, and its
    name."""
    g = replayed.graph
    back: dict[int, list[tuple[float, float]]] = {}
    for j, start, end in replayed.simulation.copies_in:
        back.setdefault(j, []).append((start, end))
    rows: list[tuple[str, ...]] = []
    for j, start, end in sorted(replayed.simulation.copies_out, key=lambda copy: -g.cd.d[copy[0]].size):
        c = g.computations[g.cd.producer[j] or 0]
        comes = [[f"{times[k]:.4g}" for times in back.get(j, ())] for k in range(2)]
        rows.append((label(c.path, c.operation), size(g.cd.d[j].size), f"{start:.4g}", f"{end:.4g}",
                     ", ".join(comes[0]), ", ".join(comes[1]), g.cd.d[j].name))
    return rows


def rates(link: Link) -> str:
    """Return the link's rates in words, ``1.5 GiB/s out and 1.3 GiB/s back``, with the processor time of each
    GiB."""
    each = link.computing_seconds_per_byte * 2**30
    slows = f", for {duration(each)} of computing per GiB" if each else ""
    return f"{size(link.out_bytes_per_second)}/s out and {size(link.in_bytes_per_second)}/s back{slows}"


def copies_facts(copies: Copies) -> tuple[tuple[str, str], ...]:
    """Return lines for a table of figures: (what, value)."""
    if not copies.tensors:
        return ("sent away", f"nothing, to {copies.place}"), ("link", rates(copies.link))
    waits = f"the step waits {duration(copies.stalled)}" if copies.waits else "nothing is waited for"
    return (("sent away", f"{count(copies.tensors, 'tensor')}, {size(copies.away_bytes)}, to {copies.place}"),
            ("link", f"{rates(copies.link)}; busy {share(copies.busy_seconds, copies.step_seconds)} of the "
                     f"step, {waits}"))


def copies_words(copies: Copies, recomputes: bool) -> str:
    """Return sentences about the copies: what is sent, when, how busy the link is, how long the step waits;
    or why nothing is sent."""
    going_at = f"Copies go at {rates(copies.link)}, both at once."
    if not copies.tensors:
        why = "no faster plan with copies was found" if recomputes else \
            "all that the backward reads fits into the budget"
        return f"Nothing is sent to {copies.place}: {why}. {going_at}"
    are = "is" if copies.tensors == 1 else "are"
    out = "in the forward" if copies.out_before_loss else "in the forward and the backward"
    back = "in the backward" if copies.in_after_loss else "in the forward and the backward"
    in_all = f" ({size(copies.back_bytes)}: some come back several times)" \
        if copies.back_bytes > copies.away_bytes else ""
    step = copies.step_seconds
    waits = f"The step waits {duration(copies.stalled)} for them." if copies.waits else \
        "The step waits for no copy."
    return (f"{count(copies.tensors, 'tensor')} ({size(copies.away_bytes)}) {are} copied to {copies.place} "
            f"{out} and back {back}{in_all}; the link is busy {share(copies.busy_seconds, step)} of the step "
            f"(out {share(copies.out_seconds, step)}, back {share(copies.in_seconds, step)}). {waits} "
            f"{going_at}")
