"""A call of another size is planned as if it had been captured in full."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from rkmate.budget import Budget
from rkmate.codegen.emit import emit
from rkmate.graph.sizes.resized import resized
from rkmate.pipeline.prepare import trace
from rkmate.pipeline.search import make_plan
from rkmate.pipeline.settings import Settings
from rkmate.pipeline.sizes import _is_cut_alike
from rkmate.support.defaults import DEFAULT_PLANNER
from rkmate.support.progress import Progress
from tests.graph.sizes.test_resized import Attention, convolutions, images, known, recorded, tokens


@pytest.mark.parametrize("gradients", ["returned", pytest.param("in_place", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("model", "call"), [(Attention(), tokens), (convolutions(), images)])
def test_a_derived_graph_is_planned_as_a_captured_one(model: nn.Module, call: Any, gradients: Any) -> None:
    settings = Settings(costs="analytic", gradients=gradients)
    captures = [known(model, call(n)) for n in (7, 12)]
    args, kwargs = call(17)
    new = recorded(model, (args, kwargs))
    assert new is not None
    derived = resized(captures, new)
    assert derived is not None
    found = []
    for captured in (derived, None):
        traced = trace(model, args, kwargs, settings, Progress(False), captured)
        planned = make_plan(traced, Budget(fraction=1.0), DEFAULT_PLANNER)
        plan, prepared = planned.plan, planned.prepared
        found.append((plan.fingerprint, plan.peak_bytes, plan.step_seconds, plan.schedule, plan.graph,
                      emit(prepared.partition, plan.schedule, None, "", prepared.graph).text))
    assert found[0] == found[1]


def test_options_of_other_blocks_are_not_taken_over() -> None:
    args, kwargs = tokens(12)
    traced = trace(Attention(), args, kwargs, Settings(costs="analytic"), Progress(False))
    plan, prepared = (made := make_plan(traced, Budget(fraction=1.0), DEFAULT_PLANNER)).plan, made.prepared
    assert _is_cut_alike(plan, prepared)
    moved = tuple(replace(c, block=c.block + 1) for c in plan.graph.computations)
    assert not _is_cut_alike(replace(plan, graph=replace(plan.graph, computations=moved)), prepared)
    named = tuple(replace(b, label=f"other {b.label}") for b in plan.blocks)
    assert not _is_cut_alike(replace(plan, blocks=named), prepared)
