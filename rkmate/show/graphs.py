"""Graphs of a plan as DOT text: the chain, the forward graph, one block's computations and data.

The styles follow the Rockmate paper's figures 8, 10, 11, 13 and 14: computations are boxes, data are
ellipses, forward and backward differ in colour, constants and the loss have shapes of their own. Repeated
blocks of a chain are folded: of twelve equal layers, the first is drawn, "12 times".
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import graphviz

from rkmate.ir.cd import HOISTED
from rkmate.ir.plan import PlanData
from rkmate.show import styles
from rkmate.show.amounts import count, duration, size
from rkmate.show.copies import block_sent
from rkmate.show.replay import WHOLE, Occupancy, label_lines, short_path


@dataclass(frozen=True)
class Group:
    """Blocks in a row that come several times."""

    first: int
    """The first of them."""
    length: int
    """Blocks of one turn."""
    times: int

    @property
    def blocks(self) -> range:
        """The blocks of the first turn, which stand for the others."""
        return range(self.first, self.first + self.length)

    @property
    def last(self) -> int:
        """The last block of the last turn."""
        return self.first + self.length * self.times - 1


def folded(labels: Sequence[str]) -> tuple[Group, ...]:
    """Return a chain of blocks, by their classes, as groups: at each place the repetition that covers most
    blocks, of those the shortest. ``A BC BC BC D`` are three groups, the second one of two blocks, three
    times."""
    groups: list[Group] = []
    at = 0
    while at < len(labels):
        found = Group(at, 1, 1)
        for length in range(1, (len(labels) - at) // 2 + 1):
            same = at
            while same + length < len(labels) and labels[same] == labels[same + length]:
                same += 1
            times = (same - at) // length + 1
            if times > 1 and times * length > found.times * found.length:
                found = Group(at, length, times)
        groups.append(found)
        at = found.last + 1
    return tuple(groups)


def stands_for(groups: Sequence[Group]) -> dict[int, int]:
    """Return, for each block, the block of the first turn that is drawn for it."""
    return {group.first + k: group.first + k % group.length
            for group in groups for k in range(group.length * group.times)}


Link = Callable[[int], str | None]
"""The address of a block's own page; None: no link."""
_COLUMN = 24
"""Blocks below each other, at least."""


def no_links(block: int) -> str | None:
    """Return None: blocks have no pages."""
    return None


def block_name(plan: PlanData, block: int) -> str:
    """Return a block's name: ``block 3 (B)``."""
    return "at the start" if block == HOISTED else f"block {block} ({plan.blocks[block].label})"


def chain_graph(plan: PlanData, replayed: Occupancy, link: Link = no_links) -> graphviz.Digraph:
    """Return the chain of blocks, identical ones in one colour, with what each carries and keeps."""
    graph = _graph("chain", rankdir="TB")
    colours = styles.class_colours([b.label for b in plan.blocks])
    counts = Counter(b.label for b in plan.blocks)
    kept, whole = block_memory(plan, replayed)
    sent = block_sent(plan, replayed)
    if HOISTED in plan.graph.block_c:
        graph.node("constants", _lines("computed once, kept",
                                     count(len(plan.graph.block_c[HOISTED]), "operation")),
                   shape="hexagon", fillcolor=styles.CONSTANT)
    for b, info in enumerate(plan.blocks):
        again = plan_recomputed(replayed, b)
        lines = [f"{b}  ·  class {info.label}" + (f"  (one of {counts[info.label]})"
                                                  if counts[info.label] > 1 else ""),
                 info.path or "(the model itself)",
                 f"{info.forward_nodes} forward, {info.backward_nodes} backward",
                 f"keeps {size(kept[b])} of {size(whole[b])}",
                 f"sends {size(sent[b])} away" if sent[b] else "",
                 f"redoes {duration(again)}" if again else "redoes nothing"]
        graph.node(f"b{b}", _lines(*lines), fillcolor=colours[info.label], URL=link(b),
                   tooltip=f"{block_name(plan, b)}: {info.path}")
        if b:
            graph.edge(f"b{b - 1}", f"b{b}", label="  " + _cut_label(plan, b),
                       constraint=_within(b - 1, b, len(plan.blocks)))
    _columns(graph, [f"b{b}" for b in range(len(plan.blocks))])
    graph.node("loss", "loss", shape="octagon", fillcolor=styles.LOSS, color=styles.LOSS_LINE)
    if plan.blocks:
        graph.edge(f"b{len(plan.blocks) - 1}", "loss")
    return graph


