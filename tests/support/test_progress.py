"""Progress of planning: where it is shown, and what an interrupt leaves behind."""

from __future__ import annotations

import functools
import io
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

import rkmate
from rkmate.ilp.settings import OptionSettings
from rkmate.pipeline.settings import Settings
from rkmate.support.progress import Progress, time_left
from tests.clocks import NO_CLOCK
from tests.options import options_of
from tests.show.models import Tower, tower


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def plan(model: Tower, ids: torch.Tensor, costs: str = "analytic", progress: bool = True,
         settings: Settings | None = None) -> rkmate.Plan:
    return rkmate.plan(model, (ids,), budget=0.6, progress=progress,
                       **options_of(costs=costs, settings=settings))


def test_a_terminal_sees_the_stages_and_how_far_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("rkmate.support.progress.DELAY", 0.0)
    monkeypatch.setattr("rkmate.support.progress.tqdm", functools.partial(tqdm, mininterval=0, miniters=1))
    monkeypatch.setattr("rkmate.pipeline.attempts.NEAR", -1.0)                    # no plan is near enough
    model, (ids,) = tower(2)
    plan(model, ids, "measured", settings=Settings(options=OptionSettings()))  # takes a while
    text = terminal.getvalue()
    assert re.search(r"rkmate: capturing, 00:\d\d; then measuring and searching", text)
    assert "rkmate: measuring: 0 of" in text
    assert re.search(r"rkmate: solving blocks: (\d+) of \1 .* left; then searching", text)
    assert "rkmate: searching, 00:0" in text
    assert text.endswith("\r")                     # the lines of stages that are done are taken away


def test_a_stage_says_how_long_it_may_take_and_for_which_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("rkmate.support.progress.DELAY", 0.0)
    progress = Progress(True)
    progress.part = " (graph 2 of at most 3)"
    with progress.stage("searching", None, at_most=12.4):
        pass
    assert "rkmate: searching (graph 2 of at most 3), 00:00 of at most 12 s" in terminal.getvalue()


def test_a_stage_that_reports_nothing_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, shown = Terminal(), threading.Event()
    wrote = terminal.write
    monkeypatch.setattr(terminal, "write", lambda text: (wrote(text), "a long one, " in text and shown.set()))
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("rkmate.support.progress.DELAY", 0.05)
    with Progress(True).stage("a long one", None):
        assert shown.wait(60)
    *_, last, empty = terminal.getvalue().split("\r")
    assert last.strip() == empty == ""


def test_a_stage_that_reports_nothing_is_shown_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, shown = Terminal(), threading.Event()
    monkeypatch.setattr(terminal, "write", lambda text: shown.set() if "a long one, " in text else None)
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(True).stage("a long one", None):
        assert shown.wait(60)
    assert not any("_keep_shown" in str(t) for t in threading.enumerate())


def test_tasks_say_what_runs_and_how_long_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("rkmate.support.progress.DELAY", 0.0)
    monkeypatch.setattr("rkmate.support.progress.time.monotonic", lambda: 5.0)
    with Progress(True).tasks("planning", 2) as tasks:
        tasks.begin("dtr within 2.0 MiB", None)
        tasks._bar.refresh()
        tasks.done()
        tasks.begin("checkmate within 2.0 MiB", 41.0)
        tasks._bar.refresh()
    text = terminal.getvalue()
    assert "rkmate: planning: 0 of 2" in text
    assert "time left not known yet: dtr within 2.0 MiB" in text
    assert re.search(r"1 of 2 .*about 41 s left: checkmate within 2.0 MiB", text)
    assert (time_left(0.1), time_left(240)) == ("about 1 s left", "about 4 min left")


def test_a_file_and_progress_false_see_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rkmate.support.progress.DELAY", 0.0)
    model, (ids,) = tower(2)
    for stream, progress in ((io.StringIO(), True), (Terminal(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        plan(model, ids, progress=progress)
        assert stream.getvalue() == ""
    assert not Progress(False).enabled


def interrupted(call: Callable[[], Any], at: int, within: str) -> None:
    """Run `call`, and raise KeyboardInterrupt at the `at`-th function entered in files `within`."""
    count = 0

    def watch(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        if event == "call" and within in frame.f_code.co_filename:
            count += 1
            if count == at:
                raise KeyboardInterrupt
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)


CASES = (("/rkmate/graph/", 300), ("/rkmate/ilp/", 300), ("/rkmate/rotor/", 100), ("/rkmate/measure/", 10),
         ("/torch/export/", 100), ("/torch/_functorch/", 300))
"""Whose code is interrupted, and after how many calls."""
QUICK = ("/rkmate/graph/",)


@functools.cache
def undisturbed() -> str:
    """The schedule of a run that nobody interrupts."""
    model, (ids,) = tower(2)
    return str(plan(model, ids, settings=NO_CLOCK).schedule)


@pytest.mark.parametrize(("within", "at"), [
    *(pytest.param(*case, marks=[pytest.mark.slow] * (case[0] not in QUICK)) for case in CASES),
    *(pytest.param(within, at * k, marks=pytest.mark.slow) for within, at in CASES if at > 10
      for k in (0.1, 0.5, 1.5))])
def test_an_interrupt_leaves_nothing_broken(within: str, at: float, monkeypatch: pytest.MonkeyPatch,
                                            tmp_path: Path) -> None:
    model, (ids,) = tower(2)
    expected = undisturbed()
    state = {name: t.clone() for name, t in model.state_dict().items()}
    attributes = {name: set(vars(m)) for name, m in model.named_modules()}
    random = torch.random.get_rng_state()
    # An empty cache: nothing is found that has been solved before.
    monkeypatch.setenv("RKMATE_CACHE_DIR", str(tmp_path / "interrupted"))
    with pytest.raises(KeyboardInterrupt):
        interrupted(lambda: plan(model, ids, "measured" if "measure" in within else "analytic",
                                 settings=NO_CLOCK), int(at), within)
    assert torch.equal(torch.random.get_rng_state(), random)
    assert torch.is_grad_enabled()
    assert model.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert {name: set(vars(m)) for name, m in model.named_modules()} == attributes
    # What the interrupted run has left in the cache serves the next one.
    assert str(plan(model, ids, settings=NO_CLOCK).schedule) == expected
    model(ids).backward()
