"""Plans for the parts of a model that cannot be planned as a whole: the schedules that a part may follow, and
a plan for the one that it follows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import fx

from rkmate.device import MeterError
from rkmate.graph.capture.captured import Capture, Source
from rkmate.ir.schedule import Loss, Schedule
from rkmate.ir.simulate import peak_with_gradients, simulate
from rkmate.pipeline.attempts import Planned, plan_of
from rkmate.pipeline.prepare import Blocked, Prepared, Traced, on_estimates, prepare
from rkmate.pipeline.solve import Solved, solve
from rkmate.pipeline.variants import Variant, first, others
from rkmate.planners.protocol import (
    Outcome,
    Planner,
    Problem,
    ask,
    found_in,
    smallest,
    whole_step,
)
from rkmate.planners.registry import planner as find_planner
from rkmate.planners.several_calls import Way
from rkmate.support.planning_lock import gc_pause
from rkmate.torch_seam.nodes import VALUE, is_backward

_ADD = torch.ops.aten.add.Tensor
AROUND = (0.6, 0.85, 1.0, 1.2)
"""Multiples of the bytes that a part can hold between forward and backward on average: each is tried as the
limit of a schedule."""
LEAN = 0.05
"""The share of the way from the smallest peak that is known to that without recomputation: about so much more
may a part take that holds as little as it can between forward and backward."""


@dataclass(frozen=True, eq=False)
class PartWays:
    """A part with the schedules that it may follow."""

    solved: Solved
    planner: str
    schedules: tuple[Schedule, ...]
    ways: tuple[Way, ...]
    """The figures of each schedule."""
    smallest: int | None
    """The smallest budget of one call, in bytes."""
    keeps_gradients: bool = False
    """Whether gradients of parameters stay in memory until the backward of a call is over."""
    dropped: frozenset[int] = frozenset()
    """Numbers of the outputs that the model lets go of in its forward."""

    @cached_property
    def whole(self) -> Way:
        """The figures of a call without recomputation."""
        return self.way(self.solved.prepared.whole)

    def way(self, schedule: Schedule) -> Way:
        """Return the figures of a schedule."""
        prepared = self.solved.prepared
        found = prepared.simulate(schedule)
        peak = peak_with_gradients(prepared.graph, schedule, found) if self.keeps_gradients else found.peak
        dropped = self._dropped_by(schedule)
        if dropped:
            loss = schedule.steps.index(Loss())
            peak = max(max(found.timeline[:loss]), max(found.timeline[loss:]) - dropped)
        saved = found.saved - dropped
        return Way(found.seconds, saved, max(0, peak - saved))

    def _dropped_by(self, schedule: Schedule) -> int:
        """Return the bytes of outputs that neither the model nor the part's step holds after its forward."""
        program, cd = self.solved.prepared.partition.program, self.solved.prepared.graph
        held = {program.d_of(n) for k, n in enumerate(program.joint.outputs)
                if n is not None and k not in self.dropped}
        return cd.bytes(program.only_returned(schedule) - held) if self.dropped else 0

    def planned(self, number: int, extra: int) -> Planned:
        """A plan with one of the schedules. `extra`: bytes on top of what it saves that it may take while it
        runs; as many have to be free while it waits."""
        prepared = with_bytes_at_loss(self.solved.prepared, extra)
        schedule = self.schedules[number]
        outcome = Outcome(schedule, "ok", self.ways[number].seconds, smallest=self.smallest,
                          note="a part of a step")
        solved = replace(self.solved, summary=replace(self.solved.summary, cd=prepared.graph))
        budget = self.ways[number].saved + self._dropped_by(schedule) + extra
        plan = plan_of(prepared, solved, self.planner, budget, outcome)
        return Planned(plan, prepared)


def with_bytes_at_loss(prepared: Prepared, extra: int) -> Prepared:
    """Return the part with `extra` bytes that have to be free at the loss (`Settings.loss_bytes`)."""
    traced = prepared.blocked.traced
    traced = replace(traced, settings=replace(traced.settings, loss_bytes=extra))
    graph = prepared.graph.with_reserve(extra)
    return replace(prepared, blocked=replace(prepared.blocked, traced=traced), graph=graph,
                   baseline=simulate(graph, prepared.whole))


@gc_pause()
def ways_of(traced: Traced, planner: str, limit: Callable[[Blocked], int], share: float,
            variant: Variant | None = None, keeps_gradients: bool = False,
            dropped: frozenset[int] = frozenset()) -> PartWays:
    """Measure a part, and look for schedules that hold more or less between forward and backward.

    `traced`: with ``Settings(loss_bytes=0)``, as the part's outputs go on into the model. `limit`: the bytes
    that measuring may take. `share`: about how much of what it saves a call can hold within the budget.
    `variant`: of its graph; the settings' first unless given. `keeps_gradients`: whether gradients of
    parameters stay until the backward of a call is over (`fully_shard`). `dropped`: numbers of the outputs
    that the model lets go of in its forward.
    """
    try:
        prepared = prepare(traced, variant, limit=limit)
    except MeterError as error:
        if traced.measured_by is not None:      # the ranks measure together
            raise
        prepared = prepare(on_estimates(traced, error), variant)
    method = find_planner(planner, traced.settings.of_planner)
    part = PartWays(solve(prepared), method.name, (), (), None, keeps_gradients, dropped)
    return _with(part, method, (prepared.whole,), share)