def _column(blocks: int) -> int:
    """Return the number of blocks in a column: a long chain is drawn as several columns, side by side."""
    return max(_COLUMN, math.ceil(math.sqrt(2 * blocks)))


def _within(a: int, b: int, blocks: int) -> str:
    """Return ``"true"`` if an edge stays in one column, and so places its ends one below the other."""
    return "true" if a // _column(blocks) == b // _column(blocks) else "false"


def _columns(graph: graphviz.Digraph, nodes: Sequence[str]) -> None:
    """Place the first blocks of the columns on one line, in order."""
    heads = nodes[::_column(len(nodes))]
    if len(heads) > 1:
        with graph.subgraph(graph_attr={"rank": "same"}) as line:
            for a, b in itertools.pairwise(heads):
                line.edge(a, b, style="invis")


def _cut_label(plan: PlanData, b: int) -> str:
    cut = plan.graph.cuts[b] if b < len(plan.graph.cuts) else ()
    total = sum(plan.graph.cd.d[j].size for j in cut)
    return f"{count(len(cut), 'tensor')}, {size(total)}" if len(cut) != 1 else size(total)


def block_memory(plan: PlanData, replayed: Occupancy) -> tuple[dict[int, int], dict[int, int]]:
    """Return, for each block, the bytes of its forward storages that are kept for the backward, and of all
    that could be."""
    g = plan.graph
    kept: dict[int, int] = dict.fromkeys(g.block_c, 0)
    whole: dict[int, int] = dict.fromkeys(g.block_c, 0)
    needed = {j for c in g.cd.c[g.cd.loss:] for j in c.inputs} | set(g.cd.held)
    for j, storage in enumerate(g.cd.d):
        maker = g.cd.producer[j]
        if maker is None or maker >= g.cd.loss:
            continue
        block = g.computations[maker].block
        if j in replayed.alive_at_loss:
            kept[block] += storage.size
        if j in needed or j in replayed.alive_at_loss:
            whole[block] += storage.size
    return kept, whole


def plan_recomputed(replayed: Occupancy, block: int) -> float:
    """Return seconds of a block's recomputations."""
    return sum(t for c, t in replayed.recomputed_seconds.items()
               if replayed.graph.computations[c].block == block)


def captured_graph(plan: PlanData, blocks: Iterable[int] | None = None) -> graphviz.Digraph:
    """Return the forward as captured: operations, and in white what simplification takes away."""
    graph = _graph("captured")
    colours = styles.class_colours([b.label for b in plan.blocks])
    wanted = None if blocks is None else set(blocks)
    nodes = plan.graph.captured
    inside = {k for k, n in enumerate(nodes) if wanted is None or n.block in wanted}
    for k in sorted(inside):
        n = nodes[k]
        fill = styles.CONSTANT if n.block == HOISTED else colours[plan.blocks[n.block].label]
        style = {"operation": "filled,rounded", "view": "rounded,dashed", "dropped": "dotted"}[n.kind]
        within = "" if n.block == HOISTED else plan.blocks[n.block].path
        graph.node(f"n{k}", _lines(*label_lines(short_path(n.path, within), n.operation)), style=style,
                   fillcolor=fill if n.kind == "operation" else styles.VIEW,
                   tooltip=f"{n.name}: {n.kind}, {n.path or 'the model'}")
        _edges(graph, k, [j for j in n.inputs if j in inside])
    return graph


def simplified_graph(plan: PlanData, blocks: Iterable[int] | None = None) -> graphviz.Digraph:
    """Return the forward after simplification: one node for each computation, one frame for each block."""
    graph = _graph("simplified")
    g = plan.graph
    colours = styles.class_colours([b.label for b in plan.blocks])
    wanted = sorted(g.block_c if blocks is None else set(blocks))
    inside: set[int] = set()
    for b in wanted:
        label = "computed once, kept" if b == HOISTED else \
            f"{block_name(plan, b)}  {plan.blocks[b].path}"
        with graph.subgraph(name=f"cluster_{b + 1}") as frame:
            frame.attr(label=label, color=styles.FAINT, style="rounded", fontcolor=styles.SOFT,
                       labeljust="l")
            for i in g.block_c.get(b, ()):
                if i >= g.cd.loss:
                    continue
                inside.add(i)
                c = g.computations[i]
                total = g.cd.bytes(g.cd.c[i].outputs)
                constant = c.constant or b == HOISTED
                within = "" if b == HOISTED else plan.blocks[b].path
                lines = label_lines(short_path(c.path, within), c.operation)
                frame.node(f"n{i}", _lines(*lines, size(total)),
                           fillcolor=styles.CONSTANT if constant else colours[plan.blocks[b].label],
                           shape="hexagon" if constant else "box",
                           tooltip=f"{g.cd.c[i].name}, {c.path or 'the model'}")
    for i in sorted(inside):
        makers = {m for j in g.cd.c[i].inputs if (m := g.cd.producer[j]) is not None}
        _edges(graph, i, sorted(makers & inside))
    return graph


