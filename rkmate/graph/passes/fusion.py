"""Groups of small operations between the expensive ones become one computation each.

Inductor compiles each group into as few loops as it can: intermediate results never exist as tensors.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from rkmate.device.inductor import Fused, form_of, fused
from rkmate.graph.ops.properties import is_pointwise, is_random, is_view
from rkmate.graph.passes.cleanup import drop_dead
from rkmate.graph.passes.images import is_dense
from rkmate.graph.passes.joint import Joint, adds, bytes_of, owner_of, put_in_order
from rkmate.graph.passes.node_calls import OwnFunction, call_of
from rkmate.ir.calls import Writer, in_full
from rkmate.support.generated import load
from rkmate.torch_seam.nodes import VALUE, is_backward
from rkmate.torch_seam.schema import OpOverload, operator_name

aten = torch.ops.aten


# -- A group as the target of one node -------------------------------------------------------------

MOST_WORDS = 3
"""Operations that a name tells."""


@dataclass(frozen=True, eq=False)
class Cluster(OwnFunction):
    """Operations that are compiled into one function with several results, each in a storage of its own.

    Calling it runs the compiled function, which is compiled before its first call.
    """

    graph: fx.Graph
    """Arguments come in, and the results leave as a tuple. Its values are fake ones."""

    prefix = "fused"
    imports = ("from rkmate.device.inductor import fused", "aten = torch.ops.aten")

    @functools.cached_property
    def name(self) -> str:  # type: ignore[override]
        """The first of its operations, without an underscore before or after."""
        words = dict.fromkeys(self.operations)
        return "_".join(list(words)[:MOST_WORDS])

    @functools.cached_property
    def operations(self) -> tuple[str, ...]:
        """The names of its operations, in order; views are none."""
        return tuple(operator_name(n.target).strip("_") for n in self.graph.nodes
                     if isinstance(n.target, OpOverload) and not is_view(n))

    def function(self, name: str, write: Writer = Writer()) -> str:
        """Return the generated function under another name: a decorator that has it compiled, and its
        operations, named in full: equal groups have equal code."""
        write = replace(write, callee=in_full)
        inputs = [n for n in self.graph.nodes if n.op == "placeholder"]
        forms = ",\n       ".join(repr(form_of(n.meta[VALUE])).replace("'", '"') for n in inputs)
        lines = [f"@fused({forms})", f"def {name}({', '.join(n.name for n in inputs)}):",
                 f'    """{len(self.operations)} operations, compiled as one."""']
        for node in self.graph.nodes:
            if node.op == "call_function":
                lines.append(f"    {node.name} = {write(call_of(node.target, node.args, node.kwargs))}")
        results: Any = self.graph.output_node().args[0]
        lines.append(f"    return ({', '.join(n.name for n in results)},)")
        return "\n".join(lines) + "\n"

    def values(self) -> tuple[torch.Tensor, ...]:
        results: Any = self.graph.output_node().args[0]
        return tuple(n.meta[VALUE] for n in results)

    def compile(self) -> None:
        """Compile it, where it was not compiled before. Raises `CompilerError`."""
        self._compiled.compile()

    @functools.cached_property
    def _compiled(self) -> Fused:
        return _loaded(self.text, self.name, torch.get_num_threads(), torch.get_default_dtype())

    def __call__(self, *args: Any) -> tuple[torch.Tensor, ...]:
        return self._compiled(*args)

    def __repr__(self) -> str:
        return f"{self.name}({len(self.operations)} operations)"


@functools.lru_cache(maxsize=256)
def _loaded(text: str, name: str, threads: int, default: torch.dtype) -> Fused:
    made: Fused = load(text, f"<{name}>", {"torch": torch, "aten": torch.ops.aten, "fused": fused})[name]
    return made


# -- What can be part of a group -------------------------------------------------------------------
#
# Which operations, and over how many numbers each of them works.

_POINTWISE = {getattr(aten, name) for name in (
    "_to_copy", "clone", "where", "masked_fill", "native_dropout_backward", "threshold_backward",
    "gelu", "gelu_backward", "silu", "silu_backward", "tanh_backward", "sigmoid_backward",
    "leaky_relu_backward", "elu_backward", "hardtanh_backward", "hardswish", "hardswish_backward",
    "hardsigmoid", "hardsigmoid_backward", "softplus", "softplus_backward", "mish", "mish_backward",
    "log_sigmoid_backward",
    "addcmul", "addcdiv", "lerp", "clamp", "pow", "_conj_physical")}
"""Further pointwise operators, in addition to those that torch tags."""
_MOVES = {aten.cat, aten.slice_backward, aten.select_backward, aten.constant_pad_nd, aten.flip, aten.roll,
          aten.repeat, aten.stack}
_REDUCTIONS = {aten.sum, aten.mean, aten.amax, aten.amin, aten.var, aten._softmax,
               aten._softmax_backward_data, aten.logsumexp, aten.any, aten.all, aten.linalg_vector_norm}
_NEVER = {aten.copy, aten.empty_like, aten.bernoulli, aten.angle, aten.polar, aten.view_as_complex,
          aten.fill, aten.special_zeta, aten.polygamma, aten.igamma, aten.igammac, aten.lgamma, aten.digamma}
_TYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32,
          torch.int64, torch.uint8, torch.bool}
MOST_DIMENSIONS = 6


def fusable(joint: Joint) -> set[fx.Node]:
    """Return the operations that may be part of a group. Their results are plain tensors, and they read
    nothing that the forward overwrites; they draw no numbers and write to nothing."""
    overwritten = joint.overwritten()
    barred = {*joint.constant, *joint.decisions}
    return {n for n in joint.graph.nodes if n.op == "call_function" and n not in barred and _may_be_fused(n)
            and not any(owner_of(i) in overwritten for i in n.all_input_nodes)}


def _may_be_fused(node: fx.Node) -> bool:
    packet = _packet(node)
    if packet is None or packet in _NEVER or is_view(node) or is_random(node) or adds(node):
        return False
    if not _is_pointwise(node) and packet not in _MOVES and packet not in _REDUCTIONS:
        return False
    inputs = [n.meta.get(VALUE) for n in node.all_input_nodes]
    result: Any = node.meta.get(VALUE)
    return bool(inputs) and all(map(_plain, inputs)) and _own(result) \
        and all(v is not None and v.device == result.device for v in inputs)


def _is_pointwise(node: fx.Node) -> bool:
    packet = _packet(node)
    return packet is not None and packet not in _NEVER and (
        packet in _POINTWISE or is_pointwise(node.target))


def extent(node: fx.Node) -> int:
    """Return the number of elements that an operation goes over: those of its result, or, for a reduction,
    those of its inputs."""
    if _packet(node) in _REDUCTIONS:
        return max(int(n.meta[VALUE].numel()) for n in node.all_input_nodes)
    return int(node.meta[VALUE].numel())


def _packet(node: fx.Node) -> Any:
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return None
    return node.target.overloadpacket


def _plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _TYPES and value.numel() > 0 \
        and value.dim() <= MOST_DIMENSIONS and value.layout is torch.strided and not value.is_conj() \
        and type(value).__name__ == "FakeTensor"


def _own(value: Any) -> bool:
    """Return whether a value fills its storage."""
    return _plain(value) and value.untyped_storage().nbytes() == value.numel() * value.element_size() \
        and value.storage_offset() == 0 and is_dense(value)


# -- Who reads a value -----------------------------------------------------------------------------


class Reads:
    """Readers of values of one graph, which does not change meanwhile. Views are none: who reads a view reads
    what it looks at."""

    def __init__(self) -> None:
        self._found: dict[fx.Node, tuple[fx.Node, ...]] = {}

    def readers(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Return the operations that read a value."""
        if node not in self._found:
            found: dict[fx.Node, None] = {}
            for user in node.users:
                found.update(dict.fromkeys(self.readers(user) if is_view(user) else (user,)))
            self._found[node] = tuple(found)
        return self._found[node]


