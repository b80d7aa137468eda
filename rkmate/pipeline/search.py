"""From a prepared model and a budget to a plan.

The default takes the fastest of several schedules: of a program over the whole graph, of the dynamic
program over the chain of blocks (Rockmate, algorithm 1, last two phases), and of two quick planners.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from rkmate.budget import Budget
from rkmate.errors import ArgumentError, InfeasibleBudget, PlanningTimeout
from rkmate.ir.cd import HOISTED
from rkmate.ir.chain import Backward, Op
from rkmate.ir.kernels import choose_kernels, seconds_to_save
from rkmate.ir.plan import Run
from rkmate.ir.schedule import Schedule, from_order
from rkmate.ir.summary import GraphSummary
from rkmate.pipeline.prepare import Prepared, with_option_counts
from rkmate.pipeline.runs import runs_of, runs_of_operations
from rkmate.pipeline.summarise import summarise
from rkmate.planners.auto import TIME_LIMIT as AUTO_SECONDS
from rkmate.planners.finish import finish, without_waste
from rkmate.planners.protocol import Outcome, Planner, Problem
from rkmate.planners.registry import planner as find_planner
from rkmate.planners.save_set import KeepSet
from rkmate.rotor import minimum, solve
from rkmate.rotor.rk_rotor import Table
from rkmate.show.plan import Plan
from rkmate.support.gc_pause import gc_pause

KEEP_SECONDS = 0.6
"""How long the keep program may look for a schedule of one budget."""
PATIENCE = 5.0
"""How long, for the first budget, where it was not done by then and the best is `WIDE` above its bound."""
WIDE = 1e-2
_KEEP = KeepSet("the default's keep-set")
"""With a memory of its own: what `keep-set` finds in the time that it has is not the default's."""
NEAR = 2e-4
"""How near to its lower bound a schedule is good enough for no other planner to be asked."""
DTR_NODES = 1500
LOWER_SET_NODES = 300
"""Up to how many computations these planners are asked, too: their time grows with the square."""
DEEP_NODES = 800
"""On graphs of more computations, further budgets get one schedule of the chain finished, not two and
dtr's, after fewer tries; one is good enough that leaves less than `REST` of a budget."""
REST = 2e-2
FURTHER_SECONDS = 0.75
"""How long the chain and the keep program may take for such a budget: less for the program, where the
chain's table is made first."""
FINE = 4
"""A table for small budgets ends at this many times the least memory of the chain, with half as many
slots: the one for all budgets has a dozen below the least memory of a deep model."""

_ORIGINS = {"rk-rotor": "the chain's dynamic program (rk-Rotor)",
            "keep-set": "the integer program on the whole graph (keep-set)",
            "dtr": "the replayed policy (dtr)", "lower-sets": "the lower-set program"}


@dataclass(frozen=True)
class Candidate:
    """A schedule and what the simulator says of it."""

    schedule: Schedule
    ops: tuple[Op, ...]
    """The block operations that it is made of; empty when it is not made of such."""
    peak: int
    seconds: float
    origin: str
    """The method that it is from."""


@dataclass(frozen=True)
class Attempt:
    """What one planner made of one budget."""

    plan: Plan | None
    """None unless the status is ok."""
    status: Literal["ok", "infeasible", "timeout"]
    note: str


