"""A plan in words: the table that `print` shows, the sentences of `Plan.explain`, and rows by module."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rkmate.ir.plan import PlanData
from rkmate.ir.schedule import CopyIn
from rkmate.show.amounts import count, duration, share, size
from rkmate.show.copies import block_sent, copies_facts, copies_of, copies_words
from rkmate.show.graphs import block_memory, plan_recomputed
from rkmate.show.replay import KIND_NAMES, KINDS, WHOLE, Occupancy, Tensor, label, replay, replay_baseline

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A part of a module path that is a number: the place in a list of modules."""


@dataclass(frozen=True)
class ModuleRow:
    """A module path. Bytes are those in memory between forward and backward; seconds are of one step."""

    path: str
    kept_bytes: int
    forgotten_bytes: int
    """Kept without rematerialization, and neither kept nor sent away by the plan."""
    recomputed_seconds: float
    recomputed: tuple[str, ...]
    """Operations that run again, each once."""
    modules: int = 1
    """Number of modules that the row stands for."""
    away_bytes: int = 0
    """Bytes that the forward leaves to the backward in another place."""
    needed_by: tuple[str, ...] = ()
    """Other modules that read what is made again without being forgotten between forward and backward."""


def by_module(replayed: Occupancy, baseline: Occupancy) -> tuple[ModuleRow, ...]:
    """Return a row for each module that keeps, sends away, frees or recomputes data; the module that frees
    most comes first."""
    g = replayed.graph
    kept: dict[str, int] = {}
    away: dict[str, int] = {}
    forgotten: dict[str, int] = {}
    seconds: dict[str, float] = {}
    again: dict[str, dict[str, None]] = {}
    for path, total in _sizes(replayed, replayed.alive_at_loss):
        kept[path] = kept.get(path, 0) + total
    for path, total in _sizes(replayed, replayed.away_at_loss):
        away[path] = away.get(path, 0) + total
    lost = baseline.alive_at_loss - replayed.alive_at_loss - replayed.away_at_loss
    for path, total in _sizes(replayed, lost):
        forgotten[path] = forgotten.get(path, 0) + total
    needed: dict[str, dict[str, None]] = {}
    for i, t in replayed.recomputed_seconds.items():
        c = g.computations[i]
        seconds[c.path] = seconds.get(c.path, 0.0) + t
        again.setdefault(c.path, {})[c.operation] = None
        made = g.cd.c[i].outputs
        for j in made if lost.isdisjoint(made) else ():
            for reader in g.cd.readers[j]:
                if reader in replayed.recomputed_seconds or reader >= g.cd.loss:
                    needed.setdefault(c.path, {})[g.computations[reader].path or WHOLE] = None
    rows = [ModuleRow(p, kept.get(p, 0), forgotten.get(p, 0), seconds.get(p, 0.0),
                      tuple(again.get(p, ())), away_bytes=away.get(p, 0),
                      needed_by=tuple(q for q in needed.get(p, ()) if q != (p or WHOLE)))
            for p in {**kept, **away, **forgotten, **seconds}]
    return tuple(sorted(rows, key=lambda r: (-r.forgotten_bytes, -r.recomputed_seconds,
                                             -r.kept_bytes, r.path)))


def alike(rows: Iterable[ModuleRow]) -> tuple[ModuleRow, ...]:
    """Join modules whose paths differ only in numbers into one row: ``layers.*.mlp``, with their sums."""
    groups: dict[str, list[ModuleRow]] = {}
    for row in rows:
        groups.setdefault(_NUMBER.sub("*", row.path), []).append(row)
    return tuple(same[0] if len(same) == 1 else ModuleRow(
        pattern, sum(r.kept_bytes for r in same), sum(r.forgotten_bytes for r in same),
        sum(r.recomputed_seconds for r in same),
        tuple(dict.fromkeys(o for r in same for o in r.recomputed)), len(same),
        sum(r.away_bytes for r in same))
        for pattern, same in groups.items())


