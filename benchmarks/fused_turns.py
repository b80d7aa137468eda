"""All methods on one model, each in a process of its own: every round takes one step of each.

A machine's speed moves from minute to minute, by more than what is to be told apart here. Methods whose steps
take turns share it. What a step finds free of the memory of earlier ones, and so what it waits for pages, is
as much again: in a process of its own, a method has what its own steps leave, as in training.
"""

from __future__ import annotations

import contextlib
import copy
import math
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
import transformers
from beside import Forward, peak_of, step
from fused_rows import Turn, Turns, smallest
from peers import Case, budgeted

import rkmate

CONTEXT = multiprocessing.get_context("spawn")
BATCHES = 11
"""On which gradients are compared."""
STEPS_THEN = 7
"""Of a planned module, right after it was planned: a machine's speed moves, and predictions are of that of
then."""
LEAST_ROUNDS = 7
SECONDS = 4
"""Of steps, for each method and on average, at least."""


def in_format(kwargs: dict[str, Any], form: torch.memory_format) -> dict[str, Any]:
    """The arguments, with images of a layout."""
    return {k: v.contiguous(memory_format=form) if v.dim() == 4 else v for k, v in kwargs.items()}


def asked(method: str, case: Case, eager_peak: int, plan: Path | None = None
          ) -> tuple[Forward, rkmate.Plan | None]:
    """A forward by some method, whose budget is a number. `plan`: where rkmate's plan is, or will be."""
    kind, *more = method.split()
    model, kwargs = case.model, case.kwargs
    if kind == "inductor":
        return budgeted(case, kind, float(more[0])), None
    if kind == "eager":
        if more:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            case.kwargs.update(in_format(kwargs, torch.channels_last))
        return lambda: model(**kwargs).loss, None
    how: dict[str, Any]
    if plan is not None and plan.exists():
        how = {"plan": rkmate.Plan.load(plan)}
    else:
        how = {"budget": round(float(more[-1]) * eager_peak)}
    settings = rkmate.Settings(layouts="auto" if "layouts" in more else "keep", compile="compile" in more)
    wrapped = rkmate.wrap(model, (), kwargs, progress=False, settings=settings, **how)
    if plan is not None:
        wrapped.plan.save(plan)
    return lambda: wrapped(**kwargs).loss, wrapped.plan


class Exactness:
    """How far the gradients of a model are from those in double precision, on several batches: where one
    number is cut off by a ReLU here and let through there, all gradients before it move, by a thousand times
    what rounding does. That is luck on one batch."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(0)
        self._batches = [{k: v.clone() for k, v in case.kwargs.items()}]
        for _ in range(BATCHES - 1):        # one tensor may stand for two inputs
            orders = {id(v): torch.randperm(v.numel(), generator=generator) for v in case.kwargs.values()}
            self._batches.append({k: v.flatten()[orders[id(v)]].view(v.shape)
                                  for k, v in case.kwargs.items()})
        model = copy.deepcopy(case.model).double()
        self._exact = []
        for batch in self._batches:
            kwargs = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
            step(lambda kwargs=kwargs: model(**kwargs).loss, model)
            self._exact.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])

    def error(self, forward: Forward, case: Case) -> float:
        """The norm of what is wrong in all gradients, relative to that of the exact ones: the median of the
        batches. `forward` reads the inputs of the case, which are what they were in the end."""
        found = []
        for batch, exact in list(zip(self._batches, self._exact, strict=True))[::-1]:
            for name, value in case.kwargs.items():
                value.copy_(batch[name])
            step(forward, case.model)
            pairs = [(p.grad, e) for p, e in zip(case.model.parameters(), exact, strict=True)
                     if p.grad is not None and e is not None]
            found.append(math.sqrt(sum(float((g.double() - e).square().sum()) for g, e in pairs)
                                   / sum(float(e.square().sum()) for _, e in pairs)))
        return statistics.median(found)


@dataclass(frozen=True)
class Worker:
    """A method at work in another process, which waits for its turns."""

    method: str
    process: SpawnProcess
    link: Connection

    @classmethod
    def started(cls, method: str, *work: Any) -> Worker:
        """`work`: what `_work` takes between the link and the method."""
        here, there = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_work, args=(there, *work, method), daemon=False)
        process.start()
        there.close()
        return cls(method, process, here)

    def heard(self) -> Any:
        """What it says next. Raises `RuntimeError` for an error there, and where it has been killed."""
        try:
            said = self.link.recv()
        except EOFError:
            raise RuntimeError(f"{self.method}: its process was killed, for want of memory perhaps") from None
        if isinstance(said, Exception):
            raise RuntimeError(f"{self.method}: {said}") from said
        return said

    def step(self) -> tuple[float, int]:
        """Seconds of a step, and the fresh pages that it has waited for."""
        self.link.send("step")
        seconds, pages = self.heard()
        return seconds, pages

    def ends(self) -> None:
        """Let it go."""
        with contextlib.suppress(OSError):
            self.link.send("end")
        self.process.join()


def _work(link: Connection, threads: int, made_case: Callable[[], Case], level: int, exactness: Path,
          plan: Path | None, method: str) -> None:
    """In another process: get ready, say the peak and the gradients' error, and take steps when told to."""
    try:
        transformers.logging.set_verbosity_error()
        torch.set_num_threads(threads)
        case = made_case()
        forward, _ = asked(method, case, level, plan)
        peak = peak_of(forward, case.model)
        found: Exactness = torch.load(exactness, weights_only=False, mmap=True)
        error = found.error(forward, case)
        del found
        link.send((peak, error))
        while link.recv() == "step":
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            seconds = step(forward, case.model)
            link.send((seconds, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before))
    except Exception as error:
        link.send(RuntimeError(f"{type(error).__name__}: {error}"))


