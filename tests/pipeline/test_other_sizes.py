"""A call of another size is planned as if it had been captured in full."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from rkmate.budget import Budget
from rkmate.codegen.emit import emit
from rkmate.graph.capture.resized import resized
from rkmate.pipeline.planning import DEFAULT, make_plan
from rkmate.pipeline.prepare import trace
from rkmate.pipeline.settings import Settings
from rkmate.support.progress import Progress
from tests.graph.test_resized import Attention, convolutions, images, known, recorded, tokens


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
        planned = make_plan(traced, Budget(fraction=1.0), DEFAULT)
        plan, prepared = planned.plan, planned.prepared
        found.append((plan.fingerprint, plan.peak_bytes, plan.step_seconds, plan.schedule, plan.graph,
                      emit(prepared.partition, plan.schedule, None, "", prepared.graph).text))
    assert found[0] == found[1]
