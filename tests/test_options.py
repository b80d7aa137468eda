"""What every public call takes: `rkmate.Options`, declared once; old keywords, unknown ones."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate.cli.main import _COMMANDS, _parser
from rkmate.integrations.trainer import _BudgetCallback
from rkmate.pipeline import prepare
from rkmate.settings import MOVED, OPTIONS, Options, chosen, option_docs, parameters_of
from tests.house import PACKAGE

CALLS: dict[str, tuple[Callable[..., Any], str]] = {
    "wrap": (rkmate.wrap, "model args kwargs budget plan loss loss_args"),
    "apply": (rkmate.apply, "model args kwargs budget plan"),
    "plan": (rkmate.plan, "model args kwargs budget loss loss_args device"),
    "tradeoff": (rkmate.tradeoff, "model args kwargs budgets loss loss_args device"),
    "compare": (rkmate.compare, "model args kwargs budgets planners measure time_limit"),
    "max_batch_size": (rkmate.max_batch_size,
                       "model make_inputs device_memory optimizer_states most device"),
    "shared_plan": (rkmate.shared_plan, "model args kwargs budget group"),
    "check": (rkmate.check, "model args kwargs budget steps loss loss_args optimizer"),
    "doctor": (rkmate.doctor, "model args kwargs loss loss_args"),
    "BudgetCallback": (_BudgetCallback.__init__, "budget log_to"),
}
"""By name: the call, and what it takes beside the options."""
X = torch.randn(4, 8)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU())


def called(name: str, **options: Any) -> Any:
    call, own = CALLS[name]
    if name == "BudgetCallback":
        return _BudgetCallback(0.5, **options)
    if name == "max_batch_size":
        return call(model(), lambda n: (torch.randn(n, 8),), device_memory="1MiB", most=1, **options)
    if "budget" in own.split() and "plan" not in options:
        options["budget"] = 1.0
    return call(model(), (X,), **options)


@pytest.fixture
def nothing_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "capture", None)


# -- the declaration ----------------------------------------------------------------------

@pytest.mark.parametrize("name", CALLS)
def test_every_call_takes_the_declared_options_and_its_own(name: str) -> None:
    call, own = CALLS[name]
    parameters = inspect.signature(call).parameters
    assert parameters["options"].annotation == "Unpack[Options]"
    assert parameters["options"].kind is inspect.Parameter.VAR_KEYWORD
    assert parameters_of(call) == tuple(own.split())
    assert not {*own.split()} & {*OPTIONS, *MOVED}


def test_no_other_function_of_the_package_declares_options() -> None:
    """Every `**options: Unpack[Options]` is in the table above. The callback for Lightning, whose module does
    not load without it, has the name of the other one."""
    kwargs = [(node.name, node.args.kwarg.annotation)
              for path in PACKAGE.rglob("*.py")
              for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
              if isinstance(node, ast.FunctionDef) and node.args.kwarg is not None]
    found = [name.replace("__init__", "BudgetCallback") for name, annotation in kwargs
             if annotation is not None and ast.unparse(annotation) == "Unpack[Options]"]
    assert sorted(found) == sorted([*CALLS, "BudgetCallback"])


def test_wrap_names_twelve_parameters_at_most() -> None:
    assert len((*parameters_of(rkmate.wrap), *OPTIONS)) <= 12


def test_every_option_is_explained() -> None:
    docs = option_docs()
    assert tuple(docs) == OPTIONS == tuple(Options.__annotations__)
    assert all(len(about) > 40 and about.endswith(".") for about in docs.values())


@pytest.mark.parametrize("command", [c.name for c in _COMMANDS if c.target])
def test_the_command_says_what_the_declaration_says(command: str) -> None:
    parser = next(a for a in _parser()._actions if a.dest == "command").choices[command]  # type: ignore
    flags = {a.dest: " ".join((a.help or "").split()) for a in parser._actions}
    assert set(OPTIONS) - {"settings", "progress"} <= set(flags) and "quiet" in flags
    for name in ("calls", "compile", "offload"):
        assert flags[name].lower().startswith(option_docs()[name].split(". ")[0].lower())


@pytest.mark.usefixtures("nothing_is_planned")
@pytest.mark.parametrize("name", CALLS)
def test_every_option_is_looked_at_before_any_work(name: str, tmp_path: Path) -> None:
    for options, message in (({"calls": 0}, "calls is 0"), ({"compile": "yes"}, "compile is 'yes'"),
                             ({"offload": 3}, "offload is 3"),
                             ({"settings": {"costs": "analytic"}}, "settings is dict")):
        with pytest.raises(rkmate.ArgumentError, match=message):
            called(name, **options)


def test_an_option_of_the_call_wins_over_the_settings() -> None:
    settings = rkmate.Settings(calls=3, compile="auto", offload=rkmate.Offload("here", "1MiB"))
    kept = chosen({"settings": settings, "calls": None, "compile": None, "offload": None}, rkmate.wrap)
    assert kept.settings == settings and kept.progress
    given = {"settings": settings, "calls": 2, "compile": False, "offload": "there", "progress": False}
    found = chosen(given, rkmate.wrap)
    assert (found.settings.calls, found.settings.compile, found.progress) == (2, False, False)
    assert found.settings.offload == rkmate.Offload("there")
    assert chosen({**found.options()}, rkmate.wrap) == found


def test_a_callback_plans_for_several_calls() -> None:
    callback = _BudgetCallback(1.0, calls=2, settings=rkmate.Settings(costs="analytic"), progress=False)
    trained = model()
    callback.on_train_begin(None, None, None, model=trained)
    (trained(X) + trained(X)).sum().backward()
    wrapped = rkmate.wrap(model(), (X,), budget=1.0, calls=2, settings=rkmate.Settings(costs="analytic"),
                          progress=False)
    shown = rkmate.applied(trained)
    assert shown is not None and shown.plan.calls == wrapped.plan.calls == 2
    assert shown.plan.budget_bytes == wrapped.plan.budget_bytes


# -- unknown keywords ---------------------------------------------------------------------

@pytest.mark.usefixtures("nothing_is_planned")
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("keyword", "nearest"), [
    ("compil", "did you mean compile="), ("setings", "did you mean settings="),
    ("layouts", r"did you mean settings=rkmate.Settings\(layouts=...\)"),
    ("gradient", r"did you mean settings=rkmate.Settings\(gradients=...\)"),
    ("on_new_shapes", r"did you mean settings=rkmate.Settings\(run=rkmate.RunSettings\(on_new_shape=...\)\)"),
    ("zzz", "it takes .*calls, compile, offload, settings, progress; everything else is in settings=rkm")])
def test_an_unknown_keyword_is_refused_with_the_nearest_one(name: str, keyword: str, nearest: str) -> None:
    for kind in (TypeError, rkmate.ArgumentError, rkmate.UnknownOption):
        with pytest.raises(kind, match=f"{name} takes no '{keyword}': {nearest}"):
            called(name, **{keyword: 1})


def test_what_a_call_never_took_is_unknown() -> None:
    with pytest.raises(rkmate.UnknownOption, match="compare takes no 'planner': did you mean planners="):
        called("compare", planner="chen")
    with pytest.raises(rkmate.UnknownOption, match="apply takes no 'loss_kwargs'"):
        called("apply", loss_kwargs={})


# -- keywords of earlier versions ---------------------------------------------------------

OLD: dict[str, tuple[Any, Callable[[rkmate.Settings], Any]]] = {
    "planner": ("chen", lambda s: s.planner_name), "costs": ("analytic", lambda s: s.costs),
    "trains": (("out", 1), lambda s: s.trains), "gradients": ("in_place", lambda s: s.gradients),
    "planning_seconds": (2.0, lambda s: s.planning_seconds), "verify": (False, lambda s: s.run.verify),
    "on_new_shape": ("error", lambda s: s.run.on_new_shape), "training": (True, lambda s: s.run.training),
    "lengths": ((8, 16), lambda s: s.run.lengths), "pad": ({"x": 0.0}, lambda s: s.run.pad),
    "cuda_graph": (True, lambda s: s.run.cuda_graph)}
"""Values, and where they are now."""


def test_every_old_keyword_is_tried_here() -> None:
    assert {*OLD, "offload_bytes", "loss_kwargs"} == set(MOVED)


@pytest.mark.parametrize("keyword", OLD)
def test_an_old_keyword_works_and_says_its_new_place(keyword: str) -> None:
    value, now = OLD[keyword]
    with pytest.warns(rkmate.RkmateWarning, match=rf"wrap\({keyword}=...\) is now settings=") as caught:
        found = chosen({keyword: value}, rkmate.wrap).settings
    assert now(found) == value != now(rkmate.Settings())
    assert len(caught) == 1 and MOVED[keyword].place in str(caught[0].message)
    with pytest.warns(rkmate.RkmateWarning):
        assert chosen({keyword: None}, rkmate.wrap).settings == rkmate.Settings()


def test_old_keywords_keep_what_the_settings_say() -> None:
    settings = rkmate.Settings(planner=rkmate.PlannerSettings(slots=7), run=rkmate.RunSettings(training=True))
    with pytest.warns(rkmate.RkmateWarning):
        found = chosen({"planner": "auto", "verify": False, "settings": settings}, rkmate.wrap).settings
    assert (found.planner_name, found.of_planner.slots) == ("auto", 7)
    assert found.run == rkmate.RunSettings(training=True, verify=False)
    with pytest.warns(rkmate.RkmateWarning, match=r"is now offload=rkmate.Offload\(place, most_bytes\)"):
        found = chosen({"offload": "here", "offload_bytes": "1MiB"}, rkmate.wrap).settings
    assert found.offload == rkmate.Offload("here", 2**20)


@pytest.mark.parametrize("name", [n for n in CALLS if n not in ("compare", "shared_plan", "max_batch_size")])
def test_calls_with_old_keywords(name: str) -> None:
    """The warning points at the caller's own line."""
    options: dict[str, Any] = {"costs": "analytic", "planner": "chen", "progress": False}
    with pytest.warns(rkmate.RkmateWarning, match="the old keyword goes with the next version") as caught:
        made = called(name, **options)
    assert {c.filename for c in caught} == {__file__} and len(caught) == 2
    plan = {"wrap": lambda: made.plan, "check": lambda: made.plan, "doctor": lambda: made.smallest,
            "apply": lambda: rkmate.applied(made).plan,  # type: ignore[union-attr]
            "plan": lambda: made, "tradeoff": lambda: made[0]}.get(name)
    if plan is not None:
        assert plan().planner == "chen"
    else:
        assert made._options["settings"].planner_name == "chen"


