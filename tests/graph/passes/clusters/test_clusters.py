"""Groups of operations: which there are, and that a step with them is the same.

Most tests run the groups' own functions without compiling them: these call the same kernels as the original,
so that all bits have to be the original's.
"""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import rkmate
from rkmate.device import inductor
from rkmate.device.events import profiling
from rkmate.graph.passes import fusion
from rkmate.ir.cd import Cost
from rkmate.measure import temporaries
from rkmate.measure.settings import MeasureSettings
from rkmate.pipeline.prepare import Prepared
from rkmate.pipeline.settings import Settings
from tests.capturing import captured_once
from tests.equality import assert_same_step, fresh_inputs, measured_peak, trace_step
from tests.models import BANK, Sample
from tests.options import options_of
from tests.random_modules import test_random_modules as random_modules
from tests.threads import threads

pytestmark = pytest.mark.xdist_group("clusters")        # they share what was compiled
aten = torch.ops.aten
QUICK = Settings(measure=MeasureSettings(passes=1, repeats=1), compile=True, layouts="keep")


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch, deterministic: None) -> Iterator[None]:
    """Groups run as they are written; what groups take then is not what compiled ones take, nor counted."""
    monkeypatch.setattr(inductor, "_compiled", lambda function, forms: lambda tensors: function(*tensors))
    monkeypatch.setattr(temporaries, "_bytes", lambda group, threads: 0)
    monkeypatch.setattr(inductor, "_known", type(inductor._known)())
    fusion._loaded.cache_clear()
    yield
    fusion._loaded.cache_clear()


def new_gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0))))


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(width), nn.Linear(width, 128), nn.Linear(128, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.back(new_gelu(self.wide(self.norm(x)))), 0.1)


@functools.cache
def _layers(count: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(16) for _ in range(count)))


def layers(count: int = 3) -> Sample:
    torch.manual_seed(1)
    weights = torch.randn(4, 24, 16)
    return Sample(copy.deepcopy(_layers(count)), (torch.randn(4, 24, 16),), {},
                  lambda y: (y * weights).mean())


def wrap(sample: Sample, budget: float | int = 1.0, **more: Any) -> rkmate.PlannedModule:
    return rkmate.wrap(sample.model, sample.args, sample.kwargs, budget=budget, progress=False,
                       **options_of(**{"settings": QUICK, **more}))


def test_equal_layers_share_their_groups(uncompiled: None) -> None:
    plan, deeper = (wrap(layers(n), costs="analytic").plan for n in (3, 5))
    activation = "mul, pow, mul, add, mul, tanh, add, mul"
    assert (dict(plan.fused)[activation], dict(deeper.fused)[activation]) == (3, 5)
    assert [names for names, _ in plan.fused] == [names for names, _ in deeper.fused]
    assert plan.compiled.startswith("inductor of torch")


@pytest.mark.parametrize("depths", [(3, 5), pytest.param((6, 12, 24), marks=pytest.mark.slow)])
def test_as_many_groups_are_compiled_for_any_depth(uncompiled: None, monkeypatch: pytest.MonkeyPatch,
                                                   depths: tuple[int, ...]) -> None:
    counts = []
    for depth in depths:
        monkeypatch.setattr(inductor, "_known", {})
        fusion._loaded.cache_clear()
        before = inductor.compiled
        wrap(layers(depth), costs="analytic")
        counts.append(inductor.compiled - before)
    assert len(set(counts)) == 1 and counts[0] > 0


def test_each_size_is_compiled_once(uncompiled: None) -> None:
    """Also of another plan."""
    def step(batch: int) -> int:
        before = inductor.compiled
        wrapped(torch.randn(batch, 24, 16)).sum().backward()
        return inductor.compiled - before

    wrapped = wrap(layers(1), costs="analytic")
    assert step(4) == 0
    assert step(2) > 0
    assert step(4) == step(2) == 0
    wrapped = wrap(layers(1), costs="analytic")
    assert step(4) == step(2) == 0


def test_another_number_of_threads_has_kernels_of_its_own() -> None:
    """A kernel is compiled for a number of threads."""
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x + 1,)

    here = inductor.fused("float32[2]")(function)
    assert inductor.fused("float32[2]")(function) is here
    with threads(torch.get_num_threads() + 1):
        assert inductor.fused("float32[2]")(function) is not here


def test_another_default_type_has_kernels_of_its_own() -> None:
    """A number that Python has written takes it."""
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * 0.5,)

    here = inductor.fused("int64[2]")(function)
    torch.set_default_dtype(torch.float64)
    try:
        assert inductor.fused("int64[2]")(function) is not here
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_largest_batch(uncompiled: None) -> None:
    found = rkmate.max_batch_size(layers(1).model, lambda n: (torch.randn(n, 24, 16),), most=1,
                                  device_memory="2MiB", settings=Settings(costs="analytic"), progress=False,
                                  compile=True)
    assert found.plan.compiled and found.plan.fused


