"""Rewrites of images: networks of convolutions with the channels last, and products that this layout allows.

Most convolutions, batch norms and poolings have a second set of kernels, for images whose channels are next
to each other in memory ("channels last"). Each operation takes the layout of its input, so that one copy of
the images at the start changes the layout of the whole network. A copy is an ordinary computation: a planner
keeps it, or makes it again. Weights are not copied: convolutions take them in either layout, and rearrange
them themselves. That takes time and memory. Therefore small images with many channels, whose weights are
large in comparison, keep their layout.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from rkmate import device as devices
from rkmate.graph.capture.repairs import retrace
from rkmate.graph.ops.properties import is_pointwise, is_random, is_view
from rkmate.graph.passes.joint import Joint, inserted, result_of
from rkmate.torch_seam.nodes import VALUE, is_backward, tensors_of
from rkmate.torch_seam.schema import OpOverload
from rkmate.torch_seam.tensors import has_strides

aten = torch.ops.aten


# -- Layouts, and operations that work with any ----------------------------------------------------
#
# Kernels that are reached through a function which first makes its arguments contiguous (attention; a group
# norm on an accelerator) read wrong numbers in another layout: what is not listed here keeps the layout it
# had.

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

_NAMES = (
    # Reductions, products and copies.
    "sum", "mean", "var", "var_mean", "amax", "amin", "_softmax", "_softmax_backward_data", "_log_softmax",
    "_log_softmax_backward_data", "native_layer_norm", "native_layer_norm_backward", "mm", "addmm", "bmm",
    "baddbmm", "clone", "_to_copy", "copy", "cat", "stack", "constant_pad_nd", "slice_backward",
    "select_backward", "index", "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros",
    "new_empty", "new_full", "new_ones", "mse_loss", "nll_loss2d_forward", "nll_loss2d_backward",
    # Of images.
    "native_batch_norm", "native_batch_norm_backward", "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training", "cudnn_batch_norm",
    "cudnn_batch_norm_backward", "max_pool2d_with_indices", "max_pool2d_with_indices_backward",
    "max_pool3d_with_indices", "max_pool3d_with_indices_backward", "avg_pool2d", "avg_pool2d_backward",
    "avg_pool3d", "avg_pool3d_backward", "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d", "_adaptive_avg_pool3d_backward", "adaptive_max_pool2d",
    "adaptive_max_pool2d_backward", "upsample_nearest2d", "upsample_nearest2d_backward",
    "upsample_nearest3d", "upsample_nearest3d_backward", "upsample_bilinear2d",
    "upsample_bilinear2d_backward", "upsample_trilinear3d", "upsample_trilinear3d_backward")
_ANYWHERE = frozenset(getattr(aten, n) for n in _NAMES)
_ON_CPU = frozenset((aten.native_group_norm, aten.native_group_norm_backward))


def follows(node: fx.Node) -> bool:
    """Return whether an operation of ATen reads images in any layout, and returns them in a layout of its own
    choice."""
    target: Any = node.target
    if is_pointwise(target):
        return bool(target.namespace == "aten")
    packet = target.overloadpacket
    return packet in _ANYWHERE or (packet in _ON_CPU and all(
        devices.of(n.meta[VALUE]).cpu_kernels for n in node.all_input_nodes))


def last_format(value: Any) -> torch.memory_format | None:
    """Return the layout of an image, or of a volume, with channels last; None for other values."""
    return _FORMATS.get(value.dim()) if isinstance(value, torch.Tensor) \
        and value.layout is torch.strided else None


def is_channels_last(value: Any) -> bool:
    """Return whether an image has its channels last and is not contiguous as well."""
    form = last_format(value)
    return form is not None and value.is_contiguous(memory_format=form) and not value.is_contiguous()


def sizes_of_small_images(graph: fx.Graph) -> frozenset[torch.Size]:
    """Return the heights and widths at which convolutions read more numbers of their weights than of images:
    bringing weights into another layout would take longer than the images gain. Images of one pixel have only
    one layout."""
    balance: dict[torch.Size, int] = {}
    for node in graph.nodes:
        if node.target is aten.convolution.default:
            image, weight = (n.meta[VALUE] for n in node.args[:2])
            out = node.meta[VALUE]
            moved = weight.numel() if weight.shape[2:].numel() > 1 else 0
            balance[out.shape[2:]] = balance.get(out.shape[2:], 0) + image.numel() + out.numel() - moved
    return frozenset(size for size, images in balance.items() if images < 0)


def like_in_memory(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one shape have their elements in the same places. Strides along
    dimensions of size one do not matter."""
    return has_strides(value, other.stride())


