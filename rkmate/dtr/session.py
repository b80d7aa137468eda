"""``with rkmate.dtr(budget=...)``: a block of a program that stays inside a budget."""

from __future__ import annotations

import gc
import math
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rkmate import device as devices
from rkmate.budget import parse_budget
from rkmate.device.random_state import RandomState
from rkmate.dtr.errors import RuntimeStateError
from rkmate.dtr.heuristics import make_heuristic
from rkmate.dtr.runtime.engine import Engine
from rkmate.dtr.runtime.logging import LogWriter
from rkmate.dtr.runtime.memory import Report
from rkmate.errors import ArgumentError, RkmateError
from rkmate.torch_seam.tensors import TorchDispatchMode

_ACTIVE = threading.local()

_MEMORY_READERS: frozenset[Any] = frozenset(
    {
        torch.Tensor.numpy,
        torch.Tensor.tolist,
        torch.Tensor.data_ptr,
        torch.Tensor.untyped_storage,
        torch.Tensor.storage,
        torch.Tensor.__array__,
        torch.Tensor.__deepcopy__,
        torch.Tensor.__dlpack__,
        torch.Tensor.__reduce_ex__,
        torch.Tensor.share_memory_,
    }
)
"""Methods that access a tensor's memory without an operation."""


class _Operations(TorchDispatchMode):
    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._call = engine.call

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Saves a wrapper around every operation; torch.compile does not trace into this mode.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._call(func, args, kwargs or {})


class _MemoryReads(TorchFunctionMode):
    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._keep = engine.keep

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _MEMORY_READERS and args and isinstance(args[0], torch.Tensor):
            self._keep(args[0])
        return func(*args, **(kwargs or {}))


