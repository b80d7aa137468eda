"""Batch norms taken apart: the same statistics and gradients within rounding."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rkmate
from rkmate.device import inductor
from rkmate.graph.passes.clusters import batch_norms, cluster
from rkmate.measure import compiled_memory
from rkmate.pipeline.settings import Settings

pytestmark = pytest.mark.xdist_group("clusters")


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups run as they are written."""
    monkeypatch.setattr(inductor, "_compiled", lambda function, forms: lambda tensors: function(*tensors))
    monkeypatch.setattr(compiled_memory, "_bytes", lambda group, threads: 0)
    monkeypatch.setattr(inductor, "_known", {})
    cluster._made.cache_clear()


class Block(nn.Module):
    """Convolutions with batch norms; one has no weight, and one no running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.one, self.two = nn.BatchNorm2d(8, momentum=0.3), nn.BatchNorm2d(8, affine=False)
        self.three = nn.BatchNorm2d(8, track_running_stats=False)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.one(self.first(x)))
        y = F.relu(self.two(self.second(y)) + y)
        return self.head(self.three(y)).pow(2).mean((0, 2, 3)).sin().sum()


def model_and_image(form: torch.memory_format, size: tuple[int, int]) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = Block().to(memory_format=form)  # type: ignore[call-overload]
    return model, (3 + torch.randn(3, 3, *size)).contiguous(memory_format=form)


@pytest.mark.parametrize("size", [(12, 10), (7, 11)])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_statistics_and_gradients(uncompiled: None, monkeypatch: pytest.MonkeyPatch,
                                  form: torch.memory_format, size: tuple[int, int]) -> None:
    """As exact as the original's, whatever the blocks are; also where the budget has them computed again."""
    monkeypatch.setattr(batch_norms, "BLOCK_BYTES", 64)
    original, x = model_and_image(form, size)
    exact = copy.deepcopy(original).double()
    for _ in range(2):
        original(x).backward()
        exact(x.double()).backward()
    for budget in (1.0, 0.97):
        wrapped = rkmate.wrap(model_and_image(form, size)[0], (x,), budget=budget, compile=True,
                              costs="analytic", progress=False)
        assert "batch_norm" not in wrapped.source
        for _ in range(2):
            wrapped(x).backward()
        for (name, p), e, o in zip(wrapped.original.named_parameters(), exact.parameters(),
                                   original.parameters(), strict=True):
            size_of = float(e.grad.abs().max())
            error, eager = (float((q.grad.double() - e.grad).abs().max()) for q in (p, o))
            assert error <= 2 * eager + 1e-6 * size_of + 1e-6, name
        for (name, b), e in zip(wrapped.original.named_buffers(), exact.buffers(), strict=True):
            torch.testing.assert_close(b.to(e.dtype), e, rtol=1e-5, atol=1e-6, msg=name)


def test_statistics_are_a_group_of_their_own(uncompiled: None) -> None:
    """A result is computed again without them."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 3))
    x = torch.randn(3, 3, 12, 10)
    source = rkmate.wrap(model, (x,), budget=1.0, compile=True, costs="analytic", progress=False).source
    groups = source.split("@fused(")[1:]
    assert sum("aten.rsqrt" in g for g in groups) == sum("aten.relu" in g for g in groups) == 1
    assert not any("aten.rsqrt" in g and "aten.relu" in g for g in groups)


def test_whole_without_groups_and_in_other_types(uncompiled: None) -> None:
    model, x = model_and_image(torch.contiguous_format, (12, 10))
    settings = Settings(costs="analytic")
    assert "batch_norm" in rkmate.wrap(model, (x,), budget=1.0, progress=False, settings=settings).source
    model, x = model.bfloat16(), x.bfloat16()
    assert "batch_norm" in rkmate.wrap(model, (x,), budget=1.0, progress=False, compile=True,
                                       settings=settings).source


@pytest.mark.parametrize(("count", "most", "found"), [(98, 20, 14), (12, 100, 12), (17, 16, 17),
                                                      (101, 50, 101), (32, 0, 16)])
def test_blocks_divide(count: int, most: int, found: int) -> None:
    assert batch_norms._divisor(count, most) == found


def test_a_channel_far_from_zero_keeps_its_variance(uncompiled: None) -> None:
    """Means are taken off before anything is squared."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 16, 16) + 1e4

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.weight = nn.BatchNorm2d(4), nn.Parameter(torch.ones(4, 1, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.norm(x * self.weight) * x).sum()

    wrapped = rkmate.wrap(Norm(), (x,), budget=1.0, compile=True, costs="analytic", progress=False)
    wrapped(x).backward()
    var = wrapped.original.norm.running_var
    torch.testing.assert_close(var, 0.9 + 0.1 * x.double().var((0, 2, 3)).float(), rtol=1e-3, atol=0)
