"""Forwards that communicate with other ranks: functional collectives are part of a plan; everything else is
refused by name, before anything is measured.

A plan decides when an operation runs, and whether it runs again in the backward. A collective has to run on
all ranks of its group at the same place of their programs: plans that differ pair up the wrong ones, which is
a hang, or wrong values without an error. So the ranks of a forward with collectives follow one plan
(`rkmate.runtime.agreement`), in which each runs once. Others are refused: collectives whose effect autograd
does not see, those of submodules that run as they are, and those that torch cannot trace.

The namespace of an operation decides. Every operation of a trace goes through the mode of fake tensors, in
the forward and in the backwards of custom functions. What runs on real tensors (submodules that run as they
are) goes through a dispatch mode. A trace that fails inside of `torch.distributed` itself, before there is an
operation, is recognised by the files that the error came through.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import fx, nn

from rkmate.errors import CaptureError
from rkmate.graph.capture.refusals import at_fault, is_data_dependent, place_of
from rkmate.torch_seam.collectives import (
    TRACED,
    Unseen,
    function_of,
    functions_traced,
    group_name,
    has_constants,
    is_traceable,
)
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.patches.custom_functions import caller_of
from rkmate.torch_seam.schema import given_to, schema_of
from rkmate.torch_seam.tensors import TorchDispatchMode
from rkmate.torch_seam.trace import fake_operations_seen, process_group, several_ranks

NAMESPACES = frozenset(("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd",
                        "_dtensor", "symm_mem"))
"""Namespaces of torch's operations that communicate."""
_FILES = tuple(str(Path(torch.__file__).parent / "distributed" / name) for name in (
    "distributed_c10d.py", "_functional_collectives.py", "nn/functional.py"))
"""Files with the functions of `torch.distributed` that communicate."""
_GROUPS = ("group_name", "process_group", "group_size")
"""Arguments of operations that say which ranks take part. An operation without one (`wait_tensor`) only waits
for another."""
_SHOWN = 4
"""Names of parts that a message lists."""
_NOT_TRACED = "is none of those that a plan can hold (all_reduce, all_gather_into_tensor, " \
    "reduce_scatter_tensor, all_to_all_single and broadcast of one tensor, and batch_isend_irecv)"
_SIZES = "takes sizes that the forward reads from a tensor, which no plan can hold"
_BY_NAME = "a plan can hold only where it is called as torch.distributed.{}(...), not by a name that was " \
    "imported, or as a method of a process group: call it that way"
_AS_IT_IS = "runs in a submodule that runs as it is, and would run again in the backward"
_BY_VALUES = "would also run before the step, where the forward reads values of its inputs (.item(), masks)"
_CONSTANT = "takes a constant, whose values a trace takes as known"
_here = threading.local()


class CollectiveError(CaptureError):
    """The forward, or its backward, communicates with other ranks in a way that cannot be planned."""

    why = _NOT_TRACED
    """The reason, after "which"."""


def _error(operation: str, why: str) -> CollectiveError:
    error = CollectiveError(operation)
    error.why = why
    return error