def test_the_backward_computes_again_rather_than_reads(uncompiled: None) -> None:
    """Of the activation, its input stays: not its third power, nor its tangent."""
    without = rkmate.plan(layers().model, layers().args, budget=1.0, settings=Settings(costs="analytic"),
                          progress=False)
    compiled = rkmate.plan(layers().model, layers().args, budget=1.0, settings=Settings(costs="analytic"),
                           progress=False, compile=True)
    assert not without.compiled
    assert without.fused == ()
    one = 4 * 24 * 128 * 4
    assert without.peak_bytes - compiled.peak_bytes > 3 * 3 * one


def test_the_source_shows_what_is_fused(uncompiled: None) -> None:
    source = wrap(layers(), costs="analytic").source
    assert "from rkmate.device.inductor import fused" in source
    assert '@fused("float32[96, 128]")' in source
    assert "tanh = aten.tanh.default(" in source
    assert source.count("aten.tanh.default(") == 2         # of the forward, and again in the backward


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1.0, 0.9])
def test_the_same_step(uncompiled: None, budget: float) -> None:
    """Dropout draws what it draws without groups, also where the plan draws it again. (What is not compiled
    holds all values of a group at once.)"""
    sample, original = layers(), layers()
    wrapped = wrap(sample, budget)
    assert_same_step(original.model, wrapped, original)
    assert measured_peak(wrapped, sample) <= wrapped.plan.budget_bytes


SLOW = [n for n in BANK if n != "tied"]


@pytest.mark.parametrize("budget", [pytest.param(1.0, marks=pytest.mark.slow), 0.7])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in BANK])
def test_the_bank(uncompiled: None, name: str, budget: float) -> None:
    sample, original = BANK[name](), BANK[name]()
    with captured_once(name):
        wrapped = wrap(sample, budget)
    assert_same_step(original.model, wrapped, original)
    assert measured_peak(wrapped, sample) <= wrapped.plan.budget_bytes


@pytest.mark.filterwarnings("ignore:the loss that is computed from the outputs")
def test_random_modules(uncompiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_modules, "QUICK", QUICK)
    random_modules.examples(3, 21)


@pytest.mark.slow
def test_many_random_modules(uncompiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_modules, "QUICK", QUICK)
    random_modules.examples(150, 22)


class Heads(nn.Module):
    """A trunk whose gradient is a sum over heads: one group reads those of all heads at once."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 64), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(64, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.trunk(x)
        return sum(head(h).square().mean() for head in self.heads)  # type: ignore[return-value]


def test_a_budget_that_groups_do_not_meet_is_met_without_them(uncompiled: None, tmp_path: Path,
                                                              caplog: pytest.LogCaptureFixture) -> None:
    model, x = Heads(), torch.randn(128, 16)
    least = []
    for compiled in (False, True):
        with pytest.raises(rkmate.InfeasibleBudget) as error:
            rkmate.plan(model, (x,), budget=1, **options_of(
                costs="analytic", tiles="never", compile=compiled, progress=False))
        least.append(error.value.minimum_bytes)
    assert least[0] == least[1]
    options = options_of(costs="analytic", tiles="never", compile=True, progress=False)
    module = rkmate.wrap(copy.deepcopy(model), (x,), budget=least[0], **options)
    assert module.plan.variant == "uncompiled" and not module.plan.fused
    assert "nothing is compiled" in module.plan.note and "without compiled groups" in caplog.text
    module.plan.save(tmp_path / "plan.json")
    loaded = rkmate.wrap(copy.deepcopy(model), (x,), plan=rkmate.Plan.load(tmp_path / "plan.json"), **options)
    assert loaded.plan.variant == "uncompiled"
    for each in (module, loaded):
        assert_same_step(copy.deepcopy(model), each, Sample(each, (x,), {}, lambda loss: loss))
    more = rkmate.plan(model, (x,), budget=1.0, **options)
    assert more.variant == "plain" and more.fused


def test_the_smallest_budget_is_met_where_a_group_needs_more_next_to_the_step(
        uncompiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that makes a buffer's new value and a result counts as a result of the buffer's old value."""
    x = torch.randn(128, 16)
    monkeypatch.setattr(Prepared, "beside", property(lambda p: 64 * (p.blocked.variant.name == "plain")))
    options = options_of(costs="analytic", tiles="never", compile=True, progress=False)
    with pytest.raises(rkmate.InfeasibleBudget) as error:
        rkmate.plan(Heads(), (x,), budget=1, **options)
    assert rkmate.plan(Heads(), (x,), budget=error.value.minimum_bytes, **options).variant == "uncompiled"


