"""A rewriting pass: batch norms in training mode as sums and products, which groups can take in.

Torch's kernel reads an image three times (mean, variance, result), and the activation or the sum behind it
reads and writes it once more. Here the statistics are one group, which reads the image once, and what is done
with them stands among the operations around it. To compute a result again takes the second part alone.

A sum over all images is first taken over a few rows at a time, which stay in the processor's cache: a kernel
goes over channels in its outer loop, and would otherwise fetch each row from memory for every few of them.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from rkmate import device as devices
from rkmate.graph.passes import operators  # noqa: F401 - defines operators of torch.ops.rkmate
from rkmate.graph.passes.joint import Rewriting
from rkmate.graph.passes.layout_rules import is_channels_last

aten, own = torch.ops.aten, torch.ops.rkmate

STATISTICS = "rkmate_statistics"
"""Marks, in `fx.Node.meta`, what belongs to the statistics of a batch norm: a group of its own in the
forward, as all of it comes before any of its readers."""
BLOCK_BYTES = 2**14
"""Of the rows that are summed up at a time: those of three images stay in the cache nearest to a core."""


def take_batch_norms_apart(work: Rewriting) -> None:
    """Write batch norms and their gradients as arithmetic, where groups are compiled for a CPU."""
    if not work.choices.fused:
        return
    for node in list(work.graph.nodes):
        args: Any = node.args
        if node.target is aten._native_batch_norm_legit_functional.default and args[5] is True \
                and _plain(*args[:5]):
            _forward(work, node, *args[:5], *args[6:])
        elif node.target is aten._native_batch_norm_legit.no_stats and args[3] is True and _plain(*args[:3]):
            x, weight, bias, _, momentum, eps = args
            _forward(work, node, x, weight, bias, None, None, momentum, eps)
        elif node.target is own.batch_norm_backward.default and _plain(*args[:5]):
            _backward(work, node, *args[:5])
        elif node.target is aten.native_batch_norm_backward.default and args[7] is True \
                and None not in args[5:7] and _plain(*args[:3], *args[5:7]):
            _backward(work, node, *args[:3], *args[5:7])


def _plain(image: fx.Node, *others: fx.Node | None) -> bool:
    """Whether images and numbers for each channel are of one type that is computed with as it is."""
    values = [n.meta["val"] for n in (image, *others) if n is not None]
    first = values[0]
    return first.dtype in (torch.float32, torch.float64) and all(v.dtype == first.dtype for v in values) \
        and (first.is_contiguous() or is_channels_last(first)) and first.dim() > 2 \
        and all(devices.of(v).cpu_kernels for v in values) \
        and all(v.stride() == first.stride() for v in values if v.dim() == first.dim())


class _Writer:
    """Puts operations before one that they take the place of."""

    def __init__(self, work: Rewriting, node: fx.Node, image: fx.Node) -> None:
        self.work, self.node = work, node
        value = image.meta["val"]
        self.mode = value.fake_mode
        self.shape, self.last = value.shape, is_channels_last(value)
        self.count = value.numel() // value.shape[1]
        self.statistics = False

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.work.graph.inserting_before(self.node):
            made = self.work.graph.call_function(target, args, kwargs)
        made.meta = {k: v for k, v in self.node.meta.items() if k not in ("desc", "val")}
        if self.statistics:
            made.meta[STATISTICS] = True
        with self.mode, torch.no_grad():
            given, named = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
            made.meta["val"] = target(*given, **named)
        return made

    def beside(self, channels: fx.Node) -> fx.Node:
        """A number for each channel, as images take it."""
        return self(aten.view.default, channels, [1, -1, *[1] * (len(self.shape) - 2)])

    def blocks(self, image: fx.Node) -> tuple[fx.Node, int, list[int]]:
        """An image as blocks; the dimension and length of a block, and the other dimensions but that of the
        channels."""
        batch, channels, *sizes = self.shape
        if self.last:
            length = _divisor(self.count, BLOCK_BYTES // (channels * image.meta["val"].element_size()))
            image = self(aten.permute.default, image, [0, *range(2, len(self.shape)), 1])
            return self(aten.view.default, image, [self.count // length, length, channels]), 1, [0]
        area = torch.Size(sizes).numel()
        length = _divisor(area, BLOCK_BYTES // image.meta["val"].element_size())
        return self(aten.view.default, image, [batch, channels, area // length, length]), 3, [0, 2]

    def total(self, image: fx.Node) -> fx.Node:
        """The sum for each channel."""
        image, dim, others = self.blocks(image)
        return self(aten.sum.dim_IntList, self(aten.sum.dim_IntList, image, [dim]), others)

    def take_place(self, results: dict[int, fx.Node]) -> None:
        """Let all read these instead of the node's results."""
        for item in list(self.node.users):
            assert item.target is operator.getitem
            self.work.replace(item, results[item.args[1]])  # type: ignore[index]
            self.work.graph.erase_node(item)
        self.work.graph.erase_node(self.node)


