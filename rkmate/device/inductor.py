"""Groups of operations, compiled into kernels of their own by torch's compiler, inductor.

A group is a Python function of tensors of known forms, which calls operators. Its code does not depend on
where the group comes from, so equal groups are compiled once in a process, and the next process finds them in
inductor's own cache on disk, which belongs to one version of torch.
"""

from __future__ import annotations

import re
import shutil
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from os import environ
from typing import Any

import torch

from rkmate.device.random_state import unchanged_random_state
from rkmate.device.registry import common
from rkmate.errors import CompilerError
from rkmate.support.warn import warn
from rkmate.torch_seam import compiler
from rkmate.torch_seam.tensors import contiguous_strides, has_strides
from rkmate.torch_seam.versions import GROUPS, is_off, release, why_off

_FORM = re.compile(r"(?:(?P<device>[\w:]+) )?(?P<dtype>\w+)\[(?P<shape>[\d, ]*)\]"
                   r"(?: by \[(?P<strides>[\d, ]*)\])?")
_COMPILER = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
"""Compiler that inductor runs, unless the environment sets `CXX`."""
_lock = threading.RLock()
_known: weakref.WeakValueDictionary[Any, Fused] = weakref.WeakValueDictionary()
"""Groups that some plan holds, or that were made recently."""
TOLD = 1 << 20
"""Bytes that are copied for a call without a word, because they lie otherwise than in the trace: the gradient
of an output that is a view may."""
compiled = 0
"""Number of groups that were compiled in this process, including those found on disk."""
seconds = 0.0
"""Seconds of compiling."""


