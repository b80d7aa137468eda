"""Heads in groups of rows: ordinary operations, whose logits a schedule keeps as far as there is room."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

import rkmate
from rkmate.ir.cd import missing_nodes
from rkmate.pipeline.prepare import Prepared, prepare, trace
from rkmate.pipeline.settings import Settings
from rkmate.pipeline.variants import CHUNKED_LOSS, GROUPED_LOSS, Variant, others, together
from rkmate.support.progress import Progress
from tests.semantics.in_place import assert_grads

GROUPED = together((CHUNKED_LOSS, GROUPED_LOSS))
WORDS, ROWS = 16384, 256


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(WORDS, 16), nn.Linear(16, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.inner(self.embedding(ids)).tanh() @ self.embedding.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), ignore_index=3)


@functools.cache
def model() -> tuple[Tied, torch.Tensor]:
    torch.manual_seed(0)
    return Tied(), torch.randint(0, WORDS, (2, ROWS // 2))


@functools.cache
def prepared(variant: Variant) -> Prepared:
    module, ids = model()
    settings = Settings(costs="analytic", gradients="in_place")
    return prepare(trace(module, (ids,), {}, settings, Progress(False)), variant)


def plan(budget: int) -> rkmate.Plan:
    module, ids = model()
    return rkmate.plan(module, (ids,), budget=budget,
                       settings=Settings(costs="analytic", gradients="in_place"), progress=False)


def test_each_group_has_its_own_logits_and_adds_its_own_gradient() -> None:
    graph = prepared(GROUPED).graph
    logits = WORDS * ROWS * 4
    groups = [j for j, d in enumerate(graph.d) if logits // 9 < d.size <= logits // 8 and graph.producer[j]]
    assert max(d.size for d in graph.d) <= logits // 8
    made = [graph.producer[j] for j in groups if len(missing_nodes(graph, [j], graph.inputs)) and
            graph.c[graph.producer[j] or 0].phase == "forward"]
    assert len(made) >= 8
    assert sum(c.adds for c in graph.c) >= 8 + 2


def test_gradients_are_those_of_the_whole() -> None:
    module, ids = model()
    whole, other = copy.deepcopy(module), copy.deepcopy(module)
    budget = int(0.7 * prepared(CHUNKED_LOSS).baseline_peak + 0.3 * prepared(GROUPED).baseline_peak)
    with pytest.warns(rkmate.RkmateWarning, match="as many of their rows"):
        planned = rkmate.wrap(other, (ids,), budget=budget,
                              settings=Settings(costs="analytic", gradients="in_place"), progress=False)
    assert planned.plan.variant == GROUPED.name and planned.plan.schedule.recomputed()
    for _ in range(2):
        for run in (whole, planned):
            run(ids).backward()
    assert_grads(whole, other, exact=False)


@pytest.mark.slow
def test_more_rows_are_kept_with_more_room() -> None:
    """Between computing all logits a second time, and none."""
    low, high = prepared(CHUNKED_LOSS).baseline_peak, prepared(GROUPED).baseline_peak
    with pytest.warns(rkmate.RkmateWarning):
        times = [plan(low + (high - low) * k // 4).step_seconds for k in range(5)]
    assert times == sorted(times, reverse=True) and len(set(times)) >= 4


def test_it_is_compared_where_gradients_are_added_in_place() -> None:
    for gradients, there in (("in_place", True), ("returned", False)):
        blocked = prepared(CHUNKED_LOSS).blocked
        settings = Settings(gradients=gradients)       # type: ignore[arg-type]
        concerned = dict(blocked.concerned) if there else {**blocked.concerned, GROUPED_LOSS.name: ()}
        assert (GROUPED in others(settings, concerned)) is there
    assert GROUPED_LOSS not in others(Settings(), blocked.concerned)
    assert GROUPED_LOSS.when(Settings(chunked_loss="always")) == "auto"
    assert GROUPED_LOSS.when(Settings(chunked_loss="never")) == "never"
