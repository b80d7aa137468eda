"""Properties of operations, and of the memory of values, by torch's schemas, for all readers of captured
graphs."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import torch
from torch import fx

from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.schema import OpOverload, schema_of
from rkmate.torch_seam.tensors import storage_id

aten = torch.ops.aten

COPIES = {aten.clone.default, aten.lift_fresh_copy.default}
"""Operators whose result has the values of their operand, in memory of its own."""
COMMUTES = {aten.add.Tensor, aten.mul.Tensor}
"""Operators whose two operands may be exchanged without a change of bits."""
ALIASES = (aten.alias.default, aten.detach.default)
"""Operators whose result is their operand, in the same memory."""
RESHAPES = {aten.view.default, aten._unsafe_view.default}
"""Views that read their operand's elements in order, in another shape."""
TURNS = {aten.t.default, aten.transpose.int, aten.permute.default}
"""Views that read their operand's dimensions in another order."""
SQUEEZES = {aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default}
"""Views that leave out dimensions of length one, or add one."""
PRODUCTS = (aten.mm.default, aten.addmm.default)
"""Products of matrices, the last two operands."""
BATCHED_PRODUCTS = (aten.bmm.default, aten.baddbmm.default)
"""Products of as many matrices as a batch has, the last two operands."""
ONE_TYPE = dict.fromkeys((*PRODUCTS, *BATCHED_PRODUCTS, aten.mv.default, aten.addmv.default, aten.dot.default,
                          aten.linalg_cross.default, aten._cdist_forward.default,
                          aten.grid_sampler_2d.default, aten.grid_sampler_3d.default,
                          aten.binary_cross_entropy.default), (0, 1, 2)) | {
    aten.index_add.default: (0, 3), aten.index_copy.default: (0, 3), aten.index_put.default: (0, 2),
    aten.nll_loss_forward.default: (0, 2), aten.nll_loss2d_forward.default: (0, 2)}
"""Places of operands that need one type, by operator. torch's shape functions do not check these."""
READS_HOST = {aten.item.default, aten._local_scalar_dense.default}
"""Operators that hand a tensor's value to Python."""
EMPTY = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
"""Operators whose result has any values."""
COUNT_FROM_ONE = {aten.linalg_lu_solve.default, aten.lu_unpack.default}
"""Operators whose whole numbers (rows that are exchanged) count from one."""
_HIDDEN_VIEWS = {aten._unsafe_view.default, aten._reshape_alias.default, aten.unsafe_split.Tensor,
                 aten.unsafe_chunk.default, aten.unsafe_split_with_sizes.default}

_OWN_WAYS = {0.0, 0.5, 1.0, 2.0, 3.0}
"""Absolute values of numbers that operators have ways of their own for: `pow`, products, dropout."""


def kind_of_number(number: float) -> Any:
    """Return what numbers have in common with which operators compute in one way, and at one cost."""
    special = not math.isfinite(number) or abs(number) in _OWN_WAYS
    return repr(number) if special else (type(number), number > 0)


def is_pointwise(target: Any) -> bool:
    """Return whether torch says of an operator that each number of its result depends on one number of each
    operand. False for operators that write to an operand."""
    return isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags \
        and not schema_of(target).is_mutable


def is_view(node: fx.Node) -> bool:
    """Return whether the node's value shares its input's storage."""
    target = node.target
    if target is operator.getitem:
        return is_view(node.args[0])  # type: ignore[arg-type]
    known = _view_operations.get(id(target))
    if known is None:
        if node.op != "call_function" or not isinstance(target, OpOverload):
            return False
        known = _view_operations[id(target)] = target, _is_view_operation(target)
    if known[1]:
        return True
    value = node.meta.get(VALUE)
    if isinstance(value, torch.Tensor) and node.args and isinstance(node.args[0], fx.Node):
        base = node.args[0].meta.get(VALUE)
        return isinstance(base, torch.Tensor) and base is not value and _share(base, value)
    return False


_view_operations: dict[int, tuple[OpOverload, bool]] = {}
"""Answers by the id of an operation, together with the operation, which stays alive. (Torch computes an
operation's hash in Python, and every pass asks about every node.)"""


def _is_view_operation(target: OpOverload) -> bool:
    return target in _HIDDEN_VIEWS or any(r.alias_info is not None and not r.alias_info.is_write
                                          for r in schema_of(target).returns)


_random_operations: dict[int, tuple[OpOverload, bool]] = {}
"""Answers by the id of an operation, like `_view_operations`."""
_DRAWN_BEFORE = {aten._scaled_dot_product_efficient_attention_backward.default,
                 aten._scaled_dot_product_cudnn_attention_backward.default}
"""Operations that torch declares as random, although they only read the state that their forward has left."""


def is_random(node: fx.Node) -> bool:
    """Return whether the operation draws from a generator. Attention does where it has dropout."""
    target = node.target
    known = _random_operations.get(id(target))
    if known is None:
        if not isinstance(target, OpOverload):
            return False
        draws = torch.Tag.nondeterministic_seeded in target.tags and target not in _DRAWN_BEFORE
        known = _random_operations[id(target)] = target, draws
    target, draws = known
    if not draws:
        return False
    place = _place_of(target, "dropout_p")
    if place is None:
        return True
    given = node.args[place] if len(node.args) > place else node.kwargs.get("dropout_p", 0.0)
    return bool(given != 0)


@functools.cache
def _place_of(target: OpOverload, name: str) -> int | None:
    """Return the position of an argument; None where there is none of this name."""
    return next((k for k, a in enumerate(schema_of(target).arguments) if a.name == name), None)


def _share(a: Any, b: Any) -> bool:
    return bool(storage_id(a) == storage_id(b))
