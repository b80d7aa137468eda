"""A rewriting pass: operations whose result holds the storage of what they have summed up.

Torch's kernels of some losses compute each element's loss first and give the sum that tensor's storage: a
number that is held to the end of the step is as large as the outputs. `F.fold` (and the gradient of
`F.unfold`) does so on a CPU: its images hold a storage as large as the columns. The operators that replace
them have the same bits in a storage of their own.
"""

from __future__ import annotations

from typing import Any

import torch

from rkmate import device as devices
from rkmate.graph.ops.losses import STORAGES_OF_THEIR_OWN
from rkmate.graph.passes.joint import Rewriting
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.schema import schema_of

_NO_REDUCTION = 0


def storages_of_their_own(work: Rewriting) -> None:
    """Rewrite the losses that are summed up, and folds."""
    for node in work.graph.nodes:
        if node.target not in STORAGES_OF_THEIR_OWN:
            continue
        folds = node.target is torch.ops.aten.col2im.default
        if devices.of(node.meta[VALUE]).cpu_kernels if folds else \
                not node.meta[VALUE].dim() and _reduction(node) != _NO_REDUCTION:
            node.target = STORAGES_OF_THEIR_OWN[node.target]


def _reduction(node: Any) -> int:
    names = [a.name for a in schema_of(node.target).arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    default = schema_of(node.target).arguments[names.index("reduction")].default_value
    return int(given.get("reduction", default))
