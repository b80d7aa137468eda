"""The command line: what it prints and writes, and its exit status."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rkmate
from rkmate.cli.arguments import with_fields
from rkmate.cli.main import main
from rkmate.cli.targets import DEMOS, Demo, load_target
from rkmate.show.draw import has_dot

TARGET = "tests.show.targets:sample"
FAST = ["--analytic", "--quiet"]
needs_dot = pytest.mark.skipif(not has_dot(), reason="Graphviz (the program dot) is not installed")
Captured = pytest.CaptureFixture[str]


def run(*arguments: str) -> int:
    return main([*arguments, *FAST])


def test_plan_prints_the_table(capsys: Captured) -> None:
    assert run("plan", TARGET, "--budget", "60%") == 0
    out = capsys.readouterr().out
    assert out.startswith("rkmate plan")
    assert "layers.1" in out


def test_plan_as_json(capsys: Captured) -> None:
    assert run("plan", TARGET, "--budget", "60%", "--json", "--explain") == 0
    content = json.loads(capsys.readouterr().out)
    assert content["peak_bytes"] <= content["budget_bytes"] < content["baseline_peak_bytes"]
    assert content["overhead"] > 0
    assert "The peak stands" in content["explanation"]


def test_plan_explains_and_writes_files(capsys: Captured, tmp_path: Path) -> None:
    assert run("plan", TARGET, "--budget", "60%", "--explain", "--save", str(tmp_path / "p.json"),
               "--source", str(tmp_path / "p.py")) == 0
    out = capsys.readouterr().out
    plan = rkmate.Plan.load(tmp_path / "p.json")
    assert plan.explain() in out
    assert "aten" in (tmp_path / "p.py").read_text()


def test_keyword_arguments(capsys: Captured) -> None:
    assert run("plan", "tests.show.targets:with_keywords", "--budget", "60%") == 0
    assert "layers.1" in capsys.readouterr().out


def test_curve(capsys: Captured, tmp_path: Path) -> None:
    picture = tmp_path / "c.svg"
    assert run("curve", TARGET, "--budgets", "100%", "60%", "--plot", str(picture)) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert picture.exists()
    assert run("curve", TARGET, "--json") == 0
    assert len(json.loads(capsys.readouterr().out)) == 10


@needs_dot
def test_draw_a_model_and_a_saved_plan(capsys: Captured, tmp_path: Path) -> None:
    saved, picture = str(tmp_path / "p.json"), str(tmp_path / "g.svg")
    assert run("plan", TARGET, "--budget", "60%", "--save", saved) == 0
    assert run("draw", TARGET, picture, "--budget", "60%") == 0
    assert capsys.readouterr().out.splitlines()[-1] == picture
    for what in ("block", "schedule"):
        path = tmp_path / f"{what}.svg"
        assert run("draw", saved, str(path), "--what", what, "--block", "A") == 0
        assert path.stat().st_size > 500
    memory = tmp_path / "m.svg"
    assert run("draw", saved, str(memory), "--what", "memory") == 0
    assert memory.exists()


@pytest.mark.slow
def test_report_has_the_curve_and_the_source(tmp_path: Path, capsys: Captured) -> None:
    page = tmp_path / "r.html"
    assert run("report", TARGET, str(page), "--budget", "60%") == 0
    text = page.read_text()
    assert "No schedule fits into the shaded range" in text
    assert "Generated source" in text
    assert run("report", TARGET, str(page), "--budget", "60%", "--no-curve") == 0
    assert "No schedule fits into the shaded range" not in page.read_text()


def test_a_file_is_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anywhere, with what stands next to it; not if Python has another module of its name."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "width_of_models_here.py").write_text("WIDTH = 3")
    text = "import torch\nfrom width_of_models_here import WIDTH\ndef make():\n" \
        "    return torch.nn.Linear(WIDTH, 2), (torch.zeros(1, WIDTH),)"
    for name in ("models_here.py", "json.py"):
        (tmp_path / name).write_text(text)
    assert load_target(f"{tmp_path / 'models_here.py'}:make").model.in_features == 3
    with pytest.raises(rkmate.ArgumentError, match=r"another module 'json'.*rename"):
        load_target(f"{tmp_path / 'json.py'}:make")


@pytest.mark.parametrize(("arguments", "status", "message"), [
    (["plan", TARGET, "--budget", "lots"], 2, "budget is 'lots'"),
    (["plan", TARGET, "--budget", "auto"], 2, "CUDA"),
    (["plan", TARGET, "--budget", "50%", "--planner", "best"], 2, "planner is 'best'"),
    (["plan", TARGET, "--budget", "50%", "--device", "gpu"], 2, "device is 'gpu'"),
    (["plan", "nothing", "--budget", "50%"], 2, "module:factory"),
    (["plan", "no.such.module:f", "--budget", "50%"], 2, "no module"),
    (["plan", "no/such.py:f", "--budget", "50%"], 2, "give an existing one"),
    (["plan", "tests.show.targets:SCORES", "--budget", "50%"], 2, "not a function; write one"),
    (["plan", "tests.show.targets:nope", "--budget", "50%"], 2, "has no 'nope'"),
    (["plan", "tests.show.targets:number", "--budget", "50%"], 2, "not a function"),
    (["plan", "tests.show.targets:model_only", "--budget", "50%"], 2, r"\(model, args\)"),
    (["plan", "tests.show.targets:wrong_arguments", "--budget", "50%"], 2, "args of type Tensor"),
    (["plan", "tests.show.targets:named_arguments", "--budget", "50%"], 2, r"come third: \(model, \(\)"),
    (["plan", "tests.show.targets:with_a_loss", "--budget", "50%"], 2, r"return \(rkmate.with_loss\(model"),
    (["plan", "tests.show.targets:too_much", "--budget", "50%"], 2, "returned a tuple of 5"),
    (["plan", "tests.show.targets:takes_a_batch", "--budget", "50%"], 2, "takes batch; give the name of one"),
    (["plan", "tests.show.targets:broken", "--budget", "50%"], 2, "ValueError: no data here"),
    (["plan", TARGET, "--budget", "50%", "--save", "no/such.json"], 2, "'no' does not exist"),
    (["plan", TARGET, "--budget", "60%", "--save", "."], 1, "Is a directory"),
    (["plan", TARGET, "--budget", "60%", "--set", "tile=never"], 2, "no field 'tile'"),
    (["curve", TARGET, "--plot", "curve.gif"], 2, "suffix"),
    (["draw", TARGET, "a.svg", "--budget", "60%", "--what", "block"], 2, "block is None"),
    (["draw", TARGET, "a.svg", "--budget", "60%", "--what", "memory", "--whole"], 2, "--whole goes with"),
    (["draw", TARGET, "a.svg", "--budget", "60%", "--whole"], 2, "never folded"),
    (["plan", TARGET, "--budget", "1000"], 3, "no schedule fits"),
    (["plan", "tests.show.targets:branching", "--budget", "50%"], 4, "cannot be captured"),
    (["draw", TARGET, "a.svg"], 2, "give a --budget"),
    (["draw", "missing.json", "a.svg"], 5, "cannot be read"),
    (["draw", "missing.json", "a.svg", "--budget", "50%"], 2, "leave --budget out"),
    (["draw", TARGET, "a.svg", "--budget", "60%", "--what", "everything"], 2, "what is 'everything'"),
])
def test_errors(arguments: list[str], status: int, message: str, capsys: Captured,
                monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == status
    captured = capsys.readouterr()
    assert not captured.out
    last = captured.err.splitlines()[-1]        # before it may stand the traceback of a target
    assert last.startswith(f"rkmate {arguments[0]}: ")
    assert re.search(message, last)


def test_any_setting_can_be_set() -> None:
    given = ["tiles=never", "planner.slots=200", "run.on_new_shape=original", "planning_seconds=2.5"]
    found = with_fields(rkmate.Settings(planner="rk-rotor"), given)
    assert (found.tiles, found.planning_seconds, found.run.on_new_shape) == ("never", 2.5, "original")
    assert (found.of_planner.slots, found.planner_name) == (200, "rk-rotor")
    for wrong, words in (("tiles", "NAME=VALUE"), ("tile=never", "has no field 'tile', but costs, cut"),
                         ("planner.slot=1", "PlannerSettings has no field 'slot', but name, slots"),
                         ("costs.of=1", "before 'of' has no fields"),
                         ("tiles=sometimes", "tiles is 'sometimes'")):
        with pytest.raises(rkmate.ArgumentError, match=words):
            with_fields(rkmate.Settings(), [wrong])


def test_errors_as_json(capsys: Captured) -> None:
    assert run("plan", TARGET, "--budget", "1000", "--json") == 3
    content = json.loads(capsys.readouterr().out)
    assert content["error"] == "InfeasibleBudget"
    assert run("plan", TARGET, "--budget", str(content["minimum_bytes"])) == 0


def test_what_a_target_raises_is_shown_from_the_users_code_on(capsys: Captured) -> None:
    broken = "tests.show.targets:broken"
    assert run("plan", broken, "--budget", "50%") == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert "targets.py" in err
    assert str(Path("rkmate", "cli")) not in err
    assert "importlib" not in err
    assert run("plan", broken, "--budget", "50%", "--json") == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"] == "TargetError"
    assert not captured.err


@pytest.mark.parametrize("fraction", ["0.6", ".6", "60%"])
def test_a_fraction_is_one_of_the_models_own_peak(fraction: str, capsys: Captured) -> None:
    assert run("plan", TARGET, "--budget", fraction, "--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert content["budget_bytes"] == int(0.6 * content["baseline_peak_bytes"])


def test_a_budget_in_bytes_is_no_fraction(capsys: Captured) -> None:
    assert run("plan", TARGET, "--budget", "1", "--json") == 3
    assert "1 bytes" in json.loads(capsys.readouterr().out)["message"]


def test_an_interrupt_has_its_own_status(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rkmate, "plan", interrupted)
    assert run("plan", TARGET, "--budget", "50%") == 130
    assert "interrupted" in capsys.readouterr().err


def test_help_teaches(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for word in ("module:factory", "--json", "exit status", *DEMOS, "report", "simulate"):
        assert word in text


def test_wrong_usage_has_status_2(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan"])
    assert ended.value.code == 2


@pytest.mark.parametrize("name", list(DEMOS))
def test_demo_models_train(name: str) -> None:
    if not DEMOS[name].installed:
        pytest.skip(f"{DEMOS[name].needs} is not installed")
    target = load_target(name)
    output = target.model(*target.args, **target.kwargs)
    loss = output.loss if hasattr(output, "loss") else output.sum()
    loss.backward()
    assert all(p.grad is not None for p in target.model.parameters())


def test_a_demo_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setitem(DEMOS, "gpt2", Demo(DEMOS["mlp"].make, "", "no_such_package"))
    assert run("plan", "gpt2", "--budget", "50%") == 1
    assert "rkmate[examples]" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_is_silent_on_stderr() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rkmate", "plan", "mlp", "--budget", "60%", *FAST],
        capture_output=True, text=True, check=True, timeout=120, cwd=Path(__file__).parents[2])
    assert done.stdout.startswith("rkmate plan")
    assert not done.stderr


def test_simulate_replays_a_log(capsys: Captured) -> None:
    log = Path(__file__).parents[1] / "dtr" / "data" / "logs" / "lin_unit_16.log"
    assert main(["simulate", str(log), "--ratio", "0.9", "--json"]) == 0
    assert "baseline_memory" in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("digits", ["²", "٣x"])
def test_a_digit_that_is_no_number(digits: str, capsys: Captured) -> None:
    assert run("plan", TARGET, "--budget", digits) == 2
    assert "budget is" in capsys.readouterr().err


@pytest.fixture
def machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from rkmate.diagnosis import machine

    monkeypatch.setattr(machine, "findings", lambda *_: iter((machine.Finding("solver", "works", "HiGHS"),)))


@pytest.mark.usefixtures("machine_alone")
def test_doctor(capsys: Captured) -> None:
    assert run("doctor") == 0
    assert capsys.readouterr().out == "works    solver        HiGHS\n"
    assert run("doctor", TARGET) == 0
    assert "can be planned" in capsys.readouterr().out
    assert run("doctor", "tests.show.targets:branching", "--json") == 4
    content = json.loads(capsys.readouterr().out)
    assert content["machine"][0]["subject"] == "solver"
    assert content["model"] == "Branch" and "cannot be captured" in content["error"] and not content["curve"]
    assert run("doctor", TARGET, "--device", "h100") == 2


def test_doctor_where_something_fails(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    from rkmate.diagnosis import machine

    monkeypatch.setattr(machine, "findings", lambda *_: iter((machine.Finding("solver", "broken", "fails"),)))
    assert run("doctor") == 1
    assert capsys.readouterr().out.startswith("broken")


def test_check(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    from rkmate.comparison.parity import Parity

    assert run("check", TARGET, "--budget", "60%", "--steps", "2") == 0
    assert capsys.readouterr().out.startswith("Tower, 2 steps with AdamW: the same bits, within the budget")
    assert run("check", TARGET, "--budget", "60%", "--steps", "1", "--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert content["same_bits"] and content["within_budget"] and len(content["planned"]["losses"]) == 1
    assert content["planned"]["peak_bytes"] <= content["plan"]["budget_bytes"]
    monkeypatch.setattr(Parity, "within_budget", False)
    assert run("check", TARGET, "--budget", "60%", "--steps", "1") == 1


def test_the_package_runs_as_the_command() -> None:
    command = [sys.executable, "-m", "rkmate", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == rkmate.__version__
