"""Models with a static form: what the error names, and that it is planned."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rkmate
from tests.semantics.steps import planned


def _mixtral(experts: str) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32))
    model.set_experts_implementation(experts)
    return model.train()


def _text() -> dict[str, Any]:
    ids = torch.randint(0, 32, (2, 8))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


@pytest.mark.parametrize("experts", ["grouped_mm", pytest.param("batched_mm", marks=pytest.mark.slow)])
def test_a_mixture_of_experts_with_static_experts(experts: str) -> None:
    model, inputs = _mixtral(experts), _text()
    original = copy.deepcopy(model)
    module = planned(model, kwargs=inputs)
    module(**inputs).loss.backward()
    original(**inputs).loss.backward()
    for (name, p), q in zip(original.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    graph = module.plan.graph
    assert "topk" in [graph.computations[i].operation for i, c in enumerate(graph.cd.c) if c.decides]


@pytest.mark.slow
def test_experts_in_a_loop_name_the_librarys_flag() -> None:
    with pytest.raises(rkmate.CaptureError, match=r'model\.set_experts_implementation\("grouped_mm"\)'):
        planned(_mixtral("eager"), kwargs=_text())


class Picked(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        row, = torch.where(x[:, 0] > 0)
        return torch.zeros_like(x).index_add(0, row, super().forward(x[row]))


class Skipped(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        row = (x[:, 0] > 0).nonzero().squeeze(1)
        return super().forward(x) if row.numel() == 0 else super().forward(x[row])


@pytest.mark.parametrize("kind", [Picked, Skipped])
def test_picked_rows_name_the_static_form(kind: type[nn.Module]) -> None:
    with pytest.raises(rkmate.CaptureError, match=r"static_forms\.py:\d+.*row.*weigh with zeros.*Routing"):
        planned(kind(8, 8), torch.randn(4, 8))


class Recogniser(nn.Linear):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = super().forward(x).log_softmax(-1)
        heard = (scores[..., 0].exp() < 1).sum(0)
        return F.ctc_loss(scores, labels, heard, heard.clamp_max(labels.shape[1]))


def test_a_ctc_loss_of_lengths_that_are_computed_goes_outside() -> None:
    with pytest.raises(rkmate.CaptureError, match=r"ctc_loss.*Let the model return its logits.*Speech"):
        planned(Recogniser(8, 8), torch.randn(12, 2, 8), torch.randint(1, 8, (2, 4)))


class Fitted(nn.Linear):
    def __init__(self, is_static: bool) -> None:
        super().__init__(4, 4)
        self.is_static = is_static

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(x)
        if not self.is_static:
            return torch.linalg.lstsq(hidden, y).solution
        q, r = torch.linalg.qr(hidden)
        return torch.linalg.solve_triangular(r, q.mT @ y, upper=True)


def test_least_squares_name_the_static_form() -> None:
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    with pytest.raises(rkmate.CaptureError, match=r"number of residuals.*solve_triangular"):
        planned(Fitted(is_static=False), x, y)
    model = Fitted(is_static=True)
    assert torch.equal(planned(model, x, y)(x, y), model(x, y))


def add_remaining_self_loops(edges: torch.Tensor, nodes: int) -> torch.Tensor:
    """As PyTorch Geometric does in each forward."""
    return torch.cat([edges[:, edges[0] != edges[1]], torch.arange(nodes).expand(2, -1)], 1)


class Convolution(nn.Linear):
    add_self_loops = True

    def __init__(self, pools: bool) -> None:
        super().__init__(8, 8)
        self.pools = pools

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        if self.pools:
            x = x[x[:, 0] > 0]
        near = edges + (x.sum() > 0)        # who is a neighbour is computed, too
        source, target = add_remaining_self_loops(near.clamp_max(len(x) - 1), len(x))
        return torch.zeros_like(x).index_add(0, target, super().forward(x)[source])


def test_searching_for_self_loops_names_the_argument() -> None:
    with pytest.raises(rkmate.CaptureError, match=r"add_self_loops=False.*Graphs"):
        planned(Convolution(pools=False), torch.randn(6, 8), torch.randint(0, 6, (2, 12)))
    with pytest.raises(rkmate.CaptureError, match=r"number of elements that a mask .* picks.*Routing"):
        planned(Convolution(pools=True), torch.randn(6, 8), torch.randint(0, 6, (2, 12)))
