"""Budgets from device memory, and the largest batch that fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate.pipeline import prepare as prepare_module
from rkmate.pipeline.device_budget import _largest, training_bytes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(32, 32), nn.GELU())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x).square().mean()
        return out


def inputs(n: int) -> tuple[Any, ...]:
    return (torch.randn(n * 16, 32),)


def smallest_peak(n: int) -> int:
    with pytest.raises(rkmate.InfeasibleBudget) as error:
        rkmate.plan(Net(), inputs(n), budget=1, settings=rkmate.Settings(costs="analytic"))
    return error.value.minimum_bytes


def test_training_needs_gradients_and_states() -> None:
    model = nn.Linear(10, 10)
    size = 110 * 4
    assert training_bytes(model) == 3 * size
    assert training_bytes(model, 0) == size
    model.weight.grad = torch.zeros(10, 10)
    assert training_bytes(model, 1) == size + 40
    model.bias.requires_grad_(False)
    assert training_bytes(model, 1) == 400


def test_the_largest_batch_needs_a_device_or_its_memory() -> None:
    with pytest.raises(rkmate.ArgumentError, match=r"max_batch_size without device_memory= asks.*: give a"):
        rkmate.max_batch_size(Net(), inputs)


@pytest.mark.parametrize("call", [
    lambda: rkmate.wrap(Net(), inputs(1), budget="auto"),
    lambda: rkmate.plan(Net(), inputs(1), budget="auto"),
    lambda: rkmate.tradeoff(Net(), inputs(1), budgets=["auto"]),
    lambda: rkmate.auto_budget(Net()),
    lambda: rkmate.max_batch_size(Net(), inputs)])
def test_auto_needs_a_cuda_device(call: Any) -> None:
    with pytest.raises(rkmate.ArgumentError, match="CUDA"):
        call()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_auto_leaves_room_for_gradients_and_states() -> None:
    model = Net().cuda()
    free, total = torch.cuda.mem_get_info()
    budget = rkmate.auto_budget(model)
    size = sum(p.nbytes for p in model.parameters())
    assert free * 0.8 < budget <= free + torch.cuda.memory_reserved() - 3 * size - 0.03 * total
    assert rkmate.auto_budget(model, optimizer_states=0) > budget
    wrapped = rkmate.wrap(model, (torch.randn(16, 32, device="cuda"),), budget="auto")
    assert wrapped.plan.overhead == 0


@pytest.mark.gpu
def test_auto_leaves_what_the_process_may_not_take() -> None:
    model = Net().cuda()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(2**30 / total)
    try:
        assert 0 < rkmate.auto_budget(model) < 2**30
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_the_largest_batch_is_the_largest() -> None:
    model = Net()
    held = sum(p.nbytes for p in model.parameters())
    room = smallest_peak(5) + 100
    found = rkmate.max_batch_size(model, inputs, device_memory=4 * held + room,
                                  settings=rkmate.Settings(costs="analytic"), progress=False)
    assert found.budget_bytes == room
    assert smallest_peak(found.size) <= room < smallest_peak(found.size + 1)
    assert found.plan.peak_bytes <= room
    assert 1 <= found.size_without < found.size
    plain = rkmate.plan(model, inputs(found.size_without), budget=1.0,
                        settings=rkmate.Settings(costs="analytic"))
    more = rkmate.plan(model, inputs(found.size_without + 1), budget=1.0,
                       settings=rkmate.Settings(costs="analytic"))
    assert plain.baseline_peak_bytes <= room < more.baseline_peak_bytes
    assert dict(found.tried)[found.size] is not None
    assert dict(found.tried)[found.size + 1] is None
    assert found.seconds_per_sample == pytest.approx(found.plan.step_seconds / found.size)
    assert f"batch of {found.size}" in str(found)


def test_most_sizes_are_derived_from_two_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[int] = []
    full = prepare_module.capture
    monkeypatch.setattr(prepare_module, "capture", lambda model, args, *more: (
        captured.append(len(args[0])), full(model, args, *more))[1])
    found = rkmate.max_batch_size(Net(), inputs, device_memory="1GiB", most=20,
                                  settings=rkmate.Settings(costs="analytic"), progress=False)
    assert len(found.tried) > 4
    assert captured == [16, 32]


def test_planned_parts_are_captured_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a recording of another size, too."""
    captured: list[int] = []
    full = prepare_module.capture
    monkeypatch.setattr(prepare_module, "capture", lambda model, args, *more: (
        captured.append(len(args[0])), full(model, args, *more))[1])
    part = Net()
    rkmate.apply(part, budget=0.9, settings=rkmate.Settings(costs="analytic"), progress=False)
    model = nn.Sequential(nn.Linear(32, 32), part)
    rkmate.max_batch_size(model, inputs, device_memory="1GiB", most=8,
                          settings=rkmate.Settings(costs="analytic"), progress=False)
    shown = rkmate.applied(part)
    assert captured == [16, 32]
    assert shown is not None and not shown.has_plan