# -- What is computed again ------------------------------------------------------------------------
#
# The backward's groups compute again some of the forward's values, rather than read them: a minimum cut. An
# operation on each number by itself costs next to nothing inside of a kernel that reads its operand anyway.
# Of all sets of values that the groups of the backward can be computed from, one with the fewest bytes is
# kept; what stays for another reason (a product of the backward reads it, the caller holds it) is free.

_MADE_ANYWAY = 0.95
"""Weight of a byte of a value that could be computed again: on a tie that value is kept, and its inputs are
not."""
MOST_AGAIN = 24
"""Operations that one value may take to be computed again: more make groups that
take long to compile, and a long chain would be computed once for each of the groups that read of it."""


def computed_again(joint: Joint, fused: Collection[fx.Node], reads: Reads) -> set[fx.Node]:
    """Return the operations of the forward whose values groups of the backward compute themselves."""
    wanted = {o for n in fused if is_backward(n) for o in map(owner_of, n.all_input_nodes)
              if not is_backward(o)}
    cheap = {n for n in fused if not is_backward(n) and _is_pointwise(n)}
    if wanted.isdisjoint(cheap):
        return set()
    free = {owner_of(n) for n in joint.results()}

    def is_held(value: fx.Node) -> bool:
        return value.op != "call_function" or value in joint.constant or value in free \
            or any(is_backward(r) and r not in fused for r in reads.readers(value))

    below: dict[fx.Node, set[fx.Node]] = {}
    """Operations that are computed again for each value."""
    for node in (n for n in joint.graph.nodes if n in cheap):
        operands = [o for o in map(owner_of, node.all_input_nodes) if o in below and not is_held(o)]
        below[node] = {node}.union(*(below[o] for o in operands))
        if len(below[node]) > MOST_AGAIN:
            del below[node]
    cheap.intersection_update(below)
    import networkx as nx  # takes a quarter of a second, and only compiled groups need it

    graph = nx.DiGraph()
    todo, seen = list(wanted), set(wanted)
    while todo:
        value = todo.pop()
        size = 0.0 if is_held(value) else bytes_of(value) * (_MADE_ANYWAY if value in cheap else 1.0) + 1
        graph.add_edge((value, "made"), (value, "read"), capacity=size)
        if value in wanted:
            graph.add_edge((value, "read"), "backward")
        if value not in cheap:
            graph.add_edge("forward", (value, "made"))
            continue
        for operand in map(owner_of, value.all_input_nodes):
            graph.add_edge((operand, "read"), (value, "made"))
            if operand not in seen:
                seen.add(operand)
                todo.append(operand)
    if "forward" not in graph:
        return set()
    _, (_, late) = nx.minimum_cut(graph, "forward", "backward")
    return {v for v in cheap & seen if (v, "made") in late}