def _sizes(replayed: Occupancy, storages: Iterable[int]) -> list[tuple[str, int]]:
    g = replayed.graph
    found = []
    for j in sorted(storages):
        maker = g.cd.producer[j]
        if maker is not None and g.cd.d[j].kind != "grad":
            found.append((g.computations[maker].path, g.cd.d[j].size))
    return found


_MOST_ROWS = 40
_MOST_GROUPS = 6


def facts(plan: PlanData) -> tuple[tuple[str, str], ...]:
    """Return the figures above the table: (what, value)."""
    smallest = "not searched" if plan.minimum_bytes is None else \
        f"{size(plan.minimum_bytes)} ({share(plan.minimum_bytes, plan.baseline_peak_bytes)})"
    result = [
        ("peak", f"{size(plan.peak_bytes)} of a budget of {size(plan.budget_bytes)}"),
        ("without rematerialization", size(plan.baseline_peak_bytes)),
        ("time of a step", f"{duration(plan.step_seconds)}, {plan.overhead:+.1%} "
                           f"({duration(plan.baseline_seconds)} without)"),
        ("smallest budget", smallest),
        ("planner", plan.planner),
    ]
    if plan.calls > 1:
        result.insert(0, ("made for", f"{plan.calls} calls before one backward; times are of one"))
    if plan.gradients == "in_place":
        result.append(("gradients", "of parameters are added in place"))
    copies = copies_of(replay(plan)) if plan.graph.cd.link is not None else None
    if copies is not None:
        result += copies_facts(copies)
    if plan.origin is not None and plan.origin.placements:
        result.append(("distributed", "; ".join(f"{count(n, 'parameter')} {where}"
                                                for where, n in plan.origin.placements)))
    if plan.compiled:
        result.append(("compiled", f"{_groups(plan)}, by {plan.compiled}"))
    if plan.bound_seconds is not None and plan.gap is not None:
        result.append(("lower bound", f"{duration(plan.bound_seconds)} a step: at most {plan.gap:.1%} "
                                      "could be saved by another schedule"))
    if plan.first_seconds is not None and plan.first_seconds > plan.step_seconds:
        result.append(("searching gained", f"{1 - plan.step_seconds / plan.first_seconds:.1%} of the step by "
                                           "the first schedule that was found within the budget"))
    if plan.stage_seconds:
        result.append(("planning took", duration(sum(plan.stage_seconds.values()))))
    if plan.note:
        result.append(("note", plan.note))
    return tuple(result)


def block_table(plan: PlanData, replayed: Occupancy) -> tuple[list[tuple[str, ...]], set[int]]:
    """Return a row for each block: number, class, module, operations, bytes kept, bytes that could be kept,
    bytes sent away (if the plan sends data), and recomputed time. The first row has the columns' names. Also
    returns which columns hold numbers."""
    kept, whole = block_memory(plan, replayed)
    sent = block_sent(plan, replayed)
    sends = bool(replayed.copied)
    rows: list[tuple[str, ...]] = [("block", "class", "module", "operations", "keeps", "of",
                                    *(["sends"] if sends else []), "redoes")]
    for b, info in enumerate(plan.blocks):
        again = plan_recomputed(replayed, b)
        away = [size(sent[b]) if sent[b] else "-"] if sends else []
        rows.append((str(b), info.label, info.path or "(the model)",
                     f"{info.forward_nodes} + {info.backward_nodes}", size(kept[b]), size(whole[b]), *away,
                     duration(again) if again else "-"))
    return rows, set(range(len(rows[0]))) - {1, 2}


def table(plan: PlanData) -> str:
    """Return the plan as a few figures and one row for each block."""
    lines = ["rkmate plan"]
    figures = facts(plan)
    width = max(len(what) for what, _ in figures)
    lines += [f"  {what:<{width}}  {value}" for what, value in figures]
    (head, *rows), right = block_table(plan, replay(plan))
    shown = rows if len(rows) <= _MOST_ROWS else rows[:_MOST_ROWS - 1]
    lines += ["", *_columns([head, *shown], right)]
    if len(shown) < len(rows):
        lines.append(f"  ... and {count(len(rows) - len(shown), 'more block')}")
    return "\n".join(lines)


