"""Models that cannot be planned as a whole, planned by parts."""

from __future__ import annotations

import copy
import inspect
import io
import logging
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rkmate
from rkmate.measure.step import measure_peak, measure_step
from rkmate.parts import one_budget
from rkmate.parts.by_parts import Parts
from rkmate.parts.followed_parts import LATER
from rkmate.parts.one_budget import Watch
from rkmate.planners.several_calls import Item, Moment, Way, share_out, smallest_limit
from rkmate.runtime import plan_cache
from tests.options import options_of

X, Y = torch.randn(128, 32), torch.randint(0, 16, (128,))
Step = Callable[[nn.Module], torch.Tensor]
"""Runs a module's forward, and returns the loss."""


class Layer(nn.Module):
    def __init__(self, width: int = 32, wide: int = 4) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, wide * width)
        self.down, self.drop = nn.Linear(wide * width, width), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))
        return out


class Looking(Layer):
    """A layer that looks at its values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x if x.abs().amax() < 1e9 else x.clamp(-1, 1)


class Stack(nn.Module):
    """Layers, some of which are left out in a step."""

    def __init__(self, layers: list[nn.Module], drop: float = 0.0, numpy: bool = False) -> None:
        super().__init__()
        self.begin, self.head = nn.Linear(32, 32), nn.Linear(32, 16)
        self.layers, self.drop, self.numpy = nn.ModuleList(layers), drop, numpy
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        x = self.begin(x)
        if self.numpy:
            x = x * torch.from_numpy((np.random.rand(x.shape[0], 1) > 0.2).astype("f4"))
        for layer in self.layers:
            if self.drop and torch.rand([]) < self.drop:
                continue
            x = layer(x)
        return F.cross_entropy(self.head(x), y)


class Shared(Stack):
    """One layer, called several times; the branch is the model's own."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = self.layers[0](x)
            if x.abs().amax() > 1e9:
                x = x.clamp(-1, 1)
        return F.cross_entropy(self.head(x), y)


class Halving(Stack):
    """After each layer, half of the rows are picked."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        for layer in self.layers:
            x = layer(x)
            x = x[x.norm(dim=1).topk(int((x[:, 0] < 1e9).sum()) // 2).indices]
        return F.cross_entropy(self.head(x), y[:len(x)])


class Numbered(Layer):
    """A layer that knows its number. The first one computes more, and puts a result where the last finds
    it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: torch.Tensor, kept: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        if kept is not None and self.number == 0:
            x = x + self.down(F.gelu(self.up(x).exp().clamp(max=2)).square())
            kept["first"] = torch.tanh(x)
        out = super().forward(x)
        return out * kept["first"] if kept is not None and self.number == 3 else out


class Handing(Stack):
    """Layers hand on results in a dictionary."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kept: dict[str, torch.Tensor] = {}
        x = self.begin(x) * float(np.random.rand())
        for layer in self.layers:
            x = layer(x, kept)
        return F.cross_entropy(self.head(x), y)


class Attending(nn.Module):
    """A layer inside of which a plannable part uses its input twice, and the layer itself once more."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.inner(x)
        return x if x.abs().amax() < 1e9 else x.clamp(-1, 1)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 96), nn.Linear(32, 96), nn.Linear(96, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.c(torch.tanh(self.a(x)) * torch.sigmoid(self.b(x)))
        return out


class Convolving(nn.Module):
    """A part whose result is transposed; its gradient is not."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv1d(32, 32, 8, padding=4, groups=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.convolve(x.T)[:, :-1]).T


class Checkpointed(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


class Wasteful(torch.autograd.Function):
    """Takes memory in its backward, as reversible layers do that compute again there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * torch.ones(100, *grads[0].shape).mean(0)


class Outside(Stack):
    """The model itself takes the most memory in the backward."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(Wasteful.apply(x * self.scale), y)


class Growing(Stack):
    """The model itself takes more memory from some step on."""

    extra = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x, y)
        torch.empty(self.extra, dtype=torch.uint8, device=x.device)
        return loss


class Coder(nn.Module):
    """A model that is trained through methods."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Layer(), Layer(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 32), Layer(), Layer())

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.encoder(x)
        return out

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.decoder(z)
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))


class Implicit(Stack):
    """Solves for the gradient of one of its layers, by several backwards of one call of it."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        with torch.no_grad():
            z = self.layers[0](x)
        z = z.requires_grad_()
        found = self.layers[0](z)
        kept = found.detach().requires_grad_()

        def solved(grad: torch.Tensor) -> torch.Tensor:
            out = grad
            for _ in range(3):
                out = grad + 0.1 * torch.autograd.grad(found, z, out, retain_graph=True)[0]
            return out

        kept.register_hook(solved)
        x = kept
        for layer in self.layers[1:]:
            x = layer(x)
        return F.cross_entropy(self.head(x), y)


class Mixed(Stack):
    """Multiplies with a sparse buffer."""

    def __init__(self) -> None:
        super().__init__([Layer() for _ in range(3)])
        self.register_buffer("mix", torch.eye(128).to_sparse())

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.sparse.mm(self.mix, x), y)


class Scaled(nn.Module):
    """Brings rows to one length."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6) * self.weight


