"""Models that are sharded over ranks, and plans for one rank of a mesh that is not here."""

import typing

from rkmate.support.lazy import lazy_names as _lazy_names

_PLACES = {
    "rkmate.distributed.meshes": ("RankEstimate", "estimate", "fake_mesh"),
    "rkmate.distributed.sharding": ("Precision", "shard"),
}
"""The module in which each name is defined: it is loaded on first use."""
__all__ = sorted(name for names in _PLACES.values() for name in names)

if typing.TYPE_CHECKING:
    from rkmate.distributed.meshes import RankEstimate as RankEstimate
    from rkmate.distributed.meshes import estimate as estimate
    from rkmate.distributed.meshes import fake_mesh as fake_mesh
    from rkmate.distributed.sharding import Precision as Precision
    from rkmate.distributed.sharding import shard as shard


__getattr__, __dir__ = _lazy_names(__name__, _PLACES)
