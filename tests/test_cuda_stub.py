"""The tests marked `gpu`, and the table of `benchmarks/gpu.py`, where there is no GPU: over torch's CUDA
build and a runtime whose kernels do nothing.

``RKMATE_CUDA_STUB`` names the folder of the stub's scripts: ``setup FOLDER`` builds it, ``with FOLDER PROGRAM
...`` runs a program over it. ``RKMATE_CUDA_STUB_BUILT`` names where it is built, or stands already.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = os.environ.get("RKMATE_CUDA_STUB")
pytestmark = [
    pytest.mark.slow, pytest.mark.xdist_group("cuda stub"),
    pytest.mark.skipif(SCRIPTS is None, reason="RKMATE_CUDA_STUB names no folder with the scripts setup and "
                                               "with of a CUDA stub")]


@functools.cache
def built() -> Path:
    """The stub's folder, built on demand."""
    folder = Path(os.environ.get("RKMATE_CUDA_STUB_BUILT", Path(tempfile.gettempdir()) / "rkmate-cuda-stub"))
    if not (folder / "lib" / "libnvidia-ml.so.1").exists():     # what the script makes last
        subprocess.run([str(Path(str(SCRIPTS)) / "setup"), str(folder)], check=True)
    return folder


def over_stub(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program over the stub, as on a device whose attention needs no cuDNN."""
    return subprocess.run([str(Path(str(SCRIPTS)) / "with"), str(built()), *command], cwd=ROOT, text=True,
                          env={**os.environ, "FAKE_GPU": "a100", "CUBLAS_WORKSPACE_CONFIG": ":16:8",
                               **environment}, check=False, capture_output=True)


def test_the_tests_for_gpus_pass() -> None:
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py"))
             if "mark.gpu" in path.read_text(encoding="utf-8") and path != Path(__file__)]
    done = over_stub("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu and not values",
                     *files)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_requested_bytes_are_the_plan_s_and_nothing_waits(tmp_path: Path) -> None:
    done = over_stub("python", "benchmarks/gpu.py", "table", "--tiny", "--steps", "1", "--out", str(tmp_path),
                     "--models", "gpt2-fp32", "gpt2-dropout", RKMATE_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    rows = [r for r in json.loads((tmp_path / "table.json").read_text(encoding="utf-8"))
            if r["way"] != "eager"]
    assert len(rows) == 6 and not [r for r in rows if "failed" in r]
    assert all(abs(r["requested_over_plan"]) < 0.005 and r["waits"] == 0 for r in rows), rows


def test_plans_are_shared_over_two_devices() -> None:
    done = over_stub("python", "-m", "pytest", "-q", "-p", "no:cacheprovider",
                     "tests/semantics/test_two_gpus.py", FAKE_GPUS="2")
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout[-5000:]


@pytest.mark.parametrize(("piece", "model"), [
    ("check", "gpt2-fp32"), ("first", "gpt2-medium"), ("large", "vit-large"), ("auto", "unet"),
    ("recorded", "gpt2-dropout")])
def test_pieces_of_the_benchmark_run(piece: str, model: str, tmp_path: Path) -> None:
    done = over_stub("python", "benchmarks/gpu.py", piece, "--tiny", "--steps", "1", "--models", model,
                     "--out", str(tmp_path), RKMATE_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    rows = json.loads((tmp_path / f"{piece}.json").read_text(encoding="utf-8"))
    assert rows and not [r for r in rows if "failed" in r], rows


def test_auto_holds_what_is_given(tmp_path: Path) -> None:
    """A U-Net of more than the device has, ten steps with AdamW: nothing beyond what was free, and no second
    try of an allocation."""
    done = over_stub("python", "benchmarks/gpu.py", "auto", "--models", "unet", "--out", str(tmp_path),
                     FAKE_GPU_GIB="1.1", RKMATE_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    [row] = json.loads((tmp_path / "auto.json").read_text(encoding="utf-8"))
    assert row["reserved_mib"] <= row["given_mib"] and row["retries"] == 0 and row["of_own_peak"] < 1, row
