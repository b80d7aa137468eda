"""Models that call ``torch.utils.checkpoint``: a plan takes its place, and says so."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import rkmate
from rkmate.errors import ArgumentError
from rkmate.ir.recompute import checkpointed
from rkmate.measure.step import measure_step
from rkmate.pipeline import prepare

X = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.first = nn.Linear(64, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
            for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x.square().mean()


class Reading(nn.Module):
    """Layers that read one tensor twice each, as the cross-attention of a decoder does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, 64)
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(64, 64) for _ in range(2)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = x = torch.tanh(self.first(x))
        for keys, values in self.layers:    # type: ignore[misc]
            x = checkpoint(lambda x, m, k=keys, v=values: x * torch.sigmoid(k(m)) + v(m), x, read,
                           use_reentrant=True)
        return x.square().mean()


def step(module: nn.Module) -> None:
    torch.manual_seed(3)
    module(X).backward()


def bits(module: nn.Module) -> list[torch.Tensor]:
    module.zero_grad()
    step(module)
    return [p.grad for p in module.parameters() if p.grad is not None]


@functools.cache
def planned(reentrant: bool | None, fraction_of: str) -> rkmate.PlannedModule:
    settings = rkmate.Settings(fraction_of=fraction_of)
    return rkmate.wrap(Net(reentrant), (X,), budget=0.9, progress=False, settings=settings)


class Late(nn.Module):
    """Layers under checkpointing, as functions that read a variable of the loop."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.checkpoints = checkpoints
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            def run(x: torch.Tensor) -> torch.Tensor:
                return torch.tanh(layer(x))
            x = checkpoint(run, x, use_reentrant=False) if self.checkpoints else run(x)
        return x.square().mean()


def test_a_function_that_reads_a_variable_of_a_loop_has_the_gradients_of_its_own_layer() -> None:
    """Eager mode runs the last layer again in the backward of all of them."""
    plain = bits(Late(False))
    assert not all(map(torch.equal, bits(Late(True)), plain))
    planned = rkmate.wrap(Late(True), (X,), budget=1.0, progress=False,
                          settings=rkmate.Settings(costs="analytic"))
    assert all(map(torch.equal, bits(planned), plain)) and len(plain) == 6


def test_a_module_that_names_its_parameters_otherwise_has_a_plan() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    net = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.GELU(), nn.Linear(128, 1), nn.Flatten(0))
    wrapped = checkpoint_wrapper(nn.Sequential(net, nn.Softmax(0)))
    assert all("_checkpoint" not in name for name, _ in wrapped.named_parameters())

    def gradients(module: nn.Module) -> list[torch.Tensor]:
        module.zero_grad()
        module(X).square().mean().backward()
        return [p.grad for p in wrapped.parameters() if p.grad is not None]

    plain = gradients(wrapped)
    planned = rkmate.wrap(wrapped, (X,), budget=1.0, progress=False,
                          settings=rkmate.Settings(costs="analytic"))
    assert all(map(torch.equal, gradients(planned), plain)) and len(plain) == 6


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_fraction_is_of_the_peak_without_or_with_it(reentrant: bool) -> None:
    plain = planned(reentrant, "plain")
    assert plain.plan.budget_bytes == int(0.9 * plain.plan.baseline_peak_bytes)
    own = planned(reentrant, "checkpointed")
    real = measure_step(own.original, lambda: step(own.original)).peak
    # Eager mode keeps more: masks of four bytes, gradients that a plan overwrites, and, if reentrant, the
    # results of regions that run again.
    assert 0.75 * real <= own.plan.budget_bytes / 0.9 <= real
    assert own.plan.budget_bytes < 0.6 * plain.plan.budget_bytes


@pytest.mark.parametrize("fraction_of", ["plain", "checkpointed"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_step_is_that_of_the_model_as_it_checkpoints(reentrant: bool, fraction_of: str) -> None:
    model, wrapped = Net(reentrant), planned(reentrant, fraction_of)
    assert all(map(torch.equal, bits(model), bits(wrapped)))
    assert measure_step(wrapped, lambda: step(wrapped)).peak <= wrapped.plan.budget_bytes


def test_a_gradient_is_added_up_inside_of_a_reentrant_region_first() -> None:
    settings = rkmate.Settings(costs="analytic", fraction_of="plain")
    wrapped = rkmate.wrap(Reading(), (X,), budget=0.9, progress=False, settings=settings)
    assert all(map(torch.equal, bits(wrapped), bits(Reading())))


def test_the_plan_says_what_it_takes_the_place_of() -> None:
    plan = planned(False, "plain").plan
    assert "the plan replaces torch.utils.checkpoint in 4 regions" in plan.note
    assert "torch.utils.checkpoint" in str(plan)
    assert "torch.utils.checkpoint" in plan.explain()
    # Without it, there is one peak only.
    plain = planned(None, "checkpointed").plan
    assert "checkpoint" not in plain.note
    assert plain.budget_bytes == int(0.9 * plain.baseline_peak_bytes)


def test_a_notice_names_both_peaks(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="rkmate"):
        plan = rkmate.plan(Net(False), (X,), budget=1.0, progress=False,
                           settings=rkmate.Settings(costs="analytic"))
        assert f"{plan.baseline_peak_bytes:,}" in caplog.text and f"{plan.budget_bytes:,}" in caplog.text
        assert plan.budget_bytes < plan.baseline_peak_bytes
        assert 'fraction_of="plain"' in caplog.text
        caplog.clear()
        rkmate.plan(Net(False), (X,), budget="100MiB", progress=False,
                    settings=rkmate.Settings(costs="analytic"))
        rkmate.plan(Net(None), (X,), budget=1.0, progress=False, settings=rkmate.Settings(costs="analytic"))
        assert not caplog.text


@pytest.mark.parametrize("fraction_of", ["plain", "checkpointed"])
def test_an_error_names_a_share_that_a_budget_can_be(fraction_of: str) -> None:
    settings = rkmate.Settings(costs="analytic", fraction_of=fraction_of)
    with pytest.raises(rkmate.InfeasibleBudget) as error:
        rkmate.plan(Net(False), (X,), budget=1, progress=False, settings=settings)
    plan = rkmate.plan(Net(False), (X,), budget=1.0, progress=False, settings=settings)
    whole = plan.budget_bytes
    assert f"({error.value.minimum_bytes / whole:.0%} of its own peak of {whole:,} bytes" in str(error.value)
    assert ("with its checkpointing" in str(error.value)) is (fraction_of == "checkpointed")


def test_other_peaks_are_unknown() -> None:
    with pytest.raises(ArgumentError, match="it should be 'plain' or 'checkpointed'"):
        rkmate.Settings(fraction_of="own")


@pytest.mark.slow
def test_gradient_checkpointing_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")

    def build() -> nn.Module:
        torch.manual_seed(0)
        config = transformers.GPT2Config(n_layer=3, n_embd=64, n_head=2, vocab_size=100, n_positions=32,
                                         bos_token_id=0, eos_token_id=0)
        model = transformers.GPT2LMHeadModel(config).train()
        # The name that the newest versions know it by, where there is one.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        return model

    ids = torch.randint(0, 100, (4, 32), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}

    def run(module: nn.Module) -> None:
        torch.manual_seed(3)
        module(**batch).loss.backward()

    model = build()
    wrapped = rkmate.wrap(build(), (), batch, budget=1.0, progress=False,
                          settings=rkmate.Settings())
    assert "in 3 regions" in wrapped.plan.note
    assert wrapped.plan.budget_bytes < 0.8 * wrapped.plan.baseline_peak_bytes
    run(model)
    run(wrapped)
    pairs = zip(model.parameters(), wrapped.parameters(), strict=True)
    assert all(torch.equal(p.grad, q.grad) for p, q in pairs)
    assert measure_step(wrapped, lambda: run(wrapped)).peak <= wrapped.plan.budget_bytes


def test_its_step_is_simulated_once_for_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The notice, the limit and the plan's note ask for the same figures."""
    asked: list[str] = []

    def once(*arguments: Any) -> Any:
        asked.append("again")
        return checkpointed(*arguments)

    monkeypatch.setattr(prepare, "checkpointed", once)
    for fraction_of in ("plain", "checkpointed"):
        asked.clear()
        plan = rkmate.plan(Net(False), (X,), budget=1.0, progress=False,
                           settings=rkmate.Settings(costs="analytic", fraction_of=fraction_of))
        assert "4 regions" in plan.note and asked == ["again"]