class Frozen(Stack):
    """Frozen layers, which save no input: plans hold theirs, which other modules have made."""

    def __init__(self) -> None:
        super().__init__([nn.Sequential(nn.Linear(32, 160), nn.GELU(), nn.Linear(160, 32)) for _ in range(4)])
        self.norms = nn.ModuleList(Scaled() for _ in range(4))
        self.layers.requires_grad_(False)
        self.norms.requires_grad_(False)
        self.keeps = False

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        self.kept = []
        for norm, layer in zip(self.norms, self.layers, strict=True):
            branch = layer(norm(x))
            x = x + branch
            if self.keeps:
                self.kept.append(branch)
            del branch
            if x.abs().amax() > 1e9:
                x = x.clamp(-1, 1)
        return F.cross_entropy(self.head(x), y)


class Words(Stack):
    """An embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__([Layer() for _ in range(4)])
        self.words = nn.Embedding(64, 32, sparse=True)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.words(y), y)


def plainly(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(X, Y)
    return loss


def by_methods(model: Any) -> torch.Tensor:
    z = model.encode(X)
    return F.mse_loss(model.decode(z + 0.1 * torch.randn_like(z)), X)


def penalised(model: Any) -> torch.Tensor:
    """A slope of a part, which hands out the gradient of its argument as the terms of a sum."""
    x = X.clone().requires_grad_()
    slope, = torch.autograd.grad(model.encode(x).sum(), x, create_graph=True)
    return by_methods(model) + slope.square().mean()


def against_each_other(model: Any) -> torch.Tensor:
    """A discriminator with a backward of its own, twice, and the generator through it."""
    made = model.decode(torch.randn(128, 8))
    (F.softplus(-model.encode(X)).mean() + F.softplus(model.encode(made.detach())).mean()).backward()
    return F.softplus(-model.encode(made)).mean()


def in_a_cycle(model: Any) -> torch.Tensor:
    """What one network makes goes to two others, which use it more than once. One of them then has a backward
    of its own, of two calls."""
    made = model["there"](X)
    (F.l1_loss(model["back"](made), X) + F.softplus(-model["judge"](made)).mean()).backward()
    return F.softplus(model["judge"](made.detach())).mean() + F.softplus(-model["judge"](X)).mean()


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


def applied(model: nn.Module, budget: int | float, **options: Any) -> nn.Module:
    return rkmate.apply(model, budget=budget, **options_of(costs="analytic", progress=False, **options))


def train(model: nn.Module, step: Step, seed: int) -> dict[str, Any]:
    """One step from known random states, and all that it leaves behind."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    model.zero_grad()
    loss = step(model)
    loss.backward()
    return {"loss": loss.detach(), "draws": torch.get_rng_state(), "numpy": np.random.rand(),
            **{n: None if p.grad is None else p.grad.to_dense() for n, p in model.named_parameters()},
            **{n: b for n, b in model.named_buffers() if not b.is_sparse}}


def same_steps(plain: nn.Module, model: nn.Module, step: Step, seeds: range = range(4)) -> None:
    for seed in seeds:
        expected, found = train(plain, step, seed), train(model, step, seed)
        for name, value in expected.items():
            other = found[name]
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, \
                f"{name} in step {seed}"


def peak(model: nn.Module, step: Step, seed: int) -> int:
    def run() -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        step(model).backward()

    return measure_step(model, run).peak


def planned_parts(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if n and (shown := rkmate.applied(m)) is not None
            and shown.has_plan]


