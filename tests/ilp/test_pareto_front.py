"""Options that no other beats, and what an order costs as an option."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkmate.errors import ScheduleError
from rkmate.ilp.grid import ParetoFront, evaluate_option, peak, seconds, undominated, without_waste
from rkmate.ir.chain import Option
from tests.ir.graphs import line


def option(time: float, saved: int, forward: int, backward: int) -> Option:
    return Option((), (), 1.0, time - 1.0, saved, forward, backward)


def beats(a: Option, b: Option) -> bool:
    """No worse in anything."""
    return (seconds(a) <= seconds(b) and a.saved_bytes <= b.saved_bytes
            and a.forward_peak_bytes <= b.forward_peak_bytes
            and a.backward_peak_bytes <= b.backward_peak_bytes)


numbers = st.integers(0, 4)
options = st.lists(st.builds(option, st.integers(1, 4), numbers, numbers, numbers), max_size=12)


@given(options)
def test_undominated(found: list[Option]) -> None:
    front = undominated(found)
    assert all(any(beats(a, b) for a in front) for b in found)
    assert not any(beats(a, b) for a in front for b in front if a is not b)
    assert list(map(seconds, front)) == sorted(map(seconds, front))
    assert undominated(front) == front


@given(options, numbers, numbers)
def test_the_best_within_budgets(found: list[Option], m_peak: int, m_save: int) -> None:
    fitting = [o for o in found if peak(o) <= m_peak and o.saved_bytes <= m_save]
    best = ParetoFront(options=found).best(m_peak, m_save)
    assert (best is None) == (not fitting)
    if best is not None:
        assert best in fitting and seconds(best) == min(map(seconds, fitting))


def test_a_proof_holds_for_tighter_budgets_only() -> None:
    front = ParetoFront(0.5, [option(3.0, 2, 2, 2)], [(5, 5, 2.75), (1, 1, math.inf)])
    assert front.bound(5, 5) == front.bound(4, 3) == 2.75 and front.bound(6, 5) == -math.inf
    assert front.answered(5, 5)             # within the tolerance
    assert not front.answered(6, 5)         # nothing is proven
    assert front.answered(1, 1)             # nothing is there to be found
    assert not ParetoFront(0.1, front.options, front.proofs).answered(5, 5)


def test_saving_all_of_a_line() -> None:
    """Bytes of the output are not saved ones: they are the next cut's."""
    graph = line(2)
    found = evaluate_option(graph, graph.backward)
    assert found == Option((0, 1), (2, 3), 2.0, 4.0, saved_bytes=10, forward_peak_bytes=20,
                           backward_peak_bytes=30)


def test_recomputing_in_a_line() -> None:
    graph = line(2)
    found = evaluate_option(graph, (0, 2, 3))
    assert found.saved_bytes == 0 and found.backward_seconds == 5.0
    with pytest.raises(ScheduleError, match="not in memory"):
        evaluate_option(graph, (3, 2))


def test_recomputations_that_nothing_reads_are_dropped() -> None:
    assert without_waste(line(2), (0, 1, 2, 0, 3)) == (0, 2, 3)
