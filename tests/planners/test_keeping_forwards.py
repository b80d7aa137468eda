"""A wrapped module whose forwards keep something for those that run again: the same step, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate.ilp import OptionSettings
from rkmate.pipeline.attempts import plan_of
from rkmate.pipeline.settings import Settings
from rkmate.planners.chain import ChainSearch, smallest_of_chain
from rkmate.planners.finish import finish
from rkmate.planners.protocol import Outcome
from rkmate.planners.settings import PlannerSettings
from rkmate.rotor import Backward, ForwardSaving
from tests.capturing import captured_once
from tests.equality import assert_same_step
from tests.models import Sample
from tests.planners.prepared import solved_of

HOW = Settings(costs="analytic",
               options=OptionSettings(grid=(4, 4), time_limit=0.5, block_limit=2.0))


def resnet() -> nn.Module:
    """Wide between blocks, narrow inside: what is kept inside is small."""
    import transformers  # takes seconds

    return transformers.ResNetForImageClassification(transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[32, 64, 128, 256], depths=[2, 3, 4, 2]))


@pytest.mark.slow
def test_the_same_step() -> None:
    with captured_once():
        check_the_same_step()


def check_the_same_step() -> None:
    torch.manual_seed(0)
    model, x = resnet(), torch.randn(2, 3, 64, 64)
    solved = solved_of(model, (x,), how=HOW)
    problem = solved.problem
    least = smallest_of_chain(problem).peak
    plans = 0
    for more in (1.05, 1.15, 1.3):
        limit = int(least * more)
        every = ChainSearch(PlannerSettings(), count=100).plan(problem, limit).others
        found = [c for c in every if any(isinstance(op, ForwardSaving) for op in c.ops)]
        if not found:
            continue
        plans += 1
        best = min(found, key=lambda c: c.seconds)
        assert best.peak <= limit
        assert any(isinstance(op, Backward) and op.save_index is not None for op in best.ops)
        finished = finish(problem.graph, best.schedule, limit, pinned=problem.pinned,
                          reserve_at_loss=problem.reserve_at_loss)
        plan = plan_of(solved.prepared, solved, "rockmate", limit, Outcome(finished, "ok", best.seconds))
        original = copy.deepcopy(model)
        wrapped = rkmate.wrap(model, (x,), plan=plan, progress=False)
        assert_same_step(original, wrapped, Sample(original, (x,), {}, _loss))
    assert plans


def _loss(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output.logits.square().mean()
    return loss
