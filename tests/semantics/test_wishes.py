"""Wishes: modules by name (`Settings.pins`) and hints in a forward (`rkmate.keep`, `rkmate.recompute`) hold
in every plan, for every planner, and change no bits."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate.ir.plan import PlanData
from rkmate.ir.schedule import Compute, Loss, Schedule, unmet_wishes
from rkmate.planners.registry import PLANNERS
from rkmate.show.replay import replay_baseline

X = torch.randn(64, 32)


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(self.act(self.up(self.norm(x)))))


class Tower(nn.Module):
    def __init__(self, hint: Any = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.hint = hint

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            if self.hint is not None:
                x = self.hint(x)
        return x.square().mean()


@functools.cache
def tower(hint: Any = None) -> Tower:
    """A model that tests plan, and leave as it is: plans of one model share its capture."""
    torch.manual_seed(0)
    return Tower(hint)


def settings(pins: Any = None, **more: Any) -> rkmate.Settings:
    return rkmate.Settings(costs="analytic", pins=pins or {}, **more)


def planned(model: nn.Module, budget: Any, pins: Any = None, **more: Any) -> rkmate.Plan:
    return rkmate.plan(model, (X,), budget=budget, settings=settings(pins, **more), progress=False)


def again(plan: PlanData) -> Counter[str]:
    """How often operations of each module run again."""
    runs = Counter(s.c for s in plan.schedule.steps if isinstance(s, Compute))
    return Counter(plan.graph.computations[i].path for i, n in runs.items() for _ in range(n - 1))


def at_loss(plan: PlanData) -> set[str]:
    """Modules whose data is in memory at the loss."""
    steps = plan.schedule.steps
    end = next(k for k, s in enumerate(steps) if isinstance(s, Loss))
    there: set[int] = set()
    for step in steps[:end]:
        if isinstance(step, Compute):
            there.update(plan.graph.cd.c[step.c].outputs)
        else:
            there.discard(step.d)  # type: ignore[union-attr]
    return {plan.graph.computations[plan.graph.cd.producer[j]].path for j in there}  # type: ignore[index]


@functools.cache
def plain(budget: float) -> rkmate.Plan:
    return planned(tower(), budget)


# -- by names -----------------------------------------------------------------------------

def test_without_wishes_these_would_be_computed_again() -> None:
    assert again(plain(0.7)) and not again(plain(1.0))
    assert "blocks.1.up" in at_loss(plain(1.0))


@pytest.mark.parametrize("pattern", ["blocks.*.up", "blocks.0.up", "*.up"])
def test_kept_modules_never_run_again(pattern: str) -> None:
    plan = planned(tower(), 0.7, {pattern: "keep"})
    assert plan.peak_bytes <= plan.budget_bytes and plan.overhead > 0
    assert not again(plan)["blocks.0.up"]
    assert plan.baseline_peak_bytes == plain(1.0).baseline_peak_bytes
    assert not again(planned(tower(), 1.0, {pattern: "keep"}))


def test_a_whole_block_is_kept_and_others_pay_for_it() -> None:
    plan = planned(tower(), 0.75, {"blocks.1": "keep"})
    inside = {path: n for path, n in again(plan).items() if path.startswith("blocks.1")}
    # Only what the block's own backward does not read runs again, if anything.
    assert set(inside) <= {"blocks.1.norm"} and again(plan)


@pytest.mark.parametrize("budget", [1.0, 0.5])
def test_modules_that_are_computed_again_leave_only_their_results(budget: float) -> None:
    plan = planned(tower(), budget, {"blocks.*": "recompute"})
    assert plan.peak_bytes <= plan.budget_bytes
    for k in range(3):
        assert not at_loss(plan) & {f"blocks.{k}.{n}" for n in ("norm", "up", "act", "drop", "down")}
        assert again(plan)[f"blocks.{k}.up"] == 1
    assert not again(plan)["blocks.0"]                  # a result, left to the planner
    assert plan.baseline_peak_bytes == plain(1.0).baseline_peak_bytes
    assert plan.baseline_seconds == pytest.approx(plain(1.0).baseline_seconds)


def test_a_module_of_one_operation_gives_up_its_result() -> None:
    plan = planned(tower(), 1.0, {"blocks.*.drop": "recompute"})
    # The mask is drawn again. What dropout reads is not kept instead: nothing else in the backward reads it.
    assert again(plan) == {f"blocks.{k}.{n}": 1 for k in range(3) for n in ("act", "drop")}
    assert "blocks.1.act" not in at_loss(plan) and "blocks.1.up" in at_loss(plan)
    assert plan.overhead > 0 and "except what is wished" in plan.note
    layers = (layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.GELU()))
    plan = planned(nn.Sequential(*layers), 1.0, {"1": "recompute"})
    assert again(plan) == {"1": 1} and "1" not in at_loss(plan) and "3" in at_loss(plan)


def test_wishes_of_both_kinds() -> None:
    plan = planned(tower(), 0.8, {"blocks.0": "recompute", "blocks.2.*": "keep"})
    assert again(plan)["blocks.0.up"] == 1
    assert not {p for p in again(plan) if p.startswith("blocks.2.")} - {"blocks.2.norm", "blocks.2.act"}


@pytest.mark.parametrize("pins", [{"blocks.*.drop": "keep"}, {"blocks.*": "recompute"},
                                  {"blocks.0": "recompute", "blocks.1.up": "keep"}], ids=str)
@pytest.mark.parametrize("budget", [0.8, "smallest"])
def test_bits_and_peaks_with_wishes(pins: Any, budget: Any) -> None:
    model = tower()
    if budget == "smallest":
        with pytest.raises(rkmate.InfeasibleBudget) as error:
            planned(model, 1000, pins)
        budget = error.value.minimum_bytes
    found = rkmate.check(model, (X,), budget=budget, steps=2, settings=settings(pins), progress=False)
    assert found.same_bits and found.within_budget


def test_wishes_with_a_loss_several_calls_gradients_in_place_and_apply() -> None:
    model = nn.Sequential(*(Block() for _ in range(3)))
    pins = {"1": "recompute", "2.act": "keep"}
    for more in ({}, {"calls": 2}, {"gradients": "in_place"}):
        plan = rkmate.plan(model, (X,), budget=0.8, loss=nn.functional.mse_loss, loss_args=(X,),
                           settings=settings(pins, **more), progress=False)
        assert plan.peak_bytes <= plan.budget_bytes
        assert again(plan)["model.1.up"] == 1 and not again(plan)["model.2.act"]
    rkmate.apply(model, budget=0.8, settings=settings(pins), progress=False)
    model(X).square().mean().backward()
    applied = rkmate.applied(model)
    assert applied is not None and again(applied.plan)["1.up"] == 1


@pytest.mark.parametrize("planner", [p for p in PLANNERS if p not in ("checkmate", "milp")])
def test_every_planner_follows_wishes_or_says_that_it_does_not(planner: str) -> None:
    pins = {"blocks.0": "recompute", "blocks.2.drop": "keep"}
    if "no-liveness" in planner:
        with pytest.raises(rkmate.WishError, match="take another planner"):
            planned(tower(), 0.95, pins, planner=planner)
        return
    plan = planned(tower(), 0.95, pins, planner=planner, planning_seconds=2.0)
    assert "blocks.0.up" not in at_loss(plan) and not again(plan)["blocks.2.drop"]
    assert plan.peak_bytes <= plan.budget_bytes


def test_data_that_is_to_be_computed_again_is_not_sent_away(tmp_path: Path) -> None:
    plan = rkmate.plan(tower(), (X,), budget=0.5, offload=rkmate.Offload(str(tmp_path), "1MiB"),
                       settings=settings({"blocks.*": "recompute"}), progress=False)
    copied = {plan.graph.computations[plan.graph.cd.producer[j]].path  # type: ignore[index]
              for j in {getattr(s, "d", None) for s in plan.schedule.copied or ()} - {None}}
    assert not copied & {f"blocks.{k}.{n}" for k in range(3) for n in ("up", "act", "drop")}


# -- by hints -----------------------------------------------------------------------------

def test_hints_do_nothing_without_a_plan() -> None:
    assert rkmate.keep(X) is X and rkmate.recompute(X) is X
    for hint in (rkmate.keep, rkmate.recompute):
        with pytest.raises(rkmate.ArgumentError, match="takes a tensor, and got list"):
            hint([X])  # type: ignore[arg-type]


def test_a_kept_tensor_is_never_computed_again() -> None:
    without, with_hints = planned(tower(rkmate.recompute), 1.0), planned(tower(rkmate.keep), 0.5)
    assert again(without)["blocks.0"] == 1 and "except what is wished" in without.note
    assert not [n for path, n in again(with_hints).items() if path in ("blocks.0", "blocks.1")]
    assert with_hints.nodes["computations"] == plain(1.0).nodes["computations"]     # hints leave no trace


@pytest.mark.parametrize("hint", [rkmate.keep, rkmate.recompute])
def test_bits_with_hints(hint: Any) -> None:
    found = rkmate.check(tower(hint), (X,), budget=0.8, steps=2, settings=settings(), progress=False)
    assert found.same_bits and found.within_budget


def test_a_plan_belongs_to_its_wishes(tmp_path: Path) -> None:
    pins = {"blocks.*": "recompute"}
    made = planned(tower(), 0.8, pins)
    made.save(tmp_path / "plan.json")
    saved = rkmate.Plan.load(tmp_path / "plan.json")
    assert saved == made and saved.graph.cd.forgotten
    assert replay_baseline(saved).peak == replay_baseline(made).peak
    found = rkmate.wrap(tower(), (X,), plan=saved, settings=settings(pins), progress=False)
    found(X).backward()
    for other in (settings(), settings({"blocks.0": "recompute"})):
        with pytest.raises(rkmate.PlanError):
            rkmate.wrap(tower(), (X,), plan=saved, settings=other, progress=False)
    with pytest.raises(rkmate.PlanError):
        rkmate.wrap(tower(rkmate.keep), (X,), plan=saved, settings=settings(pins), progress=False)


@pytest.mark.parametrize(("hint", "pins"), [(rkmate.keep, {}), (None, {"blocks.*": "recompute"})])
def test_other_sizes_follow_the_wishes_too(hint: Any, pins: Any) -> None:
    """The third one is derived from two captures."""
    module = rkmate.wrap(tower(hint), (X,), budget=0.7, settings=settings(pins), progress=False)
    for n in (64, 80, 96):
        module(torch.randn(n, 32)).backward()
        found = again(module.plan)
        assert module.plan.origin.inputs[0][1] == f"float32[{n}, 32]"
        assert not {"blocks.0", "blocks.1", "blocks.2"} & set(found) if hint else found["blocks.1.up"] == 1


# -- wishes that cannot be met ------------------------------------------------------------

def test_no_such_module() -> None:
    with pytest.raises(rkmate.WishError, match=r"pins names 'encoder.\*', and Tower has no such module; its "
                                               r"modules are 'blocks', 'blocks.0'"):
        planned(tower(), 0.8, {"blocks.*": "keep", "encoder.*": "recompute"})


def test_a_budget_that_is_too_small_names_the_wishes() -> None:
    with pytest.raises(rkmate.InfeasibleBudget, match=r"with pins\['blocks.\*'\] = 'keep'") as error:
        planned(tower(), 0.5, {"blocks.*": "keep"})
    assert error.value.minimum_bytes > planned(tower(), 0.5).peak_bytes
    plan = planned(tower(), error.value.minimum_bytes, {"blocks.*": "keep"})
    assert plan.peak_bytes <= error.value.minimum_bytes


def test_contradictions() -> None:
    with pytest.raises(rkmate.WishError, match=r"pins\['blocks.0'\] = 'keep' and pins\['\*.0.drop'\] .*con"):
        planned(tower(), 0.8, {"blocks.0": "keep", "*.0.drop": "recompute"})

    with pytest.raises(rkmate.WishError, match=r"rkmate.keep at .*test_wishes.py:\d+ .*recompute at .*con"):
        planned(tower(lambda x: rkmate.recompute(rkmate.keep(x))), 0.8)
    with pytest.raises(rkmate.WishError, match=r"rkmate.recompute at .*contradict"):
        planned(tower(rkmate.recompute), 0.8, {"blocks.*": "keep"})


class Bare(nn.Module):
    """Hints about an input and about an output."""

    def __init__(self, of_input: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
        self.of_input = of_input

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.of_input:
            return self.inner(rkmate.recompute(x))
        return rkmate.recompute(self.inner(x))


def test_hints_about_inputs_and_outputs() -> None:
    for of_input, words in ((True, "is an input"), (False, "is an output")):
        with pytest.raises(rkmate.WishError, match=rf"recompute at .*test_wishes.py:\d+: this value {words}"):
            planned(Bare(of_input), 1.0)


@pytest.mark.parametrize("more", [{"compile": True}, {"chunked_loss": "always"}, {"tiles": "always"}])
def test_larger_operations_compute_again_inside(more: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rkmate.pipeline.prepare.check_compiler", lambda device: None)
    for model, pins in ((tower(), {"blocks.*": "keep"}), (tower(rkmate.keep), {})):
        with pytest.raises(rkmate.WishError, match=f"cannot be met with {next(iter(more))}="):
            planned(model, 0.8, pins, **more)


@pytest.mark.parametrize(("pins", "message"), [
    (["blocks"], r"pins is \['blocks'\]"), ({3: "keep"}, "pins is {3"), ({"": "keep"}, "pins is"),
    ({"blocks": "kept"}, r"pins\['blocks'\] is 'kept'"), ({"blocks": None}, r"pins\['blocks'\] is None")])
def test_wrong_pins(pins: Any, message: str) -> None:
    with pytest.raises(rkmate.ArgumentError, match=message):
        rkmate.Settings(pins=pins)


def test_pins_and_parts() -> None:
    with pytest.raises(rkmate.ArgumentError, match="pins need a model that is planned as a whole"):
        rkmate.Settings(pins={"a": "keep"}, parts=("a",))


def test_settings_with_pins_can_be_hashed_and_copied() -> None:
    given = {"a": "keep"}
    made = rkmate.Settings(pins=given)  # type: ignore[arg-type]
    given["b"] = "recompute"
    assert made.pins == {"a": "keep"} and copy.deepcopy(made) == made
    assert made != rkmate.Settings()


def test_schedules_that_break_wishes_are_found() -> None:
    plan = planned(tower(), 0.5)
    graph = plan.graph.cd
    runs = Counter(s.c for s in plan.schedule.steps if isinstance(s, Compute))
    twice = next(c for c, n in runs.items() if n > 1)
    assert unmet_wishes(graph, plan.schedule) == []
    kept = dataclasses.replace(graph, once=frozenset({twice}))
    assert set(unmet_wishes(kept, plan.schedule)) == {graph.c[twice].name}
    steps = plain(1.0).schedule.steps
    saved = next(j for c in graph.c[graph.loss:] for j in c.inputs
                 if (made := graph.producer[j]) is not None and made < graph.loss)
    assert unmet_wishes(dataclasses.replace(graph, forgotten=frozenset({saved})), Schedule(steps)) == [
        graph.d[saved].name]
