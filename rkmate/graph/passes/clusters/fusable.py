"""Which operations can be part of a group, and over how many numbers each of them works."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rkmate.graph.capture.operations import is_random, is_view
from rkmate.graph.passes.joint import Joint, adds, owner_of
from rkmate.graph.passes.layout_rules import is_dense
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.schema import OpOverload, schema_of

aten = torch.ops.aten

_POINTWISE = {getattr(aten, name) for name in (
    "_to_copy", "clone", "where", "masked_fill", "native_dropout_backward", "threshold_backward",
    "gelu", "gelu_backward", "silu", "silu_backward", "tanh_backward", "sigmoid_backward",
    "leaky_relu_backward", "elu_backward", "hardtanh_backward", "hardswish", "hardswish_backward",
    "hardsigmoid", "hardsigmoid_backward", "softplus", "softplus_backward", "mish", "mish_backward",
    "log_sigmoid_backward",
    "addcmul", "addcdiv", "lerp", "clamp", "pow", "_conj_physical")}
"""Beside those that torch tags so."""
_MOVES = {aten.cat, aten.slice_backward, aten.select_backward, aten.constant_pad_nd, aten.flip, aten.roll,
          aten.repeat, aten.stack}
_REDUCTIONS = {aten.sum, aten.mean, aten.amax, aten.amin, aten.var, aten._softmax,
               aten._softmax_backward_data, aten.logsumexp, aten.any, aten.all, aten.linalg_vector_norm}
_NEVER = {aten.copy, aten.empty_like, aten.bernoulli, aten.angle, aten.polar, aten.view_as_complex,
          aten.fill, aten.special_zeta, aten.polygamma, aten.igamma, aten.igammac, aten.lgamma, aten.digamma}
_TYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32,
          torch.int64, torch.uint8, torch.bool}
MOST_DIMENSIONS = 6


def fusable(work: Joint) -> set[fx.Node]:
    """The operations that may be part of a group. Their results are plain tensors, and they read nothing that
    the forward overwrites; they draw no numbers and write to nothing."""
    overwritten = work.overwritten()
    barred = {*work.constant, *work.decisions}
    return {n for n in work.graph.nodes if n.op == "call_function" and n not in barred and _may_be_fused(n)
            and not any(owner_of(i) in overwritten for i in n.all_input_nodes)}


def _may_be_fused(node: fx.Node) -> bool:
    packet = _packet(node)
    if packet is None or packet in _NEVER or is_view(node) or is_random(node) or adds(node):
        return False
    if not is_pointwise(node) and packet not in _MOVES and packet not in _REDUCTIONS:
        return False
    inputs = [n.meta.get(VALUE) for n in node.all_input_nodes]
    result: Any = node.meta.get(VALUE)
    return bool(inputs) and all(map(_plain, inputs)) and _own(result) \
        and all(v is not None and v.device == result.device for v in inputs)


def is_pointwise(node: fx.Node) -> bool:
    """Whether each number of the result depends on one number of each operand."""
    packet = _packet(node)
    target: Any = node.target
    return packet is not None and packet not in _NEVER and (
        packet in _POINTWISE or (torch.Tag.pointwise in target.tags and not schema_of(target).is_mutable))


def extent(node: fx.Node) -> int:
    """Over how many numbers an operation goes: its result's, or, where it reduces, those that it reads."""
    if _packet(node) in _REDUCTIONS:
        return max(int(n.meta[VALUE].numel()) for n in node.all_input_nodes)
    return int(node.meta[VALUE].numel())


def bytes_of(node: fx.Node) -> int:
    """Of a node's value."""
    value = node.meta.get(VALUE)
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _packet(node: fx.Node) -> Any:
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return None
    return node.target.overloadpacket


def _plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _TYPES and value.numel() > 0 \
        and value.dim() <= MOST_DIMENSIONS and value.layout is torch.strided and not value.is_conj() \
        and type(value).__name__ == "FakeTensor"


def _own(value: Any) -> bool:
    """Whether a value fills its storage."""
    return _plain(value) and value.untyped_storage().nbytes() == value.numel() * value.element_size() \
        and value.storage_offset() == 0 and is_dense(value)
