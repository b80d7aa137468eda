"""Measuring on a device that has too little free memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate.pipeline import prepare as prepare_module
from tests.device.fake import FakeDevice


def full_for(times: int, monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Let measuring run out of memory so many times; the limits that it is told."""
    limits: list[int | None] = []
    measure = prepare_module.measure

    def measured(*args: Any, limit: Any = None, **more: Any) -> Any:
        limits.append(None if limit is None else limit())
        if len(limits) <= times:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measure(*args, limit=limit, **more)

    monkeypatch.setattr(prepare_module, "measure", measured)
    return limits


def test_it_measures_with_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = full_for(1, monkeypatch)
    with FakeDevice(total=10**6):
        rkmate.plan(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), (torch.randn(4, 8),), budget=10**7)
    assert limits == [10**7, 800_000]


def test_an_error_of_our_own_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    full_for(2, monkeypatch)
    with FakeDevice(total=10**6), pytest.raises(rkmate.DeviceMemoryError, match='costs="analytic"'):
        rkmate.plan(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), (torch.randn(4, 8),), budget=10**7)
