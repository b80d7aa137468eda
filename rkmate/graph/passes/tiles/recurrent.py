"""The rewrite that lets recurrent layers run one segment of their sequence at a time, with the state carried.

A fused layer keeps a workspace for its backward: several values of the layer's width for each step of the
sequence, most of what the layer needs. With a call for each segment, a schedule keeps the states between
segments, and has the workspace of one segment at a time computed again.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rkmate import device as devices
from rkmate.graph.passes.joint import Joint, call_meta, result_of
from rkmate.torch_seam.nodes import VALUE, is_backward, wish_of
from rkmate.torch_seam.patches.recurrent import values_of
from rkmate.torch_seam.schema import schema_of

aten = torch.ops.aten

SEGMENTS = 8
"""Most segments of a layer: each has operations of its own, among which planners choose."""
LEAST_STEPS = 32
"""Steps of a segment, at least: the weights are read, and their gradients are added up, once in each."""
_OUTPUT = 0
"""Place among a layer's results; those of its last states are behind it."""


@dataclass(frozen=True)
class _Layer:
    """The places of what segments differ in. The sequence comes first, among the arguments of both
    operations, and so does its gradient among the results."""

    gradient: Any
    kept: int
    """Among the results: what the gradient reads."""
    states: tuple[int, ...]
    """Positions of the states among the arguments of both."""
    output: int
    """Position of the output among the gradient's arguments; so are all positions up to `reserve`."""
    leaving: tuple[int, ...]
    """Positions of the last states."""
    of_output: int
    of_leaving: tuple[int, ...]
    reserve: int
    """Position of what the layer has kept."""
    of_states: tuple[int, ...]
    """Positions of the gradients of the states among the gradient's results."""
    batch_first: int | None
    """Position among a layer's arguments, as for all below; None: the steps are first."""
    backwards: int | None
    """Position of the flag of a sequence that is read from its end."""
    whole: int | None
    """Position of what has no segments: packed sequences, both directions at once."""


def _layer(operator: Any, gradient: Any, *, states: Sequence[str], batch_first: str | None = None,
           backwards: str | None = None, whole: str | None = None, leaving: Sequence[str] = (),
           of_leaving: Sequence[str], reserve: str, kept: int, of_states: tuple[int, ...]
           ) -> tuple[Any, _Layer]:
    """Return an operator and the places of its arguments, which are given by their names in its schema, or in
    its gradient's."""
    mine, its = ({a.name: k for k, a in enumerate(schema_of(o).arguments)} for o in (operator, gradient))
    first, reads_backwards, has_none = (None if name is None else mine[name]
                                        for name in (batch_first, backwards, whole))
    return operator, _Layer(
        gradient, kept, tuple(mine[n] for n in states), its["output"], tuple(its[n] for n in leaving),
        its["grad_output"], tuple(its[n] for n in of_leaving), its[reserve], of_states, first,
        reads_backwards, has_none)


_LAYERS: dict[Any, _Layer] = dict((
    _layer(torch.ops.rkmate.recurrent_layer.default, aten.mkldnn_rnn_layer_backward.default,
           states=("hx", "cx"), batch_first="batch_first", backwards="reverse", whole="batch_sizes",
           leaving=("hy_", "cy_"), of_leaving=("grad_hy", "grad_cy"), reserve="workspace", kept=3,
           of_states=(5, 6)),
    _layer(torch.ops.rkmate.cudnn_rnn.default, torch.ops.rkmate.cudnn_rnn_backward.default,
           states=("hx", "cx"), batch_first="batch_first", whole="bidirectional",
           of_leaving=("grad_hy", "grad_cy"), reserve="reserve", kept=3, of_states=(1, 2)),
    _layer(torch.ops.rkmate.recurrent_steps.default, torch.ops.rkmate.recurrent_steps_backward.default,
           states=("hx",), backwards="reverse", of_leaving=("grad_hidden",), reserve="kept", kept=2,
           of_states=(1,)),
))


def segment_recurrent(joint: Joint) -> None:
    """Note the weights of long recurrent layers whose backward is in the graph; run these layers in segments
    if tiles are asked for."""
    found = [(layer, gradient) for layer in joint.graph.nodes if layer.target in _LAYERS
             for gradient in [_gradient_of(layer)] if gradient is not None and len(_bounds(layer)) > 1]
    weights = [joint.name(n) for layer, _ in found for n in layer.all_input_nodes
               if n in joint.sources and joint.sources[n].kind == "param"]
    joint.concerned["tiles"] = tuple(dict.fromkeys((*joint.concerned["tiles"], *weights)))
    if "tiles" in joint.choices:
        for layer, gradient in found:
            _in_segments(joint, layer, gradient)