def test_the_search_stops_at_the_most_that_is_asked() -> None:
    found = rkmate.max_batch_size(Net(), inputs, device_memory="1GiB", most=3,
                                  settings=rkmate.Settings(costs="analytic"), progress=False)
    assert (found.size, found.size_without) == (3, 3)


def test_not_even_one_fits() -> None:
    model = Net()
    held = sum(p.nbytes for p in model.parameters())
    with pytest.raises(rkmate.InfeasibleBudget, match="a batch of one") as error:
        rkmate.max_batch_size(model, inputs, device_memory=4 * held + 100,
                              settings=rkmate.Settings(costs="analytic"), progress=False)
    assert error.value.minimum_bytes == smallest_peak(1)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"device_memory": 0.5}, "device_memory is 0.5"), ({"device_memory": "50%"}, "share"),
    ({"device_memory": 1000}, "alone need"), ({"device_memory": "1GiB", "most": 0}, "most is 0"),
    ({"device_memory": "1GiB", "settings": rkmate.Settings(planner="chen")}, "asks the default planner"),
    ({"device_memory": "1GiB", "optimizer_states": -1}, "optimizer_states is -1"),
    ({"device_memory": "1GiB", "optimizer_states": 1.5}, "optimizer_states is 1.5")])
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(rkmate.ArgumentError, match=message):
        rkmate.max_batch_size(Net(), inputs, **arguments)


def test_inputs_of_a_wrong_type() -> None:
    with pytest.raises(rkmate.ArgumentError, match="make_inputs returned Tensor"):
        rkmate.max_batch_size(Net(), lambda n: torch.zeros(n, 32), device_memory="1GiB")


def test_keyword_inputs() -> None:
    found = rkmate.max_batch_size(Net(), lambda n: ((), {"x": torch.randn(n, 32)}), device_memory="1GiB",
                                  most=2, settings=rkmate.Settings(costs="analytic"), progress=False)
    assert found.size == 2


@pytest.mark.parametrize("answer", [1, 2, 3, 7, 8, 9, 100, 127, 128, 1000])
@pytest.mark.parametrize("peak", [lambda n: 10 * n, lambda n: 1000 + n, lambda n: n * n,
                                  lambda n: 10 * n + (n > 60) * 10**6])
def test_the_search_on_known_peaks(answer: int, peak: Any) -> None:
    looked: list[int] = []

    def look(n: int) -> int:
        looked.append(n)
        return int(peak(n))

    budget = look(answer)
    looked.clear()
    assert _largest(look, budget, 1 << 16) == answer
    assert len(looked) <= 2 + 3 * answer.bit_length()
    fitting = [n for n in looked if peak(n) <= budget]
    assert fitting[-1] == answer
    looked.clear()
    assert _largest(look, budget, answer - 1 or 1) == (answer - 1 or 1)
    assert max(looked) <= max(answer - 1, 1)


@pytest.mark.slow
def test_the_largest_batch_of_several_calls() -> None:
    """A step of two calls holds what both save: fewer samples fit, and the plan is one for both."""
    model = Net()
    room = 4 * sum(p.nbytes for p in model.parameters()) + smallest_peak(5) + 100
    one, two = (rkmate.max_batch_size(model, inputs, device_memory=room,
                                      settings=rkmate.Settings(costs="analytic"), progress=False,
                                      calls=calls) for calls in (1, 2))
    assert two.plan.calls == 2 and two.plan.peak_bytes <= two.budget_bytes
    assert two.size < one.size and two.size_without < one.size_without
    with pytest.raises(rkmate.ArgumentError, match="calls is 0"):
        rkmate.max_batch_size(model, inputs, device_memory=room, calls=0)
