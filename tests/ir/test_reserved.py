"""What the allocator takes for a training loop: small loops that can be counted by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from rkmate.ir.allocator import MIB, CachingAllocator
from rkmate.ir.cd import CDGraph
from rkmate.ir.reserved import Beside, reserved_bytes
from rkmate.ir.schedule import from_order, save_all
from rkmate.ir.simulate import simulate
from tests.ir.graphs import line, orders


def reserved(graph: CDGraph, beside: Beside = Beside(), **more: int) -> int:
    return reserved_bytes(CachingAllocator(), graph, save_all(graph), beside, **more)


def test_a_step_whose_values_have_segments_of_their_own() -> None:
    """What is freed serves again."""
    assert reserved(line(3, 12 * MIB), updates=1) == 48 * MIB
    assert simulate(line(3, 12 * MIB), save_all(line(3, 12 * MIB))).peak == 48 * MIB


def test_states_take_what_the_first_step_left_in_pieces() -> None:
    """The states go into the holes of the first step's values, and the second step finds none that is large
    enough: this is how a step that has run once runs out of memory."""
    graph = line(3, 30 * MIB)
    alone = reserved(graph)
    states = Beside(states=(11 * MIB,) * 5)
    assert alone == 120 * MIB
    assert reserved(graph, states, updates=1) == alone, "there is room in the holes"
    assert reserved(graph, states) > alone + 5 * 11 * MIB, "more than the states themselves"
    expandable = reserved_bytes(CachingAllocator(expandable=True), graph, save_all(graph), states)
    assert expandable < reserved(graph, states)


def test_the_next_batch_comes_before_the_last_one_goes() -> None:
    graph = line(1, 12 * MIB)
    assert reserved(graph, Beside(batch=(40 * MIB,)), updates=1) == reserved(graph, updates=1) + 40 * MIB
    assert reserved(graph, Beside(batch=(40 * MIB,))) == reserved(graph) + 80 * MIB


def test_gradients_of_parameters_stay_until_the_update() -> None:
    graph = line(2, 12 * MIB)
    held = CDGraph(graph.d, graph.c, graph.loss, graph.inputs, graph.outputs, graph.output_grads, (),
                   {graph.input_grads[0]: len(graph.c) - 1}).verify()
    assert reserved(held) == reserved(graph) + 12 * MIB, "there while the second step adds up"
    added = Beside(gradients=(40 * MIB,))
    assert reserved(graph, added) == reserved(graph) + 40 * MIB


def test_several_calls_before_one_backward() -> None:
    graph = line(3, 12 * MIB)
    assert reserved(graph, calls=2) > reserved(graph) + 3 * 12 * MIB


def test_a_loss_outside_takes_room() -> None:
    assert reserved(line(1, 12 * MIB).with_reserve(3 * 12 * MIB)) > reserved(line(1, 12 * MIB))


@settings(deadline=None, max_examples=25)
@given(drawn=orders())
def test_never_less_than_the_simulators_peak(drawn: tuple[CDGraph, list[int]]) -> None:
    graph, order = drawn
    at = order.index(graph.loss)
    schedule = from_order(graph, order, at)
    scaled = CDGraph(tuple(type(d)(d.name, d.size * MIB, d.kind) for d in graph.d), graph.c, graph.loss,
                     graph.inputs, graph.outputs, graph.output_grads, graph.input_grads, graph.releases)
    allocator = CachingAllocator()
    assert reserved_bytes(allocator, scaled, schedule) >= simulate(scaled, schedule).peak
    assert allocator.free_bytes() == allocator.reserved, "the loop gives everything back"


def test_a_schedule_that_frees_what_is_not_there() -> None:
    graph = line(2, MIB)
    other = from_order(line(3, MIB), range(6), 3)
    with pytest.raises((KeyError, IndexError)):
        reserved_bytes(CachingAllocator(), graph, other)
