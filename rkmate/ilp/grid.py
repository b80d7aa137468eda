"""Options of one block over a grid of pairs of limits (M_peak, M_save): those that no other option beats."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rkmate.ilp.heuristic import candidates, keep_nothing, recompute_missing
from rkmate.ilp.highs import Highs, Status
from rkmate.ilp.model import RECOMPUTE, TIE, TIME_SCALE, BlockModel
from rkmate.ilp.settings import OptionSettings
from rkmate.ilp.stages import BlockStages, split_stages
from rkmate.ir import recompute
from rkmate.ir.cd import CDGraph
from rkmate.ir.chain import Option
from rkmate.ir.schedule import Compute, Loss, from_order
from rkmate.ir.simulate import simulate

# -- Make an `Option` from an order of computations: the simulator determines its costs ------------

def evaluate_option(graph: CDGraph, backward: Sequence[int]) -> Option:
    """Return the option that runs every forward node once, then `backward`.

    Bytes and seconds are the simulator's. The bytes of the graph's outputs do not count as saved.
    The step of the loss itself belongs to neither phase: what the loss (or the next block)
    allocates is its own. Raises `ScheduleError` when the order is not executable.
    """
    loss = graph.loss
    schedule = from_order(graph, (*range(loss), *backward), loss)
    result = simulate(graph, schedule)
    at = next(k for k, step in enumerate(schedule.steps) if isinstance(step, Loss))
    first = next((k for k in range(at + 1, len(schedule.steps))
                  if isinstance(schedule.steps[k], Compute)), len(schedule.steps))
    external = set(graph.inputs) | set(graph.output_grads)
    forward_seconds = sum(graph.c[i].time for i in range(loss))
    return Option(
        forward=tuple(range(loss)),
        backward=tuple(backward),
        forward_seconds=forward_seconds,
        backward_seconds=sum(graph.c[i].time for i in backward),
        saved_bytes=result.saved - graph.bytes(set(graph.outputs) - external),
        forward_peak_bytes=max(result.timeline[:at], default=0),
        backward_peak_bytes=max(result.timeline[first:], default=0),
    )


def without_waste(graph: CDGraph, backward: Sequence[int]) -> tuple[int, ...]:
    """Return `backward` without the recomputations that nothing reads before they are made anew."""
    lean = recompute.without_waste(graph, (*graph.forward, *backward), graph.loss)
    return tuple(lean.order[lean.loss_at:])


# -- Results for a block while its grid of budgets is solved: options found, bounds proven ---------

def peak(option: Option) -> int:
    """Return the greater of an option's two peaks, in bytes: what M_peak bounds."""
    return max(option.forward_peak_bytes, option.backward_peak_bytes)


def seconds(option: Option) -> float:
    """Time of forward and backward together."""
    return option.forward_seconds + option.backward_seconds


@dataclass
class ParetoFront:
    """Options found so far and lower bounds proven so far."""

    tolerance: float = 0.0
    """Seconds by which an answer may miss the optimum."""
    options: list[Option] = field(default_factory=list)
    proofs: list[tuple[int, int, float]] = field(default_factory=list)
    """(M_peak, M_save, seconds): no option within these budgets is faster; infinite when there is
    none at all."""

    def best(self, m_peak: int, m_save: int) -> Option | None:
        """Return the fastest known option within the budgets."""
        fitting = [o for o in self.options if o.saved_bytes <= m_save and peak(o) <= m_peak]
        return min(fitting, key=lambda o: (seconds(o), o.saved_bytes, peak(o)), default=None)

    def bound(self, m_peak: int, m_save: int) -> float:
        """Return seconds: the greatest lower bound known for these budgets."""
        return max((b for p, s, b in self.proofs if p >= m_peak and s >= m_save), default=-math.inf)

    def answered(self, m_peak: int, m_save: int) -> bool:
        """Return whether nothing is left to find for this pair, within the tolerance."""
        bound = self.bound(m_peak, m_save)
        if bound == math.inf:
            return True
        best = self.best(m_peak, m_save)
        return best is not None and seconds(best) <= bound + self.tolerance


def undominated(options: Iterable[Option]) -> tuple[Option, ...]:
    """Return the options that no other beats in time, saved bytes and both peaks; fastest first."""
    def key(o: Option) -> tuple[float, int, int, int]:
        return seconds(o), o.saved_bytes, o.backward_peak_bytes, o.forward_peak_bytes

    kept: list[Option] = []
    for option in sorted(options, key=key):
        mine = key(option)
        # Whatever dominates it comes before it, or is equal to it.
        if not any(all(a <= b for a, b in zip(key(other), mine, strict=True)) for other in kept):
            kept.append(option)
    return tuple(kept)


