"""A rewriting pass: heads. A wide product and the losses of its result, a few rows at a time.

The logits of a language model, or of a classifier with many classes, are often its largest tensors. The
gradients are exact, but the weight's is added up in another order, so that its last bits differ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import fx

from rkmate.graph.capture.operations import is_view
from rkmate.graph.passes.chunked_kernels import is_wide
from rkmate.graph.passes.dead_code import drop_dead
from rkmate.graph.passes.joint import Joint, is_backward
from rkmate.graph.passes.tiles.build import default_parts
from rkmate.graph.passes.tiles.forms import WHOLE
from rkmate.graph.passes.tiles.groups import in_groups
from rkmate.graph.passes.tiles.losses import by_rows
from rkmate.graph.passes.tiles.region import Region, grow, makers_of, seeds_of
from rkmate.graph.passes.tiles.rewrite import late_nodes, tile
from rkmate.graph.passes.tiles.shifts import Shift, leave_out, shift_of
from rkmate.torch_seam.nodes import VALUE

aten = torch.ops.aten

_PRODUCTS = (aten.mm.default, aten.addmm.default)
_WIDER = 2
"""A head's product is more than so many times as wide as what comes in."""


def tile_heads(work: Joint, *, keep_outputs: bool = True) -> None:
    """Note the weights of heads; let the heads run a few rows at a time where that is asked for.

    `keep_outputs`: logits that leave the graph, or that something else reads, are an argument of the head;
    else it computes its own, and the whole ones only serve their other readers.
    """
    asked = work
    if any(True for _ in _shifts(work)):
        work = work if "chunked-loss" in work.choices else work.copy()
        while (shift := next(_shifts(work), None)) is not None:
            leave_out(work, shift, late_nodes(work), work.results())
            drop_dead(work)
    found = find_heads(work, keep_outputs=keep_outputs)
    names = [work.name(weight_of(seed)) for seed in found]
    if "chunked-loss" in work.choices:
        names = [name for name, seed in zip(names, found, strict=True)
                 if _tiled(work, seed, keep_outputs=keep_outputs)]
    concerned = asked.concerned["chunked-loss"] = tuple(dict.fromkeys(names))
    # By groups of rows, gradients of weights are added up where they belong: they need a place that is there.
    asked.concerned["grouped-loss"] = concerned if "in-place" in asked.choices else ()


def _tiled(work: Joint, seed: fx.Node, *, keep_outputs: bool) -> bool:
    """Let the head of a product run a few rows at a time. False, and nothing is changed, where it cannot."""
    undo = [by_rows(work, node) for node in list(grow(seed).forms)
            if node.target is aten.nll_loss_forward.default]
    region, in_place = _region(work, seed, keep_outputs=keep_outputs), "in-place" in work.choices
    if region is not None:
        apart = _with_bases(_seen(work, region))
        if (in_place and "grouped-loss" in work.choices and in_groups(work, region, seed, apart)) or tile(
                work, region, "head", default_parts(region, seed.meta[VALUE]), apart=apart,
                in_forward=not in_place):
            return True
    for loss in reversed(undo):
        loss()
    drop_dead(work)
    return False


def _shifts(work: Joint) -> Iterator[Shift]:
    """What leaves out rows of wide products."""
    late, leaving = late_nodes(work), work.results()
    for node in work.graph.nodes:
        if _is_seed(node) and (shift := shift_of(node, late, leaving)) is not None:
            yield shift


def find_heads(work: Joint, *, keep_outputs: bool = True) -> list[fx.Node]:
    """The product of each head."""
    return seeds_of(work.graph, _is_seed, lambda seed: _region(work, seed, keep_outputs=keep_outputs))


def _is_seed(node: fx.Node) -> bool:
    if node.target not in _PRODUCTS or is_backward(node) or not is_wide(node.meta[VALUE], 0):
        return False
    x: Any = node.args[-2]
    return bool(node.meta[VALUE].shape[1] > _WIDER * x.meta[VALUE].shape[1])


def _region(work: Joint, seed: fx.Node, *, keep_outputs: bool) -> Region | None:
    """The region of a head; None where the product is none's: nothing narrow comes of it, its result goes on
    through another product, or the gradient of its logits is read, or partly made, by others."""
    late, leaving = late_nodes(work), work.results()
    region = grow(seed)
    seen = _seen(work, region)
    if any(n in late for n in seen) or any(
            n in late and n not in region.forms and form != WHOLE and region.wide(n)
            for made in region.forms for n, form in region.needs(made).items()):
        return None
    if keep_outputs and seen:
        region = _without(region, _with_bases(seen))
    narrow = [n for n in region.results(leaving) if n not in late and (
        n in region.sums or not region.wide(n))]
    if not narrow or any(n.target in _PRODUCTS for n in narrow):
        return None
    return region


def _seen(work: Joint, region: Region) -> list[fx.Node]:
    """Its wide values that others read, or that leave the graph."""
    return [n for n in region.results(work.results()) if region.wide(n) and n not in region.sums]


def _with_bases(nodes: Collection[fx.Node]) -> set[fx.Node]:
    """Some values and what they look at."""
    found = set(nodes)
    for node in nodes:
        while is_view(node):
            node = node.args[0]  # type: ignore[assignment]
            found.add(node)
    return found


def _without(region: Region, kept: Collection[fx.Node]) -> Region:
    """A region that reads some of its values from outside, without what only they need."""
    gone, makers = set(kept), makers_of(kept)
    for node in reversed(list(next(iter(kept)).graph.nodes)):
        if node in makers and node in region.forms \
                and all(u in gone or u not in region.forms for u in node.users):
            gone.add(node)
    region.forms = {n: f for n, f in region.forms.items() if n not in gone}
    region.sums -= gone
    return region


def weight_of(product: fx.Node) -> fx.Node:
    """The value whose storage a product's second operand is, through conversions."""
    node: Any = product.args[-1]
    while node.op == "call_function" and (is_view(node) or node.target is aten._to_copy.default):
        node = node.args[0]
    found: fx.Node = node
    return found
