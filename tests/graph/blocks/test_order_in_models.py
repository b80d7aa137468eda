"""Orders of a block's computations: valid, never worse, and better where that is known."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

import rkmate
from rkmate.graph.blocks.lower import lower
from rkmate.graph.blocks.order import better_order, reordered
from rkmate.graph.blocks.partition import partition
from rkmate.graph.capture.capture import capture
from rkmate.graph.passes.table import simplify
from rkmate.ir.cd import CDGraph
from rkmate.ir.schedule import from_order
from rkmate.ir.simulate import simulate
from tests.ilp.bank import random_graph


def _at_once(graph: CDGraph) -> CDGraph:
    """The graph with parameter gradients that leave when they are made."""
    return replace(graph, releases={j: i if graph.producer[j] is None else graph.producer[j]
                                 for j, i in graph.releases.items()})


@pytest.mark.parametrize("seed", range(120))
def test_any_graph(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, 6, 7)
    random_nodes = {i for i in range(len(graph.c)) if rng.random() < 0.2}
    graph = replace(graph, c=tuple(replace(c, random=i in random_nodes) for i, c in enumerate(graph.c)))
    chain = tuple(sorted(rng.sample(range(graph.loss, len(graph.c)), 2)))
    order = better_order(graph, [chain])
    place = {i: k for k, i in enumerate(order)}
    assert sorted(order) == list(range(len(graph.c)))
    assert sorted(order[:graph.loss]) == list(graph.forward)
    for i, c in enumerate(graph.c):
        assert all(made is None or place[made] < place[i] for made in (graph.producer[j] for j in c.inputs))
    for kept in (sorted(random_nodes), chain):
        assert [place[i] for i in kept] == sorted(place[i] for i in kept)
    # `from_order` and `simulate` refuse what cannot run.
    free = _at_once(graph)
    before = simulate(free, from_order(free, range(len(graph.c)), graph.loss)).peak
    assert simulate(free, from_order(free, order, graph.loss)).peak <= before


def _parts(model: nn.Module, x: torch.Tensor, *, cut_again: bool):  # type: ignore[no-untyped-def]
    captured = capture(model, (x,), {})
    parts = partition(lower(simplify(captured, captured.differentiable)))
    return reordered(parts) if cut_again else parts


def test_the_weight_before_the_input() -> None:
    """The input of a wide layer's second product dies with that weight's gradient."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 256), nn.GELU(),
                          nn.Linear(256, 16))
    x = torch.randn(512, 16)
    peaks = []
    for again in (False, True):
        cd = _parts(model, x, cut_again=again).program.cd
        peaks.append(simulate(cd, from_order(cd, range(len(cd.c)), cd.loss)).peak)
    assert peaks[1] < 0.8 * peaks[0]


def test_identical_blocks_have_one_order() -> None:
    layers = [nn.Sequential(nn.Linear(16, 128), nn.Softplus(), nn.Linear(128, 16)) for _ in range(16)]
    model, x, counts = nn.Sequential(*layers), torch.randn(64, 16), []
    for again in (False, True):
        parts = _parts(model, x, cut_again=again)
        assert len(parts.blocks) >= 6
        counts.append(len({tuple((c.inputs, c.outputs) for c in b.graph.c) for b in parts.blocks}))
    assert counts[1] == counts[0] < len(parts.blocks)


def test_gradients_of_a_parameter_used_thrice_are_added_in_their_order() -> None:
    class Thrice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 32) / 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for k in (1, 7, 2):
                x = nn.functional.softplus(x @ self.weight) * k
            return (x @ self.weight).square().mean()

    torch.manual_seed(0)
    model, x = Thrice(), torch.randn(96, 32)
    model(x).backward()
    assert model.weight.grad is not None
    expected, model.weight.grad = model.weight.grad, None
    for budget in (1.0, 0.8):
        rkmate.wrap(model, (x,), budget=budget, progress=False)(x).backward()
        assert torch.equal(model.weight.grad, expected)
        model.weight.grad = None