def collapsed_graph(plan: PlanData, what: str, link: Link) -> graphviz.Digraph:
    """Draw a node for each block, with the edges between them; each node links to its own page. Blocks that
    repeat in a row are drawn once, in a frame that says how often."""
    graph = _graph(what)
    g = plan.graph
    colours = styles.class_colours([b.label for b in plan.blocks])
    if what == "forward":
        where = [n.block for n in g.captured]
        pairs = {(where[j], n.block) for n in g.captured for j in n.inputs}
    else:
        where = [c.block for c in g.computations[:g.cd.loss]]
        pairs = {(where[m], where[i]) for i in g.cd.forward for j in g.cd.c[i].inputs
                 if (m := g.cd.producer[j]) is not None}
    number = Counter(where)

    def node(into: graphviz.Digraph, b: int) -> None:
        name, path, fill = ("at the start", "computed once, kept", styles.CONSTANT) \
            if b == HOISTED else (block_name(plan, b), plan.blocks[b].path or WHOLE,
                                  colours[plan.blocks[b].label])
        into.node(f"b{b}", _lines(path, name, count(number[b], "operation")), fillcolor=fill,
                  URL=link(b), tooltip=f"open {name}")

    if HOISTED in number:
        node(graph, HOISTED)
    groups = folded([b.label for b in plan.blocks])
    place: dict[int, int] = {}
    for group in groups:
        place |= {b: len(place) + k for k, b in enumerate(group.blocks)}
        if group.times == 1:
            node(graph, group.first)
            continue
        with graph.subgraph(name=f"cluster_{group.first}") as frame:
            frame.attr(color=styles.FAINT, style="rounded,dashed")
            for b in group.blocks:
                node(frame, b)
            # Next to the first block: a label of the frame would stand on the edges that enter it.
            last = plan.blocks[group.last].path or block_name(plan, group.last)
            frame.node(f"times{group.first}", _lines(f"{group.times} times,", f"up to {last}"),
                       shape="plain", style="")
            frame.edge(f"b{group.first}", f"times{group.first}", style="invis", constraint="false")
            with frame.subgraph(graph_attr={"rank": "same"}) as line:
                line.node(f"b{group.first}")
                line.node(f"times{group.first}")
    drawn = {**stands_for(groups), HOISTED: HOISTED}
    for a, b in sorted({(drawn[a], drawn[b]) for a, b in pairs}):
        # What every block reads from the start would only hide the chain, and a turn leads into the next.
        if a < b and a != HOISTED:
            graph.edge(f"b{a}", f"b{b}", constraint=_within(place[a], place[b], len(place)))
    _columns(graph, [f"b{b}" for b in place])
    return graph


def block_graph(plan: PlanData, block: int, replayed: Occupancy) -> graphviz.Digraph:
    """Draw a block's computations and data, forward and backward, as the plan runs them."""
    g, info = plan.graph, plan.blocks[block]
    graph = _graph("block")
    graph.attr(label=f"{block_name(plan, block)}  {info.path}", labelloc="t", fontsize="16")
    mine = g.block_c[block]
    touched = sorted({j for i in mine for j in (*g.cd.c[i].inputs, *g.cd.c[i].outputs)})
    members = set(mine)
    for j in touched:
        _data_node(graph, plan, j, replayed, members)
    for i in mine:
        c, of = g.cd.c[i], g.computations[i]
        again = i in replayed.recomputed_seconds
        extra = f" + {size(c.overhead)}" if c.overhead else ""
        lines = [*label_lines(short_path(of.path, info.path), of.operation), f"{duration(c.time)}{extra}"]
        if again:
            lines.append("runs again")
        forward = c.phase == "forward"
        fill, line = (styles.FORWARD, styles.FORWARD_LINE) if forward else \
            (styles.BACKWARD, styles.BACKWARD_LINE)
        graph.node(f"c{i}", _lines(*lines), fillcolor=styles.AGAIN_FILL if again else fill,
                   color=styles.AGAIN if again else line, penwidth="2" if again else "1.2",
                   shape="hexagon" if of.constant else "box",
                   tooltip=f"{c.name}, {of.path or 'the model'}")
        for j in c.inputs:
            graph.edge(f"d{j}", f"c{i}")
        for j in c.outputs:
            graph.edge(f"c{i}", f"d{j}")
    _loss_node(graph, plan, block, touched)
    _legend(graph, bool(replayed.copied))
    return graph


