"""Pictures of a plan's graphs in files: SVG, PNG, PDF or DOT, by the suffix."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import graphviz

from rkmate.errors import ArgumentError
from rkmate.ir.cd import HOISTED
from rkmate.ir.plan import PlanData
from rkmate.show.graphs import (
    Link,
    block_graph,
    captured_graph,
    chain_graph,
    collapsed_graph,
    no_links,
    simplified_graph,
)
from rkmate.show.replay import Occupancy, replay
from rkmate.support.warn import warn

Picture = Literal["chain", "forward", "simplified", "block", "schedule", "copies"]
"""The pictures that `Plan.draw` draws."""
WHAT: tuple[Picture, ...] = ("chain", "forward", "simplified", "block", "schedule", "copies")
_TEXT = (".dot", ".gv")
_SUFFIXES = (".svg", ".png", ".pdf", *_TEXT)
LEGIBLE = 120
"""Nodes on one page; larger graphs are folded to their blocks, each on a page of its own."""
NO_DOT = ("the program 'dot' was not found: install Graphviz (apt-get install graphviz, brew install "
          "graphviz, conda install graphviz, or https://graphviz.org/download)")


def draw(plan: PlanData, path: str | Path, what: Picture, block: int | str | None,
         whole: bool = False) -> Path:
    """Draw into a file; see `rkmate.Plan.draw`. Returns the path of what was written."""
    path = check(path, what, block, whole)
    if what == "schedule":
        from rkmate.show.timeline import draw_block_schedule

        return draw_block_schedule(plan, block_number(plan, block), path)
    if what == "copies":
        from rkmate.show.timeline import draw_copies

        return draw_copies(plan, path)
    if what == "block":
        return write(block_graph(plan, block_number(plan, block), replay(plan)), path)
    if what == "chain":
        replayed = replay(plan)
        return _with_pages(path, pages_of(plan, replayed),
                           lambda link: chain_graph(plan, replayed, link),
                           lambda b: block_graph(plan, b, replayed), start=False)
    nodes = len(plan.graph.captured) if what == "forward" else plan.graph.cd.loss
    make = captured_graph if what == "forward" else simplified_graph
    if whole or nodes <= LEGIBLE:
        return write(make(plan), path)
    return _with_pages(path, pages_of(plan, None), lambda link: collapsed_graph(plan, what, link),
                       lambda b: make(plan, [b]), start=HOISTED in plan.graph.block_c)


def check(path: str | Path, what: str, block: int | str | None, whole: bool = False) -> Path:
    """Return the path, where the arguments of `draw` fit together. Raises `ArgumentError`."""
    path = Path(path)
    if what not in WHAT:
        raise ArgumentError(f"what is {what!r}; it should be one of {', '.join(WHAT)}")
    if path.suffix not in _SUFFIXES:
        raise ArgumentError(f"path is {str(path)!r}; its suffix should be one of {', '.join(_SUFFIXES)}")
    if (block is None) != (what not in ("block", "schedule")):
        raise ArgumentError(f"what is {what!r} and block is {block!r}; a block (a number, or the label "
                            'of a class) goes with "block" and "schedule", and only with them')
    if whole and what not in ("forward", "simplified"):
        raise ArgumentError(f'what is {what!r}, which is never folded; whole goes with "forward" and '
                            '"simplified"')
    if what in ("schedule", "copies") and path.suffix in _TEXT:
        raise ArgumentError(f"what is {what!r}, which is no graph: write it as .svg, .png or .pdf")
    return path


def block_number(plan: PlanData, block: int | str | None) -> int:
    """Return a block by number or by the label of its class (the first of them). Raises `ArgumentError`."""
    labels = [b.label for b in plan.blocks]
    if isinstance(block, str) and block in labels:
        return labels.index(block)
    if isinstance(block, str) and block.isdigit():
        block = int(block)
    if isinstance(block, int) and not isinstance(block, bool) and 0 <= block < len(labels):
        return block
    raise ArgumentError(f"block is {block!r}; it should be a number from 0 to {len(labels) - 1}, or "
                        f"one of the classes {', '.join(dict.fromkeys(labels))}")


def pages_of(plan: PlanData, replayed: Occupancy | None) -> list[int]:
    """Return, for each block, the block whose page it shares: the first of its class that runs in the same
    way. Without a replay, the first of its class."""
    first: dict[object, int] = {}
    result = []
    runs = plan.schedule.recomputed()
    for b, info in enumerate(plan.blocks):
        key: list[object] = [info.label]
        if replayed is not None:
            for i in plan.graph.block_c[b]:
                key.append(runs.get(i, 0))
                key.extend((j in replayed.alive_at_loss, j in replayed.copied)
                           for j in plan.graph.cd.c[i].outputs)
        result.append(first.setdefault(tuple(key), b))
    return result


def _with_pages(path: Path, shared: list[int], main: Callable[[Link], graphviz.Digraph],
                page: Callable[[int], graphviz.Digraph], start: bool) -> Path:
    """Return a picture whose nodes link to pages; `shared`: per block, whose page it has. DOT text has no
    pages."""
    if path.suffix in _TEXT:
        return write(main(no_links), path)
    folder = path.with_name(f"{path.stem}_blocks")

    def name(block: int) -> str:
        return f"start{path.suffix}" if block == HOISTED else f"block_{shared[block]}{path.suffix}"

    written = write(main(lambda b: f"{folder.name}/{name(b)}"), path)
    if written == path:
        folder.mkdir(exist_ok=True)
        for b in {*shared, *([HOISTED] if start else [])}:
            write(page(b), folder / name(b))
    return written


def has_dot() -> bool:
    """Return whether Graphviz can draw here."""
    return shutil.which("dot") is not None


def svg(graph: graphviz.Digraph) -> str:
    """Return the picture as an SVG element, to be put into a page. Needs `has_dot`."""
    text = str(graph.pipe(format="svg", encoding="utf-8"))
    return text[text.index("<svg"):]


def write(graph: graphviz.Digraph, path: Path) -> Path:
    """Write one graph; without the ``dot`` program its DOT text, with a warning."""
    if path.suffix in _TEXT:
        path.write_text(graph.source, encoding="utf-8")
        return path
    if not has_dot():
        beside = path.with_suffix(".dot")
        beside.write_text(graph.source, encoding="utf-8")
        warn(f"{path.name} was not drawn, its DOT text is in {beside}: {NO_DOT}")
        return beside
    if path.suffix == ".png":
        graph.attr(dpi="110", bgcolor="white")
    path.write_bytes(graph.pipe(format=path.suffix[1:]))
    return path
