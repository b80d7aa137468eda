"""``gradients="in_place"``: gradients of parameters are added straight to what stands in ``.grad``."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rkmate
from rkmate.measure.step import measure_peak
from rkmate.pipeline.settings import Settings
from tests.capturing import captured_once
from tests.equality import measured_peak, trace_step
from tests.models import BANK
from tests.semantics.in_place import X, assert_grads, grads, plan, tower, wrapped
from tests.semantics.steps import Heads, planned, tightest

pytestmark = pytest.mark.usefixtures("deterministic")


# -- what is added, and how ---------------------------------------------------------------


class Batched(nn.Module):
    """Products of all kinds: weights of several matrices, of more dimensions, and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 4, 5))
        self.heads = nn.Parameter(torch.randn(5, 2, 3))
        self.turned = nn.Parameter(torch.randn(6, 4))
        self.shared = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:          # [3, n, 4]
        h = torch.bmm(torch.einsum("bni,ij->bnj", x, self.shared), self.experts)
        h = torch.einsum("bnd,dhk->bnhk", h, self.heads).flatten(2)
        return h.transpose(0, 1) @ self.turned


class Images(nn.Module):
    """Convolutions with and without bias, in groups, transposed, and one whose weight is wide."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.grouped = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, groups=4, bias=False)
        self.wide, self.up = nn.Conv2d(8, 8192, 3, stride=2, padding=1), nn.ConvTranspose2d(8192, 8, 2)
        self.norm, self.line = nn.BatchNorm2d(8), nn.Conv1d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.grouped(self.first(x)))
        return self.line(self.up(torch.relu(self.wide(x))).flatten(2))


class Words(nn.Module):
    """Two embeddings, one with padding, and a norm."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(10, 8, padding_idx=0, **options), nn.Embedding(4, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        return self.norm(self.words(i) + self.places(torch.arange(3)))


class Scaled(nn.Module):
    """A factor for each number, one for all, and one whose gradient is the output's own."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.one, self.shift = (nn.Parameter(torch.randn(s)) for s in ((16,), (), (8, 16)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.each * self.one + self.shift


KINDS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor, str]] = {
    "products": (Batched, torch.randn(3, 7, 4), "addmm_ baddbmm_"),
    "images": (Images, torch.randn(2, 3, 8, 8), "add_convolution_gradient"),
    "words": (Words, torch.tensor([[0, 3, 3], [2, 0, 9]]), "add_embedding_gradient"),
    "by frequency": (lambda: Words(scale_grad_by_freq=True), torch.tensor([[0, 3, 3], [2, 0, 9]]), "add_"),
    "factors": (Scaled, X, "add_"),
    "several times": (lambda: Thrice(), X, "addmm_"),
}


class Thrice(nn.Module):
    """One layer, used again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        return x


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * (k == "by frequency"))
                                  for k in KINDS])
def test_gradients_are_added(kind: str) -> None:
    """From zero, each used once: the original's bits. Onto others: to rounding."""
    make, x, operations = KINDS[kind]
    torch.manual_seed(0)
    model = make()
    other = copy.deepcopy(model)
    module = planned(other, x, gradients="in_place")
    assert all(re.search(rf"\.{name}[.(]", module.source) for name in operations.split()), module.source
    for number in range(2):
        for run in (model, module):
            run(x).square().mean().backward()
        assert_grads(model, other, exact=number == 0 and kind != "several times")
    if kind == "words":
        assert other.words.weight.grad[0].abs().sum() == 0


def test_the_step_at_the_smallest_budget() -> None:
    model, module = tower(), wrapped()[1]
    assert plan().peak_bytes < plan().baseline_peak_bytes
    assert "with env.adding(): grad_weight.addmm_(" in module.source
    for _ in range(2):
        for run in (model, module):
            run(X).square().mean().backward()
        assert_grads(model, module)


def test_a_plan_takes_no_more_than_it_says() -> None:
    model, x = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64)), torch.randn(16, 64)
    module = tightest(model, x, gradients="in_place")
    module(x).sum().backward()
    before = tightest(copy.deepcopy(model), x).plan.peak_bytes
    step = measure_peak(lambda: module(x).sum().backward())
    assert step.peak <= module.plan.budget_bytes < before
    assert step.peak < model[0].weight.nbytes          # no gradient of a weight is a tensor of its own


def test_the_gradient_of_a_wide_convolution_is_made_in_parts() -> None:
    torch.manual_seed(0)
    model, x = nn.Conv2d(512, 512, 3), torch.randn(1, 512, 4, 4)       # 9 MiB of weights
    module = rkmate.wrap(model, (x,), budget=1.0, settings=Settings(costs="measured", gradients="in_place"),
                         progress=False)
    module(x).sum().backward()
    step = measure_peak(lambda: module(x).sum().backward())
    assert step.peak <= module.plan.budget_bytes < model.weight.nbytes


