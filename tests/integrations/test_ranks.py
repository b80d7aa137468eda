"""The scripts for several ranks, as torchrun and accelerate start them: what they train is what they train
without a budget, and a checkpoint is loaded by another number of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch.distributed as dist

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = [pytest.mark.skipif(not dist.is_available(), reason="no torch.distributed"), pytest.mark.slow]
LIMIT = 240
"""Seconds after which a run is killed."""


ACCELERATE = ("accelerate.commands.launch", "--use_fsdp", "--fsdp_version=2", "--num_processes=2",
              "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0")
"""What starts two processes on CPUs: with ``--cpu``, accelerate starts one, or needs MPI."""


def _losses(script: str, *flags: object, count: int = 2, launcher: Sequence[str] = ()) -> str:
    """Run a script in processes of its own; return what the first one says of its losses. `launcher`: a
    module and its options; torchrun by default."""
    launcher = launcher or ("torch.distributed.run", "--standalone", f"--nproc-per-node={count}")
    done = subprocess.run(
        [sys.executable, "-m", *launcher, str(EXAMPLES / f"{script}.py"), *map(str, flags)],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = [line for line in done.stdout.splitlines() if line.startswith("losses ")]
    assert len(said) == 1, done.stdout
    return said[0]


def test_a_checkpoint_is_loaded_by_another_number_of_ranks(tmp_path: Path) -> None:
    plain, planned = tmp_path / "plain", tmp_path / "planned"
    assert _losses("ranks_fsdp2", "--save", planned) == _losses("ranks_fsdp2", "--plain", "--save", plain)
    assert _losses("ranks_fsdp2", "--load", planned, count=1) == \
        _losses("ranks_fsdp2", "--plain", "--load", plain, count=1)


@pytest.mark.parametrize(("tool", "script"), [("accelerate", "ranks_accelerate"),
                                              ("lightning", "ranks_lightning"),
                                              ("transformers", "ranks_trainer"),
                                              ("deepspeed", "ranks_deepspeed")])
def test_trainers_on_two_ranks(tool: str, script: str) -> None:
    if find_spec(tool) is None:         # importing DeepSpeed starts what its accelerator needs
        pytest.skip(f"no {tool}")
    assert _losses(script) == _losses(script, "--plain")


def test_accelerate_launch() -> None:
    pytest.importorskip("accelerate")
    assert _losses("ranks_accelerate", launcher=ACCELERATE) == _losses("ranks_accelerate", "--plain")
