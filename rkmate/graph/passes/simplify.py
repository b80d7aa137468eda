"""Simplification of the joint graph (Rockmate, appendix A.3), on a copy of the captured graph.

What is dropped: metadata assertions, aliases, copies that copy nothing, gradients that nobody
asks for. What steps aside: values that depend on no trained value and on no float input (masks,
position ids), computed once. Buffers that the forward overwrites are copied first when something
else still reads the old value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rkmate import device as devices
from rkmate.graph.capture.capture import Capture, Source
from rkmate.graph.passes.chunked_kernels import split_wide
from rkmate.graph.passes.chunked_loss import find_heads, split_heads
from rkmate.graph.passes.view_chains import shorten_views

aten = torch.ops.aten

_ALIASES = {aten.alias.default, aten.detach.default, aten.lift_fresh.default}
_COPIES = {aten.clone.default, aten.lift_fresh_copy.default}
_ASSERTIONS = {"_assert_tensor_metadata", "_assert_async", "sym_constrain_range",
               "sym_constrain_range_for_size", "_assert_scalar"}
_HIDDEN_VIEWS = {aten._unsafe_view.default, aten._reshape_alias.default, aten.unsafe_split.Tensor,
                 aten.unsafe_chunk.default, aten.unsafe_split_with_sizes.default}


@dataclass(frozen=True)
class Joint:
    """The simplified joint graph, in one order: forward nodes, then backward nodes."""

    graph: fx.Graph
    sources: dict[fx.Node, Source]
    outputs: tuple[fx.Node | None, ...]
    mutations: tuple[tuple[Source, fx.Node], ...]
    grads: tuple[tuple[Source, fx.Node], ...]
    constant: frozenset[fx.Node]
    """Nodes that depend on no trained value."""
    wanted: tuple[bool, ...]
    """Outputs whose gradient the backward takes."""
    nodes_before: int
    """Operations captured, views and aliases included."""
    heads: tuple[str, ...] = ()
    """Weights of products, followed by a cross entropy, that can be computed a few rows at a time."""


def is_view(node: fx.Node) -> bool:
    """Whether the node's value shares its input's storage."""
    if node.target is operator.getitem:
        return is_view(node.args[0])  # type: ignore[arg-type]
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target in _HIDDEN_VIEWS:
        return True
    if any(r.alias_info is not None and not r.alias_info.is_write for r in node.target._schema.returns):
        return True
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and node.args and isinstance(node.args[0], fx.Node):
        base = node.args[0].meta.get("val")
        return isinstance(base, torch.Tensor) and base is not value and \
            base.untyped_storage()._cdata == value.untyped_storage()._cdata
    return False


def is_random(node: fx.Node) -> bool:
    """Whether the operation draws from a generator."""
    return isinstance(node.target, torch._ops.OpOverload) and \
        torch.Tag.nondeterministic_seeded in node.target.tags


def is_backward(node: fx.Node) -> bool:
    """Whether the tracer made the node while it ran the backward."""
    return node.meta.get("partitioner_tag") == "is_backward"


def simplify(capture: Capture, wanted: tuple[bool, ...], *, heads: bool = False) -> Joint:
    """The graph that is planned. `wanted`: per output, whether its gradient will come; `heads`: split
    the last product and its cross entropy, where there are any."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in capture.graph.nodes:
        if node.op != "output":
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    sources = {copies[n]: s for n, s in capture.sources.items()}
    work = _Work(graph, sources, capture, copies)
    nodes_before = sum(n.op == "call_function" for n in graph.nodes)
    work.drop_assertions()
    work.drop_gradients_of(wanted)
    work.drop_copies_of_outputs()
    work.drop_copies()
    work.drop_unread_statistics()
    work.protect_overwritten()
    work.drop_dead()
    split_wide(graph, work.replace)
    work.drop_dead()
    found = find_heads(graph)
    names = tuple(work.name(h.weight) for h in found)
    if heads:
        split_heads(graph, found, work.replace, work.results())
    work.take_sums_apart()
    work.own_gradients()
    shorten_views(graph, work.replace, work.outputs)
    work.drop_dead()
    constant = work.constants()
    return Joint(graph, sources, tuple(work.outputs), tuple(work.mutations), tuple(work.grads),
                 frozenset(constant), wanted, nodes_before, names)


