"""Installed packages and devices of this machine, and which of them work: each is tried, not looked up.

Nothing here needs a working torch: a torch that cannot be loaded is a finding.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rkmate.errors import CompilerError, TorchVersionError
from rkmate.show.amounts import count, size
from rkmate.support.cache import cache_folder
from rkmate.support.processes import cores

if TYPE_CHECKING:
    from rkmate.device import Device

State = Literal["works", "missing", "broken"]


@dataclass(frozen=True)
class Finding:
    """A thing that rkmate uses or can use, and whether it works here."""

    subject: str
    """The subject's name in a word or two."""
    state: State
    """``"works"``; ``"missing"``: optional and not there; ``"broken"``: planning fails without it, or it is
    there and fails."""
    found: str
    """Versions, sizes, or what is lost without it."""
    remedy: str = ""
    """The remedy; empty if nothing needs to be done."""

    def __str__(self) -> str:
        remedy = f"\n{'':23}-> {self.remedy}" if self.remedy else ""
        return f"{self.state:<8} {self.subject:<13} {self.found}{remedy}"


LIBRARIES = ("transformers", "accelerate", "peft", "trl", "lightning", "diffusers")
"""Training libraries that rkmate is tested with."""


def examine(folder: str | os.PathLike[str] | None = None) -> tuple[Finding, ...]:
    """Try what rkmate uses on this machine. Takes seconds, most of them for compiling something.

    Args:
        folder: the folder whose disk is tried; the temporary folder by default.
    """
    return tuple(findings(folder))


