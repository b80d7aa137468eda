"""Variants whose kernels differ, measured in turns.

Between the measuring of one variant and of the next lie the compiling and the planning of one: a minute, in
which a machine can change its speed by more than a layout gains. So both are measured before either is
planned, and then both once more; of each operation the median counts, as ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from rkmate import device as devices
from rkmate.device import Device
from rkmate.ir.cd import HOISTED, Cost, Kernel
from rkmate.measure.caches import as_in_a_step, touched_bytes
from rkmate.measure.costs import text_of_beginning
from rkmate.measure.remembered import CostMemory, Numbers
from rkmate.measure.runs import median
from rkmate.measure.settings import MeasureSettings
from rkmate.pipeline.compiled import compile_all
from rkmate.pipeline.prepare import Blocked, block, cost_memory, measured_costs
from rkmate.pipeline.variants import Variant, others

LEAST_ROUNDS = 2


def measure_in_turns(blocks: dict[Variant, Blocked], limit: Callable[[Blocked], int] | None = None) -> float:
    """Measure the first variant and one that is compared with it because its kernels may be faster, and
    remember what they cost; nothing where there is none, or where costs are known, or counted. Seconds that
    it took. `blocks`: the first variant, and others that were looked at; the one that is measured is added.
    `limit`: the bytes that measuring may take."""
    start = time.perf_counter()
    one = next(iter(blocks.values()))
    settings = one.traced.settings
    variant = next((v for v in others(settings, one.concerned)
                    if v.channels_last != one.variant.channels_last), None)
    if variant is None or settings.costs == "analytic":
        return 0.0
    if variant not in blocks:
        blocks[variant] = block(one.traced, variant)
    both = (one, blocks[variant])
    if _are_known(both, cost_memory()):
        return time.perf_counter() - start
    for each in both:
        compile_all(each.partition.program.operation, each.traced.progress)
    rounds = max(LEAST_ROUNDS, settings.measure.passes)
    part = replace(settings.measure, passes=1, share=settings.measure.share / rounds,
                   least_seconds=settings.measure.least_seconds / rounds)
    found = [CostMemory(None) for _ in range(rounds)]
    for own in found:
        for each in both:
            measured_costs(each, own, part, limit)
    for each in both:
        _remember(each, part, found, cost_memory())
    return time.perf_counter() - start


def _are_known(both: Sequence[Blocked], memory: CostMemory) -> bool:
    return all(None not in _known(each, each.traced.settings.measure, memory) for each in both)


def _remember(blocked: Blocked, part: MeasureSettings, found: Sequence[CostMemory],
              memory: CostMemory) -> None:
    """The median of each operation. Where one had no room in a round, its block is left to be
    measured."""
    where = _measured_on(blocked, blocked.traced.settings.measure)
    rounds = [_known(blocked, part, own) for own in found]
    for (text, _), runs in zip(_texts(blocked), zip(*rounds, strict=True), strict=True):
        whole = [costs for costs in runs if costs is not None]
        if len(whole) == len(runs):
            memory.put(text, *where, tuple(map(_median, zip(*whole, strict=True))))


def _known(blocked: Blocked, settings: MeasureSettings, memory: CostMemory) -> list[Numbers | None]:
    """What a memory has of each text."""
    where = _measured_on(blocked, settings)
    return [memory.get(text, *where, count) for text, count in _texts(blocked)]


def _texts(blocked: Blocked) -> list[tuple[str, int]]:
    """By what costs are remembered, each once, and of how many operations."""
    hoisted = blocked.partition.block_of.count(HOISTED)
    blocks = {text: len(b.c) for text, b in zip(blocked.texts, blocked.partition.blocks, strict=True)}
    return [(text_of_beginning(hoisted, blocked.texts), hoisted), *blocks.items()]


def _measured_on(blocked: Blocked, settings: MeasureSettings) -> tuple[Device, MeasureSettings]:
    """Where it is measured, and how."""
    device = devices.of(blocked.traced.device)
    return device, as_in_a_step(settings, device, touched_bytes(blocked.traced.capture.graph))


def _median(runs: Sequence[Cost]) -> Cost:
    """Of one operation in several rounds: the median of its seconds, and the most bytes."""
    kernels = [(median(k.time for k in same), max(k.overhead for k in same)) for same in zip(
        *((Kernel(run.time, run.overhead), *run.alternatives) for run in runs), strict=True)]
    return Cost(*kernels[0], tuple(Kernel(*k) for k in kernels[1:]))