class Tied(nn.Module):
    def __init__(self, words: int = 50) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, 8), nn.Linear(8, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.embed(i))), i)


def test_tied_weights_add_each_part() -> None:
    torch.manual_seed(0)
    model, i = Tied(), torch.randint(0, 50, (64,))
    other = copy.deepcopy(model)
    module = planned(other, i, gradients="in_place")
    for run in (model, module):
        run(i).backward()
    assert_grads(model, other, exact=False)
    assert module.source.count("env.adding()") == 2


def test_a_chunked_loss_adds_the_gradient_of_its_weight() -> None:
    torch.manual_seed(0)
    model, i = Tied(20000), torch.randint(0, 20000, (128,))
    other = copy.deepcopy(model)
    module = planned(other, i, gradients="in_place", settings=Settings(chunked_loss="always"))
    assert re.search(r"def tiled_head_backward\w*\(.*, into_\d\):", module.source)
    for run in (model, module):
        run(i).backward()
    assert_grads(model, other, exact=False)


def test_gradients_of_inputs_are_returned() -> None:
    model, module = wrapped()[0], planned(tower(), X.clone().requires_grad_(), gradients="in_place")
    x, y = (X.clone().requires_grad_() for _ in range(2))
    model(x).sum().backward()
    module(y).sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert_grads(model, module)


def test_frozen_and_unused_parameters_get_nothing() -> None:
    model = tower()
    model.unused = nn.Linear(2, 2)
    model.__dict__["forward"] = lambda x: nn.Sequential.forward(model[:8], x)
    model[0].requires_grad_(False)
    module = planned(model, X, gradients="in_place")
    module(X).sum().backward()
    assert {n for n, g in grads(model).items() if g is None} == {
        "0.weight", "0.bias", "unused.weight", "unused.bias"}


def test_a_loss_of_another_output_runs_the_forward_again() -> None:
    model, x = Heads(), torch.randn(4, 8)
    other = copy.deepcopy(model)
    module = planned(other, x, gradients="in_place", trains="left")
    model(x)["right"].sum().backward()
    with pytest.warns(rkmate.RkmateWarning, match="runs a second time"):
        module(x)["right"].sum().backward()
    assert_grads(model, other)


# -- around it ----------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["planned", "outside"])
def test_a_parameter_that_is_used_outside_too(first: str) -> None:
    """Autograd adds its part to the same gradient, before or after."""
    def loss(model: nn.Sequential, run: nn.Module) -> torch.Tensor:
        if first == "planned":            # the backward goes the other way round
            return F.linear(run(X), model[0].weight).square().sum()
        return run(F.linear(X, model[0].weight)).square().sum()

    (model, module), plain = wrapped(), tower()
    for _ in range(2):
        loss(plain, plain).backward()
        loss(model, module).backward()
        assert_grads(plain, model, exact=False)


def test_threads_add_to_one_gradient() -> None:
    plain, model = tower(), tower()
    module = planned(model, X, budget="1GiB", gradients="in_place")
    losses = [module(X * k).sum() for k in range(1, 5)]
    threads = [threading.Thread(target=loss.backward) for loss in losses]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for k in range(1, 5):
        plain(X * k).sum().backward()
    assert_grads(plain, model, exact=False)


@pytest.mark.slow
def test_several_calls_before_a_backward() -> None:
    plain, model = tower(), tower()
    module = planned(model, X, gradients="in_place", calls=2)
    for run in (plain, module):
        (run(X).sum() + run(2 * X).square().sum()).backward()
    assert_grads(plain, model, exact=False)
    assert module.plan.peak_bytes < planned(tower(), X, calls=2).plan.peak_bytes


