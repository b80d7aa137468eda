"""Which values go through a stretch of steps."""

from __future__ import annotations

from dataclasses import replace

from rkmate.codegen.liveness import Computed, Flow, Freed, flow
from rkmate.ir.cd import CDGraph, CNode, DNode, Kernel
from rkmate.ir.schedule import Compute, Free

GRAPH = CDGraph(
    tuple(DNode(f"d{j}", 10) for j in range(5)),
    (CNode("a", "forward", (), (0,)), CNode("b", "forward", (0,), (1, 2)),
     CNode("c", "forward", (1,), (3,), donors=(1,)), CNode("d", "forward", (2, 3), (4,))), 4).verify()


def _keeps(found: Flow) -> list[tuple[int, ...]]:
    return [do.keeps for do in found.body if isinstance(do, Computed)]


def test_what_is_read_stays_unless_it_is_freed() -> None:
    found = flow(GRAPH, [Compute(1), Free(0), Compute(2)], {0})
    assert found == Flow((0,), (), (Computed(Compute(1), (1, 2), None), Freed((0,), None),
                                    Computed(Compute(2), (3,), None)), frozenset({1, 2, 3}), ())
    assert found.after({0, 4}) == {1, 2, 3, 4}
    assert flow(GRAPH, [Compute(1)], {0}).read == (0,)


def test_a_donor_frees_nothing() -> None:
    found = flow(GRAPH, [Compute(2), Free(1)], {1, 2})
    assert found.body == (Computed(Compute(2), (3,), 1), Freed((1,), 1))
    graph = replace(GRAPH, c=(*GRAPH.c[:2], replace(GRAPH.c[2], alternatives=(Kernel(0.0, 0),)), GRAPH.c[3]))
    at_once = Compute(2, kernel=1)
    assert flow(graph, [at_once, Free(1)], {1, 2}).body == (Computed(at_once, (3,), None), Freed((1,), None))


def test_outputs_that_nobody_needs_are_no_values() -> None:
    found = flow(GRAPH, [Compute(1), Free(1)], {0})
    assert _keeps(found) == [(2,)]
    assert (found.take, found.read, found.drop) == ((), (0,), ())


def test_a_second_copy_of_what_is_there_goes_at_once() -> None:
    """A computation runs again for one of its outputs; the other is read from where it was."""
    found = flow(GRAPH, [Compute(1), Compute(3), Free(2), Free(3)], {0, 2, 3})
    assert _keeps(found) == [(1,), (4,)]
    assert found.take == (2, 3)
    assert found.give == {1, 4}
    freed = flow(GRAPH, [Compute(1), Free(2)], {0, 2})
    assert (freed.drop, freed.give) == ((2,), {1})


def test_what_is_freed_without_being_read_is_dropped_where_it_is() -> None:
    found = flow(GRAPH, [Compute(0), Free(3), Free(4)], {3})
    assert found.drop == (3,)                    # d4 is not there
    assert found.after({3}) == {0}


def test_what_is_dropped_may_be_made_anew() -> None:
    found = flow(GRAPH, [Compute(0), Free(1), Free(2), Compute(1), Free(1)], {1, 2})
    assert _keeps(found) == [(0,), (2,)]
    assert (found.drop, found.give) == ((1,), {0, 2})
    again = flow(GRAPH, [Compute(1), Free(0), Compute(0)], {0})
    assert (again.take, again.give) == ((0,), {0, 1, 2})


def test_what_is_handed_over_is_not_freed_here() -> None:
    found = flow(GRAPH, [Compute(0), Free(0)], set(), {0})
    assert (_keeps(found), found.give) == ([(0,)], {0})
