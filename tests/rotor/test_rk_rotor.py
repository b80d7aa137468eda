"""rk-Rotor against exhaustive search, and what its table promises."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rkmate.errors import ArgumentError, GraphError, ScheduleError
from rkmate.ir.chain import Backward, Block, Chain, Forward, ForwardPlain, Option
from rkmate.rotor import rk_rotor
from rkmate.rotor.memory_requirements import MemoryRequirements
from rkmate.rotor.replay import replay
from rkmate.rotor.rk_rotor import minimum, solve
from tests.rotor.chains import best_time, chains


def line(length: int, kinds: int = 1, size: int = 1000) -> Chain:
    """A homogeneous chain with some options a block, and the loss outside."""
    options = tuple(Option((), (), 1.0, 2.0 + k / 2, size * (8 - 2 * k), size * (9 - 2 * k),
                           size * (10 - 2 * k)) for k in range(kinds))
    blocks = (Block(1.0, 2 * size, options),) * length
    return Chain(blocks, tuple(frozenset({i}) for i in range(length + 1)),
                 {i: size if i else 0 for i in range(length + 1)}, (size,) * (length + 1))


@settings(max_examples=50, deadline=None)
@given(chains(), st.integers(0, 12), st.booleans())
def test_equals_exhaustive_search(chain: Chain, more: int, keep: bool) -> None:
    table = solve(chain, slot_bytes=1, keep=keep)
    for budget in {table.minimum_bytes - 1, table.minimum_bytes, table.minimum_bytes + more}:
        best = best_time(chain, budget, keep=keep)
        ops = table.sequence(budget)
        if best is None:
            assert ops is None and table.seconds(budget) == math.inf
            continue
        assert ops is not None
        cost = replay(chain, ops)
        assert cost.peak_bytes <= budget
        assert cost.seconds == pytest.approx(best)
        assert table.seconds(budget) == pytest.approx(best)


@settings(max_examples=75, deadline=None)
@given(chains(6))
def test_minimum_is_exact(chain: Chain) -> None:
    table = solve(chain, slot_bytes=1)
    least, ops = minimum(chain)
    assert least == table.minimum_bytes
    assert replay(chain, ops).peak_bytes <= least
    assert math.isfinite(table.seconds(least)) and table.seconds(least - 1) == math.inf
    assert table.seconds(least) <= replay(chain, ops).seconds + 1e-9


@settings(max_examples=30, deadline=None)
@given(chains(6), st.integers(1, 7))
def test_slots_never_exceed_the_budget_nor_lose_to_the_promise(chain: Chain, slot: int) -> None:
    table = solve(chain, slot_bytes=slot)
    exact = solve(chain, slot_bytes=1)
    before = math.inf
    for budget in range(table.minimum_bytes, table.minimum_bytes + 20):
        ops = table.sequence(budget)
        assert ops is not None
        cost = replay(chain, ops)
        assert cost.peak_bytes <= budget
        assert cost.seconds <= table.seconds(budget) + 1e-9
        assert cost.seconds >= exact.seconds(budget) - 1e-9
        assert cost.seconds <= before + 1e-9         # more memory is never slower
        before = cost.seconds


@settings(max_examples=30, deadline=None)
@given(chains(6), st.integers(0, 8))
def test_a_table_for_small_budgets_agrees_with_the_one_for_all(chain: Chain, more: int) -> None:
    exact = solve(chain, slot_bytes=1)
    most = exact.minimum_bytes + more
    table = solve(chain, slot_bytes=1, most=most)
    assert table.minimum_bytes == exact.minimum_bytes
    for budget in range(exact.minimum_bytes - 1, most + 3):
        within = min(budget, most)
        assert table.seconds(budget) <= exact.seconds(within) + 1e-9
        ops = table.sequence(budget)
        assert (ops is None) == (budget < exact.minimum_bytes)
        assert ops is None or replay(chain, ops).peak_bytes <= budget


@pytest.mark.parametrize(("length", "kinds"), [(1, 1), (2, 1), (12, 1), (13, 2), (14, 3), (12, 4), (11, 7)])
@pytest.mark.parametrize("keep", [True, False])
def test_layers_of_one_kind_are_solved_once_with_the_same_result(
        monkeypatch: pytest.MonkeyPatch, length: int, kinds: int, keep: bool) -> None:
    plain = line(length, 2)
    chain = replace(plain, blocks=tuple(replace(b, forward_seconds=1.0 + s % kinds)
                                        for s, b in enumerate(plain.blocks)))
    _, repeats = rk_rotor.repeated(MemoryRequirements(chain))
    assert bool(repeats.any()) == (length > kinds + 1 and kinds <= rk_rotor.PERIOD)
    shared = solve(chain, 60, keep=keep)
    monkeypatch.setattr(rk_rotor, "PERIOD", 0)
    assert not rk_rotor.repeated(MemoryRequirements(chain))[1].any()
    alone = solve(chain, 60, keep=keep)
    np.testing.assert_allclose(shared._top.table[1], alone._top.table[1], rtol=1e-12)


def test_slots_of_a_table_for_small_budgets_are_finer() -> None:
    chain = line(40)
    least = minimum(chain)[0]
    coarse, fine = solve(chain, slots=50), solve(chain, slots=50, most=4 * least)
    assert 4 * fine.slot_bytes < coarse.slot_bytes
    assert fine.seconds(2 * least) < coarse.seconds(2 * least)


def test_two_blocks_by_hand() -> None:
    chain = line(2)
    # Saving everything: block 0 keeps 8 + 1, block 1's backward takes 10 more, inputs are free.
    assert replay(chain, [Forward(0, 0), Forward(1, 0), Backward(1, 0), Backward(0, 0)]).peak_bytes \
        == 19000
    table = solve(chain, slot_bytes=1)
    assert table.sequence(19000) == [Forward(0, 0), Forward(1, 0), Backward(1, 0), Backward(0, 0)]
    # Without: cut 1 and block 1's backward.
    assert table.minimum_bytes == 11000
    assert table.sequence(18999) == [ForwardPlain(0), Forward(1, 0), Backward(1, 0), Forward(0, 0),
                                     Backward(0, 0)]
    assert table.sequence(10999) is None


def test_output_gradients_are_not_there_before_the_loss() -> None:
    option = Option((), (), 1.0, 1.0, 0, 10, 5)
    chain = Chain((Block(1.0, 10, (option,)),), (frozenset(), frozenset({0})), {0: 1}, (0, 7))
    assert minimum(chain)[0] == 10
    # At the loss, saved data, outputs and their gradients stand side by side.
    tall = Chain((Block(1.0, 10, (option,)),), (frozenset(), frozenset({0})), {0: 1}, (0, 12))
    assert minimum(tall)[0] == 13


def test_tensors_that_pass_by_are_counted_once() -> None:
    option = Option((), (), 1.0, 1.0, 0, 10, 10)
    block = Block(1.0, 10, (option,))
    through = Chain((block,) * 3, (frozenset(), frozenset({0}), frozenset({0, 1}), frozenset({2})),
                    {0: 100, 1: 1, 2: 0}, (0,) * 4)
    assert through.between[1, 2] == 1
    assert minimum(through)[0] == 111


def test_long_chains_need_no_recursion() -> None:
    chain = line(200)
    least, ops = minimum(chain)
    assert replay(chain, ops).peak_bytes == least
    table = solve(chain, slots=50)
    ops = table.sequence(least * 2)
    assert ops is not None and replay(chain, ops).peak_bytes <= 2 * least


def test_options_between_the_ends_are_used() -> None:
    chain = line(6, kinds=4)
    table = solve(chain)
    used = {op.option for f in range(10, 60, 2) for op in table.sequence(f * 1000) or []
            if isinstance(op, Forward)}
    assert used == {0, 1, 2, 3}


def test_without_keeping_every_backward_follows_its_forward() -> None:
    chain = line(6)
    ops = solve(chain, keep=False).sequence(40000)
    assert ops is not None
    for here, after in pairwise(ops):
        if isinstance(here, Forward):
            assert after == Backward(here.block, here.option)


def test_replay_refuses_what_cannot_run() -> None:
    chain = line(2)
    with pytest.raises(ScheduleError, match="cut 1 is not in memory"):
        replay(chain, [Forward(1, 0)])
    with pytest.raises(ScheduleError, match="backward is next"):
        replay(chain, [Forward(0, 0), Backward(0, 0)])
    with pytest.raises(ScheduleError, match="never runs"):
        replay(chain, [Forward(0, 0), Forward(1, 0), Backward(1, 0)])
    with pytest.raises(ScheduleError, match="saved already"):
        replay(chain, [Forward(0, 0), Forward(0, 0)])


def test_wrong_arguments() -> None:
    with pytest.raises(ArgumentError, match="at least 1"):
        solve(line(2), slots=0)
    with pytest.raises(GraphError, match="cuts"):
        Chain(line(2).blocks, (frozenset(),), {}, (0, 0, 0)).verify()
    with pytest.raises(GraphError, match="no option"):
        Chain((Block(1.0, 1, ()),), (frozenset(),) * 2, {}, (0, 0)).verify()
    with pytest.raises(GraphError, match="no size"):
        Chain(line(1).blocks, (frozenset({5}), frozenset()), {}, (0, 0)).verify()
    with pytest.raises(GraphError, match="has no block"):
        Chain((), (), {}, ()).verify()
    with pytest.raises(GraphError, match="cumulative"):
        replace(line(2), pinned=(2, 1)).verify()
    with pytest.raises(GraphError, match="a size of the chain is negative"):
        replace(line(1), grads=(0, -1)).verify()
    with pytest.raises(GraphError, match="of block 0 is negative"):
        replace(line(1), blocks=(replace(line(1).blocks[0], forward_seconds=-1.0),)).verify()
