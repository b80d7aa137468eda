"""What works on a machine: each finding is tried, and none stops the others."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rkmate.diagnosis import machine
from rkmate.diagnosis.machine import Finding, examine, problems
from rkmate.errors import CompilerError, TorchVersionError


def found(subject: str, folder: Path | None = None) -> Finding:
    return next(f for f in examine(folder) if f.subject == subject)


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_compiler", lambda: Finding("compiler", "works", "compile=True works"))
    monkeypatch.setenv("RKMATE_CACHE_DIR", str(tmp_path / "cache"))


def test_this_machine_can_run_the_tests(tmp_path: Path) -> None:
    findings = examine(tmp_path)
    assert not problems(findings)
    by_name = {f.subject: f for f in findings}
    assert by_name["torch"].found.startswith(torch.__version__)
    for name in ("rkmate", "Python", "torch", "processor", "solver", "cache"):
        assert by_name[name].state == "works"
    assert str(tmp_path) in by_name["disk"].found
    assert not list((tmp_path / "cache").iterdir())             # what was tried is gone
    assert str(by_name["torch"]).startswith("works    torch ")


def test_a_library_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise OSError("libgomp.so.1: cannot open shared object file")
    monkeypatch.setitem(sys.modules, "highspy", Broken("highspy"))
    (solver,) = problems(examine())
    assert solver.subject == "solver"
    assert solver.found == "OSError: libgomp.so.1: cannot open shared object file"
    assert "-> pip install --force-reinstall highspy" in str(solver)


def test_a_torch_that_cannot_be_used_hides_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> Finding:
        raise TorchVersionError("this version of rkmate cannot work with torch 9.9")
    monkeypatch.setattr(machine, "_torch", refused)
    findings = {f.subject: f for f in examine()}
    assert findings["torch"].state == "broken" and "torch 9.9" in findings["torch"].found
    assert findings["solver"].state == "works"
    assert not {"processor", "compiler", "disk"} & set(findings)     # they need torch


def test_a_torch_whose_features_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rkmate.torch_seam.versions._off", {"compiled groups": "no inductor"})
    assert found("torch").state == "broken"
    assert "compiled groups (no inductor)" in found("torch").found


def test_a_program_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert found("graphviz").state == "missing" and "install" in found("graphviz").remedy


def test_packages_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    version = machine._version
    gone = ("matplotlib", *machine.LIBRARIES)
    monkeypatch.setattr(machine, "_version", lambda name: None if name in gone else version(name))
    assert found("matplotlib").remedy == "pip install 'rkmate[plots]'"
    assert found("trainers").state == "missing"
    assert not problems(examine())


def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert found("processor").state == "broken" and "set_num_threads(1)" in found("processor").remedy


def test_a_cache_that_cannot_be_written_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RKMATE_CACHE_DIR", str(tmp_path / "file"))
    assert found("cache").state == "broken" and "RKMATE_CACHE_DIR" in found("cache").remedy


def test_a_folder_in_memory_is_no_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_said_of", lambda folder: f"{folder} is memory (tmpfs), not a disk")
    assert found("disk", tmp_path).state == "missing" and "tmpfs" in found("disk", tmp_path).remedy
    assert found("disk", tmp_path / "nowhere").state == "broken"


def test_a_process_is_warned_once_and_told_each_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("rkmate.offload.disk._kind", lambda folder: "tmpfs")
    assert [machine._said_of(tmp_path) for _ in range(2)] == [machine._said_of(tmp_path)] * 2
    assert "not a disk" in machine._said_of(tmp_path)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(device: torch.device) -> None:
        raise CompilerError("no C++ compiler: install g++")
    monkeypatch.undo()
    monkeypatch.setattr("rkmate.device.inductor.check_compiler", none)
    finding = machine._compiler()
    assert (finding.state, finding.remedy) == ("missing", "install g++")
    assert "no C++ compiler" in finding.found


@pytest.mark.parametrize("error", [RuntimeError("no driver"), ImportError("no module")])
def test_any_error_is_said(error: Exception) -> None:
    def fails() -> Finding:
        raise error
    look: Callable[[], Finding] = fails
    assert machine._tried("thing", look, "do this") == Finding(
        "thing", "broken", f"{type(error).__name__}: {error}", "do this")
