"""What must run again, what runs for nothing, and the gradients' memory."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings

from rkmate.ir.cd import CDGraph, missing_nodes
from rkmate.ir.gradients import gradient_memory
from rkmate.ir.recompute import without_waste
from rkmate.ir.schedule import Compute, from_order, save_all
from rkmate.ir.simulate import simulate
from tests.ir.graphs import graphs, line, orders


def test_missing_nodes_of_a_line() -> None:
    graph = line(3)
    assert missing_nodes(graph, [3]) == {0, 1, 2}
    assert missing_nodes(graph, [3], available=[1]) == {1, 2}
    assert missing_nodes(graph, [3], known={1}) == {2}
    assert missing_nodes(graph, [3], available=[3]) == set()
    assert missing_nodes(graph, [0, 7]) == set()         # an input, an arriving gradient


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_missing_nodes_are_closed_and_needed(graph: CDGraph) -> None:
    """Their inputs are there or made by them, and each of them makes something that is read."""
    for b in graph.backward:
        wanted = graph.c[b].inputs
        runs = missing_nodes(graph, wanted)
        read = {*wanted, *(j for i in runs for j in graph.c[i].inputs)}
        assert all(graph.producer[j] in runs for j in read
                   if (made := graph.producer[j]) is not None and made < graph.loss)
        assert all(not read.isdisjoint(graph.c[i].outputs) for i in runs)


def test_waste_of_a_line() -> None:
    graph = line(2)
    # The backward of node 1 reads v0, and nothing reads what the last run of node 0 makes.
    assert without_waste(graph, [0, 1, 2, 0, 3], 2) == ([0, 1, 2, 3], 2, {0, 1, 5})
    assert without_waste(graph, [0, 1, 0, 2, 0, 3], 2)[:2] == ([0, 1, 0, 2, 3], 2)
    # Before the loss: v0 made twice in a row is read, made after its reader it is carried.
    assert without_waste(graph, [0, 1, 0, 2, 3], 3)[:2] == ([0, 1, 0, 2, 3], 3)
    assert without_waste(replace(graph, held=(1,)), [0, 1, 0, 2, 3], 3)[:2] == ([0, 1, 2, 3], 2)


@settings(max_examples=100, deadline=None)
@given(orders())
def test_without_waste_is_lean_and_runs(drawn: tuple[CDGraph, list[int]]) -> None:
    graph, order = drawn
    loss_at = order.index(graph.loss)
    lean = without_waste(graph, order, loss_at)
    assert set(lean.order) == set(order)
    before = simulate(graph, from_order(graph, order, loss_at))
    after = simulate(graph, from_order(graph, lean.order, lean.loss_at))
    assert after.seconds <= before.seconds and after.peak <= before.peak
    assert without_waste(graph, lean.order, lean.loss_at)[:2] == (lean.order, lean.loss_at)
    # What crosses the loss is read after it before it is made there.
    made: set[int] = set()
    read: set[int] = set()
    for i in lean.order[lean.loss_at:]:
        read.update(j for j in graph.c[i].inputs if j not in made)
        made.update(graph.c[i].outputs)
    assert lean.carried == read - made | (lean.carried & read)
    assert lean.carried >= read - set(graph.inputs) - set(graph.output_grads)


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_gradients_are_what_the_simulator_counts(graph: CDGraph) -> None:
    """With every forward value held, the rest of the memory is gradients."""
    held = tuple(j for i in graph.forward for j in graph.c[i].outputs)
    graph = replace(graph, held=held)
    schedule = save_all(graph)
    timeline = simulate(graph, schedule).timeline
    memory = gradient_memory(graph)
    at = {s.c: k for k, s in enumerate(schedule.steps) if isinstance(s, Compute)}
    for b, before, during in zip(graph.backward, memory.before, memory.during, strict=True):
        assert timeline[at[b]] - graph.bytes(held) == during + graph.c[b].overhead
        assert timeline[at[b] - 1] - graph.bytes(held) == before
    assert memory.at_loss == graph.bytes(graph.output_grads)


def test_gradients_of_a_line() -> None:
    memory = gradient_memory(line(2))
    assert memory.before == (10, 10) and memory.during == (20, 20)
    assert memory.dying == (frozenset({5}), frozenset({4}))
    assert simulate(line(2), save_all(line(2))).timeline[-1] == 10
