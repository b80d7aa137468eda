"""The strategies themselves on small inputs: segments, split points, canonical orders, DTR."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rkmate.errors import ArgumentError, GraphError
from rkmate.ir.cd import CDGraph, CNode, DNode
from rkmate.ir.chain import Backward, Forward, ForwardPlain
from rkmate.ir.recompute import checkpointed
from rkmate.ir.schedule import Loss, from_order, unmet_wishes
from rkmate.ir.simulate import simulate
from rkmate.planners.canonical import (
    Canonical,
    Dag,
    cached,
    canonical,
    forward_dag,
    members,
    trained_forward,
    without_liveness,
)
from rkmate.planners.chain import (
    CHECKPOINTING,
    one_option,
    recompute_all,
    segments,
    sequential,
)
from rkmate.planners.checkmate import Checkmate, round_relaxation
from rkmate.planners.default import Default
from rkmate.planners.dtr_offline import dtr_order
from rkmate.planners.lower_sets import LowerSetProgram, memory_segments, split_points, sqrt_segments
from rkmate.planners.protocol import Problem, expand
from rkmate.planners.registry import planner
from rkmate.rotor.replay import replay
from rkmate.rotor.rk_rotor import fastest, solve
from tests.planners.problems import overhead, peak, plain_graph, problem_of, stack, training_graph

LOWER_SETS = json.loads((Path(__file__).parent / "data" / "lower_sets.json").read_text())


def chain_dag(n: int) -> Dag:
    return Dag((1.0,) * n, (1,) * n, tuple((v, v + 1) for v in range(n - 1)))


def test_segments_are_those_of_checkpoint_sequential() -> None:
    assert segments(10, 3) == [range(3), range(3, 6), range(6, 10)]
    assert segments(4, 1) == [range(4)]
    with pytest.raises(ArgumentError, match="1 to 4"):
        segments(4, 5)
    assert sequential([range(1), range(1, 2)]) == [
        ForwardPlain(0), Forward(1, 0), Backward(1, 0), Forward(0, 0), Backward(0, 0)]


def test_layers_that_run_again_as_a_whole() -> None:
    problem = stack(6)
    graph = problem.graph
    block = [next(b for b, c in enumerate(problem.block_c) if i in c) for i in range(graph.loss)]
    after = [None] * (len(graph.c) - graph.loss)
    by_blocks = [problem.simulate(checkpointed(graph, [*(b // n for b in block), *after]))
                 for n in (1, 2, 3, 4)]
    # The program's own regions, without its first blocks, take more memory and less time.
    regions = (*(None if b < 2 else b for b in block), *after)
    own = problem.simulate(checkpointed(graph, regions))
    for named, expected in (((), by_blocks), (regions, [own, *by_blocks])):
        here = replace(problem, regions=named)
        for budget in (*(e.peak for e in expected), min(e.peak for e in expected) - 1):
            outcome = CHECKPOINTING.plan(here, budget)
            least = min((e.seconds for e in expected if e.peak <= budget), default=math.inf)
            assert outcome.seconds == least
            assert Default().plan(here, budget).seconds <= least
    assert own.seconds < min(e.seconds for e in by_blocks)
    # What the user wants computed again is, and what runs once does.
    wished = replace(problem, graph=replace(graph, once=frozenset(range(4))))
    outcome = CHECKPOINTING.plan(wished, 10**6)
    assert outcome.schedule is not None and not unmet_wishes(wished.graph, outcome.schedule)
    forgotten = replace(problem, graph=replace(graph, forgotten=frozenset(graph.outputs)))
    assert CHECKPOINTING.plan(forgotten, 10**6).schedule is None


def test_ends_of_the_scale() -> None:
    chain = stack(4).chain
    assert replay(chain, fastest(chain)).peak_bytes > replay(chain, recompute_all(chain)).peak_bytes
    ran = [op.block for op in recompute_all(chain)]
    assert ran.count(0) == len(chain) + 1      # a forward for each block, and the backward


def test_revolve_is_rotor_without_saving() -> None:
    chain = stack(6).chain
    with_saving, without = (solve(one_option(chain), keep=keep) for keep in (True, False))
    top = replay(chain, fastest(one_option(chain))).peak_bytes
    for budget in range(without.minimum_bytes, top, 7):
        a, b = with_saving.sequence(budget), without.sequence(budget)
        assert a is not None and b is not None
        assert replay(one_option(chain), a).seconds <= replay(one_option(chain), b).seconds
    # With room for all, revolve runs every forward but the last once more, and rotor none.
    a, b = with_saving.sequence(2 * top), without.sequence(2 * top)
    assert a is not None and b is not None
    once, twice = replay(one_option(chain), a).seconds, replay(one_option(chain), b).seconds
    assert once == sum(c.time for c in stack(6).graph.c)
    assert twice == once + sum(block.forward_seconds for block in chain.blocks[:-1])


def test_split_points_avoid_skip_connections() -> None:
    # 0 -> 1 -> 2 -> 3 -> 4 with a skip connection from 1 to 3.
    dag = Dag((1.0,) * 5, (1,) * 5, ((0, 1), (1, 2), (1, 3), (2, 3), (3, 4)))
    assert split_points(dag) == [0, 1, 3]
    assert sqrt_segments(chain_dag(10))[:3] == [0b111, 0b111111, 0b111111111]
    assert memory_segments(chain_dag(6), 4) == [0b1111, 0b111111]


def with_backward(dag: Dag, sets: Sequence[int]) -> CDGraph:
    """Forward and backward of a graph, as equation (2) of the paper counts them; the backward runs block by
    block. The gradient of v is made by one node, which reads the gradients of what reads v and the forward
    values that these were computed from (terms iii and iv); for a sink, v itself."""
    n = len(dag)
    d = [DNode(f"v{v}", dag.sizes[v]) for v in range(n)]
    d += [DNode(f"g{v}", dag.sizes[v], "grad") for v in range(n)]
    c = [CNode(f"f{v}", "forward", tuple(members(dag.before[v])), (v,), dag.times[v]) for v in range(n)]
    for v in sorted(range(n), key=lambda v: (sum(s >> v & 1 for s in sets), -v)):
        after = dag.after[v]
        data = members(dag.read(after) if after else 1 << v)
        c.append(CNode(f"b{v}", "backward", (*data, *(n + w for w in members(after))), (n + v,), 0.0))
    return CDGraph(tuple(d), tuple(c), n).verify()


def by_blocks(strategy: Canonical, sets: Sequence[int], graph: CDGraph) -> Canonical:
    """Let each backward node, and what is computed again for it, belong to the block of its forward node."""
    part, place = list(strategy.part), 0
    for k in range(len(part) - 1, strategy.loss_at - 1, -1):
        if strategy.order[k] >= graph.loss:
            v = graph.c[strategy.order[k]].outputs[0] - graph.loss
            place = len(sets) + sum(s >> v & 1 for s in sets)
        part[k] = place
    return replace(strategy, part=tuple(part))


@pytest.mark.parametrize("name", LOWER_SETS)
def test_canonical_strategies_run(name: str) -> None:
    """Liveness saves memory, and equation (2) bounds what the strategy really needs."""
    graph = LOWER_SETS[name]["graph"]
    dag = Dag(tuple(graph["T"]), tuple(graph["M"]), tuple(map(tuple, graph["edges"])))
    program = LowerSetProgram(dag, "exact")
    for more in (0, 3, 8, 20):
        sets = program.solve(program.minimum_bytes() + more)
        assert sets is not None
        training = with_backward(dag, sets)
        strategy = by_blocks(canonical(training, dag, sets), sets, training)
        live = simulate(training, from_order(training, strategy.order, strategy.loss_at))
        result = simulate(training, without_liveness(training, strategy))
        assert live.peak <= result.peak <= peak(dag, sets)
        # The program counts recomputing all that is not cached; some of it no backward reads.
        assert result.seconds <= dag.time((1 << len(dag)) - 1) + overhead(dag, sets)
        again = from_order(training, strategy.order, strategy.loss_at).recomputed()
        assert set(again) <= set(range(len(dag))) - {
            v for v in range(len(dag)) if cached(dag, sets) >> v & 1}
        assert set(again.values()) <= {1}


def test_forward_of_a_captured_graph() -> None:
    problem = stack(1)
    dag = forward_dag(problem.graph)
    assert dag.edges == ((0, 1), (0, 4), (1, 2), (2, 3), (3, 4))
    # Nodes 1 and 3 save a byte for their backward; the user holds the value of the last one.
    assert dag.sizes == (4, 6 + 1, 8, 5 + 1, 0)


def test_policy_is_deterministic_and_fits() -> None:
    graph = stack(6).graph
    top = simulate(graph, from_order(graph, range(len(graph.c)), graph.loss)).peak
    found = dtr_order(graph, int(top * 0.6))
    assert found is not None and found == dtr_order(graph, int(top * 0.6))
    result = simulate(graph, from_order(graph, *found))
    assert result.peak <= top * 0.6
    assert len(found[0]) > len(graph.c)
    assert dtr_order(graph, 1) is None


def test_a_policy_cut_short_goes_on_at_the_next_call() -> None:
    problem = stack(6)
    budget = simulate(problem.graph, from_order(problem.graph, range(len(problem.graph.c)),
                                                problem.graph.loss)).peak * 6 // 10
    short = planner("dtr").plan(problem, budget, time_limit=0.0)
    assert short.status == "timeout" and "not tried" in short.note
    whole = planner("dtr").plan(problem, budget)
    assert whole.schedule is not None and "not tried" not in whole.note
    assert whole.seconds == planner("dtr").plan(stack(6), budget).seconds


def test_expand_puts_constants_first_and_the_loss_before_the_first_backward() -> None:
    graph = training_graph([[], [0], [1]], [2, 2, 2], [1, 1, 1], [0] * 3, [0] * 3, [False] * 3)
    problem = problem_of(graph, [1, 2])
    ops = fastest(problem.chain)
    assert expand(problem, ops) == ([0, 1, 2, 3, 4, 5], 3)
    d = (*graph.d, DNode("mask", 3))
    constant = CNode("mask", "forward", (), (len(graph.d),))
    moved = replace(graph, d=d, c=(constant, *graph.c), loss=graph.loss + 1,
                    releases={j: i + 1 for j, i in graph.releases.items()})
    later = tuple(tuple(c + 1 for c in block) for block in problem.block_c)
    wider = Problem(moved.verify(), problem.chain, later)
    order, loss_at = expand(wider, ops)
    assert (order, loss_at) == ([0, 1, 2, 3, 4, 5, 6], 4)
    steps = wider.schedule(order, loss_at).steps
    assert sum(isinstance(step, Loss) for step in steps) == 1
    with pytest.raises(GraphError, match="no block"):
        expand(Problem(graph, problem.chain, problem.block_c[:2]), ops[:2])


def test_rounding_keeps_what_it_is_told() -> None:
    """Node 3 reads the large value of node 0 again. There is room for half of it while node 2 runs, so
    the relaxation keeps half; rounded, it is kept, or made once more."""
    graph = plain_graph([[], [0], [1], [0, 2]], [1, 1, 1, 1], [2, 2, 1, 1])
    program = Checkmate(graph)
    answer = program.relaxed(4)
    assert answer.status.value == "optimal"
    seconds = {}
    for threshold in (0.05, 0.45, 0.55, 0.95):
        order, loss_at = round_relaxation(program.model, answer.values, threshold)
        seconds[threshold] = simulate(graph, from_order(graph, order, loss_at)).seconds
    assert seconds == {0.05: 4, 0.45: 4, 0.55: 5, 0.95: 5}
    nothing, _ = round_relaxation(program.model, {}, 0.5)
    assert nothing.count(0) == 4       # node 0 again for 1, 2 and 3


def test_exact_family_says_when_it_is_too_large() -> None:
    n = 24
    graph = training_graph([[] for _ in range(n)], [2] * n, [1] * n, [0] * n, [0] * n, [False] * n)
    outcome = planner("lower-sets-exact").plan(problem_of(graph, [1]), 10**6)
    assert outcome.status == "infeasible" and "16,777,216 lower sets" in outcome.note


def test_constants_are_no_nodes_of_the_trained_forward() -> None:
    """A mask that every node reads would otherwise leave no place for a checkpoint."""
    graph = training_graph([[], [0], [1]], [2, 2, 2], [1, 1, 1], [0] * 3, [0] * 3, [False] * 3)
    problem = problem_of(graph, [1, 2])
    mask = len(graph.d)
    moved = [replace(c, inputs=(*c.inputs, mask)) if c.phase == "forward" else c for c in graph.c]
    wider = replace(graph, d=(*graph.d, DNode("mask", 3)), loss=graph.loss + 1,
                    c=(CNode("mask", "forward", (), (mask,)), *moved),
                    releases={j: i + 1 for j, i in graph.releases.items()}).verify()
    blocks = tuple(tuple(c + 1 for c in block) for block in problem.block_c)
    assert split_points(forward_dag(wider)) == [0]
    forward = trained_forward(wider, blocks)
    assert forward.nodes == (1, 2, 3) and split_points(forward.dag) == [0, 1]
    assert forward.lift([0b1, 0b111]) == (0b11, 0b1111)
    outcome = planner("chen").plan(Problem(wider, problem.chain, blocks), 10**6)
    assert outcome.seconds == sum(c.time for c in wider.c)
