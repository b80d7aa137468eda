"""A rewriting pass: losses whose result holds the storage of what they have summed up.

Torch's kernels of some losses compute each element's loss first and give the sum that tensor's storage: a
number that is held to the end of the step is as large as the outputs. The operators that take their place
have the same bits in a storage of their own.
"""

from __future__ import annotations

from typing import Any

from rkmate.graph.ops.losses import STORAGES_OF_THEIR_OWN
from rkmate.graph.passes.joint import Joint
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.schema import schema_of

_NO_REDUCTION = 0


def storages_of_their_own(work: Joint) -> None:
    """Rewrite the losses that are summed up."""
    for node in work.graph.nodes:
        if node.target in STORAGES_OF_THEIR_OWN and not node.meta[VALUE].dim() \
                and _reduction(node) != _NO_REDUCTION:
            node.target = STORAGES_OF_THEIR_OWN[node.target]


def _reduction(node: Any) -> int:
    names = [a.name for a in schema_of(node.target).arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    default = schema_of(node.target).arguments[names.index("reduction")].default_value
    return int(given.get("reduction", default))
