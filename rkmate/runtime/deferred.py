"""Outputs that are computed when they are read."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rkmate.errors import DeferredOutputError
from rkmate.graph.blocks.expressions import source_key
from rkmate.graph.capture.structure import Structure
from rkmate.graph.passes.joint import Joint
from rkmate.runtime.environment import Environment, source_named, version
from rkmate.runtime.segments import without_autocast
from rkmate.support.warn import warn
from rkmate.torch_seam.containers import pytree
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.tensors import read_directly, version_of, wrapper_tensor

# -- Tensors whose values are computed when they are read ------------------------------------------
#
# A tensor whose values are computed when somebody reads them.
#
# It knows its shape, dtype, device and strides at once. Whatever else it is asked for, it answers as the
# plain tensor that it computes then, and keeps: every function of torch gets that one in its place.


_T = torch.Tensor
aten = torch.ops.aten


class Unread:
    """Values that are computed once, by whoever reads them first."""

    __slots__ = ("__weakref__", "_compute", "_lock", "_values")

    def __init__(self, compute: Callable[[], torch.Tensor]) -> None:
        self._compute: Callable[[], torch.Tensor] | None = compute
        self._lock = threading.Lock()
        self._values: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        """Return the values, computing them on first use; afterwards the inputs are released."""
        with self._lock:
            if self._compute is not None:
                self._values = self._compute()
                self._compute = None
        assert self._values is not None
        return self._values


class DeferredTensor(torch.Tensor):
    """A tensor whose values are computed when they are read. Made by `deferred_tensor`."""

    _unread: Unread
    _plain: torch.Tensor | None
    """The plain tensor after the first read, with its place in autograd's graph."""

    def read(self) -> torch.Tensor:
        """Return the plain tensor."""
        plain = self._plain
        if plain is None or (self.requires_grad and not plain.requires_grad):
            with torch.inference_mode(False), torch.no_grad():
                plain = self._unread.values()
                if self.requires_grad:
                    with torch.enable_grad():
                        plain = _Read.apply(self, [plain])
            self._plain = plain
        return plain

    def later(self, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return a deferred tensor of a function's result, which is computed when it is read."""
        with torch.inference_mode(False), torch.no_grad():
            now = torch.empty_strided(self.size(), self.stride(), dtype=self.dtype, device="meta")
            form = function(now)
        if form is now:
            return self
        if torch.is_grad_enabled() and self.requires_grad:
            return _Later.apply(self, function, form)  # type: ignore[no-any-return]
        return deferred_tensor(form, self.device, _then(self._unread, function))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer functions that need no values at once, and the others with the plain tensor."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, DeferredTensor) and first._plain is None:
            if func is _T.detach and not kwargs:
                return deferred_tensor(first, first.device, first._unread)
            if func in _LATER and not any(isinstance(a, _T) for a in (*args[1:], *kwargs.values())):
                return first.later(lambda values: func(values, *args[1:], **kwargs))
        if func not in _WITHOUT_VALUES:
            args, kwargs = _in_their_place((args, kwargs), DeferredTensor.read)
        with read_directly():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer calls of operators that bypass `__torch_function__`, such as a library's own calls."""
        args, kwargs = _in_their_place((args, kwargs or {}), lambda t: t.read().detach())
        return func(*args, **kwargs)


def deferred_tensor(form: torch.Tensor, device: torch.device, unread: Unread) -> DeferredTensor:
    """Return a tensor with the form of another one, and these values when they are read."""
    with read_directly():
        made = wrapper_tensor(DeferredTensor, form.size(), form.stride(), 0, dtype=form.dtype, device=device)
    made._unread = unread
    made._plain = None
    return made


@functools.cache
def leave_alone() -> None:
    """Let compiled functions call the above as it stands. Loads Dynamo, which a capture has loaded before."""
    run = torch.compiler.disable(DeferredTensor.__dict__["__torch_function__"].__func__)
    setattr(DeferredTensor, "__torch_function__", classmethod(run))  # noqa: B010 - a method, for mypy


def _then(unread: Unread, function: Callable[[torch.Tensor], torch.Tensor]) -> Unread:
    def compute() -> torch.Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return function(unread.values())

    return Unread(compute)


def _in_their_place(value: Any, of: Callable[[DeferredTensor], torch.Tensor]) -> Any:
    return pytree.tree_map_only(DeferredTensor, of, value)


class _Read(torch.autograd.Function):
    """Autograd node from a deferred tensor to the plain one."""

    @staticmethod
    def forward(ctx: Any, deferred: torch.Tensor, values: list[torch.Tensor]) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return values[0].detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        return grads[0], None


class _Later(torch.autograd.Function):
    """Autograd node from a deferred tensor to one that a function makes of it."""

    @staticmethod
    def forward(ctx: Any, deferred: DeferredTensor, function: Callable[[torch.Tensor], torch.Tensor],
                form: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.function, ctx.unread = function, deferred._unread
        return deferred_tensor(form, deferred.device, _then(deferred._unread, function))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        if grads[0] is None:
            return None, None, None
        with torch.enable_grad():
            values = ctx.unread.values().detach().requires_grad_()
            grad, = torch.autograd.grad(ctx.function(values), values, grads[0])
        return grad, None, None


def _getters(*names: str) -> set[Any]:
    return {getattr(_T, name).__get__ for name in names}


_LATER = {_T.float, _T.double, _T.half, _T.bfloat16, _T.narrow}
"""Functions that libraries apply to every output that they pass on. They run when the result is read."""
_WITHOUT_VALUES: set[Any] = {
    _T.size, _T.stride, _T.dim, _T.ndimension, _T.numel, _T.nelement, _T.element_size, _T.storage_offset,
    _T.is_contiguous, _T.is_floating_point, _T.is_complex, _T.is_signed, _T.is_inference, _T.is_conj,
    _T.is_neg, _T.get_device, _T.is_same_size, _T.__len__, _T.__hash__, _T.__dir__, _T.requires_grad_,
    _T.retain_grad, _T.register_hook, _T.is_shared, torch.numel, torch.is_floating_point, torch.is_complex,
    torch.is_inference, torch.is_same_size, torch.is_conj, torch.is_neg,
} | _getters(
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "is_leaf", "retains_grad",
    "output_nr", "grad", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized",
    "is_nested", "is_mkldnn", "is_xpu", "is_mps", "itemsize", "nbytes", "_backward_hooks")
"""Properties that are answered without the values."""


# -- Deferred outputs of a step --------------------------------------------------------------------
#
# Outputs that a planned step leaves out: what computes them when they are read, and who reads them.


IN_A_ROW = 2
"""Calls after another whose deferred outputs were read, until they are planned as ordinary ones."""


@dataclass(frozen=True)
class _Output:
    """A deferred output, as the generated code has it."""

    number: int
    name: str
    form: torch.Tensor
    """Form of the output, without contents."""
    function: Callable[[Environment], list[torch.Tensor]]
    kept: Mapping[str, int]
    """Source key -> place among what the forward keeps."""
    sources: tuple[str, ...]
    """Keys of what the caller holds."""


class DeferredOutputs:
    """Deferred outputs of one planned step."""

    def __init__(self, joint: Joint, result: Structure, functions: Sequence[Callable[..., Any]],
                 device: torch.device) -> None:
        place = {node: k for k, node in enumerate(joint.kept)}
        self._device = device
        self._outputs = [_Output(
            d.output, result.name_of(d.output), _form(d.result.meta[VALUE]), function,
            {source_key(d.sources[mine]): place[theirs] for mine, theirs in d.kept.items()},
            tuple(source_key(s) for s in d.sources.values() if s.kind != "kept"))
            for d, function in zip(joint.deferred, functions, strict=True)]
        if self._outputs:
            leave_alone()

    def fill(self, outputs: list[Any], kept: Sequence[torch.Tensor], sources: Mapping[str, torch.Tensor],
             read: Callable[[str], None] | None) -> None:
        """Put tensors in the places of these outputs. `kept`: what the forward has left for them;
        `sources`: what the caller holds; `read`: told the name of one that is read."""
        for output in self._outputs:
            held = {k: kept[i].detach() for k, i in output.kept.items()}
            held |= {k: sources[k] for k in output.sources}
            outputs[output.number] = deferred_tensor(output.form, self._device,
                                                     Unread(_Reading(output, held, self._device, read)))


def _form(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


class _Reading:
    """Computes the values of one output of one call."""

    def __init__(self, output: _Output, held: Mapping[str, torch.Tensor], device: torch.device,
                 read: Callable[[str], None] | None) -> None:
        self._output, self._held, self._device, self._read = output, held, device, read
        self._versions = {k: version_of(t) for k, t in held.items() if not t.is_inference()}

    def __call__(self) -> torch.Tensor:
        for key, tensor in self._held.items():
            if version(tensor) != self._versions.get(key, 0):
                raise DeferredOutputError(
                    f"the output {self._output.name} is computed when it is read, and {source_named(key)} "
                    "was changed in place since the forward: read the output before that (before the "
                    'optimizer\'s step), or let the step compute it: '
                    'rkmate.Settings(deferred_outputs="never")')
        env = Environment(self._held, self._versions, self._device)
        with torch.inference_mode(False), torch.no_grad(), without_autocast(self._device):
            values, = self._output.function(env)
        if self._read is not None:
            self._read(self._output.name)
        return values


class Reads:
    """Counts the consecutive calls of a module whose deferred outputs were read."""

    def __init__(self) -> None:
        self._calls = self._latest = self._in_a_row = 0
        self._settled = self._told = False
        self._names: dict[str, None] = {}

    @property
    def often(self) -> bool:
        """Whether deferred outputs are read so often that they should be planned as ordinary ones."""
        return self._in_a_row >= IN_A_ROW and not self._settled

    def call(self) -> Callable[[str], None]:
        """Begin a call. Returns a function that is called with an output's name when that output is read."""
        self._calls += 1
        number = self._calls

        def read(name: str) -> None:
            if self._in_a_row >= IN_A_ROW:
                return
            if number != self._latest:
                follows = number == self._latest + 1
                self._in_a_row = self._in_a_row + 1 if follows else 1
                self._latest = number
                if not follows:
                    self._names.clear()
            self._names[name] = None

        return read

    def tell(self, peak: int) -> None:
        """Warn once that the outputs are planned as ordinary ones from now on. `peak`: of such a plan."""
        if not self._told:
            self._told = True
            warn(f"{self._words()} in every step, which computes it once more, outside of the plan. From now "
                 f"on a step computes it, and its budget counts it (peak {peak:,} bytes); "
                 'rkmate.Settings(deferred_outputs="never") does so from the start')

    def stay(self, minimum: int) -> None:
        """Warn that the outputs stay deferred, because no plan within the budget can compute them. `minimum`:
        bytes of such a plan."""
        self._settled = True
        warn(f"{self._words()} in every step, which computes it once more, outside of the plan: a plan that "
             f"counts it takes {minimum:,} bytes at least, more than the budget. Read it less often, or give "
             "that much")

    def _words(self) -> str:
        return f"the output {' and '.join(self._names)} is read"

