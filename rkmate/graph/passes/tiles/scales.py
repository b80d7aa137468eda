"""Scales of rows and columns that move behind a product, so that no scaled operand is in memory.

A root mean square norm multiplies each row of its operand by one number, and each column by a weight. Tiles
of columns of weights read all of the norm's result: that stands beside the norm's operand, and its gradient
beside the operand's. But ``(r * x * c) @ w = r * (x @ (c * w))``, for numbers `r` for each row and `c` for
each column. So tiles read the operand itself, and the gradient that they add up is the operand's.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from rkmate.graph.ops.properties import RESHAPES
from rkmate.graph.passes.tiles.pieces import shape_of, value_of
from rkmate.graph.passes.tiles.stretch import Port, Stretch
from rkmate.torch_seam.nodes import VALUE, is_backward

aten = torch.ops.aten

_SAME_COLUMNS = RESHAPES | {aten.reshape.default}
"""Views that keep the columns, if the last dimension has the same size."""


def scaled_operands(products: Collection[fx.Node], handed: Collection[fx.Node]) -> list[fx.Node]:
    """Return the multiplications, and views of their results, that make the first operands of products, in
    order: those whose results nothing else in the forward reads. `products`: matrix products, columns of
    whose second operand tiles cut; `handed`: values that the graph hands out."""
    known: dict[fx.Node, bool] = {}

    def read_by_products(node: fx.Node) -> bool:
        if node not in known:
            known[node] = node not in handed and all(
                is_backward(u) or (u in products and _first_operand(u) is node and u.args.count(node) == 1)
                or (_source(u) is node and read_by_products(u)) for u in node.users)
        return known[node]

    found: dict[fx.Node, None] = {}
    for product in products:
        chain = [_first_operand(product)]
        while (source := _source(chain[-1])) is not None and read_by_products(chain[-1]):
            chain.append(source)
        chain.pop()
        while chain and scales_of(chain[-1]) is None:
            chain.pop()
        found |= dict.fromkeys(reversed(chain))
    return list(found)


def _source(node: fx.Node) -> fx.Node | None:
    """Return what a view with the same columns looks at, or what a multiplication scales; None for other
    operations."""
    base: Any = node.args[0] if node.args else None
    if node.target in _SAME_COLUMNS and shape_of(base)[-1:] == shape_of(node)[-1:]:
        return base  # type: ignore[no-any-return]
    found = scales_of(node)
    return None if found is None else found[0]


def _first_operand(product: fx.Node) -> fx.Node:
    found: Any = product.args[-2]
    return found  # type: ignore[no-any-return]


def scales_of(node: fx.Node) -> tuple[fx.Node, fx.Node, bool] | None:
    """Return the operand that a multiplication scales, its scales, and whether these are one number for each
    row (else one for each column); None for other operations."""
    if node.target is not aten.mul.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return None
    shape = shape_of(node)
    a: Any
    b: Any
    a, b = node.args
    for x, scale in ((a, b), (b, a)):
        if shape_of(x) != shape or len({value_of(n).dtype for n in (x, scale, node)}) > 1 \
                or value_of(x).dtype not in (torch.float32, torch.float64):
            continue
        if shape_of(scale) == (*shape[:-1], 1):
            return x, scale, True
        if shape_of(scale)[-1:] == shape[-1:] and value_of(scale).numel() == shape[-1]:
            return x, scale, False
    return None


def move_behind(stretch: Stretch, scaled: Collection[fx.Node]) -> dict[Port, Port] | None:
    """Let the products of a stretch read what is scaled, and scale their results. Returns what each scale of
    rows scales; None, and nothing is changed, where the stretch hands out such a product. `scaled`: see
    `scaled_operands`."""
    before = [n for n in stretch.operations if stretch.origin[n] in scaled]
    products = {u for n in before for u in n.users if u not in before}
    if not products or any(n in stretch.results or n.kwargs for n in products):
        return None
    scales: dict[Port, Port] = {}
    for product in products:
        _move(stretch, product, before, scales)
    for node in reversed(before):
        stretch.graph.erase_node(node)
        stretch.origin.pop(node)
    return scales


def _move(stretch: Stretch, product: fx.Node, before: Collection[fx.Node], scales: dict[Port, Port]) -> None:
    """Write a product on what is scaled. `before`: the operations that scale; `scales`: noted here."""
    *bias, operand, weight = product.args
    rows, inner = shape_of(operand)
    of_rows: list[fx.Node] = []
    of_columns: list[fx.Node] = []
    node: Any = operand
    while node in before:
        found = scales_of(node)
        if found is None:
            node = node.args[0]
        else:
            node, scale, each_row = found
            (of_rows if each_row else of_columns).append(scale)
    scales |= {stretch.ports[scale]: stretch.ports[node] for scale in of_rows}
    with stretch.graph.inserting_before(product):
        def call(target: Any, *args: Any, cut: bool = True) -> fx.Node:
            made = stretch.graph.call_function(target, args)
            with value_of(product).fake_mode:
                made.meta[VALUE] = target(*fx.node.map_arg(args, lambda n: n.meta[VALUE]))
            if cut:
                stretch.dims[made] = 1
            return made

        def matrix(value: fx.Node, shape: list[int]) -> fx.Node:
            return call(aten.view.default, value, shape, cut=False)

        for scale in of_columns:
            weight = call(aten.mul.Tensor, weight, matrix(scale, [inner, 1]))
        made = call(aten.mm.default, matrix(node, [rows, inner]), weight)
        for scale in of_rows:
            made = call(aten.mul.Tensor, made, matrix(scale, [rows, 1]))
        for added in bias:
            made = call(aten.add.Tensor, made, added)
    product.replace_all_uses_with(made)
    stretch.graph.erase_node(product)
    stretch.dims.pop(product)
    stretch.origin[made] = stretch.origin.pop(product)


def gradient_of_scale(x: torch.Tensor, scale: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of one number for each row, given what it scales, and the `gradient` of that.

    Both a row and its scale times their gradients are the same sum, so that no tile has to compute it. The
    product of each row with its gradient needs no other value of the operand's size.
    """
    rows, inner = scale.numel(), x.shape[-1]
    made = torch.bmm(x.reshape(rows, 1, inner), gradient.reshape(rows, inner, 1))
    return made.view(scale.shape) / scale
