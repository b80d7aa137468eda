"""An embedding's gradient is added to another one of its weight without a matrix of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import rkmate
from rkmate.device import cpu
from rkmate.graph.ops.embeddings import bytes_of_rows
from rkmate.graph.passes.joint import Joint
from rkmate.measure.step import measure_peak
from tests.equality import as_bytes, assert_same_step, measured_peak
from tests.graph.passes.graphs import Made, aten, run, targets
from tests.models import Sample
from tests.semantics.steps import planned, tightest

own = torch.ops.rkmate
WORDS, WIDTH = 1000, 8


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a kibibyte, so that small tables are wide."""
    monkeypatch.setattr(cpu, "PART_BYTES", 2**10)


def _values(shape: tuple[int, ...], highest: int, dtype: torch.dtype,
            kind: torch.dtype = torch.int64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A gradient, rows, and their indices. There are negative zeros in both."""
    total, grad = torch.randn(WORDS, WIDTH).to(dtype), torch.randn(*shape, WIDTH).to(dtype)
    total[::3], grad[..., ::5] = -0.0, -0.0
    return total, grad, torch.randint(0, highest, shape, dtype=kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("padding", [-1, 0, 5])
@pytest.mark.parametrize("highest", [6, WORDS])
@pytest.mark.parametrize("shape", [(1,), (3, 50), (600,)])
def test_the_bits_are_torchs(shape: tuple[int, ...], highest: int, padding: int, dtype: torch.dtype) -> None:
    for kind in (torch.int64, torch.int32):
        total, grad, indices = _values(shape, highest, dtype, kind)
        expected = total + aten.embedding_dense_backward(grad, indices, WORDS, padding, False)
        found = own.add_embedding_rows(total, grad, indices, padding)
        over = own.add_embedding_rows.out(total, grad, indices, padding, out=total)
        assert over.data_ptr() == total.data_ptr()
        assert torch.equal(as_bytes(found), as_bytes(expected))
        assert torch.equal(as_bytes(over), as_bytes(expected))


@pytest.mark.parametrize("layout", ["transposed", "expanded"])
def test_other_layouts(layout: str) -> None:
    total, grad, indices = _values((4, 30), WORDS, torch.float32)
    if layout == "transposed":
        total, grad, indices = total.t().contiguous().t(), grad.transpose(0, 1), indices.t()
    else:
        grad = grad[:1].expand(grad.shape)
    expected = total + aten.embedding_dense_backward(grad, indices, WORDS, -1, False)
    found = own.add_embedding_rows(total, grad, indices, -1)
    assert found.stride() == total.stride()
    assert torch.equal(as_bytes(found), as_bytes(expected))


@pytest.mark.parametrize("width", [1, 4, 64])
@pytest.mark.parametrize("strided", [False, True])
def test_no_more_memory_than_is_counted(width: int, strided: bool) -> None:
    total, grad = torch.randn(9000, width), torch.randn(4, 750, width)
    indices = torch.randint(0, 9000, (4, 750))
    if strided:
        grad, indices = grad.transpose(0, 1), indices.t()
    peak = measure_peak(lambda: own.add_embedding_rows.out(total, grad, indices, 0, out=total)).peak
    assert peak <= bytes_of_rows(grad, indices) + 100


class _Tables:
    """Gradients of one table, made by hand."""

    def __init__(self, words: int = WORDS) -> None:
        self.made = Made()
        self.words = words
        self.weight = self.made.source("param", "weight", words, WIDTH)
        self.indices = self.made.source("input", 0, 4, 5, dtype=torch.int64)
        self.grad = self.made.source("tangent", 0, 4, 5, WIDTH)

    def product(self) -> fx.Node:
        x = self.made.call(aten.view.default, self.grad, [20, WIDTH], backward=True)
        turned = self.made.call(aten.t.default, x, backward=True)
        logits = self.made.call(aten.mm.default, self.weight, turned, backward=True)
        return self.made.call(aten.mm.default, logits, x, backward=True)

    def dense(self, *, by_frequency: bool = False) -> fx.Node:
        return self.made.call(aten.embedding_dense_backward.default, self.grad, self.indices, self.words, 3,
                              by_frequency, backward=True)

    def sum(self, a: fx.Node, b: fx.Node, **more: Any) -> fx.Node:
        return self.made.call(aten.add.Tensor, a, b, backward=True, **more)

    def run(self, total: fx.Node, *others: tuple[fx.Node, fx.Node]) -> Joint:
        return run("rows of embeddings", self.made.work([], [(self.weight, total), *others]))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("first", ["product", "embedding"])
def test_a_sum_with_a_product(first: str) -> None:
    tables = _Tables()
    a, b = (tables.product(), tables.dense()) if first == "product" else (tables.dense(), tables.product())
    work = tables.run(tables.sum(a, b))
    assert targets(work)[-1] is own.add_embedding_rows.default
    assert aten.embedding_dense_backward.default not in targets(work)
    (_, node), = work.grads
    assert node.args == (b if first == "embedding" else a, tables.grad, tables.indices, 3)
    (_, node), = run("sums of gradients", work).grads        # autograd gets one gradient
    assert node.target is own.add_embedding_rows.default


@pytest.mark.usefixtures("small_parts")
def test_of_embeddings_alone_the_first_is_a_matrix() -> None:
    tables = _Tables()
    work = tables.run(tables.sum(tables.sum(tables.dense(), tables.dense()), tables.dense()))
    assert targets(work) == [aten.embedding_dense_backward.default, *[own.add_embedding_rows.default] * 2]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("why", ["by frequency", "read elsewhere", "a result", "scaled", "narrow", "common"])
def test_other_sums_stay(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = _Tables({"narrow": 60, "common": 25}.get(why, WORDS))
    if why == "common":                                     # nearly as many indices as rows, of few bytes
        monkeypatch.setattr(cpu, "PART_BYTES", 2**8)
    dense = tables.dense(by_frequency=why == "by frequency")
    more: dict[str, Any] = {"alpha": 2} if why == "scaled" else {}
    total = tables.sum(tables.product(), dense, **more)
    other = tables.made.source("param", "other", tables.words, WIDTH)
    others = {"read elsewhere": [(other, tables.made.call(aten.neg.default, dense, backward=True))],
              "a result": [(other, dense)]}.get(why, [])
    work = tables.run(total, *others)
    assert own.add_embedding_rows.default not in targets(work)
    assert aten.embedding_dense_backward.default in targets(work)


class _Tied(nn.Module):
    """A table that is read twice, and two products with it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Embedding(4000, 16, padding_idx=3, dtype=dtype)
        self.first, self.second = (nn.Linear(16, 16, dtype=dtype) for _ in range(2))

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(self.table(words)))
        early = F.cross_entropy(h[:, 0] @ self.table.weight.t(), labels[:, 0])
        h = torch.tanh(self.second(h) + self.table(labels))
        return early + F.cross_entropy(F.linear(h, self.table.weight).flatten(0, 1), labels.flatten())