class _Work:
    """The graph while it is rewritten, with the results that it has to keep."""

    def __init__(self, graph: fx.Graph, sources: dict[fx.Node, Source], capture: Capture,
                 copies: dict[fx.Node, fx.Node]) -> None:
        self.graph = graph
        self.sources = sources
        self.outputs = [copies[n] if n is not None else None for n in capture.outputs]
        self.mutations = [(s, copies[n]) for s, n in capture.mutations]
        self.grads = [(s, copies[n]) for s, n in capture.grads]

    def replace(self, node: fx.Node, new: fx.Node) -> None:
        """Let everything read `new` instead of `node`."""
        node.replace_all_uses_with(new)
        self.outputs = [new if n is node else n for n in self.outputs]
        self.mutations = [(s, new if n is node else n) for s, n in self.mutations]
        self.grads = [(s, new if n is node else n) for s, n in self.grads]

    def name(self, node: fx.Node) -> str:
        """The caller's name of a value, where it has one."""
        return str(self.sources[node].key) if node in self.sources else node.name

    def results(self) -> set[fx.Node]:
        """Nodes whose value leaves the graph."""
        return {n for n in self.outputs if n is not None} | {n for _, n in self.mutations} \
            | {n for _, n in self.grads}

    def drop_assertions(self) -> None:
        """Metadata assertions hold for every call of the same signature."""
        for node in reversed(list(self.graph.nodes)):
            name = getattr(node.target, "_opname", getattr(node.target, "__name__", ""))
            if node.op == "call_function" and name in _ASSERTIONS and not node.users:
                self.graph.erase_node(node)

    def drop_copies_of_outputs(self) -> None:
        """The copies that capture put on the outputs; they may change layout without harm."""
        overwritten = self._overwritten()
        for node in dict.fromkeys(self.outputs):
            if node is None or node.target is not aten.clone.default or node.users:
                continue
            base: fx.Node = node.args[0]  # type: ignore[assignment]
            if _owner(base) not in overwritten:
                self.replace(node, base)
                self.graph.erase_node(node)

    def drop_copies(self) -> None:
        """Aliases, and copies whose layout is that of their input, are their input.

        Not where both can be seen from outside: the caller may write to one of them.
        """
        overwritten = self._overwritten()
        for node in list(self.graph.nodes):
            if node.op != "call_function":
                continue
            base = node.args[0] if node.args else None
            if not isinstance(base, fx.Node):
                continue
            same = node.target in _ALIASES
            if node.target in _COPIES and _owner(base) not in overwritten \
                    and not (self._leaves(node) and self._is_seen(_owner(base))):
                a, b = node.meta["val"], base.meta["val"]
                same = a.stride() == b.stride() and a.shape == b.shape
            if same:
                self.replace(node, base)
                self.graph.erase_node(node)

    def _overwritten(self) -> set[fx.Node]:
        targets = {s for s, _ in self.mutations}
        return {n for n, s in self.sources.items() if s in targets}

    def _leaves(self, node: fx.Node) -> bool:
        """Whether the caller gets the node's value, or a view of it."""
        todo = [node]
        while todo:
            n = todo.pop()
            if n in self.outputs:
                return True
            todo += [u for u in n.users if is_view(u) or u.target in _ALIASES]
        return False

    def _is_seen(self, owner: fx.Node) -> bool:
        return owner in self.sources or self._leaves(owner)

    def drop_gradients_of(self, wanted: tuple[bool, ...]) -> None:
        """Let undefined gradients flow: what autograd does for outputs that the loss ignores."""
        dead = {n for n, s in self.sources.items()
                if s.kind == "tangent" and not wanted[int(s.key)]}
        if not dead:
            return
        gradient = {n for n, s in self.sources.items() if s.kind == "tangent"}
        for node in list(self.graph.nodes):
            if node.op != "call_function":
                continue
            from_loss = [n for n in node.all_input_nodes if n in gradient]
            if not from_loss:
                continue
            gradient.add(node)
            alive = [n for n in from_loss if n not in dead]
            if not alive:
                dead.add(node)
            elif len(alive) < len(from_loss):
                if node.target is aten.add.Tensor and not node.kwargs and len(node.args) == 2 \
                        and alive[0].meta["val"].shape == node.meta["val"].shape:
                    self.replace(node, alive[0])
                else:
                    for n in from_loss:
                        if n in dead:
                            node.replace_input_with(n, self._zeros(n, node))
        self.grads = [(s, n) for s, n in self.grads if n not in dead]

    def _zeros(self, like: fx.Node, before: fx.Node) -> fx.Node:
        value = like.meta["val"]
        with self.graph.inserting_before(before):
            node = self.graph.call_function(aten.full.default, (list(value.shape), 0), {
                "dtype": value.dtype, "device": value.device})
        with value.fake_mode:
            node.meta = {"val": torch.zeros(value.shape, dtype=value.dtype, device=value.device),
                         "partitioner_tag": "is_backward"}
        return node

    def drop_unread_statistics(self) -> None:
        """A batch norm's gradient in training mode takes running statistics and reads none.

        Held until the backward, the updated ones are memory that eager mode does not need.
        """
        for node in self.graph.nodes:
            if node.target is not aten.native_batch_norm_backward.default:
                continue
            grad, input, weight, _, _, mean, invstd, train, *rest = node.args
            # Without a weight, the kernels of GPUs take the statistics' type for the arithmetic's.
            if train is True and mean is not None and invstd is not None \
                    and (weight is not None or devices.of(input.meta["val"]).cpu_kernels):
                node.args = (grad, input, weight, None, None, mean, invstd, train, *rest)

    def protect_overwritten(self) -> None:
        """Copy what the forward overwrites, for readers that need the value from before."""
        targets = {s for s, _ in self.mutations}
        for node, source in list(self.sources.items()):
            if source not in targets:
                continue
            readers = [u for u in node.users if not _batch_norm_statistics(u, node)]
            if not readers:
                continue
            first = next(n for n in self.graph.nodes if n.op == "call_function")
            with self.graph.inserting_before(first):
                copy = self.graph.call_function(aten.clone.default, (node,))
            copy.meta = {"val": node.meta["val"], "partitioner_tag": "is_forward"}
            with node.meta["val"].fake_mode:
                copy.meta["val"] = torch.clone(node.meta["val"])
            for user in readers:
                user.replace_input_with(node, copy)

    def drop_dead(self) -> None:
        """Operations whose result nobody reads; draws stay, as the generator's state moves on."""
        keep = self.results()
        for node in reversed(list(self.graph.nodes)):
            if node.op == "call_function" and not node.users and node not in keep \
                    and not (is_random(node) and not is_backward(node)):
                self.graph.erase_node(node)

    def take_sums_apart(self) -> None:
        """Drop the sums that only add up one parameter's gradients.

        Autograd adds the parts itself, in the same order, and each leaves as soon as it is made.
        """
        grads: list[tuple[Source, fx.Node]] = []
        for source, node in self.grads:
            parts: list[fx.Node] = []
            todo = [node]
            while todo:
                n = todo.pop()
                if source.kind == "param" and self._is_private_sum(n, node):
                    todo += reversed(n.args)  # type: ignore[arg-type]
                else:
                    parts.append(n)
            grads += [(source, part) for part in parts]
        self.grads = grads
        self.drop_dead()

    def _is_private_sum(self, node: fx.Node, total: fx.Node) -> bool:
        if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2 \
                or (node is total and node.users) or len(node.users) > 1:
            return False
        shape = node.meta["val"].shape
        return all(isinstance(a, fx.Node) and a.op == "call_function" and is_backward(a)
                   and set(a.users) == {node} and a.meta["val"].shape == shape for a in node.args)

    def own_gradients(self) -> None:
        """A parameter gradient handed to autograd shares its storage with nothing else."""
        count: dict[fx.Node, int] = {}
        for _, node in self.grads:
            count[_owner(node)] = count.get(_owner(node), 0) + 1
        for k, (source, node) in enumerate(self.grads):
            owner = _owner(node)
            shared = count[owner] > 1 or owner.op != "call_function" or not is_backward(owner) \
                or _read_by_operations(owner)
            if source.kind == "param" and shared:
                after = node if node.op == "call_function" else \
                    next(n for n in self.graph.nodes if n.op == "call_function" and is_backward(n))
                insert = self.graph.inserting_after if node is after else self.graph.inserting_before
                with insert(after):
                    copy = self.graph.call_function(aten.clone.default, (node,))
                copy.meta = {"val": node.meta["val"], "partitioner_tag": "is_backward"}
                with node.meta["val"].fake_mode:
                    copy.meta["val"] = torch.clone(node.meta["val"])
                self.grads[k] = (source, copy)

    def constants(self) -> set[fx.Node]:
        """Values of the forward that depend on no trained value, no float input and no chance.

        Equal ones are computed once: every layer of a transformer asks for the same mask.
        """
        constant: set[fx.Node] = set()
        seen: dict[Any, fx.Node] = {}
        for node in list(self.graph.nodes):
            if node.op == "placeholder" or node.op == "get_attr":
                source = self.sources[node]
                value = node.meta.get("val")
                fixed = source.kind in ("buffer", "constant") or (
                    source.kind == "input" and isinstance(value, torch.Tensor)
                    and not value.is_floating_point() and not value.is_complex())
                if fixed:
                    constant.add(node)
            elif node.op == "call_function" and not is_backward(node) and not is_random(node) \
                    and all(n in constant for n in node.all_input_nodes):
                if self._leaves(node):          # the caller may write to it
                    constant.add(node)
                    continue
                key = _key(node)
                if key in seen:
                    self.replace(node, seen[key])
                    self.graph.erase_node(node)
                else:
                    seen[key] = node
                    constant.add(node)
        return constant


def _owner(node: fx.Node) -> fx.Node:
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _read_by_operations(node: fx.Node) -> bool:
    """Whether anything but views reads the node's storage."""
    todo = list(node.users)
    while todo:
        user = todo.pop()
        if not is_view(user) and user.target is not operator.getitem:
            return True
        todo += user.users
    return False


def _batch_norm_statistics(user: fx.Node, node: fx.Node) -> bool:
    """In training mode these arguments do not enter the result: a second run is harmless."""
    return user.target is aten._native_batch_norm_legit_functional.default \
        and user.args[5] is True and node in user.args[3:5] \
        and node not in user.args[:3]


def _key(node: fx.Node) -> Any:
    def freeze(a: Any) -> Any:
        if isinstance(a, fx.Node):
            return ("node", a)
        if isinstance(a, (list, tuple)):
            return tuple(freeze(x) for x in a)
        return (type(a).__name__, repr(a))
    kwargs: dict[str, Callable[..., Any]] = dict(node.kwargs)  # type: ignore[arg-type]
    return (node.target, freeze(node.args), tuple((k, freeze(v)) for k, v in sorted(kwargs.items())))
