"""A rewriting pass: convolutions of one pixel each, on images that have their channels last, are products.

Such an image is a matrix already, of pixels by channels. A convolution with a kernel of 1 x 1 multiplies it
with one of channels by channels, and so do its gradients: kernels for windows gain nothing, and on a CPU some
of them copy the image first, or fill gradients with zeros before they write them.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from rkmate import device as devices
from rkmate.graph.passes.joint import Joint
from rkmate.graph.passes.layout_rules import last_format
from rkmate.graph.passes.layouts import inserted
from rkmate.torch_seam.nodes import VALUE

aten = torch.ops.aten
_TYPES = (torch.float32, torch.float64)


def multiply_pixels(work: Joint) -> None:
    """Rewrite the convolutions, and their gradients, of images that were given this layout, on a CPU."""
    with torch.no_grad():
        for node in list(work.graph.nodes):
            args = tuple[Any, ...](node.args)
            if node.target is aten.convolution.default and _is_product((node, *args[:2]), args[3:]):
                _Writer(work, node).forward()
            elif node.target is aten.convolution_backward.default \
                    and _is_product(args[:3], args[4:10]):
                _Writer(work, node).backward()


def _is_product(nodes: tuple[fx.Node, ...], how: tuple[Any, ...]) -> bool:
    """Whether a convolution reads each pixel once, in place. `nodes`: its result or that one's gradient, the
    image, the weight; `how`: stride, padding, dilation, whether it is transposed, padding of the result,
    groups."""
    stride, padding, _, transposed, _, groups = how
    values = [n.meta[VALUE] for n in nodes]
    form = last_format(values[1])
    return form is not None and not transposed and groups == 1 and values[2].shape[2:].numel() == 1 \
        and set(stride) == {1} and set(padding) == {0} and devices.of(values[1]).cpu_kernels and all(
            v.dtype in _TYPES and v.is_contiguous(memory_format=form) for v in values)


class _Writer:
    """What takes the place of one node."""

    def __init__(self, work: Joint, node: fx.Node) -> None:
        self.work, self.node = work, node

    def forward(self) -> None:
        image, weight, bias = self.node.args[:3]
        pixels, turned = self._pixels(image), self._call(aten.t.default, self._matrix(weight))
        out = self._call(aten.mm.default, pixels, turned) if bias is None \
            else self._call(aten.addmm.default, bias, pixels, turned)
        self.work.replace(self.node, self._image(out, self.node.meta[VALUE]))
        self.work.graph.erase_node(self.node)

    def backward(self) -> None:
        """The weight's gradient first: with it the image is no longer needed."""
        grad, image, weight = self.node.args[:3]
        rows = self._pixels(grad)
        for item in sorted(self.node.users, key=lambda n: n.args[1] == 0):
            assert item.target is operator.getitem
            if item.args[1] == 0:
                new = self._image(self._call(aten.mm.default, rows, self._matrix(weight)), item.meta[VALUE])
            elif item.args[1] == 1:
                product = self._call(aten.mm.default, self._call(aten.t.default, rows), self._pixels(image))
                new = self._call(aten.view.default, product, list(item.meta[VALUE].shape))
            else:
                new = self._call(aten.sum.dim_IntList, rows, [0])
            self.work.replace(item, new)
            self.work.graph.erase_node(item)
        self.work.graph.erase_node(self.node)

    def _call(self, target: Any, *args: Any) -> fx.Node:
        return inserted(self.work.graph, self.node, self.node, target, args)

    def _pixels(self, image: Any) -> fx.Node:
        """An image as a matrix [pixels, channels]."""
        value = image.meta[VALUE]
        last = self._call(aten.permute.default, image, [0, *range(2, value.dim()), 1])
        return self._call(aten.view.default, last, [value.numel() // value.shape[1], value.shape[1]])

    def _matrix(self, weight: Any) -> fx.Node:
        """A weight as a matrix [channels of the result, channels of the image]."""
        return self._call(aten.view.default, weight, list(weight.meta[VALUE].shape[:2]))

    def _image(self, pixels: fx.Node, like: torch.Tensor) -> fx.Node:
        last = self._call(aten.view.default, pixels, [like.shape[0], *like.shape[2:], like.shape[1]])
        return self._call(aten.permute.default, last, [0, like.dim() - 1, *range(1, like.dim() - 1)])
