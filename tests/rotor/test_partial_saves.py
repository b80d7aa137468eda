"""Forwards that keep something for those that run again: never slower, as promised, and as by recursion."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rkmate.errors import GraphError, ScheduleError
from rkmate.rotor import (
    Backward,
    Block,
    Chain,
    Forward,
    ForwardPlain,
    ForwardSaving,
    Option,
    PartialSave,
    minimum,
    replay,
    solve,
)
from rkmate.rotor.memory_requirements import MemoryRequirements
from rkmate.rotor.partial_saves import PartialSaves
from tests.rotor.chains import chains, options, small


@st.composite
def keeping(draw: st.DrawFn, longest: int = 4) -> Chain:
    """Chains with one or two partial saves a block, of any cost."""
    chain = draw(chains(longest))
    count = draw(st.integers(1, 2))
    blocks = []
    for block in chain.blocks:
        kept = [PartialSave(size, (), draw(st.integers(0, 3)), draw(st.integers(0, 8)),
                     size + draw(st.integers(0, 8)),
                     tuple(draw(st.lists(options(), min_size=1, max_size=2))))
                for size in draw(st.lists(small, min_size=count, max_size=count))]
        # Dear forwards, cheap saves: else the third case hardly ever pays.
        blocks.append(replace(block, forward_seconds=block.forward_seconds + 3, partial_saves=tuple(kept)))
    return replace(chain, blocks=tuple(blocks)).verify()


def without(chain: Chain) -> Chain:
    return replace(chain, blocks=tuple(replace(b, partial_saves=()) for b in chain.blocks))


def by_recursion(chain: Chain, budget: int) -> float:
    """Least time in so many bytes, by the three cases written down plainly."""
    n = len(chain)
    base = MemoryRequirements(chain)
    # What keeps no byte is left out, as it is of the tables.
    levels = [PartialSaves(chain, k, base) for k in range(len(chain.blocks[0].partial_saves))]
    elapsed = base.elapsed

    @functools.cache
    def best(level: int | None, s: int, t: int, m: int) -> float:
        needs = base if level is None else levels[level].needs
        found = [math.inf]
        for k, need in enumerate(needs.option(s, t)):
            if need <= m:
                o = needs.options[s]
                rest = 0.0 if t == s + 1 else best(level, s + 1, t, m - int(o.keep[k]))
                found.append(float(o.seconds[k]) + rest)
        for i in range(s + 1, t):
            runs = float(needs.elapsed[i] - needs.elapsed[s])
            if needs.split(s, t)[i - s - 1] <= m:
                found.append(runs + best(level, i, t, m - int(needs.between[s, i]))
                             + best(level, s, i, m))
            for k, below in enumerate(levels if level is None else []):
                if below.needs.inside[s, i] and below.first(s, t)[i - s - 1] <= m:
                    found.append(float(elapsed[i] - elapsed[s]) + best(k, s, i, m)
                                 + best(None, i, t, m - int(below.needs.between[s, i])))
        return min(found)

    return best(None, 0, n, budget - chain.input_bytes)


@settings(max_examples=50, deadline=None)
@given(keeping(), st.integers(0, 30))
def test_equals_the_recursion_and_keeps_its_promise(chain: Chain, more: int) -> None:
    table, plain = solve(chain, slot_bytes=1), solve(without(chain), slot_bytes=1)
    assert table.minimum_bytes == plain.minimum_bytes == minimum(chain)[0]
    for budget in (table.minimum_bytes, table.minimum_bytes + more):
        ops = table.sequence(budget)
        assert ops is not None
        cost = replay(chain, ops)
        assert cost.peak_bytes <= budget
        assert cost.seconds <= table.seconds(budget) + 1e-9
        assert table.seconds(budget) <= plain.seconds(budget) + 1e-9
        most = table.slots * table.slot_bytes + chain.input_bytes
        assert table.seconds(budget) == pytest.approx(by_recursion(chain, min(budget, most)))


@settings(max_examples=30, deadline=None)
@given(keeping(6), st.integers(2, 7))
def test_slots_never_exceed_the_budget(chain: Chain, slot: int) -> None:
    table = solve(chain, slot_bytes=slot)
    before = math.inf
    for budget in range(table.minimum_bytes, table.minimum_bytes + 20):
        ops = table.sequence(budget)
        assert ops is not None
        cost = replay(chain, ops)
        assert cost.peak_bytes <= budget
        assert cost.seconds <= min(before, table.seconds(budget)) + 1e-9
        before = cost.seconds


def test_sequences_never_get_slower_where_kept_data_beats_every_option() -> None:
    """Found by chance: carried in bytes, the sequence of a smaller budget is faster than its slot promises,
    and what partial saves give is beyond the budget of the fastest options."""
    free = Option((), (), 0, 0, 0, 0, 0)
    kept = PartialSave(0, (), 0, 0, 0, (free,))
    two = replace(free, backward_seconds=2)
    blocks = (
        Block(3, 0, (free,), 0, (kept, kept)),
        Block(3, 0, (replace(free, backward_seconds=4),), 0, (kept, kept)),
        Block(3, 0, (replace(two, saved_bytes=1),), 0, (PartialSave(1, (), 0, 0, 1, (two,)), kept)),
        Block(3, 0, (free,), 1, (kept, kept)),
    )
    cuts = (frozenset({0, 2, 3}), frozenset(), frozenset({1}), frozenset(), frozenset())
    table = solve(Chain(blocks, cuts, {0: 0, 1: 1, 2: 0, 3: 0}, (0,) * 5).verify(), slot_bytes=2)
    found = [table.sequence(table.minimum_bytes + more) for more in range(20)]
    seconds = [replay(table.chain, ops).seconds for ops in found if ops is not None]
    assert len(seconds) == 20
    assert seconds == sorted(seconds, reverse=True)


def line(length: int) -> Chain:
    """Blocks of four seconds, of which a kept byte saves three."""
    option = Option((), (), 4.0, 1.0, 20, 22, 24)
    kept = PartialSave(1, (), 1.0, 2, 3, (replace(option, forward_seconds=1.0),))
    block = Block(4.0, 2, (option,), partial_saves=(kept,))
    return Chain((block,) * length, tuple(frozenset({i}) for i in range(length + 1)),
                 {i: 2 if i else 0 for i in range(length + 1)}, (2,) * (length + 1)).verify()


def test_a_byte_kept_in_the_first_forward_saves_later_ones() -> None:
    chain = line(4)
    # Each block's backward takes all but the cut of block 2 and the three bytes kept.
    budget = 24 + 2 + 3
    table = solve(chain, slot_bytes=1)
    ops = table.sequence(budget)
    assert ops is not None
    assert ops[:3] == [ForwardSaving(b, 0) for b in range(3)]
    assert replay(chain, ops).peak_bytes <= budget
    assert replay(chain, ops).seconds < solve(without(chain), slot_bytes=1).seconds(budget)


def test_replay_knows_what_is_kept() -> None:
    chain = line(2)
    good = [ForwardSaving(0, 0), Forward(1, 0), Backward(1, 0), Forward(0, 0, 0), Backward(0, 0, 0)]
    cost = replay(chain, good)
    assert cost.seconds == 4 + 5 + 2
    assert cost.peak_bytes == 24 + 2 + 1
    with pytest.raises(ScheduleError, match="kept of block 0 is None"):
        replay(chain, [ForwardPlain(0, 0)])
    with pytest.raises(ScheduleError, match="kept of block 0 is 0"):
        replay(chain, [ForwardSaving(0, 0), ForwardSaving(0, 0)])


def test_partial_saves_are_the_same_number_for_all_blocks() -> None:
    chain = line(2)
    for blocks in product(*((b, replace(b, partial_saves=())) for b in chain.blocks)):
        if len({len(b.partial_saves) for b in blocks}) > 1:
            with pytest.raises(GraphError, match="as many partial saves"):
                replace(chain, blocks=blocks).verify()