def is_dense(value: torch.Tensor) -> bool:
    """Return whether a tensor fills its memory, and no two elements share a place."""
    size = 1
    for stride, n in sorted((s, n) for s, n in zip(value.stride(), value.shape, strict=True) if n > 1):
        if stride != size:
            return False
        size *= n
    return True


# -- Channels last ---------------------------------------------------------------------------------


def channels_last(joint: Joint) -> None:
    """List the convolutions that could have their channels last, and change them if the choices ask for
    it."""
    small = sizes_of_small_images(joint.graph)
    found = joint.concerned["channels-last"] = tuple(dict.fromkeys(
        joint.name(n.args[1]) for n in joint.graph.nodes
        if n.target is aten.convolution.default and (form := last_format(n.meta[VALUE])) is not None
        and not n.meta[VALUE].is_contiguous(memory_format=form) and n.meta[VALUE].shape[2:] not in small))
    if "channels-last" in joint.choices and found:
        retrace(_Turning(joint, small).run)


def layouts_of_gradients(joint: Joint) -> None:
    """Give gradients of parameters the parameters' layout: autograd would copy them to it, outside of the
    plan."""
    place = {source: node for node, source in joint.sources.items()}
    grads = list(joint.grads)
    with torch.no_grad():
        for k, (source, node) in enumerate(grads):
            wanted = place[source].meta[VALUE]
            if source.kind == "param" and is_channels_last(node.meta[VALUE]) and wanted.is_contiguous():
                grads[k] = source, inserted(joint.graph, node.next, node, aten.clone.default, (node,),
                                            memory_format=torch.contiguous_format)
    joint.grads = tuple(grads)


