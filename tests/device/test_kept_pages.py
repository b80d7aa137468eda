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

PAGES = 4 * 96 * 2**20 // (os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096)
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
COUNTED = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or (HUGE.exists() and "[always]" in HUGE.read_text()),
    reason="another C library, or pages of many sizes")


@COUNTED
def test_pages_stay_until_it_is_over() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], cwd=Path(__file__).parents[2], text=True,
                         capture_output=True, check=True)
    found = json.loads(run.stdout)
    assert found["effective"]
    assert found["another thread"] > PAGES / 2 and found["given back"] > 90 * 2**20
    assert found["free"] > 40 * 2**20 > found["free but kept"]
    assert found["kept"] < PAGES / 100 and found["inner over"] < PAGES / 100
    assert "keep_pages() changes nothing: this is not the main thread" in run.stderr


def test_another_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    with pytest.warns(rkmate.RkmateWarning, match="changes nothing: it tells the heap of the GNU C"), \
            rkmate.keep_pages() as kept:
        assert not kept.effective