def test_a_loss_of_other_outputs_while_a_step_is_measured(deterministic: None) -> None:
    """The plan for it is made in the backward, where memory is being measured already."""
    class Two(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            y = super().forward(x)
            return y.sin() * 2, y.cos() + 1

    torch.manual_seed(0)
    x, model = torch.randn(4, 8), Two(8, 8)
    module = rkmate.wrap(copy.deepcopy(model), (x,), budget=1.0, progress=False, compile=True)
    for k in (0, 1, 0):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", rkmate.RkmateWarning)
            module(x)[k].pow(2).sum().backward()
        model(x)[k].pow(2).sum().backward()
        torch.testing.assert_close(module.original.weight.grad, model.weight.grad)


def test_a_saved_plan(uncompiled: None, tmp_path: Path) -> None:
    sample = layers()
    plan = wrap(sample, costs="analytic").plan
    plan.save(tmp_path / "plan.json")
    loaded = rkmate.Plan.load(tmp_path / "plan.json")
    assert (loaded.compiled, loaded.fused) == (plan.compiled, plan.fused)
    assert wrap(sample, None, plan=loaded).plan.schedule == plan.schedule  # type: ignore[arg-type]
    with pytest.raises(rkmate.PlanError, match="compile=True"):
        wrap(sample, None, plan=loaded, compile=False)  # type: ignore[arg-type]


def test_what_a_plan_of_another_torch_says(uncompiled: None, tmp_path: Path,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    sample = layers()
    plan = wrap(sample, costs="analytic").plan
    monkeypatch.setattr(torch, "__version__", "2.99")
    with pytest.warns(rkmate.RkmateWarning, match="compiled anew"):
        wrap(sample, None, plan=plan)  # type: ignore[arg-type]


# -- one group --------------------------------------------------------------------------


def test_each_result_has_a_storage_of_its_own(uncompiled: None) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x + 1
        return y, y, x, torch.cat([x, y])[:2]

    x = torch.ones(2, 3)
    results = inductor.fused("float32[2, 3]")(function)(x)
    storages = [t.untyped_storage() for t in (x, *results)]
    assert len({s.data_ptr() for s in storages}) == 5
    assert {s.nbytes() for s in storages} == {24}
    assert [float(r[0, 0]) for r in results] == [2, 2, 1, 1]


def sines() -> fusion.Cluster:
    """Three operations on 256 numbers."""
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for function in (aten.sin.default, aten.cos.default, aten.exp.default):
        nodes.append(graph.call_function(function, (nodes[-1],)))
    for node in nodes:
        node.meta["val"] = torch.empty(256)
    graph.output((nodes[-1],))
    return fusion.Cluster(graph)


def test_counted_costs_know_what_a_group_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is written, this one holds two values beside its result."""
    monkeypatch.setattr(inductor, "_compiled", lambda function, forms: lambda tensors: function(*tensors))
    monkeypatch.setattr(inductor, "_known", {})
    fusion._loaded.cache_clear()
    temporaries._bytes.cache_clear()
    group = sines()
    graph = fx.Graph()
    node, other = graph.call_function(group), graph.call_function(aten.sin.default)
    costs = {0: Cost(1.0, 16), 1: Cost(1.0, 16)}
    found = temporaries.with_memory_of_groups([node, other], costs)
    assert found == {0: Cost(1.0, 2048), 1: Cost(1.0, 16)}
    temporaries._bytes.cache_clear()
    with profiling(), pytest.warns(rkmate.RkmateWarning, match="compiled groups cannot be measured now"):
        assert temporaries.with_memory_of_groups([node, other], costs) == costs
    temporaries._bytes.cache_clear()
    fusion._loaded.cache_clear()


def test_other_strides_than_were_traced(uncompiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a compiled kernel looks at them is a switch of inductor's."""
    monkeypatch.setattr(inductor, "TOLD", 0)
    seen = []

    def function(x: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen.append((x.stride(), row.stride()))
        return (x * 2 + row,)

    x, row = torch.arange(6.0).view(2, 3), torch.ones(1, 6)[:, ::2]
    fused = inductor.fused("float32[2, 3] by [1, 2]", "float32[1, 3] by [3, 2]")(function)
    with pytest.warns(rkmate.RkmateWarning, match="function, a compiled.* 24 bytes are copied"):
        (result,) = fused(x, row)
    assert torch.equal(result, x * 2 + 1) and torch.equal(fused(x, row)[0], result)      # said once
    assert seen == [((1, 2), row.stride())] * 2


@pytest.mark.parametrize("value", [torch.empty(()), torch.empty(2, 3, dtype=torch.bool),
                                   torch.empty(3, 2, dtype=torch.bfloat16).t(), torch.empty(1, 4)[:, :1]])
def test_forms_are_read_back(value: torch.Tensor) -> None:
    dtype, device, shape, strides = inductor._read(inductor.form_of(value))
    assert (dtype, device, tuple(shape), tuple(strides)) == (value.dtype, "cpu", value.shape, value.stride())


# -- compiled ---------------------------------------------------------------------------


def assert_close_step(original: Sample, wrapped: nn.Module, tolerance: float = 1e-4) -> None:
    """Loss, gradients and random state of a step, within what float32 can tell."""
    expected, actual = trace_step(original.model, original, 7), trace_step(wrapped, original, 7)
    torch.testing.assert_close(actual.loss, expected.loss, rtol=tolerance, atol=tolerance)
    for name, gradient in expected.gradients.items():
        if gradient is not None:
            largest = max(float(gradient.abs().max()), 1e-6)
            torch.testing.assert_close(actual.gradients[name], gradient, rtol=tolerance,
                                       atol=tolerance * largest, msg=lambda m, name=name: f"{name}: {m}")
    for name, buffer in expected.buffers.items():
        torch.testing.assert_close(actual.buffers[name], buffer, rtol=tolerance, atol=tolerance)
    assert torch.equal(expected.random_state, actual.random_state)


@pytest.mark.slow
def test_a_compiled_step() -> None:
    """Equal layers are compiled once, and a second plan compiles nothing."""
    sample, original = layers(), layers()
    before = inductor.compiled
    wrapped = wrap(sample)
    made = inductor.compiled - before
    assert made <= len(wrapped.plan.fused)
    assert_close_step(original, wrapped)
    assert measured_peak(wrapped, sample) <= wrapped.plan.budget_bytes
    small = wrap(layers(), 0.5)
    assert inductor.compiled == before + made
    assert_close_step(layers(), small)


def test_a_decomposition_with_a_scalar() -> None:
    """The gradient of a ReLU is made of a scalar that no argument has."""
    def function(x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        halved = aten.div.Scalar(g, 2.0)
        return (aten.threshold_backward.default(halved, x, 0),)

    x, g = torch.randn(4, 8), torch.randn(4, 8)
    (result,) = inductor.fused("float32[4, 8]", "float32[4, 8]")(function)(x, g)
    torch.testing.assert_close(result, torch.where(x > 0, g / 2, 0.0))


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1.0, 0.7])
@pytest.mark.parametrize("name", ["gpt2", "resnet", "t5", "regnet", "views"])
def test_compiled_models(name: str, budget: float) -> None:
    sample, original = BANK[name](), BANK[name]()
    with captured_once(name):
        wrapped = wrap(sample, budget)
    assert_close_step(original, wrapped, 1e-3)
    fresh_inputs(sample)
    assert measured_peak(wrapped, sample) <= wrapped.plan.budget_bytes


_IN_A_PROCESS = """
import sys, torch, rkmate
from pathlib import Path
from torch import fx, nn
from torch._dynamo.utils import counters
import torch._inductor.codecache as codecache
from rkmate.device import inductor
from rkmate.device.events import profiling
path, torchs_key = Path(sys.argv[1]), sys.argv[2]
if torchs_key:
    codecache.torch_key = torchs_key.encode
    torch.version.git_version = torchs_key
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Sigmoid(), nn.Tanh(), nn.Linear(16, 8))
x = torch.randn(4, 8)
how = {"plan": rkmate.Plan.load(path)} if path.exists() else {"budget": 1.0}
wrapped = rkmate.wrap(model, (x,), compile=True, progress=False, **how,
                      settings=rkmate.Settings(costs="analytic"))
wrapped(x).sum().backward()
wrapped.plan.save(path)
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"],
      inductor.compiled)
"""


@pytest.mark.slow
def test_a_second_process_finds_what_was_compiled(tmp_path: Path) -> None:
    """Also one that follows a saved plan; but not one of another version of torch."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
           "RKMATE_CACHE_DIR": str(tmp_path / "own")}
    plan, other = tmp_path / "plan.json", tmp_path / "other.json"

    def run(path: Path, key: str = "") -> list[str]:
        return subprocess.run([sys.executable, "-c", _IN_A_PROCESS, str(path), key], capture_output=True,
                              text=True, check=True, env=env).stdout.split()

    first, second, followed = run(plan), run(other), run(plan)
    groups = first[1]
    assert first == ["0", groups, groups] and int(groups) > 0
    assert second == followed == [groups, "0", groups]
    assert run(plan, "another torch") == first
