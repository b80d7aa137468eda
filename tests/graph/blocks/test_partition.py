"""A program in block order: what crosses its cuts, where functions end, when gradients leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from rkmate.graph.blocks.cut import CutSettings
from rkmate.graph.blocks.partition import (
    KEPT_SHARE,
    LEAST,
    SHARE,
    WORKING_SHARE,
    Partition,
    cut_stages,
    partition,
    rearranged,
)
from rkmate.ir.cd import HOISTED, CDGraph, DNode
from rkmate.ir.schedule import save_all
from rkmate.ir.simulate import simulate
from tests.graph.blocks.graphs import chain, program_of, settings, trained
from tests.ir.graphs import graphs


def check(parts: Partition) -> None:
    """Every field, from its definition."""
    cd, of, count = parts.program.cd.verify(), parts.block_of, len(parts.blocks)
    forward, backward = of[:cd.loss], of[cd.loss:]
    assert list(forward) == sorted(forward) and list(backward) == sorted(backward, reverse=True)
    inside = [j for j in range(len(cd.d)) if (m := cd.producer[j]) is not None and m < cd.loss]
    for b in range(1, count):
        assert parts.cuts[b] == {j for j in inside if HOISTED < of[cd.producer[j] or 0] < b and any(
            r < cd.loss and of[r] >= b for r in cd.readers[j])}
    for b in range(count + 1):
        expected = set()
        for j in range(len(cd.d)):
            made = cd.producer[j]
            if j in cd.output_grads:
                from_block = count
            elif made is not None and made >= cd.loss:
                from_block = of[made]
            else:
                continue
            uses = [of[r] for r in cd.readers[j]]
            uses += [of[cd.releases[j]]] if j in cd.releases else []
            uses += [-1] if j in cd.input_grads else []
            if from_block >= b and any(u < b for u in uses):
                expected.add(j)
        assert parts.grads[b] == expected
    assert sorted(i for b in parts.blocks for i in b.c) == [i for i in range(len(cd.c)) if of[i] != HOISTED]
    for b in parts.blocks:
        check_block(parts, b.index)


def check_block(parts: Partition, b: int) -> None:
    cd, block = parts.program.cd, parts.blocks[b]
    local = block.graph.verify()
    assert [c.name for c in local.c] == [cd.c[i].name for i in block.c]
    for c, i in zip(local.c, block.c, strict=True):
        for here, there in ((c.inputs, cd.c[i].inputs), (c.outputs, cd.c[i].outputs),
                            (c.donors, cd.c[i].donors)):
            assert tuple(block.d[j] for j in here) == there
        assert c.phase == cd.c[i].phase
    for node, j in zip(local.d, block.d, strict=True):
        assert node == DNode(cd.d[j].name, 0 if j in cd.outputs else cd.d[j].size, cd.d[j].kind)
    assert {block.d[j] for j in local.output_grads} == parts.grads[b + 1]
    assert {block.d[j] for j in local.input_grads} == parts.grads[b]
    assert parts.cuts[b] <= {block.d[j] for j in local.inputs}
    made = {j for i in block.c for j in cd.c[i].outputs}
    assert {block.d[j] for j in local.outputs} == made & (parts.cuts[b + 1] | set(cd.outputs))
    simulate(local, save_all(local))                     # it runs by itself


@examples(max_examples=40)
@given(graphs(most=16), settings())
def test_any_graph(cd: CDGraph, how: CutSettings) -> None:
    parts = partition(program_of(cd), how)
    check(parts)
    # The operations moved along with their nodes.
    for c, operation in zip(parts.program.cd.c, parts.program.operation, strict=True):
        assert operation.meta["seq_nr"] == int(c.name[1:])
    assert sorted(c.name for c in parts.program.cd.c) == sorted(c.name for c in cd.c)
    simulate(parts.program.cd, save_all(parts.program.cd))


@examples(max_examples=40)
@given(graphs(most=16), settings(), st.randoms(use_true_random=False))
def test_rearranged(cd: CDGraph, how: CutSettings, rng: object) -> None:
    """Each block's nodes in another order that can run."""
    parts = partition(program_of(cd), how)
    assert rearranged(parts, [range(len(b.c)) for b in parts.blocks]) == parts
    orders = [_another_order(b.graph, rng) for b in parts.blocks]
    new = rearranged(parts, orders)
    check(new)
    assert new.block_of == parts.block_of
    for old, now, order in zip(parts.blocks, new.blocks, orders, strict=True):
        assert [c.name for c in now.graph.c] == [old.graph.c[k].name for k in order]


def _another_order(graph: CDGraph, rng: object) -> list[int]:
    order: list[int] = []
    for phase in (graph.forward, graph.backward):
        left = set(phase)
        while left:
            ready = [i for i in sorted(left) if not any(graph.producer[j] in left for j in graph.c[i].inputs)]
            order.append(rng.choice(ready))  # type: ignore[attr-defined]
            left.remove(order[-1])
    return order


# -- functions and the gradients that leave with them ---------------------------------------


