"""Autograd functions around the segments of a step, and calls whose backward has not come yet."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from rkmate import device as devices
from rkmate.errors import BackwardError
from rkmate.ir.schedule import Loss
from rkmate.ir.simulate import peak_of_calls, simulate
from rkmate.runtime.environment import Additions, Environment, Kept, RerunState
from rkmate.show.plan import Plan
from rkmate.support.warn import warn
from rkmate.torch_seam.schema import below_autograd, below_views
from rkmate.torch_seam.tensors import (
    base_of,
    current_backward,
    is_asked_for,
    is_batched,
    keeps_graph,
    version_of,
)

logger = logging.getLogger("rkmate")

# -- Segments --------------------------------------------------------------------------------------
#
# How a planned backward hangs in autograd's graph: one function per segment.


_BATCHED = ("several gradients come to a planned module at once (is_grads_batched=True, "
            "jacobian(vectorize=True)), which a plan cannot compute: take one after the other, or use the "
            "original module (.original) there")
_GONE = ("this forward has been through a backward already, and its activations are gone; give the earlier "
         "backward retain_graph=True (the forward then runs a second time), or add the losses up, and take "
         "all the gradients that share a forward in one backward: (first + second).backward()")
Function = Callable[[Environment], list[Any]]
WithGraph = Callable[["Call", Mapping[int, torch.Tensor]], dict[str, "torch.Tensor | None"]]
"""Gradients with a graph, by source key, of those of some outputs, by number."""


class Call:
    """A forward and the backward that belongs to it."""

    __slots__ = ("__weakref__", "additions", "again_with_graph", "arrived", "backward", "begins", "begun",
                 "env", "finished", "functions", "handed", "joined", "kept", "last", "next", "outputs",
                 "ready", "rerun", "retained", "spent", "targets", "token", "waiting", "went", "with_graph")

    def __init__(self, env: Environment, functions: Sequence[Function], last: int,
                 targets: Sequence[Sequence[str]]) -> None:
        """`last`: the last segment that autograd will ask for. `targets`: for each segment, the source keys
        that its gradients belong to."""
        self.env = env
        self.functions = functions
        self.last = last
        self.targets = targets
        self.next = 0
        self.went: set[int] = set()
        """Outputs that a gradient has come for, in the latest backward and in those that kept no graph."""
        self.outputs: Callable[[], Any] = lambda: None
        """Returns the node of autograd's graph that takes the gradients of the planned outputs, while it is
        there."""
        self.joined: dict[int, torch.Tensor] = {}
        """Gradients of other outputs that came first, for that node to take."""
        self.backward = self.begun = self.arrived = -1
        """The numbers of the latest backward that has come to an output, of the latest one of that node, and
        of the latest one that `begins` was told of."""
        self.ready: dict[str, torch.Tensor] | None = None
        """Gradients that were found in another way: the segments only hand them out."""
        self.additions: Additions | None = None
        """Gradients that the backward adds to `.grad` itself, if there are any."""
        self.begins: Callable[[Sequence[torch.Tensor | None]], None] | None = None
        """Called before the first segment runs, with the gradients of the outputs."""
        self.finished: Callable[[], None] | None = None
        """Called when the last segment has run."""
        self.rerun: RerunState | None = None
        """Data for a second run: for outputs that this backward was not planned for, or for a further one."""
        self.retained = self.spent = False
        """Whether the latest backward keeps its graph, so that another one may follow; and whether what the
        forward has left is gone."""
        self.handed: dict[str, tuple[int, int]] = {}
        """Source key of an input -> the place of the gradient that was handed out, and its version."""
        self.kept: Kept | None = None
        """Values of the first run that a further backward takes."""
        self.again_with_graph: WithGraph | None = None
        """Gradients that can be differentiated, by the original's forward."""
        self.with_graph: dict[str, torch.Tensor | None] = {}
        """Gradients with a graph, for the segments to hand out."""
        self.token = token(env.device)
        """The gradient of every token."""
        self.waiting: dict[int, list[torch.Tensor | None]] = {}
        """Gradients of a segment that a backward has computed and not asked for: a later one takes them."""

    def begin(self, receive: Callable[[], None], grads: Sequence[torch.Tensor | None] = ()) -> None:
        """Begin the backward: `receive` puts the gradients of the outputs, `grads`, where the segments find
        them.

        Raises `BackwardError` when the backward has begun before, except where the graph was kept: the
        forward runs a second time then; and for several gradients at once.
        """
        if any(map(is_batched, grads)):
            raise BackwardError(_BATCHED)
        self.begun = current_backward()
        if self.next and self.rerun is not None:
            self.env.clear()
            self.waiting.clear()
            self.next, self.ready, self.spent = 0, None, True
        if self.next:
            raise BackwardError(_GONE)
        if self.additions is not None:
            self.additions.check()
        self.arrive(grads)
        try:
            receive()
        except BaseException:
            self._interrupt()
            raise

    def arrive(self, grads: Sequence[torch.Tensor | None]) -> None:
        """The first gradients of a backward come, for these or for other outputs."""
        if self.arrived != current_backward():
            self.arrived = current_backward()
            if self.begins is not None:
                self.begins(grads)

    def run(self, number: int) -> list[Any]:
        """Run one segment of the backward: parameter gradients, then (last segment) input gradients. One that
        has run for some of them hands out what was kept of the others.

        Raises `BackwardError` when the segment has run before.
        """
        if number in self.waiting:
            return self.waiting.pop(number)
        if self.next != number:
            raise BackwardError(_GONE)
        self.next = number + 1
        try:
            if self.ready is not None:
                result: list[Any] = [self.ready.pop(k, None) for k in self.targets[number]]
            else:
                with without_autocast(self.env.device), unrecorded(self.env.unrecorded):
                    result = self.functions[number](self.env)
                # A gradient has no bond to what it is a view of: autograd adds up the gradients of a shared
                # parameter in the first one, but takes memory for a third where its storage is referred to.
                # A sum in one that stands for the conjugate of its bytes would be such a tensor, too.
                result = [g if g is None or base_of(g) is None else g.detach().resolve_conj().resolve_neg()
                          for g in result]
        except BaseException:
            self._interrupt()
            raise
        if number == self.last:
            for key, grad in zip(self.targets[number], result, strict=True) if self.handed else ():
                if key in self.handed and grad is not None:
                    self.handed[key] = grad.data_ptr(), version_of(grad)
            self.env.clear()
            self.let_go()
            if self.additions is not None:
                self.additions.count()
            if self.ready is None and self.finished is not None:
                self.finished()
                self.finished = None
        return result

    def keep(self, number: int, found: Sequence[Any], edges: Sequence[tuple[Any, int]]) -> None:
        """Keep the gradients of a segment that this backward does not ask for: a pipeline may split
        a backward into one for the inputs and a later one for the parameters. `edges`: what they flow to."""
        rest = [None if node is None or is_asked_for(node) else grad
                for grad, (node, _) in zip(found, edges, strict=True)]
        if any(grad is not None for grad in rest):
            self.waiting[number] = rest

    def _interrupt(self) -> None:
        """Give up a backward that an error has stopped."""
        if self.additions is not None:
            self.additions.were_interrupted()
        self.next = -1
        self.env.clear()
        self.waiting.clear()
        self.ready = self.rerun = self.kept = self.again_with_graph = None

    def begin_with_graph(self, given: Mapping[int, torch.Tensor]) -> None:
        """Begin a backward with ``create_graph=True``, by the original's forward: the planned step stays as
        it is. `given`: gradients of outputs, by number."""
        self.with_graph = self._with_graph(given) if given else {}

    def run_with_graph(self, number: int) -> list[Any]:
        """Return the gradients of one segment, which can be differentiated."""
        return [self.with_graph.pop(k, None) for k in self.targets[number]]

    def all_with_graph(self, given: Mapping[int, torch.Tensor]) -> list[Any]:
        """Return all gradients at once, where they come through outputs that were not planned for."""
        return list(self._with_graph(given).values())

    def _with_graph(self, given: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor | None]:
        if self.again_with_graph is None:
            raise BackwardError(_GONE)
        return self.again_with_graph(self, given)

    def check_untouched(self) -> None:
        """Raise `BackwardError` where a backward was here that has not kept its graph, or something has
        changed since the forward."""
        if (self.next or self.went) and (self.rerun is None or not self.retained):
            raise BackwardError(_GONE)
        self.env.check_sources()
        if self.rerun is not None:
            self.rerun.check()

    @property
    def copies(self) -> list[torch.Tensor]:
        """Copies of what the forward has left, which a further backward takes."""
        return [] if self.kept is None or self.kept.copies is None else self.kept.copies.values()

    @property
    def is_open(self) -> bool:
        """Whether the backward of the call is not over: the call holds what that reads."""
        return 0 <= self.next <= self.last

    def goes_through(self, outputs: Iterable[int]) -> None:
        """Note that gradients have come for these outputs. Raises `BackwardError` for a second one, unless
        the backward before has kept its graph."""
        new, number = set(outputs), current_backward()
        if number != self.backward and self.retained:
            self.went.clear()
        if new & self.went:
            raise BackwardError(_GONE)
        self.went |= new
        self.backward, self.retained = number, keeps_graph()

    def joins(self, given: dict[int, torch.Tensor]) -> bool:
        """Leave gradients of outputs that were not planned for to the node of the planned ones, if it is
        going to run: then all of them go through one backward, in the original's order of additions. Return
        whether it is."""
        if self.rerun is None or not self._is_to_come():
            return False
        self.joined = given
        return True

    def _is_to_come(self) -> bool:
        """Return whether the node of the planned outputs is going to run in the current backward."""
        node = self.outputs()
        return self.begun != current_backward() and node is not None and is_asked_for(node)

    def again(self) -> RerunState:
        """Return the data that a second run needs. Raises `BackwardError` if it was released."""
        if self.rerun is None:
            raise BackwardError(
                "this forward has been through a backward already, and its inputs are gone; take all "
                "the gradients that share a forward in one backward, or give the first one "
                "retain_graph=True: the forward then runs a second time")
        return self.rerun

    def let_go(self) -> None:
        """Forget the inputs when the backward is over, because the loss may live longer. With
        retain_graph=True they stay, as autograd's own saved tensors do, and so they do for planned outputs
        whose gradients are still to come."""
        if self.next > self.last and not self._is_to_come() and not keeps_graph():
            self.rerun = self.kept = self.again_with_graph = None


