"""Losses that are computed outside of a planned module, and take more than a usual one."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rkmate
from rkmate import device as devices
from rkmate.integrations.plan_log import plans_of
from rkmate.ir.simulate import LOSS_SCALARS
from rkmate.measure.remembered import CostMemory
from rkmate.measure.step import measure_peak, measure_step
from rkmate.pipeline import prepare
from rkmate.runtime import plan_cache
from rkmate.runtime.outside import ALONE, OutsideWatch
from rkmate.torch_seam.memory import is_profiling


class _Sharpened(torch.autograd.Function):
    """The mean of a function that takes, and keeps, several times its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        wide = x.repeat(1, 6).softmax(1)
        ctx.save_for_backward(wide)
        return wide.square().mean()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (wide,) = ctx.saved_tensors
        return grad * wide.unflatten(1, (6, -1)).sum(1) / wide.numel()


X = torch.randn(96, 32, generator=torch.Generator().manual_seed(0))
Loss = Callable[[torch.Tensor], torch.Tensor]
LOSSES: dict[str, Loss] = {
    "a usual one": lambda out: F.mse_loss(out, torch.zeros_like(out)),
    "of several operations": lambda out: out.square().mean(),
    "that holds its input's bytes": lambda out: F.binary_cross_entropy(
        out.sigmoid(), torch.full_like(out, 0.5)),
    "that takes several times its input": lambda out: torch.stft(
        out.flatten(), 32, 16, window=torch.ones(32), return_complex=True).abs().clamp(min=1e-3).log().mean(),
    "by a custom function that takes several times its input": _Sharpened.apply,
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))))


def stepping(model: nn.Module, loss: Loss, rows: int = len(X)) -> Callable[[], None]:
    return lambda: loss(model(X[:rows])).backward()


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_the_second_or_third_step_keeps_to_the_budget(name: str, wraps: bool) -> None:
    plain, model = net(), net()
    budget = int(0.7 * measure_step(plain, stepping(plain, LOSSES[name])).peak)
    for each in (plain, model):
        each.zero_grad()
    if wraps:
        model = rkmate.wrap(model, (X,), budget=budget, progress=False)
    else:
        rkmate.apply(model, budget=budget, progress=False)
    for _ in range(2 + ("several times" in name)):
        stepping(plain, LOSSES[name])()
        stepping(model, LOSSES[name])()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(  # type: ignore[arg-type]
        plain.parameters(), model.parameters(), strict=True))
    assert measure_step(model, stepping(model, LOSSES[name])).peak <= budget
    plan = (model if wraps else rkmate.applied(model)).plan
    assert ("next to the step" in plan.note) is (plan.budget_bytes < budget)


@pytest.mark.parametrize("name", [n for n in LOSSES if n != "a usual one"])
def test_another_size_has_room_from_its_first_step(name: str, caplog: pytest.LogCaptureFixture) -> None:
    plain, model, loss = net(), net(), LOSSES[name]
    budget = int(0.9 * measure_step(plain, stepping(plain, loss)).peak)
    rkmate.apply(model, budget=budget, progress=False)
    for _ in range(3):
        stepping(model, loss)()
    assert "from this step on" in caplog.text
    caplog.clear()
    for rows in (64, 80):
        for _ in range(2):
            stepping(model, loss, rows)()
        assert measure_step(model, stepping(model, loss, rows)).peak <= budget
    assert "from this step on" not in caplog.text


CHANGES: dict[str, Callable[[Any], Any]] = {
    "another submodule": lambda m: m.__setitem__(1, nn.ReLU()),
    "another number": lambda m: setattr(m[1], "approximate", "tanh"),
    "its mode": lambda m: m.eval(),
    "a frozen weight": lambda m: m[0].weight.requires_grad_(False),
    "its type": lambda m: m.double(),
}
"""What happens to a model between two steps."""


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_module_has_room_from_its_first_step(change: str, caplog: pytest.LogCaptureFixture) -> None:
    model, loss = net(), LOSSES["of several operations"]
    budget = int(0.75 * measure_step(plain := net(), stepping(plain, loss)).peak)
    rkmate.apply(model, budget=budget, progress=False)
    for _ in range(3):
        stepping(model, loss)()
    assert "from this step on" in caplog.text
    caplog.clear()
    CHANGES[change](model)
    x = X.to(model[2].weight.dtype)
    for _ in range(2):
        loss(model(x)).backward()
    assert measure_step(model, lambda: loss(model(x)).backward()).peak <= budget
    assert "from this step on" not in caplog.text


