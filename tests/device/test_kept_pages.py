"""A process that keeps its pages, told by the pages that it takes from the system."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

import rkmate
from rkmate.device.kept_pages import keep_planned_pages

PROGRAM = """
import json, os, resource, threading, torch, rkmate
from rkmate import device as devices

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(24 * 2**20), torch.ones(2**20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def given_back():
    blocks = [torch.ones(2**19) for _ in range(25)]
    del blocks[:-1]                     # the last one keeps the heap from shrinking
    before = resident()
    devices.of("cpu").give_back()
    return before - resident()

thread = threading.Thread(target=rkmate.keep_pages)
thread.start()
thread.join()
faults()
found = {"another thread": faults(), "free": given_back()}
with rkmate.keep_pages() as outer:
    faults()
    found["kept"], found["free but kept"] = faults(), given_back()
    with rkmate.keep_pages() as inner:
        found["effective"] = outer.effective and inner.effective
    found["inner over"] = faults()
    found["resident"] = resident()
outer.release()
found["given back"] = found["resident"] - resident()
print(json.dumps(found))
"""

PLANNED = """
import ctypes, gc, json, os, resource, sys, torch, rkmate
from torch import nn

ctypes.CDLL(None).mallopt(-3, 2**20)        # every activation is a block of its own, which the system gives
settings = rkmate.Settings(costs="analytic", keep_pages=sys.argv[1] == "keep")
model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(1024, 1024), nn.GELU())))
x = torch.randn(4096, 1024)

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    modules[0](x).sum().backward()
    model.zero_grad()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

modules = [rkmate.wrap(model, (x,), budget=1.0, settings=settings, progress=False) for _ in range(2)]
found = {"planned": min(faults() for _ in range(3))}
del modules[1:]
gc.collect()
found["one of two"] = min(faults() for _ in range(3))
with rkmate.keep_pages():
    found["all"] = min(faults() for _ in range(3))
found["planned again"] = min(faults() for _ in range(3))
before = resident()
modules.clear()
gc.collect()
found["given back"] = before - resident()
print(json.dumps(found))
"""
PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
STEP = 16 * 2**20 // PAGE
"""The pages of one activation of `PLANNED`; a step makes several."""
PAGES = 4 * 96 * 2**20 // PAGE
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
COUNTED = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or (HUGE.exists() and "[always]" in HUGE.read_text()),
    reason="another C library, or pages of many sizes")


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=Path(__file__).parents[2], text=True,
                          capture_output=True, check=True, env={**os.environ, **environment})


@COUNTED
def test_pages_stay_until_it_is_over() -> None:
    run = _run("-c", PROGRAM)
    found = json.loads(run.stdout)
    assert found["effective"]
    assert found["another thread"] > PAGES / 2 and found["given back"] > 90 * 2**20
    assert found["free"] > 40 * 2**20 > found["free but kept"]
    assert found["kept"] < PAGES / 100 and found["inner over"] < PAGES / 100
    assert "keep_pages() changes nothing: this is not the main thread" in run.stderr


def _planned(mode: str, **environment: str) -> dict[str, int]:
    run = _run("-W", "error", "-c", PLANNED, mode, **environment)
    found: dict[str, int] = json.loads(run.stdout)
    return found


@COUNTED
def test_planned_steps_find_their_pages_as_long_as_there_is_one() -> None:
    found = _planned("keep")
    # The heap may end with an activation or two that come and go. Without kept pages, a step takes eleven.
    assert max(found[k] for k in ("planned", "one of two", "all", "planned again")) < 4 * STEP
    assert found["given back"] > 4 * STEP


@COUNTED
@pytest.mark.parametrize(("mode", "environment"), [
    ("fresh", {}), ("keep", {"MALLOC_MMAP_THRESHOLD_": "1000000"}),
    ("keep", {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1000000"})])
def test_pages_are_as_they_were_where_that_is_said(mode: str, environment: dict[str, str]) -> None:
    found = _planned(mode, **environment)
    assert found["planned"] > 4 * STEP and found["one of two"] > 4 * STEP
    assert found["all"] < 4 * STEP


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch,
                                         recwarn: pytest.WarningsRecorder) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not keep_planned_pages().effective and not recwarn


def test_keep_pages_is_a_flag() -> None:
    with pytest.raises(rkmate.ArgumentError, match="keep_pages is 'yes'; it should be True or False"):
        rkmate.Settings(keep_pages="yes")  # type: ignore[arg-type]


def test_another_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    with pytest.warns(rkmate.RkmateWarning, match="changes nothing: it configures the heap of the GNU C"), \
            rkmate.keep_pages() as kept:
        assert not kept.effective
