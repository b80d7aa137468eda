"""Replay a sequence of block operations on a chain: its time, its peak, or why it cannot run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rkmate.errors import ScheduleError
from rkmate.ir.chain import Backward, Chain, ForwardPlain, ForwardSaving, Op


@dataclass(frozen=True)
class Cost:
    """Cost of a sequence of block operations."""

    peak_bytes: int
    """Most bytes at once, the first cut included."""
    seconds: float


def replay(chain: Chain, ops: Sequence[Op]) -> Cost:
    """Time and peak of a sequence, a cut staying in memory exactly as long as it is still read.

    Cut i is read by the forwards and by the backward of block i. Raises `ScheduleError` when an
    operation lacks its input, when backwards are out of order, or when one is left out.
    """
    last = len(chain) - 1
    drops = deaths(ops)
    cuts: set[int] = {0}
    options: dict[int, tuple[int, int]] = {}        # block -> its option, the bytes saved
    stays: dict[int, int] = {}                      # block -> the index of its partial save
    waiting = last       # the block whose backward comes next
    loss = False
    reached = -1
    peak = 0
    for k, op in enumerate(ops):
        b = op.block
        if b not in cuts:
            raise ScheduleError(f"operation {k} ({op}): cut {b} is not in memory")
        save = stays.get(b)
        if save is not None if isinstance(op, ForwardSaving) else op.save_index not in (None, save):
            raise ScheduleError(f"operation {k} ({op}): what is kept of block {b} is {save}")
        beside = sum(chain.blocks[j].partial_saves[at].bytes for j, at in stays.items())
        kept = beside + sum(size for _, size in options.values())
        reached = max(reached, b)
        if isinstance(op, Backward):
            found, saved = options.get(b, (None, 0))
            if b != waiting or found != op.option:
                raise ScheduleError(f"operation {k} ({op}): block {waiting}'s backward is next, and "
                                    f"option {found} of block {b} is saved")
            others = _bytes(chain, cuts - {b + 1}) + kept - saved + int(chain.held_by[-1])
            if not loss:
                outputs = int(chain.between[b, b + 1])
                peak = max(peak, others + saved + outputs + chain.grads[-1])
                loss = True
            block = chain.blocks[b].with_partial_save(op.save_index)
            peak = max(peak, others + block.options[op.option].backward_peak_bytes
                       + block.passing_bytes)
            del options[b]
            stays.pop(b, None)
            cuts.discard(b + 1)
            waiting = b - 1
        else:
            if b > waiting or b in options:
                raise ScheduleError(f"operation {k} ({op}): the block's backward has run, or its "
                                    "forward is saved already")
            around = (int(chain.held_by[-1]) + chain.grads[waiting + 1] if loss
                      else int(chain.held_by[reached]) + chain.grads_at_start)
            if isinstance(op, ForwardSaving):
                own = chain.blocks[b].partial_saves[op.save_index].first_peak_bytes
                stays[b] = op.save_index
            elif isinstance(op, ForwardPlain):
                own = chain.blocks[b].with_partial_save(op.save_index).forward_peak_bytes
            else:
                option = chain.blocks[b].with_partial_save(op.save_index).options[op.option]
                own = option.forward_peak_bytes
                options[b] = op.option, option.saved_bytes
            peak = max(peak, _bytes(chain, cuts - {b + 1}) + kept + around + own)
            cuts.add(b + 1)
        cuts.difference_update(drops[k])
    if waiting >= 0:
        raise ScheduleError(f"the backward of block {waiting} never runs")
    return Cost(peak, seconds(chain, ops))


def seconds(chain: Chain, ops: Iterable[Op]) -> float:
    """Sum of the times of all operations."""
    return math.fsum(chain.seconds(op) for op in ops)


def _bytes(chain: Chain, cuts: Iterable[int]) -> int:
    alive: set[int] = set()
    alive.update(*(chain.cuts[i] for i in cuts))
    return sum(chain.sizes[j] for j in alive)


def deaths(ops: Sequence[Op]) -> list[set[int]]:
    """Return, for each operation, the cuts that nobody reads after it before they are made again."""
    needed: set[int] = set()
    result: list[set[int]] = [set() for _ in ops]
    for k in range(len(ops) - 1, -1, -1):
        op = ops[k]
        if not isinstance(op, Backward):
            # Outputs that an option keeps belong to its peaks until the block's own backward.
            if op.block + 1 not in needed:
                result[k].add(op.block + 1)
            needed.discard(op.block + 1)
        if op.block not in needed:
            result[k].add(op.block)
            needed.add(op.block)
    return result
