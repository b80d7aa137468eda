"""Everything sent away: where things wait, and what a schedule keeps then."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rkmate.ir.cd import CDGraph
from rkmate.ir.link import Link
from rkmate.ir.schedule import Compute, CopyOut, Free, Leave, Loss, Schedule, from_order, save_all
from rkmate.ir.simulate import simulate
from tests.ir.graphs import line, orders
from tests.planners.send_all import gaps, send_all

LINK = Link(1e9, 1e9)


def test_a_line_by_hand() -> None:
    # f0 f1 f2 loss b2 b1 b0: b2 reads v1, b1 reads v0; v2 is the output.
    graph = replace(line(3), link=LINK)
    whole = save_all(graph)
    found = {(graph.d[g.d].name, whole.steps[g.before]) for g in gaps(graph, whole)}
    assert {name for name, _ in found} == {"v0", "v1"}
    sent = send_all(graph, whole)
    assert [s for s in sent.steps if not isinstance(s, Free)] == [
        Compute(0), Compute(1), CopyOut(1), Leave(1), Compute(2), CopyOut(2), Leave(2), Loss(),
        *[s for s in sent.steps[sent.steps.index(Loss()) + 1:] if not isinstance(s, Free)]]
    assert simulate(graph, sent).saved == graph.d[2].size


@given(orders())
def test_every_schedule_can_send_everything(made: tuple[CDGraph, list[int]]) -> None:
    graph, order = replace(made[0], link=LINK), made[1]
    loss_at = next((k for k, c in enumerate(order) if c >= graph.loss), len(order))
    plain = from_order(graph, order, loss_at)
    for every_gap in (False, True):
        sent = send_all(graph, plain, every_gap=every_gap)
        result = simulate(graph, sent)
        assert result.peak <= simulate(graph, plain).peak
        assert tuple(s for s in sent.steps if isinstance(s, Compute)) == \
            tuple(s for s in plain.steps if isinstance(s, Compute))
    assert not gaps(replace(graph, held=tuple(range(len(graph.d)))), Schedule(plain.steps))


@given(orders(), st.booleans(), st.sampled_from([
    {"out_bytes_per_second": 4.0}, {"in_bytes_per_second": 6.0}, {"seconds_per_copy": 0.25},
    {"computing_seconds_per_byte": 0.0}]))
def test_a_faster_link_never_makes_a_schedule_slower(made: tuple[CDGraph, list[int]], every_gap: bool,
                                                     faster: dict[str, float]) -> None:
    graph, order = made
    loss_at = next((k for k, c in enumerate(order) if c >= graph.loss), len(order))
    slow = replace(graph, link=Link(2.0, 3.0, 0.5, computing_seconds_per_byte=0.1))
    fast = replace(graph, link=replace(slow.link, **faster))
    sent = send_all(slow, from_order(slow, order, loss_at), every_gap=every_gap)
    before, after = simulate(slow, sent), simulate(fast, sent)
    assert after.seconds <= before.seconds * (1 + 1e-12) and after.peak == before.peak
