"""A process that keeps its pages, told by the pages that it takes from the system."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

import rkmate

PROGRAM = """
import json, os, resource, threading, torch, rkmate

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(24 * 2**20), torch.ones(2**20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

found = {"before": faults()}
with rkmate.keep_pages() as outer:
    faults()
    found["kept"] = faults()
    with rkmate.keep_pages() as inner:
        found["effective"] = outer.effective and inner.effective
    found["inner over"] = faults()
    found["resident"] = resident()
outer.release()
found["given back"] = found["resident"] - resident()
thread = threading.Thread(target=rkmate.keep_pages)
thread.start()
thread.join()
found["another thread"] = faults()
print(json.dumps(found))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_pages_stay_until_it_is_over() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], cwd=Path(__file__).parents[2], text=True,
                         capture_output=True, check=True)
    found = json.loads(run.stdout)
    assert found["effective"]
    pages = 4 * 96 * 2**20 // 4096
    assert found["before"] > pages / 2 and found["given back"] > 90 * 2**20
    assert found["another thread"] > pages / 2
    assert found["kept"] < pages / 100 and found["inner over"] < pages / 100
    assert "keep_pages() changes nothing: memory comes from another" in run.stderr


def test_another_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    with pytest.warns(rkmate.RkmateWarning, match="changes nothing: it tells the heap of the GNU C"), \
            rkmate.keep_pages() as kept:
        assert not kept.effective