def test_gradients_that_stand_are_added_to_where_they_are() -> None:
    model, module = wrapped()
    module(X).sum().backward()
    places = [p.grad.data_ptr() for p in model.parameters()]
    module(X).sum().backward()
    assert places == [p.grad.data_ptr() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    module(X).sum().backward()
    assert_grads(model, module)


def test_a_gradient_that_is_set_between_forward_and_backward() -> None:
    (model, module), plain = wrapped(), tower()
    module(X).sum().backward()
    loss = module(X).sum()
    model.zero_grad(set_to_none=True)
    loss.backward()
    plain(X).sum().backward()
    assert_grads(plain, model)


def test_a_gradient_scaler() -> None:
    results = []
    for make in (lambda: (m := tower(), m), wrapped):
        model, run = make()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", 8.0)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            scaler.scale(run(X).square().mean()).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.slow
def test_other_sizes_and_lengths() -> None:
    model, plain = tower(), tower()
    module = planned(model, X, gradients="in_place")
    for n in (8, 5, 6):
        for run in (plain, module):
            run(X[:n]).square().sum().backward()
        assert module.plan.gradients == "in_place"
        assert_grads(plain, model, exact=False)


@pytest.mark.slow
def test_a_checkpointed_model() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tower()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    plain, model = Checkpointed(), Checkpointed()
    module = tightest(model, X, gradients="in_place")
    for run in (plain, module):
        run(X).square().sum().backward()
    assert_grads(plain, model)


def test_apply_and_a_loss_inside() -> None:
    plain, model = tower(), tower()
    rkmate.apply(model, budget=1.0, progress=False, settings=Settings(costs="analytic", gradients="in_place"))
    for run in (plain, model):
        run(X).square().sum().backward()
    assert_grads(plain, model)
    shown = rkmate.applied(model)
    assert shown is not None and shown.plan.gradients == "in_place"
    lossy = planned(tower(), X, gradients="in_place", loss=F.mse_loss, loss_args=(X,))
    plain.zero_grad()
    F.mse_loss(plain(X), X).backward()
    lossy(X, loss_args=(X,)).backward()
    assert_grads(plain, lossy)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the loss that is computed from the outputs")
@pytest.mark.parametrize("name", BANK)
def test_the_bank_at_the_smallest_budgets(name: str) -> None:
    """Bit for bit, but for weights that are used several times."""
    sample, other = BANK[name](0), BANK[name](0)
    with captured_once():
        with pytest.raises(rkmate.InfeasibleBudget) as caught:
            rkmate.wrap(sample.model, sample.args, sample.kwargs, budget=1, progress=False,
                        settings=Settings(gradients="in_place"))
        module = rkmate.wrap(sample.model, sample.args, sample.kwargs, budget=caught.value.minimum_bytes,
                             progress=False, settings=Settings(gradients="in_place"))
    expected, actual = trace_step(other.model, other, 1), trace_step(module, sample, 1)
    differing = {n for n, g in expected.gradients.items() if g is not None and not torch.equal(
        g, actual.gradients[n])}
    assert differing <= {n for n in expected.gradients if any(
        part in n for part in ("embed", "wte", "shared", "layer.0", "layer.3"))}
    for n, g in expected.gradients.items():
        if g is not None:
            torch.testing.assert_close(actual.gradients[n], g, msg=n)
    assert measured_peak(module, sample) <= module.plan.budget_bytes


# -- a plan says so -----------------------------------------------------------------------


def test_a_plan_is_of_one_way(tmp_path: Path) -> None:
    plan().save(tmp_path / "plan.json")
    again = rkmate.Plan.load(tmp_path / "plan.json")
    assert again == plan() and again.gradients == "in_place"
    assert "added in place" in str(again)
    assert any(c.adds for c in again.graph.cd.c)
    model = tower()
    with pytest.raises(rkmate.PlanError, match='made with gradients="in_place"'):
        rkmate.wrap(model, (X,), plan=again, progress=False)
    returned = rkmate.plan(model, (X,), budget=1.0, settings=Settings(costs="analytic"), progress=False)
    assert "gradients" not in str(returned)
    with pytest.raises(rkmate.PlanError, match='made with gradients="returned"'):
        rkmate.wrap(model, (X,), plan=returned, settings=Settings(gradients="in_place"), progress=False)


def test_the_other_ways_to_plan() -> None:
    settings = Settings(costs="analytic", gradients="in_place")
    options: dict[str, Any] = {"settings": settings, "progress": False}
    curve = rkmate.tradeoff(tower(), (X,), budgets=[1.0], **options)
    assert curve[0].gradients == "in_place"
    batch = rkmate.max_batch_size(tower(), lambda n: (torch.randn(n, 16),), device_memory="1MiB", most=1,
                                  **options)
    assert batch.plan.gradients == "in_place"
    with pytest.raises(rkmate.ArgumentError, match="gradients is 'here'"):
        planned(tower(), X, gradients="here")


@pytest.mark.slow
def test_every_planner_plans_it() -> None:
    found = rkmate.compare(tower(), (X,), budgets=[0.8],
                           settings=Settings(costs="analytic", gradients="in_place"), progress=False,
                           time_limit=0.5)
    assert {row.status for row in found.rows} <= {"ok", "infeasible", "timeout"}
    assert {row.method for row in found.rows if row.status == "ok"} >= {
        "rockmate", "rotor", "checkmate", "dtr", "recompute-all"}