def _reference(case: Case, exactness: Path) -> int:
    """Write what gradients are compared with to a file; the peak of eager's step."""
    torch.save(Exactness(case), exactness)
    return peak_of(lambda: case.model(**case.kwargs).loss, case.model)


def _seconds_then(forward: Forward, case: Case) -> float:
    """Of a step in this process, where no gradient stands before it: the median."""
    found = []
    for _ in range(1 + STEPS_THEN):
        case.model.zero_grad()
        start = time.perf_counter()
        forward().backward()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def in_turns(model: str, threads: int, methods: Sequence[str], made_case: Callable[[], Case],
             least_rounds: int = LEAST_ROUNDS, seconds: float = SECONDS) -> Turns:
    """Measure methods on one model. ``inductor`` as a budget is the smallest peak of torch.compile's rows.
    The first method is eager's. Plans are made here, while nothing else works, and followed by others."""
    others = [method for method in methods if not method.startswith("rkmate")]
    if methods[0] != "eager":
        raise ValueError("eager comes first: all others are measured by it")
    if not any(m.startswith("inductor") for m in others) and any(m.endswith(" inductor") for m in methods):
        raise ValueError("'inductor' as a budget needs a peak of inductor's")
    torch.set_num_threads(threads)
    workers: dict[str, Worker] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ends:
        exactness = Path(folder) / "exact"
        level = _reference(made_case(), exactness)
        rows = {method: Turn(model, method, threads, eager_bytes=level) for method in methods}

        def start(method: str, plan: Path | None = None) -> None:
            worker = Worker.started(method, threads, made_case, level, exactness, plan)
            ends.callback(worker.ends)
            workers[method] = worker

        def hear(some: Iterable[str]) -> None:
            for method in some:
                peak, error = workers[method].heard()
                rows[method] = replace(rows[method], peak=peak / level, error=error)

        for method in others:
            start(method)
        hear(others)
        plans: dict[str, Path] = {}
        for method in (method for method in methods if method not in others):
            budget = method
            if method.endswith(" inductor"):
                theirs = smallest(model, threads, {row.key: row for row in rows.values()})
                assert theirs is not None
                budget = method.removesuffix("inductor") + str(theirs.peak)
            path = Path(folder) / f"{len(plans)}.json"
            case = made_case()
            try:
                forward, plan = asked(budget, case, level, path)
            except rkmate.InfeasibleBudget as error:
                why = f"infeasible: at least {error.minimum_bytes / level:.1%}"
                rows[method] = replace(rows[method], failed=why)
                continue
            assert plan is not None
            plans[method] = path
            rows[method] = replace(rows[method], predicted_peak=plan.peak_bytes / level,
                                   predicted_seconds=plan.step_seconds, variant=plan.variant,
                                   seconds_then=_seconds_then(forward, case))
            del forward, case
        for method, path in plans.items():
            start(method, path)
            hear([method])
        taken: dict[str, list[tuple[float, int]]] = {method: [] for method in workers}
        begun, rounds = time.perf_counter(), 0
        while rounds < least_rounds or time.perf_counter() - begun < seconds * len(workers):
            for method, worker in workers.items():
                taken[method].append(worker.step())
            rounds += 1
    medians = {method: [statistics.median(each) for each in zip(*steps, strict=True)]
               for method, steps in taken.items()}
    of_eager = {"eager_seconds": medians["eager"][0], "eager_error": rows["eager"].error, "rounds": rounds}
    return {row.key: row if row.failed else replace(row, **dict(zip(("seconds", "pages"), medians[row.method],
                                                                    strict=True)), **of_eager)
            for row in rows.values()}
