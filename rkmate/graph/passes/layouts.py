"""Joint passes: convolution networks with the channels last.

Most convolutions, batch norms and poolings have a second set of kernels, for images whose channels lie side
by side in memory. Each operation takes the layout of what it reads, so that one copy where images enter turns
a network around. A copy is an ordinary computation: a planner keeps it, or makes it again. Weights are not
copied: convolutions take them in either layout, and rearrange them for themselves. That takes time and
memory, so that small images of many channels, beside which the weights are large, keep the layout they have.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx

from rkmate.graph.capture.operations import is_random, is_view
from rkmate.graph.passes.joint import Joint, is_backward
from rkmate.graph.passes.layout_rules import (
    follows,
    is_channels_last,
    is_dense,
    last_format,
    like_in_memory,
    sizes_of_small_images,
)
from rkmate.torch_seam.nodes import VALUE, without_descriptor
from rkmate.torch_seam.patches.layouts import as_kernels_return_them
from rkmate.torch_seam.patches.numerics import as_eager_computes
from rkmate.torch_seam.schema import OpOverload

aten = torch.ops.aten


def channels_last(work: Joint) -> None:
    """Name the convolutions that could have their channels last; where it is wanted, let them."""
    small = sizes_of_small_images(work.graph)
    found = work.concerned["channels-last"] = tuple(dict.fromkeys(
        work.name(n.args[1]) for n in work.graph.nodes
        if n.target is aten.convolution.default and (form := last_format(n.meta[VALUE])) is not None
        and not n.meta[VALUE].is_contiguous(memory_format=form) and n.meta[VALUE].shape[2:] not in small))
    if "channels-last" in work.choices and found:
        with ExitStack() as stack:
            stack.enter_context(as_eager_computes())
            stack.enter_context(as_kernels_return_them())
            stack.enter_context(torch.no_grad())
            _Turning(work, small).run()


def layouts_of_gradients(work: Joint) -> None:
    """Gradients of parameters have the parameters' layout: autograd would copy them to it, out of sight."""
    place = {source: node for node, source in work.sources.items()}
    grads = list(work.grads)
    with torch.no_grad():
        for k, (source, node) in enumerate(grads):
            wanted = place[source].meta[VALUE]
            if source.kind == "param" and is_channels_last(node.meta[VALUE]) and wanted.is_contiguous():
                grads[k] = source, inserted(work.graph, node.next, node, aten.clone.default, (node,),
                                            memory_format=torch.contiguous_format)
    work.grads = tuple(grads)


