"""Replays a log under a heuristic and a budget, as the paper's simulator does (appendix C)."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Literal

from rkmate.dtr.heuristics import Heuristic, make_heuristic
from rkmate.dtr.log import CONSTANT, Compute, LoggedOperation, Program, Retain
from rkmate.dtr.pool import Columns, Node, Pool
from rkmate.errors import ArgumentError

Status = Literal["ok", "OOM", "thrash"]


@dataclass(frozen=True)
class Result:
    """Result of a replay."""

    heuristic: str
    """Name of the heuristic."""
    budget: int
    """Bytes that the replay may hold."""
    status: Status
    """How the replay ended: ``ok``, ``thrash`` or ``OOM``."""
    clock: int
    """Time at the end, or where the run stopped; it starts at 1. The log's unit."""
    model_compute: int
    """Time in operations run for the first time."""
    remat_compute: int
    """Time in operations run again."""
    max_memory: int
    """Greatest number of bytes held, both outputs of a repeated operation counted."""
    evict_choices: int
    """Evictions that the heuristic chose; evictions at the last release are not among them."""
    tied_choices: int
    """Choices in which two storages had the same least score."""
    evaluations: int
    """Scores that plain scans of the pool would have computed."""
    metadata_accesses: int
    """Storages visited to keep the neighbourhoods' costs."""
    evict_seq_sha1: str
    """SHA-1 of the chosen evictions, as ``clock:name`` joined by ``|``."""

    def as_dict(self) -> dict[str, object]:
        """Return the fields by name."""
        return asdict(self)


@dataclass
class Trace:
    """The life of every storage during a replay, for drawings."""

    events: list[tuple[int, str, str]]
    """Clock, ``compute`` or ``recompute`` or ``evict``, and the name of the storage's root."""
    memory: list[tuple[int, int]]
    """Clock and bytes held, after each operation and eviction."""


class _Tensor:
    __slots__ = ("parents", "siblings", "operation", "place", "storage", "defined")

    def __init__(
        self, parents: list[_Tensor], operation: LoggedOperation, place: int, storage: _Storage
    ) -> None:
        self.parents = parents
        self.siblings: list[_Tensor] = []
        self.operation = operation
        self.place = place
        self.storage = storage
        self.defined = False


class _Storage(Node):
    __slots__ = ("tensors", "references", "name", "last_operation")

    def __init__(self, index: int, size: int, name: str) -> None:
        super().__init__(index, size)
        self.tensors: list[_Tensor] = []
        self.references = 0
        self.name = name
        self.last_operation: LoggedOperation | None = None


class _Stop(Exception):
    def __init__(self, status: Status) -> None:
        super().__init__(status)
        self.status: Status = status


def simulate(
    program: Program,
    heuristic: str | Heuristic,
    budget: int,
    *,
    overhead_limit: float = 10.0,
    seed: int = 0,
    trace: Trace | None = None,
) -> Result:
    """Replay ``program`` within ``budget`` bytes.

    ``heuristic`` is a name or a fresh heuristic of this run's own; ``seed`` is for ``random``. The
    run stops as ``thrash`` when recomputation exceeds ``overhead_limit - 1`` times the program's
    own compute time, and as ``OOM`` when nothing is left to evict. With ``trace``, every event is
    appended to it. Raises ``ArgumentError`` for a negative budget, an unknown heuristic or a limit
    below 1.
    """
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 0:
        raise ArgumentError(f"budget must be a number of bytes that is not negative: {budget!r}")
    if not overhead_limit >= 1:
        raise ArgumentError(f"overhead_limit must be at least 1, and is {overhead_limit}")
    rule = make_heuristic(heuristic, seed) if isinstance(heuristic, str) else heuristic
    replay = Replay(program, rule, budget, (overhead_limit - 1) * program.compute, trace)
    status: Status = "ok"
    try:
        replay.run()
    except _Stop as stop:
        status = stop.status
    return replay.result(status)


class _Frame:
    """A tensor that is being computed, and the arguments that still have to be brought in."""

    __slots__ = ("tensor", "missing", "next")

    def __init__(self, tensor: _Tensor) -> None:
        self.tensor = tensor
        self.missing: list[_Tensor] = []
        self.next = 0


