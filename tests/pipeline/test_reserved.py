"""The largest budget that fits on a device, fragments included."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate.budget import DeviceShare, parse_budget
from rkmate.errors import InfeasibleBudget
from rkmate.ir.allocator import CachingAllocator
from rkmate.ir.reserved import Beside
from rkmate.pipeline import device_room as reserved_module
from rkmate.pipeline.device_room import DeviceRoom, largest_that_fits
from tests.device.fake import FakeDevice

MB = 10**6


class Room(DeviceRoom):
    """Where plans leave as many fragments as we say."""

    def reserved(self, planned: Any, allocator: CachingAllocator | None = None) -> int:
        return int(planned.takes)


def room(most: int) -> Room:
    return Room(1000 * MB, most, CachingAllocator(), Beside())


def plans(takes: Any, least: int = 0) -> Any:
    """Plans that use their budgets; and what the allocator takes for each."""
    made: list[int] = []

    def planned_at(limit: int) -> Any:
        made.append(limit)
        if limit < least:
            raise InfeasibleBudget("too small", least)
        return SimpleNamespace(plan=SimpleNamespace(peak_bytes=limit), takes=takes(limit), limit=limit)

    return planned_at, made


@pytest.mark.parametrize("takes", [
    lambda n: n + 100 * MB, lambda n: 2 * n, lambda n: n + 300 * MB * (n > 400 * MB),
    lambda n: int(n * (1.2 + 0.1 * (n // MB % 2)))])
def test_a_budget_that_fits_is_found_in_few_plans(takes: Any) -> None:
    planned_at, made = plans(takes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: Any = largest_that_fits(900 * MB, planned_at, room(850 * MB))
    assert found.takes <= 850 * MB and len(made) <= 8
    assert found.limit == max(n for n in made if takes(n) <= 850 * MB)
    assert found.limit > 0.45 * 850 * MB


def test_what_fits_at_once_is_planned_once() -> None:
    planned_at, made = plans(lambda n: n)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        largest_that_fits(900 * MB, planned_at, room(950 * MB))
    assert made == [900 * MB]


def test_a_budget_that_goes_into_fragments_is_said() -> None:
    planned_at, _ = plans(lambda n: n + 300 * MB)
    with pytest.warns(rkmate.RkmateWarning, match="fragments.*expandable_segments:True"):
        largest_that_fits(900 * MB, planned_at, room(950 * MB))


def test_where_nothing_fits_the_least_is_taken_and_said() -> None:
    planned_at, made = plans(lambda n: n + 800 * MB, least=500 * MB)
    with pytest.warns(rkmate.RkmateWarning, match="may run out of memory.*expandable_segments"):
        found: Any = largest_that_fits(900 * MB, planned_at, room(850 * MB))
    assert found.limit == min(n for n in made if n >= 500 * MB) == 500 * MB


def test_a_budget_that_no_plan_meets_is_refused() -> None:
    planned_at, _ = plans(lambda n: n, least=950 * MB)
    with pytest.raises(InfeasibleBudget):
        largest_that_fits(900 * MB, planned_at, room(850 * MB))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(6)))


def test_auto_fits_with_fragments(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms: list[DeviceRoom] = []
    taken: list[Any] = []

    def spied(limit: int, planned_at: Any, room: DeviceRoom) -> Any:
        rooms.append(room)
        taken.append(largest_that_fits(limit, planned_at, room))
        return taken[-1]

    monkeypatch.setattr("rkmate.pipeline.search.largest_that_fits", spied)
    x = torch.randn(4096, 128)          # values of 2 MiB: each large one is a tenth of a segment
    with FakeDevice(total=90 << 20, allocator=CachingAllocator), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = rkmate.plan(model(), (x,), budget="auto", settings=rkmate.Settings(costs="analytic"),
                           progress=False)
        most = rooms[0].most
        assert most == (90 << 20) - int(0.01 * (90 << 20))
        assert rooms[0].reserved(taken[0]) <= most
        assert rooms[0].beside.batch == (x.nbytes,)
        assert len(rooms[0].beside.states) == 2 * 12
        smaller = rkmate.plan(model(), (x,), budget=0.6, settings=rkmate.Settings(costs="analytic"),
                              progress=False)
    assert plan.peak_bytes < most and smaller.budget_bytes > 0


def test_another_size_fits_with_fragments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it takes the known plans, too."""
    monkeypatch.setattr(DeviceRoom, "reserved", lambda self, planned, allocator=None: (
        planned.plan.peak_bytes * 5 // 4))
    with FakeDevice(total=30 << 20, allocator=CachingAllocator), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = rkmate.wrap(model(), (torch.randn(4096, 128),), budget="auto",
                             settings=rkmate.Settings(costs="analytic"), progress=False)
        for rows in (4096, 4608):
            module(torch.randn(rows, 128))
            assert module.plan.peak_bytes * 5 // 4 <= 0.99 * (30 << 20) < module.plan.baseline_peak_bytes


def test_far_more_reserved_than_planned_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserved_module, "FAR", 0.0)
    monkeypatch.setattr(DeviceRoom, "reserved", lambda self, planned, allocator=None: (
        10**9 if allocator is None else 10**8))
    x = torch.randn(64, 128)
    with FakeDevice(allocator=CachingAllocator), pytest.warns(rkmate.RkmateWarning, match="fragments"):
        rkmate.plan(model(), (x,), budget=1.0, settings=rkmate.Settings(costs="analytic"), progress=False)


def test_a_share_of_a_device_is_a_budget() -> None:
    with FakeDevice(total=10**9):
        from rkmate.pipeline.device_budget import device_share
        share = device_share(model())
    assert parse_budget(share) is share and share.of(123) == share.bytes
    assert share.device is not None and len(share.device.parameters) == 12
    assert share.at_least(5).device == DeviceShare(), "what a loop holds is there by then"
