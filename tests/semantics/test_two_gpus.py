"""Plans on one GPU are followed on another one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import rkmate
from tests.semantics.steps import Tower

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")]


def _on(index: int) -> tuple[Tower, torch.Tensor]:
    torch.manual_seed(0)
    return Tower(width=64, dropout=0.1).cuda(index), torch.randn(16, 64).cuda(index)


def _made_elsewhere(plan: rkmate.Plan) -> int:
    """Tensors on the first GPU that two steps on the second one make."""
    model, x = _on(1)
    wrapped = rkmate.wrap(model, (x,), plan=plan, progress=False,
                          settings=rkmate.Settings(run=rkmate.RunSettings(verify=False)))
    before = torch.cuda.memory_stats(0)["allocation.all.allocated"]
    for _ in range(2):
        wrapped(x).sum().backward()
    assert {p.grad.device for p in model.parameters() if p.grad is not None} == {torch.device("cuda", 1)}
    return int(torch.cuda.memory_stats(0)["allocation.all.allocated"] - before)


def test_a_saved_plan_is_followed(tmp_path: Path) -> None:
    model, x = _on(0)
    plan = rkmate.plan(model, (x,), budget=0.8, settings=rkmate.Settings(costs="analytic"), progress=False)
    plan.save(tmp_path / "plan.json")
    assert _made_elsewhere(rkmate.Plan.load(tmp_path / "plan.json")) == 0


def test_a_shared_plan_is_followed(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        model, x = _on(0)
        plan = rkmate.shared_plan(model, (x,), budget=0.8, settings=rkmate.Settings(costs="analytic"),
                                  progress=False)
    finally:
        dist.destroy_process_group()
    assert _made_elsewhere(plan) == 0
