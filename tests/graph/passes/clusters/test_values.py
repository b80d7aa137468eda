"""What groups compute again, hand over and take: of models whose groups are not compiled."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from rkmate.device import inductor
from rkmate.graph.passes.fusion import MOST, MOST_AGAIN
from rkmate.measure import temporaries
from rkmate.support.planning_lock import capture_lock
from tests.equality import assert_same_step
from tests.graph.passes.clusters.test_clusters import layers, uncompiled, wrap  # noqa: F401 - a fixture
from tests.models import Sample

pytestmark = [pytest.mark.usefixtures("uncompiled"), pytest.mark.xdist_group("clusters")]


class Centred(nn.Module):
    """A norm by hand, of what another product reads, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        d = x - x.mean(-1, keepdim=True)
        y = d / (d.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        return self.second(y) + self.third(x)


def test_what_values_are_computed_again_from_is_computed_once() -> None:
    """A mean that the backward alone asks for, and its group's own operations, is a result of that group."""
    torch.manual_seed(0)
    model, original, x = Centred(), Centred(), torch.randn(4, 24, 16)
    original.load_state_dict(model.state_dict())
    sample = Sample(model, (x,), {}, lambda y: y.square().mean())
    wrapped = wrap(sample, costs="analytic")
    assert wrapped.source.count("aten.mean.dim(") == 2 and ".mean([" not in wrapped.source
    assert_same_step(original, wrapped, sample)


class Exponential(nn.Module):
    """Returns its value as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(self.scale * x).t()


def test_what_the_caller_holds_a_view_of_is_read() -> None:
    sample = Sample(Exponential(), (torch.randn(16, 16),), {}, lambda y: y.square().mean())
    assert wrap(sample, costs="analytic").source.count("aten.exp.default(") == 1


class Steps(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        for _ in range(60):
            x = torch.sin(x)
        return x.mean()


def test_long_chains_are_not_computed_again_whole() -> None:
    plan = wrap(Sample(Steps(8, 8), (torch.randn(4, 8),), {}, lambda y: y), costs="analytic").plan
    assert max(names.count(",") + 1 for names, _ in plan.fused) <= MOST + 2 * MOST_AGAIN


def test_groups_run_under_the_lock_of_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another thread's step takes is no group's; and nobody waits for a compiler."""
    held: list[bool] = []
    compiles = inductor.Fused.compile
    monkeypatch.setattr(temporaries, "_bytes", lambda *args: held.append(capture_lock.is_mine()) or 0)
    monkeypatch.setattr(inductor.Fused, "compile", lambda group: (
        held.append(not capture_lock.is_mine()), compiles(group))[1])
    wrap(layers(1), costs="analytic")
    assert len(held) > 2 and all(held)


def test_what_nobody_holds_is_not_kept() -> None:
    """Each size of the inputs has groups of its own."""
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.sinh(),)

    made = inductor.fused("float32[7]")(function)
    assert inductor.fused("float32[7]")(function) is made
    there = weakref.ref(made)
    del made
    gc.collect()
    assert there() is None