class Fused:
    """A compiled group of operations: called as the function that it was made from, it gives its results.

    Each result has a storage of its own, as large as it needs.
    """

    def __init__(self, function: Callable[..., Any], forms: Sequence[str]) -> None:
        self._function, self._forms = function, tuple(forms)
        self._run: Callable[[list[torch.Tensor]], Any] | None = None
        self._copied: tuple[int, ...] | None = None
        self._otherwise: dict[tuple[tuple[int, ...], ...], bool] = {}
        """Strides of arguments -> whether they are other ones than those that it was compiled for."""

    def compile(self) -> None:
        """Compile, where that is still to be done: seconds, unless it is on disk. Raises `CompilerError`."""
        global compiled, seconds
        with _lock:
            if self._run is None:
                start = time.perf_counter()
                self._run = _compiled(self._function, self._forms)
                compiled += 1
                seconds += time.perf_counter() - start

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self._run is None:
            self.compile()
            assert self._run is not None
        if self._are_laid_out_otherwise(tensors):
            tensors = tuple(_as(t, form) for t, form in zip(tensors, self._forms, strict=True))
        results = self._run(list(tensors))
        if self._copied is None:
            self._copied = _shared(tensors, results)
        if self._copied:
            return tuple(r.clone() if k in self._copied else r for k, r in enumerate(results))
        return tuple(results)

    def _are_laid_out_otherwise(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether a kernel before has laid out its result otherwise than its trace says; said once."""
        strides = tuple([t.stride() for t in tensors])
        found = self._otherwise.get(strides)
        if found is None:
            copied = [t.nbytes for t, form in zip(tensors, self._forms, strict=True) if not _is_as(t, form)]
            found = self._otherwise[strides] = bool(copied)
            if sum(copied) > TOLD:
                warn(f"{self._function.__name__}, a compiled group of operations, gets tensors in another "
                     f"layout than in the trace: {sum(copied):,} bytes are copied for each call, outside of "
                     "the plan. Pass inputs and gradients in the layout of the sample (.contiguous())")
        return found


def fused(*forms: str) -> Callable[[Callable[..., Any]], Fused]:
    """Let a function of tensors of these forms (`form_of`) be compiled before its first call.

    It returns a tuple of tensors that are no views of its arguments. Functions of equal code are the same:
    one is compiled for as many threads as torch has then.
    """
    def made(function: Any) -> Fused:
        key = _text(function, forms)
        with _lock:
            return _known.setdefault(key, Fused(function, forms))
    return made


def _text(function: Callable[..., Any], forms: Sequence[str]) -> tuple[Any, ...]:
    """Return what distinguishes a function of tensors of these forms from others, including how it would be
    compiled now."""
    code: types.CodeType = function.__code__
    # Numbers that Python has written take torch's default type.
    return (tuple(forms), torch.get_num_threads(), str(torch.get_default_dtype()),
            code.co_code, code.co_names, code.co_varnames, tuple(map(repr, code.co_consts)))


def form_of(value: torch.Tensor) -> str:
    """Return a (fake) tensor's form as text: ``float32[4, 8]``, ``cuda:0 float16[4, 8] by [1, 4]``."""
    device = "" if value.device.type == "cpu" else f"{value.device} "
    strides = "" if value.is_contiguous() and value.stride() == contiguous_strides(value.shape) \
        else f" by {list(value.stride())}"
    return f"{device}{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{strides}"


def check_compiler(device: torch.device) -> None:
    """Raise `CompilerError` where nothing can be compiled for a device: it names what to install."""
    if is_off(GROUPS):
        raise CompilerError(f"torch {release()} cannot compile groups ({why_off(GROUPS)}), which "
                            "compile=True needs: install a release that rkmate was tested with, or pass "
                            "compile=False")
    if device.type == "cpu":
        named = environ.get("CXX")              # one program: inductor reads no options in it
        if named is not None and shutil.which(named) is None:
            raise CompilerError(f"no C++ compiler: the environment says CXX={named}, and there is no such "
                                "program. Install it, or let CXX name another one")
        if named is None and shutil.which(_COMPILER) is None:
            raise CompilerError(
                f"no C++ compiler, which compile=True needs on a CPU: there is no {_COMPILER}. Let CXX in "
                "the environment name another one, or install g++ (Debian and Ubuntu: `apt install g++`; "
                "Fedora: `dnf install gcc-c++`; conda: `conda install gxx`; macOS: `xcode-select "
                '--install`), or pass compile="auto" or compile=False')
        return
    if not compiler.has_triton():
        raise CompilerError(f"no Triton, which compile=True needs on {device.type}: install it (`pip install "
                            'triton`), or pass compile="auto" or compile=False')


def try_compiler(device: torch.device) -> None:
    """Compile the smallest group, as there may be a compiler and no headers. Raises `CompilerError`."""
    check_compiler(device)
    fused(form_of(torch.empty(2, device=device)))(_one_more).compile()


def _one_more(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x + 1,)


def version() -> str:
    """Return the name of the compiler, as plans record it."""
    return f"inductor of torch {torch.__version__}"


def _read(form: str) -> tuple[torch.dtype, str, list[int], list[int]]:
    found = _FORM.fullmatch(form)
    if found is None:
        raise ValueError(f"{form!r} is not the form of a tensor")
    shape = [int(n) for n in found["shape"].split(",") if n.strip()]
    strides = list(contiguous_strides(shape)) if found["strides"] is None else \
        [int(n) for n in found["strides"].split(",") if n.strip()]
    return getattr(torch, found["dtype"]), found["device"] or "cpu", shape, strides


def _as(value: torch.Tensor, form: str) -> torch.Tensor:
    """Return a tensor in the strides of a form, copied if necessary."""
    if _is_as(value, form):
        return value
    _, _, shape, strides = _read(form)
    return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device).copy_(value)


def _is_as(value: torch.Tensor, form: str) -> bool:
    """Return whether a tensor's numbers lie as a form says: the strides of single ones mean nothing."""
    return has_strides(value, _read(form)[3])


def _shared(tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return results that are in the storage of others, of arguments, or in a larger one than they need."""
    device = common(results)
    seen = {t.untyped_storage().data_ptr() for t in tensors}
    found = []
    for k, result in enumerate(results):
        storage = result.untyped_storage()
        if storage.data_ptr() in seen or device.storage_bytes(storage.nbytes()) > device.storage_bytes(
                result.numel() * result.element_size()):
            found.append(k)
        seen.add(storage.data_ptr())
    return tuple(found)


def _compiled(function: Callable[..., Any], forms: Sequence[str]) -> Callable[[list[torch.Tensor]], Any]:
    device = common([torch.empty(0, device=_read(form)[1]) for form in forms])

    @contextmanager
    def undisturbed() -> Iterator[None]:
        with unchanged_random_state(device), torch.autocast(device.autocast_kind, enabled=False):
            yield

    try:
        return compiler.compile_function(function, [_read(form) for form in forms], undisturbed)
    except Exception as error:
        name = getattr(function, "__name__", "a group of operations")
        raise CompilerError(f"{name} cannot be compiled: {type(error).__name__}: {str(error)[:400]}. "
                            "compile=False runs its operations one by one") from error


__all__ = ["Fused", "check_compiler", "form_of", "fused", "version"]