# -- Which operations make a group -----------------------------------------------------------------
#
# An operation joins the group of what it reads where both go over equally many numbers, so that one loop can
# do both. A group stands at one place: in some order of the graph, all who read its values come after its
# last operation. Groups of the forward end at what the backward reads of them, so that each such value can
# be kept, or computed again, by itself.

MOST = 48
"""Operations of a group: a kernel of more takes long to compile, and gains nothing."""
SMALL = 8
"""An operation over this many times fewer numbers (such as a row's mean) joins the groups of its inputs, and
of its readers."""


def outside_readers(node: fx.Node, members: Collection[fx.Node], again: Collection[fx.Node],
                    fused: Collection[fx.Node], reads: Reads) -> list[fx.Node]:
    """Return the readers of a member's value that are neither in its group nor compute it again."""
    return [r for r in reads.readers(node) if r not in members
            and not (node in again and is_backward(r) and r in fused)]


class _Grower:
    def __init__(self, joint: Joint, fused: Collection[fx.Node], again: Collection[fx.Node],
                 reads: Reads) -> None:
        self.fused, self.again, self.reads = fused, again, reads
        self.place = {n: k for k, n in enumerate(_order(joint.graph, fused))}
        self.leaving = {owner_of(n) for n in joint.results()}
        self.group: dict[fx.Node, list[fx.Node]] = {n: [n] for n in self.place if n in fused}
        self.extent: dict[fx.Node, int] = {n: extent(n) for n in self.group}

    def found(self) -> list[list[fx.Node]]:
        """Return groups of operations, each in order. A single operation is no group, unless it reads values
        that are computed again."""
        for node in list(self.group):
            for operand in dict.fromkeys(map(owner_of, node.all_input_nodes)):
                if operand in self.group and self._may_join(operand, node):
                    self._join(operand, node)
        whole = {id(g): g for g in self.group.values()}
        return [g for g in whole.values() if len(g) > 1 or any(
            owner_of(n) in self.again and is_backward(g[0]) for n in g[0].all_input_nodes)]

    def _may_join(self, operand: fx.Node, node: fx.Node) -> bool:
        a, b = self.group[operand], self.group[node]
        if a is b or is_backward(operand) != is_backward(node) or len(a) + len(b) > MOST:
            return False
        many, few = max(self._extent(a), self._extent(b)), min(self._extent(a), self._extent(b))
        alone = operand not in self.leaving and not self._readers(operand, {*a, *b})
        if many != few and many < SMALL * few and not alone:
            return False
        if not is_backward(node) and self._is_kept(operand) and SMALL * extent(operand) > many:
            return False
        members = {*a, *b}
        last = max(self.place[n] for n in members)
        return all(self.place[r] > last for n in members for r in self._readers(n, members))

    def _is_kept(self, node: fx.Node) -> bool:
        """Return whether a value of the forward stays for the backward, or leaves."""
        return node in self.leaving or any(map(is_backward, self._readers(node, ())))

    def _readers(self, node: fx.Node, members: Collection[fx.Node]) -> list[fx.Node]:
        return outside_readers(node, members, self.again, self.fused, self.reads)

    def _extent(self, group: list[fx.Node]) -> int:
        return max(self.extent[n] for n in group)

    def _join(self, operand: fx.Node, node: fx.Node) -> None:
        both = sorted([*self.group[operand], *self.group[node]], key=self.place.__getitem__)
        for n in both:
            self.group[n] = both


