"""The callback for Lightning's Trainer."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rkmate
from tests.semantics.steps import Tower

lightning = pytest.importorskip("lightning")
integration = pytest.importorskip("rkmate.integrations.lightning")
BudgetCallback, part_of = integration.BudgetCallback, integration.part_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning",
                                        "ignore::DeprecationWarning", "error::rkmate.RkmateWarning")


class Task(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.scale = nn.Linear(4, 4)
        self.net = Tower(dropout=0.1)
        self.fails = fails
        self.seen: list[Any] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).pow(2).mean()
        shown = rkmate.applied(self.net)
        self.seen.append(None if shown is None else shown.plan)
        if self.fails and index == 1:
            raise RuntimeError("on purpose")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Configured(Task):
    """A task that makes its model when training begins, as it should where that is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(1)
            self.scale, self.net = nn.Linear(4, 4), Tower(dropout=0.1)


def fit(task: Task, folder: Path, *callbacks: Any) -> Task:
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(3 * 64, 16)), 64)
    lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                      enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
                      callbacks=list(callbacks)).fit(task, data)
    return task


def task(**options: Any) -> Task:
    torch.manual_seed(1)
    return Task(**options)


def budget(module: str | None = None) -> Any:
    return BudgetCallback(0.8, module, progress=False, settings=rkmate.Settings(costs="analytic"))


@pytest.mark.parametrize("module", [None, "net"])
def test_the_largest_part_is_planned(module: str | None, tmp_path: Path) -> None:
    found = fit(task(), tmp_path, budget(module))
    assert len(set(map(id, found.seen[1:]))) == 1, "the first step shows what its loss takes"
    assert all(plan.peak_bytes <= plan.budget_bytes < plan.baseline_peak_bytes for plan in found.seen)
    assert rkmate.applied(found.net) is None, "afterwards it is as it was"
    plain = fit(task(), tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), plain.parameters(), strict=True))


def test_a_compiled_part_is_planned_as_its_original(tmp_path: Path) -> None:
    made, plain = task(), fit(task(), tmp_path)
    made.net = torch.compile(original := made.net, backend="eager")
    with pytest.warns(rkmate.RkmateWarning, match="^Tower was compiled "):
        fit(made, tmp_path, budget())
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), plain.parameters(), strict=True))
    assert rkmate.applied(original) is None


def test_a_model_that_is_made_when_training_begins_is_planned(tmp_path: Path) -> None:
    found, plain = fit(Configured(), tmp_path, budget()), fit(Configured(), tmp_path)
    assert all(plan.peak_bytes <= plan.budget_bytes < plan.baseline_peak_bytes for plan in found.seen)
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), plain.parameters(), strict=True))


def test_the_trainers_loggers_get_the_figures_of_the_plan(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    from rkmate.integrations.plan_log import figures

    made, data = task(), DataLoader(TensorDataset(torch.randn(3 * 64, 16)), 64)
    lightning.Trainer(max_epochs=1, accelerator="cpu", logger=CSVLogger(tmp_path), enable_checkpointing=False,
                      enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
                      callbacks=[budget()]).fit(made, data)
    (file,) = tmp_path.rglob("metrics.csv")
    with file.open(newline="") as text:
        rows = [row for row in csv.DictReader(text) if row["rkmate/peak_bytes"]]
    plans = list({id(plan): figures(plan) for plan in made.seen}.values())
    assert [{name: float(row[name]) for name in plans[0]} for row in rows] == plans
    assert rows[0]["step"] == "1"


def test_a_failed_fit_leaves_the_module_as_it_was(tmp_path: Path) -> None:
    broken = task(fails=True)
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(broken, tmp_path, budget())
    assert broken.seen[0] is not None
    assert rkmate.applied(broken.net) is None


def test_a_part_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(rkmate.ArgumentError, match=r"module is 'core', which Task does not have.*scale, net"):
        fit(task(), tmp_path, budget("core"))
    even = task()
    even.net = nn.Linear(4, 4)
    even.third = nn.Linear(4, 4)
    assert (part_of(even, ranks=2), part_of(task(), ranks=2)) == ("", "net")
    assert (part_of(even, ranks=1), part_of(task(), ranks=1)) == ("", "net")


class Layers(Task):
    """Its layers are attributes."""

    def __init__(self, own_call: bool) -> None:
        super().__init__()
        self.net = nn.Linear(16, 96)
        self.encoder = nn.Sequential(nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        self.decoder = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 16))
        self.own_call = own_call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.decoder(self.encoder(torch.tanh(self.net(x))))
        return out

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = (self(batch[0]) if self.own_call else self.forward(batch[0])).pow(2).mean()
        self.seen.append([n for n, m in self.named_modules() if (shown := rkmate.applied(m)) is not None
                          and shown.has_plan])
        return loss  # type: ignore[no-any-return]


@pytest.mark.parametrize("own_call", [True, False])
def test_a_module_whose_layers_are_attributes_is_planned_itself(own_call: bool, tmp_path: Path) -> None:
    found, plain = Layers(own_call), Layers(own_call)
    plain.load_state_dict(found.state_dict())
    fit(found, tmp_path, budget())
    assert found.seen == [[""]] * 3
    assert rkmate.applied(found) is None, "afterwards it is as it was"
    fit(plain, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), plain.parameters(), strict=True))


def test_the_trainer_s_clock_is_in_no_plan(tmp_path: Path) -> None:
    """The trainer notes when it has validated, and the module refers to the trainer."""
    class Direct(Task):
        plans: set[int]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.net(self.scale(x[:, :4]).repeat(1, 4))
            return out

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            loss: torch.Tensor = self(batch[0]).pow(2).mean()
            shown = rkmate.applied(self)
            assert shown is not None
            self.plans = {*map(id, shown._plans.all())}
            return loss

        def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
            self(batch[0])

    task = Direct()
    data = DataLoader(TensorDataset(torch.randn(3 * 64, 16)), 64)
    lightning.Trainer(max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False,
                      enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
                      callbacks=[BudgetCallback(1.0, module="", progress=False)]).fit(task, data, data)
    assert len(task.plans) == 1
