"""Graph files: what stands on them, their pages, and what happens without Graphviz."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import rkmate
from rkmate.show import draw
from rkmate.show.graphs import (
    block_graph,
    captured_graph,
    chain_graph,
    collapsed_graph,
    folded,
    simplified_graph,
    stands_for,
)
from rkmate.show.replay import replay
from tests.show.models import BLOCKS, curve, in_one_process, long_plan, scores_plan, wrapped

pytestmark = in_one_process

needs_dot = pytest.mark.skipif(not draw.has_dot(), reason="Graphviz (the program dot) is not installed")


def nodes(source: str) -> set[str]:
    return set(re.findall(r"^\s*([a-z]+\d*) \[label=", source, re.M))


def fills(source: str, prefix: str) -> dict[str, str]:
    """Node -> fill colour."""
    return {m[1]: m[2] for m in
            re.finditer(rf'^\s*({prefix}\d+) \[.*?fillcolor="?(#?\w+)', source, re.M | re.S)}


def test_the_chain_has_every_block_and_one_colour_for_each_class() -> None:
    plan = wrapped().plan
    source = chain_graph(plan, replay(plan)).source
    colours = fills(source, "b")
    assert len(colours) == len(plan.blocks)
    pairs = {(plan.blocks[int(name[1:])].label, colour) for name, colour in colours.items()}
    assert len(pairs) == len({label for label, _ in pairs}) == len({colour for _, colour in pairs})
    assert all(f"class {info.label}" in source for info in plan.blocks)
    assert source.count("->") == len(plan.blocks)


def test_graphs_before_and_after_simplification() -> None:
    plan = wrapped().plan
    assert len(nodes(captured_graph(plan).source)) == len(plan.graph.captured)
    assert len(nodes(simplified_graph(plan).source)) == plan.graph.cd.loss < len(plan.graph.captured)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_a_block_has_all_its_nodes(block: int) -> None:
    plan = wrapped().plan
    assert len(plan.blocks) == BLOCKS
    source = block_graph(plan, block, replay(plan)).source
    g = plan.graph
    mine = g.block_c[block]
    data = {j for i in mine for j in (*g.cd.c[i].inputs, *g.cd.c[i].outputs)}
    assert nodes(source) == {f"c{i}" for i in mine} | {f"d{j}" for j in data} | {"loss", "legend"}
    edges = sum(len(g.cd.c[i].inputs) + len(g.cd.c[i].outputs) for i in mine)
    assert source.count("->") >= edges
    again = set(replay(plan).recomputed_seconds) & set(mine)
    assert source.count("runs again") - source.count("runs again in") == len(again)


@pytest.mark.slow
def test_kept_data_look_different_from_forgotten_data() -> None:
    kept, half = curve()[0], wrapped().plan
    all_kept = fills(block_graph(kept, 1, replay(kept)).source, "d")
    some_kept = fills(block_graph(half, 1, replay(half)).source, "d")
    assert sum(c == "#d5eedd" for c in all_kept.values()) > sum(c == "#d5eedd" for c in
                                                                some_kept.values())


def test_blocks_that_run_differently_have_pages_of_their_own() -> None:
    plan = wrapped().plan
    shared = draw.pages_of(plan, replay(plan))
    for b, other in enumerate(shared):
        assert plan.blocks[b].label == plan.blocks[other].label
        assert other <= b
    by_class = draw.pages_of(plan, None)
    assert len(set(by_class)) == len({i.label for i in plan.blocks}) <= len(set(shared))


@needs_dot
@pytest.mark.parametrize("what", ["chain", "forward", "simplified"])
def test_svg_files_are_whole(what: str, tmp_path: Path) -> None:
    path = wrapped().plan.draw(tmp_path / "graph.svg", what)  # type: ignore[arg-type]
    ElementTree.parse(path)
    for link in re.findall(r'xlink:href="([^"]+)"', path.read_text()):
        ElementTree.parse(tmp_path / link)


@needs_dot
def test_png_and_pdf(tmp_path: Path) -> None:
    plan = scores_plan()
    assert plan.draw(tmp_path / "a.png", "block", 0).read_bytes()[:4] == b"\x89PNG"
    assert plan.draw(tmp_path / "a.pdf", "block", "A").read_bytes()[:4] == b"%PDF"


@needs_dot
@pytest.mark.slow
@pytest.mark.parametrize("what", ["forward", "simplified"])
def test_a_graph_of_thousands_of_nodes_is_collapsed_to_pages(what: str, tmp_path: Path) -> None:
    plan = long_plan()
    assert len(plan.graph.computations) > 2000
    path = plan.draw(tmp_path / "big.svg", what)  # type: ignore[arg-type]
    text = path.read_text()
    assert text.count('class="node"') <= draw.LEGIBLE
    links = set(re.findall(r'xlink:href="([^"]+)"', text))
    assert len(links) == len({i.label for i in plan.blocks})
    for link in links:
        page = (tmp_path / link).read_text()
        assert 0 < page.count('class="node"') <= draw.LEGIBLE


@pytest.mark.slow
@pytest.mark.parametrize("what", ["forward", "simplified"])
def test_a_collapsed_graph_folds_blocks_that_repeat(what: str) -> None:
    plan = long_plan()
    labels = [info.label for info in plan.blocks]
    source = collapsed_graph(plan, what, lambda b: f"page{b}.svg").source
    drawn = stands_for(folded(labels))
    assert sorted(drawn) == list(range(len(labels)))
    assert all(labels[b] == labels[other] for b, other in drawn.items())
    blocks = {f"b{b}" for b in drawn.values()}
    assert {n for n in nodes(source) if n.startswith("b")} == blocks
    assert len(blocks) < 10 < len(labels)
    assert "times," in source
    edges = re.findall(r"^\s*(b\d+) -> (b\d+)(?! \[style=invis)", source, re.M)
    assert {a for a, _ in edges} | {b for _, b in edges} == blocks


def test_chains_are_folded_where_blocks_repeat_in_a_row() -> None:
    groups = folded("ABCBCBCD")
    assert [(g.first, g.length, g.times, g.last) for g in groups] == \
        [(0, 1, 1, 0), (1, 2, 3, 6), (7, 1, 1, 7)]
    assert stands_for(groups) == {0: 0, 1: 1, 2: 2, 3: 1, 4: 2, 5: 1, 6: 2, 7: 7}
    assert [(g.first, g.length, g.times) for g in folded("AAAA")] == [(0, 1, 4)]
    assert [(g.length, g.times) for g in folded("ABC")] == [(1, 1)] * 3
    assert folded("") == ()


@needs_dot
def test_a_large_forward_is_drawn_whole_when_asked_for(tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "LEGIBLE", 20)
    plan = wrapped().plan
    folded_text = plan.draw(tmp_path / "a.svg", "forward").read_text()
    whole = plan.draw(tmp_path / "b.svg", "forward", whole=True).read_text()
    assert folded_text.count('class="node"') < 20 < whole.count('class="node"') == len(plan.graph.captured)
    assert not (tmp_path / "b_blocks").exists()
    with pytest.raises(rkmate.ArgumentError, match="never folded"):
        plan.draw(tmp_path / "c.svg", whole=True)


def test_nodes_name_the_module_before_the_operation() -> None:
    plan = wrapped().plan
    assert re.search(r'label="norm:\nnative_layer_norm"', captured_graph(plan).source)
    assert re.search(r'label="up:\naddmm\n', simplified_graph(plan).source)
    assert re.search(r'label="down:\naddmm\n', block_graph(plan, 1, replay(plan)).source)


@needs_dot
@pytest.mark.slow
def test_a_long_chain_is_drawn_in_columns(tmp_path: Path) -> None:
    plan = long_plan()
    root = ElementTree.parse(plan.draw(tmp_path / "chain.svg")).getroot()
    _, _, width, height = (float(n) for n in root.attrib["viewBox"].split())
    assert 1 / 3 < width / height < 3
    text = (tmp_path / "chain.svg").read_text()
    assert text.count('class="node"') == len(plan.blocks) + 1
    assert text.count('class="edge"') == len(plan.blocks)


def test_dot_text_needs_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "has_dot", lambda: False)
    path = wrapped().plan.draw(tmp_path / "chain.dot")
    assert path.read_text().startswith("digraph")
    assert list(tmp_path.iterdir()) == [path]


def test_without_dot_the_text_is_written_and_the_message_says_what_to_install(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "has_dot", lambda: False)
    with pytest.warns(rkmate.RkmateWarning, match=r"apt-get install graphviz"):
        path = wrapped().plan.draw(tmp_path / "chain.svg")
    assert path == tmp_path / "chain.dot"
    assert path.read_text().startswith("digraph")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("arguments", "message"), [
    (("a.svg", "chains"), "what is 'chains'"),
    (("a.gif", "chain"), "suffix"),
    (("a.svg", "block"), "block is None"),
    (("a.svg", "chain", 0), "block is 0"),
    (("a.svg", "block", 99), "block is 99"),
    (("a.svg", "block", "Q"), "block is 'Q'"),
    (("a.dot", "schedule", 0), "no graph"),
])
def test_wrong_arguments(arguments: tuple[object, ...], message: str, tmp_path: Path) -> None:
    path, *rest = arguments
    with pytest.raises(rkmate.ArgumentError, match=message):
        wrapped().plan.draw(tmp_path / str(path), *rest)  # type: ignore[arg-type]
