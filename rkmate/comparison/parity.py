"""`rkmate.check`: train a copy of a model plain and a copy planned, and compare what they compute."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rkmate import device as devices
from rkmate.api import checked_sample, remove, wrap
from rkmate.comparison.measured import loss_of
from rkmate.device.random_state import RandomState, unchanged_random_state
from rkmate.errors import ArgumentError
from rkmate.graph.capture.state import HostDraws
from rkmate.graph.capture.structure import take_apart
from rkmate.measure.step import measure_step
from rkmate.pipeline.loss import loss_inside
from rkmate.pipeline.model import flags_to_plan
from rkmate.pipeline.settings import Settings
from rkmate.settings import Options, chosen
from rkmate.show.amounts import count, duration, share, size
from rkmate.show.plan import Plan

if TYPE_CHECKING:
    from typing_extensions import Unpack

STEPS = 20
_LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Trained:
    """A training run, of two."""

    losses: tuple[float, ...]
    """The loss of each step."""
    peak_bytes: int
    """Measured peak of a step in bytes, on top of what is in memory before it, without gradients of
    parameters."""
    step_seconds: float
    """Median of the seconds of forward, loss and backward; the steps of both runs take turns."""


@dataclass(frozen=True)
class Difference:
    """The largest difference between two sets of tensors."""

    value: float = 0.0
    """Largest absolute difference of two elements; zero if all bits are equal."""
    name: str = ""
    """Name of the tensor where that is."""
    largest: float = 0.0
    """Largest absolute value of an element of this tensor in the plain run."""
    step: int = 0
    """The step, from 1."""

    def __str__(self) -> str:
        if not self.value:
            return "the same bits"
        part = f", {self.value / self.largest:.1e} of its largest element" if self.largest else ""
        return f"differ by up to {self.value:.1e}, in {self.name}{part}"


@dataclass(frozen=True)
class Parity:
    """Result of `rkmate.check`: a plain and a planned training run of the same model. Prints as a table."""

    model: str
    """Name of the model's class."""
    optimizer: str
    """Name of the optimizer's class."""
    plan: Plan
    """The plan that was followed."""
    plain: Trained
    """The original model's run."""
    planned: Trained
    """The planned model's run."""
    gradients: Difference
    """Largest difference of gradients in any step, over parameters and inputs. A gradient that one run leaves
    out counts as zeros."""
    state: Difference
    """Largest difference of parameters and buffers after the last step."""
    repeated: Difference
    """Largest difference of the gradients of the original's first step to those of its own repetition: what
    the device's operations add by themselves."""
    same_losses: bool
    """Whether all losses have the same bits."""
    same_draws: bool
    """Whether both runs leave the generators in the same state after each step."""

    @property
    def same_bits(self) -> bool:
        """Whether losses, gradients, parameters, buffers and draws have the same bits in all steps."""
        return self.same_losses and self.same_draws and not self.gradients.value and not self.state.value

    @property
    def within_budget(self) -> bool:
        """Whether the measured peak of the planned run is within the budget."""
        return self.planned.peak_bytes <= self.plan.budget_bytes

    def __str__(self) -> str:
        a, b = self.plain, self.planned
        steps = len(a.losses)
        gradients = f"{self.gradients}{f' (step {self.gradients.step})' if self.gradients.value else ''}"
        repeated = f"\n{'':13}the original's own repetition: {self.repeated}" if self.gradients.value else ""
        return "\n".join((
            f"{self.model}, {count(steps, 'step')} with {self.optimizer}: "
            f"{'the same bits' if self.same_bits else 'not the same bits'}, "
            f"{'within' if self.within_budget else 'OVER'} the budget of {size(self.plan.budget_bytes)}",
            f"{'':13}{'plain':>12} {'planned':>12}",
            f"{'first loss':<13}{a.losses[0]:>12.6g} {b.losses[0]:>12.6g}",
            f"{'last loss':<13}{a.losses[-1]:>12.6g} {b.losses[-1]:>12.6g}",
            f"{'peak':<13}{size(a.peak_bytes):>12} {size(b.peak_bytes):>12}  "
            f"{share(b.peak_bytes, a.peak_bytes)}",
            f"{'step':<13}{duration(a.step_seconds):>12} {duration(b.step_seconds):>12}  "
            f"{b.step_seconds / a.step_seconds - 1:+.0%}",
            f"{'losses':<13}{'the same bits' if self.same_losses else 'differ'}",
            f"{'gradients':<13}{gradients}{repeated}",
            f"{'after them':<13}parameters and buffers: {self.state}",
            f"{'random':<13}{'the same draws' if self.same_draws else 'other draws'}"))


