"""Budgets for a model whose layers are sharded by `fully_shard` (FSDP2).

Each sharded layer gathers its parameters in hooks around its forward and its backward, so each is planned
by itself, and its hooks stay outside of its plan. One step calls all of them before the first backward:
layers that are alike (of one class, with parameters of the same shapes) share a budget as so many calls of
one module do, and layers of several kinds share the whole by the bytes of their parameters. What may be sent
away at once (`most_bytes` of `rkmate.Offload`) is shared in the same way.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass, replace

from torch import nn

from rkmate.budget import Budget
from rkmate.errors import ArgumentError
from rkmate.runtime.plan_cache import Planning


@dataclass(frozen=True)
class Share:
    """A sharded layer, and how it is planned."""

    layer: nn.Module
    planning: Planning


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` gathers its parameters in hooks around the forward."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def sharded_layers(model: nn.Module) -> list[nn.Module]:
    """The outermost sharded modules inside of a model, the model itself left out."""
    found: list[nn.Module] = []
    todo = list(model.children())
    for module in todo:                     # grows while it is walked
        if is_sharded(module):
            found.append(module)
        else:
            todo += module.children()
    return found


def shares(model: nn.Module, layers: list[nn.Module], planning: Planning) -> list[Share]:
    """How the layers of a model share a budget.

    Raises:
        ArgumentError: several calls before a backward were asked for, which is what layers are planned as.
    """
    if planning.settings.calls != 1:
        raise ArgumentError(f"calls is {planning.settings.calls}, and {type(model).__name__} has sharded "
                            "layers, which share a budget as calls of one module do: apply a budget to each "
                            "layer, with calls=layers times calls")
    kinds: dict[object, list[nn.Module]] = defaultdict(list)
    for layer in layers:
        kinds[type(layer), tuple((name, p.shape, p.dtype) for name, p in layer.named_parameters())
              ].append(layer)
    weights = {kind: sum(p.numel() * p.element_size() for m in alike for p in m.parameters()) or 1
               for kind, alike in kinds.items()}
    whole = sum(weights.values())
    found: dict[nn.Module, Share] = {}
    for kind, alike in kinds.items():
        budget = planning.budget
        if budget.bytes is not None:
            budget = Budget(bytes=max(1, budget.bytes * weights[kind] // whole))
        offload = planning.settings.offload
        own = replace(planning, budget=budget, settings=replace(
            planning.settings, calls=len(alike), deferred_outputs="never",      # the parameters go again
            offload=None if offload is None else offload.part(weights[kind], whole)))
        found.update((layer, Share(layer, own)) for layer in alike)
    return [found[layer] for layer in layers]
