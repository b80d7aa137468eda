"""Device memory that torch's caching allocator takes for a training loop that follows a schedule.

The loop is replayed through a model of the allocator: its tensors come and go in the schedule's order,
together with batches, gradients and the optimizer's states, which are made when the first step's values have
left holes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rkmate.ir.allocator import Block, CachingAllocator
from rkmate.ir.cd import CDGraph
from rkmate.ir.schedule import Compute, CopyIn, Free, Leave, Loss, Schedule, Start, in_place_donor, kernel_of
from rkmate.ir.simulate import LOSS_SCALARS, buffers_of


@dataclass(frozen=True)
class Beside:
    """Tensors of a loop that are not part of its steps: bytes of each tensor."""

    batch: tuple[int, ...] = ()
    """The next one is there before the last one goes."""
    gradients: tuple[int, ...] = ()
    """Gradients that steps add to in place; made in a step's backward."""
    states: tuple[int, ...] = ()
    """The optimizer's: made after the first step, kept."""
    updates: tuple[int, ...] = ()
    """Tensors that the optimizer holds for a moment, in every update."""


def reserved_bytes(allocator: CachingAllocator, graph: CDGraph, schedule: Schedule,
                   beside: Beside = Beside(), *, calls: int = 1, updates: int = 3) -> int:
    """Return the most bytes that the allocator takes from the device in `updates` updates of the parameters.
    In the last but one of them, gradients of two steps are added up. Leaves the allocator in the final state.

    `calls`: as of a plan. Raises `KeyError` for a schedule that the simulator refuses.
    """
    loop = _Loop(allocator, graph, schedule, beside, calls)
    for number in range(updates):
        loop.step()
        if number == updates - 2:
            loop.step()
        loop.update()
    return allocator.peak


@dataclass
class _Loop:
    allocator: CachingAllocator
    graph: CDGraph
    schedule: Schedule
    beside: Beside
    calls: int
    batch: list[Block | None] = field(default_factory=list)
    states: list[Block | None] = field(default_factory=list)
    gradients: dict[int, Block | None] = field(default_factory=dict)
    """Blocks of gradients by D node; of gradients that are added to in place, by a negative number."""

    def __post_init__(self) -> None:
        self.at_loss = self.schedule.steps.index(Loss())
        self.donors = {k: donor for k, step in enumerate(self.schedule.steps) if isinstance(step, Compute)
                       and (donor := in_place_donor(self.graph, self.schedule.steps, k)) is not None}

    def step(self) -> None:
        """Allocate and free as a step does: the forwards of all calls, the loss, and the backwards."""
        batch = [*map(self.allocator.allocate, self.beside.batch)]
        self.free(self.batch)
        self.batch = batch
        runs = [_Run(self) for _ in range(self.calls)]
        for run in runs:
            run.follow(range(self.at_loss))
        self.loss(runs)
        for run in reversed(runs):
            run.follow(range(self.at_loss + 1, len(self.schedule.steps)))
            self.free(run.held.values())

    def loss(self, runs: list[_Run]) -> None:
        """Allocate the gradients of the outputs, after the temporaries of a loss that the caller computes."""
        sizes = [self.graph.d[j].size for j in self.graph.output_grads]
        if self.graph.reserve_at_loss:
            self.free([*map(self.allocator.allocate, [LOSS_SCALARS, *sizes, *sizes, *sizes])])
        for run in runs:
            for j, size in zip(self.graph.output_grads, sizes, strict=True):
                run.held[j] = self.allocator.allocate(size)
        if not self.gradients:
            self.gradients = {-1 - k: self.allocator.allocate(n) for k, n in enumerate(self.beside.gradients)}

    def update(self) -> None:
        """Follow the optimizer, which makes its states at its first step. Free the gradients."""
        if not self.states:
            self.states = [*map(self.allocator.allocate, self.beside.states)]
        self.free([*map(self.allocator.allocate, self.beside.updates)])
        self.free(self.gradients.values())
        self.gradients = {}

    def free(self, blocks: Iterable[Block | None]) -> None:
        for block in blocks:
            self.allocator.free(block)


class _Run:
    """A call's run of the schedule."""

    def __init__(self, loop: _Loop) -> None:
        self.loop = loop
        size = buffers_of(loop.graph, loop.schedule)
        self.held: dict[int, Block | None] = {-1: loop.allocator.allocate(size)} if size else {}
        """Blocks by D node; those of copies have the number -1."""
        self.taken: set[int] = set()
        self.started: dict[int, Block | None] = {}
        """Temporary memory of collectives that run."""

    def follow(self, steps: Iterable[int]) -> None:
        """Run some of the schedule's steps, by their numbers."""
        for k in steps:
            step = self.loop.schedule.steps[k]
            if isinstance(step, Compute):
                self.compute(k, step)
            elif isinstance(step, Free):
                self.free(step.d)
            elif isinstance(step, Leave):
                self.loop.allocator.free(self.held.pop(step.d))
            elif isinstance(step, Start):
                self.start(step.c)
            elif isinstance(step, CopyIn):
                self.held[step.d] = self.loop.allocator.allocate(self.loop.graph.d[step.d].size)

    def start(self, c: int) -> None:
        graph, allocator = self.loop.graph, self.loop.allocator
        for j in graph.c[c].outputs:
            self.held[j] = allocator.allocate(graph.d[j].size)
        self.started[c] = allocator.allocate(graph.c[c].overhead)

    def compute(self, k: int, step: Compute) -> None:
        graph, allocator = self.loop.graph, self.loop.allocator
        if step.c in self.started:
            allocator.free(self.started.pop(step.c))
            return
        node, donor = graph.c[step.c], self.loop.donors.get(k)
        replaced: list[Block | None] = []
        if donor is not None:
            self.taken.add(donor)
            self.held[node.outputs[0]] = self.held.pop(donor)
        for j in node.outputs if donor is None else node.outputs[1:]:
            if j in self.held:
                replaced.append(self.held[j])
            self.held[j] = allocator.allocate(graph.d[j].size)
        allocator.free(allocator.allocate(kernel_of(graph, step).overhead))
        self.loop.free(replaced)

    def free(self, j: int) -> None:
        if j in self.taken:
            self.taken.discard(j)
            return
        block = self.held.pop(j)
        if j in self.loop.graph.releases and j not in self.loop.gradients:
            self.loop.gradients[j] = block          # the parameter's, until the update
        else:
            self.loop.allocator.free(block)