class Hooking(Net):
    """Hooks its layers in each forward, and refuses a second one before the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if layer.__dict__.get("open"):
                raise ValueError("several forwards before a backward")
            layer.__dict__["open"] = [layer.register_full_backward_hook(
                lambda m, *grads: m.__dict__.pop("open").pop().remove())]
        return super().forward(x)


def test_a_forward_that_hooks_its_layers_is_refused_with_the_reason() -> None:
    model = Hooking(False)
    with pytest.raises(rkmate.CaptureError, match=r"registers backward hooks .*gradient_checkpointing"):
        rkmate.wrap(model, (X,), budget=0.9, progress=False)
    assert not any(m._backward_hooks or "open" in m.__dict__ for m in model.modules())
    assert all(map(torch.equal, bits(model), bits(Net(False)))), "it trains as before"


@pytest.mark.parametrize("applied", [False, True])
def test_hooks_on_saved_tensors_see_nothing_and_this_is_said(applied: bool) -> None:
    model = Net(None).eval()
    options: dict[str, Any] = {"budget": 0.6, "progress": False,
                               "settings": rkmate.Settings(costs="analytic")}
    module = rkmate.apply(model, **options) if applied else rkmate.wrap(model, (X,), **options)
    module(X).backward()                        # nothing is said without hooks
    packed: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t), \
            pytest.warns(rkmate.RkmateWarning, match="hooks on saved tensors are around a call of Net"):
        out = module(X)
    out.backward()
    with torch.autograd.graph.save_on_cpu():    # said once
        module(X).backward()
    checkpoint(module, X, use_reentrant=False).backward()
    assert not packed
