"""Compiled groups on disk, to be called without the compiler.

Torch's compiler keeps what it has compiled, but to find it there a process has to load the compiler and to
trace each group again: seconds. What a compiled group comes to is little: a Python function that makes the
results and calls kernels, and a shared library for each kernel. Where a group is just that, which on a CPU it
is, both are kept here by the group's own key.

A file is as trusted as the code of the package: whoever can write to the folder can run programs.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import json
import math
import os
import sys
import sysconfig
import textwrap
import types
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rkmate.support.cache_folder import cache_folder
from rkmate.support.generated import load
from rkmate.support.json_store import read_json, write_json
from rkmate.torch_seam import compiler
from rkmate.torch_seam.versions import KERNELS, is_off

FORMAT = 1
"""Grows when the content of a file changes its meaning."""
Call = Callable[[list[torch.Tensor]], Any]


def key_of(text: object, device: str) -> str:
    """The name of a group's file: all that its kernels depend on. `text`: what the group computes; `device`:
    the device's key."""
    content = [FORMAT, repr(text), device, _instructions(), torch.__version__, torch.version.git_version,
               sys.implementation.cache_tag, sysconfig.get_config_var("SOABI"), os.environ.get("CXX"),
               compiler.settings_key()]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@functools.cache
def _instructions() -> str:
    """All that the processor can do: kernels are compiled for just that, and machines of one name, as virtual
    ones, may differ in it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return ""
    return next((line for line in lines if line.split(":")[0].strip() in ("flags", "Features")), "")


def kept(key: str) -> Call | None:
    """A group that was kept; None where there is none, or a part of it is missing or broken."""
    if is_off(KERNELS):
        return None
    folder = _folder()
    content = read_json(folder / f"{key}.json")
    try:
        names: dict[str, Any] = {name: _names()[name] for name in content["names"]}
        for name, file in content["kernels"].items():
            names[name] = _kernel(folder / file)
        return functools.partial(load(content["source"], f"<{key[:12]}>", names)["call"], None)
    except (OSError, ImportError, ValueError, KeyError, TypeError, AttributeError, SyntaxError):
        return None


def keep(key: str, call: Any) -> bool:
    """Keep what the compiler has made of a group, for other processes. False where it needs more than
    kernels, or cannot be written."""
    if is_off(KERNELS) or not inspect.ismethod(call):
        return False
    try:
        source = textwrap.dedent(inspect.getsource(call.__func__))
    except OSError:
        return False
    known, names, kernels = _names(), [], {}
    for name in call.__code__.co_names:
        value = call.__func__.__globals__.get(name)
        if value is None:               # an attribute
            continue
        module = getattr(value, "__self__", None)
        if name in known and known[name] is value:
            names.append(name)
        elif isinstance(value, types.BuiltinFunctionType) and isinstance(module, types.ModuleType) \
                and getattr(module, "__file__", None):
            kernels[name] = Path(str(module.__file__))
        else:
            return False
    if call.__func__.__name__ != "call" or "self." in source:
        return False
    folder, files = _folder(), {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, path in kernels.items():
            files[name] = _copied(path, folder)
        write_json(folder / f"{key}.json", {"source": source, "names": names, "kernels": files})
    except OSError:
        return False                    # a folder that cannot be written costs time later, nothing else
    return True


def _folder() -> Path:
    return cache_folder() / "kernels"


@functools.cache
def _names() -> dict[str, Any]:
    """What a generated function may name beside its kernels."""
    return {"torch": torch, "aten": torch.ops.aten, "math": math, "inf": math.inf, "nan": math.nan,
            "device": torch.device, "empty_strided": torch.empty_strided,
            **compiler.names_in_generated_code()}


def _copied(library: Path, folder: Path) -> str:
    """The name of a library's copy in a folder, which says what is in it."""
    content = library.read_bytes()
    name = f"{hashlib.sha256(content).hexdigest()}{library.suffix}"
    part = folder / f".{uuid.uuid4().hex}.part"
    try:
        part.write_bytes(content)
        part.replace(folder / name)     # which other processes may have loaded
    finally:
        part.unlink(missing_ok=True)
    return name


@functools.lru_cache(maxsize=4096)
def _kernel(path: Path) -> Any:
    """The function of a library."""
    if hashlib.sha256(path.read_bytes()).hexdigest() != path.stem:
        raise ImportError(f"{path} is broken")
    # As torch's compiler hands it to the libraries that it loads.
    os.environ.update(compiler.environment_of_kernels())
    spec = importlib.util.spec_from_file_location(f"rkmate_kernels.{path.stem}.kernel", path)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


__all__ = ["Call", "keep", "kept", "key_of"]