def _columns(rows: Sequence[Sequence[str]], right: set[int]) -> list[str]:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [f"{cell:>{w}}" if k in right else f"{cell:<{w}}"
                 for k, (cell, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def explain(plan: PlanData) -> str:
    """Return sentences about a plan's memory: where it goes, what the peak is, what a smaller budget would
    cost."""
    return "\n\n".join(text for _, text in paragraphs(plan))


def paragraphs(plan: PlanData) -> tuple[tuple[str, str], ...]:
    """Return the parts of `explain`: (heading, sentences)."""
    replayed, baseline = replay(plan), replay_baseline(plan)
    parts = (("What the budget costs", _outcome(plan, replayed)),
             ("Where the memory goes", _recomputed(plan, replayed, baseline)),
             ("What is away", _away(plan, replayed)),
             ("When it is fullest", _peak(replayed)),
             ("What less memory would cost", _less(plan, replayed)),
             ("What is compiled", _compiled(plan)),
             ("How it was made", _note(plan)))
    return tuple((heading, text) for heading, text in parts if text)


def _groups(plan: PlanData) -> str:
    groups = sum(times for _, times in plan.fused)
    operations = sum(times * (names.count(",") + 1) for names, times in plan.fused)
    return f"{count(operations, 'operation')} in {count(groups, 'group')} ({len(plan.fused)} different)"


def _compiled(plan: PlanData) -> str:
    if not plan.fused:
        return "Nothing could be fused." if plan.compiled else ""
    text = f"Compiled into kernels of their own are {_groups(plan)}."
    most = sorted(plan.fused, key=lambda f: -f[1] * f[0].count(","))[:_MOST_GROUPS]
    named = "; ".join(f"{names} ({times} times)" if times > 1 else names for names, times in most)
    return f"{text} {'The largest' if len(most) < len(plan.fused) else 'They are'}: {named}."


def _note(plan: PlanData) -> str:
    return f"{plan.note[0].upper()}{plan.note[1:]}." if plan.note else ""


def _outcome(plan: PlanData, replayed: Occupancy) -> str:
    step = "A training step" if plan.calls == 1 else f"A training step of {plan.calls} calls"
    text = (f"{step} allocates at most {size(plan.peak_bytes)} on top of what is in memory before it, "
            f"without gradients of parameters; the budget is {size(plan.budget_bytes)}. Without "
            f"rematerialization it would be {size(plan.baseline_peak_bytes)}.")
    copies, waits = copies_of(replayed), replayed.simulation.stalled
    added = []
    if plan.schedule.recomputed():
        added.append(f"recomputation adds {duration(plan.step_seconds - waits - plan.baseline_seconds)}")
    if copies is not None and copies.waits:
        added.append(f"waiting for copies {'' if added else 'adds '}{duration(waits)}")
    if added:
        what = " and ".join(added)
        text += (f" {what[0].upper()}{what[1:]} to a step of {duration(plan.baseline_seconds)} "
                 f"({plan.overhead:+.1%}).{_bound(plan)}")
    return text if plan.schedule.recomputed() else f"{text} Nothing is computed twice."


def _away(plan: PlanData, replayed: Occupancy) -> str:
    copies = copies_of(replayed)
    return "" if copies is None else copies_words(copies, bool(plan.schedule.recomputed()))


def _bound(plan: PlanData) -> str:
    if plan.gap is None:
        return ""
    others = "No other schedule within the budget that runs the backward once, in order,"
    if plan.gap < 5e-4:
        return f" {others} is faster."
    return f" {others} could save more than {plan.gap:.1%} of the step."


def _recomputed(plan: PlanData, replayed: Occupancy, baseline: Occupancy) -> str:
    rows = by_module(replayed, baseline)
    kept = sum(r.kept_bytes for r in rows)
    away = sum(r.away_bytes for r in rows)
    forgotten = sum(r.forgotten_bytes for r in rows)
    text = f"Between forward and backward, {size(kept)} of activations stay in memory"
    if away:
        text += f"{',' if forgotten else ' and'} {size(away)} are away"
    if not forgotten:
        return f"{text}: all that the backward reads."
    text += f" and {size(forgotten)} are forgotten."
    likes = alike(rows)
    most = sorted((r for r in likes if r.forgotten_bytes), key=lambda r: -r.forgotten_bytes)[:3]
    text += f" Most is forgotten in {_list([f'{_named(r)} ({size(r.forgotten_bytes)})' for r in most])}."
    slow = sorted((r for r in likes if r.recomputed_seconds), key=lambda r: -r.recomputed_seconds)[:3]
    if slow:
        names = [f"{_named(r)} ({', '.join(r.recomputed[:3])}: {duration(r.recomputed_seconds)})"
                 for r in slow]
        text += f" Most time is spent again in {_list(names)}."
    runs = len(replayed.recomputed_seconds)
    return f"{text} {count(runs, 'computation')} of {len(plan.graph.computations)} run more than once."


def _peak(replayed: Occupancy) -> str:
    moment = replayed.moments[replayed.peak_at]
    where, step = "at the loss", replayed.schedule.steps[replayed.peak_at]
    if isinstance(step, CopyIn):
        where = f"where {replayed.graph.cd.d[step.d].name} is copied back"
    if moment.computation is not None:
        c = replayed.graph.computations[moment.computation]
        again = "while it is recomputed, " if moment.again else ""
        whole = ", in larger parts" if moment.kernel else ""
        phase = replayed.graph.cd.c[moment.computation].phase
        where = f"in the {phase} of {c.path or WHOLE}, {again}at {c.operation}{whole}"
    shares = [f"{size(n)} of {KIND_NAMES[kind]}" for kind, n in zip(KINDS, moment.bytes, strict=True)
              if n]
    tensors = [tensor_words(t) for t in replayed.peak_tensors[:3]]
    return (f"The peak stands {where}. It is made of {_list(shares)}. The largest tensors there are "
            f"{_list(tensors)}.")


def tensor_words(t: Tensor) -> str:
    """Return a tensor in words, ``layers.2: gelu (1.0 MiB)``; by its name if no operation made it."""
    return f"{label(t.path, t.operation or t.name)} ({size(t.bytes)})"


def _named(row: ModuleRow) -> str:
    return f"the {row.modules} modules {row.path}" if row.modules > 1 else row.path or WHOLE


def _less(plan: PlanData, replayed: Occupancy) -> str:
    if plan.minimum_bytes is not None and plan.peak_bytes <= plan.minimum_bytes:
        return "This is the smallest budget that the planner is known to meet."
    text = ""
    g = replayed.graph
    there = {j for j, _ in replayed.alive_at_peak}
    costs = []
    for j, kind in replayed.alive_at_peak:
        maker = g.cd.producer[j]
        if maker is None or kind != "kept" or j in g.cd.held or not g.cd.d[j].size:
            continue
        c = g.cd.c[maker]
        if there.issuperset(c.inputs):              # else more than this one would run again
            costs.append((c.time / g.cd.d[j].size, maker, c.time, g.cd.d[j].size))
    if costs:
        _, maker, seconds, total = min(costs)
        of = g.computations[maker]
        part = seconds / plan.baseline_seconds if plan.baseline_seconds else 0.0
        text = (f"A smaller budget would first forget what is cheap to redo: the {size(total)} of "
                f"{label(of.path or WHOLE, of.operation)} can be made again in "
                f"{duration(seconds)} ({part:.2%} of a step). ")
    if plan.minimum_bytes is not None:
        text += (f"The smallest budget that the planner can meet is {size(plan.minimum_bytes)} "
                 f"({share(plan.minimum_bytes, plan.baseline_peak_bytes)} of the peak without "
                 "rematerialization). ")
    return f"{text}rkmate.tradeoff shows the time of every budget between."


def _list(parts: Sequence[str]) -> str:
    if len(parts) < 2:
        return "".join(parts)
    if any("," in p for p in parts):
        return "; ".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"