class Session:
    """A ``with`` block that runs inside a budget by dynamic rematerialization.

    Args:
        budget: bytes on top of the memory in use when the block begins, as an int or text such as
            "2GiB"; None for no limit. Gradients of parameters that the block leaves are not counted.
        heuristic: rule that chooses what to evict; a name in ``rkmate.dtr.HEURISTICS``.
        overhead_limit: raise ``ThrashingError`` if the program's work and recomputation together
            exceed this multiple of the program's own work, and recomputation exceeds 50 ms.
        banish: free permanently what the program drops, once nothing evicted depends on it.
        log: path or text stream to write the operations to, in the paper's format.
        seed: seed of the random heuristic.
        restore: a module whose buffers are reset to their state at the beginning of the block if an
            error or an interrupt leaves the block; the generators' states are reset, too.

    When the block ends, every tensor that the program still holds is in memory and is an ordinary
    tensor. This also holds after an error, regardless of the budget.

    Raises:
        ArgumentError: an argument is wrong.
        BudgetExceeded: inside the block, an operation does not fit.
        ThrashingError: inside the block, the overhead limit is reached.
    """

    def __init__(
        self,
        budget: int | str | None,
        heuristic: str = "dtr-eq",
        *,
        overhead_limit: float = 10.0,
        banish: bool = False,
        log: str | os.PathLike[str] | TextIO | None = None,
        seed: int = 0,
        restore: nn.Module | None = None,
    ) -> None:
        if restore is not None and not isinstance(restore, nn.Module):
            raise ArgumentError(f"restore must be a module, and is {restore!r}")
        self._restore = restore
        self._kept: State | None = None
        self._bytes = check_budget(budget)
        self._make = heuristic_maker(heuristic, seed)
        if not isinstance(overhead_limit, (int, float)) or not overhead_limit >= 1:
            raise ArgumentError(f"overhead_limit must be at least 1, and is {overhead_limit!r}")
        if not isinstance(banish, bool):
            raise ArgumentError(f"banish must be True or False, and is {banish!r}")
        self._limit = float(overhead_limit)
        self._banish = banish
        self._log = log
        self._stream: TextIO | None = None
        self._engine: Engine | None = None
        self._modes: list[Any] = []
        self._frozen = False
        self.reports: list[Report] = []
        """Reports: one for each ``batch()``, and one for the rest of the block."""

    @property
    def report(self) -> Report:
        """Report of the running batch, or, after the block, of the last batch."""
        if self._engine is not None:
            return self._engine.memory.report.copy()
        if not self.reports:
            raise RuntimeStateError("there is no report before the block has run")
        return self.reports[-1]

    def batch(self) -> Report:
        """End a batch and return its report, which is also appended to ``reports``."""
        if self._engine is None:
            raise RuntimeStateError("batch() belongs inside the with block")
        self.reports.append(self._engine.take_report())
        return self.reports[-1]

    def __enter__(self) -> Session:
        if self._engine is not None or getattr(_ACTIVE, "session", None) is not None:
            raise RuntimeStateError("a block under rkmate.dtr cannot be inside another one: leave one out")
        writer = None
        if self._log is not None:
            if hasattr(self._log, "write"):
                writer = LogWriter(self._log)  # type: ignore[arg-type]
            else:
                self._stream = open(self._log, "w", encoding="utf-8")
                writer = LogWriter(self._stream)
        self._engine = Engine(
            self._bytes,
            self._make(),
            overhead_limit=self._limit,
            banish=self._banish,
            log=writer,
        )
        if self._restore is not None:
            self._kept = State(self._restore)
        self.resume()
        return self

    @property
    def engine(self) -> Engine:
        """The running engine. Raises ``RuntimeStateError`` outside the block."""
        if self._engine is None:
            raise RuntimeStateError("the block under rkmate.dtr is not running")
        return self._engine

    def resume(self) -> None:
        """Watch operations again after ``pause``. Raises ``RuntimeStateError`` if another session is
        running in this thread."""
        if getattr(_ACTIVE, "session", None) is not None:
            raise RuntimeStateError("a block under rkmate.dtr cannot be inside another one: leave one out")
        assert self._engine is not None
        _ACTIVE.session = self
        # Each operation leaves a few objects: without this, full garbage collections, which walk
        # every module of torch, would come every few thousand operations.
        self._frozen = gc.get_freeze_count() == 0
        if self._frozen:
            gc.freeze()
        self._modes = [_MemoryReads(self._engine), _Operations(self._engine)]
        for mode in self._modes:
            mode.__enter__()
        self._engine.interrupts.install()

    def pause(self) -> None:
        """Stop watching operations; evicted tensors must not be used until ``resume``."""
        self._unwatch()
        if self._engine is not None:
            self._engine.interrupts.remove()

    def _unwatch(self) -> None:
        while self._modes:
            self._modes.pop().__exit__(None, None, None)
        _ACTIVE.session = None
        if self._frozen:
            gc.unfreeze()
            self._frozen = False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        engine = self._engine
        assert engine is not None
        interrupts = engine.interrupts
        interrupts.busy = True
        self._unwatch()
        try:
            if error is not None:
                engine.lift_limits()
            engine.finish()
        except RkmateError as found:
            if error is None:
                error = found
                raise
        finally:
            if error is not None and self._kept is not None:
                self._kept.restore()
            self.reports.append(engine.take_report())
            engine.close()
            self._engine = self._kept = None
            if self._stream is not None:
                self._stream.close()
                self._stream = None
            interrupts.remove()
            interrupts.deliver()


def check_budget(budget: int | str | None) -> float:
    """Return the budget in bytes, infinity for None. Raises ``ArgumentError``."""
    if budget is None:
        return math.inf
    amount = parse_budget(budget).bytes
    if amount is None:
        raise ArgumentError(
            f"budget is {budget!r}, a fraction; a dynamic program has no peak known beforehand: "
            'give bytes, as an int or as text such as "600MiB"'
        )
    return amount


def heuristic_maker(name: str, seed: int) -> Callable[[], Any]:
    """Check a heuristic's name, and return a function that makes new ones. Raises ``ArgumentError``."""
    make_heuristic(name, seed)
    return lambda: make_heuristic(name, seed)


class State:
    """State that a failed step must restore: a module's buffers, and the generators' states."""

    def __init__(self, model: nn.Module) -> None:
        # Buffers are small compared with activations; NumPy's memory keeps the copies out of the budget.
        self._buffers = [
            (b, b.detach().cpu().reshape(-1).view(torch.uint8).numpy().copy())
            for b in model.buffers()
            if b.layout is torch.strided
        ]
        self._random = RandomState.of(*devices.in_use())

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(torch.from_numpy(value).view(buffer.dtype).reshape(buffer.shape))
        self._random.restore()
