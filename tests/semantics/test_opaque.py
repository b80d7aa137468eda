"""Submodules that run as they are inside of a plan: experts that pick their rows, and others."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rkmate
from rkmate.graph.capture.opaque import BACKWARD, FORWARD
from rkmate.measure.analytic import least_bytes
from rkmate.measure.step import measure_peak
from rkmate.measure.temporaries import _known
from rkmate.pipeline.prepare import block, trace, with_operation_costs
from rkmate.support.progress import Progress
from tests.semantics.steps import planned

AUTO = rkmate.Settings(opaque="auto")
pytestmark = pytest.mark.filterwarnings("ignore:.*each call runs as it is:rkmate.RkmateWarning")


class TopTwo(nn.Module):
    """As it is written by hand: each expert gets the rows that chose it."""

    def __init__(self, width: int = 16, experts: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))
                                     for _ in range(experts))
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, places = self.gate(x).softmax(-1).topk(2, -1)
        result = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            row, place = torch.where(places == i)
            result.index_add_(0, row, F.dropout(expert(x[row]), self.dropout) * weights[row, place, None])
        return result


class Network(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dense = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
                                   for _ in range(2))
        self.routed = nn.ModuleList(TopTwo(dropout=dropout) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for dense, routed in zip(self.dense, self.routed, strict=True):
            x = dense(x)
            x = routed(x)
        return x.square().mean()


@functools.cache
def _network(budget: float) -> tuple[nn.Module, rkmate.PlannedModule]:
    torch.manual_seed(0)
    original = Network(dropout=0.1)
    return original, planned(copy.deepcopy(original), torch.randn(128, 16), budget=budget, settings=AUTO)


def _step(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(5)
    module.zero_grad()
    result = module(*args, **kwargs)
    loss = result if isinstance(result, torch.Tensor) else result.loss
    loss.backward()
    return loss.detach(), torch.get_rng_state()


def _assert_same(original: nn.Module, module: nn.Module, *args: Any, exact: bool = True,
                 **kwargs: Any) -> None:
    (loss, state), (other, after) = _step(original, *args, **kwargs), _step(module, *args, **kwargs)
    assert torch.equal(loss, other)
    assert torch.equal(state, after)
    for (name, p), q in zip(original.named_parameters(), module.parameters(), strict=True):
        # An expert that no row has chosen has no gradient in eager mode, and zeros in a plan.
        expected = torch.zeros_like(p) if p.grad is None else p.grad
        assert q.grad is not None, name
        assert torch.equal(expected, q.grad) if exact else torch.allclose(expected, q.grad, 1e-4, 1e-6), name


@pytest.mark.parametrize("budget", [1.0, 0.6])
def test_a_router_by_hand(budget: float) -> None:
    original, module = _network(budget)
    for seed in range(2):                   # other rows for each expert, and the same plan
        torch.manual_seed(seed)
        # What goes into gate and experts gets its gradients in another order of sums.
        _assert_same(original, module, torch.randn(128, 16), exact=False)
    assert module.source.count("rkmate_opaque(") >= 2


@pytest.mark.parametrize("budget", [1.0, 0.6])
def test_its_peak_is_within_the_budget(budget: float) -> None:
    _, module = _network(budget)
    x = torch.randn(128, 16)
    _step(module, x)
    module.zero_grad(set_to_none=False)
    peak = measure_peak(lambda: module(x).backward()).peak
    assert peak <= module.plan.budget_bytes
    assert peak <= module.plan.peak_bytes


def test_memory_inside_is_measured_on_the_values_of_each_sample() -> None:
    """Costs of an equal model are known by then, and rows that all choose alike take more."""
    for x in (torch.randn(128, 16), torch.randn(1, 16).repeat(128, 1)):
        module = rkmate.wrap(Network(), (x,), budget=1.0, progress=False, settings=AUTO)
        _step(module, x)
        module.zero_grad(set_to_none=False)
        assert measure_peak(lambda: module(x).backward()).peak <= module.plan.peak_bytes


def test_a_small_budget_sees_the_same_rows() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), TopTwo(experts=4), TopTwo(experts=4))
    settings = replace(AUTO, trains="all")
    traced = trace(model, (torch.randn(8, 16).repeat(8, 1),), {}, settings, Progress(False))
    blocked = block(traced)
    found = [[c.overhead for i, c in sorted(with_operation_costs(blocked, limit=limit).costs.items())
              if blocked.partition.program.operation[i].target in (FORWARD, BACKWARD)]
             for limit in (lambda blocked: least_bytes(blocked.partition), None)]
    assert found[0] == found[1]


def test_layers_that_are_alike_are_solved_once() -> None:
    _, module = _network(1.0)
    graph = module.plan.graph
    operations = [c for c, of in zip(graph.cd.c, graph.computations, strict=True) if of.operation == "opaque"]
    assert len(operations) == 2
    assert len({c.time for c in operations}) == 1


def test_a_notice_names_them() -> None:
    with pytest.warns(rkmate.RkmateWarning, match=r"routed\.0, routed\.1 of Network cannot be traced"):
        planned(Network(), torch.randn(8, 16), settings=AUTO)


def test_the_error_names_the_setting() -> None:
    with pytest.raises(rkmate.CaptureError, match=r'Settings\(opaque="auto"\)'):
        planned(Network(), torch.randn(8, 16))


def test_submodules_by_name() -> None:
    module = planned(Network(), torch.randn(8, 16), settings=rkmate.Settings(opaque=("routed.*",)))
    assert module.source.count("rkmate_opaque(") >= 2
    with pytest.raises(rkmate.ArgumentError, match=r"'layers\.\*'.*no such submodule"):
        planned(Network(), torch.randn(8, 16), settings=rkmate.Settings(opaque=("layers.*",)))


class Rows(nn.Module):
    """Returns as many rows as there are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x[:, 0] > 0]