def watch_sums(call: Call, numbers: Iterable[int], tensors: Sequence[torch.Tensor],
               shared: Callable[[int], None]) -> None:
    """Look, in the backward of a call, whether others contribute to the gradients of some inputs. `shared`:
    told of each for which they do."""
    handed = call.handed
    for k in numbers:
        if tensors[k].requires_grad:
            handed[f"input:{k}"] = 0, 0

            def look(grad: torch.Tensor, k: int = k) -> None:
                mine = handed.pop(f"input:{k}", None)
                if mine not in (None, (0, 0), (grad.data_ptr(), version_of(grad))):
                    shared(k)

            tensors[k].register_hook(look)


def token(device: torch.device) -> torch.Tensor:
    """Make a tensor without elements, on the plan's device whatever the default device is: autograd runs a
    segment on the stream that its token was made on."""
    return torch.empty(0, device=device)


_NOTHING = nullcontext()


def without_autocast(device: torch.device) -> Any:
    """Switch autocast off inside the context: a planned step contains the casts that autocast made while it
    was traced."""
    kind = devices.of(device).autocast_kind
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _NOTHING


def unrecorded(whether: bool) -> Any:
    """Skip autograd inside the context if `whether` is true, for operations that should not be recorded."""
    return below_autograd() if whether else _NOTHING


