"""Collectives of torch: the functional operators that a trace can hold, and the functions of
`torch.distributed`, which a trace replaces by them."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from rkmate.errors import CaptureError
from rkmate.torch_seam.own import own_operator
from rkmate.torch_seam.schema import OpOverload, operator_name
from rkmate.torch_seam.trace import inside_fake_mode

logger = logging.getLogger("rkmate")
FUNCTIONAL = "_c10d_functional"
"""The namespace of torch's functional collectives."""
TRACEABLE = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single",
             "broadcast")
"""Names of the functional collectives of one tensor that a plan can hold."""
_REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def functional(name: str) -> OpOverload:
    """Return the functional collective of a name; ``wait_tensor`` waits for the result of another one."""
    found: OpOverload = getattr(getattr(torch.ops, FUNCTIONAL), name).default
    return found


def is_traceable(operation: Any) -> bool:
    """Return whether an operator is a functional collective that a plan can hold, or its autograd form."""
    return getattr(operation, "namespace", "") in (FUNCTIONAL, f"{FUNCTIONAL}_autograd") \
        and operator_name(operation) in TRACEABLE


def is_wait(operation: Any) -> bool:
    """Return whether an operator waits for the result of a functional collective."""
    return getattr(operation, "namespace", "") == FUNCTIONAL and operator_name(operation) == "wait_tensor"


def group_name(group: Any) -> str:
    """Return the name by which functional collectives know a process group; None is the default group."""
    if isinstance(group, str):
        return group
    name: str = _resolved(group).group_name
    return name


def _resolved(group: Any) -> Any:
    return dist.group.WORLD if group is None else group


def has_constants(values: Iterable[Any]) -> bool:
    """Return whether there is a constant among some values: a trace computes with it, and so would run a
    collective."""
    return any(isinstance(v, FakeTensor) and v.constant is not None for v in values)


def is_of_collectives(value: Any) -> bool:
    """Return whether an argument says how ranks communicate: a process group, or a reduction."""
    return dist.is_available() and isinstance(value, (dist.ProcessGroup, dist.ReduceOp,
                                                      dist.ReduceOp.RedOpType))


def _users(tensor: Any) -> int:
    """Return how many references a tensor has, in Python together one."""
    return int(tensor._use_count())


LONGEST = 0.05
"""Seconds that `run_and_wait` waits at most for another thread to let go of buffers."""


def run_and_wait(name: str, tensor: torch.Tensor, *others: Any) -> torch.Tensor:
    """Return the result of a functional collective, when no other thread holds its buffers any more.

    gloo's threads let go of a collective's buffers a little after it is done. Waited for, a step takes the
    same memory each time.
    """
    before = _users(tensor)
    found: torch.Tensor = functional("wait_tensor")(functional(name)(tensor, *others))
    _let_go(found, before if found is tensor else 1, tensor, before)
    return found


def _let_go(found: torch.Tensor, own: int, given: torch.Tensor, before: int) -> None:
    """Wait until no other thread holds a collective's result and what it was given, which have `own` and
    `before` references otherwise."""
    if found.device.type != "cpu":
        return
    end = time.perf_counter() + LONGEST
    while (_users(found) > own or _users(given) > before) and time.perf_counter() < end:
        time.sleep(0)


def start(name: str, tensor: torch.Tensor, *others: Any) -> torch.Tensor:
    """Start a functional collective. Return its result, which is there after `wait`."""
    given = tensor.contiguous()
    before = _users(given)
    found: Any = functional(name)(given, *others)
    found.rkmate_given = given, before
    return found  # type: ignore[no-any-return]


def wait(found: Any) -> torch.Tensor:
    """Wait for the end of what `start` has started, as `run_and_wait` does, and return its result."""
    given, before = found.rkmate_given
    del found.rkmate_given
    functional("wait_tensor")(found)
    _let_go(found, 1, given, before)
    return found  # type: ignore[no-any-return]


# -- Functions of torch.distributed, while a forward is traced --------------------------------------
#
# They write to their arguments, where autograd does not see it. In a trace, each is the functional collective
# and a copy of its result, which are the same numbers.


class Unseen(CaptureError):
    """A collective is none that a trace can hold; the message says why, after "which"."""