class _Turning:
    """The graph while layouts go through it, in the order of its nodes."""

    def __init__(self, joint: Joint, small: Collection[torch.Size]) -> None:
        self.joint = joint
        self.small = small
        self.graph = joint.graph
        self.before: dict[fx.Node, Any] = {n: n.meta.get(VALUE) for n in joint.graph.nodes}
        """Values in the layout that they had."""
        self.copies: dict[tuple[fx.Node, tuple[int, ...]], fx.Node] = {}
        """Values in another layout, by strides."""

    def run(self) -> None:
        nodes = [n for n in self.graph.nodes if n.op == "call_function"]
        for node in nodes:
            if not is_backward(node):
                self._visit(node)
        self.joint.outputs = tuple(None if out is None else self._as_before(out, out, out.next)
                                   for out in self.joint.outputs)
        for node in nodes:
            if is_backward(node):
                self._visit(node)
        self.joint.grads = tuple((s, n if s.kind == "param" else self._as_before(n, n, n.next))
                                 for s, n in self.joint.grads)

    def _visit(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            node.meta[VALUE] = node.args[0].meta[VALUE][node.args[1]]  # type: ignore[union-attr]
            return
        if node.target is aten.convolution.default:
            self._convolution(node)
        elif node.target is aten.convolution_backward.default:
            self._take_copies(node)
        elif not any(self._is_turned(n) for n in node.all_input_nodes):
            return
        elif not self._may_follow(node):
            self._restore(node)
        else:
            self._even(node)
        try:
            node.meta[VALUE] = result_of(node)
        except (RuntimeError, ValueError):      # a view that such a layout does not have
            self._restore(node)
            node.meta[VALUE] = result_of(node)

    def _is_turned(self, node: fx.Node) -> bool:
        """Return whether a value has another layout than before."""
        return _strides(node.meta.get(VALUE)) != _strides(self.before.get(node))

    def _may_follow(self, node: fx.Node) -> bool:
        """Return whether an operation works with any layout, and gives the same values."""
        if not isinstance(node.target, OpOverload) or is_random(node):
            return False
        return is_view(node) or (follows(node) and all(map(is_dense, tensors_of(self.before[node]))))

    def _convolution(self, node: fx.Node) -> None:
        """Give a convolution its image with channels last, if that is how it returns its result. (An image
        may have that layout already, because of a weight.)"""
        image: fx.Node = node.args[0]  # type: ignore[assignment]
        form = self._format(image, node.meta[VALUE])
        if form is None or result_of(node).is_contiguous(memory_format=form):
            return
        turned = _cloned(image.meta[VALUE], form)
        if result_of(node, instead={image: turned}).is_contiguous(memory_format=form):
            node.replace_input_with(image, self._laid_out(image, turned, node, node))

    def _take_copies(self, node: fx.Node) -> None:
        """Let a convolution's gradients read the copy that the convolution has read."""
        image: fx.Node = node.args[1]  # type: ignore[assignment]
        form = self._format(image, node.args[0].meta[VALUE])  # type: ignore[union-attr]
        if form is not None:
            copy = self.copies.get((image, _cloned(image.meta[VALUE], form).stride()))
            if copy is not None:
                node.replace_input_with(image, copy)

    def _format(self, image: fx.Node, out: torch.Tensor) -> torch.memory_format | None:
        """Return the layout that a convolution of an image should have, by its result."""
        form = last_format(image.meta[VALUE])
        return form if form is None or out.shape[2:] not in self.small else torch.contiguous_format

    def _even(self, node: fx.Node) -> None:
        """Give all images that an operation reads one layout: mixed layouts are slow, and would continue."""
        last = next((n for n in node.all_input_nodes if is_channels_last(n.meta.get(VALUE))), None)
        if last is None or is_view(node):
            return
        like = last.meta[VALUE]
        alike = [n for n in node.all_input_nodes if _is_image_beside(n.meta.get(VALUE), like)]
        wanted = self._format(last, like)
        assert wanted is not None
        for n in alike if any(n.meta[VALUE].is_contiguous() for n in alike) else ():
            if not n.meta[VALUE].is_contiguous(memory_format=wanted):
                turned = _cloned(n.meta[VALUE], wanted)
                node.replace_input_with(n, self._laid_out(n, turned, node, node))

    def _restore(self, node: fx.Node) -> None:
        """Let an operation read what it has read before."""
        for n in node.all_input_nodes:
            restored = self._as_before(n, node, node)
            if restored is not n:
                node.replace_input_with(n, restored)

    def _as_before(self, node: fx.Node, like: fx.Node, point: fx.Node) -> fx.Node:
        """Return a value in its former layout; for a view, the view of the value in its former layout."""
        if node not in self.before or not self._is_turned(node):
            return node
        if is_view(node):
            base: fx.Node = node.args[0]  # type: ignore[assignment]
            return inserted(self.graph, point, like, node.target, (
                self._as_before(base, like, point), *node.args[1:]), **dict[str, Any](node.kwargs))
        return self._laid_out(node, self.before[node], like, point)

    def _laid_out(self, node: fx.Node, wanted: torch.Tensor, like: fx.Node, point: fx.Node) -> fx.Node:
        """Return a value with the strides of another tensor, made before `point` if it does not exist yet.
        `like`: the operation that needs it."""
        key = node, tuple(wanted.stride())
        if key not in self.copies:
            insert = functools.partial(inserted, self.graph, point, like)
            value, form = node.meta[VALUE], last_format(wanted)
            if like_in_memory(value, wanted):
                made = insert(aten.as_strided.default, (node, list(wanted.shape), list(wanted.stride())))
            elif wanted.is_contiguous() or (form is not None and wanted.is_contiguous(memory_format=form)):
                made = insert(aten.clone.default, (node,), memory_format=torch.contiguous_format
                              if wanted.is_contiguous() else form)
            else:
                places = list(zip(wanted.stride(), wanted.shape, strict=True))
                order = sorted(range(len(places)), key=lambda d: places[d], reverse=True)
                made = insert(aten.permute.default, (node, order))
                made = insert(aten.clone.default, (made,), memory_format=torch.contiguous_format)
                made = insert(aten.permute.default, (made, [order.index(d) for d in range(len(order))]))
            self.copies[key] = made
        return self.copies[key]


def _is_image_beside(value: Any, like: torch.Tensor) -> bool:
    """Return whether a tensor is an image in one of the two layouts, with as many images of the same size as
    another one."""
    form = last_format(value)
    return form is not None and value.is_contiguous() != value.is_contiguous(memory_format=form) \
        and bool((value.shape[0], value.shape[2:]) == (like.shape[0], like.shape[2:]))


def _cloned(value: Any, form: torch.memory_format) -> torch.Tensor:
    with value.fake_mode:
        turned: torch.Tensor = value.clone(memory_format=form)
    return turned


def _strides(value: Any) -> list[tuple[int, ...]]:
    return [v.stride() for v in tensors_of(value) if v.layout is torch.strided]


# -- Convolutions of one pixel each ----------------------------------------------------------------
#
# An image that has its channels last is a matrix already, of pixels by channels. A convolution with a kernel
# of 1 x 1 multiplies it with one of channels by channels, and so do its gradients: kernels for windows gain
# nothing, and on a CPU some of them copy the image first, or fill gradients with zeros before they write
# them.

_TYPES = (torch.float32, torch.float64)


def multiply_pixels(joint: Joint) -> None:
    """Rewrite the convolutions, and their gradients, of images that were given this layout, on a CPU."""
    with torch.no_grad():
        for node in list(joint.graph.nodes):
            args = tuple[Any, ...](node.args)
            if node.target is aten.convolution.default and _is_product((node, *args[:2]), args[3:]):
                _Writer(joint, node).forward()
            elif node.target is aten.convolution_backward.default \
                    and _is_product(args[:3], args[4:10]):
                _Writer(joint, node).backward()


def _is_product(nodes: tuple[fx.Node, ...], how: tuple[Any, ...]) -> bool:
    """Return whether a convolution reads each pixel once, in place. `nodes`: its result or the result's
    gradient, the image, the weight; `how`: stride, padding, dilation, whether it is transposed, padding of
    the result, groups."""
    stride, padding, _, transposed, _, groups = how
    values = [n.meta[VALUE] for n in nodes]
    form = last_format(values[1])
    return form is not None and not transposed and groups == 1 and values[2].shape[2:].numel() == 1 \
        and set(stride) == {1} and set(padding) == {0} and devices.of(values[1]).cpu_kernels and all(
            v.dtype in _TYPES and v.is_contiguous(memory_format=form) for v in values)


class _Writer:
    """Writes the operations that replace one node."""

    def __init__(self, joint: Joint, node: fx.Node) -> None:
        self.joint, self.node = joint, node

    def forward(self) -> None:
        image, weight, bias = self.node.args[:3]
        pixels, turned = self._pixels(image), self._call(aten.t.default, self._matrix(weight))
        out = self._call(aten.mm.default, pixels, turned) if bias is None \
            else self._call(aten.addmm.default, bias, pixels, turned)
        self.joint.replace(self.node, self._image(out, self.node.meta[VALUE]))
        self.joint.graph.erase_node(self.node)

    def backward(self) -> None:
        """Replace a backward. The weight's gradient comes first: afterwards the image is not needed any
        more."""
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
            self.joint.replace(item, new)
            self.joint.graph.erase_node(item)
        self.joint.graph.erase_node(self.node)

    def _call(self, target: Any, *args: Any) -> fx.Node:
        return inserted(self.joint.graph, self.node, self.node, target, args)

    def _pixels(self, image: Any) -> fx.Node:
        """Return an image as a matrix [pixels, channels]."""
        value = image.meta[VALUE]
        last = self._call(aten.permute.default, image, [0, *range(2, value.dim()), 1])
        return self._call(aten.view.default, last, [value.numel() // value.shape[1], value.shape[1]])

    def _matrix(self, weight: Any) -> fx.Node:
        """Return a weight as a matrix [channels of the result, channels of the image]."""
        return self._call(aten.view.default, weight, list(weight.meta[VALUE].shape[:2]))

    def _image(self, pixels: fx.Node, like: torch.Tensor) -> fx.Node:
        last = self._call(aten.view.default, pixels, [like.shape[0], *like.shape[2:], like.shape[1]])
        return self._call(aten.permute.default, last, [0, like.dim() - 1, *range(1, like.dim() - 1)])
