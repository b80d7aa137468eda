"""Random operations: the recomputed mask is the mask, and the generator ends where it should."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributions, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import rkmate
from tests.semantics.slopes import KINDS, largest_gap, with_three_budgets
from tests.semantics.steps import (
    Tower,
    assert_same_gradients,
    planned,
    three_budgets,
    tightest,
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_a_seed_gives_the_same_run_and_gradients_are_the_slope_of_the_loss(kind: type[nn.Module]) -> None:
    """At three budgets; the slopes are central differences in float64, over three steps."""
    model, modules, x = with_three_budgets(kind)
    for module in modules:
        for seed in (3, 4):
            assert_same_gradients(model, module, lambda run: run(x).pow(2).sum(), seed=seed)
    gaps = largest_gap(model, modules, x)
    assert len(gaps) == 3 and max(gaps) < 1e-5, gaps


def _seeded(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return x + torch.rand(16)


def _forked(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=()):
        return x + torch.rand(16)


def _twice_the_same(x: torch.Tensor) -> torch.Tensor:
    state = torch.get_rng_state()
    x = x + torch.rand(16)
    torch.set_rng_state(state)
    return x + torch.rand(16)


def _seeds_at_the_end(x: torch.Tensor) -> torch.Tensor:
    x = x + torch.rand(16)
    torch.manual_seed(3)
    return x


@pytest.mark.parametrize("draw", [_seeded, _forked, _twice_the_same, _seeds_at_the_end])
def test_a_forward_that_sets_a_generator_is_refused(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A plan would draw other numbers each time, and leave the generator elsewhere."""
    class Seeding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.layer(draw(x)), 0.1)

    with pytest.raises(rkmate.CaptureError, match="Seeding sets the state of a random generator"):
        planned(Seeding(), torch.randn(8, 16, generator=torch.Generator().manual_seed(0)))


def test_something_random_is_recomputed() -> None:
    """Else the tests above would show nothing."""
    x = torch.randn(32, 16)
    module = tightest(Tower(dropout=0.3), x)
    assert "env.replay" in module.source


def test_several_forwards_before_a_backward_keep_their_masks() -> None:
    torch.manual_seed(0)
    model = Tower(dropout=0.3)
    x = torch.randn(32, 16)
    module = tightest(model, x, calls=2)
    assert_same_gradients(model, module, lambda run: run(x).pow(2).sum() + run(x + 1).pow(3).sum())


def test_draws_between_forward_and_backward_survive() -> None:
    x = torch.randn(32, 16)
    module = tightest(Tower(dropout=0.3), x)
    torch.manual_seed(5)
    loss = module(x).sum()
    torch.rand(7)
    before = torch.get_rng_state()
    loss.backward()
    assert torch.equal(before, torch.get_rng_state())


def test_a_draw_of_another_thread_within_a_replay_is_noticed() -> None:
    x = torch.randn(32, 16)
    module = tightest(Tower(dropout=0.3), x)
    loss = module(x).sum()
    env = loss.grad_fn.next_functions[0][0].call.env
    name = next(iter(env._rng))
    before, after = env._rng[name]
    other = bytes(len(after.states[0]))
    env._rng[name] = before, replace(after, states=(other, *after.states[1:]))
    with pytest.raises(rkmate.BackwardError, match="another thread"):
        loss.backward()


def test_draws_of_python_and_numpy_are_refused() -> None:
    class Coin(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (2 if random.random() + np.random.rand() < 1 else 1)

    states = random.getstate(), np.random.get_state()[2]
    line = rf"{re.escape(__file__)}:{Coin.forward.__code__.co_firstlineno + 1}"
    with pytest.raises(rkmate.CaptureError, match=f"draws from random at {line} and numpy.random at {line};"):
        planned(Coin(4, 4), torch.randn(2, 4))
    assert states == (random.getstate(), np.random.get_state()[2])


def test_a_module_may_be_imported_that_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "seeded_once.py").write_text("import random\nSALT = random.random()\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    class Lazy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            import seeded_once
            return super().forward(x) * (seeded_once.SALT >= 0)

    state = random.getstate()
    try:
        planned(Lazy(4, 4), torch.randn(2, 4))
    finally:
        del sys.modules["seeded_once"]
    assert state == random.getstate()


def test_generators_of_the_user_are_refused() -> None:
    class Own(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.generator = torch.Generator()

        def forward(self, x: torch.Tensor, g: torch.Generator | None = None) -> torch.Tensor:
            return super().forward(x) + torch.rand(4, generator=g or self.generator)

    with pytest.raises(rkmate.CaptureError, match=r"torch\.Generator of its own"):
        planned(Own(), torch.randn(2, 4))
    with pytest.raises(rkmate.CaptureError, match=r"torch\.Generator among the arguments"):
        planned(Own(), torch.randn(2, 4), torch.Generator())


def test_recurrent_dropout_between_layers() -> None:
    torch.manual_seed(0)
    for cell in (nn.LSTM, nn.GRU):
        model = cell(8, 8, 2, batch_first=True, dropout=0.3)
        x = torch.randn(2, 4, 8)
        module = planned(model, x)

        def loss(run: Callable[..., Any], x: torch.Tensor = x) -> torch.Tensor:
            return sum(t.pow(2).sum() for t in pytree.tree_leaves(run(x)))

        assert_same_gradients(model, module, loss)


class _Variational(nn.Module):
    """An autoencoder with a loss inside that takes distributions."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(16, 8), nn.Linear(4, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, scale = self.encoder(x).chunk(2, -1)
        code = distributions.Normal(mean, F.softplus(scale))
        prior = distributions.Normal(torch.zeros_like(mean), torch.ones_like(scale))
        kept = distributions.Bernoulli(logits=mean).sample()
        seen = distributions.Independent(distributions.Laplace(self.decoder(code.rsample() * kept), 1.0), 1)
        rest: torch.Tensor = distributions.kl_divergence(code, prior).sum(-1) - seen.log_prob(x)
        return rest.mean()


def test_distributions() -> None:
    torch.manual_seed(0)
    checked = distributions.Distribution._validate_args         # torch.compile switches it off
    model, x = _Variational(), torch.randn(32, 16)
    for module in three_budgets(model, x):
        for _ in range(2):
            assert_same_gradients(model, module, lambda run: run(x))
    assert distributions.Distribution._validate_args == checked
