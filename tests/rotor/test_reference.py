"""The table that is filled fast against the recurrence written down plainly."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rkmate.ir.chain import Chain
from rkmate.rotor.memory_requirements import MemoryRequirements
from rkmate.rotor.rk_rotor import repeated, solve
from tests.rotor.chains import chains
from tests.rotor.reference import reference_table


def check(chain: Chain, size: int) -> None:
    table = solve(chain, slot_bytes=size)
    known = reference_table(chain, table.slots, size)
    row, time = table._top.table
    for (s, t, m), seconds in known.items():
        assert time[row[s] + t, m] == pytest.approx(seconds), (s, t, m)


@settings(max_examples=60, deadline=None)
@given(chains(5), st.integers(1, 5))
def test_every_sub_problem_equals_the_reference(chain: Chain, size: int) -> None:
    check(chain, size)


@settings(max_examples=15, deadline=None)
@given(chains(2), st.integers(3, 4), st.integers(1, 4))
def test_chains_that_repeat_themselves(chain: Chain, times: int, size: int) -> None:
    """Copied sub-problems are those that would have been computed."""
    n = len(chain)
    length = n * times
    cuts = tuple(frozenset({i}) for i in range(length + 1))
    sizes = {i: 2 + i % n for i in range(length + 1)}
    long = replace(chain, blocks=chain.blocks * times, cuts=cuts, sizes=sizes,
                   grads=tuple(1 + i % n for i in range(length + 1)), pinned=()).verify()
    shift, same = repeated(MemoryRequirements(long))
    assert shift and same.any()
    check(long, size)