class _Turning:
    """The graph while layouts go through it, in the order of its nodes."""

    def __init__(self, work: Joint, small: Collection[torch.Size]) -> None:
        self.work = work
        self.small = small
        self.graph = work.graph
        self.before: dict[fx.Node, Any] = {n: n.meta.get(VALUE) for n in work.graph.nodes}
        """Values in the layout that they had."""
        self.copies: dict[tuple[fx.Node, tuple[int, ...]], fx.Node] = {}
        """Values in another layout, by strides."""

    def run(self) -> None:
        nodes = [n for n in self.graph.nodes if n.op == "call_function"]
        for node in nodes:
            if not is_backward(node):
                self._visit(node)
        self.work.outputs = tuple(None if out is None else self._as_before(out, out, out.next)
                                  for out in self.work.outputs)
        for node in nodes:
            if is_backward(node):
                self._visit(node)
        self.work.grads = tuple((s, n if s.kind == "param" else self._as_before(n, n, n.next))
                                for s, n in self.work.grads)

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
            node.meta[VALUE] = _value(node)
        except (RuntimeError, ValueError):      # a view that such a layout does not have
            self._restore(node)
            node.meta[VALUE] = _value(node)

    def _is_turned(self, node: fx.Node) -> bool:
        """Whether a value has another layout than before."""
        return _strides(node.meta.get(VALUE)) != _strides(self.before.get(node))

    def _may_follow(self, node: fx.Node) -> bool:
        """Whether an operation works with any layout, and gives the same values."""
        if not isinstance(node.target, OpOverload) or is_random(node):
            return False
        return is_view(node) or (follows(node) and all(map(is_dense, _tensors(self.before[node]))))

    def _convolution(self, node: fx.Node) -> None:
        """Convolutions take images with the channels last, if that is how they return them. (In that layout
        already: a weight may see to it.)"""
        image: fx.Node = node.args[0]  # type: ignore[assignment]
        form = self._format(image, node.meta[VALUE])
        if form is None or _value(node).is_contiguous(memory_format=form):
            return
        turned = _cloned(image.meta[VALUE], form)
        if _value(node, {image: turned}).is_contiguous(memory_format=form):
            node.replace_input_with(image, self._laid_out(image, turned, node, node))

    def _take_copies(self, node: fx.Node) -> None:
        """A convolution's gradients read the copy that it has read itself."""
        image: fx.Node = node.args[1]  # type: ignore[assignment]
        form = self._format(image, node.args[0].meta[VALUE])  # type: ignore[union-attr]
        if form is not None:
            copy = self.copies.get((image, _cloned(image.meta[VALUE], form).stride()))
            if copy is not None:
                node.replace_input_with(image, copy)

    def _format(self, image: fx.Node, out: torch.Tensor) -> torch.memory_format | None:
        """The layout that a convolution of an image should have, by its result."""
        form = last_format(image.meta[VALUE])
        return form if form is None or out.shape[2:] not in self.small else torch.contiguous_format

    def _even(self, node: fx.Node) -> None:
        """Images that an operation reads together have one layout: mixed ones are slow, and would go on."""
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
        """A value in the layout that it had; a view, of the value that it is a view of."""
        if node not in self.before or not self._is_turned(node):
            return node
        if is_view(node):
            base: fx.Node = node.args[0]  # type: ignore[assignment]
            return inserted(self.graph, point, like, node.target, (
                self._as_before(base, like, point), *node.args[1:]), **node.kwargs)
        return self._laid_out(node, self.before[node], like, point)

    def _laid_out(self, node: fx.Node, wanted: torch.Tensor, like: fx.Node, point: fx.Node) -> fx.Node:
        """A value with the strides of another tensor, before `point` if it is not there yet. `like`: the
        operation that needs it."""
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
    """Whether a tensor is an image in one of the two layouts, as many and as large as another."""
    form = last_format(value)
    return form is not None and value.is_contiguous() != value.is_contiguous(memory_format=form) \
        and bool((value.shape[0], value.shape[2:]) == (like.shape[0], like.shape[2:]))


def inserted(graph: fx.Graph, point: fx.Node, like: fx.Node, target: Any, args: tuple[Any, ...],
              **kwargs: Any) -> fx.Node:
    """A new operation before `point`, of the module and the phase of `like`."""
    with graph.inserting_before(point):
        node = graph.call_function(target, args, kwargs)
    node.meta = without_descriptor(like.meta)
    node.meta[VALUE] = _value(node)
    return node


def _value(node: fx.Node, instead: dict[fx.Node, Any] | None = None) -> Any:
    """What an operation returns for the values of its inputs. `instead`: other values of some."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs),
                                   lambda n: (instead or {}).get(n, n.meta[VALUE]))
    mode: Any = next(v.fake_mode for n in node.all_input_nodes for v in _tensors(n.meta[VALUE]))  # type: ignore[attr-defined]
    with mode:
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _cloned(value: Any, form: torch.memory_format) -> torch.Tensor:
    with value.fake_mode:
        turned: torch.Tensor = value.clone(memory_format=form)
    return turned


def _tensors(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [v for v in values if isinstance(v, torch.Tensor)]


def _strides(value: Any) -> list[tuple[int, ...]]:
    return [v.stride() for v in _tensors(value) if v.layout is torch.strided]
