"""Planning for GPUs that are not here."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate import device as devices
from rkmate.cli.main import main as run
from rkmate.device.elsewhere import Elsewhere, planning_for
from rkmate.devices import A100, GPU, H100, H200, NAMES, T4, called, known
from rkmate.support.planning_lock import PlanningLock, capture_lock, planning_lock
from rkmate.torch_seam.patches.attention import kernel_of
from tests.clocks import NO_CLOCK

pytestmark = pytest.mark.xdist_group("devices elsewhere")      # they share plans


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, 32).permute(2, 0, 3, 1, 4).unbind()
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2)).relu()


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return nn.Sequential(Layer(), Layer(), Layer()).to(dtype)


X = torch.zeros(2, 128, 64, dtype=torch.bfloat16)


@functools.cache
def planned(device: str, budget: float = 0.6) -> rkmate.Plan:
    return rkmate.plan(model(), (X,), budget=budget, device=device, progress=False, settings=NO_CLOCK)


def operations(plan: rkmate.Plan) -> set[str]:
    return {c.operation for c in plan.graph.computations}


def test_the_page_lists_the_known_names() -> None:
    page = Path(__file__).parent.parent.joinpath("docs", "planning-elsewhere.md").read_text(encoding="utf-8")
    assert f"Known names are {', '.join(f'`{name}`' for name in NAMES)}." in " ".join(page.split())


def test_a_plan_says_that_its_times_are_estimates() -> None:
    plan = planned("h100")
    assert plan.peak_bytes <= plan.budget_bytes < plan.baseline_peak_bytes
    assert "times are estimates" in plan.note and H100.name in plan.note
    assert "times are estimates" in str(plan) and "times are estimates" in plan.explain()
    assert plan.origin is not None and plan.origin.device == H100.name


@pytest.mark.parametrize(("device", "kernel"), [
    ("h100", "scaled_dot_product_cudnn_attention"), ("a100", "scaled_dot_product_flash_attention")])
def test_attention_takes_the_kernel_of_the_device(device: str, kernel: str) -> None:
    plan = planned(device, 1.0)
    assert {kernel, f"{kernel}_backward"} <= operations(plan)
    assert not any("for_cpu" in name for name in operations(plan))
    assert "attention translated" in plan.note


def test_a_faster_device_takes_less_time() -> None:
    assert planned("h200", 1.0).step_seconds <= planned("a100", 1.0).step_seconds \
        < planned("t4", 1.0).step_seconds


def test_nothing_is_left_behind() -> None:
    planned("h100")
    assert devices.of("cpu").elsewhere is None
    here = rkmate.plan(model(), (X,), budget=1.0, settings=rkmate.Settings(costs="analytic"), progress=False)
    assert any("for_cpu" in name for name in operations(here)) and "estimates" not in here.note


def test_locks_are_taken_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else this thread and one that plans a wrapped module would wait for each other."""
    take, seen = PlanningLock.__enter__, []

    def taken(lock: PlanningLock) -> PlanningLock:
        if lock is planning_lock:
            seen.append(planning_lock.is_mine() or not capture_lock.is_mine())
        return take(lock)

    monkeypatch.setattr(PlanningLock, "__enter__", taken)
    rkmate.plan(nn.Linear(8, 8), (torch.zeros(2, 8),), budget=1.0, device="h100", progress=False)
    assert seen and all(seen)


def test_a_model_without_memory() -> None:
    with torch.device("meta"):
        empty = nn.Sequential(Layer(), Layer(), Layer()).bfloat16()
    plan = rkmate.plan(empty, (X.to("meta"),), budget=planned("a100").budget_bytes, device="a100",
                       progress=False, settings=NO_CLOCK)
    assert plan.fingerprint == planned("a100").fingerprint and plan.peak_bytes == planned("a100").peak_bytes
    assert all(p.is_meta for p in empty.parameters())


def test_what_the_device_has_left_is_a_budget() -> None:
    plan = rkmate.plan(model(), (X,), budget="auto", device=A100, progress=False)
    assert 0.9 * A100.memory_bytes < plan.budget_bytes < A100.memory_bytes


def test_a_plan_is_saved_and_refused_where_the_graph_is_another(tmp_path: Path) -> None:
    planned("a100").save(tmp_path / "plan.json")
    plan = rkmate.Plan.load(tmp_path / "plan.json")
    assert "estimates" in plan.note
    with pytest.raises(rkmate.PlanError, match=r"was made for NVIDIA A100 SXM 80 GB, and this is cpu"):
        rkmate.wrap(model(), (X,), plan=plan, progress=False)