class Replay:
    """A run in progress. ``run`` does all of it; ``first`` one operation at a time."""

    def __init__(
        self,
        program: Program,
        heuristic: Heuristic,
        budget: int,
        remat_limit: float,
        trace: Trace | None,
    ) -> None:
        self.program = program
        self.heuristic = heuristic
        self.budget = budget
        self.remat_limit = remat_limit
        self.trace = trace
        self.columns = Columns()
        self.pool = Pool()
        self.around = heuristic.tracker(self.columns)
        self.tensors: list[_Tensor] = []
        self.clock = 1
        self.memory = 0
        self.model_compute = 0
        self.remat_compute = 0
        self.max_memory = 0
        self.choices = 0
        self.ties = 0
        self.evaluations = 0
        self.evicted: list[str] = []

    def run(self) -> None:
        for step in self.program.steps:
            if isinstance(step, Compute):
                self.first(step.operation)
            elif isinstance(step, Retain):
                tensor = self.tensors[step.tensor]
                if step.pin:
                    if not tensor.defined:
                        self._materialize(tensor, first=False)
                    self._pin(tensor.storage)
                else:
                    tensor.storage.references += 1
            else:
                storage = self.tensors[step.tensor].storage
                storage.references -= 1
                if storage.references == 0 and storage.resident and not storage.pinned:
                    self._evict(storage)

    def pin(self, tensor: int) -> None:
        """Keep a tensor's storage in memory from here on."""
        self._pin(self.tensors[tensor].storage)

    def resident(self, tensor: int) -> bool:
        """Return whether a tensor's storage is in memory."""
        return self.tensors[tensor].storage.resident

    def result(self, status: Status) -> Result:
        """Return the numbers so far, under ``status``."""
        return Result(
            heuristic=self.heuristic.name,
            budget=self.budget,
            status=status,
            clock=self.clock,
            model_compute=self.model_compute,
            remat_compute=self.remat_compute,
            max_memory=self.max_memory,
            evict_choices=self.choices,
            tied_choices=self.ties,
            evaluations=self.evaluations,
            metadata_accesses=self.around.accesses,
            evict_seq_sha1=hashlib.sha1("|".join(self.evicted).encode()).hexdigest(),
        )

    def first(self, operation: LoggedOperation) -> None:
        """Run an operation for the first time; raises ``_Stop`` when it cannot."""
        parents = [self.tensors[number] for number in operation.arguments]
        made = []
        for place, number in enumerate(operation.results):
            alias = operation.aliases[place]
            fresh = alias < 0
            storage = (
                _Storage(self.columns.claim(), operation.sizes[place], self.program.names[number])
                if fresh
                else parents[alias].storage
            )
            tensor = _Tensor(parents, operation, place, storage)
            storage.tensors.append(tensor)
            storage.references += 1
            if fresh:
                self.columns.add(storage)
            # Every operation that makes a part of a storage counts in its cost, once.
            if storage.last_operation is not operation:
                storage.last_operation = operation
                self.columns.add_cost(storage, operation.cost)
                if not fresh:
                    self.around.costlier(storage)
            grown = False
            for parent in parents:
                other = parent.storage
                if other is not storage and other not in storage.parents:
                    storage.parents.add(other)
                    other.children.add(storage)
                    grown = True
            if fresh:
                self.around.appear(storage)
            elif grown:
                self.around.link(storage)
            made.append(tensor)
            self.tensors.append(tensor)
        for tensor in made:
            tensor.siblings = [other for other in made if other is not tensor]
        self._materialize(made[0], first=True)
        for tensor in made:
            self.columns.touch(tensor.storage, self.clock)

    def _materialize(self, tensor: _Tensor, *, first: bool) -> None:
        """Compute a tensor, bringing in evicted arguments first, however deep they go."""
        stack = [self._enter(tensor)]
        while stack:
            frame = stack[-1]
            if frame.next < len(frame.missing):
                argument = frame.missing[frame.next]
                if not argument.defined:
                    stack.append(self._enter(argument))
                    continue
                self._lock(argument.storage)
                frame.next += 1
                continue
            stack.pop()
            self._perform(frame.tensor, first=first and not stack)

    def _enter(self, tensor: _Tensor) -> _Frame:
        frame = _Frame(tensor)
        for parent in tensor.parents:
            self.columns.touch(parent.storage, self.clock)
        for parent in tensor.parents:
            if parent.defined:
                self._lock(parent.storage)
            else:
                frame.missing.append(parent)
        return frame

    def _perform(self, tensor: _Tensor, *, first: bool) -> None:
        operation = tensor.operation
        total = sum(operation.sizes)
        while self.memory + total > self.budget:
            self._choose()
        doubled = [other for other in tensor.siblings if other.defined]
        fresh = [*(other for other in tensor.siblings if not other.defined), tensor]
        back = [other.storage for other in fresh if not other.storage.resident]
        self.clock += operation.cost
        self.memory += total
        self.max_memory = max(self.max_memory, self.memory)
        if first:
            self.model_compute += operation.cost
        else:
            self.remat_compute += operation.cost
        for other in fresh:
            other.storage.resident = True
            other.defined = True
        # Outputs that were in memory have been computed a second time; the copies go at once.
        for other in doubled:
            self.memory -= operation.sizes[other.place]
        for storage in back:
            self.pool.append(storage)
        self.around.materialize(back)
        if self.trace is not None and operation.name != CONSTANT:
            kind = "compute" if first else "recompute"
            self.trace.events += [(self.clock, kind, storage.name) for storage in back]
            self.trace.memory.append((self.clock, self.memory))
        for parent in tensor.parents:
            self._unlock(parent.storage)
        if self.remat_compute > self.remat_limit:
            raise _Stop("thrash")

    def _choose(self) -> None:
        if not len(self.pool):
            raise _Stop("OOM")
        self.around.refresh(self.pool)
        pick = self.heuristic.choose(self.pool, self.columns, self.clock)
        storage = self.columns.nodes[pick.row]
        assert isinstance(storage, _Storage)
        self.choices += 1
        self.ties += pick.tied
        self.evaluations += pick.scanned
        self.evicted.append(f"{self.clock}:{storage.name}")
        self._evict(storage)

    def _evict(self, storage: _Storage) -> None:
        storage.resident = False
        self.memory -= storage.size
        self.pool.remove(storage)
        for tensor in storage.tensors:
            tensor.defined = False
        self.around.evict(storage)
        if self.trace is not None:
            self.trace.events.append((self.clock, "evict", storage.name))
            self.trace.memory.append((self.clock, self.memory))

    def _lock(self, storage: _Storage) -> None:
        if storage.locks == 0:
            self.pool.remove(storage)
        storage.locks += 1

    def _unlock(self, storage: _Storage) -> None:
        storage.locks -= 1
        if storage.locks == 0:
            self.pool.append(storage)

    def _pin(self, storage: _Storage) -> None:
        if not storage.pinned:
            self._lock(storage)
            storage.pinned = True