# -- Find all options of one block: the integer program over a grid of budgets ---------------------

HEURISTIC_SHARE = 0.4
"""Part of a block's time that the heuristics may take at most."""
MODEL_ENTRIES = 400_000
"""Programs with more coefficients than this are not built: seconds would not be enough."""
PATIENCE = 3
"""After this number of solves in a row that ran out of time and found nothing new, the block is too hard for
the program."""


@dataclass(frozen=True)
class BlockSolution:
    """Result of one integer program."""

    status: Status
    option: Option | None
    """The option; None if there is none within the budgets, or if none was found in time. Bytes and seconds
    are the simulator's."""
    bound_seconds: float
    """No option within the budgets takes less time, among those that recompute right before a
    backward node that reads forward data, forward nodes in their order; infinite when there is
    none, minus infinity when nothing is known. If sizes have no large common divisor, memory
    counts in units of 1/20000 of the save-all peak, and so do the budgets that this holds for."""


@dataclass(frozen=True)
class OptionSet:
    """Result of the option stage for one block."""

    options: tuple[Option, ...]
    """Fastest first; none beaten by another in time, saved bytes and both peaks. Never empty: the
    first one takes no longer than if nothing were recomputed."""
    solves: int
    """Integer programs solved."""
    timed_out: int
    """Number of pairs of budgets whose answer is not proven, for lack of time."""
    seconds: float
    """Wall-clock time that it took; 0 when it came from the cache."""


class BlockProgram:
    """A block's program, and what comes back from it judged by the simulator."""

    def __init__(self, graph: CDGraph, settings: OptionSettings,
                 stop: threading.Event | None = None) -> None:
        self.graph = graph
        self.settings = settings
        self.stages: BlockStages = split_stages(graph)
        self.save_all = evaluate_option(graph, graph.backward)
        self.model = BlockModel(self.stages, peak(self.save_all))
        self.highs = Highs(self.model.program, stop)

    def solve(self, m_peak: int, m_save: int, *, time_limit: float | None = None,
              start: Option | None = None) -> BlockSolution:
        """Return the fastest option of the block within two budgets. Infeasible and timed out are results.
        Raises `SolverError` if the solver fails.

        `m_peak`: bytes at any moment of forward and backward, block inputs not counted. `m_save`: bytes kept
        between them, outputs not counted. `time_limit`: seconds; the settings' by default. `start`: an option
        to start from.
        """
        model = self.model
        if m_peak < model.lowest_peak or m_save < 0:
            # The program leaves out the rows that hold at every budget from the floor up.
            return BlockSolution(Status.INFEASIBLE, None, float("inf"))
        self.highs.fix("M_peak", float(model.budget(m_peak)))
        self.highs.fix("M_save", float(model.budget(m_save)))
        answer = self.highs.solve(
            self.settings.time_limit if time_limit is None else time_limit,
            absolute_gap=max(self.settings.gap * TIME_SCALE, 1e-6),
            start=model.values(start.backward) if start is not None else None)
        if answer.status is Status.INFEASIBLE:
            return BlockSolution(answer.status, None, float("inf"))
        bound = self._bound_seconds(answer.bound)
        if not answer.values and answer.status is Status.TIMED_OUT:
            return BlockSolution(answer.status, None, bound)
        order = without_waste(self.graph, model.order(answer.values))
        return BlockSolution(answer.status, evaluate_option(self.graph, order), bound)

    def _bound_seconds(self, objective: float) -> float:
        # The small terms that break ties are no time.
        small = TIE + RECOMPUTE * len(self.model.R)
        rest = max(0.0, objective - small)
        return seconds(self.save_all) + rest * self.model.base_seconds / TIME_SCALE


