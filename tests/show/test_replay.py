"""The replay by kinds against the simulator."""

from __future__ import annotations

import pytest

from rkmate.ir.simulate import simulate
from rkmate.show.graphs import block_memory
from rkmate.show.replay import KINDS, replay, replay_baseline
from rkmate.show.words import by_module
from tests.show.models import PLANS, curve, in_one_process, wrapped

pytestmark = in_one_process

NAMES = ["half", "loss outside", "smallest", "all kept"]


@pytest.mark.parametrize("name", NAMES)
def test_kinds_add_up_to_the_simulator(name: str) -> None:
    plan = PLANS[name]()
    judged = simulate(plan.graph.cd, plan.schedule)
    replayed = replay(plan)
    assert tuple(m.total for m in replayed.moments) == judged.timeline
    assert replayed.peak == plan.peak_bytes
    assert replayed.seconds == pytest.approx(plan.step_seconds)
    assert sum(plan.graph.cd.d[j].size for j in replayed.alive_at_loss) == judged.saved
    assert all(n >= 0 for m in replayed.moments for n in m.bytes)


@pytest.mark.parametrize("name", NAMES)
def test_tensors_at_the_peak_add_up_to_it(name: str) -> None:
    plan = PLANS[name]()
    replayed = replay(plan)
    assert sum(t.bytes for t in replayed.peak_tensors) == plan.peak_bytes
    for k, kind in enumerate(KINDS):
        total = sum(t.bytes for t in replayed.peak_tensors if t.kind == kind)
        assert total == replayed.moments[replayed.peak_at].bytes[k]
    sizes = [t.bytes for t in replayed.peak_tensors]
    assert sizes == sorted(sizes, reverse=True)


def test_recomputed_is_what_runs_again() -> None:
    plan = wrapped().plan
    replayed = replay(plan)
    assert set(replayed.recomputed_seconds) == set(plan.schedule.recomputed())
    assert sum(replayed.recomputed_seconds.values()) == \
        pytest.approx(plan.step_seconds - plan.baseline_seconds)
    assert replayed.recomputed_seconds
    assert any(m.bytes[KINDS.index("recomputed")] for m in replayed.moments)


def test_nothing_is_recomputed_without_need() -> None:
    plan = curve()[0]
    replayed = replay(plan)
    assert not replayed.recomputed_seconds
    assert not any(m.bytes[KINDS.index("recomputed")] for m in replayed.moments)
    assert replayed.peak == replay_baseline(plan).peak == plan.baseline_peak_bytes


def test_modules_share_what_stands_at_the_loss() -> None:
    plan = wrapped().plan
    replayed, baseline = replay(plan), replay_baseline(plan)
    rows = by_module(replayed, baseline)
    g = plan.graph
    assert sum(r.kept_bytes for r in rows) == sum(g.cd.d[j].size for j in replayed.alive_at_loss)
    assert sum(r.forgotten_bytes for r in rows) == \
        sum(g.cd.d[j].size for j in baseline.alive_at_loss - replayed.alive_at_loss)
    assert rows[0].forgotten_bytes == max(r.forgotten_bytes for r in rows) > 0


def test_blocks_keep_what_the_plan_keeps() -> None:
    plan = wrapped().plan
    replayed = replay(plan)
    kept, whole = block_memory(plan, replayed)
    assert sum(kept.values()) == sum(plan.graph.cd.d[j].size for j in replayed.alive_at_loss)
    assert all(kept[b] <= whole[b] for b in kept)
    at_loss = replayed.loss_at
    for b in range(len(plan.blocks)):
        assert replayed.block_bytes(b)[at_loss] == kept[b]