def _data_node(graph: graphviz.Digraph, plan: PlanData, j: int, replayed: Occupancy,
               members: set[int]) -> None:
    g = plan.graph
    d, maker = g.cd.d[j], g.cd.producer[j]
    outside = maker is None or maker not in members
    kept = d.kind != "grad" and j in replayed.alive_at_loss
    away = not kept and j in replayed.copied
    constant = maker is not None and g.computations[maker].block == HOISTED
    lines = [d.name, size(d.size)]
    if outside:
        source = g.computations[maker] if maker is not None else None
        lines = [*(label_lines(source.path, source.operation) if source else (d.name,)), size(d.size),
                 "from the start" if constant else "from outside"]
    styled = ["filled"]
    if d.kind == "saved":
        styled.append("dashed")
    if outside:
        styled.append("dotted")
    graph.node(f"d{j}", _lines(*lines), shape="ellipse", style=",".join(styled),
               fillcolor=styles.CONSTANT if constant else styles.KEPT if kept else styles.AWAY if away
               else "white",
               color=styles.BACKWARD_LINE if d.kind == "grad" else styles.KEPT_LINE if kept
               else styles.AWAY_LINE if away else styles.FAINT, margin="0.02",
               tooltip=f"{d.name} {g.shapes[j]}: {'kept' if kept else 'sent away' if away else d.kind}")


def _loss_node(graph: graphviz.Digraph, plan: PlanData, block: int, touched: list[int]) -> None:
    """Add the loss, between the values that leave the block's forward and the gradients that come back."""
    g = plan.graph
    made = {j for i in g.block_c[block] if i < g.cd.loss for j in g.cd.c[i].outputs}
    leaving = made & (set(g.cuts[block + 1]) if block + 1 < len(g.cuts) else set())
    leaving |= made & set(g.cd.outputs)
    own = {j for i in g.block_c[block] for j in g.cd.c[i].outputs}
    arriving = [j for j in touched if g.cd.d[j].kind == "grad" and j not in own]
    graph.node("loss", "loss" if block == len(plan.blocks) - 1 else "later blocks, loss",
               shape="octagon", fillcolor=styles.LOSS, color=styles.LOSS_LINE)
    for j in sorted(leaving):
        graph.edge(f"d{j}", "loss")
    for j in arriving:
        graph.edge("loss", f"d{j}")


def _legend(graph: graphviz.Digraph, sends: bool) -> None:
    rows = (("forward computation", styles.FORWARD), ("backward computation", styles.BACKWARD),
            ("runs again in the backward", styles.AGAIN_FILL), ("data kept for the backward", styles.KEPT),
            *([("data copied away and back", styles.AWAY)] if sends else []),
            ("data forgotten, or gradient", "white"), ("constant", styles.CONSTANT))
    cells = "".join(f'<TR><TD BGCOLOR="{colour}" WIDTH="18"></TD>'
                    f'<TD ALIGN="LEFT">{text}&nbsp;&nbsp;</TD></TR>' for text, colour in rows)
    graph.node("legend", f'<<TABLE BORDER="0" CELLBORDER="1" CELLSPACING="2" COLOR="{styles.FAINT}">'
                         f'{cells}</TABLE>>', shape="plain", style="")


def _graph(name: str, rankdir: str = "TB") -> graphviz.Digraph:
    graph = graphviz.Digraph(name)
    graph.attr(rankdir=rankdir, fontname=styles.FONT, nodesep="0.25", ranksep="0.35", pad="0.2",
               bgcolor="transparent")
    graph.attr("node", shape="box", style="filled,rounded", fontname=styles.FONT, fontsize="11",
               color=styles.FAINT, fontcolor=styles.INK, fillcolor="white", margin="0.15,0.07")
    graph.attr("edge", fontname=styles.FONT, fontsize="10", color=styles.FAINT,
               fontcolor=styles.SOFT, arrowsize="0.6")
    return graph


def _lines(*parts: str) -> str:
    return "\n".join(graphviz.escape(p) for p in parts if p)


def _edges(graph: graphviz.Digraph, to: int, froms: Iterable[int]) -> None:
    for j in dict.fromkeys(froms):
        graph.edge(f"n{j}", f"n{to}")