def _tied(dtype: torch.dtype) -> Sample:
    torch.manual_seed(0)
    words = torch.randint(0, 9, (2, 6))                    # most of them are there several times
    return Sample(_Tied(dtype), (words, words.flip(1)), {}, lambda loss: loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "PART_BYTES", 2**14)
    sample = _tied(dtype)
    for wrap in (planned, tightest):
        # Measured: some processors copy what products of half precision read.
        module = wrap(_tied(dtype).model, *sample.args, settings=rkmate.Settings(chunked_loss="never"),
                      costs="measured")
        assert module.source.count("rkmate.add_embedding_rows.out(") == 2
        assert_same_step(_tied(dtype).model, module, sample)
        assert measured_peak(module, sample) <= module.plan.peak_bytes


def test_a_tied_table_takes_no_second_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4000, 64)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(torch.tanh(self.table(words)) @ self.table.weight.t(), words)

    monkeypatch.setattr(cpu, "PART_BYTES", 2**14)
    torch.manual_seed(0)
    sample = Sample(Tied(), (torch.randint(0, 4000, (8,)),), {}, lambda loss: loss)
    module = planned(sample.model, *sample.args)
    logits, matrix = 8 * 4000 * 4, 4000 * 64 * 4
    assert measured_peak(module, sample) <= module.plan.peak_bytes < matrix + 2 * logits