MODELS: dict[str, tuple[Callable[[], nn.Module], Step, float, list[str]]] = {
    "layer drop": (lambda: Stack([Layer() for _ in range(6)], drop=0.3), plainly, 0.5,
                   [f"layers.{k}" for k in range(6)]),
    "draws of numpy": (lambda: Stack([Layer() for _ in range(4)], numpy=True), plainly, 0.5,
                       [f"layers.{k}" for k in range(4)]),
    "one layer looks at values": (lambda: Stack([Layer(), Layer(), Looking(), Layer()]), plainly, 0.7,
                                  ["layers.0", "layers.1", "layers.3"]),
    "one layer, several calls": (lambda: Shared([Layer()]), plainly, 0.6, ["layers.0"]),
    "layers that shrink": (lambda: Halving([Layer() for _ in range(4)]), plainly, 0.65,
                           [f"layers.{k}" for k in range(4)]),
    "inputs that others use": (lambda: Stack([Attending(Twice()) for _ in range(3)]), plainly, 0.8,
                               [f"layers.{k}.inner" for k in range(3)]),
    "checkpointed layers are left out": (lambda: Stack([Checkpointed(32, 16) for _ in range(4)], drop=0.3),
                                         plainly, 0.9, [f"layers.{k}" for k in range(4)]),
    "several backwards of one call": (lambda: Implicit([Looking(), *(Layer() for _ in range(4))]), plainly,
                                      0.7, [f"layers.{k}" for k in range(1, 5)]),
    "a sparse buffer": (Mixed, plainly, 0.7, [f"layers.{k}" for k in range(3)]),
    "a sparse gradient": (Words, plainly, 0.6, [f"layers.{k}" for k in range(4)]),
    "layers that hand on results": (lambda: Handing([Numbered(k) for k in range(4)]), plainly, 0.7,
                                    [f"layers.{k}" for k in range(4)]),
    "methods": (Coder, by_methods, 0.6, ["encoder", "decoder"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_bits_and_budget_of_the_whole_step(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, step, share, expected = MODELS[name]
    model = make()
    plain = copy.deepcopy(model)
    whole = max(peak(plain, step, seed) for seed in range(6))
    plain = copy.deepcopy(model)
    with caplog.at_level(logging.WARNING, "rkmate"):
        applied(model, int(share * whole))
        same_steps(plain, model, step, range(8))
    assert planned_parts(model) == expected
    assert "is planned by parts: " in caplog.text and "of the budget of" in caplog.text
    assert max(peak(model, step, seed) for seed in range(6)) <= int(share * whole)


def test_a_fraction_is_one_of_the_peak_that_was_measured(caplog: pytest.LogCaptureFixture) -> None:
    """Where the largest layer's backward runs, the others hold nothing any more."""
    make, step, *_ = MODELS["layers that shrink"]
    model = make()
    whole = peak(copy.deepcopy(model), step, 0)
    with caplog.at_level(logging.WARNING, "rkmate"):
        applied(model, 0.8)
        train(model, step, 0)
        train(model, step, 1)
    found = re.search(r"of the budget of ([\d,]+)", caplog.text)
    assert found is not None and int(found[1].replace(",", "")) <= 0.802 * whole
    assert peak(model, step, 0) <= 0.802 * whole


@pytest.mark.parametrize("rates", [False, True])
def test_layers_that_differ_in_attributes_are_planned_once(rates: bool,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    found, made = [], []
    search, make = one_budget.ways_of, plan_cache.make_plan
    monkeypatch.setattr(one_budget, "ways_of", lambda *a, **k: (found.append(a), search(*a, **k))[1])
    monkeypatch.setattr(plan_cache, "make_plan", lambda *a: (made.append(a), make(*a))[1])
    model = Stack([Numbered(k + 1) for k in range(4)], numpy=True)
    for k, layer in enumerate(model.layers if rates else ()):
        layer.drop.p = 0.1 * k + 0.1            # read by the forward: as much to compute, other numbers
    plain, whole = copy.deepcopy(model), peak(copy.deepcopy(model), plainly, 0)
    applied(model, int(0.6 * whole))
    same_steps(plain, model, plainly, range(3))
    assert len(found) == 1 and len(made) == (3 if rates else 0)
    assert peak(model, plainly, 0) <= int(0.6 * whole)


BY_PARTS = options_of(costs="analytic", progress=False, parts="auto")


def _in_torchscript(model: Stack) -> None:
    model.begin = torch.jit.script(model.begin)


def _with_a_sparse_buffer(model: Stack) -> None:
    model.begin.register_buffer("edges", torch.eye(4).to_sparse())


def _with_a_backward_hook(model: Stack) -> None:
    model.begin.register_full_backward_hook(lambda *_: None)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is", "ignore:Full backward hook")
@pytest.mark.parametrize(("change", "sampled"), [
    (_in_torchscript, False), (_with_a_sparse_buffer, True), (_with_a_backward_hook, False)])
def test_parts_beside_a_module_that_no_plan_has(change: Callable[[Stack], None], sampled: bool) -> None:
    model = Stack([Layer() for _ in range(2)])
    plain = copy.deepcopy(model)
    change(model)
    if sampled:
        rkmate.apply(model, (X, Y), budget=10**8, **BY_PARTS)
    else:
        applied(model, 10**8)
    same_steps(plain, model, plainly)
    assert planned_parts(model) == ["layers.0", "layers.1"]


def test_an_unused_branch_is_planned_when_it_is_used() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Sequential(Layer(), Layer())
            self.right = nn.Sequential(Layer(wide=6), Layer(wide=6))

        def encode(self, x: torch.Tensor, right: bool) -> torch.Tensor:
            out: torch.Tensor = (self.right if right else self.left)(x)
            return out

    model: Any = Two()
    plain = copy.deepcopy(model)
    applied(model, 10**8)
    for right in (False, False, True, True, True, False):
        same_steps(plain, model, lambda m, right=right: m.encode(X, right).sum(), range(1))
    assert planned_parts(model) == ["left", "right"]


def test_room_is_left_for_layers_that_the_observed_step_left_out() -> None:
    model = Stack([Layer() for _ in range(6)], drop=0.3)
    plain = copy.deepcopy(model)
    peaks = {seed: peak(copy.deepcopy(plain), plainly, seed) for seed in range(12)}
    seeds = sorted(peaks, key=peaks.__getitem__)
    seeds = [s for s in seeds if peaks[s] > 0.45 * peaks[seeds[-1]]]
    budget = int(1.02 * peaks[seeds[0]])            # the step that leaves out most would fit as it is
    assert budget < 0.9 * peaks[seeds[-1]]
    applied(model, budget)
    for seed in seeds[:2]:
        train(model, plainly, seed)
    assert planned_parts(model)
    assert max(peak(model, plainly, seed) for seed in seeds) <= budget


def _in_turn(model: Stack, budget: float, steps: Sequence[Step], **options: Any) -> list[float]:
    """Train with two steps in turn, within a share of the larger one's bytes. Returns what each takes then,
    as shares of the budget."""
    limit = int(budget * max(peak(copy.deepcopy(model), step, 1) for step in steps))
    applied(model, limit, **options)
    for k in range(12):
        train(model, steps[k % 2], k)
    return [peak(model, step, k) / limit for k, step in enumerate(steps)]


def test_a_layer_without_a_plan_that_first_steps_leave_out_is_found_in_later_ones() -> None:
    model = Stack([Layer() for _ in range(6)])
    every = [*model.layers]

    def step(count: int) -> Step:
        def run(m: Any) -> torch.Tensor:
            m.layers = nn.ModuleList([*m.layers, *every[len(m.layers):]][:count])
            return plainly(m)
        return run

    assert max(_in_turn(model, 0.7, [step(5), step(6)], parts=("layers.[0-4]",))) <= 1


def test_two_lengths_in_turn_keep_to_a_budget() -> None:
    def step(rows: int) -> Step:
        return lambda m: m(X[:rows], Y[:rows])

    model = Stack([Looking(), *(Layer() for _ in range(6))])
    assert max(_in_turn(model, 0.9, [step(96), step(128)])) <= 1


class Slices(Stack):
    """Layers that are called with more or fewer rows."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        for k, layer in enumerate(self.layers):
            rows = len(x) >> k
            x = torch.cat([layer(x[:rows]), x[rows:]])
            if x.abs().amax() > 1e9:
                x = x.clamp(-1, 1)
        return F.cross_entropy(self.head(x), y)


def test_calls_of_other_sizes_count_as_what_they_save() -> None:
    model = Slices([Layer() for _ in range(4)])
    plain = copy.deepcopy(model)
    budget = int(0.8 * peak(copy.deepcopy(plain), plainly, 0))
    applied(model, budget)
    same_steps(plain, model, plainly)
    assert planned_parts(model) == [f"layers.{k}" for k in range(4)]
    assert peak(model, plainly, 0) <= budget


class Grows(Stack):
    """Layers that are called with other rows in each step."""

    times = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.times += 1
        x = self.begin(x)
        for k, layer in enumerate(self.layers):
            rows = len(x) // 4 + 3 * ((5 * self.times + 3 * k) % 7)
            x = torch.cat([layer(x[:rows]), x[rows:]])
            if x.abs().amax() > 1e9:
                x = x.clamp(-1, 1)
        return F.cross_entropy(self.head(x), y)


@pytest.mark.filterwarnings("ignore:.*differs from the planned ones", "ignore:a step of Grows")
def test_calls_without_room_leave_the_others_their_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Grows([Layer() for _ in range(4)])
    plain = copy.deepcopy(model)
    budget = int(0.8 * max(peak(plain, plainly, seed) for seed in range(7)))
    applied(model, budget)
    observed: list[Parts] = []
    plan = Parts._plan
    monkeypatch.setattr(Parts, "_plan", lambda parts, step: observed.append(parts) or plan(parts, step))
    monkeypatch.setattr("rkmate.parts.followed_parts.REFUSED", 1)

    def all_sizes() -> None:
        for seed in range(7):
            train(model, plainly, seed)

    with pytest.warns(rkmate.RkmateWarning, match=f"takes .*bytes, and its budget is {budget:,}: calls"):
        all_sizes()
    assert len(observed) == 2
    assert planned_parts(model) == [f"layers.{k}" for k in range(4)]
    same_steps(plain, model, plainly)


class Around(Looking):
    """A layer that looks at its values, with a part that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.inner(x))


class Without(Stack):
    """Layers, one of which may be left out."""

    left_out = -1

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = x if k == self.left_out else layer(x)
        return F.cross_entropy(self.head(x), y)


@pytest.mark.parametrize("first", [-1, 1])
def test_the_smallest_budget_of_an_error_has_room_for_layers_that_dropped_out(first: int) -> None:
    model = Without([Around() for _ in range(3)])

    def step(left_out: int, budget: int) -> nn.Module:
        again = copy.deepcopy(model)
        again.left_out = left_out
        applied(again, budget)
        for _ in range(2):
            train(again, plainly, 0)
        return again

    with pytest.raises(rkmate.InfeasibleBudget) as raised:
        step(first, 1000)
    assert ("with room for layers that were not called in this step" in str(raised.value)) is (first >= 0)
    for left_out in (-1, 0) if first >= 0 else (0,):
        assert peak(step(left_out, raised.value.minimum_bytes), plainly, 0) <= raised.value.minimum_bytes


class Levels(Stack):
    """One layer that is called with more or fewer rows."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        for k in (0, 1, 2, 1):
            rows = len(x) >> k
            x = torch.cat([self.layers[0](x[:rows]), x[rows:]])
            if x.abs().amax() > 1e9:
                x = x.clamp(-1, 1)
        return F.cross_entropy(self.head(x), y)


@pytest.mark.parametrize("most", [4, 2])
def test_each_size_of_a_module_s_calls_has_its_plan(most: int, caplog: pytest.LogCaptureFixture,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rkmate.parts.by_parts.SIZES", most)
    model = Levels([Layer()])
    plain = copy.deepcopy(model)
    budget = int(0.75 * peak(copy.deepcopy(plain), plainly, 0))
    applied(model, budget)
    with caplog.at_level(logging.WARNING, "rkmate"):
        same_steps(plain, model, plainly)
    assert "planned by parts: layers.0 (Layer). " in caplog.text
    assert ("a call differs from the planned ones" in caplog.text) is (most < 3)
    assert peak(model, plainly, 0) <= budget


def test_everything_is_taken_away_again() -> None:
    model = Stack([Layer() for _ in range(4)], drop=0.3)
    keys, before = list(model.state_dict()), {n: dict(m.__dict__) for n, m in model.named_modules()}
    plain = copy.deepcopy(model)
    applied(model, 0.6)
    same_steps(plain, model, plainly)
    assert planned_parts(model)
    assert list(model.state_dict()) == keys
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (rkmate.remove(copy.deepcopy(model)), torch.load(file, weights_only=False)):
        assert not any(rkmate.applied(m) for m in other.modules())
        assert not any(isinstance(m.__dict__.get("_compiled_call_impl"), Watch) for m in other.modules())
        torch.manual_seed(3)
        expected = plainly(plain)
        torch.manual_seed(3)
        assert torch.equal(plainly(other), expected)
    rkmate.remove(model)
    assert {n: {k: v for k, v in m.__dict__.items() if k != "_compiled_call_impl"}
            for n, m in model.named_modules()} == before
    assert not any(m.__dict__.get("_compiled_call_impl") for m in model.modules())


def test_copies_are_planned_by_parts_again() -> None:
    model = Stack([Layer() for _ in range(4)], drop=0.3)
    plain, whole = copy.deepcopy(model), peak(copy.deepcopy(model), plainly, 0)
    applied(model, int(0.6 * whole))
    same_steps(plain, model, plainly)
    other, part = copy.deepcopy(model), copy.deepcopy(model.layers[0])
    assert rkmate.applied(part) is None and not planned_parts(other)
    model.zero_grad()
    other.zero_grad()
    same_steps(model, other, plainly)
    assert len(planned_parts(other)) == len(planned_parts(model)) == 4
    assert peak(other, plainly, 0) <= 0.6 * whole
    assert not set(map(id, planned_parts(other))) & set(map(id, planned_parts(model)))


def test_where_nothing_can_be_planned_the_error_stays_and_nothing_is_changed() -> None:
    class Nothing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line, self.norm = nn.Linear(32, 16), nn.BatchNorm1d(16)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x = F.dropout(self.norm(self.line(x)))
            return F.cross_entropy(x if x.sum() > 0 else -x, y)

    model = Nothing()
    plain = copy.deepcopy(model)
    applied(model, 0.6)
    state = torch.get_rng_state()
    with pytest.raises(rkmate.CaptureError, match="A value of a tensor decides"):
        plainly(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))
    assert all(m.training for m in model.modules())
    assert rkmate.applied(model) is not None
    assert not planned_parts(model)


def test_a_budget_that_the_rest_exceeds_names_the_smallest_one() -> None:
    model = Stack([Looking(), *(Layer() for _ in range(4))], drop=0.3)
    applied(model, 1)
    train(model, plainly, 0)
    with pytest.raises(rkmate.InfeasibleBudget, match="Not planned: Looking: cannot be captured") as error:
        train(model, plainly, 1)
    least = error.value.minimum_bytes
    rkmate.remove(model)
    applied(model, least)
    for seed in range(3):
        train(model, plainly, seed)
    assert planned_parts(model)


class Looping(Stack):
    """A cell that the rest of the step calls in a loop."""

    def __init__(self) -> None:
        super().__init__([Layer() for _ in range(2)], numpy=True)
        self.cell = nn.Linear(512, 512)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = x.repeat(1, 16)
        for _ in range(4):
            h = torch.tanh(F.linear(h, self.cell.weight, self.cell.bias))
        return super().forward(h[:, :32], y)


def test_gradients_of_a_cell_in_a_loop_wait_in_the_rest() -> None:
    """Gradients of a parameter that is used several times are added up, and wait for the last one."""
    model = Looping()
    whole = peak(copy.deepcopy(model), plainly, 0)
    applied(model, 1)
    train(model, plainly, 0)
    with pytest.raises(rkmate.InfeasibleBudget) as error:
        train(model, plainly, 1)
    assert 3 * model.cell.weight.nbytes < error.value.minimum_bytes <= 1.02 * whole


class Codes(Stack):
    """Layers of which the first ones only choose rows of a table: their graph goes before the others run."""

    def __init__(self) -> None:
        super().__init__([Layer(wide=8) for _ in range(8)])
        self.table = nn.Embedding(32, 32)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        for layer in self.layers[:4]:
            x = layer(x)
        x = self.table(x.argmax(-1))
        for layer in self.layers[4:] if x.abs().amax() < 1e9 else ():
            x = layer(x)
        return F.cross_entropy(self.head(x), y)


def test_what_the_forward_drops_is_dropped_while_it_is_observed() -> None:
    model = Codes()
    plain, whole = copy.deepcopy(model), peak(copy.deepcopy(model), plainly, 0)
    applied(model, 0.7)
    assert peak(model, plainly, 0) <= 1.01 * whole
    same_steps(plain, model, plainly)
    assert planned_parts(model) and peak(model, plainly, 0) <= 0.7 * whole


class Widening(nn.Module):
    """Convolutions that widen, in front of a look at values."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(),
                                  nn.Conv2d(16, 64, 3, padding=1), nn.ReLU(), nn.AvgPool2d(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        return x.square().mean() if x.abs().amax() < 1e9 else x.mean()


@pytest.mark.parametrize("tiles", ["auto", "never"])
def test_parts_run_in_tiles_where_nothing_else_fits(tiles: Any) -> None:
    def step(module: nn.Module) -> torch.Tensor:
        loss: torch.Tensor = module(images)
        return loss

    model, images = Widening(), torch.randn(8, 3, 16, 16)
    plain = copy.deepcopy(model)
    budget = int(0.7 * peak(plain, step, 0))
    rkmate.apply(model, budget=budget, settings=rkmate.Settings(tiles=tiles), progress=False)
    train(model, step, 0)
    if tiles == "never":
        with pytest.raises(rkmate.InfeasibleBudget, match="planned by parts"):
            train(model, step, 1)
        return
    with pytest.warns(rkmate.RkmateWarning, match=r"nothing fits in the budget of Widening .* run in tiles"):
        train(model, step, 1)
    assert peak(model, step, 2) <= budget
    expected, found = train(plain, step, 3), train(model, step, 3)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def test_parts_that_are_planned_in_a_measured_step_count_on_estimates() -> None:
    model = Stack([Layer() for _ in range(2)], numpy=True)
    rkmate.apply(model, budget=10**7, progress=False)
    with pytest.warns(rkmate.RkmateWarning, match="Layer cannot be measured now, and its plan counts on est"):
        measured = measure_step(model, lambda: plainly(model).backward())
    assert 0 < measured.peak < 10**7
    planned = [rkmate.applied(layer) for layer in model.layers]
    assert all(p is not None and p.has_plan for p in planned)


def test_plans_of_frozen_parts_hold_inputs_and_let_go_of_outputs() -> None:
    """Other modules have made the inputs, and save nothing of the outputs."""
    model = Frozen()
    plain = copy.deepcopy(model)
    whole = peak(copy.deepcopy(model), plainly, 0)
    with pytest.raises(rkmate.InfeasibleBudget) as error:
        same_steps(plain, applied(copy.deepcopy(model), int(0.5 * whole), tiles="never"), plainly)
    least = error.value.minimum_bytes
    assert least < 0.6 * whole
    applied(model, least, tiles="never")
    same_steps(plain, model, plainly)
    assert 0.94 * least <= peak(model, plainly, 0) <= least


class Cell(nn.Module):
    """A cell with two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.norm = nn.Linear(32, 32), nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.tanh(0.3 * self.inner(z) + self.outer(x)))


class Equilibrium(nn.Module):
    """A fixed point of a cell. A hook solves for its gradient: no observer sees what that takes."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.cell, self.head = nn.Linear(32, 32), Cell(), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(4):
                z = self.cell(z, x)
        z = self.cell(z, x)
        before = z.clone().detach().requires_grad_()
        after = self.cell(before, x.detach())

        def solve(grad: torch.Tensor) -> torch.Tensor:
            found = grad
            for _ in range(4):
                found = torch.autograd.grad(after, before, found, retain_graph=True)[0] + grad
            return found

        z.register_hook(solve)
        return F.cross_entropy(self.head(z), y)


def test_a_step_that_needs_no_plans_by_its_estimate_is_measured() -> None:
    model = Equilibrium()
    plain = copy.deepcopy(model)
    taken = peak(copy.deepcopy(model), plainly, 0)
    applied(model, budget := int(0.9 * taken))
    figures = f"takes {taken:,} bytes, and its budget is {budget:,}"
    with pytest.warns(rkmate.RkmateWarning, match=figures) as said:
        same_steps(plain, model, plainly)
    assert len(said) == 1 and not planned_parts(model)


@pytest.mark.parametrize("share", [0.7, 0.6])
def test_outputs_that_are_kept_later_have_room_or_a_warning(share: float) -> None:
    model = Frozen()
    plain = copy.deepcopy(model)
    budget = int(share * peak(copy.deepcopy(model), plainly, 0))
    applied(model, budget, tiles="never")
    same_steps(plain, model, plainly)
    assert peak(model, plainly, 0) <= budget
    model.keeps = True
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        same_steps(plain, model, plainly, range(3 * LATER))
    over = [str(w.message) for w in said if f"its budget is {budget:,}: " in str(w.message)]
    taken = peak(model, plainly, 0)
    assert not over if taken <= budget else len(over) == 1 and f"takes {taken:,} bytes" in over[0]


class Again(torch.autograd.Function):
    """Layers whose backward computes them again, and runs a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layers: nn.Module) -> torch.Tensor:
        ctx.layers = layers
        ctx.save_for_backward(x)
        return layers(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layers(x).backward(grad)
        return x.grad, None


class Few(Layer):
    """A layer that reads a few of the rows that it gets."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[:32] * 2)


class Reversible(Stack):
    def __init__(self) -> None:
        super().__init__([Layer(wide=1), nn.Sequential(*(nn.Linear(32, 32) for _ in range(24))), Few()])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.layers[2](Again.apply(self.layers[0](self.begin(x)), self.layers[1]).repeat(4, 1))
        return F.cross_entropy(self.head(x), y[:32])


@pytest.mark.parametrize("share", [1.0, 0.97])
def test_a_step_as_it_is_is_measured_before_a_budget_near_its_own_is_refused(share: float) -> None:
    """Gradients that a backward inside of the backward adds up are in no budget, and an argument that only a
    plan would hold is none of the step as it is."""
    model = Reversible()
    plain, whole = copy.deepcopy(model), peak(copy.deepcopy(model), plainly, 0)
    applied(model, int(share * whole))
    if share < 1:
        with pytest.raises(rkmate.InfeasibleBudget) as error:
            same_steps(plain, model, plainly)
        assert 0.99 * whole < error.value.minimum_bytes <= whole
    else:
        same_steps(plain, model, plainly, range(6))
        assert peak(model, plainly, 0) <= whole
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_what_the_rest_takes_in_its_backward_is_measured() -> None:
    model = Outside([Layer() for _ in range(4)], drop=0.3)
    model.scale = nn.Parameter(torch.ones(()))
    whole = max(peak(copy.deepcopy(model), plainly, seed) for seed in range(4))
    applied(model, whole // 2)
    train(model, plainly, 0)
    assert measure_peak(lambda: None).peak == 0      # what goes on between two calls gives way
    with pytest.raises(rkmate.InfeasibleBudget, match="the rest of the step takes") as error:
        train(model, plainly, 1)
    assert 0.9 * whole < error.value.minimum_bytes <= 1.02 * whole


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_step_with_plans_that_is_over_its_budget(share: float, caplog: pytest.LogCaptureFixture) -> None:
    model = Growing([Layer() for _ in range(4)], numpy=True)
    whole = peak(copy.deepcopy(model), plainly, 0)
    applied(model, int(0.7 * whole))
    for seed in range(2):
        train(model, plainly, seed)
    model.extra = int(share * whole)
    plain = rkmate.remove(copy.deepcopy(model))
    with caplog.at_level(logging.WARNING, "rkmate"), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        same_steps(plain, model, plainly, range(2, 7))
    assert caplog.text.count("the budget is shared out again") == 1
    found = peak(model, plainly, 7)
    assert [f"takes {found:,} bytes, and its budget is {int(0.7 * whole):,}" in str(w.message)
            for w in warned] == [True] * (share == 0.9)
    assert (found <= int(0.7 * whole)) == (share == 0.3)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_step_of_gradients_that_the_caller_asks_for_is_measured() -> None:
    """`torch.autograd.grad` adds nothing to parameters, and several backwards go through one call."""
    def gradients(model: nn.Module) -> None:
        loss = model(X, Y)
        for k in (1, 2):
            torch.autograd.grad(k * loss, [*model.parameters()], retain_graph=k < 2)

    model = Growing([Layer() for _ in range(4)], numpy=True)
    budget = int(0.7 * measure_step(copy.deepcopy(model), lambda: gradients(model)).peak)
    applied(model, budget)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for seed in range(8):
            model.extra = 2 * budget if seed > 1 else 0
            torch.manual_seed(seed)
            gradients(model)
            with torch.no_grad():               # an optimizer's step
                model.begin.weight.add_(0.0)
    assert sum(f"and its budget is {budget:,}" in str(w.message) for w in warned) == 1


@pytest.mark.gpu
def test_a_step_with_plans_that_is_over_its_budget_on_a_gpu() -> None:
    """The device's own thread runs the backward."""
    model = Growing([Layer() for _ in range(4)], drop=0.3).cuda()
    x, y = X.cuda(), Y.cuda()
    applied(model, 0.9)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for seed in range(8):
            torch.manual_seed(seed)
            model.zero_grad()
            model(x, y).backward()
            model.extra = 2**24 if seed > 1 else 0
    assert planned_parts(model)
    assert sum("planned by parts, takes" in str(w.message) for w in warned) == 1


@pytest.mark.filterwarnings("ignore:.*create_graph:rkmate.RkmateWarning")
@pytest.mark.parametrize(("step", "share"), [(penalised, 0.9), (against_each_other, 0.6)])
def test_a_step_of_several_backwards(step: Step, share: float) -> None:
    """Results of a call that wait for a later backward belong to the same step."""
    model = Coder()
    plain = copy.deepcopy(model)
    whole = max(peak(plain, step, seed) for seed in range(2))
    plain = copy.deepcopy(model)
    applied(model, int(share * whole))
    for seed in range(3):
        expected, found = train(plain, step, seed), train(model, step, seed)
        for name in ("loss", "draws", *(n for n, _ in model.named_parameters())):
            torch.testing.assert_close(found[name], expected[name])
    assert planned_parts(model) == ["encoder", "decoder"]
    assert step is penalised or max(peak(model, step, seed) for seed in range(2)) <= int(share * whole)


def test_a_result_that_several_parts_take() -> None:
    """Gradients are added up in the order of eager mode, and no call is said to be too many."""
    model = nn.ModuleDict({n: nn.Sequential(Layer(), Layer()) for n in ("there", "back", "judge")})
    plain = copy.deepcopy(model)
    whole = peak(copy.deepcopy(model), in_a_cycle, 0)
    applied(model, int(0.8 * whole))
    same_steps(plain, model, in_a_cycle)
    assert planned_parts(model) == ["there", "back", "judge"]
    assert peak(model, in_a_cycle, 4) <= int(0.8 * whole)


def test_several_backwards_of_a_step_by_methods() -> None:
    """The weights of two losses are made of their gradients."""
    def weighted(model: Any) -> torch.Tensor:
        made, first = model.decode(model.encode(X)), model.encoder[0].up.weight
        losses = F.mse_loss(made, X), made.square().mean()
        one, other = (torch.autograd.grad(x, first, retain_graph=True)[0].norm() for x in losses)
        return losses[0] + (one / other).detach() * losses[1]

    model = Coder()
    plain = copy.deepcopy(model)
    whole = peak(copy.deepcopy(model), weighted, 0)
    applied(model, int(0.8 * whole))
    same_steps(plain, model, weighted)
    assert planned_parts(model)
    assert peak(model, weighted, 4) <= int(0.8 * whole)


def test_named_parts_and_never() -> None:
    model = Stack([Layer() for _ in range(4)])
    plain = copy.deepcopy(model)
    applied(model, 0.8, parts=("layers.[12]",))
    same_steps(plain, model, plainly)
    assert planned_parts(model) == ["layers.1", "layers.2"]
    with pytest.raises(rkmate.ArgumentError, match="no such submodule"):
        applied(model, 0.8, parts="blocks.*")
    assert planned_parts(model) == ["layers.1", "layers.2"]     # the error takes nothing away
    with pytest.raises(rkmate.ArgumentError, match="names of submodules or patterns"):
        rkmate.Settings(parts=3)  # type: ignore[arg-type]
    dropping = applied(Stack([Layer()], drop=0.3), 0.8, parts="never")
    with pytest.raises(rkmate.CaptureError, match="A random number decides"):
        plainly(dropping)


def test_gradients_of_a_part_keep_their_layouts() -> None:
    model = Stack([Attending(Convolving()) for _ in range(2)])
    plain = copy.deepcopy(model)
    applied(model, 10**9, parts="layers.*.inner")
    same_steps(plain, model, plainly)
    assert planned_parts(model) == ["layers.0.inner", "layers.1.inner"]


def test_wrap_names_the_way_out() -> None:
    model = Stack([Layer()], drop=0.3)
    with pytest.raises(rkmate.CaptureError, match=r'settings=rkmate.Settings\(parts="auto"\), plans'):
        rkmate.wrap(model, (X, Y), budget=0.8, progress=False)
    with pytest.raises(rkmate.ArgumentError, match="RunSettings has lengths"):
        rkmate.wrap(model, (X, Y), budget=0.8, progress=False, settings=rkmate.Settings(
            parts="auto", run=rkmate.RunSettings(lengths=(64, 128))))


@pytest.mark.parametrize("copied", [False, True], ids=["itself", "copy"])
def test_a_wrapped_module_is_planned_by_parts(copied: bool) -> None:
    model = Stack([Layer(), Layer(), Looking(), Layer()])
    plain = copy.deepcopy(model)
    whole = max(peak(copy.deepcopy(plain), plainly, seed) for seed in range(3))
    wrapped: Any = rkmate.wrap(model, (X, Y), budget=int(0.7 * whole), **BY_PARTS)
    wrapped = copy.deepcopy(wrapped) if copied else wrapped
    assert list(inspect.signature(type(wrapped).forward).parameters) == ["self", "x", "y"]
    same_steps(plain, wrapped, plainly)
    assert planned_parts(wrapped) == ["layers.0", "layers.1", "layers.3"]
    assert not wrapped.has_plan
    with pytest.raises(rkmate.ArgumentError, match="planned by parts"):
        _ = wrapped.plan
    assert max(peak(wrapped, plainly, seed) for seed in range(3)) <= int(0.7 * whole)


def test_a_wrapped_module_told_of_parts_is_planned_as_a_whole_where_it_can_be() -> None:
    model = Stack([Layer() for _ in range(4)])
    plain = copy.deepcopy(model)
    wrapped = rkmate.wrap(model, (X, Y), budget=0.7, **BY_PARTS)
    assert wrapped.has_plan and wrapped.plan.peak_bytes <= wrapped.plan.budget_bytes
    same_steps(plain, wrapped, plainly)
    assert planned_parts(wrapped.original) == []


def test_room_is_shared_out_by_what_gains_most() -> None:
    lean, fat = Way(2.0, 10, 5), Way(1.0, 30, 2)
    items = [Item([lean, fat]), Item([Way(5.0, 10, 5), Way(1.0, 30, 2)])]
    assert smallest_limit(items) == 25
    assert share_out(items, 24) is None
    found = share_out(items, 45)
    assert found is not None
    assert (found.ways, found.saved, found.extra, found.peak) == ((0, 1), 40, 5, 45)
    assert share_out(items, 45, beside=6) is not None
    assert share_out(items, 45, beside=6).ways == (0, 0)  # type: ignore[union-attr]
    # While the first one runs, which takes much, the last one holds nothing.
    items, in_turn = [Item([Way(2.0, 10, 60)]), Item([lean, fat])], [
        Moment(0, {0: 1}, 0), Moment(20, {0: 1, 1: 1}, 1)]
    assert (smallest_limit(items), smallest_limit(items, 0, in_turn)) == (80, 70)
    found = share_out(items, 70, 0, in_turn)
    assert found is not None
    assert (found.ways, found.left) == ((0, 1), 0)
    best = share_out([Item([lean, fat], calls=2)], 62)
    assert best is not None
    assert (best.ways, best.seconds) == ((1,), 2.0)
