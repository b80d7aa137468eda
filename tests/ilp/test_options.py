"""The options of realistic, degenerate and large blocks."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from rkmate.errors import ArgumentError
from rkmate.ilp import grid
from rkmate.ilp.grid import (
    BlockProgram,
    OptionSet,
    block_options,
    evaluate_option,
    peak,
    seconds,
    undominated,
    without_waste,
)
from rkmate.ilp.heuristic import candidates, evictions, greedy_sets, keep_nothing, recompute_missing
from rkmate.ilp.highs import Status
from rkmate.ilp.settings import OptionSettings
from rkmate.ilp.stages import split_stages
from rkmate.ir.cd import CDGraph, CNode, DNode
from rkmate.ir.chain import Option
from rkmate.ir.schedule import Loss, from_order
from rkmate.ir.simulate import simulate
from tests.ilp.bank import Op, attention_half, chain, differentiate, mlp_half


def check(graph: CDGraph, found: OptionSet) -> None:
    """What every set of options promises."""
    save_all = evaluate_option(graph, graph.backward)
    assert found.options[0].backward_seconds == pytest.approx(save_all.backward_seconds)
    for option in found.options:
        assert option.forward == tuple(graph.forward)
        assert [i for i in option.backward if i >= graph.loss] == list(graph.backward)
        schedule = from_order(graph, option.forward + option.backward, graph.loss)
        result = simulate(graph, schedule)
        at = schedule.steps.index(Loss())
        outputs = sum(graph.d[j].size for j in set(graph.outputs) - set(graph.inputs))
        assert option.saved_bytes == result.saved - outputs
        assert option.forward_seconds + option.backward_seconds == pytest.approx(result.seconds)
        assert option.forward_peak_bytes == max(result.timeline[:at], default=0)
        assert option.backward_peak_bytes <= max(result.timeline[at:])
        assert option.saved_bytes >= 0
    numbers = [(seconds(o), o.saved_bytes, o.forward_peak_bytes, o.backward_peak_bytes)
               for o in found.options]
    for a, b in itertools.permutations(numbers, 2):
        assert not all(x <= y for x, y in zip(a, b, strict=True)), "an option is dominated"


@pytest.mark.parametrize("graph", [mlp_half(), attention_half(dropout=False)],
                         ids=["mlp", "attention"])
def test_a_transformer_half(graph: CDGraph) -> None:
    found = block_options(graph, OptionSettings(grid=(6, 6), time_limit=30, block_limit=120))
    check(graph, found)
    assert found.timed_out == 0
    assert found.solves < 36
    save_all = found.options[0]
    nothing = min(found.options, key=lambda o: o.saved_bytes)
    assert nothing.saved_bytes == 0
    # Half of the memory costs a small part of what recomputing everything costs.
    half = min(seconds(o) for o in found.options if 2 * o.saved_bytes <= save_all.saved_bytes)
    least = min(seconds(o) for o in found.options if o.saved_bytes == 0)
    assert half - seconds(save_all) < 0.7 * (least - seconds(save_all))
    assert peak(nothing) <= peak(save_all) or nothing.saved_bytes < save_all.saved_bytes


def test_activations_that_cost_nothing_are_dropped_first() -> None:
    graph = mlp_half()
    save_all = evaluate_option(graph, graph.backward)
    solution = BlockProgram(graph, OptionSettings()).solve(peak(save_all), save_all.saved_bytes - 1)
    assert solution.option is not None
    again = {graph.c[i].name for i in solution.option.backward if i < graph.loss}
    assert not again & {"up", "down"}, "a matrix product is redone where a cheap node would do"


def test_no_backward() -> None:
    graph = CDGraph((DNode("x", 4), DNode("y", 4)), (CNode("f", "forward", (0,), (1,), 1.0),), 1,
                    inputs=(0,), outputs=(1,)).verify()
    found = block_options(graph)
    check(graph, found)
    assert len(found.options) == 1
    assert found.options[0].backward == ()
    assert found.options[0].saved_bytes == 0
    assert found.solves == 0


def test_no_forward() -> None:
    graph = CDGraph((DNode("g", 4, "grad"), DNode("h", 4, "grad")),
                    (CNode("b", "backward", (0,), (1,), 1.0),), 0,
                    output_grads=(0,), input_grads=(1,)).verify()
    found = block_options(graph)
    check(graph, found)
    assert found.options[0].backward_peak_bytes == 8


def test_no_nodes_at_all() -> None:
    found = block_options(CDGraph((), (), 0).verify())
    assert len(found.options) == 1
    assert seconds(found.options[0]) == 0


def test_nothing_saved() -> None:
    """The backward reads only the block's input."""
    graph = CDGraph(
        (DNode("x", 4), DNode("y", 4), DNode("gy", 4, "grad"), DNode("gx", 4, "grad")),
        (CNode("f", "forward", (0,), (1,), 1.0), CNode("b", "backward", (0, 2), (3,), 1.0)), 1,
        inputs=(0,), outputs=(1,), output_grads=(2,), input_grads=(3,)).verify()
    found = block_options(graph)
    check(graph, found)
    assert found.options[0].saved_bytes == 0
    assert found.solves == 0


