"""Batch norms that add up their pixels by groups."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import rkmate
from rkmate.graph.ops.norms import BY_GROUPS, groups_of
from rkmate.graph.passes.images import LEAST_PIXELS
from rkmate.measure.step import measure_peak
from tests.device.fake import FakeDevice
from tests.graph.passes.graphs import Made, aten, run, targets

LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _rewritten(*shape: int, dtype: torch.dtype = torch.float32, last: bool = True, train: bool = True,
               channels_last: bool = True) -> list[object]:
    made = Made()
    x = made.source("input", 0, *shape, dtype=dtype)
    mean, var = made.source("buffer", "mean", 3), made.source("buffer", "var", 3)
    x = made.call(aten.clone.default, x, memory_format=LAST[len(shape)] if last else torch.contiguous_format)
    norm = made.call(aten._native_batch_norm_legit_functional.default, x, None, None, mean, var, train, 0.1,
                     1e-5)
    y, new_mean = made.item(norm, 0), made.item(norm, 3)
    work = made.work([y], (), [(mean, new_mean)], channels_last=channels_last)
    return targets(run("overwritten values", run("sums over pixels", work)))


def test_large_images_with_channels_last() -> None:
    for shape in ((1, 3, 64, 64), (2, 3, 8, 16, 16)):
        found = _rewritten(*shape)
        assert BY_GROUPS in found
        assert found.count(aten.clone.default) == 1         # none of the running mean: it may run twice


@pytest.mark.parametrize("why", ["few pixels", "contiguous", "bfloat16", "not training", "own choice",
                                 "device"])
def test_others_stay(why: str) -> None:
    with FakeDevice() if why == "device" else nullcontext():
        found = _rewritten(1, 3, 64, 63 if why == "few pixels" else 64, last=why != "contiguous",
                           dtype=torch.bfloat16 if why == "bfloat16" else torch.float32,
                           train=why != "not training", channels_last=why != "own choice")
    assert aten._native_batch_norm_legit_functional.default in found and BY_GROUPS not in found


@given(st.integers(LEAST_PIXELS, 200_000))
def test_groups_are_alike_and_not_large(pixels: int) -> None:
    groups = groups_of(pixels)
    assert pixels % groups == 0 and pixels // groups <= 1024
    assert all(pixels % n for n in range(-(-pixels // 1024), groups))


@given(st.sampled_from([(1, 64, 64), (2, 113, 113), (3, 67, 61), (1, 1, 4099), (2, 8, 24, 24)]),
       st.integers(1, 9), st.booleans(), st.floats(-3, 3), st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_what_it_computes(sizes: tuple[int, ...], channels: int, affine: bool, mean: float,
                          seed: int) -> None:
    torch.manual_seed(seed)
    batch, *space = sizes
    x = torch.randn(batch, channels, *space).add_(mean).to(memory_format=LAST[len(sizes) + 1])
    weight, bias = (torch.randn(channels), torch.randn(channels)) if affine else (None, None)
    running = torch.randn(channels), torch.rand(channels)
    ours = BY_GROUPS(x, weight, bias, *running, True, 0.1, 1e-5)
    torchs, exact = (aten._native_batch_norm_legit_functional(*(
        t if t is None else t.to(dtype) for t in (x, weight, bias, *running)), True, 0.1, 1e-5)
        for dtype in (torch.float32, torch.float64))
    for a, b, e in zip(ours, torchs, exact, strict=True):
        assert a.dtype is b.dtype and a.stride() == b.stride()
        assert torch.allclose(a.double(), e, rtol=1e-5, atol=1e-5)
    for place in (1, 2):
        assert (ours[place] - exact[place]).abs().max() < 2e-6


def test_it_is_more_exact() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 16, 112, 112).add_(1).to(memory_format=torch.channels_last)
    running = torch.zeros(16), torch.ones(16)
    exact, ours, torchs = (f(x.to(dtype), None, None, *(t.to(dtype) for t in running), True, 0.1, 1e-5)[2]
                           for f, dtype in ((aten._native_batch_norm_legit_functional, torch.float64),
                                            (BY_GROUPS, torch.float32),
                                            (aten._native_batch_norm_legit_functional, torch.float32)))
    assert 5 * (ours - exact).abs().max() < (torchs - exact).abs().max()


def test_statistics_are_updated_once_where_it_runs_twice() -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels in (3, 8, 8, 8):
        layers += [nn.Conv2d(channels, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.GELU()]
    model, x = nn.Sequential(*layers, nn.Conv2d(8, 4, 3)), torch.randn(1, 3, 64, 64)
    module = rkmate.wrap(copy.deepcopy(model), (x,), budget=0.6, progress=False,
                         settings=rkmate.Settings(layouts="channels_last"))
    source = str(module.source)
    assert source.count("batch_norm_by_groups") > 3
    for _ in range(2):
        model(x).square().mean().backward()
        module(x).square().mean().backward()
    for ours, theirs in zip(module.buffers(), model.buffers(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    peak = measure_peak(lambda: module(x).square().mean().backward()).peak
    assert peak <= module.plan.budget_bytes
