"""A plan inside of the user's own module: `apply`, `remove`, and models that come in eval mode."""

from __future__ import annotations

import copy
import inspect
import io
import logging
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate.runtime.kept_plans import REPLACED
from tests.distributed.ranks import forked
from tests.equality import measured_peak
from tests.models.sample import Sample
from tests.options import options_of
from tests.semantics.steps import Tower, planned

OPTIONS: dict[str, Any] = {"costs": "analytic", "progress": False}
X = torch.randn(256, 16)


def applied(model: nn.Module, budget: int | float | str = 0.8, **options: Any) -> nn.Module:
    return rkmate.apply(model, budget=budget, **options_of(**OPTIONS, **options))


def same_step(one: nn.Module, other: nn.Module, loss: Callable[[Any], torch.Tensor]) -> None:
    """Of a model and a copy of it: loss and gradients are equal."""
    found = []
    for model in (one, other):
        torch.manual_seed(0)
        value = loss(model)
        found.append((value, *torch.autograd.grad(value, list(model.parameters()))))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def plan_of(model: nn.Module) -> rkmate.Plan:
    shown = rkmate.applied(model)
    assert shown is not None
    return shown.plan


def total(run: Callable[..., Any]) -> torch.Tensor:
    out: torch.Tensor = run(X).sum()
    return out


def test_the_module_stays_what_it_is() -> None:
    model = Tower(dropout=0.5)
    twin = copy.deepcopy(model)
    before = dict(model.__dict__)
    assert applied(model) is model
    assert type(model) is Tower
    assert list(model.state_dict()) == list(twin.state_dict())
    assert inspect.signature(model.forward) == inspect.signature(twin.forward)
    same_step(twin, model, total)
    assert plan_of(model).peak_bytes <= plan_of(model).budget_bytes < plan_of(model).baseline_peak_bytes
    assert measured_peak(model, Sample(model, (X,), {}, torch.sum)) <= plan_of(model).budget_bytes
    rkmate.remove(model)
    assert rkmate.applied(model) is None
    assert {k: v for k, v in model.__dict__.items() if k != "_compiled_call_impl"} == before
    same_step(twin, model, total)
    assert rkmate.remove(model) is model         # a second time, and of any other module


def test_methods_of_its_own_come_back() -> None:
    model = Tower()
    model.__getstate__ = mine = types.MethodType(lambda self: dict(self.__dict__), model)  # type: ignore
    rkmate.remove(applied(model))
    assert model.__dict__["__getstate__"] is mine


def test_the_first_call_with_gradients_is_planned() -> None:
    model = applied(Tower())
    with torch.no_grad():
        model(X)
    shown = rkmate.applied(model)
    assert shown is not None
    assert not shown.has_plan
    with pytest.raises(rkmate.ArgumentError, match="the first call that records gradients makes one"):
        shown.plan                                # noqa: B018
    model(X)
    assert "def forward" in shown.source


def test_sample_inputs_are_planned_at_once() -> None:
    model = applied(Tower(), args=(X,))
    plan = plan_of(model)
    model(X).sum().backward()
    assert plan_of(model) is plan
    rkmate.apply(model, (X,), plan=plan, **options_of(**OPTIONS))           # in the place of the one before
    assert plan_of(model).fingerprint == plan.fingerprint


def test_a_refused_budget_leaves_the_module_alone() -> None:
    model = Tower()
    with pytest.raises(rkmate.InfeasibleBudget):
        applied(model, budget=1, args=(X,))
    assert rkmate.applied(model) is None
    assert "forward" not in model.__dict__
    with pytest.raises(rkmate.ArgumentError, match="without the sample inputs"):
        rkmate.apply(model, plan=planned(model, X).plan)
    with pytest.raises(rkmate.ArgumentError, match="already wrapped"):
        rkmate.apply(planned(model, X), budget=0.5)
    applied(model, budget=1)
    with pytest.raises(rkmate.InfeasibleBudget):
        model(X)


def test_deep_copies_keep_to_the_same_budget() -> None:
    model = applied(Tower(), args=(X,))
    average = torch.optim.swa_utils.AveragedModel(model).module
    holder = copy.deepcopy(nn.ModuleDict({"a": model, "b": model}))
    assert holder["a"] is holder["b"]
    for other in (average, holder["a"]):
        assert plan_of(other) is plan_of(model)
        same_step(model, other, total)
        assert measured_peak(other, Sample(other, (X,), {}, torch.sum)) <= plan_of(model).budget_bytes
        other.layers[0].weight.data.zero_()       # its own weights, in its own forward
        assert not torch.equal(other(X), model(X))
        assert not torch.equal(other.forward(X), model.forward(X))
        rkmate.remove(other)
        assert {*model.__dict__} - {*other.__dict__} == {*REPLACED[:-1]}
        assert rkmate.applied(copy.deepcopy(other)) is None


