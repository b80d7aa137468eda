"""Wide MLPs in tiles of tokens."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rkmate
from rkmate.device import cpu
from rkmate.measure.step import measure_peak
from rkmate.pipeline.prepare import block, trace
from rkmate.pipeline.settings import Settings
from rkmate.pipeline.variants import PLAIN, TILED_MLPS
from rkmate.support.progress import Progress

TOKENS, WIDTH, INNER = 1024, 16, 64
ALWAYS = Settings(costs="analytic", tiled_mlps="always")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "PART_BYTES", 2**14)


class Mlp(nn.Module):
    def __init__(self, *, gated: bool = False, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER, bias), nn.Linear(INNER, WIDTH, bias)
        self.gate = nn.Linear(WIDTH, INNER, bias) if gated else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        wide = F.gelu(self.up(h)) if self.gate is None else F.silu(self.gate(h)) * self.up(h)
        return x + self.down(self.dropout(wide))


class Loss(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def _weights(model: nn.Module, x: torch.Tensor) -> tuple[str, ...]:
    traced = trace(model, (x,), {}, Settings(costs="analytic"), Progress(False))
    return tuple(block(traced, PLAIN).concerned["tiled-mlps"])


@pytest.mark.parametrize("kind", [
    pytest.param({}, marks=pytest.mark.slow), {"gated": True, "bias": False}], ids=["gelu", "gated"])
def test_the_step_is_the_originals_in_less_memory(kind: dict[str, bool]) -> None:
    torch.manual_seed(0)
    model, x = Loss(*(Mlp(**kind) for _ in range(3))), torch.randn(2, TOKENS // 2, WIDTH, requires_grad=True)
    reference, same = copy.deepcopy(model), x.detach().clone().requires_grad_()
    with pytest.raises(rkmate.InfeasibleBudget) as plain:
        rkmate.wrap(model, (x,), budget=1, settings=Settings(costs="analytic", tiled_mlps="never"),
                    progress=False)
    with pytest.raises(rkmate.InfeasibleBudget) as tiled:
        rkmate.wrap(model, (x,), budget=1, settings=Settings(costs="analytic"), progress=False)
    least = tiled.value.minimum_bytes
    assert least < plain.value.minimum_bytes - TOKENS * INNER * 4 // 2
    with pytest.warns(rkmate.RkmateWarning, match="MLPs of layers.0.* run a few rows at a time"):
        wrapped = rkmate.wrap(model, (x,), budget=least, settings=Settings(costs="analytic"), progress=False)
    assert wrapped.plan.variant == TILED_MLPS.name and "def tiled_mlp_backward" in wrapped.source
    loss, expected = wrapped(x), reference(same)
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    assert x.grad is not None and same.grad is not None
    torch.testing.assert_close(x.grad, same.grad)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)
    assert measure_peak(lambda: wrapped(x).backward()).peak <= least


def test_what_an_mlp_works_with_does_not_grow_with_the_sequence() -> None:
    torch.manual_seed(0)
    beside = []
    for tokens in (TOKENS, 4 * TOKENS):
        plan = rkmate.plan(Loss(Mlp()), (torch.randn(tokens, WIDTH),), budget=1.0, settings=ALWAYS,
                           progress=False)
        beside.append(plan.peak_bytes - 6 * tokens * WIDTH * 4)
    assert beside[1] < beside[0] + TOKENS * INNER * 4


@pytest.mark.parametrize(("model", "tokens"), [
    (Loss(Mlp(dropout=0.1)), TOKENS), (Loss(Mlp()), 256),
    (Loss(nn.Linear(WIDTH, INNER), nn.GELU()), TOKENS)], ids=["dropout", "few tokens", "no way back"])
def test_what_is_left(model: nn.Module, tokens: int) -> None:
    assert not _weights(model, torch.randn(tokens, WIDTH))


def test_each_mlp_is_named_once() -> None:
    found = _weights(Loss(Mlp(), Mlp()), torch.randn(TOKENS, WIDTH))
    assert found == ("layers.0.up.weight", "layers.1.up.weight")
