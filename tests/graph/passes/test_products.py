"""Products of matrices that run by either of two libraries."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import rkmate
from rkmate.device import cpu, onednn
from rkmate.graph.ops.products import BY_ONEDNN, PRODUCT, product
from rkmate.graph.passes.kernels import LEAST, alternatives
from rkmate.graph.passes.tiles.source import products
from rkmate.graph.passes.tiles.tiled import Tiled
from rkmate.ir.kernels import choose_kernels
from rkmate.ir.schedule import Compute, from_order
from rkmate.measure.step import measure_peak
from rkmate.pipeline.prepare import block, prepare, trace
from rkmate.pipeline.settings import Settings
from rkmate.pipeline.variants import CHUNKED_LOSS, PLAIN
from rkmate.support.progress import Progress
from tests.device.fake import FakeDevice
from tests.equality import measured_peak
from tests.graph.passes.graphs import Made, aten, run, targets
from tests.models import Sample
from tests.threads import threads

pytestmark = pytest.mark.skipif(not onednn.is_available(), reason="torch was built without oneDNN")
COUNTED = Settings(costs="analytic", compile=True)


def _rewritten(n: int = 32, k: int = 24, m: int = 16, *, bias: int | None = None, fused: bool = True,
               dtype: torch.dtype = torch.float32) -> list[object]:
    made = Made()
    a, b = made.source("input", 0, n, k, dtype=dtype), made.source("param", "b", k, m, dtype=dtype)
    if bias is None:
        y = made.call(aten.mm.default, a, b)
    else:
        y = made.call(aten.addmm.default, made.source("param", "c", *[m] * bias, dtype=dtype), a, b)
    return targets(run("products", made.work([y], compiled=fused)))


@pytest.mark.parametrize("bias", [None, 1])
def test_products_have_another_kernel(bias: int | None) -> None:
    assert _rewritten(bias=bias) == [PRODUCT]


@pytest.mark.parametrize("how", [{"n": LEAST - 1}, {"k": LEAST - 1}, {"m": LEAST - 1}, {"fused": False},
                                 {"dtype": torch.float64}, {"dtype": torch.bfloat16}, {"bias": 2, "n": 16}])
def test_others_stay(how: dict[str, Any]) -> None:
    assert PRODUCT not in _rewritten(**how)


def test_other_devices_keep_their_library() -> None:
    with FakeDevice():
        assert PRODUCT not in _rewritten()


def test_without_the_other_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "is_available", lambda: False)
    assert PRODUCT not in _rewritten()


@given(st.tuples(*[st.integers(1, 80)] * 3), st.booleans(), st.booleans(), st.booleans())
def test_both_libraries_multiply(sizes: tuple[int, int, int], first_turned: bool, second_turned: bool,
                                 biased: bool) -> None:
    n, k, m = sizes
    a = torch.randn(k, n).t() if first_turned else torch.randn(n, k)
    b = torch.randn(m, k).t() if second_turned else torch.randn(k, m)
    bias = torch.randn(m) if biased else None
    assert torch.equal(product(a, b, bias), torch.mm(a, b) if bias is None else torch.addmm(bias, a, b))
    other = BY_ONEDNN(a, b, bias)
    exact = a.double() @ b.double() + (0 if bias is None else bias.double())
    assert other.stride() == (m, 1) or min(n, m) == 1
    assert torch.allclose(other.double(), exact, rtol=0, atol=1e-6 * k + 1e-5)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(("n", "k", "m"), [(512, 256, 1024), (98, 17, 4096), (300, 300, 300), (16, 6272, 64)])
@pytest.mark.parametrize("turned", [False, True])
def test_memory_of_the_other_library(n: int, k: int, m: int, turned: bool, number: int) -> None:
    with threads(number):
        a, b = torch.randn(k, n).t() if turned else torch.randn(n, k), torch.randn(m, k).t()
        BY_ONEDNN(a, b, None)
        kept: list[torch.Tensor] = []
        peak = measure_peak(lambda: kept.append(BY_ONEDNN(a, b, None))).peak
        assert kept[0].nbytes <= peak <= kept[0].nbytes + onednn.temporary_bytes(a)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 4096)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x), labels)


def test_products_of_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are added where their sum stands are torch's own."""
    monkeypatch.setattr(cpu, "PART_BYTES", 2**13)
    here = trace(Head(), (torch.randn(512, 32, requires_grad=True), torch.arange(512)), {}, COUNTED,
                 Progress(False))
    (node,) = [n for n in block(here, CHUNKED_LOSS).partition.program.joint.graph.nodes
               if isinstance(n.target, Tiled)]
    assert isinstance(node.target, Tiled)
    inside = [n.target for n in node.target.graph.nodes]
    assert inside.count(PRODUCT) == 2 and inside.count(aten.mm.default) == 1
    assert [n.target for n in products(node.target).values()] == [aten.mm.default]
    found = [a.target for a in alternatives(node)]
    assert all(isinstance(t, Tiled) for t in found)
    assert [n.target for n in found[0].graph.nodes] == [BY_ONEDNN if t is PRODUCT else t for t in inside]
    parts = [t.parts for t in (node.target, *found)]
    assert len(parts) > 2 and parts == sorted(parts, reverse=True) and parts[::2] == parts[1::2]


class Layers(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(torch.tanh(self.first(x)))
        return y


@pytest.mark.parametrize("faster", [0, 1])
def test_a_schedule_takes_the_faster_library(faster: int) -> None:
    prepared = prepare(trace(Layers(48), (torch.randn(64, 48),), {}, COUNTED, Progress(False)), PLAIN)
    c = list(prepared.graph.c)
    named = [i for i, n in enumerate(prepared.partition.program.operation) if n.target is PRODUCT]
    assert len(named) == 5
    for i in named:
        (other,) = c[i].alternatives
        c[i] = dataclasses.replace(c[i], time=2.0, alternatives=(
            other._replace(time=1.0 if faster else 3.0),))
    graph = dataclasses.replace(prepared.graph, c=tuple(c))
    chosen = choose_kernels(graph, from_order(graph, range(len(c)), graph.loss), room=1 << 40)
    assert {s.kernel for s in chosen.steps if isinstance(s, Compute) and s.c in named} == {faster}


@pytest.mark.parametrize("budget", [1.0, 0.8])
def test_a_step_by_the_other_library(budget: float) -> None:
    """Counted costs are the same for both: then it is the other one."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Layers(48), Layers(48)), torch.randn(512, 48)
    module = rkmate.wrap(copy.deepcopy(model), (x,), budget=budget, settings=COUNTED, progress=False)
    assert "by_onednn(" in module.plan.source
    out, expected = module(x), model(x)
    assert torch.allclose(out, expected, rtol=1e-4, atol=1e-5)
    out.square().mean().backward()
    expected.square().mean().backward()
    for a, b in zip(module.parameters(), model.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert a.grad.stride() == b.grad.stride()
        assert torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-6)
    peak = measured_peak(module, Sample(module, (x,), {}, lambda y: y.square().mean()))
    assert peak <= module.plan.peak_bytes
