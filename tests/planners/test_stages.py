"""Stages of rotor, revolve and sequential: the children of an nn.Sequential, else the blocks."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate.graph.blocks.cut import cut
from rkmate.ir.cd import CDGraph, CNode, DNode
from rkmate.pipeline.solve import Solved
from rkmate.planners.chain import SEQUENTIAL, by_stages
from rkmate.planners.protocol import Problem, beside_chain, expand
from rkmate.rotor.replay import replay
from rkmate.rotor.rk_rotor import fastest
from tests.capturing import captured_once
from tests.equality import assert_same_step, measured_peak
from tests.models.sample import Sample, weighted_mean
from tests.options import options_of
from tests.planners.prepared import QUICK, solved_of


def children_of(solved: Solved) -> list[set[str]]:
    """For each stage, the children whose forward computations it holds."""
    found = solved.problem.stages
    assert found is not None
    chain, block_c = found
    assert len(chain) == len(block_c)
    graph, computations = solved.problem.graph, solved.summary.computations
    return [{computations[c].path.split(".")[0] for c in block if c < graph.loss}
            for block in block_c]


def layers(count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(count):
        parts += [nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16), nn.LayerNorm(16)]
    return nn.Sequential(*parts)


class Residual(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inside(x)  # type: ignore[no-any-return]


class Fork(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin(), x.cos()


class Join(nn.Module):
    def forward(self, both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return both[0] * both[1]


def test_each_child_is_a_stage() -> None:
    solved = solved_of(layers(), (torch.randn(64, 16),))
    assert children_of(solved) == [{str(k)} for k in range(12)]
    assert len(solved.problem.chain) < 12       # the blocks of the default are longer


def test_children_of_every_kind() -> None:
    """A child of views alone is no stage, one with a skip connection or with buffers is one."""
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(
        cut=nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)), relu=nn.ReLU(inplace=True),
        drop=nn.Dropout(0.2), flat=nn.Flatten(), model=nn.Linear(8 * 64, 16), block=Residual(),
        head=nn.Linear(16, 4)))
    solved = solved_of(model, (torch.randn(4, 3, 8, 8),))
    assert children_of(solved) == [{"cut"}, {"relu"}, {"drop"}, {"model"}, {"block"}, {"head"}]


def test_several_tensors_between_children_join_them() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Fork(), Join(), nn.Linear(16, 16))
    assert children_of(solved_of(model, (torch.randn(8, 16),))) == [{"0"}, {"1", "2"}, {"3"}]


def test_a_child_that_is_called_twice() -> None:
    shared = Residual()
    model = nn.Sequential(shared, nn.LayerNorm(16), shared, nn.Linear(16, 4))
    assert [len(names) for names in children_of(solved_of(model, (torch.randn(8, 16),)))] == [1, 1, 1, 1]


class Backwards(nn.Sequential):
    """Calls its children from the last to the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in reversed(self):
            x = child(x)
        return x


def test_the_stages_of_other_models_are_their_blocks() -> None:
    for model in (Residual(), Backwards(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))):
        problem = solved_of(model, (torch.randn(8, 16),)).problem
        assert problem.stages is None
        assert by_stages(problem).block_c == problem.block_c


def test_the_chain_of_stages_costs_what_the_graph_costs() -> None:
    solved = solved_of(layers(), (torch.randn(64, 16),))
    own = by_stages(solved.problem)
    ops = fastest(own.chain)
    order, loss_at = expand(own, ops)
    assert order == list(range(len(own.graph.c))) and loss_at == own.graph.loss
    whole = own.simulate(own.schedule(order, loss_at))
    cost = replay(own.chain, ops)
    assert cost.seconds == pytest.approx(whole.seconds)
    # Block by block, what the chain counts is never below what the simulator sees.
    assert whole.peak <= cost.peak_bytes + beside_chain(solved.problem) + own.graph.reserve_at_loss


def test_segments_are_those_of_checkpoint_sequential() -> None:
    """Two segments of twelve children: the first six run again, as torch has it."""
    solved = solved_of(layers(), (torch.randn(64, 16),))
    problem = solved.problem
    computations = solved.summary.computations
    again = {}
    for part in (10, 9, 8, 7, 6, 5, 4):
        outcome = SEQUENTIAL.plan(problem, solved.prepared.baseline.peak * part // 10)
        if outcome.schedule is not None:
            again[outcome.note] = {int(computations[c].path.split(".")[0])
                                   for c in outcome.schedule.recomputed()}
    assert again["2 segments"] <= set(range(6)) and {1, 2, 3} <= again["2 segments"]


@pytest.mark.filterwarnings("ignore:the loss that is computed from the outputs")
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", ["rotor", "revolve", "sequential"])
def test_same_step(name: str) -> None:
    def sample() -> Sample:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.3), nn.ReLU(inplace=True), Residual(32),
                              nn.BatchNorm1d(32), Fork(), Join(), nn.Linear(32, 16), nn.GELU(),
                              nn.Linear(16, 16))
        return Sample(model, (torch.randn(64, 16, requires_grad=True),), {}, weighted_mean(64, 16))

    planned, original = sample(), sample()

    def wrapped(budget: Any) -> rkmate.PlannedModule:
        # Analytic costs know of no temporary memory: the peak is held by measured ones.
        return rkmate.wrap(planned.model, planned.args, budget=budget,
                           progress=False, **options_of(settings=QUICK, planner=name, costs="measured"))

    with captured_once():
        try:
            rk = wrapped(1)
        except rkmate.InfeasibleBudget as error:
            rk = wrapped(error.minimum_bytes)
    assert rk.plan.schedule.recomputed()
    assert_same_step(original.model, rk, original)
    assert measured_peak(rk, planned) <= rk.plan.budget_bytes


def line(backward: tuple[int, int]) -> CDGraph:
    """Two forward nodes, and two backward nodes that read the one or the other's value."""
    d = (DNode("a", 4), DNode("b", 4), DNode("g", 4, "grad"), DNode("s", 4, "grad"), DNode("t", 4, "grad"))
    c = (CNode("a", "forward", (), (0,)), CNode("b", "forward", (0,), (1,)),
         CNode("s", "backward", (2, backward[0]), (3,)), CNode("t", "backward", (2, backward[1]), (4,)))
    return CDGraph(d, c, 2, (), (1,), (2,), (3, 4)).verify()


@pytest.mark.parametrize(("origin", "count"), [((1, 0), 2), ((0, 1), 1)])
def test_stages_keep_the_order_of_the_backward(origin: tuple[int, int], count: int) -> None:
    """Where the graph runs an earlier stage's backward first, the two stages are one."""
    graph = line((0, 0))
    found = cut(graph, frozenset(), [None, None, *origin], (), stages=["x", "y", None, None])
    assert found.count == count


def test_problems_without_a_model_have_no_stages() -> None:
    graph = line((0, 0))
    assert Problem(graph, None, ()).stages is None  # type: ignore[arg-type]