def test_zero_times_and_sizes() -> None:
    """Nodes that take no time and data that takes no room are no special case."""
    graph = CDGraph(
        (DNode("x", 0), DNode("a", 0), DNode("b", 4), DNode("y", 0), DNode("g", 0, "grad"),
         DNode("h", 0, "grad")),
        (CNode("f0", "forward", (0,), (1,)), CNode("f1", "forward", (1,), (2,)),
         CNode("f2", "forward", (2,), (3,)), CNode("b0", "backward", (2, 4), (5,))), 3,
        inputs=(0,), outputs=(3,), output_grads=(4,), input_grads=(5,)).verify()
    found = block_options(graph)
    check(graph, found)
    assert [o.saved_bytes for o in found.options] == [0], "recomputing for nothing beats saving"


def test_outputs_count_as_saved_by_nobody() -> None:
    """The backward of tanh reads its output, which is the block's output."""
    graph = differentiate([Op("tanh", ["x"], {"y": 8}, 1.0, ["y"])], {"x": 8}, ["y"])
    option = block_options(graph).options[0]
    assert option.saved_bytes == 0
    assert option.backward_peak_bytes == 8 + 8 + 8   # y and its gradient, and that of x


def test_a_peak_below_the_floor_is_infeasible() -> None:
    graph = mlp_half()
    floor = split_stages(graph).floor
    save_all = evaluate_option(graph, graph.backward)
    solution = BlockProgram(graph, OptionSettings()).solve(floor - 1, save_all.saved_bytes)
    assert solution.status is Status.INFEASIBLE
    assert solution.option is None
    assert solution.bound_seconds == float("inf")


def test_a_large_block_without_time_still_has_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time for any program: the heuristic's options remain, and the set says so."""
    monkeypatch.setattr(grid, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    graph = chain(60, skips=0.2)
    found = block_options(graph, OptionSettings(grid=(4, 4), time_limit=0.0, block_limit=0.5))
    check(graph, found)
    assert found.timed_out > 0
    saved = [o.saved_bytes for o in found.options]
    assert min(saved) == 0
    assert len(set(saved)) > 5


def test_a_solve_without_time_is_never_wrong() -> None:
    graph = chain(30, skips=0.2)
    save_all = evaluate_option(graph, graph.backward)
    m_peak, m_save = peak(save_all), save_all.saved_bytes // 3
    solution = BlockProgram(graph, OptionSettings(time_limit=0.0)).solve(m_peak, m_save)
    assert solution.status in (Status.TIMED_OUT, Status.FEASIBLE)
    if solution.option is not None:
        assert solution.option.saved_bytes <= m_save
        assert peak(solution.option) <= m_peak


def test_greedy_orders_save_less_and_less() -> None:
    graph = chain(30, seed=3, skips=0.2)
    stages = split_stages(graph)
    kept = [evaluate_option(graph, recompute_missing(stages, keep)) for keep in greedy_sets(stages)]
    saved = [o.saved_bytes for o in kept]
    assert saved == sorted(saved, reverse=True)
    assert saved[-1] == 0
    assert evaluate_option(graph, keep_nothing(stages)).saved_bytes == 0


def test_evictions_lower_the_peak_step_by_step() -> None:
    graph = chain(40, skips=0.2)
    stages = split_stages(graph)
    last = list(greedy_sets(stages))[-1]
    options = [evaluate_option(graph, order) for order in evictions(stages, last)]
    peaks = [o.backward_peak_bytes for o in options]
    assert len(peaks) > 5
    assert peaks == sorted(set(peaks), reverse=True)
    assert 2 * peaks[-1] < peaks[0]


def test_every_candidate_runs() -> None:
    graph = chain(25, seed=2, skips=0.3)
    orders = list(candidates(split_stages(graph)))
    assert orders
    for order in orders:
        evaluate_option(graph, order)


def test_waste_is_removed() -> None:
    graph = mlp_half()
    order = (*graph.forward, *graph.backward[:-1], *graph.forward, graph.backward[-1])
    lean = without_waste(graph, order)
    assert len(lean) < len(order)
    assert evaluate_option(graph, lean).saved_bytes <= evaluate_option(graph, order).saved_bytes


def test_dominated_options_are_dropped() -> None:
    def option(time: float, saved: int, forward: int, backward: int) -> Option:
        return Option((), (), 0.0, time, saved, forward, backward)

    best, tie, cheaper = option(1, 5, 5, 5), option(1, 5, 5, 5), option(2, 4, 5, 5)
    worse = option(2, 5, 5, 5)
    lower = option(2, 5, 4, 6)
    assert undominated([worse, cheaper, tie, best, lower]) == (best, cheaper, lower)


@pytest.mark.parametrize("wrong", [{"grid": (0, 3)}, {"grid": (3,)}, {"time_limit": -1.0},
                                   {"gap": float("nan")}, {"block_limit": float("inf")}])
def test_wrong_settings(wrong: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        OptionSettings(**wrong)  # type: ignore[arg-type]
