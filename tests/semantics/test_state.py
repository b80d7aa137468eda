"""Buffers that the forward writes, and Python state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import rkmate
from tests.capturing import captured_once
from tests.semantics.steps import Tower, assert_same_gradients, planned, tightest


class Averages(nn.Module):
    """Keeps a moving average in a buffer, and uses the one from before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.layer(x)) - self.mean
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        self.steps.add_(1)
        return y.sin()


class Reassigns(Averages):
    """The same, with buffers that are made anew."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.layer(x)) - self.mean
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        self.steps = self.steps + 1
        return y.sin()


class Momentum(nn.Module):
    """Compares with a slow copy of a network, whose parameters follow the network's in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fast = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.slow = copy.deepcopy(self.fast).requires_grad_(False)

    def follow(self, slow: nn.Parameter, fast: nn.Parameter) -> None:
        slow.data = slow.data * 0.9 + fast.data * 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
                self.follow(slow, fast)
            y = self.slow(x)
        return self.fast(x) * y


def _normalised(**options: object) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, **options), nn.ReLU(), nn.Linear(8, 8),
                         nn.BatchNorm1d(8, **options), nn.Tanh())


MODELS = {
    "batch norm": _normalised,
    "cumulative average": lambda: _normalised(momentum=None),
    "no running statistics": lambda: _normalised(track_running_stats=False),
    "no affine": lambda: _normalised(affine=False),
    "moving average": Averages,
    "moving average, reassigned": Reassigns,
    "slow copy": Momentum,
    "spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Tanh()),
    "old spectral norm": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Tanh()),
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8)), nn.Tanh()),
    "orthogonal": lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(8, 8)), nn.Tanh()),
}