@pytest.mark.parametrize("wraps", [False, True])
def test_gradients_of_a_penalty_on_weights_have_room(wraps: bool) -> None:
    """They wait for those of the plan, where parameters have gradients from the step before."""
    def step(model: nn.Module) -> None:
        out = model(X)
        (F.mse_loss(out, torch.zeros_like(out)) + 1e-3 * sum(p.pow(2).sum() for p in own(model))).backward()

    def own(model: nn.Module) -> list[nn.Parameter]:
        return list(model.parameters())

    plain, model = net(), net()
    budget = int(0.55 * measure_step(plain, lambda: step(plain)).peak)
    settings = rkmate.Settings(costs="analytic")
    plain.zero_grad()
    if wraps:
        model = rkmate.wrap(model, (X,), budget=budget, progress=False, settings=settings)
    else:
        rkmate.apply(model, budget=budget, progress=False, settings=settings)
    for _ in range(4):
        for each in (plain, model):
            each.zero_grad(set_to_none=False)
            step(each)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(  # type: ignore[arg-type]
        own(plain), own(model), strict=True))
    assert measure_step(model, lambda: step(model)).peak <= budget


class _Summed(nn.Module):
    """A model that returns a number."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).sum()


@pytest.mark.parametrize(("made", "then"), [(net, LOSSES["that holds its input's bytes"]), (_Summed, None)],
                         ids=["outside", "inside"])
def test_sizes_are_looked_at_less_and_less_often(made: Callable[[], nn.Module], then: Loss | None,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """The first three, the fourth and the eighth, and the next one after an unusual loss. `then`: the loss of
    the eighth."""
    looked: list[int] = []
    model = made()
    rkmate.apply(model, budget=0.7, progress=False, settings=rkmate.Settings(costs="analytic"))
    watch = plan_cache.OutsideWatch

    def noted(device: torch.device, module: nn.Module) -> OutsideWatch:
        looked.append(rows)
        return watch(device, module)

    monkeypatch.setattr(plan_cache, "OutsideWatch", noted)
    for rows in range(96, 24, -8):
        loss = then if then is not None and rows == 40 else torch.sum
        for _ in range(2):
            stepping(model, loss, rows)()
    assert [*dict.fromkeys(looked)] == [96, 88, 80, 72, 40, *([32] if then else [])]


def _cached(model: nn.Module) -> None:
    """A contrastive loss of a large batch, whose backward calls the model again for one part after the other,
    as losses of sentence-transformers with a cache of gradients do."""
    with torch.no_grad():
        found = torch.cat([model(part) for part in X.chunk(4)])
    leaf = found.requires_grad_()
    loss = contrast(leaf)
    loss.backward()

    def again(grad: torch.Tensor) -> None:
        with torch.enable_grad():
            for part, slope in zip(X.chunk(4), leaf.grad.chunk(4), strict=True):  # type: ignore[union-attr]
                (torch.dot(model(part).flatten(), slope.flatten()) * grad).backward()

    total = loss.detach().requires_grad_()
    total.register_hook(again)
    total.backward()


def test_a_model_that_is_called_inside_of_a_backward() -> None:
    plain, model = net(), net()
    rkmate.apply(model, budget=0.7, progress=False)
    for _ in range(3):
        for each in (plain, model):
            _cached(each)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(  # type: ignore[arg-type]
        plain.parameters(), model.parameters(), strict=True))


def test_a_plan_that_was_given_stays_and_a_warning_names_both_figures() -> None:
    settings = rkmate.Settings(costs="analytic")
    plan = rkmate.plan(net(), (X,), budget=0.7, progress=False, settings=settings)
    model = rkmate.wrap(net(), (X,), plan=plan, progress=False, settings=settings)
    steps = [stepping(model, contrast)] * 4
    with pytest.warns(rkmate.RkmateWarning, match=f"is for {plan.budget_bytes:,} bytes") as said:
        assert [step() for step in steps] == [None] * 4
    assert len(said) == 1 and model.plan.fingerprint == plan.fingerprint
    assert measure_step(model, stepping(model, contrast)).peak <= 1.02 * _told(str(said[0].message))


@pytest.mark.parametrize("calls", [1, 2])
def test_the_notice_names_the_bytes_of_the_first_step(calls: int, caplog: pytest.LogCaptureFixture) -> None:
    """An unusual loss, or a second call before the backward."""
    def step() -> None:
        if calls == 1:
            LOSSES["of several operations"](model(X)).backward()
        else:
            F.mse_loss(model(X), model(X + 1)).backward()

    model = net()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    budget = int(0.7 * measure_step(model, step).peak)
    rkmate.apply(model, budget=budget, progress=False, settings=rkmate.Settings(costs="analytic"))
    with caplog.at_level(logging.WARNING, "rkmate"):
        first = devices.of(X).measure_peak(step).peak
        step()
    told = re.search(r"took up to ([0-9,]*[0-9])", caplog.text)
    assert told is not None and first <= int(told[1].replace(",", "")) <= 1.1 * first
    assert f"{budget:,}" in caplog.text


def _applied(loss: Loss, caplog: pytest.LogCaptureFixture, **settings: Any) -> Any:
    model = net()
    least = 0
    try:
        rkmate.wrap(net(), (X,), budget=1, progress=False, settings=rkmate.Settings(costs="analytic"))
    except rkmate.InfeasibleBudget as error:
        least = error.minimum_bytes
    rkmate.apply(model, budget=least, progress=False, settings=rkmate.Settings(costs="analytic", **settings))
    with caplog.at_level(logging.WARNING, "rkmate"):
        for _ in range(3):
            stepping(model, loss)()
    return rkmate.applied(model).plan


def contrast(z: torch.Tensor) -> torch.Tensor:
    """The contrastive loss of two halves of a batch, whose logits are larger than its input."""
    z = F.normalize(z, dim=1)
    return F.cross_entropy((z @ z.T).fill_diagonal_(-9), torch.arange(len(z)).roll(len(z) // 2))


@pytest.mark.parametrize(("share", "calls"), [(0.7, 1), (0.7, 2), (0.3, 1)])
def test_a_contrastive_loss_has_room_or_the_smallest_plan(share: float, calls: int) -> None:
    """0.7 of the step's peak is enough; no plan keeps to the smaller share."""
    def step(model: nn.Module) -> None:
        contrast(torch.cat([model(x) for x in X.chunk(calls)])).backward()

    plain, model = net(), net()
    peak = measure_step(plain, lambda: step(plain)).peak
    for each in (plain, model):
        each.zero_grad()
    rkmate.apply(model, budget=int(share * peak), progress=False)
    with pytest.warns(rkmate.RkmateWarning, match="follow the smallest plan") if share < 0.7 else \
            contextlib.nullcontext():
        for _ in range(3):
            step(plain)
            step(model)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(  # type: ignore[arg-type]
        plain.parameters(), model.parameters(), strict=True))
    budget = rkmate.applied(model).plan.budget_bytes
    assert measure_step(model, lambda: step(model)).peak <= budget < 0.75 * peak


