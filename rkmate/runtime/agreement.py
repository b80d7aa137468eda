"""Ranks that agree: before they plan, they compare what they plan for; then the first rank plans for all.

Ranks meet in the store of their process group, not in a collective. A rank that plans shows that it goes on,
and the others wait for it as long as it does. A rank that does not come (it has ended, waits in a collective,
or does not plan) is named by the others when it has shown nothing for the group's timeout, and a collective
that another rank waits in is not disturbed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import platform
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from rkmate import device as devices
from rkmate.device.protocol import MeterError
from rkmate.errors import ArgumentError, CaptureError, InfeasibleBudget, RankError, RkmateError, sendable
from rkmate.ir.cd import Cost, Kernel, read_cost
from rkmate.ir.schedule import Compute, Loss, Start
from rkmate.measure.analytic import Costs
from rkmate.pipeline.model import shape_of
from rkmate.pipeline.prepare import Blocked, Measured, Traced, block, cost_memory, measured_costs
from rkmate.pipeline.settings import Settings
from rkmate.pipeline.variants import named
from rkmate.runtime.guards import autocast_now
from rkmate.show.plan import Plan
from rkmate.support.version import own_version
from rkmate.support.warn import warn
from rkmate.torch_seam.containers import pytree
from rkmate.torch_seam.modules import ranks_of_flat, ranks_of_zero
from rkmate.torch_seam.trace import meeting_place, process_group, several_ranks

logger = logging.getLogger("rkmate")
T = TypeVar("T")
Description = Mapping[str, Sequence[str]]
"""The things that a rank plans for: lines of text, by subject."""
_SAME_CALLS = "all ranks that follow one plan have to plan the same calls, in the same order"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_meetings: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()
"""For each store, how often the ranks of each group have met there."""


# -- What is compared ------------------------------------------------------------------------------


def description(model: Any, args: Any, kwargs: Any, settings: Settings, budget: Any) -> Description:
    """Describe what a call plans for. Whatever the arguments are, this raises nothing: who waits for another
    rank should hear from it.

    A folder to send data to may differ from rank to rank, and so may a device's number.
    """
    modules, tensors = ([], []) if not isinstance(model, nn.Module) else (
        list(model.named_modules()), [*model.named_parameters(), *model.named_buffers()])
    # FSDP1 leaves each rank other elements of each parameter.
    parts = isinstance(model, nn.Module) and bool(ranks_of_flat(model))
    shown = replace(settings, offload=None)
    offload = settings.offload
    leaves = _leaves(args, kwargs)
    kinds = devices.autocast_kinds(t.device for t in [*(t for _, t in tensors), *(t for _, t in leaves)]
                                   if isinstance(t, torch.Tensor))
    return {
        "the model": [_plain(type(model).__name__), *(
            f"{name or 'the model'}: {type(m).__name__}{'' if m.training else ' in eval mode'}{_own(m)}"
            for name, m in modules)],
        "parameters and buffers": [
            f"{name}: {'in parts' if parts else _tensor(t)}{'' if t.requires_grad else ', frozen'}"
            for name, t in tensors],
        "arguments": [f"{name}: {_tensor(leaf) if isinstance(leaf, torch.Tensor) else _plain(leaf)}"
                      for name, leaf in leaves],
        "types of numbers": [f"the default dtype is {torch.get_default_dtype()}",
                             *(f"autocast to {dtype} on {kind}" for kind, dtype in autocast_now(kinds))],
        "the budget": [_plain(budget)],
        "settings": [*_settings(shown), f"offload: {offload is not None}"],
        "versions": [f"rkmate {own_version()}", f"torch {torch.__version__}",
                     f"Python {platform.python_version()}"]}


def _leaves(args: Any, kwargs: Any) -> list[tuple[str, Any]]:
    trees = {"args": args, "kwargs": kwargs or {}}
    return [(f"{name}{pytree.keystr(path)}", leaf) for name, tree in trees.items()
            for path, leaf in pytree.tree_flatten_with_path(tree)[0]]


def _settings(value: Any, name: str = "") -> list[str]:
    if is_dataclass(value) and not isinstance(value, type):
        return [line for f in fields(value)
                for line in _settings(getattr(value, f.name), f"{name}.{f.name}" if name else f.name)]
    return [f"{name}: {_plain(value)}"]


def _own(module: nn.Module) -> str:
    """Return the description that a module gives of itself, without its submodules."""
    try:
        text = module.extra_repr()
    except Exception:               # a user's code
        return ""
    return f" ({_plain(text)})" if text else ""


def _tensor(tensor: torch.Tensor) -> str:
    return f"{shape_of(tensor)} on {str(tensor.device).partition(':')[0]}"


def _plain(value: Any) -> str:
    try:
        return _ADDRESS.sub("", value if isinstance(value, str) else repr(value))
    except Exception:               # a user's code
        return type(value).__name__


# -- Refusals --------------------------------------------------------------------------------------


def as_text(error: RkmateError) -> str:
    """Return a refusal as text, for other ranks."""
    kinds = InfeasibleBudget, CaptureError, ArgumentError, RkmateError
    kind = next(k for k in kinds if isinstance(error, k))
    least = error.minimum_bytes if isinstance(error, InfeasibleBudget) else 0
    return json.dumps([least or 0, kind.__name__, str(error)])


def as_refusal(rank: int, text: str) -> RkmateError:
    """Return the refusal of a rank, which another one raises, too. `text`: `as_text`."""
    least, name, words = json.loads(text)
    words = words if words.startswith("rank ") else f"rank {rank}: {words}"
    if name == InfeasibleBudget.__name__:
        return InfeasibleBudget(words, least)
    kinds = {k.__name__: k for k in (CaptureError, ArgumentError)}
    return kinds.get(name, RkmateError)(words)


@contextmanager
def refusals_told(what: Callable[[], Description]) -> Iterator[None]:
    """Tell other ranks of a refusal inside of the context: those that wait for this rank, to plan the same
    together, raise it, too. `what`: returns what this rank plans for."""
    try:
        yield
    except RkmateError as error:
        store = meeting_place(None)[0] if several_ranks() and dist.get_backend() != "fake" else None
        if store is not None:
            with suppress(RuntimeError):    # the store is gone, and nobody waits any more
                store.set(_refusal_of(dist.get_rank(), what()), as_text(error))
        raise


def _refusal_of(rank: int, what: Description) -> str:
    text = json.dumps([[subject, *lines] for subject, lines in what.items()])
    return f"rkmate/refuses/{rank}/{hashlib.sha256(text.encode()).hexdigest()}"


# -- Signs of a rank that plans --------------------------------------------------------------------

BEAT, COMPUTES = 1.0, 0.01
"""Seconds between two signs, and seconds of processor time in between without which there is no sign."""
POLL, POLL_OF_RANK, LOOK = 0.5, 0.025, 10.0
"""Seconds between two looks of a rank that waits, at most: for texts of others, for texts per rank (one
process answers all ranks), and for signs. (A store prints a warning when a wait of its own is over.)"""
_meets = threading.Event()
"""Set while this rank waits for others."""


class Signs:
    """Signs that a rank plans: its number in the store goes up each second in which its process has computed.

    A thread gives them. A process that has ended, or that stands still, gives none.
    """

    def __init__(self, store: Any, rank: int, limit: float) -> None:
        """`limit`: the seconds after which ranks in a collective give up."""
        self._store, self._rank, self._limit = store, rank, limit
        self.alone = True
        """Whether this rank plans without the others, which may wait for it in a collective."""
        self.over = threading.Event()

    def run(self) -> None:
        """Give signs until planning is over, and say when others that wait in a collective give up."""
        begin, spent = time.monotonic(), time.process_time()
        while not self.over.wait(BEAT):
            before, spent = spent, time.process_time()
            if spent - before > COMPUTES and not _meets.is_set():
                try:
                    self._store.add(_signs_of(self._rank), 1)
                except RuntimeError:        # the store is gone: this rank finds out when it meets the others
                    return
            if self.alone and time.monotonic() - begin >= self._limit:
                self.alone = False
                logger.warning(
                    "rank %d has planned for %s seconds, which is the timeout of its process group: ranks "
                    "that wait for it in a collective give up now. Set init_process_group(timeout=...) to "
                    "more than planning takes", self._rank, f"{self._limit:,.0f}")


_signs: ContextVar[Signs | None] = ContextVar("_signs", default=None)


@contextmanager
def shows_signs(*, alone: bool = False) -> Iterator[None]:
    """Show the ranks that wait for this one that it plans. `alone`: as far as is known, no other rank plans
    the same."""
    signs = _signs.get()
    if signs is not None and not alone:
        signs.alone = False
    is_first = signs is None and several_ranks() and dist.get_backend() != "fake"
    store, limit = meeting_place(None) if is_first else (None, 0.0)
    if store is None:                       # or MPI has started the ranks
        yield
        return
    signs = Signs(store, dist.get_rank(), limit)
    signs.alone = alone
    token = _signs.set(signs)
    threading.Thread(target=signs.run, daemon=True).start()
    try:
        yield
    finally:
        signs.over.set()
        _signs.reset(token)


def _signs_of(rank: int) -> str:
    return f"rkmate/plans/{rank}"


# -- Meeting ---------------------------------------------------------------------------------------


class Advice(NamedTuple):
    """Words for errors of ranks that meet: why they meet, and what to do."""

    same: str
    """Sentence that says what all ranks have to do alike."""
    shapes: str = ""
    """Sentence that says what to do if shapes differ from rank to rank."""


SHARED = Advice(_SAME_CALLS, ('. If shapes differ from rank to rank, each rank can plan new ones alone: '
                              'shared_plan(..., new_shapes="own")'))
COMMUNICATES = Advice(_SAME_CALLS, ". The forward communicates, so that all ranks follow one plan: if "
                      "shapes differ from rank to rank, pad them to the same ones")
BY_PARTS = Advice("all ranks of a model that communicates in its forward have to train it with a budget, and "
                  "call it equally often")
SHARDED = Advice("all ranks that a sharded model is spread over have to train it with a budget, and meet "
                 "before the same step")


class Ranks:
    """The ranks of a process group, where they meet, and how long they wait for each other."""

    def __init__(self, group: Any = None, numbers: Sequence[int] | None = None, *, advice: Advice) -> None:
        """`numbers`: some of the group's ranks, which only tell each other things. `advice`: for errors."""
        self._group, self._advice = group, advice
        self._numbers = dist.get_process_group_ranks(group) if numbers is None else [*numbers]
        self._mine = dist.get_rank()
        self._store, self._seconds = meeting_place(group)
        if dist.get_backend(group) == "fake":       # only this rank is real
            self._numbers = [self._mine]
            self._store = dist.HashStore()          # type: ignore[attr-defined]
        self._name = ",".join(map(str, self._numbers))

    @property
    def numbers(self) -> list[int]:
        """Numbers of the ranks, in the order of their texts."""
        return self._numbers

    @property
    def leads(self) -> bool:
        """Whether this rank plans for the others."""
        return self._mine == self._numbers[0]

    def agree(self, mine: Description) -> None:
        """Compare what all ranks plan for. Raises `RankError` on all ranks if it differs, or if a rank does
        not come; the error of a rank that cannot plan this."""
        hashes = {subject: hashlib.sha256("\n".join(lines).encode()).hexdigest()
                  for subject, lines in mine.items()}
        found = [json.loads(text) for text in self._exchanged(json.dumps(hashes), about=mine)]
        differing = [subject for subject in mine if len({f.get(subject) for f in found}) > 1]
        if not differing:
            return
        texts = [json.loads(text) for text in self._exchanged(json.dumps({s: mine[s] for s in differing}))]
        raise RankError(f"ranks {self._name} are about to plan different things: " + "; ".join(
            f"{subject} ({self._difference([t[subject] for t in texts])})" for subject in differing)
            + ". No step has run: give all ranks the same"
            + (self._advice.shapes if differing == ["arguments"] else ""))

    def told(self, text: str) -> list[str]:
        """Return what all ranks say, in their order. Raises `RankError` if a rank does not come."""
        return self._exchanged(text)

    def same_schedule(self, plan: Plan) -> None:
        """Compare the schedules that the ranks are about to follow. Raises `RankError` on all ranks if they
        differ."""
        steps = hashlib.sha256(repr(plan.schedule.steps).encode()).hexdigest()
        self.agree({"the schedules": [f"schedule {steps[:12]}, {plan.budget_bytes:,} bytes"]})

    def measured(self, blocked: Blocked, own: Callable[[], Costs]) -> Costs:
        """Return the costs of a graph's operations, each that of the rank that takes longest. The first rank,
        which plans, calls this while the others call `measure_too`. `own`: measures on this rank."""
        self._exchanged(f"{blocked.variant.name}, {blocked.traced.settings.deferred_outputs}")
        try:
            mine = own()
        finally:                        # the others wait here, whatever happens
            texts = self._exchanged("")
        self._refuse_failures(["" if text.startswith("[") else text for text in texts])
        rows = [list(map(read_cost, json.loads(text))) for text in texts if text]
        # A rank with another graph refuses the plan, and says why: its costs do not count here.
        return {i: functools.reduce(_larger, (row[i] for row in rows if len(row) == len(mine)), cost)
                for i, cost in mine.items()}

    def measure_too(self, said: str, own: Callable[[], tuple[Traced, Callable[[Blocked], int]]]) -> None:
        """Measure the graph that the first rank measures, and tell it the costs. `said`: its words about the
        graph; `own`: returns the graph of this rank, and the bytes that measuring may take."""
        variant, deferred = said.rsplit(", ", 1)
        try:
            traced, limit = own()
            blocked = block(traced.with_deferred("never" if deferred == "never" else "auto"), named(variant))
            costs = measured_costs(blocked, cost_memory(), traced.settings.measure, limit)
            text = json.dumps([costs[i].row() for i in range(len(costs))])
        except MeterError as error:     # somebody measures, or profiles, on this rank alone
            warn(f"rank {self._mine} cannot measure now, and a plan of several ranks does not count on its "
                 f"times: {error}")
            text = "[]"
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        self._exchanged(text)

    @shows_signs()
    def led(self, make: Callable[[Measured], T], plan_of: Callable[[T], Plan], follow: Callable[[Plan], T],
            assist: Callable[[str], None]) -> T:
        """Return what the first rank makes and the others follow.

        Args:
            make: called by the first rank, with what measures on all of them (`Traced.measured_by`).
            plan_of: the plan of what it has made.
            follow: called by the others with that plan.
            assist: called by the others with each text that the first rank gives them while it plans.

        Raises:
            RkmateError: what the first rank raised, on every rank.
            RankError: the first rank has shown no sign of planning for the group's timeout.
        """
        made: T | None = None
        told: list[Plan | RkmateError | str | None] = [None]
        failed: BaseException | None = None
        if self.leads:
            try:
                made = make(self.measured)
                told[0] = plan_of(made)
            except RkmateError as error:
                told[0], failed = sendable(error), error
            except BaseException as error:
                told[0], failed = f"{type(error).__name__}: {error}", error
        # All meet first, so that nobody waits in the broadcast for a rank that has ended, or has failed.
        texts = self._exchanged("", planning=True)
        while not self.leads and texts[0]:
            assist(texts[0])
            texts = self._exchanged("", planning=True)
        self._refuse_failures(texts)
        dist.broadcast_object_list(told, group=self._group, group_src=0)
        if failed is not None:
            raise failed
        if self.leads:
            assert made is not None
            return made
        found = told[0]
        if isinstance(found, RkmateError):
            raise found
        if not isinstance(found, Plan):
            raise RkmateError(f"the first process could not plan: {found}")
        return follow(found)

    def differ_between(self, operations: str, collectives: str) -> bool:
        """Return whether ranks run different operations between the same collectives, of which none runs
        again. Each rank may have a plan of its own then."""
        mine = [hashlib.sha256(text.encode()).hexdigest() for text in (operations, collectives)]
        steps, exchanges = zip(*map(json.loads, self.told(json.dumps(mine))), strict=True)
        return len({*steps}) > 1 and len({*exchanges}) == 1 and bool(collectives)

    @shows_signs()
    def each(self, make: Callable[[], T], plan_of: Callable[[T], Plan]) -> T:
        """Return what this rank makes for itself, and compare the collectives of the plans. If some ranks
        cannot make any, all raise the refusal of one; `RankError` if the collectives differ."""
        made: list[T] = []
        refused: RkmateError | None = None
        try:
            made.append(make())
        except Exception as error:
            refused = error if isinstance(error, RkmateError) else RkmateError(
                f"{type(error).__name__}: {error}")
        self.refuse_as_one(refused)
        self.agree({"the collectives of their plans": exchanges_in(plan_of(made[0]))})
        return made[0]

    def refuse_as_one(self, own: RkmateError | None) -> None:
        """Raise the refusal of one rank on all of them, if there is one. If several refuse a budget, it is
        that of the rank that needs most. `own`: of this rank."""
        found = [(rank, text) for rank, text in zip(
            self._numbers, self.told("" if own is None else as_text(own)), strict=True) if text]
        if found:
            raise as_refusal(*max(found, key=lambda told: int(json.loads(told[1])[0]))) from own

    @shows_signs()
    def together(self, call: Callable[[], T]) -> T:
        """Return what a call returns, if it succeeds on all ranks. Raises `RankError` if it fails on another
        one."""
        try:
            made = call()
        except RankError:               # every rank has one
            raise
        except Exception as error:
            self._exchanged(f"{type(error).__name__}: {error}")
            raise
        self._refuse_failures(self._exchanged(""))
        return made

    def _refuse_failures(self, texts: Sequence[str]) -> None:
        failed = [f"rank {rank}: {text}" for rank, text in zip(self._numbers, texts, strict=True) if text]
        if failed:
            raise RankError(f"ranks {self._name} plan together, and planning has failed on "
                            f"{'; '.join(failed)}")

    def _exchanged(self, text: str, planning: bool = False, about: Description | None = None) -> list[str]:
        """Give a text to the other ranks, and return those of all ranks, in their order. `about`: what this
        rank plans for, which another one may refuse."""
        met, left = _meetings.setdefault(self._store, Counter()), ""
        _meets.set()
        try:
            while not left or self._ask(self._store.check, [left]):     # others have left without this rank
                met[self._name] += 1
                place = f"rkmate/{self._name}/{met[self._name]}"
                left = f"{place}/left"
            keys = [f"{place}/{rank}" for rank in self._numbers]
            self._ask(self._store.set, f"{place}/{self._mine}", text)
            missing = self._wait(keys, f"{place}/over", left, about)
            if self._ask(self._store.check, [left]):
                raise as_refusal(*json.loads(self._ask(self._store.get, left)))
            if missing:
                self._ask(self._store.set, f"{place}/over", json.dumps([self._mine, missing]))
                raise self._late(self._mine, missing, planning)
            if self._ask(self._store.check, [f"{place}/over"]):
                waited, missing = json.loads(self._ask(self._store.get, f"{place}/over"))
                raise RankError(
                    f"rank {self._mine} came too late to compare plans: rank {waited} has waited for "
                    f"{self._seconds:,.0f} seconds, and has raised an error"
                ) if self._mine in missing else self._late(waited, missing, planning)
            return [self._ask(self._store.get, key).decode() for key in keys]
        except dist.DistNetworkError as error:
            raise RankError(f"rank {self._mine} cannot reach the store of its process group any more: the "
                            "process that holds it (rank 0, or its launcher) has ended") from error
        finally:
            _meets.clear()

    def _wait(self, keys: Sequence[str], over: str, left: str, about: Description | None) -> list[int]:
        """Wait for the texts of all ranks, or until one of them has given up. Return the ranks that have
        shown no sign for the group's timeout, or refuse what this one plans for; `left` tells of the latter.
        """
        seen: dict[int, tuple[int, float]] = {}
        every, pause = min(LOOK, self._seconds / 8), 0.001
        longest = min(POLL, POLL_OF_RANK * len(keys))
        look = time.monotonic() + min(1.0, every)
        while not self._ask(self._store.check, keys):
            time.sleep(pause)
            pause, now = min(longest, 1.5 * pause), time.monotonic()
            if now < look:
                continue
            look = now + every
            absent = [rank for rank, key in zip(self._numbers, keys, strict=True)
                      if not self._ask(self._store.check, [key])]
            for rank in absent if about is not None else ():
                if self._ask(self._store.check, [refusal := _refusal_of(rank, about or {})]):
                    told = [rank, self._ask(self._store.get, refusal).decode()]
                    self._ask(self._store.set, left, json.dumps(told))
                    return [rank]
            for rank in absent:
                signs = self._ask(self._store.add, _signs_of(rank), 0)
                if rank not in seen or seen[rank][0] != signs:
                    seen[rank] = signs, now
            silent = [rank for rank in absent if now - seen[rank][1] >= self._seconds]
            if silent or self._ask(self._store.check, [over]):
                return silent
        return []

    def _ask(self, operation: Callable[..., T], *args: Any) -> T:
        """Return the answer of the store to one of its operations, which have no timeout of their own. Raises
        `RankError` if it does not answer for the group's timeout."""
        answer: futures.Future[T] = futures.Future()

        def ask() -> None:
            try:
                answer.set_result(operation(*args))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=ask, daemon=True).start()
        if not futures.wait((answer,), self._seconds).done:
            raise RankError(
                f"the store of its process group has not answered rank {self._mine} for {self._seconds:,.0f} "
                "seconds: the process that holds it (rank 0, or its launcher) stands still. "
                "init_process_group(timeout=...) sets the limit")
        return answer.result()

    def _late(self, waited: int, missing: Sequence[int], planning: bool) -> RankError:
        if planning and missing == self._numbers[:1]:
            return RankError(
                f"rank {missing[0]}, which plans for all ranks, has shown rank {waited} no progress for "
                f"{self._seconds:,.0f} seconds: it has ended, or stands still. "
                "init_process_group(timeout=...) sets the limit")
        return RankError(
            f"rank {waited} has waited {self._seconds:,.0f} seconds for rank {', '.join(map(str, missing))}, "
            f"which did not come to compare plans: {self._advice.same}{self._advice.shapes}. "
            "init_process_group(timeout=...) sets the limit")

    def _difference(self, texts: Sequence[Sequence[str]]) -> str:
        """Return the first line that differs, of each rank."""
        lines = next(some for some in zip_longest(*texts, fillvalue="nothing") if len(set(some)) > 1)
        ranks: dict[str, list[int]] = {}
        for rank, line in zip(self._numbers, lines, strict=True):
            ranks.setdefault(line, []).append(rank)
        return ", ".join(f"rank {', '.join(map(str, some))}: {line}" for line, some in ranks.items())


