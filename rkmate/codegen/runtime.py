"""What generated source runs on: the environment of one call, and the autograd functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rkmate.errors import BackwardError


class Environment:
    """The storages that one forward has left, and what the caller holds.

    Consumed by one backward; the forward of another call has an environment of its own.
    """

    __slots__ = ("_held", "_rng", "_values", "device", "spent")

    def __init__(self, held: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._values: dict[str, torch.Tensor] = {}
        self._held = held
        self._rng: dict[str, tuple[Any, Any]] = {}
        self.device = device
        self.spent = False

    def take(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Values that die where they are taken."""
        pop = self._values.pop
        return [pop(n) for n in names]

    def read(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Values that stay."""
        values = self._values
        return [values[n] for n in names]

    def give(self, names: Sequence[str], *values: torch.Tensor) -> None:
        """Values for later functions."""
        self._values.update(zip(names, values, strict=True))

    def drop(self, names: Sequence[str]) -> None:
        """Forget values that nobody takes."""
        for n in names:
            self._values.pop(n, None)

    def pop(self, name: str) -> torch.Tensor:
        """One value, taken."""
        return self._values.pop(name)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._values[name]

    def sources(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Parameters, buffers, constants and inputs."""
        held = self._held
        return [held[n] for n in names]

    def source(self, name: str) -> torch.Tensor:
        """One of them."""
        return self._held[name]

    def write(self, name: str, value: torch.Tensor) -> None:
        """Write back what the forward overwrites, once."""
        self._held[name].copy_(value)

    def remember(self, name: str) -> None:
        """Store the generator's state before a random operation that will run again."""
        self._rng[name] = _state(self.device)

    @contextmanager
    def replay(self, name: str) -> Iterator[None]:
        """Run a random operation again with the draws of its first run."""
        now = _state(self.device)
        _restore(self.device, self._rng[name])
        try:
            yield
        finally:
            _restore(self.device, now)

    def clear(self) -> None:
        """Free everything."""
        self._values.clear()
        self._held = {}
        self._rng.clear()
        self.spent = True


def _state(device: torch.device) -> tuple[Any, Any]:
    # As NumPy arrays: the states are no business of the device's allocator.
    cpu = torch.get_rng_state().numpy().copy()
    if device.type == "cpu":
        return cpu, None
    return cpu, torch.get_device_module(device).get_rng_state(device).numpy().copy()


def _restore(device: torch.device, state: tuple[Any, Any]) -> None:
    torch.set_rng_state(torch.from_numpy(state[0]))
    if state[1] is not None:
        torch.get_device_module(device).set_rng_state(torch.from_numpy(state[1]), device)


class Call:
    """One forward and the backward that belongs to it."""

    __slots__ = ("env", "functions")

    def __init__(self, env: Environment,
                 functions: Sequence[Callable[[Environment], list[Any]]]) -> None:
        self.env = env
        self.functions = functions

    def run(self, number: int) -> list[Any]:
        """One segment of the backward: parameter gradients, then (last segment) input gradients."""
        if self.env.spent:
            raise BackwardError(
                "this forward has been through a backward already, and its activations are gone; "
                "run the forward again (retain_graph=True cannot keep them)")
        try:
            result = self.functions[number](self.env)
        except BaseException:
            self.env.clear()
            raise
        if number == len(self.functions) - 1:
            self.env.clear()
        return result


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
        call, number = ctx.call, ctx.number
        result = call.run(number)
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
        ctx.receive(ctx.call, box)
        result = ctx.call.run(0)
        return (None, None, None, None, None if ctx.first else _TOKEN, *result)


_TOKEN = torch.empty(0)


def _no_double_backward() -> None:
    if torch.is_grad_enabled():
        raise BackwardError("a planned module has no double backward (create_graph=True): compute "
                            "higher-order gradients on the original module, or with rkmate.dtr")


def connect(call: Call, receive: Callable[[Call, list[torch.Tensor | None]], None],
            outputs: list[torch.Tensor], fixed: Sequence[int],
            params: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Hang the segments of the backward into autograd's graph; returns the module's outputs.

    `params`: per segment, in the order of the backward. `inputs`: the inputs whose gradients the
    last segment returns.
    """
    token: torch.Tensor | None = None
    last = len(params) - 1
    for number in range(last, 0, -1):
        extra = inputs if number == last else ()
        token = _Segment.apply(call, number, token, *params[number], *extra)
    extra = inputs if last == 0 else ()
    return list(_Outputs.apply(call, receive, fixed, outputs, token, *params[0], *extra))
