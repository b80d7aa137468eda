"""Compiled groups where there is no compiler, or one that does not work."""

from __future__ import annotations

import re
import shutil
import sys
from typing import Any

import pytest
import torch

import rkmate
from rkmate.device import inductor
from tests.graph.passes.clusters.test_clusters import layers, wrap


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)


def test_without_a_compiler(no_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rkmate.pipeline.prepare.capture", lambda *args: pytest.fail("captured"))
    with pytest.raises(rkmate.CompilerError, match=r"install g\+\+"):
        wrap(layers())


def test_a_compiler_that_is_not_there(no_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    with pytest.raises(rkmate.CompilerError, match="CXX=no-such-compiler"):
        inductor.check_compiler(torch.device("cpu"))


def test_auto_without_a_compiler(no_compiler: None) -> None:
    with pytest.warns(rkmate.RkmateWarning, match="nothing is compiled"):
        plan = wrap(layers(), compile="auto", costs="analytic").plan
    assert not plan.compiled


@pytest.mark.skipif(sys.platform != "linux", reason="inductor runs g++ on Linux alone")
def test_a_compiler_that_inductor_does_not_run(no_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name if name in ("clang++", "c++") else None)
    with pytest.raises(rkmate.CompilerError, match=r"there is no g\+\+"):
        inductor.check_compiler(torch.device("cpu"))
    for wrong in (" ", "c++ -O3"):
        monkeypatch.setenv("CXX", wrong)
        with pytest.raises(rkmate.CompilerError, match=re.escape(f"CXX={wrong}")):
            inductor.check_compiler(torch.device("cpu"))
    monkeypatch.setenv("CXX", "c++")
    inductor.check_compiler(torch.device("cpu"))


def test_auto_where_a_compiler_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(function: Any, forms: Any) -> Any:
        raise rkmate.CompilerError("no headers")

    monkeypatch.setattr(inductor, "_compiled", fails)
    monkeypatch.setattr(inductor, "_known", {})
    monkeypatch.setattr(shutil, "which", lambda name: name)
    with pytest.warns(rkmate.RkmateWarning, match="nothing is compiled: no headers"):
        assert not wrap(layers(1), compile="auto", costs="analytic").plan.compiled


def test_a_wrong_word() -> None:
    with pytest.raises(rkmate.ArgumentError, match="compile is 'yes'"):
        wrap(layers(), compile="yes")