def exchanges_in(plan: Plan) -> list[str]:
    """Return the order in which a plan's collectives begin, with the end of the forward."""
    graph, begun, found = plan.graph.cd, set[int](), []
    for step in plan.schedule.steps:
        if isinstance(step, Loss):
            found.append("the end of the forward")
        elif isinstance(step, Start) or (isinstance(step, Compute) and graph.c[step.c].exchanges):
            if step.c not in begun:
                found.append(f"{graph.c[step.c].name}, {[graph.d[j].size for j in graph.c[step.c].outputs]}")
            begun ^= {step.c} if isinstance(step, Start) or step.c in begun else set()
    return found


def _larger(one: Cost, other: Cost) -> Cost:
    """Return the larger seconds and bytes of each kernel of an operation. A rank may have found other kernels
    worth keeping: those of `one` are kept then."""
    others = other.alternatives if len(other.alternatives) == len(one.alternatives) else one.alternatives
    return Cost(max(one.time, other.time), max(one.overhead, other.overhead), tuple(
        Kernel(max(a.time, b.time), max(a.overhead, b.overhead))
        for a, b in zip(one.alternatives, others, strict=True)))


def ranks_in(groups: Sequence[str], advice: Advice = COMMUNICATES) -> Ranks | None:
    """Return the ranks that decide together because a forward communicates; None if it does not, or if only
    this rank is real. `groups`: names of the process groups that it communicates in; several together may be
    all ranks. `advice`: for errors."""
    if not groups or dist.get_backend() == "fake":
        return None
    return Ranks(process_group(groups[0]) if len(groups) == 1 else None, advice=advice)