def test_pickles_are_without_a_plan(caplog: pytest.LogCaptureFixture) -> None:
    """They can be loaded where rkmate is not installed."""
    model = applied(Tower(), args=(X,))
    for _ in range(2):
        assert b"rkmate" not in pickle.dumps(model)
    assert [r.message for r in caplog.records if "pickled without its plan" in r.message] == [
        "Tower is pickled without its plan and budget, so that it can be loaded where rkmate is not "
        "installed: call rkmate.apply on the loaded module to train it within a budget"]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    assert rkmate.applied(other) is None and not {*REPLACED} & {*other.__dict__}
    same_step(model, other, total)


def test_spawned_processes_keep_to_the_same_budget() -> None:
    model = applied(Tower(), args=(X,))
    model(X).sum().backward()
    context = forked()
    queue = context.Queue()
    process = context.Process(target=spawned, args=(model, X, queue))
    process.start()
    peak, budget, gradient = queue.get(timeout=120)
    process.join(120)
    assert peak <= budget == plan_of(model).budget_bytes
    assert gradient == model.layers[0].weight.grad.tolist()


def spawned(model: nn.Module, x: torch.Tensor, queue: Any) -> None:
    torch.set_num_threads(1)
    model.zero_grad()
    model(x).sum().backward()
    gradient = model.layers[0].weight.grad
    assert gradient is not None
    queue.put((measured_peak(model, Sample(model, (x,), {}, torch.sum)), plan_of(model).budget_bytes,
               gradient.tolist()))


def test_shallow_copies_are_without_a_plan() -> None:
    """They share what the model holds, and compute with what they hold themselves."""
    model = applied(Tower(), args=(X,))
    other = copy.copy(model)
    assert rkmate.applied(other) is None and "forward" not in other.__dict__
    other._modules = {**model._modules, "layers": Tower().layers}
    assert torch.equal(other(X), Tower.forward(other, X)) and not torch.equal(other(X), model(X))
    other(X).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    rkmate.remove(model)
    model.forward = forward = types.MethodType(lambda self, x: x, model)
    assert copy.copy(applied(model)).__dict__["forward"] is forward


def test_replicas_are_refused() -> None:
    with pytest.raises(rkmate.ArgumentError, match="DataParallel makes replicas of Tower"):
        applied(Tower())._replicate_for_data_parallel()