@gc_pause()
def more_ways(ways: PartWays, share: float) -> PartWays:
    """Return a part with further schedules, for another share of what it saves (`ways_of`)."""
    settings = ways.solved.prepared.settings
    return _with(ways, find_planner(ways.planner, settings.of_planner), ways.schedules, share)


def lean_variants(ways: PartWays) -> list[Variant]:
    """Return the variants of a part's graph that trade something for memory, tiles last. `ways`: the
    schedules of the original's operations."""
    blocked = ways.solved.prepared.blocked
    settings = blocked.traced.settings
    always = first(settings).rows
    return [variant for variant in others(settings, blocked.concerned)
            if not any(row.asked_for and row not in always for row in variant.rows)]


def _with(part: PartWays, method: Planner, known: Sequence[Schedule], share: float) -> PartWays:
    ways: dict[Way, Schedule] = {}
    for schedule in (*known, *(_searched(part.solved, method, share) if share < 1 else ())):
        ways.setdefault(part.way(schedule), schedule)
    kept = [w for w in ways if not any(_is_better(o, w) for o in ways)]
    smallest = min((w.saved + w.extra for w in kept), default=None)
    return replace(part, schedules=tuple(ways[w] for w in kept), ways=tuple(kept), smallest=smallest)


def _is_better(one: Way, other: Way) -> bool:
    return one != other and one.seconds <= other.seconds and one.saved <= other.saved \
        and one.extra <= other.extra


def _searched(solved: Solved, method: Planner, share: float) -> Sequence[Schedule]:
    """Schedules for several bounds on what is held, and on what is taken on top of that."""
    problem, found = solved.problem, []
    whole = problem.simulate(whole_step(problem).schedule)
    graph = problem.graph
    least = smallest(method, problem, 0)
    held = graph.bytes({*graph.held, *graph.outputs})
    extras = {whole.peak - held}
    if least is not None:
        extras.add(max(1, (whole.peak + 2 * least.peak) // 3 - held))
        lean = least.peak + int(LEAN * (whole.peak - least.peak))
        found += _schedules(method, problem, least.peak)
        found += _schedules(method, problem.with_reserve(max(1, lean - held)), lean)
    for extra in sorted(extras):
        part = problem.with_reserve(extra)
        for saved in dict.fromkeys(held + int(min(0.97, share * around) * (whole.saved - held))
                                   for around in (0.0, *AROUND)):
            found += _schedules(method, part, saved + extra)
    return found


def _schedules(method: Planner, problem: Problem, limit: int) -> list[Schedule]:
    return [c.schedule for c in found_in(problem, ask(method, problem, limit, known=()))]


# -- Gradients of inputs as sums -------------------------------------------------------------------
#
# A gradient that several users of a tensor contribute to is added up in the order in which they come. A plan
# hands out the sum of its own contributions; where others contribute, too, that is another order, and other
# last bits.

FEW = 3
"""Terms of an input's gradient, at most, that a plan of a whole module hands out one by one."""


def with_terms(capture: Capture, shared: Collection[int]) -> Capture:
    """Return a capture whose step hands out the gradients of some inputs as the terms of a sum.

    `shared`: numbers of the inputs that others use, too."""
    if capture.recipe is not None:
        return capture
    grads: list[tuple[Source, fx.Node]] = []
    repeats: list[int] = []
    for source, node in capture.grads:
        terms = _terms_of(capture, source, node) if source.key in shared else [node]
        grads.append((source, terms[0]))
        for term in terms[1:]:
            grads.append((Source("input", capture.inputs.count + len(repeats), int(source.key)), term))
            repeats.append(int(source.key))
    return replace(capture, grads=tuple(grads), repeats=tuple(repeats))


def terms_in(capture: Capture) -> dict[int, int]:
    """Return, for each input that several operations use, how many terms the sum that is its gradient has.
    (Of a formula that is one user's own, more than there are.)"""
    found = {int(source.key): len(_terms(node)) for source, node in capture.grads
             if source.kind == "input" and int(source.key) < capture.inputs.count}
    return {k: n for k, n in found.items() if n > 1 and k not in capture.repeats}


def few_terms(capture: Capture) -> frozenset[int]:
    """Return the inputs whose gradients are sums of few terms, which take little memory one by one."""
    return frozenset(k for k, n in terms_in(capture).items() if n <= FEW)


def _terms_of(capture: Capture, source: Source, node: fx.Node) -> list[fx.Node]:
    if source.kind != "input":
        return [node]
    terms = _terms(node)
    own = next(n for n, s in capture.sources.items() if s.kind == "input" and s.key == source.key)
    # Else some sum belongs to one user's formula.
    return terms if len(terms) <= sum(not is_backward(n) for n in own.users) else [node]


def _terms(node: fx.Node) -> list[fx.Node]:
    terms: list[fx.Node] = []
    while _is_sum(node) and (not terms or len(node.users) == 1):
        before, term = node.args
        assert isinstance(before, fx.Node) and isinstance(term, fx.Node)
        terms.insert(0, term)
        node = before
    return [node, *terms]


def _is_sum(node: fx.Node) -> bool:
    return node.target is _ADD and is_backward(node) and not node.kwargs and len(node.args) == 2 and all(
        isinstance(a, fx.Node) and a.meta[VALUE].shape == node.meta[VALUE].shape
        and a.meta[VALUE].dtype == node.meta[VALUE].dtype for a in node.args)