def ranks_that_share(model: nn.Module) -> Ranks | None:
    """Return the ranks that a model's parameters are spread over; None if only this rank is real."""
    if not several_ranks() or dist.get_backend() == "fake":
        return None
    numbers = {rank for p in model.parameters() if (mesh := getattr(p, "device_mesh", None)) is not None
               for rank in mesh.mesh.flatten().tolist()}
    numbers.update(ranks_of_flat(model), *map(ranks_of_zero, model.parameters()))
    return Ranks(numbers=sorted(numbers), advice=SHARDED) if len(numbers) > 1 else None


# -- Shared plans ----------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False, eq=False)
class SharedPlan(Plan):
    """A plan of several ranks, which make plans for new shapes together."""

    ranks: Ranks | None = None

    def __reduce__(self) -> Any:
        """Make a copy or a pickle an ordinary plan: it is that of one process."""
        return Plan, tuple(getattr(self, f.name) for f in fields(Plan))


def shared(ranks: Ranks, plan: Plan) -> SharedPlan:
    """Return a plan that its ranks follow together."""
    return SharedPlan(**{f.name: getattr(plan, f.name) for f in fields(Plan)}, ranks=ranks)


def ranks_of(plan: Plan | None) -> Ranks | None:
    """Return the ranks that follow a plan together; None for the plan of one process."""
    return plan.ranks if isinstance(plan, SharedPlan) else None
