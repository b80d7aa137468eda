"""A step under checkpointing, on plain graphs."""

from __future__ import annotations

from dataclasses import replace

from rkmate.ir.cd import CDGraph, CNode, DNode
from rkmate.ir.recompute import checkpointed
from rkmate.ir.simulate import simulate


def chain(length: int) -> CDGraph:
    """Values v0 to v(length), each read by the next and by its own gradient; 10 bytes each."""
    d = [DNode(f"v{i}", 10, "data") for i in range(length)] + [
        DNode(f"g{i}", 10, "grad") for i in range(length + 1)]
    forward = [CNode(f"f{i}", "forward", (i - 1,) if i else (), (i,), 1.0, 0) for i in range(length)]
    last = 2 * length
    backward = [CNode(f"b{i}", "backward", (length + i + 1, i), (length + i,), 1.0, 0)
                for i in reversed(range(length))]
    return CDGraph(tuple(d), (*forward, *backward), length, (), (length - 1,), (last,), (length,), {})


def names(graph: CDGraph, order: tuple[int, ...]) -> list[str]:
    return [graph.c[i].name for i in order]


def test_a_region_runs_again_as_a_whole_before_its_backward() -> None:
    graph = chain(6)
    schedule = checkpointed(graph, [0, 0, 0, 1, 1, 1, *[None] * 6])
    # v2 and v5 leave their regions: they are kept, and their nodes do not run again.
    assert names(graph, schedule.order) == [
        "f0", "f1", "f2", "f3", "f4", "f5", "b5", "f3", "f4", "b4", "b3", "b2", "f0", "f1", "b1", "b0"]
    assert simulate(graph, schedule).peak < simulate(graph, checkpointed(graph, [None] * 12)).peak


def test_what_stands_outside_and_what_the_user_holds_is_kept() -> None:
    graph = replace(chain(6), held=(1,))
    schedule = checkpointed(graph, [None, 0, 0, 0, None, None, *[None] * 6])
    assert names(graph, schedule.order) == [
        "f0", "f1", "f2", "f3", "f4", "f5", "b5", "b4", "b3", "f2", "b2", "b1", "b0"]


def test_what_is_made_once_stays() -> None:
    graph = replace(chain(6), once=frozenset((1,)))
    schedule = checkpointed(graph, [0, 0, 0, 1, 1, 1, *[None] * 6])
    assert names(graph, schedule.order)[6:] == ["b5", "f3", "f4", "b4", "b3", "b2", "b1", "f0", "b0"]
