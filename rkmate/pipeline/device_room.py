"""The largest budget whose plan fits into a device's free memory, with the fragments of its allocator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from rkmate import device as devices
from rkmate.budget import DeviceShare
from rkmate.errors import InfeasibleBudget
from rkmate.ir.allocator import CachingAllocator
from rkmate.ir.reserved import Beside, reserved_bytes
from rkmate.pipeline.prepare import Prepared
from rkmate.show.plan import Plan
from rkmate.support.warn import warn

LEFT_ALONE = 0.01
"""Share of a device's memory for what nobody asks torch's allocator for: kernels that are loaded late, and
libraries."""
ROUNDS = 8
"""Plans that are made to find a budget, at most."""
CLOSE = 0.02
"""A budget that fits is large enough when one that is larger by this share does not."""
FAR = 0.05
"""Share of a device's memory from which on fragments are worth a warning."""
_ADVICE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment, before the process starts, " \
    "leaves nearly no fragments"


class Made(Protocol):
    """A plan, and the variant of the graph that it runs over."""

    @property
    def plan(self) -> Plan:
        """The plan."""

    @property
    def prepared(self) -> Prepared:
        """The variant."""


M = TypeVar("M", bound=Made)


@dataclass(frozen=True)
class DeviceRoom:
    """A device's memory as a training loop finds it."""

    total: int
    """Bytes of the whole device."""
    most: int
    """Bytes that the allocator may have of it."""
    allocator: CachingAllocator
    """The allocator before the loop. Other loops that begin in this state are replayed from it."""
    beside: Beside

    def reserved(self, planned: Made, allocator: CachingAllocator | None = None) -> int:
        """Return bytes that the allocator has for a loop that follows a plan, at most."""
        prepared, plan = planned.prepared, planned.plan
        return reserved_bytes(allocator or self.allocator.again(), prepared.graph, plan.schedule, self.beside,
                              calls=plan.calls)

    def fragments(self, planned: Made, reserved: int) -> int:
        """Return bytes of what is reserved for a plan that none of its tensors has, at the least that they
        take."""
        held = self.allocator.reserved - self.allocator.free_bytes() + sum(self.beside.states)
        return reserved - held - planned.plan.peak_bytes - sum(self.beside.updates)

    def tell(self, planned: Made) -> None:
        """Warn of fragments, where there are many that expandable segments would not leave."""
        reserved = self.reserved(planned)
        lost = self.fragments(planned, reserved)
        if self.allocator.expandable or lost <= FAR * self.total:
            return
        better = self.reserved(planned, self.allocator.again(expandable=True))
        if reserved - better > FAR * self.total:
            warn(f"torch's allocator takes {reserved:,} bytes of the device for this plan, of which {lost:,} "
                 f"are fragments that no tensor has. {_ADVICE}: {better:,} bytes then")


def device_room(prepared: Prepared, share: DeviceShare | None) -> DeviceRoom | None:
    """Return the memory that a loop has on the device of a prepared model; None where no allocator keeps any,
    or the device is not there."""
    share = share or DeviceShare()
    device = devices.of(prepared.device)
    if not device.available():
        return None
    device.warm_up()
    device.give_back()
    allocator, memory = device.allocator(), device.memory()
    if allocator is None or memory is None:
        return None
    inputs = tuple(t.nbytes for source, t in prepared.blocked.traced.tensors.items()
                   if source.kind == "input" and not devices.of(t).host)
    trained = share.parameters
    beside = Beside(inputs, trained if prepared.settings.gradients == "in_place" else (),
                    tuple(n for n in trained for _ in range(share.states)), trained if share.states else ())
    return DeviceRoom(memory.total, memory.free + allocator.reserved - int(LEFT_ALONE * memory.total),
                      allocator, beside)


def largest_that_fits(limit: int, planned_at: Callable[[int], M], room: DeviceRoom) -> M:
    """Return the plan of the largest budget up to `limit` for which the allocator needs no more than there
    is.

    Fragments depend on the plan, so plans are made: below what the last one was too large by, then between
    one that fits and one that does not. Where none fits, the one that needs least is taken, with a warning.
    Raises what `planned_at` raises at `limit`.
    """
    fits: tuple[int, M] | None = None
    least: tuple[int, M] | None = None
    over, floor, at = limit + 1, 0, limit
    for _ in range(ROUNDS):
        try:
            planned = planned_at(at)
        except InfeasibleBudget as error:
            if least is None:
                raise
            floor = max(floor, error.minimum_bytes)
            if fits is not None or floor >= over:
                break
            at = floor
            continue
        reserved = room.reserved(planned)
        excess = reserved - room.most
        if least is None or reserved < least[0]:
            least = reserved, planned
        if excess <= 0:
            fits, floor = (at, planned), at
            if at == limit or over - at <= CLOSE * limit:
                break
            at = (at + over) // 2
        else:
            over = min(at, planned.plan.peak_bytes)
            lower = max(over - max(excess, int(CLOSE * over)), over // 2) if fits is None \
                else (fits[0] + over) // 2
            at = max(lower, floor)
            if at >= over or (fits is not None and over - floor <= CLOSE * limit):
                break
    if fits is None:
        assert least is not None
        warn(f'budget="auto": for its plan torch\'s allocator takes up to {least[0]:,} bytes of the device, '
             f"and {room.most:,} are free: it may run out of memory. Smaller batches need less"
             f"{'' if room.allocator.expandable else f'; {_ADVICE}'}")
        return least[1]
    chosen, planned = fits
    if not room.allocator.expandable and limit - chosen > FAR * room.total:
        warn(f'budget="auto": {limit:,} bytes are free for the steps, and {chosen:,} are given to the plan: '
             f"the rest goes into fragments of torch's allocator. {_ADVICE}")
    return planned