def block_options(graph: CDGraph, settings: OptionSettings | None = None, *,
                  stop: threading.Event | None = None) -> OptionSet:
    """Return the options of a block over the whole grid of budgets, the answered pairs skipped.

    `stop`: ends the work early when somebody sets it, as if the time were over.
    """
    settings = settings or OptionSettings()
    begin = time.perf_counter()
    stages = split_stages(graph)
    save_all = evaluate_option(graph, graph.backward)
    if not stages.stages:
        # The backward reads nothing that could be forgotten.
        return OptionSet((save_all,), 0, 0, time.perf_counter() - begin)

    block: BlockProgram | None = None

    def left(share: float = 1.0) -> float:
        """Return seconds that are left of a share of this block's time; none where that share of its
        iterations is used up."""
        worked = 0 if block is None else block.highs.iterations
        if (stop is not None and stop.is_set()) or worked > share * settings.block_iterations:
            return 0.0
        return settings.block_limit * share - (time.perf_counter() - begin)

    pareto = ParetoFront(settings.gap * sum(c.time for c in graph.c))
    pareto.options += [save_all, evaluate_option(graph, without_waste(graph, keep_nothing(stages)))]
    pareto.proofs.append((peak(save_all), save_all.saved_bytes, seconds(save_all)))
    for order in candidates(stages):
        if left(HEURISTIC_SHARE) <= 0:
            break
        pareto.options.append(evaluate_option(graph, without_waste(graph, order)))
    pareto.options = list(undominated(pareto.options))
    lowest = min(map(peak, pareto.options))
    if BlockModel.entries(stages) <= MODEL_ENTRIES and left() > 0:
        block = BlockProgram(graph, settings, stop)
        lowest = block.model.lowest_peak
    everything = pairs = budgets(lowest, save_all, settings.grid)
    solves = timed_out = fruitless = 0
    hurried = False
    while pairs:
        if not hurried and left(0.5) <= 0:
            # Too little time for the whole grid: what is left of it evenly covers the budgets.
            hurried = True
            pairs = coarse_to_fine(pairs)
        (m_peak, m_save), *pairs = pairs
        if pareto.answered(m_peak, m_save):
            continue
        if block is None or left() <= 0 or fruitless >= PATIENCE:
            timed_out += 1
            continue
        known = pareto.best(m_peak, m_save)
        solution = block.solve(m_peak, m_save, time_limit=min(settings.time_limit, left()),
                               start=known)
        solves += 1
        fruitless = 0 if _gained(solution, known, pareto.tolerance) else fruitless + 1
        timed_out += solution.status in (Status.FEASIBLE, Status.TIMED_OUT)
        pareto.proofs.append((m_peak, m_save, solution.bound_seconds))
        if solution.option is not None:
            pareto.options.append(solution.option)
    # An option that is the answer to no pair of the grid would only slow the chain down.
    answers = [pareto.best(*pair) for pair in everything]
    extremes = [save_all, min(pareto.options, key=lambda o: (o.saved_bytes, seconds(o))),
                min(pareto.options, key=lambda o: (peak(o), seconds(o)))]
    return OptionSet(undominated([*extremes, *(o for o in answers if o is not None)]), solves,
                     timed_out, time.perf_counter() - begin)


def lean_options(graph: CDGraph) -> OptionSet:
    """Return the options that need no solver and no time: everything is kept, or nothing; recomputed values
    are freed at once or stay until their last use."""
    stages = split_stages(graph)
    orders = [graph.backward] if not stages.stages else [
        graph.backward, keep_nothing(stages),
        recompute_missing(stages, stages.outputs, free_after_stage=True)]
    found = [evaluate_option(graph, without_waste(graph, order)) for order in orders]
    return OptionSet(undominated(found), 0, 0, 0.0)


def _gained(solution: BlockSolution, known: Option | None, tolerance: float) -> bool:
    """Return whether a solve proved something or found something better than what was known."""
    if solution.status in (Status.OPTIMAL, Status.INFEASIBLE):
        return True
    return solution.option is not None and (
        known is None or seconds(solution.option) < seconds(known) - tolerance)


def budgets(lowest: int, save_all: Option, grid: tuple[int, int]) -> list[tuple[int, int]]:
    """Return pairs (M_peak, M_save) in bytes, the loosest first: the answer to a loose pair often answers
    tighter pairs, too."""
    rows, columns = grid
    top = max(peak(save_all), lowest)
    peaks = [lowest + (top - lowest) * k // max(1, rows - 1) for k in range(rows - 1)] + [top]
    pairs = []
    for m_peak in reversed(peaks):
        limit = min(m_peak, save_all.saved_bytes)
        pairs += [(m_peak, limit * k // max(1, columns - 1)) for k in reversed(range(columns))]
    return pairs


def coarse_to_fine(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the pairs in another order: first every other pair, then the pairs between them, and so on."""
    if len(pairs) < 3:
        return pairs
    return coarse_to_fine(pairs[::2]) + pairs[1::2]