def test_inputs_and_losses_of_open_calls_have_room() -> None:
    """A divergence of moved inputs from clean ones (TRADES): what the step makes before its last call, and
    what the loss keeps for its other branch, is seen once and planned for."""
    labels = torch.arange(len(X)) % 32
    apart = functools.partial(F.kl_div, reduction="batchmean")

    def step(model: nn.Module) -> None:
        clean = model(X).detach().softmax(-1)
        moved = X.clone().requires_grad_()
        slope, = torch.autograd.grad(apart(model(moved).log_softmax(-1), clean), moved)
        found = model(X)
        other = model((moved + slope.sign()).detach())
        (F.cross_entropy(found, labels) + apart(other.log_softmax(-1), clean)).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad  # type: ignore[operator]

    plain, model = net(), net()
    same = net()
    budget = int(0.75 * measure_step(same, lambda: step(same)).peak)
    rkmate.apply(model, budget=budget, progress=False, settings=rkmate.Settings(costs="analytic"))
    for _ in range(4):
        for each in (plain, model):
            each.zero_grad(set_to_none=False)
            step(each)
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    assert measure_step(model, lambda: step(model)).peak <= budget


def _told(text: str) -> int:
    """The bytes of a step that a warning tells of, with those that the caller holds."""
    return int(text.split(" about ")[1].split(" bytes")[0].replace(",", ""))


