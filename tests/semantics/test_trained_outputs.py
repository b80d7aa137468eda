"""`trains`: the user says which outputs the loss is computed from, and the first step runs as planned."""

from __future__ import annotations

import copy
import re
import warnings
from collections import namedtuple
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rkmate
from rkmate.comparison.measured import loss_of
from rkmate.device.events import make_way
from rkmate.graph.capture.structure import take_apart
from rkmate.measure.step import measure_peak
from rkmate.pipeline.loss import chosen_outputs
from rkmate.pipeline.settings import checked_trains
from rkmate.runtime.executable import PlannedStep
from rkmate.torch_seam.memory import is_profiling
from tests.capturing import captured_once
from tests.semantics.steps import Heads, Tower, assert_same_gradients, planned

FORWARDS: list[int] = []


@torch.library.custom_op("rkmate_tests::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    """A copy; each run of it is one of the forward."""
    FORWARDS.append(1)
    return x.clone()


@counted.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


counted.register_autograd(lambda ctx, grad: grad)


class Segmenter(nn.Module):
    """A tower of wide layers; its scores, and those of an auxiliary head half-way up."""

    def __init__(self, *, depth: int = 2, loss: bool = False) -> None:
        super().__init__()
        self.lower, self.upper = Tower(32, depth, 0.1), Tower(32, depth, 0.1)
        self.scores, self.aux = nn.Linear(32, 4), nn.Linear(32, 4)
        self.with_loss = loss

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        middle = self.lower(counted(x))
        top = self.upper(middle)
        out = {"out": self.scores(top), "aux": (self.aux(middle), x.sum()), "inputs": x}
        return {"loss": out["out"].pow(2).mean(), **out} if self.with_loss else out


def both(out: dict[str, Any]) -> torch.Tensor:
    labels = torch.arange(len(out["inputs"])) % 4
    return F.cross_entropy(out["out"], labels) + 0.4 * F.cross_entropy(out["aux"][0], labels)


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.randn(512, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("trains", "budget"), [
    ("all", 1.0), (("out", "aux"), 0.7), (["aux[0]", "out"], 1.0), (("loss", 1, "aux.0"), 0.7)])
def test_the_first_step_is_as_planned(trains: Any, budget: float, x: torch.Tensor) -> None:
    """Once through the forward, inside the budget, with eager mode's bits. Without `trains`, the loss
    that is among the outputs would be taken for the one that trains."""
    with_loss = trains == "all" or "loss" in trains
    model = Segmenter(loss=with_loss)

    def loss(out: Any) -> torch.Tensor:
        return both(out) + out["loss"] if with_loss else both(out)

    module = rkmate.wrap(model, (x,), budget=budget, progress=False, settings=rkmate.Settings(trains=trains))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    FORWARDS.clear()
    with mock.patch.object(PlannedStep, "again", side_effect=AssertionError("a second forward")):
        found = measure_peak(lambda: loss(module(x)).backward())        # a warning would be an error
    assert budget < 1 or len(FORWARDS) == 1
    assert found.peak <= module.plan.budget_bytes
    assert_same_gradients(model, module, lambda run: loss(run(x)))


def test_without_it_the_first_step_runs_twice(x: torch.Tensor) -> None:
    model = Segmenter(depth=1, loss=True)
    module = planned(model, x, calls=2)
    FORWARDS.clear()
    with pytest.warns(rkmate.RkmateWarning, match=r"trains=...\) says"):
        (both(module(x)) + module(x)["loss"]).backward()
    assert len(FORWARDS) > 2


def test_calls_of_another_form_are_planned_for_the_loss_that_was_seen() -> None:
    """A state that the first step lacks and later ones hand on: only the first step runs twice."""
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = Tower(32, 1, 0.0)

        def forward(self, x: torch.Tensor, state: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
            y = self.tower(x if state is None else x + state)
            return y, y.tanh()

    def step(run: nn.Module, state: torch.Tensor | None) -> torch.Tensor:
        y, state = run(x, state)
        y.square().mean().backward()
        return state.detach()

    model, x = Recurrent(), torch.randn(64, 32)
    module = planned(model, x)
    with pytest.warns(rkmate.RkmateWarning, match="on output 0 .* alone.* runs a second time"):
        state = step(module, None)
    step(module, state)                                     # a warning would be an error


@pytest.mark.parametrize("how", ["backward", "autograd.grad", "twice"])
def test_the_second_run_adds_up_as_the_original(how: str) -> None:
    """Gradients of a planned output, and of one that was not planned for, go through one backward: the first
    step has the original's bits, too. The mean leads to all parameters, and is a likely loss."""
    class Means(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = Tower(32, 2, 0.0)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.tower(x)
            return y, y.mean()

    def gradients(run: nn.Module) -> list[torch.Tensor]:
        run.zero_grad()
        y, mean = run(x)
        loss = y.pow(2).mean() + mean
        if how == "autograd.grad":
            return [*torch.autograd.grad(loss, [*run.parameters()])]
        if how == "twice":
            loss.backward(retain_graph=True)
        loss.backward()
        return [p.grad.clone() for p in run.parameters()]

    model, x = Means(), torch.randn(64, 32)
    module = planned(model, x)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        first = gradients(module)
    assert any(re.search(r"on outputs 0 and 1 .* what it keeps\. The next", str(w.message)) for w in said)
    assert all(map(torch.equal, first, gradients(model)))


@pytest.mark.parametrize(("trains", "message"), [
    ("logits", "trains names 'logits', and the model returns no such output: there are 'out' .number 0.; "
               "'aux.0' .number 1.; 'aux.1' .number 2., which takes no gradient; 'inputs' .number 3., which"),
    (("out", "aux.2"), "names 'aux.2', and the model returns no such output"),
    (4, "names 4, and the model returns no such output"),
    (-1, "names -1, and"),
    (("out", "inputs"), "names 'inputs', which depends on no parameter or input that requires a gradient"),
    (("out", "aux[1]"), r"names 'aux\[1\]', which depends on no parameter"),
    ((), r"trains is \(\); it should be"),
    (0.5, "trains is 0.5; it should be"),
    (True, "trains is True; it should be"),
    ({"out": 1}, "it should be"),
    (("out", None), "it should be"),
])
def test_wrong_ones_are_refused(trains: Any, message: str, x: torch.Tensor,
                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rkmate.pipeline.prepare.partition", None)           # nothing is planned before
    with captured_once("segmenter"), pytest.raises(rkmate.ArgumentError, match=message):
        planned(Segmenter(depth=1), x, trains=trains)


def test_every_public_call_takes_it(x: torch.Tensor) -> None:
    model = Segmenter(depth=1, loss=True)
    settings = rkmate.Settings(costs="analytic", trains=("out", "aux"))
    options: dict[str, Any] = {"progress": False, "settings": settings}
    with captured_once():
        plan = rkmate.plan(model, (x,), budget=0.9, **options)
        curve = rkmate.tradeoff(model, (x,), budgets=[0.9], **options)
        table = rkmate.compare(model, (x,), budgets=[1.0], planners=["chen"], **options)
        other = rkmate.plan(model, (x,), budget=0.9, progress=False,
                            settings=rkmate.Settings(costs="analytic"))
        module = planned(model, x, budget=None, plan=plan, trains=("aux", "out"))
        with pytest.raises(rkmate.PlanError, match="trains="):
            planned(model, x, budget=None, plan=plan)
    assert curve[0].fingerprint == plan.fingerprint != other.fingerprint
    assert table.rows[0].status == "ok"
    batch = rkmate.max_batch_size(model, lambda n: (x[:n],), device_memory="1MiB", most=2, **options)
    assert batch.plan.baseline_peak_bytes > 0
    for copied in (module, copy.deepcopy(module)):
        with mock.patch.object(PlannedStep, "again", side_effect=AssertionError("a second forward")):
            both(copied(x)).backward()
        assert copied.plan.schedule == plan.schedule


def test_losses_that_take_turns_have_a_plan_each(x: torch.Tensor) -> None:
    """Two steps for one head, one for the other: once that is known, no forward runs a second time."""
    model = Segmenter(depth=1)
    module = planned(model, x)
    turns = [lambda out: out["out"].square().sum(), lambda out: out["out"].square().sum(),
             lambda out: out["aux"][0].square().sum()]
    with warnings.catch_warnings(), mock.patch.object(PlannedStep, "again", autospec=True,
                                                      side_effect=PlannedStep.again) as again:
        warnings.filterwarnings("ignore", "the loss depends on output", rkmate.RkmateWarning)
        for step in range(12):
            before = again.call_count
            assert_same_gradients(model, module, lambda run, k=step: turns[k % 3](run(x)))
        assert 0 < again.call_count == before


def test_another_loss_in_a_step_that_is_measured() -> None:
    """A backward that runs while the memory of the loss is measured cannot stop that: the second run of its
    forward is planned with estimates, is no part of the loss, and leaves no profiler behind."""
    class Stages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.towers = nn.ModuleList(Tower(32, 1, 0.0) for _ in range(3))
            self.heads = nn.ModuleList(nn.Linear(32, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            outs = []
            for tower, head in zip(self.towers, self.heads, strict=True):
                x = tower(x)
                outs.append(head(x))
            return outs

    x = torch.randn(256, 32)
    module = rkmate.wrap(Stages(), (x,), budget=0.8, progress=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for k in range(4):
            loss = sum(out.pow(2).mean() for out in module(x)[:1 + k % 3])
            loss.backward()
    words = [str(w.message) for w in said]
    assert any("a second time" in w for w in words)
    assert not any("cannot be measured" in w or "no plan keeps" in w for w in words)
    del loss
    make_way()
    assert not is_profiling()


def test_another_loss_than_that_is_right_too() -> None:
    model, x = Heads(dropout=0.2), torch.randn(4, 8)
    module = planned(model, x, trains="left")
    assert_same_gradients(model, module, lambda run: run(x)["left"].pow(2).sum())
    with pytest.warns(rkmate.RkmateWarning, match=r"output 1 .* a second time, .*last bits may differ"):
        assert_same_gradients(model, module, lambda run: sum(t.pow(2).sum() for t in run(x).values()),
                              close=True)


# -- names --------------------------------------------------------------------------------

Pair = namedtuple("Pair", "left right")


@dataclass
class Batch:
    x: torch.Tensor
    more: Any = None


def test_names_of_every_container() -> None:
    a, b, c, d = (torch.zeros(k) for k in range(4))
    batch = Batch(c)
    batch.more = [batch, d]                                                  # refers to itself
    _, structure = take_apart({"pair": Pair(a, b), 3: batch, "again": [a, "text"], "none": None}, result=True)
    names = structure.names()
    assert {n: set(found) for n, found in names.items() if "-" not in n} == {
        "pair": {0, 1}, "pair.left": {0}, "pair.right": {1}, "pair.0": {0}, "pair.1": {1},
        "3": {2, 3}, "3.x": {2}, "3.more": {3}, "3.more.1": {3}, "again": {0}, "again.0": {0}}
    assert names["3.more.-1"] == {3}
    able = [True, True, False, True]
    assert chosen_outputs(structure, able, ("pair[1]", "3")) == (False, True, False, True)
    assert chosen_outputs(structure, able, ("[3].more[-1]", "again['0']")) == (True, False, False, True)
    assert chosen_outputs(structure, able, "all") == tuple(able)
    assert take_apart(a, result=True)[1].names() == {}


def test_one_name_or_number_is_a_list_of_one() -> None:
    assert checked_trains("logits") == ("logits",)
    assert checked_trains(2) == (2,)
    assert checked_trains(["a", 1]) == ("a", 1)
    assert checked_trains("all") == "all"
    assert checked_trains(("all",)) == ("all",)
    assert checked_trains(None) is None


def test_the_loss_of_a_comparison_takes_them() -> None:
    w = torch.ones(3, requires_grad=True)
    out = {"loss": w.sum(), "a": w * 2, "b": w * 3}
    assert torch.equal(loss_of(out), out["loss"])
    assert torch.equal(loss_of(out, ("a", 0)), out["loss"] + out["a"].tanh().mean())


@pytest.mark.parametrize("found", [torch.ones(3, dtype=torch.complex64), torch.tensor(1 + 1j)])
def test_complex_outputs_are_compared_by_both_parts(found: torch.Tensor) -> None:
    found.requires_grad_()
    for output in (found, found.conj()):
        found.grad = None
        loss_of(output).backward()
        assert found.grad is not None and (found.grad.real != 0).all() and (found.grad.imag != 0).all()
