"""Two gloo processes that follow one plan: they compare what they plan, the first plans for both, and a
difference is an error on each of them within the group's timeout."""

from __future__ import annotations

import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rkmate
from rkmate.device import MeterError
from rkmate.ilp.settings import OptionSettings
from rkmate.measure.runs import Timings
from rkmate.pipeline.prepare import trace
from rkmate.pipeline.settings import Settings
from rkmate.planners.settings import PlannerSettings
from rkmate.runtime import agreement
from rkmate.runtime.agreement import COMMUNICATES, SHARDED, SHARED, Advice, Ranks, Signs
from rkmate.torch_seam.trace import meeting_place
from tests.distributed.ranks import Found, caught

pytestmark = [pytest.mark.skipif(not dist.is_available(), reason="no torch.distributed"),
              pytest.mark.xdist_group("two processes")]

QUICK = Settings(options=OptionSettings(grid=(6, 6), time_limit=0.5, block_limit=1.0),
                 planner=PlannerSettings(save_set_seconds=0.2, first_seconds=0.2, smallest_seconds=0.0))
SHORT = 4.0
"""Timeout, in seconds, of a group in which a rank does not come."""
SLOW = 1.0
"""Seconds of an operation on a rank that is slow on purpose."""


class _Net(nn.Module):
    def __init__(self, depth: int = 3, width: int = 64,
                 act: Callable[..., torch.Tensor] = torch.relu) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.act(layer(x)) + x
        return x.square().mean()


def _data(rank: int, rows: int = 32) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(rank))


def _shared(model: nn.Module, x: torch.Tensor, budget: float = 0.8, **options: Any) -> rkmate.Plan:
    return rkmate.shared_plan(model, (x,), budget=budget, **{"progress": False, "settings": QUICK, **options})


def _gathered(value: Any) -> list[Any]:
    found = [None, None]
    dist.all_gather_object(found, value)
    return found


