"""How a planned backward hangs in autograd's graph: one function per segment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rkmate.codegen.runtime import Environment
from rkmate.errors import BackwardError

Function = Callable[[Environment], list[Any]]


class Call:
    """One forward and the backward that belongs to it."""

    __slots__ = ("env", "finished", "functions", "last", "next", "ready", "targets")

    def __init__(self, env: Environment, functions: Sequence[Function], last: int,
                 targets: Sequence[Sequence[str]]) -> None:
        """`last`: the last segment that autograd will ask for. `targets`: per segment, what its
        gradients are of (source keys)."""
        self.env = env
        self.functions = functions
        self.last = last
        self.targets = targets
        self.next = 0
        self.ready: dict[str, torch.Tensor] | None = None
        """Gradients that were found in another way: the segments only hand them out."""
        self.finished: Callable[[], None] | None = None
        """Called when the last segment has run."""

    def start(self) -> None:
        """Raise `BackwardError` when the backward has begun before."""
        self._expect(0)

    def _expect(self, number: int) -> None:
        if self.next != number:
            raise BackwardError(
                "this forward has been through a backward already, and its activations are gone; "
                "run the forward again (retain_graph=True cannot keep them), or take all the "
                "gradients that share a forward in one backward")

    def run(self, number: int) -> list[Any]:
        """One segment of the backward: parameter gradients, then (last segment) input gradients."""
        self._expect(number)
        self.next = number + 1
        if self.ready is not None:
            return [self.ready.pop(k, None) for k in self.targets[number]]
        try:
            with without_autocast(self.env.device):
                result = self.functions[number](self.env)
        except BaseException:
            self.next = -1
            self.env.clear()
            raise
        if number == self.last:
            self.env.clear()
            if self.finished is not None:
                self.finished()
        return result


def without_autocast(device: torch.device) -> Any:
    """A planned step holds the casts that autocast made while it was traced."""
    return torch.autocast(device.type, enabled=False) \
        if torch.is_autocast_enabled(device.type) else _NOTHING


class _Nothing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None


_NOTHING = _Nothing()


class _Segment(torch.autograd.Function):
    """A slice of the backward. The token orders the segments; its gradient carries nothing."""

    @staticmethod
    def forward(ctx: Any, call: Call, number: int, token: torch.Tensor | None,
                *inputs: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.number, ctx.first = call, number, token is None
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        _no_double_backward()
        result = ctx.call.run(ctx.number)
        return (None, None, None if ctx.first else _TOKEN, *result)


class _Outputs(torch.autograd.Function):
    """The first segment of the backward: takes the gradients of the module's outputs."""

    @staticmethod
    def forward(ctx: Any, call: Call, receive: Callable[..., None], fixed: Sequence[int],
                outputs: list[torch.Tensor], token: torch.Tensor | None,
                *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.receive, ctx.first = call, receive, token is None
        result = tuple(outputs)
        outputs.clear()
        ctx.mark_non_differentiable(*(result[i] for i in fixed))
        return result

    # The gradients come as one list, which the run time empties: they die inside the backward.
    boxed_grads_call = True

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        _no_double_backward()
        box = grads[0] if len(grads) == 1 and isinstance(grads[0], list) else list(grads)
        del grads
        ctx.call.start()
        ctx.receive(ctx.call, box)
        result = ctx.call.run(0)
        return (None, None, None, None, None if ctx.first else _TOKEN, *result)


Redo = Callable[[Mapping[int, torch.Tensor]], list[torch.Tensor | None]]


class _Unplanned(torch.autograd.Function):
    """Outputs whose gradient no plan expected; its backward runs only when one comes after all."""

    @staticmethod
    def forward(ctx: Any, redo: Redo, numbers: Sequence[int], count: int,
                *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.redo, ctx.numbers, ctx.count = redo, numbers, count
        # Fresh aliases: autograd takes what comes back unchanged for an input.
        return tuple(t.detach() for t in tensors[:len(numbers)])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        _no_double_backward()
        given = {n: g for n, g in zip(ctx.numbers, grads, strict=True) if g is not None}
        nothing = (None,) * len(ctx.numbers)
        results = ctx.redo(given) if given else [None] * ctx.count
        return (None, None, None, *nothing, *results)


_TOKEN = torch.empty(0)


def _no_double_backward() -> None:
    if torch.is_grad_enabled():
        raise BackwardError("a planned module has no double backward (create_graph=True): compute "
                            "higher-order gradients on the original module, or with rkmate.dtr")


def connect(call: Call, receive: Callable[[Call, list[torch.Tensor | None]], None],
            outputs: list[torch.Tensor], fixed: Sequence[int],
            params: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]
            ) -> list[torch.Tensor]:
    """Hang the segments of the backward into autograd's graph; returns the module's outputs.

    `fixed`: outputs without a gradient. `params`: per segment, in the order of the backward.
    `inputs`: the inputs whose gradients the last segment returns.
    """
    token: torch.Tensor | None = None
    last = len(params) - 1
    for number in range(last, 0, -1):
        extra = inputs if number == last else ()
        token = _Segment.apply(call, number, token, *params[number], *extra)
    extra = inputs if last == 0 else ()
    return list(_Outputs.apply(call, receive, fixed, outputs, token, *params[0], *extra))


def connect_unplanned(redo: Redo, outputs: list[torch.Tensor], numbers: Sequence[int],
                      targets: Sequence[torch.Tensor]) -> None:
    """Replace the outputs of these numbers, in place, by ones whose gradient `redo` turns into
    gradients of `targets`."""
    found = _Unplanned.apply(redo, numbers, len(targets), *(outputs[n] for n in numbers), *targets)
    for n, t in zip(numbers, found, strict=True):
        outputs[n] = t