@pytest.mark.parametrize("kind", MODELS)
def test_buffers_move_once_a_step(kind: str) -> None:
    """Whether the budget is the step's own peak or the smallest."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    original = copy.deepcopy(model)
    x = torch.randn(16, 8)
    with captured_once():
        modules = planned(model, x), tightest(model, x)
    for name, value in model.state_dict().items():
        assert torch.equal(value, original.state_dict()[name]), f"wrapping moved {name}"
    for module in modules:
        model.load_state_dict(original.state_dict())
        model.zero_grad()
        _train_three_steps(kind, copy.deepcopy(original), module)


def _train_three_steps(kind: str, twin: nn.Module, module: nn.Module) -> None:
    for step in range(3):
        batch = torch.randn(16, 8)
        for m in (twin, module):
            m(batch).pow(2).sum().backward()
        for (name, a), (other, b) in zip(twin.named_buffers(), module.named_buffers(), strict=True):
            assert name == other
            if kind == "cumulative average":        # the kernel rounds the average once, not twice
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
            else:
                assert torch.equal(a, b), f"step {step}: {name}"
        for (name, a), (_, b) in zip(twin.named_parameters(), module.named_parameters(), strict=True):
            assert torch.equal(a, b), f"step {step}: {name}"
            assert not a.requires_grad or torch.equal(a.grad, b.grad), f"step {step}: gradient of {name}"


def _shared(model: Momentum, slow: nn.Parameter, fast: nn.Parameter) -> None:
    slow.data = fast.data


def _kept(model: Momentum, slow: nn.Parameter, fast: nn.Parameter) -> None:
    before = slow.data
    slow.data = fast.data + before
    model.mean = before.mean()


def _trained(model: Momentum, slow: nn.Parameter, fast: nn.Parameter) -> None:
    fast.data = slow.data * 0.5


@pytest.mark.parametrize("follow", [_shared, _kept, _trained])
def test_data_whose_memory_others_share_is_not_assigned(follow: Callable[..., None],
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Momentum, "follow", follow)
    with pytest.raises(rkmate.CaptureError, match=r"assigns to the \.data of a tensor"):
        planned(Momentum(), torch.randn(4, 8))


def test_a_batch_norm_that_runs_twice_counts_once() -> None:
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())]
    model, x = nn.Sequential(*layers), torch.randn(64, 8)
    twin, module = copy.deepcopy(model), tightest(model, x)
    again = {module.plan.graph.computations[i].operation for i in module.plan.schedule.recomputed()}
    assert any("batch_norm" in operation for operation in again)
    for m in (twin, module):
        m(x).pow(2).sum().backward()
    for a, b in zip(twin.buffers(), model.buffers(), strict=True):
        assert torch.equal(a, b)


def test_batch_norm_in_two_forwards_before_a_backward() -> None:
    torch.manual_seed(0)
    model = _normalised()
    twin = copy.deepcopy(model)
    x = torch.randn(16, 8)
    module = tightest(model, x, calls=2)
    for m in (twin, module):
        (m(x).sum() + m(x + 1).pow(2).sum()).backward()
    for a, b in zip(twin.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert torch.equal(twin[1].running_mean, model[1].running_mean)


def test_frozen_batch_norm_keeps_its_statistics() -> None:
    model = _normalised()
    model[1].eval()
    before = model[1].running_mean.clone()
    x = torch.randn(16, 8)
    module = planned(model, x)
    assert_same_gradients(model, module, lambda run: run(x).pow(2).sum())
    assert torch.equal(before, model[1].running_mean)


@pytest.mark.parametrize("replace", [lambda t: torch.cat([t, t]), lambda t: t.double(), lambda t: None])
def test_a_buffer_that_becomes_another_kind_of_tensor_is_refused(replace: object) -> None:
    class Replaces(Averages):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = replace(self.mean)  # type: ignore[operator]
            return self.layer(x)

    model = Replaces()
    before = model.mean
    with pytest.raises(rkmate.CaptureError, match="replaces the buffer 'mean'"):
        planned(model, torch.randn(2, 8))
    assert model.mean is before


def test_a_table_that_the_first_call_makes_is_there_after_a_call() -> None:
    class Tabled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.register_buffer("table", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(self.table) != len(x):
                self.table = torch.arange(float(len(x)))
            return super().forward(x) * self.table[:, None]

    model, x = Tabled(), torch.randn(4, 8)
    with pytest.raises(rkmate.CaptureError, match="call the model on such inputs before it is wrapped"):
        planned(model, x)
    model(x)
    assert_same_gradients(model, planned(model, x), lambda run: run(x).pow(2).sum())


class Counts(nn.Module):
    def __init__(self, used: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.calls = 0
        self.used = used

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x) * (self.calls if self.used else 1)


def test_a_counter_that_nobody_reads_is_harmless() -> None:
    model, x = Counts(used=False), torch.randn(2, 8)
    module = planned(model, x)
    assert model.calls == 0
    assert_same_gradients(model, lambda x: module(x), lambda run: run(x).sum())


def test_a_counter_that_decides_is_refused() -> None:
    model, x = Counts(used=True), torch.randn(2, 8)
    with pytest.raises(rkmate.CaptureError, match="assigns calls"):
        planned(model, x)
    assert model.calls == 0


class Settings:
    """What a model holds beside modules."""

    def __init__(self) -> None:
        self.kind: str | None = None
        self.calls = 0


class Completes(nn.Module):
    """Fills in its settings in the first forward, as libraries do."""

    def __init__(self, used: bool = False) -> None:
        super().__init__()
        self.layer, self.settings, self.used = nn.Linear(8, 8), Settings(), used

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.settings.kind is None:
            self.settings.kind = "plain"
        self.settings.calls += self.used
        return self.layer(x) * (2 if self.settings.kind == "plain" else 3) * (1 + self.settings.calls)


def test_settings_that_the_first_forward_completes() -> None:
    model, x = Completes(), torch.randn(2, 8)
    module = planned(model, x)
    for kind in ("plain", "plain", "other", "plain"):
        model.settings.kind = kind
        assert_same_gradients(model, module, lambda run: run(x).sum())
    assert len(module._plans) == 2
    # The next call finds its plan by identity, without a comparison of all attributes.
    keys = [k.attributes for k in module._plans.kept.signatures()]
    assert any(module._reader.read().attributes is k for k in keys)


def test_a_counter_in_an_object_is_refused() -> None:
    model = Completes(used=True)
    with pytest.raises(rkmate.CaptureError, match=r"assigns settings\.calls"):
        planned(model, torch.randn(2, 8))
    assert model.settings.calls == 0


def test_hooks_of_a_library_come_and_go() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0, attn_pdrop=0, embd_pdrop=0))
    i = torch.randint(0, 50, (2, 8))
    options = {"input_ids": i, "labels": i, "output_hidden_states": True}
    module = planned(model, kwargs=options)
    assert_same_gradients(model, module, lambda run: run(**options).loss)
    assert any(m._forward_hooks for m in model.modules())       # of the original's own forward
    assert_same_gradients(model, module, lambda run: run(**options).loss)
    assert len(module._plans) == 1


@pytest.mark.filterwarnings("ignore::rkmate.RkmateWarning")      # a call that leaves out attentions
@pytest.mark.parametrize(("by", "recorded"), [
    pytest.param("layer", {"output_hidden_states": True, "output_attentions": True},
                 id="layer-hidden states and attentions"),
    pytest.param("parts", {"output_hidden_states": [1, -1]}, id="parts-some hidden states")])
def test_outputs_of_planned_layers_that_a_library_records(by: str, recorded: dict[str, Any]) -> None:
    """A library's forward makes lists in each call that hooks of planned layers fill, and trains their
    tensors; a later call makes none."""
    transformers = pytest.importorskip("transformers")
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, attn_implementation="eager")).train())
        models[-1].model.norm.register_full_backward_hook(lambda *_: None)
    settings = rkmate.Settings(costs="analytic")
    layers = models[1].model.layers
    for module in (layers if by == "layer" else [models[1]]):
        rkmate.apply(module, budget=1 << 30, progress=False, settings=settings)
    i = torch.randint(0, 50, (2, 8))
    for step in range(4):
        found = []
        for model in models:
            model.zero_grad()
            out = model(input_ids=i, labels=i, **(recorded if step != 2 else {}))
            kept = [*(out.hidden_states or ()), *(out.attentions or ())]
            loss = out.loss + sum(t.square().mean() for t in kept if t is not None)
            loss.backward()
            found.append(([t is None for t in kept], [loss.detach(), *(p.grad for p in model.parameters())]))
        (places, plain), (mine, own) = found
        assert mine == places and bool(places) == (step != 2)
        assert torch.equal(own[0], plain[0])
        # A sum of three gradients may add up in another order.
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(own, plain, strict=True))
    assert all(rkmate.applied(layer) is not None for layer in layers)


class Keeps(nn.Linear):
    """Leaves what it computes in an attribute, before it reads it."""

    def __init__(self, *, there: bool = False) -> None:
        super().__init__(8, 8)
        if there:
            self.last = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = super().forward(x)
        self.pairs = [(self.last, self.last * 2)]
        return self.last.relu() + self.pairs[0][1]


class KeepsForLater(Keeps):
    """And reads in the next call what the first has left."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.last if hasattr(self, "last") else x
        return super().forward(x) + before