def _gradient_of(layer: fx.Node) -> fx.Node | None:
    """Return the one operation that reads what a layer keeps, if it is the layer's gradient."""
    of = _LAYERS[layer.target]
    readers = [u for item in layer.users if item.args[1] == of.kept for u in item.users]
    if len(readers) != 1 or readers[0].target is not of.gradient \
            or any(wish_of(n) is not None for n in (layer, *layer.users)):
        return None
    return readers[0]


def _bounds(layer: fx.Node) -> list[tuple[int, int]]:
    """Return the first step of each segment and the one behind its last, in the order in which they run."""
    of, x = _LAYERS[layer.target], layer.args[0].meta[VALUE]        # type: ignore[union-attr]
    length = int(x.shape[1 if _is(layer, of.batch_first) else 0])
    parts = min(SEGMENTS, length // LEAST_STEPS)
    in_parts = of.batch_first is None or not devices.of(x).cpu_kernels or x.is_contiguous()     # for oneDNN
    if parts < 2 or _is(layer, of.whole) or not in_parts:
        return [(0, length)]
    step = -(-length // parts)
    found = [(start, min(start + step, length)) for start in range(0, length, step)]
    return found[::-1] if _is(layer, of.backwards) else found


def _is(layer: fx.Node, argument: int | None) -> bool:
    return argument is not None and bool(layer.args[argument])


def _in_segments(joint: Joint, layer: fx.Node, gradient: fx.Node) -> None:
    of, bounds = _LAYERS[layer.target], _bounds(layer)
    dim = 1 if _is(layer, of.batch_first) else 0
    places = [k for k in of.states if layer.args[k] is not None]
    making = _Making(joint, layer, dim)
    entering: list[list[Any]] = [[layer.args[k] for k in places]]
    segments = []
    for bound in bounds:
        segments.append(making.items({0: making.steps(layer.args[0], bound)} | dict(
            zip(places, entering[-1], strict=True))))
        entering.append(segments[-1][1:1 + len(places)])
    whole = making.joined([s[_OUTPUT] for s in segments], bounds)
    making.replace([whole, *segments[-1][1:of.kept]])

    making = _Making(joint, gradient, dim)
    of_leaving = [gradient.args[k] for k in of.of_leaving[:len(places)]]
    from_states = of.of_states[:len(places)]
    found: list[list[fx.Node]] = []
    for bound, states, left, segment in reversed(list(zip(bounds, entering, entering[1:], segments,
                                                          strict=False))):
        found.append(making.items(
            {k: making.steps(gradient.args[k], bound) for k in (0, of.of_output)}
            | {of.output: making.steps(whole, bound), of.reserve: segment[of.kept]}
            | dict(zip(places, states, strict=True)) | dict(zip(of.leaving, left, strict=False))
            | dict(zip(of.of_leaving, of_leaving, strict=False))))
        of_leaving = [found[-1][k] for k in from_states]
    making.replace([making.joined([f[0] for f in found], bounds[::-1]) if k == 0 else
                    found[-1][k] if k in from_states else making.sum_of([f[k] for f in found])
                    for k in range(len(found[0]))])


@dataclass
class _Making:
    """Operations that replace one operation with several results."""

    joint: Joint
    instead_of: fx.Node
    dim: int
    """Dimension of a sequence's steps."""

    def call(self, target: Any, *args: Any) -> fx.Node:
        """Add an operation."""
        old = self.instead_of
        with self.joint.graph.inserting_before(old):
            node = self.joint.graph.call_function(target, args)
        node.meta = call_meta([old], backward=is_backward(old))
        node.meta[VALUE] = values_of(node, old.meta[VALUE]) \
            if target is torch.ops.rkmate.recurrent_layer.default else result_of(node)
        return node

    def items(self, other: dict[int, Any]) -> list[fx.Node]:
        """Add the operation with some arguments replaced, and return its results."""
        args = [other.get(k, a) for k, a in enumerate(self.instead_of.args)]
        made = self.call(self.instead_of.target, *args)
        return [self.call(operator.getitem, made, k) for k in range(len(made.meta[VALUE]))]

    def steps(self, of: Any, bound: tuple[int, int]) -> fx.Node | None:
        """Return some steps of a sequence; None of none."""
        return None if of is None else self.call(aten.slice.Tensor, of, self.dim, *bound)

    def joined(self, parts: Sequence[fx.Node], bounds: Sequence[tuple[int, int]]) -> fx.Node:
        """Return the whole sequence."""
        order = sorted(range(len(parts)), key=lambda k: bounds[k])
        return self.call(aten.cat.default, [parts[k] for k in order], self.dim)

    def sum_of(self, parts: Sequence[fx.Node]) -> fx.Node:
        """Return the sum."""
        whole = parts[0]
        for part in parts[1:]:
            whole = self.call(aten.add.Tensor, whole, part)
        return whole

    def replace(self, results: Sequence[fx.Node]) -> None:
        """Let the readers of the operation's results read these; nothing reads those beyond."""
        for item in list(self.instead_of.users):
            number: Any = item.args[1]
            if number < len(results):
                self.joint.replace(item, results[number])
