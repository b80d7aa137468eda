"""Random modules at other sizes: what is derived is the capture, or nothing is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from rkmate.graph.capture.capture import capture
from rkmate.graph.sizes.resized import resized
from tests.graph.sizes.test_resized import assert_same_capture, known, recorded
from tests.random_modules.programs import Program, Recipe, recipes


def examples(count: int) -> int:
    """How many of some random modules are derived; each derived one is right."""
    derived = 0

    @seed(3)
    @settings(max_examples=count, deadline=None, database=None, phases=(Phase.generate,),
              suppress_health_check=list(HealthCheck))
    @given(recipes)
    def run(recipe: Recipe) -> None:
        nonlocal derived
        model = Program(recipe)
        calls = [((torch.randn(4, n, 8),), {}) for n in (10, 14, 12, 20)]
        new = [recorded(model, c) for c in calls]
        if new[0] is None:
            return
        captures = [known(model, c) for c in calls[:2]]
        for call, recording in zip(calls[2:], new[2:], strict=True):
            found = resized(captures, recording) if recording is not None else None
            if found is not None:
                derived += 1
                assert_same_capture(found, capture(model, *call))

    run()
    return derived


@pytest.mark.slow
def test_random_modules() -> None:
    assert examples(10) > 5
