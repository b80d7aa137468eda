"""Budgets from a device's memory, and the largest batch that fits in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from rkmate import device as devices
from rkmate.budget import Budget, DeviceShare, parse_budget
from rkmate.errors import ArgumentError, InfeasibleBudget
from rkmate.graph.capture.captured import Capture
from rkmate.graph.capture.refusals import refuse_what_cannot_repeat
from rkmate.graph.capture.structure import take_apart
from rkmate.graph.sizes.resized import KnownCall, derived, known_call, one_family, possible
from rkmate.pipeline.device_room import LEFT_ALONE
from rkmate.pipeline.loss import traceable
from rkmate.pipeline.model import flags_to_plan
from rkmate.pipeline.prepare import Prepared, Traced, check_model, prepare, trace
from rkmate.pipeline.search import plan_prepared, smallest_peak_of
from rkmate.pipeline.settings import Settings
from rkmate.show.plan import Plan
from rkmate.support.planning_lock import capture_lock, gc_pause, planning_lock
from rkmate.support.progress import Progress
from rkmate.torch_seam.dtensor import bytes_held

ADAM_STATES = 2
"""Tensors of the size of each parameter that Adam and AdamW keep."""
_SLACK = 0.04
"""Share of a device's memory left alone: the allocator's fragments, and math libraries."""


def training_bytes(model: nn.Module, optimizer_states: int = ADAM_STATES) -> int:
    """Return the bytes that training needs in addition to the parameters: gradients that do not exist yet,
    and `optimizer_states` tensors of the size of each trained parameter. Raises `ArgumentError`."""
    if isinstance(optimizer_states, bool) or not isinstance(optimizer_states, int) or optimizer_states < 0:
        raise ArgumentError(f"optimizer_states is {optimizer_states!r}; it should be a number of tensors: "
                            "2 for Adam, 0 for none")
    trained = [p for p in model.parameters() if p.requires_grad]
    grads = sum(bytes_held(p) for p in trained if p.grad is None)
    return grads + optimizer_states * sum(map(bytes_held, trained))


def auto_budget(model: nn.Module, *, optimizer_states: int = ADAM_STATES) -> int:
    """Return the approximate number of bytes that ``budget="auto"`` leaves for a step.

    The result is the free memory of the model's CUDA device (including memory that torch's allocator has
    cached), minus gradients of parameters that do not exist yet, minus the optimizer's state, minus 4% of the
    device for fragments. ``budget="auto"`` itself counts the fragments of the actual schedule. Call this
    function, or `wrap`, before the first step.

    Args:
        model: the module, on its device.
        optimizer_states: number of tensors of a parameter's size that the optimizer will keep for each
            parameter: 2 for Adam and AdamW, 1 for SGD with momentum, 0 for SGD, or if the state exists.

    Raises:
        ArgumentError: the model is not on a CUDA device, or nothing is left for a step.
    """
    return _left_on_device(model, optimizer_states, _SLACK)


def device_share(model: nn.Module) -> Budget:
    """Return the budget that ``"auto"`` stands for: the largest budget whose steps fit into free memory,
    together with the fragments of the device's allocator, gradients and the states of Adam. Raises as
    `auto_budget`."""
    most = _left_on_device(model, ADAM_STATES, LEFT_ALONE)
    trained = tuple(bytes_held(p) for p in model.parameters() if p.requires_grad)
    return Budget(bytes=most, device=DeviceShare(trained, ADAM_STATES))


def _left_on_device(model: nn.Module, optimizer_states: int, slack: float, asks: str = 'budget="auto"',
                    instead: str = 'the budget in bytes ("2GiB"), or as a share of the model\'s own peak '
                                   "(0.5)") -> int:
    """Return the bytes of the model's device that are left for a step. `asks`: what asks for them, for an
    error; `instead`: what to give instead. Raises `ArgumentError`."""
    check_model(model)
    places = {p.device: devices.of(p) for p in model.parameters()}
    memory = next(iter(places.values())).memory() if len(places) == 1 else None
    if memory is None:
        where = ", ".join(sorted(map(str, places))) or "nowhere"
        raise ArgumentError(f"{asks} asks the CUDA device how much memory is free, and the model is on "
                            f"{where}: give {instead}")
    free = memory.free + memory.cached
    needed = training_bytes(model, optimizer_states)
    result = free - needed - int(slack * memory.total)
    if result <= 0:
        raise ArgumentError(f"nothing is left for a training step on {next(iter(places))}: {free:,} bytes "
                            f"are free, gradients and optimizer need {needed:,}. Free memory, or, for SGD, "
                            "pass budget=rkmate.auto_budget(model, optimizer_states=0)")
    return result


@dataclass(frozen=True)
class BatchSize:
    """The largest batch that fits, and what it costs."""

    size: int
    """Largest batch size that fits."""
    plan: Plan
    """Plan for a step with this batch."""
    budget_bytes: int
    """Bytes left for the step, next to parameters, buffers, gradients and optimizer state."""
    size_without: int
    """Largest batch that fits without rematerialization; 0 if not even one sample fits."""
    tried: tuple[tuple[int, int | None], ...]
    """Pairs of a batch size and the smallest possible peak of its step, in bytes; None: over the budget."""

    @property
    def seconds_per_sample(self) -> float:
        """Predicted seconds of a step, divided by the batch size."""
        return self.plan.step_seconds / self.size

    def __str__(self) -> str:
        from rkmate.show.amounts import duration, size

        return (f"batch of {self.size} in {size(self.budget_bytes)}: peak "
                f"{size(self.plan.peak_bytes)}, time {self.plan.overhead:+.1%}, "
                f"{duration(self.seconds_per_sample)} for each sample; without rematerialization "
                f"{self.size_without or 'not even one sample fits'}")


def largest_batch(model: nn.Module, make_inputs: Callable[[int], Any], settings: Settings, progress: Progress,
                  *, device_memory: int | str | None, optimizer_states: int, most: int) -> BatchSize:
    """Return the largest batch whose training step fits in the device that the model is on, as
    `rkmate.max_batch_size` does."""
    devices.common((*model.parameters(), *model.buffers()))
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ArgumentError(f"most is {most!r}; it should be a positive number of samples")
    budget = _left_for_step(model, device_memory, optimizer_states)
    tried: dict[int, int | None] = {}
    plain: dict[int, int] = {}
    best: list[Prepared] = []
    known: list[KnownCall] = []
    """Captured in full: other sizes are derived from two of them, where that is certain."""

    def captured(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        family = [k for k in known if one_family(k, args, kwargs)]
        found: Capture | None = None
        if possible(_shapes(args, kwargs), [[f.shape for f in k.forms] for k in family]):
            with planning_lock, gc_pause(), capture_lock:
                found, _ = derived(traceable(model), args, kwargs, family)
        traced = trace(model, args, kwargs, settings, progress, found)
        if found is None:
            known.append(known_call(traced.capture, args, kwargs))
        return traced

    def prepared(n: int) -> Prepared:
        args, kwargs = _inputs(make_inputs(n))
        refuse_what_cannot_repeat(traceable(model), args, kwargs)
        here = prepare(captured(args, kwargs))
        plain[n] = here.baseline_peak       # known without solving anything
        return here

    def smallest_peak(n: int) -> int:
        here = prepared(n)
        peak = plain[n] if plain[n] <= budget else smallest_peak_of(here, budget)
        tried[n] = peak if peak <= budget else None
        if peak <= budget:
            best[:] = [here]
        elif n == 1:
            raise InfeasibleBudget(
                f"a batch of one needs {peak:,} bytes for its step, and {budget:,} are left: take a larger "
                'device_memory, or try offload=, or Settings(gradients="in_place")', peak)
        return peak

    def plain_peak(n: int) -> int:
        if n not in plain:
            prepared(n)
        return plain[n]

    with flags_to_plan(model, None):
        size = _largest(smallest_peak, budget, most)
        plan = plan_prepared(best[0], budget)
        without = _largest(plain_peak, budget, size) if plain_peak(1) <= budget else 0
    return BatchSize(size, plan, budget, without, tuple(sorted(tried.items())))


def _largest(peak_of: Callable[[int], int], budget: int, most: int) -> int:
    """Return the largest number up to `most` whose peak is within the budget; that of one is.

    Doubled until it is not, then narrowed: peaks are almost linear in the batch, so that a straight
    line between the two ends says where to look; every second look is in the middle, so that a
    bend costs little. The number returned is the last one that was looked at and fits.
    """
    low, high = 0, 1
    low_peak = high_peak = 0
    while high <= most:
        high_peak = peak_of(high)
        if high_peak > budget:
            break
        low, low_peak, high = high, high_peak, 2 * high
    if high > most:
        if low == most:
            return low
        high = most
        high_peak = peak_of(high)
        if high_peak <= budget:
            return high
    guess = True
    while high - low > 1:
        part = (budget - low_peak) / (high_peak - low_peak) if guess else 0.5
        at = min(max(low + int(part * (high - low)), low + 1), high - 1)
        peak = peak_of(at)
        moved_low = peak <= budget
        if moved_low:
            low, low_peak = at, peak
        else:
            high, high_peak = at, peak
        # A good guess stands next to the answer: look there before halving what is left.
        if high - low > 1 and guess:
            near = low + 1 if moved_low else high - 1
            peak = peak_of(near)
            if peak <= budget:
                low, low_peak = near, peak
            else:
                high, high_peak = near, peak
        guess = not guess
    return low


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Sequence[int]]:
    return [t.shape for t in take_apart((args, kwargs), result=False)[0]]


def _left_for_step(model: nn.Module, device_memory: int | str | None, optimizer_states: int) -> int:
    if device_memory is None:
        return _left_on_device(model, optimizer_states, _SLACK, "max_batch_size without device_memory=",
                               'a device\'s memory (device_memory="24GiB"), or a GPU to plan for (device=)')
    if isinstance(device_memory, float):
        raise ArgumentError(f"device_memory is {device_memory}; it should be bytes (an int) or text "
                            '("24GiB")')
    whole = parse_budget(device_memory).bytes
    if whole is None:
        raise ArgumentError(f"device_memory is {device_memory!r}; a share has no meaning here: give bytes "
                            '(an int) or text ("24GiB")')
    pinned = sum(map(bytes_held, (*model.parameters(), *model.buffers())))
    pinned += sum(bytes_held(p.grad) for p in model.parameters() if p.grad is not None)
    needed = pinned + training_bytes(model, optimizer_states)
    if needed >= whole:
        raise ArgumentError(f"device_memory is {whole:,} bytes, and parameters, buffers, gradients and "
                            f"optimizer state alone need {needed:,}: take a device of that size at least, "
                            "or shard the model")
    return whole - needed


def _inputs(made: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(made, (tuple, list)) and len(made) == 2 and isinstance(made[0], (tuple, list)) \
            and isinstance(made[1], Mapping):
        return tuple(made[0]), dict(made[1])
    if isinstance(made, (tuple, list)):
        return tuple(made), {}
    raise ArgumentError(f"make_inputs returned {type(made).__name__}; it should return a tuple with "
                        "the positional arguments, or (args, kwargs)")