def communicates(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bool:
    """Return whether a call of an operation exchanges data with another rank; a group of one rank has
    none."""
    if getattr(operation, "namespace", "") not in NAMESPACES or not several_ranks():
        return False
    given = given_to(operation, args, kwargs)
    groups = [given.get(a.name) for a in schema_of(operation).arguments if a.name in _GROUPS]
    return bool(groups) and all(_size_of(group) != 1 for group in groups)


def group_of(node: fx.Node) -> str:
    """Return the name of the process group of a functional collective."""
    given = given_to(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
    return group_name(next(given[name] for name in _GROUPS if name in given))


def groups_of(graph: fx.Graph) -> tuple[str, ...]:
    """Return the names of the process groups that a captured graph communicates in, each once."""
    return tuple(dict.fromkeys(group_of(n) for n in graph.nodes if n.op == "call_function"
                               and communicates(n.target, n.args, n.kwargs)))


def outlines(capture: Any) -> tuple[str, str]:
    """Return the operations of a captured step, without constants, and those of them that communicate and
    whose results are read, in order; the latter are empty if some may run again (they gather parameters)."""
    numbers: dict[fx.Node, int] = {}
    every, mine = [], []
    of_others: set[fx.Node] = set()     # what is made of anything else than parameters
    read: set[fx.Node] = set()
    for node in reversed(capture.graph.nodes):
        if node.op == "output" or node in read:
            read.update(node.all_input_nodes)
    for node in capture.graph.nodes:
        value = node.meta.get(VALUE)
        shape = f" {value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
        what = f"{node.target if node.op == 'call_function' else node.op}{shape}"
        numbers[node] = len(numbers)
        every.append(f"{what} {[numbers[n] for n in node.all_input_nodes]}")
        source = capture.sources.get(node)
        if (source is not None and source.kind != "param") or of_others.intersection(node.all_input_nodes):
            of_others.add(node)
        if node in read and node.op == "call_function" and communicates(node.target, node.args, node.kwargs):
            mine.append(f"{what} in {group_of(node)}")
            if node not in of_others:
                return "\n".join(every), ""
    return "\n".join(every), "\n".join(mine)


@contextmanager
def values_are_read() -> Iterator[None]:
    """Refuse all collectives of a trace: the forward reads values, which are computed before each step."""
    _here.values = True
    try:
        yield
    finally:
        _here.values = False


def _why_not(operation: Any, args: Sequence[Any]) -> str:
    """Return why a plan cannot hold an operation that communicates; empty if it can."""
    if not is_traceable(operation):
        function = function_of(operation)
        return _BY_NAME.format(function) if function else _NOT_TRACED
    if has_constants(args):
        return _CONSTANT
    return _BY_VALUES if getattr(_here, "values", False) else ""


def _size_of(group: Any) -> int | None:
    """Return the number of ranks of a process group, which operations take by name or as an object; None if
    it is unknown."""
    if isinstance(group, str):
        group = process_group(group)
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    return group.size() if isinstance(group, dist.ProcessGroup) else group if isinstance(group, int) else None


def _caller(model: nn.Module, error: Exception) -> str:
    """Return the submodule that has called the custom function whose backward an error came through."""
    trace, found = error.__traceback__, ""
    while trace is not None:
        for context in trace.tb_frame.f_locals.values():
            caller = caller_of(context)
            if caller is not None:
                found = next((n for n, m in model.named_modules() if m is caller), found)
        trace = trace.tb_next
    return found


class _Refusing(TorchDispatchMode):
    """Refuses the operations that communicate; runs others as they are."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.reached: list[CollectiveError] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if communicates(func, args, kwargs):
            self.reached.append(_error(str(func), _AS_IT_IS))
            raise self.reached[-1]
        return func(*args, **(kwargs or {}))


@contextmanager
def without_collectives() -> Iterator[None]:
    """Let operations that communicate raise a `CollectiveError` while a submodule runs on real tensors. The
    submodule cannot swallow the error."""
    if not several_ranks():
        yield
        return
    with _Refusing() as mode:
        yield
    if mode.reached:
        raise mode.reached[0]


@contextmanager
def collectives_refused(model: nn.Module) -> Iterator[None]:
    """Refuse the collectives that no plan can hold while a model is captured, with the line, the module and
    the remedy. Torch's own errors about a collective are replaced."""
    if not several_ranks():
        yield
        return
    reached: list[tuple[str, Exception]] = []

    def look(func: Any, args: Any, kwargs: Any) -> None:
        if communicates(func, args, kwargs) and (why := _why_not(func, args)):
            reached.append((str(func), _error(str(func), why)))
            raise reached[-1][1]

    failed: Exception | None = None
    try:
        # The backwards of a GPU's functions, too, run on this thread.
        with functions_traced(), fake_operations_seen(look), \
                torch.autograd.set_multithreading_enabled(False):
            yield
    except Exception as error:
        failed = error
    if reached:                     # the forward, or torch, may have made another error of it, or none
        raise _explained(model, *reached[0]) from None
    if failed is None:
        return
    if isinstance(failed, CollectiveError):
        raise _explained(model, str(failed), failed) from None
    if isinstance(failed, Unseen):
        raise _explained(model, _collective_at(failed), failed) from None
    cause = failed.__cause__ if isinstance(failed.__cause__, Exception) else failed
    called = _function_reached(cause)
    if not called:
        raise failed
    raise _explained(model, called, cause) from cause


def refuse_in_joint(graph: fx.Graph) -> None:
    """Raise a `CollectiveError` for an operation of a joint graph that communicates, and is no functional
    collective of one tensor."""
    if not several_ranks():
        return
    for node in graph.nodes:
        # An operation with effects is an argument of the higher-order operation that puts it in order.
        for k, operation in enumerate((node.target, *node.args)):
            if communicates(operation, node.args[k:], node.kwargs) and (k or not is_traceable(operation)):
                raise CollectiveError(_text("the model", "", "", str(operation), _NOT_TRACED,
                                            "its submodules"))


def _function_reached(error: Exception) -> str:
    """Return the function of `torch.distributed` that an error came through; empty if there is none."""
    return next((f"torch.distributed.{f.name}" for f in traceback.extract_tb(error.__traceback__)
                 if f.filename.startswith(_FILES)), "")


def _collective_at(error: Exception) -> str:
    """Return the function of `torch.distributed` whose trace an error came through."""
    names = [f.name.removeprefix("_") for f in traceback.extract_tb(error.__traceback__)]
    return next(f"torch.distributed.{name}" for name in names if name in TRACED)


def _explained(model: nn.Module, operation: str, error: Exception) -> CollectiveError:
    """Return the refusal of an operation that a trace has stopped at."""
    name = at_fault(model, error) or _caller(model, error)
    why = error.why if isinstance(error, CollectiveError) else str(error) if isinstance(error, Unseen) \
        else _SIZES if is_data_dependent(error) else _NOT_TRACED
    return CollectiveError(_text(type(model).__name__, _outside(model, name), place_of(error, None),
                                 operation, why, _parts(model, name)))


def _text(model: str, name: str, place: str, operation: str, why: str, parts: str) -> str:
    who = f"its submodule {name}" if name else "it"
    return (f"{model} cannot be planned{place}: {who} communicates with other ranks ({operation}), which "
            f"{why}. Ranks would hang, or compute wrong values without an error. Plan the parts that do not "
            f"communicate instead, each with rkmate.apply(part, budget=...), among {parts}")


def _parts(model: nn.Module, name: str) -> str:
    """Return the largest submodules that hold nothing like the one that communicates, by name."""
    kind = type(model.get_submodule(name))
    names = list(_silent(model, "", kind))
    if hasattr(model, "loss_fn") and "model" in names:
        return "them the model without its loss (leave loss= out, and compute the loss from the output)"
    names = [_outside(model, n) for n in names]
    if not names:
        return ("submodules, into which what does not communicate has to be moved first, as "
                f"{kind.__name__} has none")
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _outside(model: nn.Module, name: str) -> str:
    """Return the name of a submodule as the user knows it: a model with its loss has the model as a
    submodule."""
    return name.removeprefix("model.") if hasattr(model, "loss_fn") else name


def _silent(module: nn.Module, name: str, kind: type[nn.Module]) -> Iterator[str]:
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        holds = any(type(m) is kind for m in child.modules())
        if holds or type(child).forward is nn.Module.forward:
            yield from _silent(child, path, kind)
        elif any(True for _ in child.parameters()):
            yield path