def findings(folder: str | os.PathLike[str] | None) -> Iterator[Finding]:
    """Yield what `examine` finds, one after the other."""
    place = Path(folder or tempfile.gettempdir())
    yield Finding("rkmate", "works",
                  f"{_version('rkmate') or 'not installed'}, in {Path(__file__).parents[1]}")
    yield Finding("Python", "works",
                  f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    torch = _tried("torch", _torch, "pip install 'torch>=2.11,<2.17'")
    yield torch
    if torch.state == "works":
        yield _tried("processor", _processor)
        yield from _gpus()
        yield _tried("compiler", _compiler)
    yield _tried("solver", _solver, "pip install --force-reinstall highspy")
    yield _tried("cache", _cache, "set RKMATE_CACHE_DIR to a folder that can be written to")
    if torch.state == "works":
        yield _tried("disk", lambda: _disk(place))
    yield _tried("graphviz", _graphviz)
    yield _package("matplotlib", "pictures of time and memory, and reports, are not drawn",
                   "pip install 'rkmate[plots]'")
    installed = [f"{name} {found}" for name in LIBRARIES if (found := _version(name))]
    yield Finding("trainers", "works" if installed else "missing",
                  ", ".join(installed) or "no training library is installed: loops of your own work")


def _tried(subject: str, look: Callable[[], Finding], remedy: str = "") -> Finding:
    """Return a finding; an error on the way to it is one, too."""
    before = logging.root.manager.disable
    try:
        logging.disable(logging.WARNING)            # torch's compiler says what else it misses
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return look()
    except TorchVersionError as error:
        return Finding(subject, "broken", str(error))
    except Exception as error:          # whatever a library raises, the others are still looked at
        return Finding(subject, "broken", f"{type(error).__name__}: {error}".strip(": "), remedy)
    finally:
        logging.disable(before)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _package(name: str, without: str, remedy: str) -> Finding:
    """Return a finding about an optional package, which is imported."""
    if _version(name) is None:
        return Finding(name, "missing", without, remedy)

    def look() -> Finding:
        importlib.import_module(name)
        return Finding(name, "works", str(_version(name)))
    return _tried(name, look, f"pip install --force-reinstall {name}")


# -- torch and devices -----------------------------------------------------------------------------

def _torch() -> Finding:
    import torch

    from rkmate.torch_seam import versions
    from rkmate.torch_seam.patches.features import check_once

    check_once()
    off = [f"{name} ({why})" for name, why in versions.all_off().items()]
    tested = f"the tested releases are {', '.join(versions.SEEN)}"
    if off:
        return Finding("torch", "broken", f"{torch.__version__}, where these are off: {'; '.join(off)}",
                       f"install a tested release: {tested}")
    return Finding("torch", "works", f"{torch.__version__}, one of the tested releases" if versions.was_seen()
                   else f"{torch.__version__}: all self tests pass ({tested})")


def _processor() -> Finding:
    import torch

    threads, free = torch.get_num_threads(), _free_memory()
    memory = "" if free is None else f", {size(free)} of memory available"
    found = f"{count(threads, 'thread')} on {count(cores(), 'core')}{memory}"
    if threads > cores():
        return Finding("processor", "broken", f"{found}: more threads than cores wait for each other, and "
                       "measured times are too long", f"torch.set_num_threads({cores()}), or OMP_NUM_THREADS")
    return Finding("processor", "works", found)


def _free_memory() -> int | None:
    """Return the bytes that Linux says can be allocated; None on other systems."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _gpus() -> Iterator[Finding]:
    import torch

    from rkmate import device as devices

    found = devices.accelerators()
    if not found:
        elsewhere = 'no CUDA device; device="h100" of rkmate.plan plans for a GPU that is not here'
        built = torch.version.cuda is not None and shutil.which("nvidia-smi") is not None
        yield Finding("CUDA", "missing", elsewhere, "nvidia-smi is installed, but torch sees no device: is "
                      "the driver older than this torch needs?" if built else "")
    for label, where in found.items():
        name, _, hardware = label.partition(": ")
        yield _tried(name, functools.partial(_gpu, name, hardware, where))


def _gpu(name: str, hardware: str, where: Device) -> Finding:
    import torch

    one = torch.ones(16, 16, device=where.torch_device)
    if (one @ one).sum().item() != 16 ** 3:
        return Finding(name, "broken", "a small product of matrices has a wrong result")
    memory = where.memory()
    assert memory is not None
    return Finding(name, "works",
                   f"{hardware}, {size(memory.free + memory.cached)} of {size(memory.total)} free")


def _compiler() -> Finding:
    """Compile the smallest group, as ``compile="auto"`` does."""
    from rkmate import device as devices
    from rkmate.device.inductor import try_compiler

    device = next(iter(devices.accelerators().values()), devices.of("cpu")).torch_device
    try:
        try_compiler(device)
    except CompilerError as error:
        what, _, remedy = str(error).partition(": ")
        return Finding("compiler", "missing", f"compile=True does not work here ({what})", remedy)
    return Finding("compiler", "works", f"compile=True works for {device}")


# -- what planning uses ----------------------------------------------------------------------------

def _solver() -> Finding:
    """Solve an integer program: the smallest whole number above a half."""
    from rkmate.ilp.highs import Highs, Rows

    program = Rows()
    number = program.column("number", 0, 10, 1.0, integer=True)
    program.at_least(0.5, [number])
    found = Highs(program).solve(10.0)
    if round(found.values.get("number", 0.0)) != 1:
        return Finding("solver", "broken", f"HiGHS {_version('highspy')} says {found.status.value} to a "
                       "small integer program", "pip install --force-reinstall highspy")
    return Finding("solver", "works", f"HiGHS {_version('highspy')}")


def _cache() -> Finding:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".part"):
        pass
    return Finding("cache", "works", f"{folder}: measured costs and solved blocks are kept between processes")


def _disk(folder: Path) -> Finding:
    """Look at a folder as a target of `offload`."""
    found = f"{folder}, {size(shutil.disk_usage(folder).free)} free"
    if against := _said_of(folder):
        return Finding("disk", "missing", f"{found}, and offload gains little there", against)
    return Finding("disk", "works", f"{found}, with direct reads and writes for offload")


@functools.cache
def _said_of(folder: Path) -> str:
    """Return what a process is warned of when it first opens a folder as a target; empty if nothing."""
    from rkmate.offload.disk import shared

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        shared(folder)
    return "; ".join(str(w.message) for w in said)


def _graphviz() -> Finding:
    program = shutil.which("dot")
    if program is None:
        return Finding("graphviz", "missing", "no program `dot`: graphs are written as DOT text, not drawn",
                       "install Graphviz (Debian and Ubuntu: apt install graphviz; macOS: brew install "
                       "graphviz)")
    done: Any = subprocess.run([program, "-V"], capture_output=True, text=True, timeout=60, check=True)
    return Finding("graphviz", "works", (done.stderr or done.stdout).strip())


def problems(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings that keep rkmate from working."""
    return tuple(f for f in found if f.state == "broken")
