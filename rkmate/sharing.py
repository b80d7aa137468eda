"""One plan for all processes of a group."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from rkmate.errors import ArgumentError, RkmateError
from rkmate.pipeline.offload import Place
from rkmate.pipeline.settings import Settings
from rkmate.public import plan
from rkmate.show.plan import Plan


def shared_plan(model: nn.Module, args: Sequence[Any] = (),
                kwargs: Mapping[str, Any] | None = None, *, budget: int | float | str,
                planner: str = "rockmate", progress: bool = True, costs: str | None = None,
                trains: str | int | Sequence[str | int] | None = None,
                planning_seconds: float | None = None, offload: Place | None = None,
                offload_bytes: int | str | None = None, settings: Settings | None = None,
                group: Any = None) -> Plan:
    """The plan that the first process of a group makes, in every process of it.

    Measured times differ from process to process, so each would find a plan of its own. Every process
    of the group calls this with the same model and arguments, and hands the result to `wrap` as
    ``plan``.

    Args:
        model, args, kwargs, budget, planner, progress, costs, trains, planning_seconds, offload,
            offload_bytes, settings: as of `plan`. Where `offload` is fast for the first process it should be
            for all, and each says ``offload=`` again to `wrap`: a folder may be another one there.
        group: the process group; the default one unless given.

    Raises:
        ArgumentError: there is no process group.
        RkmateError: what the first process raised, in every process.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ArgumentError("shared_plan needs a process group: call "
                            "torch.distributed.init_process_group first, or use rkmate.plan")
    result: list[Plan | RkmateError | str | None] = [None]
    if dist.get_rank(group) == 0:
        try:
            result[0] = plan(model, args, kwargs, budget=budget, planner=planner, progress=progress,
                             costs=costs, trains=trains, planning_seconds=planning_seconds, offload=offload,
                             offload_bytes=offload_bytes, settings=settings)
        except RkmateError as error:
            result[0] = _sendable(error)
        except BaseException as error:
            # The others wait: they hear of it before it goes on.
            result[0] = f"{type(error).__name__}: {error}"
            dist.broadcast_object_list(result, group=group, group_src=0)
            raise
    dist.broadcast_object_list(result, group=group, group_src=0)
    found = result[0]
    if isinstance(found, Plan):
        return found
    if isinstance(found, RkmateError):
        raise found
    raise RkmateError(f"the first process could not plan: {found}")


def _sendable(error: RkmateError) -> RkmateError:
    """The error, or the nearest of its classes with its message, as the other processes can read it."""
    for kind in type(error).__mro__:
        if not issubclass(kind, RkmateError):
            continue
        try:
            sent = error if kind is type(error) else kind(str(error))
            pickle.loads(pickle.dumps(sent))
        except Exception:       # its class takes other arguments than its message
            continue
        return sent
    return RkmateError(str(error))
