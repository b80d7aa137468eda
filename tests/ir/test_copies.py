"""Copies away and back in the simulator: residency, two clocks, memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rkmate.errors import PlanError, ScheduleError
from rkmate.ir.allocator import MIB, CachingAllocator
from rkmate.ir.cd import CDGraph, CNode, DNode
from rkmate.ir.link import Clocks, Link, read_link
from rkmate.ir.plan import PlanData, read_step, step_content
from rkmate.ir.reserved import reserved_bytes
from rkmate.ir.schedule import Compute, CopyIn, CopyOut, Free, Leave, Loss, Schedule, Step
from rkmate.ir.simulate import Residency, peak_of_calls, simulate
from rkmate.ir.summary import GraphSummary

LINK = Link(10.0, 20.0)


def graph(link: Link | None = LINK) -> CDGraph:
    """X of 100 bytes is made, two more computations follow, the backward of each reads what it made."""
    d = (DNode("x", 100), DNode("y", 50), DNode("z", 10), DNode("gz", 10, "grad"), DNode("gy", 50, "grad"),
         DNode("gx", 100, "grad"))
    c = (CNode("f", "forward", (), (0,), 1.0), CNode("g", "forward", (0,), (1,), 4.0),
         CNode("h", "forward", (1,), (2,), 12.0),
         CNode("hb", "backward", (3, 1), (4,), 6.0), CNode("gb", "backward", (4, 0), (5,), 2.0))
    return CDGraph(d, c, 3, (), (2,), (3,), (5,), {}, link).verify()


AWAY: tuple[Step, ...] = (
    Compute(0), Compute(1), CopyOut(0), Compute(2), Leave(0), Loss(), CopyIn(0), Compute(3), Free(1),
    Free(3), Free(2), Compute(4), Free(0), Free(4))


def test_what_is_away_takes_no_memory() -> None:
    plain = tuple(s for s in AWAY if not isinstance(s, CopyOut | Leave | CopyIn))
    there = simulate(graph(None), Schedule(plain))
    away = simulate(graph(), Schedule(AWAY))
    assert away.timeline[:5] == (100, 150, 150, 160, 60)
    assert there.saved == 160 and away.saved == 60
    assert away.away == 100


def test_copies_take_their_time_beside_the_computations() -> None:
    result = simulate(graph(), Schedule(AWAY))
    assert result.copies_out == ((0, 5.0, 15.0),)       # ten seconds, while h takes twelve
    assert result.copies_in == ((0, 17.0, 22.0),)
    assert result.seconds == 25.0 and result.stalled == 0.0


def test_what_has_not_arrived_is_waited_for() -> None:
    slow = replace(LINK, in_bytes_per_second=10.0, out_bytes_per_second=5.0)
    result = simulate(graph(slow), Schedule(AWAY))
    assert result.copies_out[0][2] == 25.0              # h ends at 17
    assert result.stalled == (25 - 17) + (35 - 31) and result.seconds == 25 + result.stalled


def test_copies_queue_for_their_direction() -> None:
    clocks = Clocks(Link(10.0, 20.0, seconds_per_copy=1.0))
    clocks.copy_out(0, 100)
    clocks.copy_out(1, 10)
    clocks.copy_in(2, 100)
    assert clocks.out == [(0, 0.0, 11.0), (1, 11.0, 13.0)] and clocks.back == [(2, 0.0, 6.0)]


def test_copies_take_some_of_the_processor() -> None:
    slowing = replace(LINK, computing_seconds_per_byte=0.01)
    result = simulate(graph(slowing), Schedule(AWAY))
    assert result.seconds == 25.0 + 2 * 100 * 0.01 and result.stalled == 0.0
    assert result.copies_out == ((0, 5.0, 15.0),)


def test_buffers_are_counted_where_something_is_copied() -> None:
    buffered = replace(LINK, buffer_bytes=7)
    plain = Schedule(tuple(s for s in AWAY if isinstance(s, Compute | Free | Loss)))
    assert simulate(graph(buffered), Schedule(AWAY)).peak == simulate(graph(), Schedule(AWAY)).peak + 7
    assert simulate(graph(buffered), plain).peak == simulate(graph(), plain).peak


@pytest.mark.parametrize(("steps", "message"), [
    ((CopyOut(0),), "not in memory"),
    ((Compute(0), CopyOut(0), CopyOut(0)), "a second time"),
    ((Compute(0), Leave(0)), "not being copied away"),
    ((Compute(0), CopyIn(0)), "is not away"),
    ((Compute(0), CopyOut(0), CopyIn(0)), "is not away"),
    ((Compute(0), CopyOut(0), Free(0)), "while it is copied"),
    ((Compute(0), CopyOut(0), Compute(0)), "while it is copied"),
    ((Compute(0), CopyOut(0), Leave(0), Compute(1)), "not in memory"),
    ((Compute(0), CopyOut(0), Leave(0), CopyIn(0), Free(0)), "while it is copied"),
    ((Compute(0), Compute(1), Compute(2), CopyOut(2), Leave(2), CopyIn(2), Loss()), "the loss comes"),
])
def test_steps_that_cannot_be(steps: tuple[Step, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate(graph(), Schedule(steps))


def test_what_somebody_else_holds_stays() -> None:
    with pytest.raises(ScheduleError, match="somebody else holds"):
        simulate(replace(graph(), held=(0,)), Schedule((Compute(0), CopyOut(0))))


def test_without_a_link_nothing_is_copied() -> None:
    with pytest.raises(ScheduleError, match="no link"):
        simulate(graph(None), Schedule(AWAY))


def test_steps_and_link_are_written_and_read() -> None:
    assert tuple(read_step(step_content(s)) for s in AWAY) == AWAY
    assert [step_content(s) for s in (CopyOut(3), Leave(3), CopyIn(3))] == ["out 3", "leave 3", "in 3"]
    link = Link(1.0, 2.0, 0.5, 3, 4, "host")
    assert read_link(link.content()) == link and read_link(LINK.content()) == LINK
    assert read_link(None) is None
    with pytest.raises(ValueError, match="not a saved Link"):
        read_link({**LINK.content(), "in_bytes_per_second": 0})


def test_kinds_of_steps_are_never_equal() -> None:
    steps: tuple[Step, ...] = (Compute(3), Free(3), CopyOut(3), Leave(3), CopyIn(3), Loss())
    assert len(set(steps)) == len({s: k for k, s in enumerate(steps)}) == len(steps)
    assert all((a == b) == (a is b) and (a != b) == (a is not b) for a in steps for b in steps)
    assert Leave(3) not in (Free(3), CopyIn(3)) and (Free(3), Leave(3)).index(Leave(3)) == 1
    assert Leave(3) == Leave(3) and Schedule((Free(3),)) != Schedule((Leave(3),))


@pytest.mark.parametrize(("name", "value"), [
    ("out_bytes_per_second", float("nan")), ("in_bytes_per_second", float("inf")), ("in_bytes_per_second", 0),
    ("out_bytes_per_second", -1.0), ("out_bytes_per_second", "10"), ("seconds_per_copy", float("nan")),
    ("seconds_per_copy", -0.5), ("computing_seconds_per_byte", float("nan")), ("buffer_bytes", -1),
    ("buffer_bytes", 1.5), ("buffer_bytes", None), ("most_bytes", -1), ("most_bytes", float("nan")),
    ("most_bytes", True), ("place", None), ("place", 3)])
def test_a_saved_plan_with_a_link_that_is_none(name: str, value: object, tmp_path: Path) -> None:
    content = {**LINK.content(), name: value}
    with pytest.raises(ValueError, match="not a saved Link"):
        read_link(content)
    summary = GraphSummary(CDGraph((), (), 0, link=Link(**content)), (), ())
    plan = PlanData("p", 1, 1, 1, 1.0, 1.0, None, None, (), (), Schedule(()), "f", summary)
    plan.save(tmp_path / "plan")
    if name in summary.cd.link.content():      # what is left out of a file has its default
        with pytest.raises(PlanError, match="is not a complete plan file"):
            PlanData.load(tmp_path / "plan")


def test_what_is_away_is_not_added_up_anew_for_each_copy() -> None:
    """The simulator is asked hundreds of times by one search, of schedules with thousands of copies."""
    class Counted(tuple[DNode, ...]):
        looks = 0

        def __getitem__(self, k: object) -> DNode:  # type: ignore[override]
            Counted.looks += 1
            return super().__getitem__(k)  # type: ignore[index, return-value, no-any-return]

    n = 40
    d = Counted(DNode(f"v{k}", k + 1) for k in range(n))
    made = tuple(CNode(f"f{k}", "forward", (), (k,), 1.0) for k in range(n))
    where = Residency(CDGraph(d, made, n))
    for k in range(n):
        where.copy_out(k, k, there=True)
    assert where.bytes == n * (n + 1) // 2
    assert Counted.looks <= 2 * n


def test_buffers_of_each_call_that_is_open() -> None:
    buffered = replace(LINK, buffer_bytes=1000)
    one, two = (peak_of_calls(graph(buffered), Schedule(AWAY), n) for n in (1, 2))
    assert one == peak_of_calls(graph(), Schedule(AWAY), 1) + 1000
    # The first backward, at 250, while the other call holds 60 and a gradient of 10; then its own buffers
    # are gone.
    assert two == (1000 + 250) + (1000 + 60 + 10)


def test_what_is_away_is_given_back_to_the_allocator() -> None:
    """X leaves, and what is made meanwhile takes its place."""
    d = [DNode(n.name, n.size * MIB, n.kind) for n in graph().d]
    large = replace(graph(replace(LINK, buffer_bytes=64 * MIB)), d=tuple(d))
    late = Schedule((*AWAY[:2], CopyOut(0), Leave(0), *AWAY[3:4], *AWAY[5:]))

    # X, y, then z in a part of x's place: x comes back to another one, and gx finds none, either.
    found = reserved_bytes(CachingAllocator(), large, late, updates=1)
    assert found == (64 + 100 + 50 + 100 + 100) * MIB