def test_what_finds_no_room_is_said_once_with_both_figures(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.warns(rkmate.RkmateWarning, match="outputs of Sequential takes [0-9,]+ bytes") as said:
        plan = _applied(LOSSES["that holds its input's bytes"], caplog)
    text = str(said[0].message)
    assert len(said) == 1 and "no schedule fits in" in text and _told(text) > plan.peak_bytes


def test_tensors_without_a_storage_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    left = []

    def energy(x: torch.Tensor) -> torch.Tensor:
        left.append(x)                  # a wrapper that is dead once the transform is over
        return x.square().sum()

    torch.func.grad(energy)(torch.ones(3))
    left.append(torch.sparse_coo_tensor([[0], [1]], [1.0], (2, 2), check_invariants=True))
    _applied(torch.sum, caplog)
    assert "usual one" not in caplog.text


OPERATIONS: dict[str, Loss] = {
    **{f.__name__: f for f in (
        torch.tanh, torch.sigmoid, torch.exp, torch.log, torch.abs, torch.neg, torch.relu, F.leaky_relu,
        F.elu, F.silu, F.gelu, F.softplus, F.logsigmoid, F.hardtanh)},
    "rsub": lambda out: 1 - out,
    "softmax": lambda out: out.softmax(1),
    "clamp": lambda out: out.clamp(-1, 1),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_one_operation_takes_three_times_its_input_at_most(name: str) -> None:
    out = torch.rand(64, 32, requires_grad=True)
    found = OPERATIONS[name](out)
    assert ALONE.match(type(found.grad_fn).__name__)
    del found

    def step() -> None:
        torch.autograd.grad(OPERATIONS[name](out).mean(), out)

    step()
    assert measure_peak(step, "cpu").peak <= 3 * out.numel() * out.element_size() + LOSS_SCALARS


@pytest.mark.parametrize(("loss", "is_usual"), [
    (lambda out: out.tanh().mean() + out.sum(), True), (lambda out: out.tanh().exp().mean(), False),
    (lambda out: (out.tanh() * out).mean(), False)])
def test_one_operation_of_an_output_is_a_usual_loss(loss: Loss, is_usual: bool,
                                                    caplog: pytest.LogCaptureFixture) -> None:
    _applied(loss, caplog)
    assert ("usual one" in caplog.text) is not is_usual


def test_bytes_that_are_given_are_not_looked_for(caplog: pytest.LogCaptureFixture) -> None:
    _applied(LOSSES["of several operations"], caplog, loss_bytes=100)
    assert "usual one" not in caplog.text


def other(depth: int = 60) -> Loss:
    """Another model behind the outputs, and its loss."""
    parts = nn.Sequential(*(m for _ in range(depth) for m in (nn.Tanh(), nn.Sigmoid())))
    return lambda out: F.mse_loss(parts(out), torch.zeros_like(out))


def test_other_models_in_a_step_have_room(caplog: pytest.LogCaptureFixture) -> None:
    loss, plain, model = other(), net(), net()
    budget = int(0.93 * measure_step(plain, stepping(plain, loss)).peak)
    for each in (plain, model):
        each.zero_grad()
    rkmate.apply(model, budget=budget, progress=False)
    with caplog.at_level(logging.WARNING, "rkmate"):
        for _ in range(3):
            stepping(plain, loss)()
            stepping(model, loss)()
    assert "more than 100 operations, as of another model, follow on the outputs of Sequential" in caplog.text
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(  # type: ignore[arg-type]
        plain.parameters(), model.parameters(), strict=True))
    assert measure_step(model, stepping(model, loss)).peak <= budget


def test_other_models_that_find_no_room_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.warns(rkmate.RkmateWarning, match="as of another model.*checkpoint the other model") as said:
        plan = _applied(other(), caplog)
    assert len(said) == 1 and _told(str(said[0].message)) > plan.peak_bytes


@pytest.mark.parametrize("given", [False, True])
def test_a_step_that_rkmate_measures_leaves_the_loss_to_a_later_one(
        given: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    with_plan = {"plan": rkmate.plan(model, (X,), budget=0.6, progress=False)}
    planned = rkmate.wrap(model, (X,), progress=False, **(with_plan if given else {"budget": 0.6}))
    step = stepping(planned, lambda out: (out.tanh() * 0.5).mean())
    with caplog.at_level(logging.WARNING, "rkmate"):
        peaks = [measure_step(planned, step).peak for _ in range(2)]
        step()
    assert caplog.text.count("usual one") == (not given)
    assert max(peaks) <= planned.plan.budget_bytes


@pytest.mark.parametrize(("loss", "words"), [
    (other(), "more than 100 operations follow"),
    (LOSSES["that holds its input's bytes"], "takes more than a usual one")])
def test_what_cannot_be_measured_is_said(loss: Loss, words: str, caplog: pytest.LogCaptureFixture) -> None:
    with torch.autograd.profiler.profile(), pytest.warns(rkmate.RkmateWarning, match=words):
        _applied(loss, caplog)


def test_a_plan_that_is_made_while_a_profiler_runs_counts_on_estimates() -> None:
    plain, model = net(), net()
    rkmate.apply(model, budget=0.8, progress=False)
    unknown = mock.patch.object(prepare, "cost_memory", side_effect=functools.partial(CostMemory, None))
    with unknown, torch.autograd.profiler.profile(), pytest.warns(
            rkmate.RkmateWarning, match="counts on estimates"):
        stepping(model, torch.sum)()
    stepping(plain, torch.sum)()
    assert rkmate.applied(model).has_plan
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(  # type: ignore[arg-type]
        plain.parameters(), model.parameters(), strict=True))


def test_a_measurement_ends_where_no_backward_comes() -> None:
    model = net()
    rkmate.apply(model, budget=10**8, progress=False, settings=rkmate.Settings(costs="analytic"))
    stepping(model, other())()
    model(X)
    assert not is_profiling()


def test_outputs_that_a_caller_keeps_are_in_no_measurements_way() -> None:
    model = net()
    rkmate.apply(model, budget=10**8, progress=False, settings=rkmate.Settings(costs="analytic"))
    stepping(model, other())()
    kept = model(X)
    assert measure_peak(X.clone, "cpu").peak == X.nbytes
    other()(kept).backward()
    assert not is_profiling()


@pytest.mark.filterwarnings("ignore:more than 100 operations follow")
@pytest.mark.parametrize("wait", range(3))
def test_a_profiler_with_a_schedule_runs_in_the_callers_loop(wait: int) -> None:
    model = net()
    rkmate.apply(model, budget=10**8, progress=False, settings=rkmate.Settings(costs="analytic"))
    optimizer, step = torch.optim.SGD(model.parameters(), 1e-3), stepping(model, other())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU],
                                schedule=torch.profiler.schedule(wait=wait, warmup=1, active=1, repeat=1)
                                ) as profiler:
        for _ in range(wait + 3):
            step()
            optimizer.step()
            profiler.step()
    assert profiler.events()