class Around(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.rows = Rows()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(super().forward(x)).sum(0)


def test_where_shapes_leave_a_submodule_the_one_around_it_runs() -> None:
    torch.manual_seed(0)
    original = nn.Sequential(nn.Linear(8, 8), Around(), nn.Linear(8, 1))
    module = planned(copy.deepcopy(original), torch.randn(6, 8), settings=AUTO)
    assert "rkmate_opaque('1'" in module.source.replace('"', "'")
    with pytest.raises(rkmate.CaptureError):
        planned(Around(), torch.randn(6, 8), settings=AUTO)


class Counting(nn.Module):
    """Writes a buffer, which a second run in the backward would write again."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x * 2 if x.sum() > 0 else x


def test_a_submodule_that_writes_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Counting())
    with pytest.raises(rkmate.CaptureError, match=r"1 cannot run as it is.*writes"):
        planned(model, torch.randn(6, 8), settings=AUTO)
    assert model[1].seen == 0
    assert "forward" not in vars(model[1])


class Keeping(nn.Linear):
    """Counts its calls, and keeps the latest result."""

    calls = 0
    latest: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.latest = super().forward(x)
        return self.latest


def test_the_attribute_with_a_tensor_is_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Keeping(8, 8))
    with pytest.raises(rkmate.CaptureError, match=r"1 cannot run as it is.*leaves tensors in latest"):
        planned(model, torch.randn(6, 8), settings=rkmate.Settings(opaque=("1",)))
    assert model[1].calls == 0 and model[1].latest is None


class Moved(nn.Linear):
    """As some routers: to the type that it has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super(Moved, self.to(torch.float32)).forward(x)


def test_a_move_that_moves_nothing_is_no_matter() -> None:
    torch.manual_seed(0)
    original, x = nn.Sequential(Moved(8, 8), nn.Linear(8, 1), nn.Flatten(0)), torch.randn(4, 8)
    module = planned(copy.deepcopy(original), x)
    original(x).sum().backward()
    module(x).sum().backward()
    for p, q in zip(original.parameters(), module.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def _mixtral() -> tuple[nn.Module, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32))
    model.set_experts_implementation("eager")
    ids = torch.randint(0, 32, (2, 8))
    return model.train(), {"input_ids": ids, "labels": ids, "use_cache": False}


def _switch() -> tuple[nn.Module, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    model = transformers.SwitchTransformersForConditionalGeneration(transformers.SwitchTransformersConfig(
        vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_decoder_layers=1, num_heads=2,
        num_experts=4, expert_capacity=8, num_sparse_encoder_layers=1, num_sparse_decoder_layers=0,
        decoder_start_token_id=0))
    ids = torch.randint(0, 32, (2, 8))
    return model.train(), {"input_ids": ids, "labels": ids}


@pytest.mark.slow
@pytest.mark.parametrize("make", [_mixtral, _switch])
@pytest.mark.parametrize("budget", [1.0, 0.9])
def test_mixtures_of_experts_of_transformers(make: Any, budget: float) -> None:
    torch.manual_seed(0)
    original, inputs = make()
    module = rkmate.wrap(copy.deepcopy(original), (), inputs, budget=budget, progress=False, settings=AUTO)
    _assert_same(original, module, **inputs)
    module.zero_grad(set_to_none=False)
    assert measure_peak(lambda: module(**inputs).loss.backward()).peak <= module.plan.budget_bytes


class Small(nn.Module):
    """Takes the branch that the values say."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if x.sum() > 0 else x


def test_equal_operations_next_to_an_opaque_call_are_measured() -> None:
    """The second of them asks for estimates, for which the call runs: not inside of a measurement."""
    model = nn.Sequential(*(nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8), Small()) for _ in range(3)),
                          nn.Linear(8, 2))
    settings = rkmate.Settings(opaque=("*.2",))
    _known.clear()
    assert len(rkmate.tradeoff(model, (torch.randn(64, 8),), settings=settings, progress=False))


def test_the_state_of_generators_is_never_made_up() -> None:
    """It is larger than the whole budget of a small model, and is let go while operations are measured."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(9, 9), Small(9), nn.Linear(9, 9)) for _ in range(2)))
    settings = rkmate.Settings(opaque=("*.1",))
    assert rkmate.plan(model, (torch.randn(4, 9),), budget=1.0, settings=settings, progress=False).costs