def _divisor(count: int, most: int) -> int:
    """The largest divisor of a number that is not above another (16, where that is less); the number itself,
    where there are but small ones."""
    found = next(n for n in range(min(count, max(16, most)), 0, -1) if count % n == 0)
    return found if found >= 8 else count


def _forward(work: Rewriting, node: fx.Node, x: fx.Node, weight: fx.Node | None, bias: fx.Node | None,
             running_mean: fx.Node | None, running_var: fx.Node | None, momentum: float, eps: float) -> None:
    write = _Writer(work, node, x)
    write.statistics = True
    image, dim, others = write.blocks(x)
    means = write(aten.mean.dim, image, [dim], True)
    apart = write(aten.sub.Tensor, image, means)
    within = write(aten.mean.dim, write(aten.mul.Tensor, apart, apart), [dim])
    means = write(aten.squeeze.dim, means, dim)
    mean = write(aten.mean.dim, means, others)
    beside = write(aten.view.default, mean, [1 if d in others else -1 for d in range(len(others) + 1)])
    apart = write(aten.sub.Tensor, means, beside)
    var = write(aten.add.Tensor, write(aten.mean.dim, within, others),
                write(aten.mean.dim, write(aten.mul.Tensor, apart, apart), others))
    invstd = write(aten.rsqrt.default, write(aten.add.Tensor, var, eps))
    results = {1: mean, 2: invstd}
    if any(item.args[1] in (3, 4) for item in node.users):
        unbiased = write(aten.mul.Tensor, var, write.count / max(1, write.count - 1))
        write.statistics = False
        results[3] = write(aten.lerp.Scalar, running_mean, mean, momentum)
        results[4] = write(aten.lerp.Scalar, running_var, unbiased, momentum)
    write.statistics = False
    y = write(aten.sub.Tensor, x, write.beside(mean))
    factor = invstd if weight is None else write(aten.mul.Tensor, invstd, weight)
    y = write(aten.mul.Tensor, y, write.beside(factor))
    results[0] = y if bias is None else write(aten.add.Tensor, y, write.beside(bias))
    write.take_place(results)


def _backward(work: Rewriting, node: fx.Node, grad: fx.Node, x: fx.Node, weight: fx.Node | None,
              mean: fx.Node, invstd: fx.Node) -> None:
    write = _Writer(work, node, x)
    normed = write(aten.mul.Tensor, write(aten.sub.Tensor, x, write.beside(mean)), write.beside(invstd))
    of_bias = write.total(grad)
    of_weight = write.total(write(aten.mul.Tensor, grad, normed))
    y = write(aten.sub.Tensor, grad, write.beside(write(aten.mul.Tensor, of_bias, 1 / write.count)))
    y = write(aten.sub.Tensor, y, write(aten.mul.Tensor, normed, write.beside(
        write(aten.mul.Tensor, of_weight, 1 / write.count))))
    factor = invstd if weight is None else write(aten.mul.Tensor, invstd, weight)
    y = write(aten.mul.Tensor, y, write.beside(factor))
    write.take_place({0: y, 1: of_weight, 2: of_bias})
