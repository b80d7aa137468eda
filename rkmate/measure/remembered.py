"""Measured costs, remembered: the same block on the same machine is measured once.

Two plans of one model then rest on the same numbers, so a budget that one of them names as feasible
is feasible for the other.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rkmate.ir.cd import Cost, read_cost

FORMAT = 4
"""Raised whenever what is measured changes: entries of another format count as unknown."""
Numbers = tuple[Cost, ...]
"""Per C node of a block."""


class CostMemory:
    """Costs of blocks by their text, in memory and in a folder.

    Safe under concurrent writers: files are replaced whole. A broken entry counts as none, and is
    written anew.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = None if folder is None else folder / "costs"
        self._known: dict[str, Numbers] = {}

    def get(self, text: str, device: torch.device, count: int) -> Numbers | None:
        """The costs of a block of `count` C nodes, or None when it was never measured."""
        key = _key(text, device)
        if key not in self._known and self._folder is not None:
            found = _read(self._folder / f"{key}.json", count)
            if found is not None:
                self._known[key] = found
        return self._known.get(key)

    def put(self, text: str, device: torch.device, numbers: Numbers) -> None:
        """Remember the costs of a block."""
        key = _key(text, device)
        self._known[key] = numbers
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._folder, suffix=".tmp")
            with os.fdopen(handle, "w") as file:
                json.dump([c.row() for c in numbers], file)
            os.replace(name, self._folder / f"{key}.json")
        except OSError:
            return          # a folder that cannot be written costs time later, nothing else


def _key(text: str, device: torch.device) -> str:
    return hashlib.sha256("\n".join([text, *_machine(device).values()]).encode()).hexdigest()


def _machine(device: torch.device) -> Mapping[str, str]:
    """What the times depend on beside the block."""
    cudnn: Any = torch.backends.cudnn
    if device.type == "cuda":
        libraries = f"{cudnn.version()} {cudnn.benchmark} {cudnn.deterministic} {cudnn.allow_tf32}"
        name = torch.cuda.get_device_name(device)
    else:
        libraries = f"{torch.backends.cpu.get_cpu_capability()} {torch.backends.mkldnn.is_available()} " \
                    f"{torch._C._get_mkldnn_enabled()}"
        name = _processor()
    return {"format": str(FORMAT), "device": f"{device.type} {name}", "libraries": libraries,
            "torch": torch.__version__, "threads": str(torch.get_num_threads()),
            "machine": platform.machine(), "matmul": torch.get_float32_matmul_precision(),
            "deterministic": str(torch.are_deterministic_algorithms_enabled())}


@functools.cache
def _processor() -> str:
    """The processor's name; Python's `platform` knows it on some systems only."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _read(path: Path, count: int) -> Numbers | None:
    try:
        content = json.loads(path.read_text())
        numbers = tuple(read_cost(c) for c in content)
    except (OSError, ValueError, TypeError):
        return None
    good = len(numbers) == count and all(
        k.time >= 0 and k.overhead >= 0 for c in numbers for k in (c, c.unchunked) if k is not None)
    return numbers if good else None