def check(model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *,
          budget: int | float | str, steps: int = STEPS, loss: Callable[..., Any] | None = None,
          loss_args: Sequence[Any] = (),
          optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
          **options: Unpack[Options]) -> Parity:
    """Train one copy of a model as it is and one copy under a plan, on the same inputs, and compare them.

    The two runs take turns, step by step, from the same random state. The model, its train flags and all
    generators stay as they were. Three copies of the model are in memory at once, two of them with gradients
    and optimizers: the third one is a second plain run of the first step.

    Args:
        model: the module to train.
        args, kwargs: the inputs of every step.
        budget: as for `wrap`.
        steps: how many steps to train.
        loss, loss_args: as for `wrap`. Without `loss`, the output's ``loss`` is trained, else the sum of its
            scalars, else the mean of the tanh of its tensors.
        optimizer: makes an optimizer of parameters; by default AdamW with a learning rate of 1e-4.
        options: `rkmate.Options`, as for `wrap`.

    Returns:
        A `Parity`, to print: losses, the largest difference of gradients, peaks and times. On a CPU in
        deterministic mode, ``.same_bits`` is True unless an option gives up bits (``compile=True``, a loss in
        chunks).

    Raises:
        ArgumentError: an argument is wrong, or the model cannot be copied.
        InfeasibleBudget, CaptureError: what `wrap` raises.
    """
    call = chosen(options, check)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ArgumentError(f"steps is {steps!r}; it should be a number of steps: 1, 2, ...")
    name = type(model).__name__
    model, kwargs = loss_inside(model, kwargs, loss, loss_args, call.loss_kwargs)
    args, kwargs = checked_sample(model, args, kwargs)
    draws = HostDraws()
    try:
        with unchanged_random_state(*devices.in_use()):
            runs = []
            with flags_to_plan(model, call.settings.run.training):
                for way in ("plain", "planned", "plain"):
                    module, inputs = _copied(model), _Inputs(args, kwargs)
                    if way == "planned":
                        given, named = inputs.fresh()
                        module = wrap(module, given, named, budget=budget, **call.options())
                    runs.append(_Run(module, inputs, call.settings))
            del module
            return _compared(name, runs, steps, optimizer or _adam)
    finally:
        draws.restore()


def _adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=_LEARNING_RATE)


def _copied(model: nn.Module) -> nn.Module:
    try:
        return remove(copy.deepcopy(model))
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"{type(model).__name__} cannot be copied (copy.deepcopy), so a plain and a "
                            f"planned copy cannot be trained side by side: {error}") from error


class _Inputs:
    """Sample inputs, to be copied for each step: a forward may write to them."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._tensors, self._structure = take_apart((args, kwargs), result=False)
        self.leaves: dict[str, torch.Tensor] = {}
        """Copies that take gradients, of the latest step."""

    def fresh(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call, with tensors of their own."""
        made = {id(t): t.detach().clone().requires_grad_(t.requires_grad) for t in self._tensors}
        tensors = [made[id(t)] for t in self._tensors]
        self.leaves = {f"input {k}": t for k, t in enumerate(tensors) if t.requires_grad}
        args, kwargs = self._structure.fill(tensors)
        return args, kwargs