def test_the_old_way_to_give_a_loss_named_samples() -> None:
    def loss(out: torch.Tensor, *, target: torch.Tensor) -> torch.Tensor:
        return (out - target).square().mean()

    options: dict[str, Any] = {"settings": rkmate.Settings(costs="analytic"), "progress": False}
    with pytest.warns(rkmate.RkmateWarning, match='kwargs={..., "loss_kwargs": ...}'):
        old = rkmate.plan(model(), (X,), budget=1.0, loss=loss, **{"loss_kwargs": {"target": X}, **options})
    new = rkmate.plan(model(), (X,), {"loss_kwargs": {"target": X}}, budget=1.0, loss=loss, **options)
    assert old.fingerprint == new.fingerprint


# -- settings that only some calls can follow ---------------------------------------------

@pytest.mark.usefixtures("nothing_is_planned")
@pytest.mark.parametrize("name", ["apply", "BudgetCallback"])
def test_what_only_wrap_can_follow_is_refused_elsewhere(name: str) -> None:
    for run in (rkmate.RunSettings(cuda_graph=True), rkmate.RunSettings(lengths=(8,)),
                rkmate.RunSettings(pad={"x": 0.0})):
        with pytest.raises(rkmate.ArgumentError, match=f"only rkmate.wrap follows this, and {name} was"):
            called(name, settings=rkmate.Settings(run=run))


@pytest.mark.usefixtures("nothing_is_planned")
@pytest.mark.parametrize("name", ["compare", "max_batch_size"])
def test_a_planner_is_refused_where_others_are_asked(name: str) -> None:
    with pytest.raises(rkmate.ArgumentError, match=f"planner='chen'.: {name} asks"):
        called(name, settings=rkmate.Settings(planner="chen"))


def test_wrong_settings_of_a_run() -> None:
    for wrong, message in (({"verify": 1}, "verify is 1"), ({"cuda_graph": "yes"}, "cuda_graph is 'yes'"),
                           ({"on_new_shape": "ignore"}, "on_new_shape is 'ignore'")):
        with pytest.raises(rkmate.ArgumentError, match=message):
            rkmate.RunSettings(**wrong)  # type: ignore[arg-type]
    with pytest.raises(rkmate.ArgumentError, match="run is 3"):
        rkmate.Settings(run=3)  # type: ignore[arg-type]
    with pytest.raises(rkmate.ArgumentError, match=r"trains is 0\.5"):
        rkmate.Settings(trains=0.5)  # type: ignore[arg-type]