@pytest.mark.parametrize("where", ["before", "after", "frozen", "in front"])
def test_layers_beside_a_module_or_in_front_of_it_are_told_of(where: str) -> None:
    """Their saved tensors are in memory while the module's backward runs, and in no budget of the module."""
    model, beside = net(), net().requires_grad_(where != "frozen")
    both = nn.ModuleList([model, beside])

    def step() -> None:
        other = beside(X) if where != "after" else None
        made = model(other if where == "in front" else X)
        (made - (beside(X) if other is None else other)).abs().mean().backward()

    rkmate.apply(model, budget=0.7, settings=rkmate.Settings(costs="analytic"), progress=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(5):
            step()
    told = [str(w.message) for w in said if "of layers that run before Sequential" in str(w.message)]
    assert len(told) == (where in ("before", "in front"))
    if told:
        assert measure_step(both, step).peak == pytest.approx(
            int(re.findall(r"takes about ([\d,]+)", told[0])[0].replace(",", "")), rel=0.1)


def in_a_row(model: nn.Module, calls: int = 4, *, anew: bool = False, turns: bool = False
             ) -> Callable[[], None]:
    """A step of several calls, one after the other, whose losses stay to its end. `anew`: the step makes the
    inputs, and keeps them. `turns`: the last call is another, and smaller."""
    optimizer = torch.optim.SGD(model.parameters(), 0.0)

    def step() -> None:
        kept = []
        for k in range(calls):
            kept.append(X.clone() if anew else X)
            found = model(kept[-1][:len(X) // 2] if turns and k == calls - 1 else kept[-1])
            kept.append(F.mse_loss(found, torch.zeros_like(found)))
            kept[-1].backward()
        optimizer.step()

    return step


def _stepped(module: nn.Module, *, anew: bool = False, turns: bool = False) -> int:
    """Return the peak of a step of four calls after some, with gradients of parameters that are there."""
    step = in_a_row(module, anew=anew, turns=turns)
    for _ in range(4):
        step()
    return measure_step(module, step).peak


@pytest.mark.parametrize(("anew", "turns", "kept"), [
    (False, False, 3), (True, False, 7), (True, True, 5)])
def test_what_finished_calls_leave_has_room(anew: bool, turns: bool, kept: int,
                                            caplog: pytest.LogCaptureFixture) -> None:
    model, budget = net(), int(0.8 * _stepped(net(), anew=anew, turns=turns))
    rkmate.apply(model, budget=budget, settings=rkmate.Settings(costs="analytic"), progress=False)
    with caplog.at_level(logging.WARNING, "rkmate"):
        peak = _stepped(model, anew=anew, turns=turns)
    assert caplog.text.count("calls Sequential 4 times, and its caller keeps") == 1
    assert peak <= budget
    assert min(p.budget_bytes for p in plans_of(model)) <= budget - kept * X.nbytes


def test_losses_of_finished_calls_are_told_of_once() -> None:
    model = rkmate.wrap(net(), (X,), budget=0.7, settings=rkmate.Settings(costs="analytic"), progress=False)
    with pytest.warns(rkmate.RkmateWarning, match="calls Sequential 4 times") as said:
        peak = _stepped(model)
    text = str(said[0].message)
    assert len(said) == 1 and f"the budget is {model.plan.budget_bytes:,}" in text
    assert model.plan.budget_bytes < peak <= _told(text) <= 1.1 * peak


def test_finished_calls_that_leave_nothing_are_no_reason(caplog: pytest.LogCaptureFixture) -> None:
    model = rkmate.wrap(net(), (X,), budget=0.7, settings=rkmate.Settings(costs="analytic"), progress=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with caplog.at_level(logging.WARNING, "rkmate"):
        for _ in range(4):
            for k in range(3):
                model(X * k).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not caplog.records


class _Wide(nn.Module):
    """Two outputs, of which the loss reads the small one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.small, self.wide = nn.Linear(32, 64), nn.Linear(64, 4), nn.Linear(64, 2000)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = F.gelu(self.body(x))
        return self.small(h), self.wide(h)


def test_a_refusal_names_the_room_that_is_left_for_a_loss_of_all_outputs() -> None:
    model = _Wide()
    plain = measure_step(model, lambda: model(X)[0].sum().backward()).peak
    room = 3 * 4 * 96 * 2004 + LOSS_SCALARS
    with pytest.raises(rkmate.InfeasibleBudget, match=f"{room:,} are left for a loss of all outputs"):
        rkmate.wrap(model, (X,), budget=plain, settings=rkmate.Settings(costs="analytic"), progress=False)
    settings = rkmate.Settings(costs="analytic", trains=("0",))
    wrapped = rkmate.wrap(model, (X,), budget=1.0, settings=settings, progress=False)
    assert measure_step(wrapped, lambda: wrapped(X)[0].sum().backward()).peak < 1.1 * plain
