"""`rkmate.doctor` on models: budgets worth knowing, parts that cannot be captured, and a model left as it
was."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate.diagnosis import model as diagnosis
from rkmate.diagnosis.machine import Finding
from rkmate.diagnosis.model import Diagnosis, doctor, free, knee
from tests.show.models import tower
from tests.show.targets import Branch

ANALYTIC = rkmate.Settings(costs="analytic")
MACHINE = (Finding("rkmate", "works", "here"),)
X = torch.randn(64, 8)


@pytest.fixture(autouse=True)
def no_look_at_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "examine", lambda folder=None: MACHINE)


def looked_at(model: nn.Module, *args: Any, settings: rkmate.Settings = ANALYTIC, **more: Any) -> Diagnosis:
    return doctor(model, args or (X,), settings=settings, progress=False, **more)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if x.sum() > 0 else x


class Block(nn.Module):
    """A part that can be captured, one that cannot, and one whose buffers a forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8))
        self.gate = Gate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(self.mlp(self.norm(x)))


def blocks(count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count)))


# -- budgets ------------------------------------------------------------------------------

def test_a_model_that_can_be_planned() -> None:
    model, args = tower(2)
    found = looked_at(model, *args)
    assert found.ok and found.error is None and found.curve is not None and found.smallest is found.curve[-1]
    text = str(found)
    assert text.startswith("works    rkmate")
    assert "Tower: can be planned" in text
    for words in ("its own peak:", "the knee", "the smallest", "-> rkmate.wrap(model, args, budget="):
        assert words in text
    assert len(text.splitlines()) < 10


def test_the_budget_that_it_advises_can_be_met() -> None:
    model, args = tower(2)
    (advice,) = looked_at(model, *args).advice
    planned = eval(advice, {"rkmate": rkmate, "model": model, "args": args})
    assert isinstance(planned, rkmate.PlannedModule)


class _Point:
    def __init__(self, peak: int, seconds: float) -> None:
        self.peak_bytes = self.budget_bytes = peak
        self.step_seconds = seconds


def test_the_knee_and_the_free_budget() -> None:
    curve: Any = [_Point(*p) for p in ((100, 1.0), (80, 1.005), (60, 1.1), (40, 1.2), (20, 2.0))]
    assert free(curve).peak_bytes == 80         # half a percent is free
    assert knee(curve).peak_bytes == 40         # two thirds of the memory for a fifth of the time
    flat: Any = [_Point(100, 1.0), _Point(50, 1.0)]
    assert free(flat) is knee(flat) is flat[1]


def test_a_loss_is_planned_with_the_model() -> None:
    found = looked_at(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)),
                      loss=nn.functional.mse_loss, loss_args=(X,))
    assert found.ok and found.curve is not None and "mse" in found.curve[0].source + str(
        [c.operation for c in found.curve[0].graph.computations])


# -- models that cannot be captured -------------------------------------------------------

def test_parts_that_can_and_cannot_be_captured() -> None:
    found = looked_at(blocks(), settings=rkmate.Settings(costs="analytic", opaque=("nothing",)))
    assert not found.ok and isinstance(found.error, rkmate.RkmateError) and found.curve is None


@pytest.mark.filterwarnings("ignore:.*each call runs as it is:rkmate.RkmateWarning")
def test_what_opaque_can_do_is_tried() -> None:
    model = blocks()
    found = looked_at(model)
    can, cannot = (tuple(p for p in found.parts if bool(p.why) is wrong) for wrong in (False, True))
    assert [p.names for p in can] == [("0.mlp", "1.mlp", "2.mlp")]
    assert [(p.names, p.kind) for p in cannot] == [(("0.gate", "1.gate", "2.gate"), "Gate")]
    assert "test_model.py" in cannot[0].why and "x.sum() > 0" in cannot[0].why
    assert isinstance(found.error, rkmate.CaptureError) and found.curve is not None
    assert 'Settings(opaque="auto") plans the model as a whole' in found.advice[0]
    text = str(found)
    assert "cannot be captured: 0.gate to 2.gate, 3 in all (Gate): Gate cannot" in text
    assert text.count("x.sum() > 0") == 1           # said once, of the part
    assert "the smallest" in text


def test_where_nothing_helps() -> None:
    found = looked_at(Branch(), torch.randn(2, 4))
    assert not found.parts and found.curve is None
    assert "rkmate.dtr" in found.advice[0] and "cannot be captured" in str(found)


class Drawn(nn.Module):
    """Layers are dropped by a generator of Python's, which no plan repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        for layer in self.layers:
            x = layer(x) if random.random() < 2 else x
        return x


def test_parts_where_the_whole_draws_numbers_of_python() -> None:
    model = Drawn()
    draws = random.getstate()
    found = looked_at(model)
    assert [p.names for p in found.parts] == [("layers.0", "layers.1")] and not found.parts[0].why
    assert "rkmate.apply" in found.advice[0]
    assert "draws from random" in str(found)
    assert random.getstate() == draws and model.seen == 0


def test_a_loss_that_cannot_be_captured() -> None:
    found = looked_at(nn.Linear(8, 8), loss=lambda out: out.sum() if out.sum() > 0 else -out.sum())
    assert "without its loss" in found.advice[0]


def test_a_forward_that_fails_by_itself() -> None:
    class Fails(Gate):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 1e9:
                return x
            raise KeyError("no such table")
    found = looked_at(Fails())
    assert "forward fails on these inputs (KeyError: 'no such table')" in str(found)


def test_other_refusals_are_told_as_they_are() -> None:
    assert "on the meta device" in str(looked_at(nn.Linear(8, 8, device="meta"))).lower()
    frozen = nn.Linear(8, 8).requires_grad_(False)
    assert "nothing to train" in str(looked_at(frozen))


def test_wrong_arguments_raise() -> None:
    with pytest.raises(rkmate.ArgumentError, match="model is"):
        doctor(3, (X,))  # type: ignore[arg-type]
    with pytest.raises(rkmate.UnknownOption, match="doctor takes no 'budget'"):
        doctor(nn.Linear(8, 8), (X,), budget=3)  # type: ignore[call-arg]


@pytest.mark.filterwarnings("ignore:.*each call runs as it is:rkmate.RkmateWarning")
@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training: bool) -> None:
    model = blocks(1).train(training)
    before = copy.deepcopy(model.state_dict())
    attributes = {n: dict(vars(m)) for n, m in model.named_modules()}
    state = torch.get_rng_state()
    looked_at(model)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    for name, module in model.named_modules():
        assert vars(module).keys() == attributes[name].keys()
        assert module.training is training and not module._forward_pre_hooks
    assert all(p.grad is None for p in model.parameters())


def test_the_machine_alone() -> None:
    assert doctor() == Diagnosis(MACHINE)
    assert str(doctor()) == str(MACHINE[0])
    assert not Diagnosis((Finding("solver", "broken", "fails"),)).ok
