"""Tensors: versions, bases, storages, tensors without memory, calls that bypass modes and subclasses, what
autograd's engine is about to do with a tensor, and a tensor without its bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, TypeVar
from unittest import mock

import torch
from torch import nn
from torch._prims_common import suggest_memory_format as suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

T = TypeVar("T", bound=torch.Tensor)
_ORDINARY = frozenset((torch.Tensor, nn.Parameter))


def all_ordinary(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether no tensor is of a class of its own, whose operations may use autograd."""
    return _ORDINARY.issuperset(map(type, tensors))


def is_unwrapped(value: Any) -> bool:
    """Return whether this is a tensor or parameter of torch's own class, which no transform of torch.func
    has wrapped."""
    return type(value) in _ORDINARY and not torch._C._functorch.is_functorch_wrapped_tensor(value)


def has_strides(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    """Return whether a tensor has these strides, apart from those of dimensions of one."""
    return all(n == 1 or a == b for n, a, b in zip(tensor.shape, tensor.stride(), strides, strict=True))


version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Return how often a tensor's memory was written to. Views share the count."""
base_of: Callable[[torch.Tensor], Any] = attrgetter("_base")
"""Return the tensor that a tensor is a view of; None if it is not a view."""


def storage_id(of: torch.Tensor | torch.UntypedStorage) -> int:
    """Return a number that identifies a storage as long as it lives. Tensors without memory have one too."""
    storage = of.untyped_storage() if isinstance(of, torch.Tensor) else of
    return int(storage._cdata)


def key_of(tensor: torch.Tensor) -> int | None:
    """Return a number for a tensor's storage; None for a tensor without one (sparse, or a library's own)."""
    try:
        return storage_id(tensor)
    except (NotImplementedError, RuntimeError):
        return None


_PARTS_OF_SPARSE: dict[torch.layout, tuple[Callable[[Any], torch.Tensor], ...]] = {
    torch.sparse_coo: (lambda t: t._indices(), lambda t: t._values()),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), (
        lambda t: t.crow_indices(), lambda t: t.col_indices(), lambda t: t.values())),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), (
        lambda t: t.ccol_indices(), lambda t: t.row_indices(), lambda t: t.values())),
}