class KeepsOnce(Keeps):
    """And makes it in the first call only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last if hasattr(self, "last") else super().forward(x)


@pytest.mark.parametrize("there", [True, False])
def test_tensors_left_in_attributes(there: bool) -> None:
    model, x = Keeps(there=there), torch.randn(2, 8)
    before, twin = dict(model.__dict__), copy.deepcopy(model)
    module = planned(model, x)
    assert model.__dict__ == before
    for run in (twin, module):
        run(x).pow(2).sum().backward()
    assert torch.equal(model.weight.grad, twin.weight.grad)
    assert torch.equal(model.last, twin.last) and model.pairs[0][0] is model.last
    assert torch.equal(model.pairs[0][1], twin.pairs[0][1])


@pytest.mark.parametrize("make", [KeepsForLater, KeepsOnce], ids=["read later", "made once"])
def test_a_tensor_kept_in_an_attribute_is_refused(make: Callable[[], nn.Module]) -> None:
    model = make()
    before = dict(model.__dict__)
    with pytest.raises(rkmate.CaptureError, match="assigns last"):
        planned(model, torch.randn(2, 8))
    assert model.__dict__ == before


def test_another_value_of_an_attribute_is_another_plan() -> None:
    class Scaled(nn.Linear):
        scale = 1.0

        def __init__(self) -> None:
            super().__init__(8, 8)
            self.scale = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

    model, x = Scaled(), torch.randn(2, 8)
    module = planned(model, x)
    for value in (1.0, 3.0, 1.0, 0.5):
        module.scale = value
        assert model.scale == value
        assert_same_gradients(model, module, lambda run: run(x).sum())


def test_an_attribute_that_a_forward_asks_for_may_come_later() -> None:
    class Asking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (self.weighted() if hasattr(self, "center") else self.weighted() + 1)

        def weighted(self) -> float:
            return [float(getattr(self, "by", 1.0)) for _ in range(2)][1]

    model, x = Asking(8, 8), torch.randn(2, 8)
    plain = copy.deepcopy(model)
    rkmate.apply(model, budget=1.0, progress=False, settings=rkmate.Settings(costs="analytic"))
    plans = []
    for name, value in (("other", 0), ("by", 0.5), ("center", True), ("center", True)):
        assert torch.equal(model(x), plain(x))
        plans.append(rkmate.applied(model).plan)
        for m in (model, plain):
            setattr(m, name, value)
    assert plans[0] is plans[1] is not plans[2] is not plans[3]


@pytest.mark.parametrize("way", ["attribute", "argument"])
def test_numbers_that_change_in_each_call_are_warned_of(way: str) -> None:
    class Scaled(nn.Linear):
        scale = 1.0

        def forward(self, x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
            return super().forward(x) * self.scale * by

    model, x = Scaled(8, 8), torch.randn(2, 8)
    rkmate.apply(model, budget=1.0, progress=False, settings=rkmate.Settings(costs="analytic"))

    def steps() -> None:
        for k in range(1, 6):
            if way == "attribute":
                model.scale = 1 / k                 # the class has it before
            y = model(x, by=1 / k if way == "argument" else 1.0)
            assert torch.equal(y, nn.functional.linear(x, model.weight, model.bias) * (1 / k))
            y.sum().backward()

    with pytest.warns(rkmate.RkmateWarning, match="(scale|no tensor) changed before each of the latest"):
        steps()


def test_another_dropout_rate_is_another_plan() -> None:
    model, x = Tower(dropout=0.5), torch.randn(8, 16)
    module = planned(model, x)
    model.dropout.p = 0.1
    assert_same_gradients(model, module, lambda run: run(x).sum())


def test_old_weight_and_spectral_norm() -> None:
    x = torch.randn(4, 8)
    with pytest.warns(FutureWarning, match="deprecated"):
        model = torch.nn.utils.weight_norm(nn.Linear(8, 8))
    assert_same_gradients(model, planned(model, x), lambda run: run(x).pow(2).sum())


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("hook", [torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm,
                                  partial(prune.l1_unstructured, name="weight", amount=0.3)])
def test_weights_that_hooks_compute_are_read_between_steps(hook: Callable[[nn.Module], object]) -> None:
    """Such as by another round of pruning, which goes by the weights' sizes, or by a penalty on them."""
    x = torch.randn(4, 8)
    penalized = hook is not torch.nn.utils.spectral_norm    # which writes buffers: its forward runs only once

    def trained(wrap: Callable[[nn.Module], nn.Module]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        for layer in (model[0], model[2]):
            hook(layer)
        run, optimizer, seen = wrap(model), torch.optim.SGD(model.parameters(), lr=0.5), []
        for k in range(4):
            optimizer.zero_grad()
            loss = run(x).pow(2).sum() + (model[0].weight.abs().sum() if k > 1 and penalized else 0)
            loss.backward()
            optimizer.step()
            seen += [loss.detach(), model[0].weight.detach().clone(), model[2].weight.detach().clone()]
        if isinstance(hook, partial):
            hook(model[0])
        return [*seen, *model.state_dict().values()]

    expected = trained(lambda model: model)
    with pytest.warns(rkmate.RkmateWarning, match="not what this forward was planned for") if penalized \
            else nullcontext():
        actual = trained(lambda model: planned(model, x))
    assert all(map(torch.equal, expected, actual))


def test_pruned_weights() -> None:
    x = torch.randn(4, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    prune.random_unstructured(model[0], "weight", amount=0.3)
    prune.ln_structured(model[2], "weight", amount=0.25, n=2, dim=0)
    prune.random_unstructured(model[2], "weight", amount=0.3)       # two methods, one after the other
    module = planned(model, x)
    for _ in range(2):
        assert_same_gradients(model, module, lambda run: run(x).pow(2).sum())
    for layer in (model[0], model[2]):
        prune.remove(layer, "weight")
    before = module.plan
    assert_same_gradients(model, module, lambda run: run(x).pow(2).sum())
    assert module.plan is not before


class Points(nn.Module):
    """Assigns tensors that modules hold to attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.rand(4))
        self.register_buffer("anew", torch.rand(4))
        self.inner = nn.BatchNorm1d(4)
        self.table = torch.rand(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before = self.anew
        self.scale.mul_(0.9)
        self.anew = self.anew * 0.5
        self.first, self.second, self.third = self.scale, self.table, self.anew
        self.several = {"mean": self.inner.running_mean, "all": [self.table, self.scale]}
        y: torch.Tensor = self.inner(self.layer(x) * self.scale) + self.table
        return y.sin()


def test_an_attribute_that_is_a_tensor_of_a_module() -> None:
    """It is that very tensor afterwards, as without a plan: no copy, and no further output of the step."""
    torch.manual_seed(0)
    model, x = Points(), torch.randn(8, 4)
    twin = copy.deepcopy(model)
    module = planned(twin, x)
    for _ in range(3):
        for run in (model, module):
            run(x).sum().backward()
        for each in (model, twin):
            assert each.first is each.scale and each.second is each.table and each.third is each.anew
            assert each.several["mean"] is each.inner.running_mean
            assert each.several["all"][0] is each.table and each.several["all"][1] is each.scale
        assert torch.equal(twin.before, model.before) and torch.equal(twin.anew, model.anew)
        assert torch.equal(twin.scale, model.scale)
        assert twin.before is not twin.anew
