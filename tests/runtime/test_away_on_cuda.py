"""Steps that send a GPU's data to the host's memory."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate.ir.link import Link
from rkmate.measure.step import measure_peak
from rkmate.offload.cuda import SLAB, pool_of
from rkmate.show.copies import away_bytes
from tests.copying import sending
from tests.equality import assert_same_step
from tests.models import BANK, Sample
from tests.offload.test_cuda_copies import no_waiting
from tests.options import options_of
from tests.planners.send_all import send_all

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode")]
LINK = Link(1e10, 1e10, 1e-5, place="host")


def sample() -> Sample:
    made = BANK["gpt2"]()
    return Sample(made.model.cuda(), (), {k: v.cuda() for k, v in made.kwargs.items()}, made.loss)


def wrapped(some: Sample, **more: Any) -> rkmate.PlannedModule:
    """With all sent away that may be, as often as it may. Little is left beside the memory that operations
    take inside, so that is measured."""
    plain = rkmate.plan(some.model, some.args, some.kwargs, budget=1.0, progress=False)
    return rkmate.wrap(some.model, some.args, some.kwargs, progress=False,
                       plan=sending(plain, functools.partial(send_all, every_gap=True), LINK),
                       **options_of(costs="analytic", verify=False, **more))


def test_a_step_waits_for_nothing_and_takes_what_its_plan_says() -> None:
    some = sample()
    module = wrapped(some, offload="host")
    plan = module.plan
    assert len(plan.schedule.copied) > 20

    def step(m: nn.Module) -> None:
        some.loss(m(*some.args, **some.kwargs)).backward()

    for _ in range(2):
        step(module)
        some.model.zero_grad(set_to_none=False)
    with no_waiting():
        step(module)
    some.model.zero_grad(set_to_none=False)
    room = pool_of(torch.device("cuda", 0)).room
    assert room.end == -(-away_bytes(plan) // SLAB) * SLAB
    found = measure_peak(functools.partial(step, module), "cuda")
    assert found.peak == pytest.approx(plan.peak_bytes, rel=0.02)
    assert room.end == -(-away_bytes(plan) // SLAB) * SLAB, "the same room in each step"
    del module, found
    gc.collect()
    assert pool_of(torch.device("cuda", 0)).room.end == 0, "pinned memory goes with the last plan"


@pytest.mark.values
def test_the_same_numbers() -> None:
    some, original = sample(), sample()
    assert_same_step(original.model, wrapped(some, offload=rkmate.Offload("host", verify=True)), original)