def test_a_curve() -> None:
    curve = rkmate.tradeoff(model(), (X,), budgets=[1.0, 0.6], device="a100", progress=False,
                            settings=NO_CLOCK)
    assert [plan.peak_bytes for plan in curve][1] == planned("a100").peak_bytes
    assert all("times are estimates" in plan.note for plan in curve)


@pytest.mark.slow
def test_the_largest_batch() -> None:
    def inputs(n: int) -> tuple[torch.Tensor]:
        return (torch.zeros(n, 128, 64, dtype=torch.bfloat16),)

    found = rkmate.max_batch_size(model(), inputs, device="a100", device_memory="8MiB", progress=False)
    plan = rkmate.plan(model(), inputs(found.size), budget=found.budget_bytes, device="a100", progress=False)
    assert found.size > found.size_without > 0
    assert plan.fingerprint == found.plan.fingerprint and "estimates" in found.plan.note


def test_measured_costs_are_refused() -> None:
    options: dict[str, Any] = {"costs": "measured"}
    with pytest.raises(rkmate.ArgumentError, match="nothing can be measured"), \
            pytest.warns(rkmate.RkmateWarning, match=r"plan\(costs=...\) is now"):
        rkmate.plan(model(), (X,), budget=0.6, device="h100", progress=False, **options)
    with planning_for(H100, ()), pytest.raises(rkmate.ArgumentError, match="of another machine"):
        devices.of("cpu").timed(lambda: None)


def test_an_unknown_device() -> None:
    with pytest.raises(rkmate.ArgumentError, match=r"device is 'h1000'; .*h100"):
        rkmate.plan(model(), (X,), budget=0.6, device="h1000", progress=False)


def test_names() -> None:
    assert known("H100") is H100 and known("A100-80") is known("a100_80") is A100 and known("cuda") is None
    assert all(known(name) is gpu for name, gpu in NAMES.items())
    assert H100.is_called("NVIDIA H100 80GB HBM3") and not H200.is_called("NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize(("name", "gpu"), [
    ("NVIDIA A100-SXM4-80GB", rkmate.devices.A100), ("NVIDIA A100-SXM4-40GB", rkmate.devices.A100_40),
    ("NVIDIA A100 80GB PCIe", rkmate.devices.A100), ("Tesla V100-SXM2-16GB", rkmate.devices.V100),
    ("NVIDIA H200", H200), ("NVIDIA L40S", rkmate.devices.L40S), ("NVIDIA L40", None), ("Tesla T4", T4)])
def test_what_torch_calls_a_gpu(name: str, gpu: GPU | None) -> None:
    assert called(name) is gpu


def test_rates() -> None:
    rates = H100.rates
    assert rates.of_products("float32", tf32=True) > rates.of_products("float32") == rates.flops_per_second
    assert rates.of_products("float64") == rates.flops_per_second
    assert T4.rates.of_products("bfloat16") == T4.rates.flops_per_second
    assert Elsewhere(H100).rates.bytes_per_second == pytest.approx(0.7 * rates.bytes_per_second)


CHOICES = json.loads((Path(__file__).parent / "attention_on_gpus.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CHOICES, ids=lambda c: f"{c['gpu']}-{c['dtype']}-{c['sizes']}")
def test_kernels_of_attention_are_those_that_torch_takes(case: dict[str, Any]) -> None:
    """The table was read off torch 2.13, in the order of `FORMS`."""
    def choice(mask: bool, dropout: float, grad: bool, grouped: bool) -> str:
        def made(heads: int, size: int) -> torch.Tensor:
            return torch.empty(2, heads, 128, size, dtype=getattr(torch, case["dtype"]),
                               device="meta").requires_grad_(grad)

        size, wide = case["sizes"]
        few = 2 if grouped else 8
        bias = torch.empty(2, 1, 128, 128, dtype=torch.bool, device="meta") if mask else None
        return kernel_of(NAMES[case["gpu"]], made(8, size), made(few, size), made(few, wide), bias, dropout)

    assert [choice(*form) for form in FORMS] == case["kernels"]


FORMS = ((False, 0.0, True, False), (False, 0.1, True, False), (True, 0.0, True, False),
         (True, 0.1, True, False), (False, 0.0, False, False), (False, 0.0, True, True))
"""(mask, dropout, gradients, fewer heads of keys)."""


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    target = ["tests.show.targets:sample", "--budget", "60%", "--quiet"]
    assert run(["plan", *target, "--device", "h100"]) == 0
    assert "times are estimates" in capsys.readouterr().out
    assert run(["plan", *target, "--device", "h100", "--source", "x.py"]) == 2
    assert "of another machine" in capsys.readouterr().err
