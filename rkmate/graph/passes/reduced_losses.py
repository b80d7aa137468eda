"""A rewriting pass: losses whose result holds the storage of what they have summed up.

Torch's kernels of some losses compute each element's loss first and give the sum that tensor's storage: a
number that is held to the end of the step is as large as the outputs. The operators that take their place
have the same bits in a storage of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rkmate.graph.passes.joint import Rewriting
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.schema import schema_of

_library = torch.library.Library("rkmate", "FRAGMENT")
_NO_REDUCTION = 0


def _define(name: str) -> tuple[Any, Any]:
    """Torch's operator, and ours."""
    theirs = getattr(torch.ops.aten, name).default

    def alone(*args: Any) -> torch.Tensor:
        result: torch.Tensor = theirs(*args).clone()
        return result

    _library.define(str(schema_of(theirs)).removeprefix("aten::"))
    _library.impl(name, alone, "CompositeExplicitAutograd")
    return theirs, getattr(torch.ops.rkmate, name).default


_OURS: dict[Any, Callable[..., Any]] = dict(
    map(_define, ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")))


def storages_of_their_own(work: Rewriting) -> None:
    """Rewrite the losses that are summed up."""
    for node in work.graph.nodes:
        if node.target in _OURS and not node.meta[VALUE].dim() and _reduction(node) != _NO_REDUCTION:
            node.target = _OURS[node.target]


def torchs_operator(target: Any) -> Any:
    """The operator that one of ours has taken the place of; others are themselves."""
    return next((theirs for theirs, ours in _OURS.items() if ours is target), target)


def _reduction(node: Any) -> int:
    names = [a.name for a in schema_of(node.target).arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    default = schema_of(node.target).arguments[names.index("reduction")].default_value
    return int(given.get("reduction", default))
