"""The callback for Lightning's Trainer."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rkmate

pytestmark = [
    pytest.mark.xdist_group("trainers"),            # one process imports Lightning
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning",
                               "ignore::DeprecationWarning", "error::rkmate.RkmateWarning")]


@pytest.fixture(scope="module")
def tasks() -> Any:
    return pytest.importorskip("tests.integrations.lightning_tasks")


def assert_same_weights(found: nn.Module, plain: nn.Module) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("module", [None, "net"])
def test_the_largest_part_is_planned(module: str | None, tasks: Any, tmp_path: Path) -> None:
    found = tasks.fit(tasks.task(), tmp_path, tasks.budget(module))
    assert len(set(map(id, found.seen[1:]))) == 1, "the first step shows what its loss takes"
    assert all(plan.peak_bytes <= plan.budget_bytes < plan.baseline_peak_bytes for plan in found.seen)
    assert rkmate.applied(found.net) is None, "afterwards it is as it was"
    assert_same_weights(found, tasks.fit(tasks.task(), tmp_path))


def test_a_compiled_part_is_planned_as_its_original(tasks: Any, tmp_path: Path) -> None:
    made, plain = tasks.task(), tasks.fit(tasks.task(), tmp_path)
    made.net = torch.compile(original := made.net, backend="eager")
    with pytest.warns(rkmate.RkmateWarning, match="^Tower was compiled "):
        tasks.fit(made, tmp_path, tasks.budget())
    assert_same_weights(made, plain)
    assert rkmate.applied(original) is None


def test_a_model_that_is_made_when_training_begins_is_planned(tasks: Any, tmp_path: Path) -> None:
    found = tasks.fit(tasks.Configured(), tmp_path, tasks.budget())
    assert all(plan.peak_bytes <= plan.budget_bytes < plan.baseline_peak_bytes for plan in found.seen)
    assert_same_weights(found, tasks.fit(tasks.Configured(), tmp_path))


def test_the_trainers_loggers_get_the_figures_of_the_plan(tasks: Any, tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    from rkmate.integrations.plan_log import figures

    made = tasks.fit(tasks.task(), tmp_path, tasks.budget(), logger=CSVLogger(tmp_path))
    (file,) = tmp_path.rglob("metrics.csv")
    with file.open(newline="") as text:
        rows = [row for row in csv.DictReader(text) if row["rkmate/peak_bytes"]]
    plans = list({id(plan): figures(plan) for plan in made.seen}.values())
    assert [{name: float(row[name]) for name in plans[0]} for row in rows] == plans
    assert rows[0]["step"] == "1"


def test_a_failed_fit_leaves_the_module_as_it_was(tasks: Any, tmp_path: Path) -> None:
    broken = tasks.task(fails=True)
    with pytest.raises(RuntimeError, match="on purpose"):
        tasks.fit(broken, tmp_path, tasks.budget())
    assert broken.seen[0] is not None
    assert rkmate.applied(broken.net) is None


def test_a_part_that_is_not_there(tasks: Any, tmp_path: Path) -> None:
    from rkmate.integrations.lightning import part_of

    with pytest.raises(rkmate.ArgumentError, match=r"module is 'core', which Task does not have.*scale, net"):
        tasks.fit(tasks.task(), tmp_path, tasks.budget("core"))
    even = tasks.task()
    even.net = nn.Linear(4, 4)
    even.third = nn.Linear(4, 4)
    assert (part_of(even, ranks=2), part_of(tasks.task(), ranks=2)) == ("", "net")
    assert (part_of(even, ranks=1), part_of(tasks.task(), ranks=1)) == ("", "net")


@pytest.mark.parametrize("own_call", [True, False])
def test_a_module_whose_layers_are_attributes_is_planned_itself(own_call: bool, tasks: Any, tmp_path: Path
                                                                ) -> None:
    found, plain = tasks.Layers(own_call), tasks.Layers(own_call)
    plain.load_state_dict(found.state_dict())
    tasks.fit(found, tmp_path, tasks.budget())
    assert found.seen == [[""]] * 3
    assert rkmate.applied(found) is None, "afterwards it is as it was"
    assert_same_weights(found, tasks.fit(plain, tmp_path))


def test_the_trainer_s_clock_is_in_no_plan(tasks: Any, tmp_path: Path) -> None:
    """The trainer notes when it has validated, and the module refers to the trainer."""
    validated = tasks.fit(tasks.Validated(), tmp_path, tasks.budget("", 1.0), epochs=3)
    assert len(validated.plans) == 1