class _Done:
    """The work of a collective that has been waited for."""

    def wait(self, *timeout: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _reduction(op: Any) -> str:
    if isinstance(op, str):
        return op
    for name in _REDUCTIONS:
        if op == getattr(dist.ReduceOp, name):
            return name.lower()
    raise Unseen(f"has the reduction {op}, which no plan can hold")


def _called(name: str, tensor: torch.Tensor, *others: Any) -> torch.Tensor:
    # A no-grad region would be recorded as one of the forward's own.
    found: torch.Tensor = functional("wait_tensor")(functional(name)(tensor.detach().contiguous(), *others))
    return found


def _write(places: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    if torch.is_grad_enabled() and any(t.requires_grad for t in places):
        raise Unseen("writes to a tensor whose gradient is recorded, and autograd does not see it")
    if has_constants(places):
        raise Unseen("writes to a constant, whose values a trace takes as known")
    for place, value in zip(places, values, strict=True):
        place.copy_(value.view_as(place))


def _size(group: Any) -> int:
    return dist.get_world_size(group)


def _all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> None:
    _write([tensor], [_called("all_reduce", tensor, _reduction(op), group_name(group))])


def _all_gather_into_tensor(output_tensor: Any, input_tensor: Any, group: Any = None,
                            async_op: bool = False) -> None:
    _write([output_tensor], [_called("all_gather_into_tensor", input_tensor, _size(group),
                                     group_name(group))])


def _all_gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> None:
    if any(t.shape != tensor.shape for t in tensor_list):
        raise Unseen("gathers tensors of different shapes, which no plan can hold")
    found = _called("all_gather_into_tensor", tensor.reshape(1, -1), _size(group), group_name(group))
    _write(tensor_list, [row.view(tensor.shape) for row in found])


def _reduce_scatter_tensor(output: Any, input: Any, op: Any = dist.ReduceOp.SUM, group: Any = None,
                           async_op: bool = False) -> None:
    flat = input.reshape(_size(group) * output.shape[0], *output.shape[1:]) if output.dim() else input
    _write([output], [_called("reduce_scatter_tensor", flat, _reduction(op), _size(group),
                              group_name(group))])


@functools.cache
def _tell_of_strides() -> None:
    # Warnings of a trace are not shown.
    logger.warning("all_to_all_single writes to a tensor that is not contiguous (torch.empty_like of a "
                   "transposed one): gloo fills it in the order of memory, so that a step without a plan has "
                   "other values than one on a GPU or with a plan, which is right. Pass a contiguous tensor "
                   "(torch.empty_like(x.contiguous()))")


def _all_to_all_single(output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None,
                       group: Any = None, async_op: bool = False) -> None:
    if not output.is_contiguous() and dist.get_backend(group) == "gloo":
        _tell_of_strides()
    ranks = _size(group)
    splits = [list(given) if given else [t.shape[0] // ranks] * ranks
              for given, t in ((output_split_sizes, output), (input_split_sizes, input))]
    _write([output], [_called("all_to_all_single", input, *splits, group_name(group))])


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    flat = [t.reshape(-1) for t in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _all_to_all(output_tensor_list: Any, input_tensor_list: Any, group: Any = None,
                async_op: bool = False) -> None:
    splits = [[t.numel() for t in tensors] for tensors in (output_tensor_list, input_tensor_list)]
    found = _called("all_to_all_single", _joined(input_tensor_list), *splits, group_name(group))
    _write(output_tensor_list, found.split(splits[0]))


def _broadcast(tensor: Any, src: Any = None, group: Any = None, async_op: bool = False,
               group_src: Any = None) -> None:
    source = group_src if group_src is not None else dist.get_group_rank(_resolved(group), src)
    _write([tensor], [_called("broadcast", tensor, source, group_name(group))])


def _batch_isend_irecv(p2p_op_list: Sequence[Any]) -> list[_Done]:
    """Exchange what each rank sends to each other one as one all-to-all of the group: all of its ranks send
    and receive at the same place of a plan."""
    group, dtypes = p2p_op_list[0].group, {op.tensor.dtype for op in p2p_op_list}
    if len(dtypes) > 1:
        raise Unseen("sends tensors of several types, which no plan can hold")
    ordered = sorted(p2p_op_list, key=lambda op: op.group_peer)
    given, places = ([op.tensor for op in ordered if op.op is kind] for kind in (dist.isend, dist.irecv))
    splits = [[sum(op.tensor.numel() for op in ordered if op.op is kind and op.group_peer == rank)
               for rank in range(_size(group))] for kind in (dist.irecv, dist.isend)]
    flat = _joined(given) if given else places[0].new_empty(0)
    found = _called("all_to_all_single", flat, *splits, group_name(group))
    _write(places, found.split([t.numel() for t in places]))
    return [_Done()]


TRACED: dict[str, Callable[..., Any]] = {
    "all_reduce": _all_reduce, "all_gather_into_tensor": _all_gather_into_tensor,
    "all_gather_single": _all_gather_into_tensor, "all_gather": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter_tensor, "reduce_scatter_single": _reduce_scatter_tensor,
    "all_to_all_single": _all_to_all_single, "all_to_all": _all_to_all, "broadcast": _broadcast,
    "batch_isend_irecv": _batch_isend_irecv}
"""For functions of `torch.distributed`, what a trace runs instead."""
_RUN_BY = {
    "allreduce_": "all_reduce", "_allgather_base_": "all_gather_into_tensor", "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter_tensor", "alltoall_base_": "all_to_all_single",
    "alltoall_": "all_to_all", "broadcast_": "broadcast"}
"""For operators of process groups, the function of `torch.distributed` that runs each."""


def function_of(operation: Any) -> str:
    """Return the function of `torch.distributed` that a trace would have replaced, had it been called by that
    name instead of running this operator; empty if there is none."""
    is_of_group = getattr(operation, "namespace", "") == "c10d"
    return _RUN_BY.get(operator_name(operation), "") if is_of_group else ""


class _TorchOfNorms:
    """The name ``torch`` in the file of `nn.SyncBatchNorm`, while a forward is traced: every rank's batch has
    elements, and running statistics are written where autograd and functionalization see it."""

    cuda = SimpleNamespace(is_available=lambda: True, is_current_stream_capturing=lambda: True)
    """Keeps the function from leaving out ranks without elements, by values that a trace does not have."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def batch_norm_gather_stats_with_counts(
            input: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor, running_mean: torch.Tensor | None,
            running_var: torch.Tensor | None, *others: Any) -> tuple[torch.Tensor, ...]:
        if running_mean is None or running_var is None:
            plain: Any = torch.batch_norm_gather_stats_with_counts
            return tuple(plain(input, mean, invstd, running_mean, running_var, *others))
        *found, new_mean, new_var = own_operator("statistics_of_ranks")(
            input, mean, invstd, running_mean, running_var, *others)
        running_mean.copy_(new_mean)
        running_var.copy_(new_var)
        return tuple(found)


@contextmanager
def functions_traced() -> Iterator[None]:
    """Let functions of `torch.distributed` that write to their arguments be traced as functional collectives,
    on fake tensors of this thread.

    Raises `Unseen` at a call that writes to a tensor whose gradient is recorded. Those that a module has
    imported by name are replaced where a forward calls them; a custom function's are not.
    """
    from torch.distributed import _functional_collectives, distributed_c10d
    from torch.distributed.nn import functional as of_nn
    from torch.nn.modules import _functions

    here = threading.get_ident()

    def replaced(plain: Callable[..., Any], traced: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(plain)

        def run(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != here or not inside_fake_mode():
                return plain(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            done = traced(**given)
            return _Done() if given.get("async_op") else done

        return run

    def all_to_all(ctx: Any, group: Any, outputs: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if threading.get_ident() != here or not inside_fake_mode():
            found: tuple[torch.Tensor, ...] = by_lists(ctx, group, outputs, *tensors)
            return found
        ctx.group, ctx.input_tensor_size_list = group, [t.size() for t in tensors]
        _all_to_all(outputs, tensors, group)
        return tuple(outputs)

    by_lists = of_nn._AlltoAll.forward              # with gloo, one scatter for each rank
    remaps = getattr(_functional_collectives, "traceable_collective_remaps", {})
    with ExitStack() as stack:
        # Its functions say that they cannot be traced, before they call those that are replaced.
        for name in ("_not_supported_under_compile", "_deprecated"):
            if hasattr(of_nn, name):
                stack.enter_context(mock.patch.object(of_nn, name, mock.Mock(return_value=None)))
        instead = {}
        for name, traced in TRACED.items():
            plain = getattr(distributed_c10d, name, None)
            if plain is None:
                continue
            run = instead[plain] = replaced(plain, traced)
            for module in (dist, distributed_c10d):
                stack.enter_context(mock.patch.object(module, name, run))
        stack.enter_context(mock.patch.dict(remaps, instead))
        stack.enter_context(mock.patch.object(_functions, "torch", _TorchOfNorms()))
        stack.enter_context(mock.patch.object(of_nn._AlltoAll, "forward", staticmethod(all_to_all)))
        yield