class _Run:
    """A training run: one of two copies of a model."""

    def __init__(self, module: nn.Module, inputs: _Inputs, settings: Settings) -> None:
        self.module, self._inputs, self._settings = module, inputs, settings
        self.device = devices.common([*module.parameters(), *module.buffers()])
        self.losses: list[torch.Tensor] = []
        self.seconds: list[float] = []

    def step(self) -> None:
        """Run forward, loss and backward once, for as many calls as the settings say."""
        self.module.zero_grad(set_to_none=True)
        args, kwargs = self._inputs.fresh()
        self.device.synchronize()
        start = time.perf_counter()
        self.losses.append(self._backward(args, kwargs))
        self.device.synchronize()
        self.seconds.append(time.perf_counter() - start)

    def _backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        total: Any = sum(loss_of(self.module(*args, **kwargs), self._settings.trains)
                         for _ in range(self._settings.calls))
        total.backward()
        found: torch.Tensor = total.detach()
        return found

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Return the gradients of the latest step by name."""
        return {n: t.grad for n, t in (*self.module.named_parameters(), *self._inputs.leaves.items())
                if t.requires_grad}

    def state(self) -> dict[str, torch.Tensor | None]:
        """Return parameters and buffers by name."""
        return dict((*self.module.named_parameters(), *self.module.named_buffers()))

    def peak(self) -> int:
        """Measure the peak of a step."""
        args, kwargs = self._inputs.fresh()
        return measure_step(self.module, partial(self._backward, args, kwargs), timeline=False).peak

    def trained(self) -> Trained:
        """Return what became of it, its peak measured now."""
        return Trained(tuple(x.item() for x in self.losses), self.peak(),
                       median(self.seconds[1:] or self.seconds))      # the first step warms up


def _compared(name: str, runs: list[_Run], steps: int,
              optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> Parity:
    """Train the first two runs, plain and planned. The last one repeats the first step, and is let go."""
    plain, planned = runs[:2]
    makers = [optimizer([p for p in run.module.parameters() if p.requires_grad]) for run in (plain, planned)]
    worst, repeated, same_draws = Difference(), Difference(), True
    for number in range(1, steps + 1):
        before, host = RandomState.of(*devices.in_use()), HostDraws()
        ends = []
        for k in range(len(runs)):
            before.restore()
            host.restore()
            runs[k].step()
            ends.append(RandomState.of(*devices.in_use()).states)
        same_draws &= ends[0] == ends[1]
        worst = max(worst, _difference(plain.gradients(), planned.gradients(), number), key=lambda d: d.value)
        if number == 1:
            repeated = _difference(plain.gradients(), runs.pop().gradients(), number)
        for maker in makers:
            maker.step()
    same = all(a.shape == b.shape and not _gap(a, b)
               for a, b in zip(plain.losses, planned.losses, strict=True))
    state = _difference(plain.state(), planned.state(), steps)
    plan = planned.module.plan
    assert isinstance(plan, Plan)
    return Parity(name, type(makers[0]).__name__, plan, plain.trained(), planned.trained(), worst, state,
                  repeated, same, same_draws)


def _difference(first: Mapping[str, torch.Tensor | None], second: Mapping[str, torch.Tensor | None],
                step: int) -> Difference:
    """Return the largest difference between tensors of the same names."""
    found = Difference()
    with torch.no_grad():
        for name, a in first.items():
            b = second[name]
            if a is None or b is None:
                some = a if b is None else b
                if some is None:
                    continue
                a, b = (torch.zeros_like(some) if t is None else t for t in (a, b))
            a, b = a.detach(), b.detach()
            if torch.equal(a, b) or not a.numel():
                continue
            if not (a.is_floating_point() or a.is_complex()):
                a, b = a.to(torch.float64), b.to(torch.float64)
            gap = _gap(a, b)
            if gap > found.value:
                found = Difference(gap, name, _largest(a), step)
    return found


def _gap(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest difference of two elements; infinite where only one is a number."""
    apart = (a - b).abs()
    apart = torch.where(a.isnan() & b.isnan() | (a == b), torch.zeros_like(apart), apart)
    return float(apart.nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def _largest(a: torch.Tensor) -> float:
    return float(a.abs().max())
