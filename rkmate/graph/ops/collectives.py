"""Operators that communicate with other ranks: each is a functional collective of torch with its wait.

One operator starts the exchange and waits for it, so that no schedule frees a buffer that is still in use.
The ranks of a process group run them in the same order, and never on one rank alone: nothing that measures
runs them, and their times are estimated from bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

from rkmate import device as devices
from rkmate.torch_seam.collectives import run_and_wait, start, wait
from rkmate.torch_seam.own import Over, OwnOperator, own_operator, record_of, register
from rkmate.torch_seam.schema import OpOverload
from rkmate.torch_seam.trace import process_group


@dataclass(frozen=True)
class Collective:
    """A functional collective, and the package's operator that also waits for it."""

    theirs: str
    """Name of torch's operator."""
    arguments: str
    """Arguments of the operator between its tensor and the name of the group, which is the last one."""
    shape: Callable[..., torch.Tensor]
    """Returns the result's shape from the arguments."""
    sent: Callable[[int, int, int], float]
    """Returns the bytes that a rank sends, from those that it gives and gets and the number of ranks, if the
    ranks form a ring."""

    @property
    def name(self) -> str:
        return f"{self.theirs}_and_wait"


def _like(input: torch.Tensor, *others: Any) -> torch.Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def _gathered(input: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    return input.new_empty((input.shape[0] * ranks, *input.shape[1:]) if input.dim() else (ranks,))


def _scattered(input: torch.Tensor, op: str, ranks: int, group: str) -> torch.Tensor:
    return input.new_empty((input.shape[0] // ranks, *input.shape[1:]))


def _exchanged(input: torch.Tensor, given: Sequence[int], taken: Sequence[int], group: str) -> torch.Tensor:
    return input.new_empty((sum(given), *input.shape[1:]))


COLLECTIVES = (
    Collective("all_reduce", "str op", _like, lambda gives, gets, n: 2 * gives * (n - 1) / n),
    Collective("all_gather_into_tensor", "int ranks", _gathered, lambda gives, gets, n: gets * (n - 1) / n),
    Collective("reduce_scatter_tensor", "str op, int ranks", _scattered,
               lambda gives, gets, n: gives * (n - 1) / n),
    Collective("all_to_all_single", "int[] output_splits, int[] input_splits", _exchanged,
               lambda gives, gets, n: gives * (n - 1) / n),
    Collective("broadcast", "int source", _like, lambda gives, gets, n: gives),
)


def _kernel(theirs: str) -> Callable[..., torch.Tensor]:
    def run(input: torch.Tensor, *others: Any) -> torch.Tensor:
        return run_and_wait(theirs, input.contiguous(), *others)
    return run


def _all_reduce_over(input: torch.Tensor, op: str, group: str) -> torch.Tensor:
    return run_and_wait("all_reduce_", input, op, group)


def _temporaries(theirs: str) -> Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], int]:
    """Return the rule of the bytes that gloo allocates in addition to the result."""
    def rule(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
        copied = sum(t.nbytes for t in inputs if not t.is_contiguous())
        inside = {"all_gather_into_tensor": outputs[0].nbytes,
                  "reduce_scatter_tensor": sum(t.nbytes for t in inputs)}
        return copied + inside.get(theirs, 0)
    return rule


register(OwnOperator(
    f"{c.name}(Tensor input, {c.arguments}, str group) -> Tensor", _kernel(c.theirs), shape=c.shape,
    in_place=Over("all_reduce_and_wait_", 0) if c.theirs == "all_reduce" else None,
    temporaries=_temporaries(c.theirs), communicates=True) for c in COLLECTIVES)
register([OwnOperator(
    "all_reduce_and_wait_(Tensor(a!) input, str op, str group) -> Tensor(a!)", _all_reduce_over,
    temporaries=_temporaries("all_reduce"), communicates=True)])
register([*(OwnOperator(
    f"{c.theirs}_started(Tensor input, {c.arguments}, str group) -> Tensor",
    functools.partial(start, c.theirs), shape=c.shape, direct=True) for c in COLLECTIVES), OwnOperator(
    "exchanged(Tensor(a!) started) -> Tensor(a!)", wait, direct=True)])
WAITED = own_operator("exchanged")
"""Waits for a collective that was started, and returns its result."""
_KINDS = {own_operator(c.name): c for c in COLLECTIVES}


def with_wait(theirs: str) -> OpOverload:
    """Return the operator that runs a functional collective and waits for it."""
    return own_operator(f"{theirs}_and_wait")


def started(operation: Any) -> OpOverload:
    """Return the operator that starts a collective of a planned graph, and does not wait for it."""
    return own_operator(f"{_KINDS[operation].theirs}_started")


def is_collective(operation: Any) -> bool:
    """Return whether an operation of a planned graph communicates with other ranks."""
    record = record_of(operation)
    return record is not None and record.communicates


def numbers_in(group: str) -> list[int]:
    """Return the numbers of the ranks of a process group."""
    found = process_group(group)
    return dist.get_process_group_ranks(found) if isinstance(found, dist.ProcessGroup) else [0]


def spread_of(group: str) -> str:
    """Describe a process group by all that the time of a collective depends on, equal on all of its ranks."""
    ranks = numbers_in(group)
    return f"{len(ranks)} ranks among {ranks[-1] - ranks[0] + 1}"


def seconds_of_collective(operation: OpOverload, args: Sequence[Any], result: torch.Tensor) -> float:
    """Return the estimated seconds of a collective: its bytes against the published rate of the links between
    its ranks, and a start. `args`: tensors of the graph, and other arguments."""
    given, kind = args[0], _KINDS[operation]
    rates = devices.of(result).rates
    ranks = numbers_in(args[-1])
    return rates.seconds_per_exchange + kind.sent(
        given.nbytes, result.nbytes, len(ranks)) / rates.between(ranks)
