"""Generators go back to where they were."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rkmate import device as devices
from rkmate.device.random_state import STATE_BYTES, RandomState, set_state, state_of, unchanged_random_state
from rkmate.dtr.session import State
from tests.device.fake import FakeDevice


class Own(FakeDevice):
    """An accelerator with a generator of its own."""

    own = torch.Generator()

    def generator(self) -> torch.Generator:
        return self.own


def test_a_state_draws_the_same_again() -> None:
    generator = torch.Generator()
    state = state_of(generator)
    assert isinstance(state, bytes) and len(state) == STATE_BYTES
    first = torch.rand(3, generator=generator)
    set_state(generator, state)
    assert torch.equal(torch.rand(3, generator=generator), first)


def test_the_cpus_and_the_devices() -> None:
    device = Own()
    before = RandomState.of(device)
    assert len(before.states) == 2 and len(RandomState.of(devices.of("cpu")).states) == 1
    first = torch.rand(3), torch.rand(3, generator=device.own)
    assert RandomState.of(device) != before
    before.restore()
    assert RandomState.of(device) == before
    assert torch.equal(torch.rand(3), first[0])
    assert torch.equal(torch.rand(3, generator=device.own), first[1])


def test_what_is_drawn_inside_is_not_missing() -> None:
    device = Own()
    before = RandomState.of(device)
    with pytest.raises(KeyError), unchanged_random_state(device):
        torch.rand(3), torch.rand(3, generator=device.own)
        raise KeyError
    assert RandomState.of(device) == before


def test_a_failed_dynamic_step_puts_all_back() -> None:
    model = nn.BatchNorm1d(3)
    kept, before = State(model), torch.get_rng_state()
    model(torch.randn(4, 3))
    kept.restore()
    assert torch.equal(torch.get_rng_state(), before)
    assert model.running_mean is not None and not model.running_mean.any()