def unseen(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function of a slice that runs below views, if the values are the step's own. Tensors that
    others see are made, and written, by the functions that call it."""
    def run(env: Environment, **names: Any) -> None:
        if env.unrecorded:
            with below_views():
                function(env, **names)
        else:
            function(env, **names)

    return run


class _Segment(torch.autograd.Function):
    """A slice of the backward. The token orders the segments; its gradient carries nothing. The first `added`
    of the inputs are parameters that get no gradient here: the slice adds it itself."""

    @staticmethod
    def forward(ctx: Any, call: Call, number: int, added: int, before: torch.Tensor | None,
                *inputs: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        token = None if before is None else call.token
        ctx.segment = call, number, (None, None, None, token, *(None,) * added)
        return call.token.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        call, number, begin = ctx.segment
        if torch.is_grad_enabled():
            return (*begin, *call.run_with_graph(number))
        found = call.run(number)
        if keeps_graph():
            call.keep(number, found, ctx.next_functions[-len(found):] if found else ())
        return (*begin, *found)


def _quick_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `apply` without the check of every argument for transforms of torch.func: planned modules do not
    run inside of those."""
    found: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return found


_apply_segment = _quick_apply(_Segment)


class _Outputs(torch.autograd.Function):
    """The beginning of the backward: takes the gradients of the module's outputs. It computes nothing. The
    engine holds what it hands to a function until that function returns, so that a segment which took the
    gradients itself could not free them."""

    @staticmethod
    def forward(ctx: Any, call: Call, receive: Callable[..., None], fixed: Sequence[int],
                outputs: list[torch.Tensor], before: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.receive = call, receive
        call.outputs = weakref.ref(ctx)
        result = tuple(outputs)
        outputs.clear()
        ctx.mark_non_differentiable(*(result[i] for i in fixed))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            ctx.call.begin_with_graph({i: g for i, g in enumerate(grads) if g is not None})
        else:
            ctx.call.begin(lambda: ctx.receive(ctx.call, list(grads)), grads)
        return None, None, None, None, ctx.call.token


_apply_outputs = _quick_apply(_Outputs)

OfUnplanned = Callable[[Mapping[int, torch.Tensor]], list[torch.Tensor | None]]


class _Unplanned(torch.autograd.Function):
    """Outputs whose gradient no plan expected; its backward runs only when one comes after all."""

    @staticmethod
    def forward(ctx: Any, call: Call, redo: OfUnplanned, numbers: Sequence[int], count: int, joins: bool,
                *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.redo, ctx.numbers, ctx.count, ctx.joins = call, redo, numbers, count, joins
        # Fresh aliases: autograd takes what comes back unchanged for an input.
        return tuple(t.detach() for t in tensors[:len(numbers)])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        given = {n: g for n, g in zip(ctx.numbers, grads, strict=True) if g is not None}
        nothing = (None,) * len(ctx.numbers)
        if torch.is_grad_enabled():
            return (*_NO_GRADIENTS, *nothing, *ctx.call.all_with_graph(given))
        ctx.call.goes_through(given)
        if not given or (ctx.joins and ctx.call.joins(given)):
            return (*_NO_GRADIENTS, *nothing, *(None,) * ctx.count)
        if not ctx.call.next:
            ctx.call.arrive(grads)
        results = ctx.redo(given)
        ctx.call.let_go()
        return (*_NO_GRADIENTS, *nothing, *results)


_NO_GRADIENTS = (None,) * 5
"""Gradients of the arguments of an autograd function that are no tensors."""


_apply_unplanned = _quick_apply(_Unplanned)


def connect(call: Call, receive: Callable[[Call, list[torch.Tensor | None]], None],
            outputs: list[torch.Tensor], fixed: Sequence[int],
            params: Sequence[Callable[[], Sequence[torch.Tensor]]], inputs: Sequence[torch.Tensor],
            added: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Insert the segments of the backward into autograd's graph. Returns the module's outputs.

    `fixed`: outputs without a gradient. `params`: give those of each segment, in the order of the backward.
    `inputs`: the inputs whose gradients the last segment returns. `added`: per segment, parameters whose
    gradients it adds itself; autograd knows of them, so that the segment runs.
    """
    before: torch.Tensor | None = None
    last = len(params) - 1
    for number in range(last, -1, -1):
        extra = inputs if number == last else ()
        before = _apply_segment(call, number, len(added[number]), before, *added[number], *params[number](),
                                *extra)
    return list(_apply_outputs(call, receive, fixed, outputs, before))


def connect_unplanned(call: Call, redo: OfUnplanned, outputs: list[torch.Tensor], numbers: Sequence[int],
                      targets: Sequence[torch.Tensor], joins: bool) -> None:
    """Replace the outputs of these numbers, in place, by ones whose gradient `redo` turns into
    gradients of `targets`. `joins`: whether the planned outputs lead to all of these."""
    found = _apply_unplanned(call, redo, numbers, len(targets), joins, *(outputs[n] for n in numbers),
                             *targets)
    for n, t in zip(numbers, found, strict=True):
        outputs[n] = t


# -- Open calls ------------------------------------------------------------------------------------
#
# Calls of one module whose backward has not come: the next call's plan does not count what they hold.


BACKWARDS = 2
"""Backwards, as a multiple of the calls that a plan is for, after which a module says if fewer were open."""


class OpenCalls:
    """Knows the open calls of one module by weak references: those whose outputs are gone do not count."""

    def __init__(self, expected: int = 1, *, counts: bool = False,
                 more_calls: Callable[[], None] | None = None) -> None:
        """`expected`: calls at once that the budget counts anyway. `counts`: note how many calls a step
        makes, so that later steps are planned for them, rather than warn. `more_calls`: called rather than
        warn."""
        self._expected = expected
        self._counts = counts
        self._more_calls = more_calls
        self.added = 0
        """Forwards that have run."""
        self.seen = 1
        """The number of calls before a backward that later steps are planned for, where calls are counted."""
        self._calls: list[weakref.ref[Call]] = []
        self._lock = threading.Lock()
        self._looked: set[tuple[str, int, bool]] = set()
        """Plans and numbers of calls, before a forward and a backward, that need no second look."""
        self._told: set[int] = set()
        self.told_beside = False
        """Whether a warning has told of layers next to the module."""
        self._begun = self._most = 0
        """Backwards that have begun, and the most calls that were open at the beginning of any."""

    def now(self) -> list[Call]:
        """Return the calls that are open."""
        with self._lock:
            found = [call for r in self._calls if (call := r()) is not None and call.is_open]
            self._calls = [weakref.ref(call) for call in found]
        return found

    def warn_from_now_on(self) -> None:
        """Count no more: plans for more calls are over the budget."""
        self._counts, self.seen = False, 1
        self._looked.clear()
        self._told.clear()

    def count(self, calls: int) -> bool:
        """Have later steps planned for a number of calls, where calls are counted. Return whether they
        are."""
        if self._counts:
            self.seen = max(self.seen, calls)
        return self._counts

    def add(self, call: Call, plan: Plan) -> None:
        """Add a forward that has run, and the plan that it follows."""
        with self._lock:
            self.added += 1
            self._calls.append(weakref.ref(call))
        call.begins = lambda grads: self.check(plan)

    def check(self, plan: Plan, *, forward: bool = False) -> None:
        """Warn, before a forward or a backward, if the other calls hold so much that the next part exceeds
        the budget. Warns once for each number of calls."""
        others = 0 if forward else 1
        key = plan.fingerprint, len(self.now()) - others + 1, forward
        if not forward and plan.calls > 1:
            self._look_for_fewer(plan.calls, key[1])
        if key[1] <= max(plan.calls, self._expected) or key in self._looked or key[1] in self._told:
            return
        gc.collect()                    # outputs that only a circle of references keeps
        opened = self.now()
        calls = len(opened) - others + 1
        if calls <= max(plan.calls, self._expected) or calls in self._told:
            return
        self._looked.add((plan.fingerprint, calls, forward))
        held, together = sum(call.env.held() for call in opened), taken_by(plan, calls)
        if (held + _of_forward(plan) if forward else together) <= plan.budget_bytes:
            return
        self._told.add(calls)
        if self._counts:
            self.count(calls)
            return
        if self._more_calls is not None:
            self._more_calls()
            return
        planned = "one call" if plan.calls == 1 else f"{plan.calls} calls"
        warn(f"{calls} calls of this module before a backward: the step takes about {together:,} bytes "
             f"({held:,} are held now), and the budget of {plan.budget_bytes:,} bytes was planned for "
             f"{planned}. rkmate.wrap(..., calls={calls}) plans for all of them. Where no backward will "
             "come, drop the outputs, or call the module under torch.no_grad()")

    def _look_for_fewer(self, planned: int, opened: int) -> None:
        """Note, when a backward begins, how many calls are open. Say once if the first steps have fewer than
        their plan is for."""
        self._begun, self._most = self._begun + 1, max(self._most, opened)
        if self._begun == BACKWARDS * planned and self._most < planned:
            logger.warning(
                "a plan is for %d calls of a module before a backward, and at most %d were open when its "
                "first %d backwards began: rkmate.wrap(..., calls=%d) recomputes less within the same budget",
                planned, self._most, self._begun, self._most)


def taken_by(plan: Plan, calls: int) -> int:
    """Return the peak of a step of several calls that follow a plan, in bytes."""
    return peak_of_calls(plan.graph.cd, plan.schedule, calls)


def saved_by(plan: Plan) -> int:
    """Return the bytes that a call holds between its forward and its backward, its outputs included."""
    return simulate(plan.graph.cd, plan.schedule).saved


def _of_forward(plan: Plan) -> int:
    """Return the peak of a forward alone, in bytes."""
    levels = simulate(plan.graph.cd, plan.schedule).timeline
    return max(levels[:plan.schedule.steps.index(Loss())], default=0)