def parts_of_sparse(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the dense tensors that a sparse one is made of; a dense one alone."""
    parts = _PARTS_OF_SPARSE.get(tensor.layout)
    return (tensor,) if parts is None else tuple(part(tensor) for part in parts)


def storage_lives(tensor: torch.Tensor) -> Callable[[], bool]:
    """Return a function that tells whether a tensor's storage still lives. Until the function is gone, no
    other storage has its number."""
    there = StorageWeakRef(tensor.untyped_storage())
    return lambda: not there.expired()


def storage_users(tensor: torch.Tensor) -> int:
    """Return how many references a tensor's storage has."""
    return int(torch._C._storage_Use_Count(storage_id(tensor)))


# -- around modes and subclasses ---------------------------------------------------------------

without_modes = _disable_current_modes
"""A context without the dispatch and function modes that are active."""


@contextmanager
def outside_trace() -> Iterator[None]:
    """Compute with real tensors in the middle of a trace: no modes, no subclasses, no gradients."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def without_torch_function() -> Any:
    """Return a context in which neither function modes nor ``__torch_function__`` are asked."""
    return torch._C.DisableTorchFunction()


@contextmanager
def read_directly() -> Iterator[None]:
    """Do not ask subclasses of tensors. The context also decorates functions.

    A fake tensor is of a subclass, and torch asks a subclass in Python for each attribute that is read, which
    takes many times as long as the read. Do not run a model's own code inside, nor read a caller's tensors,
    which may be of subclasses that answer otherwise.
    """
    with torch._C.DisableTorchFunctionSubclass():
        yield


no_torch_function = torch._C._disabled_torch_function_impl
"""The ``__torch_function__`` of a subclass that overrides nothing."""


# -- tensors without memory --------------------------------------------------------------------

def wrapper_tensor(cls: type[T], shape: Sequence[int], stride: Sequence[int], offset: int, *,
                   dtype: torch.dtype, device: torch.device, requires_grad: bool = False) -> T:
    """Return a tensor of a subclass that has a shape and strides, and no memory.

    offset: of the first element in its storage, in elements.
    """
    made: T = torch.Tensor._make_wrapper_subclass(
        cls, shape, stride, offset, dtype=dtype, device=device, requires_grad=requires_grad)
    return made


def fake_like(other: FakeTensor, plain: torch.Tensor, requires_grad: bool) -> FakeTensor:
    """Return a fake tensor in the mode and on the device of another one that was not computed from anything.

    plain: a tensor on the meta device with the storage, shape and strides to have. Takes a fraction of the
    time of the constructor, which counts for the values of a whole graph.
    """
    made: FakeTensor = torch.Tensor._make_subclass(
        FakeTensor, plain, requires_grad, dispatch_device=True, device_for_backend_keys=other.fake_device)
    torch._C._set_throw_on_mutable_data_ptr(made)
    made.__dict__.update(other.__dict__)
    return made


# -- many tensors in one call ------------------------------------------------------------------

_form = attrgetter("dtype", "device")


def copy_all(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Write each value into its target, with one kernel for all of one type on one device."""
    if len({*map(_form, targets), *map(_form, values)}) == 1:
        torch._foreach_copy_([*targets], [*values])
        return
    for members in _groups([(t.dtype, t.device, v.dtype, v.device)
                            for t, v in zip(targets, values, strict=True)]):
        torch._foreach_copy_([targets[k] for k in members], [values[k] for k in members])


def add_to_all(targets: Sequence[torch.Tensor], number: int) -> None:
    """Add a number to each tensor, with one kernel for all of one type on one device."""
    if len({*map(_form, targets)}) == 1:
        torch._foreach_add_([*targets], number)
        return
    for members in _groups([(t.dtype, t.device) for t in targets]):
        torch._foreach_add_([targets[k] for k in members], number)


def _groups(forms: Sequence[object]) -> list[list[int]]:
    """Return the places of equal forms, grouped."""
    groups: dict[object, list[int]] = {}
    for k, form in enumerate(forms):
        groups.setdefault(form, []).append(k)
    return [*groups.values()]


# -- autograd ----------------------------------------------------------------------------------

def will_accumulate(parameter: torch.Tensor) -> bool:
    """Return, inside a backward, whether that is going to add to a parameter's ``.grad``."""
    return _use_of(get_gradient_edge(parameter).node) == "added"


def gradient_is_asked_for(tensor: torch.Tensor) -> bool:
    """Return, inside a backward, whether that is going to use or to return a tensor's gradient."""
    return is_asked_for(get_gradient_edge(tensor).node)


def is_asked_for(node: Any) -> bool:
    """Return, inside a backward, whether that is going to add to the gradient of a node of autograd's graph,
    or to return it."""
    return _use_of(node) != "none"


def _use_of(node: Any) -> Literal["added", "returned", "none"]:
    try:
        return "added" if torch._C._will_engine_execute_node(node) else "none"
    except RuntimeError:            # torch.autograd.grad was asked for the gradient of this leaf
        return "returned"


def is_batched(value: torch.Tensor | None) -> bool:
    """Return whether a gradient stands for several, in a backward that takes them at once."""
    return value is not None and (torch._C._functorch.is_legacy_batchedtensor(value)
                                  or torch._C._functorch.is_batchedtensor(value))


def current_backward() -> int:
    """Return the number of the backward that autograd's engine is running in this thread; -1 outside."""
    return int(torch._C._current_graph_task_id())


def inside_backward() -> bool:
    """Return whether autograd's engine is running a backward in this thread."""
    return current_backward() != -1


def saved_tensor_hook() -> Callable[[Any], Any] | None:
    """Return the innermost function that packs saved tensors now (`saved_tensors_hooks`); None if none
    does."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if top is None else top[0]


@contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Let operations save tensors as they do outside of every `saved_tensors_hooks`."""
    hooks: list[Any] = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


@contextmanager
def saved_tensors_seen(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
                       ) -> Iterator[None]:
    """Call hooks on saved tensors (`saved_tensors_hooks`), except inside of the transforms of torch.func:
    these raise an error where there are hooks."""
    plain = torch.autograd.graph.disable_saved_tensors_hooks

    @contextmanager
    def disabled(message: str) -> Iterator[None]:
        with without_saved_tensor_hooks(), plain(message):
            yield

    with mock.patch.object(torch.autograd.graph, plain.__name__, disabled), \
            torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def after_backward(call: Callable[[], None]) -> None:
    """Inside a backward, call something when it is over."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def keeps_graph() -> bool:
    """Return, inside a backward, whether the graph stays for another one (``retain_graph=True``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def saved_by_node(node: Any) -> list[torch.Tensor]:
    """Return the tensors that a node of autograd's graph keeps for its backward."""
    found: list[torch.Tensor] = []
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":       # of a custom function
            with suppress(RuntimeError):        # they are gone
                found += [t for t in _as_list(getattr(node, name)) if isinstance(t, torch.Tensor)]
    return found


def function_of(node: Any) -> type | None:
    """Return the custom function (`torch.autograd.Function`) that a node of autograd's graph is the backward
    of; None for a node of torch's own operators."""
    return getattr(type(node), "_forward_cls", None)


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Return whether hooks are registered that see a tensor's gradient before it is accumulated."""
    return bool(tensor._backward_hooks)


def has_accumulation_hooks(tensor: torch.Tensor) -> bool:
    """Return whether hooks are registered that run after a tensor's gradient was accumulated."""
    return bool(tensor._post_accumulate_grad_hooks)


# -- A tensor without its bytes --------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """Form of a tensor whose storage is copied as bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    nbytes: int
    """Bytes of the whole storage."""
    conjugate: bool
    """Whether the tensor stands for the conjugate of its bytes."""
    negative: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> Form:
        """Return the form of a tensor with a storage."""
        return Form(tensor.dtype, tuple(tensor.shape), tensor.stride(),
                    int(tensor.storage_offset()), tensor.untyped_storage().nbytes(), tensor.is_conj(),
                    tensor.is_neg())

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor of this form over a storage, which it shares."""
        tensor = _set(self.dtype, storage, self.offset, self.shape, self.strides)
        if self.conjugate:
            tensor = tensor.conj()
        if self.negative:
            tensor = torch.ops.aten._neg_view.default(tensor)
        return tensor


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a new tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return all of a storage, as bytes."""
    return _set(torch.uint8, storage, 0, (storage.nbytes(),), (1,))


def _set(dtype: torch.dtype, storage: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
         ) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, strides)


def is_spread_out(tensor: torch.Tensor) -> bool:
    """Return whether no two numbers of a tensor share a place in memory."""
    if tensor.layout is not torch.strided:
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return False
            reach += stride * (size - 1)
    return True
