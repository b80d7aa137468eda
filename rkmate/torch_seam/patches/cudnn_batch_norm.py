"""Batch norms that eager mode gives to cuDNN. A trace takes torch's own kernels for all of them.

Torch's operation for cuDNN's kernel writes the running statistics in place, and does not say so. The one
registered here returns their new values.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from rkmate import device as devices
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.own import OwnOperator, register
from rkmate.torch_seam.tensors import copy_all, suggest_memory_format

aten = torch.ops.aten

_RESERVE = 5
"""Position, among the results, of the data that the backward reads in addition to the statistics."""


def _run(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, running_mean: torch.Tensor,
         running_var: torch.Tensor, momentum: float, eps: float) -> tuple[torch.Tensor, ...]:
    new_mean, new_var = torch.empty_like(running_mean), torch.empty_like(running_var)
    copy_all((new_mean, new_var), (running_mean, running_var))
    y, mean, invstd, reserve = torch.cudnn_batch_norm(
        _dense(input), weight, bias, new_mean, new_var, True, momentum, eps)
    return y, mean, invstd, new_mean, new_var, reserve


def _dense(x: torch.Tensor) -> torch.Tensor:
    # Where it is contiguous, it is dense in the other format, too, where that is meant.
    if x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last):
        return x
    return x.contiguous(memory_format=suggest_memory_format(x))


def _form(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, running_mean: torch.Tensor,
          running_var: torch.Tensor, momentum: float, eps: float) -> tuple[torch.Tensor, ...]:
    return (torch.empty_like(_dense(input)), torch.empty_like(weight), torch.empty_like(weight),
            torch.empty_like(running_mean), torch.empty_like(running_var),
            input.new_empty(reserve_bytes(input), dtype=torch.uint8))


register((OwnOperator(
    "cudnn_batch_norm(Tensor input, Tensor weight, Tensor? bias, Tensor running_mean, "
    "Tensor running_var, float momentum, float eps) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", _run, "CUDA", shape=_form, direct=True),))


def is_cudnns(*args: Any) -> bool:
    """Return whether eager mode gives a batch norm in training to cuDNN. `args`: as torch's operation takes
    them."""
    x, weight, bias, mean, var, _, _, eps = args
    if weight is None or devices.of(x).cpu_kernels:
        return False
    chosen = torch._C._select_batch_norm_backend(x, weight, bias, mean, var, True, eps)
    return bool(chosen == torch._C._BatchNormBackend.Cudnn)  # type: ignore[attr-defined]


def reserve_bytes(x: torch.Tensor) -> int:
    """Return the bytes that cuDNN keeps for the backward of a batch norm of this input."""
    return int(torch._C._get_cudnn_batch_norm_reserve_space_size(x, True))  # type: ignore[attr-defined]


def batch_norms_as_eager_chooses(graph: fx.Graph) -> None:
    """Let the batch norms of a captured graph be cuDNN's where eager mode's are; those in training, with
    running statistics."""
    for node in list(graph.nodes):
        if node.target is not aten._native_batch_norm_legit_functional.default or node.args[5] is not True:
            continue
        given = fx.node.map_arg(node.args, lambda n: n.meta[VALUE])
        if not is_cudnns(*given):
            continue
        mean = next((u for u in node.users if u.args[1] == 1), None)
        readers = mean.users if mean is not None else ()
        backward = [u for u in readers if u.target is aten.native_batch_norm_backward.default]
        x, weight, bias, *statistics, _, momentum, eps = node.args
        node.target = torch.ops.rkmate.cudnn_batch_norm.default
        node.args = (x, weight, bias, *statistics, momentum, eps)
        y = node.meta[VALUE][0]
        with y.fake_mode:
            node.meta[VALUE] = node.target(*fx.node.map_arg(node.args, lambda n: n.meta[VALUE]))
        for user in node.users:
            user.meta[VALUE] = node.meta[VALUE][user.args[1]]
        for other in backward:
            _read_reserve(graph, node, other)


def _read_reserve(graph: fx.Graph, forward: fx.Node, node: fx.Node) -> None:
    with graph.inserting_after(forward):
        reserve = graph.call_function(operator.getitem, (forward, _RESERVE))
    reserve.meta = {**forward.meta, VALUE: forward.meta[VALUE][_RESERVE]}
    grad, x, weight, _, _, mean, invstd, _, eps, _ = node.args
    node.target = aten.cudnn_batch_norm_backward.default
    node.args = (x, grad, weight, None, None, mean, invstd, eps, reserve)
    x, weight = (n.meta[VALUE] for n in (x, weight))  # type: ignore[union-attr]
    with x.fake_mode:
        node.meta[VALUE] = (torch.empty_like(_dense(x)), torch.empty_like(weight), torch.empty_like(weight))
    for user in node.users:
        user.meta[VALUE] = node.meta[VALUE][user.args[1]]