def test_what_a_library_puts_in_the_place_of_forward_is_planned() -> None:
    """Accelerate and trl do that: before and after."""
    def doubled(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return 2 * type(self).forward(self, x)

    for first in (True, False):
        model = Tower()
        if first:
            model.forward = types.MethodType(doubled, model)
        applied(model)
        model(X)
        if not first:
            own = model.forward.__func__
            model.forward = types.MethodType(lambda self, x, own=own: 2 * own(self, x), model)
        shown = rkmate.applied(model)
        assert shown is not None
        model(X)
        assert len(shown._plans) == (1 if first else 2)
        plain = copy.deepcopy(model)
        rkmate.remove(plain)
        same_step(plain, model, total)
        rkmate.remove(model)
        assert torch.equal(model(X), 2 * Tower.forward(model, X))


def test_a_second_plan_inside_of_what_a_library_has_put_around_the_first() -> None:
    """Accelerate's forward for mixed precision calls the planned forward that was there when it was made."""
    model = applied(Tower())
    own = model.forward.__func__                        # type: ignore[attr-defined]
    model.forward = types.MethodType(lambda self, x: 2 * own(self, x), model)
    plain = copy.deepcopy(rkmate.remove(model))
    applied(model)
    same_step(plain, model, total)
    assert plan_of(model).peak_bytes > 0
    assert torch.equal(rkmate.remove(model)(X), 2 * Tower.forward(model, X))


class Doubled(Tower):
    """A class that adds to what a call does, and takes other arguments than its forward."""

    def __call__(self, x: torch.Tensor, *, halves: bool = False) -> torch.Tensor:
        return 1 + super().__call__(2 * x[:128] if halves else 2 * x)


@pytest.mark.parametrize("sample", [None, (X,)])
@pytest.mark.parametrize("inside", [False, True])
def test_a_call_of_the_class_happens_once(inside: bool, sample: tuple[torch.Tensor] | None) -> None:
    model = nn.Sequential(nn.Linear(16, 16), Doubled()) if inside else Doubled()
    twin = copy.deepcopy(model)
    applied(model, args=sample)
    halves: Callable[[Any], torch.Tensor] = lambda run: run(X, halves=True).sum()  # noqa: E731
    losses = [total] if inside else [total, halves, lambda run: run.forward(X).sum()]
    for loss in losses:
        same_step(twin, model, loss)
    assert plan_of(model).peak_bytes > 0


def test_a_graph_of_torch_fx_is_planned_at_once() -> None:
    model = torch.fx.symbolic_trace(Tower())
    with pytest.raises(rkmate.InfeasibleBudget):
        applied(model, args=(X,), budget=1)
    applied(model, args=(X,))
    assert plan_of(model).peak_bytes > 0


def test_an_object_that_keeps_results_of_the_planned_forward(caplog: pytest.LogCaptureFixture) -> None:
    """As a loss of several widths puts one into a model for a step: the first width calls the forward."""
    class Keeping:
        def __init__(self, forward: Callable[..., torch.Tensor]) -> None:
            self.forward = forward
            self.kept: list[torch.Tensor] = []
            self.at = -1

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            self.at += 1
            if self.at == 2:
                self.at = 0
            if len(self.kept) < 2:
                self.kept.append(self.forward(x))
            return self.kept[self.at]

    def loss(model: nn.Module) -> torch.Tensor:
        before = model.forward
        model.forward = Keeping(before)
        try:
            wide, narrow = ([model(X + k) for k in range(2)] for _ in range(2))
            return torch.stack([w.sum() + n[:, :4].sin().sum()
                                for w, n in zip(wide, narrow, strict=True)]).sum()
        finally:
            model.forward = before

    model = Tower()
    twin = copy.deepcopy(model)
    applied(model)
    for _ in range(2):
        same_step(twin, model, loss)
    assert "from this step on, plans are for 2 calls" in caplog.text and len(caplog.records) == 1


def test_forward_called_by_itself_is_planned() -> None:
    """As peft calls the forward of its base model."""
    model = Tower()
    twin = copy.deepcopy(model)
    for m in (model, twin):
        m.register_forward_hook(lambda m, args, out: 3 * out)
    with pytest.warns(rkmate.RkmateWarning, match="has forward hooks"):
        applied(model, args=(X,))
    same_step(twin, model, lambda run: run.forward(X).sum())
    assert torch.equal(model(X), 3 * model.forward(X))
    shown = rkmate.applied(model)
    assert shown is not None
    same_step(twin, model, total)
    rkmate.remove(model)
    applied(model)
    same_step(twin, model, lambda run: run.forward(X).sum())     # planned when it comes
    assert plan_of(model).peak_bytes < plan_of(model).baseline_peak_bytes


def test_a_part_of_a_model() -> None:
    """The rest runs as it is; and a plan of the whole contains the part's original."""
    model = nn.Sequential(Tower(dropout=0.5), nn.Tanh())
    twin = copy.deepcopy(model)
    applied(model[0])
    same_step(twin, model, total)
    applied(model)
    same_step(twin, model, total)


def test_a_model_in_eval_mode_is_planned_for_training(caplog: pytest.LogCaptureFixture) -> None:
    model = Tower(dropout=0.5).eval()
    with caplog.at_level(logging.WARNING, "rkmate"):
        module = planned(model, X, budget=0.8)
    assert "is in eval mode: it is planned in train mode" in caplog.text
    assert not any(m.training for m in model.modules())
    plan = module.plan
    assert planned(Tower(dropout=0.5), X, budget=0.8).plan.fingerprint == plan.fingerprint
    module.train()
    module(X).sum().backward()
    assert module.plan is plan
    assert measured_peak(module, Sample(model, (X,), {}, torch.sum)) <= plan.budget_bytes
    caplog.clear()
    as_it_is = planned(model.eval(), X, budget=0.8, training=False).plan
    assert as_it_is.fingerprint != plan.fingerprint
    assert rkmate.plan(model, (X,), budget=0.8, **options_of(**OPTIONS)).fingerprint == plan.fingerprint
    with pytest.raises(rkmate.ArgumentError, match="training is 'yes'"):
        planned(model, X, training="yes")


def test_a_fraction_never_means_fewer_bytes_than_before() -> None:
    """The last batch of an epoch is smaller."""
    module = planned(Tower(), torch.randn(64, 16), budget=0.8)
    allowed = module.plan.budget_bytes
    module(torch.randn(1, 16)).sum().backward()
    assert module.plan.budget_bytes == allowed
    assert not module.plan.schedule.recomputed()
    module(torch.randn(128, 16)).sum().backward()
    assert module.plan.budget_bytes > allowed


def test_other_sizes_are_planned_in_place() -> None:
    model = Tower()
    twin = copy.deepcopy(model)
    applied(model, budget=0.8)
    for rows in (64, 128, 96, 112):
        x = torch.randn(rows, 16)
        same_step(twin, model, lambda run, x=x: run(x).sum())
        assert measured_peak(model, Sample(model, (x,), {}, torch.sum)) <= plan_of(model).budget_bytes
    shown = rkmate.applied(model)
    assert shown is not None
    assert len(shown._plans) == 4


def test_flags_that_cannot_be_planned_run_the_original() -> None:
    model = Tower()
    module = planned(model, X)
    handle = model.layers[0].register_full_backward_hook(lambda *args: None)
    with pytest.warns(rkmate.RkmateWarning, match="without a budget.*module backward hooks"):
        out = module(X)
    assert out.grad_fn is not None
    module(X)                                     # said once
    handle.remove()
    module(X).sum().backward()
    assert len(module._plans) == 1