def _gradients(call: nn.Module, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss = call(x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def _followed(rank: int) -> dict[str, Any]:
    """One plan, and one for a shape that comes later; the gradients are the original's."""
    model, plain = _Net(), _Net()
    found: dict[str, Any] = {}
    for way in ("wrap", "apply"):
        plan = _shared(model, _data(rank))
        assert plan.ranks is not None           # type: ignore[attr-defined]
        run = rkmate.wrap(model, (_data(rank),), plan=plan, progress=False) if way == "wrap" else \
            rkmate.apply(model, (_data(rank),), plan=plan, progress=False)
        steps = []
        for rows in (32, 36):
            x = _data(rank, rows)
            mine = _gradients(run, model, x)
            shown = run if way == "wrap" else rkmate.applied(model)
            schedules = _gathered(shown.plan.schedule)      # type: ignore[union-attr]
            steps.append((all(map(torch.equal, mine, _gradients(plain, plain, x))),
                          schedules[0] == schedules[1], shown.plan.budget_bytes))     # type: ignore[union-attr]
        found[way] = steps
        rkmate.remove(model)
    return found


def _differing(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def tried(name: str, call: Callable[[], Any]) -> None:
        start = time.monotonic()
        found[name] = (*caught(call), time.monotonic() - start)
        dist.barrier()

    frozen = _Net()
    frozen.layers[0].weight.requires_grad_(rank == 0)
    x = _data(rank)
    tried("budget", lambda: _shared(_Net(), x, 0.8 if rank == 0 else 0.7))
    tried("depth", lambda: _shared(_Net(3 + rank), x))
    tried("width", lambda: _shared(_Net(width=64 + 16 * rank), _data(rank)))
    tried("frozen", lambda: _shared(frozen, x))
    tried("rows", lambda: _shared(_Net(), _data(rank, 32 + rank)))
    tried("settings", lambda: _shared(_Net(), x, settings=replace(QUICK, calls=1 + rank)))
    with torch.autocast("cpu", torch.bfloat16, enabled=rank == 0):
        tried("autocast", lambda: _shared(_Net(), x))
    tried("no model", lambda: _shared(_Net() if rank == 0 else torch.relu, x))      # type: ignore[arg-type]
    return found


def _slowed(rank: int) -> dict[str, Any]:
    """Products are as slow as can be on rank 1: in the plan, and in that of a shape that comes later. The
    last plan is one that rank 1 cannot measure for. Each rank has a cache of its own, as on machines of their
    own: one rank would find what the other has measured."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, RKMATE_CACHE_DIR=folder):
        return _slowed_alone(rank)


def _slowed_alone(rank: int) -> dict[str, Any]:
    model, found, seconds = _Net(), {}, Timings.seconds
    plan = _shared(model, _data(rank, 40))
    run = rkmate.wrap(model, (_data(rank, 40),), plan=plan, progress=False)

    def slowest(plan: rkmate.Plan | None) -> list[float]:
        assert plan is not None
        return _gathered(max(c.time for c in plan.graph.cd.c))

    found["alike"] = slowest(plan)
    try:
        if rank == 1:
            Timings.seconds = lambda self, key: (  # type: ignore[method-assign]
                SLOW if "mm" in str(key) else seconds(self, key))
        found["first shape"] = slowest(_shared(_Net(), _data(rank, 44)))
        run(_data(rank, 48)).backward()
        found["later shape"] = slowest(run.plan)
        if rank == 1:
            Timings.seconds = _unmeasured           # type: ignore[method-assign]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found["not measured"] = slowest(_shared(_Net(), _data(rank, 52)))
        found["warnings"] = [str(w.message) for w in said]
    finally:
        Timings.seconds = seconds               # type: ignore[method-assign]
    return found


def _unmeasured(*args: Any) -> float:
    raise MeterError("on purpose")


def _other_function(rank: int) -> dict[str, Any]:
    """What no description shows: the graphs differ."""
    model, x = _Net(act=torch.relu if rank == 0 else torch.tanh), _data(rank)
    plan = _shared(model, x)
    return {"error": caught(lambda: rkmate.wrap(model, (x,), plan=plan, progress=False))}


def _other_shapes(rank: int) -> dict[str, Any]:
    model = _Net()
    found = {}
    for new_shapes in ("shared", "own"):
        plan = _shared(model, _data(rank), new_shapes=new_shapes)
        run = rkmate.wrap(model, (_data(rank),), plan=plan, progress=False)
        found[new_shapes] = caught(lambda run=run: run(_data(rank, 20 + 4 * rank)).backward())
        dist.barrier()
    return found


def _absent(rank: int) -> dict[str, Any]:
    """Rank 1 does not plan, and comes when rank 0 has given up."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=SHORT))
    start = time.monotonic()
    error = caught(lambda: _shared(_Net(), _data(rank), group=group)) if rank == 0 else ("", "")
    dist.barrier()
    if rank == 1:
        start = time.monotonic()
        error = caught(lambda: _shared(_Net(), _data(rank), group=group))
    return {"error": error, "seconds": time.monotonic() - start}


def _slow(rank: int) -> dict[str, Any]:
    """Rank 0 plans until rank 1 has waited for more than the group's timeout."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=SHORT))
    store, plain, looks = meeting_place(group)[0], agreement._signs_of, count(1)

    class Slow(_Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            while rank == 0 and not store.check(["looked"]):
                sum(range(100_000))
            return super().forward(x)

    def looked(other: int) -> str:
        if next(looks) == 10:           # eight in a timeout
            store.set("looked", "")
        return plain(other)

    with mock.patch.object(agreement, "_signs_of", looked if rank == 1 else plain):
        error = caught(lambda: _shared(Slow(), _data(rank), group=group))
    store.set("looked", "")
    return {"error": error, "looks": next(looks) - 1}


def _failing(rank: int) -> dict[str, Any]:
    """All ranks, or the second one alone, meet an error of their own."""
    class Failing(_Net):
        ranks: tuple[int, ...] = (0, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if rank in self.ranks:
                raise ValueError("on purpose")
            return super().forward(x)

    model, second, x = Failing(), Failing(), _data(rank, 56)
    second.ranks = (1,)
    infeasible = caught(lambda: _shared(_Net(), x, 1))
    with mock.patch("rkmate.api.trace", side_effect=trace) as traced:
        follower = caught(lambda: _shared(second, x))
    return {"error": caught(lambda: _shared(model, x)), "infeasible": infeasible, "follower": follower,
            "traced": traced.call_count}


RANKS = {"patience": 90.0}
TASKS: dict[str, Callable[[int], dict[str, Any]]] = {
    "followed": _followed, "slowed": _slowed, "differing": _differing, "other function": _other_function,
    "other shapes": _other_shapes, "failing": _failing, "slow": _slow, "absent": _absent}


def _of(found: Found, task: str) -> list[dict[str, Any]]:
    assert all("failed" not in mine for mine in found[task]), found[task]
    return found[task]


def test_ranks_follow_one_plan_for_each_shape(found: Found) -> None:
    for mine in _of(found, "followed"):
        for way in ("wrap", "apply"):
            assert [step[:2] for step in mine[way]] == [(True, True), (True, True)], mine


def test_a_plan_counts_on_the_slowest_rank_for_each_operation(found: Found) -> None:
    for rank, mine in enumerate(_of(found, "slowed")):
        assert max(mine["alike"] + mine["not measured"]) < SLOW
        assert mine["first shape"] == mine["later shape"] == [SLOW, SLOW]
        assert any("rank 1 cannot measure now" in text for text in mine["warnings"]) == (rank == 1)


DIFFERENCES = {
    "budget": "the budget (rank 0: 0.8, rank 1: 0.7)",
    "depth": "the model (rank 0: nothing, rank 1: layers.3: Linear",
    "width": "parameters and buffers (rank 0: layers.0.weight: float32[64, 64] on cpu, "
             "rank 1: layers.0.weight: float32[80, 80] on cpu)",
    "frozen": "rank 1: layers.0.weight: float32[64, 64] on cpu, frozen",
    "rows": "arguments (rank 0: args[0]: float32[32, 64] on cpu, rank 1: args[0]: float32[33, 64] on cpu)",
    "settings": "settings (rank 0: calls: 1, rank 1: calls: 2)",
    "autocast": "types of numbers (rank 0: autocast to torch.bfloat16 on cpu, rank 1: nothing)",
    "no model": "rank 1: builtin_function_or_method"}


def test_a_difference_is_an_error_on_each_rank(found: Found) -> None:
    first, second = _of(found, "differing")
    assert set(first) == set(DIFFERENCES)
    for name, words in DIFFERENCES.items():
        (kind, text, seconds), other = first[name], second[name]
        assert kind == "RankError", (name, first[name])
        assert words in text, (name, text)
        assert other[:2] == (kind, text)
        assert seconds < 60


def test_graphs_that_differ_are_an_error_on_each_rank(found: Found) -> None:
    first, second = (mine["error"] for mine in _of(found, "other function"))
    assert first[0] == "RankError"
    assert "rank 1: PlanError: the plan belongs to another model" in first[1]
    assert second[0] == "PlanError"


def test_new_shapes_differ_only_where_ranks_plan_alone(found: Found) -> None:
    for mine in _of(found, "other shapes"):
        kind, text = mine["shared"]
        assert kind == "RankError"
        assert "float32[20, 64] on cpu, rank 1: " in text
        assert mine["own"] == ("nothing", "")


def test_errors_of_the_first_rank_reach_the_other(found: Found) -> None:
    first, second = _of(found, "failing")
    assert first["infeasible"] == second["infeasible"]
    assert first["infeasible"][0] == "InfeasibleBudget"
    assert first["error"] == second["error"]
    assert "on purpose" in first["error"][1]


def test_an_error_of_another_rank_reaches_all_of_them(found: Found) -> None:
    """Each rank has captured its model once."""
    first, second = _of(found, "failing")
    assert first["follower"] == second["follower"]
    assert first["follower"][0] == "RankError" and "failed on rank 1: " in first["follower"][1]
    assert "on purpose" in first["follower"][1]
    assert first["traced"] == second["traced"] == 1


def test_nobody_waits_for_a_rank_that_does_not_come(found: Found) -> None:
    first, second = _of(found, "absent")
    assert first["error"][0] == "RankError"
    assert "rank 0 has waited 4 seconds for rank 1, which did not come" in first["error"][1]
    assert 'new_shapes="own"' in first["error"][1]
    assert SHORT <= first["seconds"] < 60
    assert second["error"][0] == "RankError"
    assert "rank 1 came too late" in second["error"][1]
    assert second["seconds"] < SHORT


def test_ranks_wait_for_one_that_plans_for_longer_than_the_timeout(found: Found) -> None:
    first, second = _of(found, "slow")
    assert first["error"] == second["error"] == ("nothing", "")
    assert second["looks"] >= 10


class _Store:
    """A store, and a clock that goes on by a second when a rank waits. `others`: does what the other ranks do
    in that second."""

    def __init__(self, others: Callable[[dict[str, Any]], None]) -> None:
        self.now, self._others, self._texts = 0.0, others, dict[str, Any]()

    def set(self, key: str, text: str) -> None:
        self._texts[key] = text

    def get(self, key: str) -> bytes:
        text: str = self._texts[key]
        return text.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self._texts for key in keys)

    def add(self, key: str, number: int) -> int:
        self._texts[key] = found = self._texts.get(key, 0) + number
        return int(found)

    def sleep(self, seconds: float) -> None:
        self.now += 1.0
        self._others(self._texts)


def _told(monkeypatch: pytest.MonkeyPatch, others: Callable[[dict[str, Any]], None], advice: Advice = SHARED
          ) -> Callable[[], tuple[list[str], float]]:
    """Return a call in which rank 1 of three meets the others, and which returns what it hears, and when."""
    store = _Store(others)
    monkeypatch.setattr(agreement, "meeting_place", lambda group: (store, 8.0))
    monkeypatch.setattr(agreement.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(agreement.dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(agreement, "time", SimpleNamespace(monotonic=lambda: store.now, sleep=store.sleep))
    ranks = Ranks(numbers=[0, 1, 2], advice=advice)
    return lambda: (ranks.told("one"), store.now)


def test_a_rank_waits_for_others_as_long_as_they_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: Iterator[int] = count(1)

    def others(texts: dict[str, Any]) -> None:
        texts["rkmate/0,1,2/1/2"] = "two"
        texts["rkmate/plans/0"] = number = next(waits)
        if number == 100:
            texts["rkmate/0,1,2/1/0"] = "zero"

    assert _told(monkeypatch, others)() == (["zero", "one", "two"], 100.0)


@pytest.mark.parametrize(("advice", "own"), [(SHARED, True), (COMMUNICATES, False), (SHARDED, False)])
def test_a_rank_that_stops_planning_is_named(monkeypatch: pytest.MonkeyPatch, advice: Advice, own: bool
                                             ) -> None:
    waits: Iterator[int] = count(1)

    def others(texts: dict[str, Any]) -> None:
        number = next(waits)
        texts["rkmate/plans/0"], texts["rkmate/plans/2"] = number, min(number, 20)

    meet = _told(monkeypatch, others, advice)
    with pytest.raises(rkmate.RankError, match="rank 1 has waited 8 seconds for rank 2, which did not come"
                       ) as told:
        meet()
    assert advice.same in str(told.value)
    assert ("shared_plan" in str(told.value)) == own
    assert next(waits) == 29


@pytest.mark.parametrize(("gave_up", "words"), [
    ("[0, [2]]", "rank 0 has waited 8 seconds for rank 2"), ("[0, [1, 2]]", "rank 1 came too late")])
def test_what_one_rank_gives_up_all_give_up(monkeypatch: pytest.MonkeyPatch, gave_up: str,
                                            words: str) -> None:
    meet = _told(monkeypatch, lambda texts: texts.update({"rkmate/0,1,2/1/over": gave_up}))
    with pytest.raises(rkmate.RankError, match=words):
        meet()


def test_a_lost_store_is_an_error_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def others(texts: dict[str, Any]) -> None:
        raise dist.DistNetworkError("connection reset")

    with pytest.raises(rkmate.RankError, match="rank 1 cannot reach the store"):
        _told(monkeypatch, others)()


@pytest.mark.parametrize("silent", ["set", "check", "get", "add"])
def test_a_store_that_does_not_answer_is_an_error_of_ranks(monkeypatch: pytest.MonkeyPatch,
                                                           silent: str) -> None:
    def others(texts: dict[str, Any]) -> None:
        if silent != "add":
            texts.update({"rkmate/0,1,2/1/0": "zero", "rkmate/0,1,2/1/2": "two"})

    _told(monkeypatch, others)
    over = threading.Event()
    store = agreement.meeting_place(None)[0]
    monkeypatch.setattr(agreement, "meeting_place", lambda group: (store, 0.1))
    monkeypatch.setattr(store, silent, lambda *args: over.wait())
    ranks = Ranks(numbers=[0, 1, 2], advice=SHARED)
    with pytest.raises(rkmate.RankError, match="has not answered rank 1 for 0 seconds"):
        ranks.told("one")
    over.set()


@pytest.mark.parametrize("alone", [True, False])
def test_signs_stop_where_a_rank_stands_still(monkeypatch: pytest.MonkeyPatch, alone: bool,
                                              caplog: pytest.LogCaptureFixture) -> None:
    store = _Store(lambda texts: None)
    signs = Signs(store, 3, 0.0)
    signs.alone = alone
    seconds = iter([0.0, 0.5, 1.0, 1.0, 1.5, 1.5])

    def spent() -> float:
        found = next(seconds, None)
        if found is None:
            signs.over.set()
        return found or 0.0

    monkeypatch.setattr(agreement, "BEAT", 0.0)
    monkeypatch.setattr(agreement, "time", SimpleNamespace(monotonic=time.monotonic, process_time=spent))
    signs.run()
    assert store.add("rkmate/plans/3", 0) == 3
    assert [r.getMessage()[:18] for r in caplog.records] == ["rank 3 has planned"] * alone


def test_a_backend_without_options_has_the_default_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: None)
    group = SimpleNamespace(_device_types=["cpu"], _get_backend=lambda kind: object())
    assert meeting_place(group) == (None, dist.default_pg_timeout.total_seconds())


def test_new_shapes_is_one_of_two_words() -> None:
    with pytest.raises(rkmate.ArgumentError, match="new_shapes is 'all'"):
        rkmate.shared_plan(_Net(), (_data(0),), budget=1.0, new_shapes="all")        # type: ignore[arg-type]
