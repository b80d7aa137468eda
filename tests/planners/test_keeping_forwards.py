"""A wrapped module whose forwards keep something for those that run again: the same step, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import nn

import rkmate
from rkmate.ilp import OptionSettings
from rkmate.pipeline.prepare import prepare
from rkmate.pipeline.search import Searcher
from rkmate.pipeline.settings import Settings
from rkmate.rotor import Backward, ForwardSaving
from rkmate.support.progress import Progress
from tests.capturing import captured_once
from tests.equality import assert_same_step
from tests.models import Sample

HOW = Settings(costs="analytic",
               options=OptionSettings(grid=(4, 4), time_limit=0.5, block_limit=2.0))


def resnet() -> nn.Module:
    """Wide between blocks, narrow inside: what is kept inside is small."""
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[32, 64, 128, 256], depths=[2, 3, 4, 2]))


def test_the_same_step() -> None:
    with captured_once():
        check_the_same_step()


def check_the_same_step() -> None:
    torch.manual_seed(0)
    model, x = resnet(), torch.randn(2, 3, 64, 64)
    searcher = Searcher(prepare(model, (x,), {}, HOW, Progress(False)))
    least = searcher.smallest.peak
    plans = 0
    for more in (1.05, 1.15, 1.3):
        limit = int(least * more)
        found = [c for c in searcher._of_chain(limit)
                 if any(isinstance(op, ForwardSaving) for op in c.ops)]
        if not found:
            continue
        plans += 1
        best = min(found, key=lambda c: c.seconds)
        assert best.peak <= limit
        assert any(isinstance(op, Backward) and op.save_index is not None for op in best.ops)
        plan = searcher._plan(searcher._finish(best, limit), limit, "rockmate", "", None)
        original = copy.deepcopy(model)
        wrapped = rkmate.wrap(model, (x,), plan=plan, progress=False)
        assert_same_step(original, wrapped, Sample(original, (x,), {}, _loss))
    assert plans


def _loss(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output.logits.square().mean()
    return loss
