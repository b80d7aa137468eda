"""Figures of plans for TensorBoard, Weights & Biases, and functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate.integrations import PlanLog
from rkmate.integrations.plan_log import figures
from tests.semantics.steps import Tower

SETTINGS = rkmate.Settings(costs="analytic")
X = torch.randn(256, 16)
Logged = list[tuple[dict[str, float], "int | None"]]


class Writer:
    """As TensorBoard's ``SummaryWriter``."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int | None]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        self.scalars.append((tag, scalar_value, global_step))


class Run:
    """As Weights & Biases' run."""

    def __init__(self) -> None:
        self.logged: Logged = []

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        self.logged.append((data, step))


def applied() -> nn.Module:
    return rkmate.apply(Tower(), budget=0.6, progress=False, settings=SETTINGS)


def wrapped() -> nn.Module:
    return rkmate.wrap(Tower(), (X,), budget=0.6, progress=False, settings=SETTINGS)


@pytest.mark.parametrize("made", [applied, wrapped])
def test_each_plan_is_logged_once(made: Callable[[], nn.Module]) -> None:
    model = made()
    logged: Logged = []

    def write(values: Mapping[str, float], step: int | None) -> None:
        logged.append((dict(values), step))
    log = PlanLog(model, to=write)
    for step, batch in enumerate((X, X, X[:128], X, X[:128])):
        model(batch).sum().backward()
        assert log(step) == (step in (0, 2))
    assert [step for _, step in logged] == [0, 2]
    first, second = (values for values, _ in logged)
    assert first["rkmate/peak_bytes"] > second["rkmate/peak_bytes"]


def test_the_figures_are_the_plans() -> None:
    plan = rkmate.plan(Tower(), (X,), budget=0.6, progress=False, settings=SETTINGS)
    values = figures(plan)
    assert values["rkmate/peak_bytes"] == plan.peak_bytes
    assert values["rkmate/budget_bytes"] == plan.budget_bytes
    assert values["rkmate/plain_peak_bytes"] == plan.baseline_peak_bytes
    assert values["rkmate/overhead"] == plan.overhead
    assert values["rkmate/planning_seconds"] == sum(plan.stage_seconds.values()) > 0
    again = sum(n * plan.costs[i].time for i, n in plan.schedule.recomputed().items())
    assert again > 0
    assert values["rkmate/recomputed_share"] == pytest.approx(again / plan.step_seconds)


def test_loggers_get_them_in_their_own_way() -> None:
    model, writer, run = wrapped(), Writer(), Run()
    PlanLog(model, to=writer)(7)
    PlanLog(model, to=run)(7)
    expected = figures(model.plan)
    assert writer.scalars == [(name, value, 7) for name, value in expected.items()]
    assert run.logged == [(expected, 7)]


def test_a_module_without_a_budget_has_nothing_to_log() -> None:
    run = Run()
    assert PlanLog(Tower(), to=run)() == 0
    assert run.logged == []


def test_another_logger_is_refused() -> None:
    with pytest.raises(rkmate.ArgumentError, match="SummaryWriter"):
        PlanLog(Tower(), to="runs/a")


def test_tensorboard_reads_the_figures(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed (pip install tensorboard)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    model = wrapped()
    with SummaryWriter(str(tmp_path)) as writer:
        PlanLog(model, to=writer)(3)
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    for name, value in figures(model.plan).items():
        (event,) = found.Scalars(name)
        assert event.step == 3
        assert event.value == pytest.approx(value, rel=1e-6)


def test_weights_and_biases_takes_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="Weights & Biases is not installed (pip install wandb)")
    monkeypatch.chdir(tmp_path)
    model = wrapped()
    run = wandb.init(project="rkmate", mode="offline", dir=str(tmp_path))
    PlanLog(model, to=run)(0)
    run.log({"loss": 1.0}, step=1)      # a row is complete when the next step begins
    expected = figures(model.plan)
    assert {name: run.summary[name] for name in expected} == expected
    run.finish()


def test_the_trainers_callback_logs_each_plan() -> None:
    pytest.importorskip("transformers")
    from types import SimpleNamespace

    run = Run()
    made = rkmate.integrations.BudgetCallback(0.6, log_to=run, progress=False, settings=SETTINGS)
    model = Tower()
    state = SimpleNamespace(log_history=[], global_step=0, is_world_process_zero=True)
    made.on_train_begin(SimpleNamespace(n_gpu=1), state, None, model=model)
    for step, batch in enumerate((X, X, X[:128])):
        model(batch).sum().backward()
        state.global_step = step + 1
        made.on_step_end(SimpleNamespace(n_gpu=1), state, None, model=model)
    assert [step for _, step in run.logged] == [1, 3]
    made.on_train_end(SimpleNamespace(n_gpu=1), state, None, model=model)
    with pytest.raises(rkmate.ArgumentError, match="SummaryWriter"):
        rkmate.integrations.BudgetCallback(0.6, log_to=3)