class Searcher:
    """Plans for one prepared model.

    One dynamic program over the chain serves every budget, and a schedule that was found for one
    budget serves every other that it fits.
    """

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self._found: list[Candidate] = []
        self._patience = PATIENCE
        self._tables: dict[int | None, Table] = {}

    @cached_property
    def baseline(self) -> Candidate:
        """The step without rematerialization."""
        g = self.prepared.graph
        return self._judge(from_order(g, range(len(g.c)), g.loss, self.prepared.pinned), (),
                           "save-all")

    def table(self, memory: int) -> Table:
        """The dynamic program's table for so many bytes, and less: one for small budgets, one for all."""
        chain = self.prepared.keeping_chain
        least = FINE * self._minimum[0]
        most = least if memory <= least else None
        if most not in self._tables:
            with self.prepared.timed("chain"):
                slots = self.prepared.settings.slots // (1 if most is None else 2)
                self._tables[most] = solve(chain, max(1, slots), most=most)
        return self._tables[most]

    @cached_property
    def _minimum(self) -> tuple[int, list[Op]]:
        chain = self.prepared.chain
        with self.prepared.timed("chain"):
            return minimum(chain)

    @cached_property
    def smallest(self) -> Candidate:
        """The schedule with the smallest peak that the planner knows."""
        least = self._expand(self._minimum[1])
        return min(least, self.baseline, key=lambda c: (c.peak, c.seconds))

    @cached_property
    def problem(self) -> Problem:
        """The same model as the planners of the registry see it."""
        p = self.prepared
        return Problem(p.graph, p.chain, tuple(b.c for b in p.partition.blocks), p.pinned,
                       p.reserve_at_loss, lambda: p.stages)

    def plan(self, budget: Budget, planner: str = "rockmate",
             time_limit: float | None = None) -> Plan:
        """The fastest schedule found within the budget.

        `time_limit`: seconds of planning, for planners that can stop early; the settings' unless
        given.

        Raises:
            InfeasibleBudget: the planner has a schedule within a larger budget only.
            PlanningTimeout: its time was over before it found one.
            ArgumentError: it has no schedule for this model at any budget.
        """
        limit = budget.of(self.baseline.peak)
        attempt = self.attempt(limit, planner, time_limit)
        if attempt.plan is not None:
            return attempt.plan
        if planner in ("rockmate", "auto"):
            raise InfeasibleBudget(
                f"no schedule fits in {limit:,} bytes; the smallest budget that rockmate always meets is "
                f"{self.smallest.peak:,} bytes "
                f"({self.smallest.peak / self.baseline.peak:.0%} of its own peak of "
                f"{self.baseline.peak:,} bytes)", self.smallest.peak)
        if attempt.status == "timeout":
            raise PlanningTimeout(f"{planner} found no schedule within {limit:,} bytes in the time "
                                  f"it had; {attempt.note or 'give it more, or another planner'}")
        least = self._least_of(find_planner(planner), limit)
        if least is None:
            raise ArgumentError(f"planner is {planner!r}, which has no schedule for this model at "
                                f"any budget: {attempt.note or 'take another one'}")
        raise InfeasibleBudget(
            f"{planner} has no schedule within {limit:,} bytes; the smallest budget that it meets "
            f"is {least:,} bytes. {attempt.note}".rstrip(), least)

    def curve(self, budgets: Sequence[Budget], planner: str = "rockmate") -> list[Plan]:
        """A plan for each budget; among plans of the default planner, peak and time are monotone.

        What is found for one budget serves another that it fits, too. Raises what `plan` raises.
        """
        base = self.baseline.peak
        plans = [self.plan(b, planner) for b in sorted(budgets, key=lambda b: b.of(base))]
        if planner == "rockmate":
            plans = [replace(self._plan(self._fastest(p.budget_bytes), p.budget_bytes, planner, "", None),
                             bound_seconds=p.bound_seconds) for p in plans]
        by_limit = {p.budget_bytes: p for p in plans}
        return [by_limit[b.of(base)] for b in budgets]

    @gc_pause()
    def attempt(self, limit: int, planner: str = "rockmate",
                time_limit: float | None = None) -> Attempt:
        """What a planner finds within `limit` bytes; that it finds nothing is a result, too."""
        if time_limit is None:
            time_limit = self.prepared.settings.planning_seconds
        if planner == "auto":
            return self._auto(limit, AUTO_SECONDS if time_limit is None else time_limit)
        if planner != "rockmate":
            with self.prepared.timed("search"):
                outcome = find_planner(planner).plan(self.problem, limit, time_limit=time_limit)
            return self._attempted(outcome, limit, planner)
        found = self._own(limit, time_limit)
        if found is None:
            return Attempt(None, "infeasible",
                           f"the smallest budget is {self.smallest.peak:,} bytes")
        plan = self._plan(found[0], limit, planner, "", found[1])
        return Attempt(plan, "ok", plan.note if found[0] is self.baseline else "")

    def _own(self, limit: int, time_limit: float | None) -> tuple[Candidate, float | None] | None:
        """The default's schedule, and a lower bound as `_best` has it; None where none fits."""
        if self.baseline.peak <= limit:
            return self.baseline, self.baseline.seconds
        with self.prepared.timed("search"):
            if self.smallest.peak <= limit:
                return self._best(limit, time_limit)
            # Below what the chain's program reaches.
            kept = self._keep_set(limit, time_limit, max(KEEP_SECONDS, self._patience))
            self._patience = 0.0
            if kept.schedule is None:
                return None
            self._found.append(self._finish(self._judge(kept.schedule, (), "keep-set"), limit))
            return self._fastest(limit), kept.bound

    def _attempted(self, outcome: Outcome, limit: int, name: str) -> Attempt:
        """The schedule of another planner of the literature, as it returns it."""
        if outcome.schedule is None:
            return Attempt(None, "timeout" if outcome.status == "timeout" else "infeasible",
                           outcome.note)
        chosen = self._judge(outcome.schedule, (), name)
        return Attempt(self._plan(chosen, limit, name, outcome.note, outcome.bound), "ok",
                       outcome.note)

    def _auto(self, limit: int, time_limit: float) -> Attempt:
        """The default first, then the planners of the registry in the time that is left."""
        start = time.perf_counter()
        own = self._own(limit, time_limit)
        left = max(0.0, time_limit - (time.perf_counter() - start))
        with self.prepared.timed("search"):
            outcome = find_planner("auto").plan(self.problem, limit, time_limit=left)
        if own is None:
            return self._attempted(outcome, limit, "auto")
        best, bound = own
        if best.seconds >= outcome.seconds:
            return self._attempted(outcome if bound is None else replace(outcome, bound=bound),
                                   limit, "auto")
        note = f"rockmate with its finishing pass; of the others, {outcome.note}"
        return Attempt(self._plan(best, limit, "auto", note, bound), "ok", note)

    def _least_of(self, method: Planner, limit: int) -> int | None:
        """The smallest budget that a planner meets, by bisection on what it returns."""
        best: int | None = None
        low, high = limit, 2 * max(limit, self.baseline.peak)
        for _ in range(24):
            middle = high if best is None else (low + high) // 2
            outcome = method.plan(self.problem, middle, time_limit=2.0)
            if outcome.schedule is None:
                if best is None:
                    return None
                low = middle
            else:
                best = high = self.prepared.simulate(outcome.schedule).peak
            if high - low <= 1:
                break
        return best

    def _best(self, limit: int, time_limit: float | None) -> tuple[Candidate, float | None]:
        """The fastest schedule known within a limit, and a lower bound of the seconds of any that runs
        each backward computation once, in order."""
        start = time.perf_counter()

        def left() -> float | None:
            return None if time_limit is None else max(0.0, time_limit - (time.perf_counter() - start))

        patience, self._patience = self._patience, 0.0
        quick = not patience and len(self.prepared.graph.c) > DEEP_NODES
        chain = self._of_chain(limit, quick) if quick else []
        spent = time.perf_counter() - start
        kept = self._keep_set(limit, left() if quick else time_limit,
                              min(KEEP_SECONDS, max(0.1, FURTHER_SECONDS - spent)))
        done = time.perf_counter() - start < KEEP_SECONDS
        found = [] if kept.schedule is None else [self._judge(kept.schedule, (), "keep-set")]
        if kept.bound is None or kept.seconds > kept.bound * (1 + NEAR):
            chain = chain or self._of_chain(limit)
            found += sorted(chain, key=lambda c: c.seconds)[:1 if quick else 2]
            found += [] if quick else self._of_other_planners(limit, left())
        self._found += [self._finish(c, limit) for c in found]
        best = self._fastest(limit)
        if not done and patience and (kept.bound is None or best.seconds > kept.bound * (1 + WIDE)):
            kept = self._keep_set(limit, left(), patience)
            if kept.schedule is not None:
                self._found.append(self._finish(self._judge(kept.schedule, (), "keep-set"), limit))
        return self._fastest(limit), kept.bound

    def _fastest(self, limit: int) -> Candidate:
        """Of all that was found, for whatever budget: more memory is never slower."""
        inside = [c for c in (self.baseline, *self._found) if c.peak <= limit]
        return min(inside, key=lambda c: (c.seconds, c.peak))

    def _of_chain(self, limit: int, quick: bool = False) -> list[Candidate]:
        """Try several memory limits of the dynamic program: its own count is never below the
        simulator's, so more than the budget may be asked of it as long as the simulator agrees."""
        p = self.prepared
        fits = [self.smallest]
        # What the chain's model counts too much grows with the limit: search up from a sure one.
        base = max(0, limit - p.constant_bytes)
        low, high = base, max(base, limit) + (limit // 2)
        table = self.table(base + base // 4)
        seen: dict[tuple[Op, ...], Candidate] = {}
        memory = base
        for _ in range(5 if quick else 9):
            ops = table.sequence(memory, prepared=not quick)
            if ops is None:
                low, guess = memory, None
            else:
                known = seen.get(tuple(ops))
                candidate = seen[tuple(ops)] = known or self._expand(ops)
                guess = memory + int(limit * (1 - REST / 2)) - candidate.peak
                if candidate.peak <= limit:
                    low = memory
                    if known is None:
                        fits.append(candidate)
                    if quick and candidate.peak > limit * (1 - REST):
                        break
                else:
                    high = memory
            if high - low <= table.slot_bytes:
                break
            memory = guess if quick and guess is not None and low < guess < high else (low + high) // 2
        return fits

    def _keep_set(self, limit: int, time_limit: float | None, seconds: float) -> Outcome:
        allowed = seconds if time_limit is None else min(seconds, time_limit)
        return _KEEP.plan(self.problem, limit, time_limit=allowed)

    def _of_other_planners(self, limit: int, time_limit: float | None) -> list[Candidate]:
        """Schedules over the whole graph, which no boundary of a block confines."""
        size = len(self.prepared.graph.c)
        outcomes = {}
        if size <= DTR_NODES:
            outcomes["dtr"] = find_planner("dtr").plan(self.problem, limit, time_limit=time_limit)
        if size <= LOWER_SET_NODES:
            outcomes["lower-sets"] = find_planner("lower-sets").plan(self.problem, limit)
        return [self._judge(o.schedule, (), name) for name, o in outcomes.items()
                if o.schedule is not None]

    def _finish(self, candidate: Candidate, limit: int) -> Candidate:
        p = self.prepared
        schedule = finish(p.graph, candidate.schedule, limit, pinned=p.pinned,
                          reserve_at_loss=p.reserve_at_loss)
        return self._judge(schedule, candidate.ops, candidate.origin)

    def _expand(self, ops: Sequence[Op]) -> Candidate:
        """The flat schedule of a sequence of block operations."""
        p = self.prepared
        graph, blocks = p.graph, p.partition.blocks
        chain = p.keeping_chain if any(o.level is not None for o in ops) else p.chain
        order = [i for i in graph.forward if p.partition.block_of[i] == HOISTED]
        loss_at: int | None = None
        for op in ops:
            c, nodes = blocks[op.block].c, chain.nodes(op)
            if isinstance(op, Backward) and loss_at is None:
                loss_at = len(order)
            order += c[:blocks[op.block].graph.loss] if nodes is None else [c[i] for i in nodes]
        assert loss_at is not None
        schedule = without_waste(graph, from_order(graph, order, loss_at, p.pinned), p.pinned)
        return self._judge(schedule, tuple(ops), "rk-rotor")

    def _judge(self, schedule: Schedule, ops: tuple[Op, ...], origin: str) -> Candidate:
        result = self.prepared.simulate(schedule)
        return Candidate(schedule, ops, result.peak, result.seconds, origin)

    @cached_property
    def summary(self) -> GraphSummary:
        """The graph as plans carry it."""
        return summarise(self.prepared)

    def _plan(self, best: Candidate, limit: int, planner: str, note: str,
              bound: float | None) -> Plan:
        """`bound`: of schedules whose computations all go part by part."""
        p = self.prepared
        chosen, plain = self._with_kernels(best), self._with_kernels(self.baseline)
        infos = with_option_counts(p) if best is not self.baseline and planner == "rockmate" \
            else p.infos
        return Plan(
            planner=planner, budget_bytes=limit, peak_bytes=chosen.peak,
            baseline_peak_bytes=self.baseline.peak, step_seconds=chosen.seconds,
            baseline_seconds=plain.seconds,
            bound_seconds=None if bound is None else max(0.0, bound - seconds_to_save(p.graph)),
            minimum_bytes=min(self.smallest.peak, best.peak)
            if planner == "rockmate" and best is not self.baseline else None,
            blocks=infos, runs=tuple(self._runs(best)), schedule=chosen.schedule,
            fingerprint=p.fingerprint, costs=tuple(p.costs[i] for i in range(len(p.graph.c))),
            graph=self.summary, note=self._with_rewriting(note or self._note(best)),
            stage_seconds=dict(p.stage_seconds), nodes=dict(p.nodes))

    def _with_kernels(self, found: Candidate) -> Candidate:
        p = self.prepared
        return self._judge(choose_kernels(p.graph, found.schedule, pinned=p.pinned,
                                          reserve_at_loss=p.reserve_at_loss), found.ops, found.origin)

    def _note(self, best: Candidate) -> str:
        return "nothing needs to be forgotten" if best is self.baseline else \
            f"the fastest of several schedules: that of {_ORIGINS.get(best.origin, best.origin)}"

    def _with_rewriting(self, note: str) -> str:
        split = self.prepared.settings.split_head == "always"
        heads = self.prepared.partition.program.joint.heads if split else ()
        return f"{note}; the products with {', '.join(heads)} and their cross entropies are computed a " \
            "few rows at a time" if heads else note

    def _runs(self, best: Candidate) -> Iterator[Run]:
        p = self.prepared
        if not best.ops or any(op.level is not None for op in best.ops):
            return runs_of(best.schedule, p.graph, p.partition.block_of)
        return runs_of_operations(best.ops, [p.option_sets[c].options for c in p.classes])