def _order(graph: fx.Graph, fused: Collection[fx.Node]) -> list[fx.Node]:
    """Return the operations in an order in which fusable ones come as early as possible."""
    import networkx as nx

    number = {n: k for k, n in enumerate(graph.nodes)}
    reads = nx.DiGraph()
    reads.add_nodes_from(number)
    reads.add_edges_from((n, user) for n in number for user in n.users)
    return list(nx.lexicographical_topological_sort(reads, lambda n: (
        n.op == "call_function", is_backward(n), n not in fused, number[n])))


# -- The rewrite -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Made:
    cluster: Cluster
    arguments: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    last: fx.Node
    """The operation whose place it takes."""


def fuse(joint: Joint) -> None:
    """Let groups of operations be compiled. List them, and change nothing, if the choices say so."""
    fused, reads = fusable(joint), Reads()
    again = computed_again(joint, fused, reads)
    leaving = {owner_of(n) for n in joint.results()}
    found = _Grower(joint, fused, again, reads).found()
    of: dict[int, _Made | None] = {}
    for k, members in sorted(enumerate(found), key=lambda g: not is_backward(g[1][0])):
        each = of[k] = _made(members, fused, again, leaving, reads)
        if each is not None and is_backward(members[0]):
            leaving.update(each.arguments)      # what values are computed again from is a result, too
    made = [each for k in range(len(found)) if (each := of[k]) is not None]
    joint.concerned["uncompiled"] = tuple(each.cluster.name for each in made)
    if "uncompiled" in joint.choices:
        return
    calls: list[fx.Node] = []
    items: dict[fx.Node, fx.Node] = {}
    for each in made:
        with joint.graph.inserting_after(each.last):
            name = f"fused_{each.cluster.name}"
            call = joint.graph.create_node("call_function", each.cluster, (), {}, name)
        call.meta = {**each.last.meta, VALUE: tuple(n.meta[VALUE] for n in each.results)}
        place = call
        for k, result in enumerate(each.results):
            with joint.graph.inserting_after(place):
                item = place = joint.graph.call_function(operator.getitem, (call, k))
            item.meta = dict(result.meta)
            items[result] = item
        calls.append(call)
    for each in made:
        for result in each.results:
            joint.replace(result, items[result])
    for call, each in zip(calls, made, strict=True):
        call.args = tuple(items.get(a, a) for a in each.arguments)
    put_in_order(joint.graph)
    drop_dead(joint)
    there = set(joint.graph.nodes)              # a view of a constant may have no reader any more
    joint.constant, joint.decisions = joint.constant & there, joint.decisions & there


def _made(members: Sequence[fx.Node], fused: Collection[fx.Node], again: Collection[fx.Node],
          leaving: Collection[fx.Node], reads: Reads) -> _Made | None:
    """Return a group as one computation; None if nothing would be gained."""
    own = set(members)
    results = tuple(n for n in members if n in leaving or outside_readers(n, own, again, fused, reads))
    builder = _Builder(own, again if is_backward(members[0]) else ())
    for node in results:
        builder.visit(node)
    if not results or sum(n in own or n in builder.repeated for n in builder.order) < 2:
        return None
    graph, arguments = builder.graph(results)
    return _Made(Cluster(graph), arguments, results, max(members))


class _Builder:
    """A group's graph: its members, what they look at through views, and what is computed again."""

    def __init__(self, members: Collection[fx.Node], again: Collection[fx.Node]) -> None:
        self.members, self.again = members, again
        self.order: dict[fx.Node, None] = {}
        """Operations and views, each after what it reads."""
        self.arguments: dict[fx.Node, None] = {}
        self.repeated: set[fx.Node] = set()

    def visit(self, node: fx.Node) -> None:
        """Note what a value is made of."""
        todo = [node]
        while todo:
            top = todo[-1]
            if top in self.order or top in self.arguments:
                todo.pop()
            elif not self._inside(top):
                self.arguments[top] = None
                todo.pop()
            elif missing := [n for n in top.all_input_nodes if n not in self.order
                             and n not in self.arguments]:
                todo += reversed(missing)
            else:
                self.order[top] = None
                if top in self.again:
                    self.repeated.add(top)
                todo.pop()

    def _inside(self, node: fx.Node) -> bool:
        return is_view(node) or node in self.members or (node in self.again and not is_backward(node))

    def graph(self, results: Sequence[fx.Node]) -> tuple[fx.Graph, tuple[fx.Node, ...]]:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.arguments:
            copies[node] = graph.placeholder("x")
            copies[node].meta[VALUE] = node.meta[VALUE]
        for node in self.order:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
            name = operator_name(node.target).strip("_") if isinstance(node.target, OpOverload) else "part"
            copies[node] = graph.create_node("call_function", node.target, args, kwargs, name)
            copies[node].meta[VALUE] = node.meta[VALUE]
        graph.output(tuple(copies[r] for r in results))
        return graph, tuple(self.arguments)