def heavy(weights: Sequence[int]) -> CDGraph:
    """A row of nodes whose parameters' gradients have these sizes, and whose forward keeps so much that no
    other size counts."""
    cd = trained(chain(len(weights)), [1] * len(weights))
    kept = -(-KEPT_SHARE * LEAST // (len(weights) - 1))
    sizes = {j: kept for i in cd.forward for j in cd.c[i].outputs}
    sizes |= {j: weights[int(cd.d[j].name[1:])] for j in cd.releases}
    return replace(cd, d=tuple(replace(d, size=sizes.get(j, d.size)) for j, d in enumerate(cd.d)))


def ends(parts: Partition) -> list[str]:
    return [parts.program.cd.c[i].name for i in parts.segments]


def test_a_function_ends_with_its_block() -> None:
    parts = partition(program_of(heavy([100] * 8)), CutSettings(4, 45))
    assert ends(parts) == ["b4", "b0"]
    assert {parts.program.cd.d[j].name: parts.program.cd.c[i].name
            for j, i in parts.program.cd.releases.items()} == {
                f"w{k}": "b4" if k >= 4 else "b0" for k in range(8)}


def test_a_function_ends_once_its_gradients_weigh_enough() -> None:
    half = LEAST // 2
    parts = partition(program_of(heavy([half] * 8)), CutSettings(8, 45))
    assert ends(parts) == ["b6", "b4", "b2", "b0"]
    # Of a large model: a share of all gradients.
    parts = partition(program_of(heavy([LEAST * SHARE // 4, *[LEAST // 2] * 7])), CutSettings(8, 45))
    assert ends(parts) == ["b6", "b4", "b2", "b0"]
    parts = partition(program_of(heavy([LEAST * SHARE * 4, *[LEAST] * 7])), CutSettings(8, 45))
    assert ends(parts) == ["b3", "b0"]


def test_fewer_gradients_wait_in_a_step_that_keeps_little() -> None:
    """A function of all gradients would take more than eager mode, which holds one at a time."""
    cd = heavy([LEAST // 4] * 8)
    assert ends(partition(program_of(cd), CutSettings(8, 45))) == ["b4", "b0"]
    forward = {j for i in cd.forward for j in cd.c[i].outputs}
    small = replace(cd, d=tuple(replace(d, size=d.size // 4) if j in forward else d
                                for j, d in enumerate(cd.d)))
    assert ends(partition(program_of(small), CutSettings(8, 45))) == [f"b{k}" for k in range(7, -1, -1)]


def test_no_function_ends_without_a_gradient() -> None:
    cd = heavy([0, 0, 64, 0, 0, 32, 0, 0])
    found = partition(program_of(cd), CutSettings(8, 45, waiting=0))
    assert ends(found) == ["b5", "b2", "b0"]


def test_a_gradient_waits_for_the_last_read_of_its_parameter() -> None:
    """An optimizer in the backward may change the parameter as soon as its gradient leaves."""
    cd = heavy([LEAST] * 8)
    assert ends(partition(program_of(cd), CutSettings(8, 45))) == [f"b{k}" for k in (*range(7, -1, -1),)]
    gradient = next(j for j in cd.releases if cd.d[j].name == "w5")
    later = next(i for i in cd.backward if cd.c[i].name == "b3")
    assert ends(partition(program_of(cd, reads={later: gradient}), CutSettings(8, 45))) == [
        "b7", "b6", "b3", "b2", "b1", "b0"]


def test_gradients_wait_beside_small_operations() -> None:
    """The product of a large value may hold as many gradients as it has beyond the next ones."""
    cd = heavy([LEAST] * 8)
    wide = {cd.d[j].name for j in cd.c[0].outputs}
    sized = replace(cd, d=tuple(replace(d, size=4 * WORKING_SHARE * LEAST) if d.name in wide else d
                                for d in cd.d))
    parts = partition(program_of(sized), CutSettings(8, 45))
    assert ends(parts) == ["b4", "b2", "b0"]            # b1 reads it: nothing waits beside that


@given(st.lists(st.integers(0, LEAST), min_size=2, max_size=20), settings())
def test_what_waits_is_bounded(weights: list[int], how: CutSettings) -> None:
    parts = partition(program_of(heavy(weights)), how)
    cd = parts.program.cd
    limit = max(sum(weights) // SHARE, LEAST)
    start = cd.loss
    for end in parts.segments:
        mine = [j for j, i in cd.releases.items() if i == end]
        assert all(start <= (cd.producer[j] or 0) <= end for j in mine)
        # Without its last node, a function holds less than the limit.
        assert sum(cd.d[j].size for j in mine if cd.producer[j] != end) < limit
        start = end + 1
    assert start == len(cd.c)


def test_parts_of_a_shared_parameter_leave_together() -> None:
    cd = heavy([100] * 8)
    shared = sorted(cd.releases)[::3]                         # of nodes 7, 4 and 1
    assert [cd.d[j].name for j in shared] == ["w7", "w4", "w1"]
    parts = partition(program_of(cd, of_one_parameter=[shared]), CutSettings(2, 45))
    cd = parts.program.cd
    left = {cd.d[j].name: cd.c[i].name for j, i in cd.releases.items()}
    # The first takes the others in, and stays to the end of the last; the others end with theirs.
    assert (left["w7"], left["w4"], left["w1"]) == ("b0", "b4", "b0")
    check(parts)


# -- stages -------------------------------------------------------------------------------


def test_stages_keep_numbers_and_order() -> None:
    cd = trained(chain(6))
    parts = partition(program_of(cd), CutSettings(6, 45))
    stages = cut_stages(parts.program, ["a", "a", "b", "c", "c", "c"] + [None] * 6)
    assert [[parts.program.cd.c[i].name for i in b.c] for b in stages.blocks] == [
        ["f0", "f1", "b1", "b0"], ["f2", "b2"], ["f3", "f4", "f5", "b5", "b4", "b3"]]
    assert [len(c) for c in stages.cuts] == [0, 1, 1, 0]
    for block in stages.blocks:
        simulate(block.graph, save_all(block.graph.verify()))


def test_constants_that_several_blocks_read_come_first() -> None:
    reads = [[], [0], [1], [2], [0, 3], [4]]
    parts = partition(program_of(trained(reads), constant=(0,)), CutSettings(2, 45))
    assert parts.block_of[0] == HOISTED
    assert all(0 not in block.c for block in parts.blocks)
    assert all(1 not in cut for cut in parts.cuts)              # its value is of no cut
