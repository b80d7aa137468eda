"""What a plan carries about its graph: the same graph, also after it was saved."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate.ir.schedule import Schedule
from rkmate.ir.simulate import simulate
from rkmate.pipeline.model import origin_of
from rkmate.pipeline.prepare import prepare, trace
from rkmate.pipeline.settings import Settings
from rkmate.pipeline.solve import summarise
from rkmate.support.progress import Progress
from tests.show.models import PLANS, in_one_process, tower, wrapped

pytestmark = in_one_process


def test_the_summary_is_the_prepared_graph() -> None:
    model, args = tower(2)
    prepared = prepare(trace(model, args, {}, Settings(costs="analytic"), Progress(False)))
    summary = summarise(prepared)
    assert summary.cd == prepared.graph
    assert summary.cuts == tuple(tuple(sorted(c)) for c in prepared.partition.cuts)
    assert [c.block for c in summary.computations] == list(prepared.partition.block_of)


def test_paths_are_those_of_the_users_model() -> None:
    model, _ = tower(4)
    known = {"", *(name for name, _ in model.named_modules())}
    g = wrapped().plan.graph
    assert {c.path for c in g.computations} <= known
    gelus = {c.path for c in g.computations if c.operation in ("gelu", "gelu_backward")}
    assert gelus == {f"layers.{k}" for k in range(4)}
    assert {c.path for c in g.captured} <= known


def test_captured_operations_are_told_apart() -> None:
    g = wrapped().plan.graph
    names = {c.name for c in g.cd.c[:g.cd.loss]}
    assert {c.name for c in g.captured if c.kind == "operation"} == names
    kinds = {c.operation: c.kind for c in g.captured if c.operation in ("t", "detach", "gelu")}
    assert kinds["gelu"] == "operation"
    assert kinds["t"] == "view"
    assert kinds["detach"] == "dropped"
    assert all(j < k for k, c in enumerate(g.captured) for j in c.inputs)


@pytest.mark.parametrize("which", ["half", "loss outside"])
def test_a_saved_plan_brings_its_graph_back(which: str, tmp_path: Path) -> None:
    plan = PLANS[which]()
    plan.save(tmp_path / "plan.json")
    loaded = rkmate.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.graph == plan.graph
    assert loaded.source == plan.source
    again = simulate(loaded.graph.cd, loaded.schedule)
    assert again.peak == plan.peak_bytes


def test_a_plan_knows_what_it_was_made_for(tmp_path: Path) -> None:
    origin = wrapped().plan.origin
    model, _ = tower(4)
    assert origin is not None
    number = sum(p.numel() for p in model.parameters())
    assert (origin.model, origin.parameters, origin.trained) == ("Tower", number, number)
    assert origin.inputs == (("ids", "int64[4, 64]"),)
    assert origin.device == "cpu"
    assert [name for name, _ in origin.versions] == ["rkmate", "torch", "python"]
    assert dict(origin.versions)["torch"] == torch.__version__
    wrapped().plan.save(tmp_path / "plan.json")
    assert rkmate.Plan.load(tmp_path / "plan.json").origin == origin


def test_a_plan_that_was_saved_without_its_origin_loads(tmp_path: Path) -> None:
    wrapped().plan.save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    del content["checksum"], content["origin"]
    content["checksum"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (tmp_path / "plan.json").write_text(json.dumps(content))
    loaded = rkmate.Plan.load(tmp_path / "plan.json")
    assert loaded.origin is None
    assert loaded == wrapped().plan


class Named(nn.Linear):
    """Takes inputs in every way."""

    def forward(self, x: torch.Tensor, *more: Any, mask: Any = None, **others: Any) -> torch.Tensor:
        return super().forward(x)


def test_inputs_have_the_names_of_the_forward() -> None:
    model, x = Named(4, 4), torch.zeros(2, 4)
    model.bias.requires_grad_(False)
    origin = origin_of(model, (x, [x.half()], x), {"mask": {"left": x.bool()}, "flag": True, "y": x})
    assert origin.inputs == (("x", "float32[2, 4]"), ("more.0.0", "float16[2, 4]"),
                             ("more.1", "float32[2, 4]"), ("mask.left", "bool[2, 4]"), ("y", "float32[2, 4]"))
    assert (origin.parameters, origin.trained) == (20, 16)


def test_inputs_of_a_forward_with_anothers_signature_have_numbers() -> None:
    model, x = nn.Identity(), torch.zeros(2)
    forward = functools.wraps(Named.forward)(lambda *tensors: tensors[0])
    model.forward = forward  # type: ignore[method-assign]
    assert origin_of(model, (), {"z": x}).inputs == (("z", "float32[2]"),)


def test_a_graph_that_does_not_fit_its_costs_is_no_plan(tmp_path: Path) -> None:
    plan = wrapped().plan
    plan.save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    del content["checksum"]
    content["graph"]["computations"].pop()
    content["checksum"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(rkmate.PlanError, match="not a complete plan"):
        rkmate.Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(("text", "why"), [
    ("{", "is not a complete plan file"), ("[1]", "is not an rkmate plan"),
    ('{"peak": 1}', "is not an rkmate plan"), ('{"checksum": "", "format": 0}', "has format 0; this")])
def test_files_that_are_no_plans(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(rkmate.PlanError, match=why):
        rkmate.Plan.load(tmp_path / "plan.json")


def test_an_edited_file_is_no_plan(tmp_path: Path) -> None:
    wrapped().plan.save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps({**content, "peak_bytes": 1}))
    with pytest.raises(rkmate.PlanError, match="was changed after it was saved"):
        rkmate.Plan.load(tmp_path / "plan.json")


def _other_device(plan: rkmate.Plan) -> rkmate.Plan:
    assert plan.origin is not None
    return replace(plan, fingerprint="", origin=replace(plan.origin, device="cuda:0"))


@pytest.mark.parametrize(("edit", "why"), [
    (lambda plan: replace(plan, peak_bytes=plan.peak_bytes + 1), "its peak is .* the simulator says"),
    (lambda plan: replace(plan, schedule=Schedule(plan.schedule.steps[1:])), "does not run on this model"),
    (lambda plan: replace(plan, compiled="a compiler"), "compile=True, and this call says False"),
    (lambda plan: replace(plan, fingerprint=""), "belongs to another model"),
    (_other_device, "was made for cuda:0, and this is cpu")])
def test_plans_that_a_model_cannot_follow(edit: Callable[[rkmate.Plan], rkmate.Plan], why: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1)), torch.randn(2, 4)
    plan = rkmate.plan(model, (x,), budget=1.0, settings=Settings(costs="analytic"), progress=False)
    with pytest.raises(rkmate.PlanError, match=why):
        rkmate.wrap(model, (x,), plan=edit(plan), progress=False)
