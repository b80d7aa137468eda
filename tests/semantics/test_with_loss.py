"""A loss that is computed outside of the module, planned with it: `with_loss`, and `wrap(..., loss=)`."""

from __future__ import annotations

import copy
import functools
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import rkmate
import rkmate.dtr
from rkmate.cli.main import main
from rkmate.device import cpu
from rkmate.measure.step import measure_peak
from rkmate.pipeline.prepare import trace
from rkmate.pipeline.settings import Settings
from rkmate.runtime.executable import PlannedStep
from rkmate.support.progress import Progress
from tests.options import options_of
from tests.semantics.steps import Tower, gradients, planned

CLASSES = 10


class Net(nn.Module):
    """A classifier."""

    def __init__(self, dropout: float = 0.1, depth: int = 3) -> None:
        super().__init__()
        self.tower, self.head = Tower(16, depth, dropout), nn.Linear(16, CLASSES)
        self.register_buffer("seen", torch.zeros(()))
        self.scale = 1.0
        self.config = SimpleNamespace(name="net")

    def forward(self, x: torch.Tensor, *, shift: float = 0.0) -> torch.Tensor:
        return self.head(self.tower(x)) * self.scale + shift


class Warm(nn.Module):
    """A loss with a parameter, a buffer and a train flag of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("weight", torch.linspace(0.5, 2, CLASSES))
        self.noise = nn.Dropout(0.2)

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        loss = F.cross_entropy(self.noise(logits) / self.temperature, labels, self.weight)
        return {"parts": [squares(logits).detach()], "loss": loss}


def squares(out: torch.Tensor) -> torch.Tensor:
    return out.pow(2).mean()


def as_dict(out: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
    near, small = F.cross_entropy(out, labels), squares(out)
    return {"parts": {"near": near, "small": small}, "loss": near + 0.1 * small}


def as_tuple(out: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    found = as_dict(out, labels)
    return found["loss"], found["parts"]


def total(found: Any) -> torch.Tensor:
    found = found["loss"] if isinstance(found, dict) else found
    loss: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return loss


def batch(rows: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 16, generator=generator), torch.randint(0, CLASSES, (rows,), generator=generator)


# -- without a plan -----------------------------------------------------------------------

def test_stands_in_the_models_place() -> None:
    model, (x, y) = Net(), batch()
    lossy = rkmate.with_loss(model, nn.CrossEntropyLoss())
    assert lossy.original is model
    assert list(lossy.state_dict()) == list(model.state_dict())
    assert [n for n, _ in lossy.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert all(p is q for p, q in zip(lossy.parameters(), model.parameters(), strict=True))
    assert lossy.config is model.config and lossy.tower is model.tower
    assert "CrossEntropyLoss" in repr(lossy)
    lossy.scale = 2.0
    lossy.head = nn.Linear(16, CLASSES)
    assert model.scale == 2.0 and lossy.head is model.head and model.head in set(lossy.modules())
    assert not lossy.eval().training and not model.tower.training and not lossy.loss_fn.training
    assert torch.equal(lossy(x, loss_args=(y,)), F.cross_entropy(model(x), y))
    assert torch.equal(lossy(x, shift=1.0, loss_kwargs={"target": y}),
                       F.cross_entropy(model(x, shift=1.0), y))
    lossy.load_state_dict(Net().state_dict())
    model.train()
    assert lossy.training and lossy.tower.training


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_loss_with_parameters_is_a_submodule(copied: Callable[[nn.Module], nn.Module]) -> None:
    model, loss, (x, y) = Net(), Warm(), batch()
    lossy = rkmate.with_loss(model, loss)
    own = ["loss_fn.temperature", "loss_fn.weight"]
    assert list(lossy.state_dict()) == [*model.state_dict(), *own]
    assert "loss_fn" not in dict(model.named_modules())
    assert [n for n, _ in lossy.named_parameters()] == [*(n for n, _ in model.named_parameters()), own[0]]
    other = copied(lossy)
    assert other.original.head is other.head is not model.head
    assert other.loss_fn.temperature is not loss.temperature
    other.eval().double().load_state_dict(lossy.state_dict())
    assert other.head.weight.dtype == other.loss_fn.weight.dtype == torch.float64
    lossy.eval()
    torch.testing.assert_close(total(other(x.double(), loss_args=(y,))).float(),
                               total(lossy(x, loss_args=(y,))))
    lossy.loss_fn = nn.CrossEntropyLoss()
    assert torch.equal(lossy(x, loss_args=(y,)), F.cross_entropy(model(x), y))
    assert not hasattr(model, "loss_fn") and list(lossy.state_dict()) == list(model.state_dict())


def test_submodules_replaced_in_the_dictionary() -> None:
    """As libraries do that quantise layers: ``module._modules[name] = ...``."""
    model, (x, y) = Net(0.0), batch()
    lossy = rkmate.with_loss(model, Warm())
    lossy._modules["loss_fn"] = nn.CrossEntropyLoss()
    lossy._modules["extra"] = nn.ReLU()
    assert list(lossy._modules) == [*model._modules, "loss_fn"] and "extra" in model._modules
    assert len(lossy._modules) == len(model._modules) + 1
    assert torch.equal(lossy(x, loss_args=(y,)), F.cross_entropy(model(x), y))
    del lossy._modules["extra"]
    assert lossy._modules.copy() == {**model._modules, "loss_fn": lossy.loss_fn}
    assert not hasattr(model, "extra") and not hasattr(model, "loss_fn")


def test_a_loss_of_the_models_own_is_in_it_once() -> None:
    model = Net()
    model.loss_fn = Warm()
    for fn in (model.loss_fn, model.loss_fn.forward):
        lossy = rkmate.with_loss(model, fn)
        assert list(lossy.state_dict()) == list(model.state_dict())
    copied = copy.deepcopy(rkmate.with_loss(model, model.loss_fn))
    assert copied._whole.loss_fn is copied.original.loss_fn
    assert "loss_fn_.weight" in rkmate.with_loss(model, Warm()).state_dict()


def test_the_outputs_beside_the_loss() -> None:
    model, (x, y) = Net(0.0), batch()
    found = rkmate.with_loss(model, F.cross_entropy, outputs=True)(x, loss_args=(y,))
    loss, outputs = found
    assert torch.equal(loss, found.loss) and torch.equal(outputs, model(x))


# -- what is refused ----------------------------------------------------------------------

@pytest.mark.parametrize(("options", "message"), [
    ({"loss": 3}, "the loss is int; it should be a function, or a module"),
    ({"loss": nn.MSELoss}, "the loss is the class MSELoss; it should be"),
    ({"loss": F.cross_entropy}, "do not fit cross_entropy, .* missing a required argument: 'target'.* One"),
    ({"loss": nn.CrossEntropyLoss()}, "do not fit CrossEntropyLoss, .* missing a required argument: 'target"),
    ({"loss": squares, "loss_args": (1,)}, "do not fit squares, .* too many positional"),
    ({"loss": squares, "kwargs": {"loss_kwargs": {"to": 1}}}, "do not fit squares, .* unexpected keyword"),
    ({"loss": squares, "loss_args": torch.ones(2)}, r"loss_args is Tensor; it should be a .* \(y,\) for"),
    ({"loss": squares, "kwargs": {"loss_kwargs": [1]}}, "loss_kwargs is list; it should be a mapping"),
    ({"loss_args": (torch.ones(2),)}, "loss_args without a loss: give loss=fn"),
    ({"loss": squares, "kwargs": {"shift": 1.0, "to": 2}}, "the arguments do not fit Net.forward: .*'to'"),
    ({"loss": squares, "kwargs": 3}, "kwargs is int"),
    ({"loss": torch.square}, r"the loss square returned a tensor of shape \(64, 10\); it should re"),
    ({"loss": lambda out: {"near": out.mean()}}, r"the loss <lambda> returned no loss \(dict\)"),
    ({"loss": lambda out: []}, r"returned no loss \(list\)"),
    ({"loss": lambda out: out.detach().mean()}, "the loss <lambda> depends on no output of Net that takes"),
    ({"loss": lambda out: torch.ones(())}, "depends on no output of Net"),
    ({"model": 3, "loss": squares}, "model is int"),
])
def test_refused_before_anything_is_planned(options: dict[str, Any], message: str,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rkmate.pipeline.prepare.partition", None)
    given: dict[str, Any] = {"model": Net(depth=1), "args": (batch()[0],), **options}
    with pytest.raises(rkmate.ArgumentError, match=message):
        rkmate.wrap(budget=0.9, progress=False, **options_of(**given, costs="analytic"))


# -- which output trains ------------------------------------------------------------------

@pytest.mark.parametrize(("fn", "outputs", "number"), [
    (as_dict, False, 2), (as_dict, True, 2), (as_tuple, False, 0)])
def test_the_loss_is_what_trains(fn: Any, outputs: bool, number: int) -> None:
    x, y = batch()
    lossy = rkmate.with_loss(Net(depth=1), fn, outputs=outputs)
    wanted = trace(lossy, (x,), {"loss_args": (y,)}, Settings(), Progress(False)).wanted
    assert wanted == tuple(i == number for i in range(3 + outputs))


# -- under a plan -------------------------------------------------------------------------

CASES: dict[str, tuple[Any, bool]] = {
    "function": (F.cross_entropy, False), "parameters": (Warm(), False), "outputs": (as_tuple, True)}


@functools.cache
def wrapped(case: str) -> tuple[Net, rkmate.PlannedModule]:
    """A net and its planned twin with a loss, one for each case."""
    model, (x, y), (fn, outputs) = Net(), batch(), CASES[case]
    if outputs:
        kwargs = {"loss_args": (y,)}
        return model, planned(rkmate.with_loss(model, fn, outputs=True), x, kwargs=kwargs, budget=0.8)
    return model, planned(model, x, budget=0.8, loss=fn, loss_args=[y])


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("case", CASES)
def test_the_same_bits(case: str) -> None:
    model, module = wrapped(case)
    (fn, outputs), (x, y) = CASES[case], batch()
    seen: list[torch.Tensor] = []

    def plain(x: torch.Tensor, loss_args: Any) -> Any:
        out = model(x)
        found = fn(out, *loss_args)
        return (found, out) if outputs else found

    def loss(run: Any) -> torch.Tensor:
        found = run(x, loss_args=(y,))
        if outputs:
            seen.append(found[1])
            found = found[0]
        seen.append(total(found))
        return seen[-1]

    assert module.plan.peak_bytes <= module.plan.budget_bytes
    with mock.patch.object(PlannedStep, "again", side_effect=AssertionError("a second forward")):
        found, expected = (gradients(module, run, loss) for run in (module, plain))
    assert list(found) == list(expected) == [n for n, _ in module.named_parameters()]
    assert all(found[n] is not None and torch.equal(found[n], expected[n]) for n in found)
    half = len(seen) // 2
    assert all(map(torch.equal, seen[:half], seen[half:]))


def test_the_wrapped_module_is_the_models_equal() -> None:
    model, module = wrapped("function")
    x, y = batch()
    assert module.original.original is model and module.config is model.config
    assert list(module.state_dict()) == list(model.state_dict())
    module.eval()
    with torch.no_grad():
        assert torch.equal(module(x, loss_args=(y,)), F.cross_entropy(model(x), y))
    module.train()
    other = copy.deepcopy(module)
    again = pickle.loads(pickle.dumps(wrapped("parameters")[1]))
    with mock.patch("rkmate.runtime.plan_cache.make_plan", side_effect=AssertionError("a new plan")):
        other(x, loss_args=(y,)).backward()
        total(again(x, loss_args=(y,))).backward()
    assert other.head.weight.grad is not None and model.head.weight.grad is None
    assert again.loss_fn.temperature.grad is not None


def test_what_changes_in_model_or_loss_is_another_plan(caplog: pytest.LogCaptureFixture) -> None:
    model, fn, (x, y) = Net(0.0, 1), nn.CrossEntropyLoss(), batch()
    module = planned(model, x, loss=fn, loss_args=(y,))
    for change in (lambda: setattr(model, "scale", 3.0), lambda: setattr(fn, "label_smoothing", 0.2)):
        change()
        assert torch.equal(module(x, loss_args=(y,)), fn(model(x), y))
    assert "model.scale" in caplog.text
    model.register_forward_hook(lambda m, args, out: out + 1)
    with pytest.warns(rkmate.RkmateWarning, match="hooks"):
        found = module(x, loss_args=(y,))
    assert torch.equal(found, fn(model(x), y))


def test_under_autocast() -> None:
    model, (x, y) = Net(0.0, 1), batch()
    with torch.autocast("cpu", torch.bfloat16):
        module = planned(model, x, loss=F.cross_entropy, loss_args=(y,))

        def loss(run: Any) -> torch.Tensor:
            return run(x, loss_args=(y,))

        found = gradients(model, module, loss)
        expected = gradients(model, lambda x, loss_args: F.cross_entropy(model(x), *loss_args), loss)
    assert all(torch.equal(found[n], expected[n]) for n in found)


@pytest.mark.filterwarnings("ignore:.*barrier.*:UserWarning")
def test_in_data_parallel(tmp_path: Path) -> None:
    module, (x, y) = wrapped("parameters")[1], batch()

    def loss(run: Any) -> torch.Tensor:
        return total(run(x, loss_args=(y,)))

    dist.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(module)
        found, expected = (gradients(module, run, loss) for run in (parallel, module))
    finally:
        dist.destroy_process_group()
    assert all(torch.equal(found[n], expected[n]) for n in found)


def test_without_a_plan_under_a_dynamic_budget() -> None:
    model, (x, y) = Net(0.0), batch()
    lossy = rkmate.with_loss(model, Warm().eval())
    dynamic = rkmate.dtr.wrap(lossy, "1MiB")
    found, expected = (gradients(lossy, run, lambda run: total(run(x, loss_args=(y,))))
                       for run in (dynamic, lossy))
    assert all(torch.equal(found[n], expected[n]) for n in found)


# -- bytes --------------------------------------------------------------------------------

def peak_of(module: nn.Module, step: Callable[[], torch.Tensor]) -> int:
    """Of a training step's second run: gradients stand before it."""
    step().backward()
    module.zero_grad(set_to_none=False)
    return measure_peak(lambda: step().backward()).peak


def test_a_loss_that_took_more_than_was_set_aside() -> None:
    """Four times the outputs outside; inside it is planned like the rest."""
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 512)), batch(256)[0]
    outside = planned(model, x)
    budget = outside.plan.peak_bytes
    assert peak_of(model, lambda: squares(outside(x))) > budget
    inside = planned(model, x, loss=squares, budget=budget)
    assert peak_of(model, lambda: inside(x)) <= inside.plan.peak_bytes < 0.9 * budget


def test_a_product_and_its_cross_entropy_go_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """That they stand in two modules, one outside the model, hides them from nobody."""
    monkeypatch.setattr(cpu, "PART_BYTES", 2**13)
    model, (x, y) = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 500)), batch(256)
    with pytest.raises(rkmate.InfeasibleBudget) as info:
        rkmate.wrap(model, (x,), loss=nn.CrossEntropyLoss(), loss_args=(y,), budget=1, progress=False)
    least = info.value.minimum_bytes        # temporaries of the parts are measured
    with pytest.warns(rkmate.RkmateWarning, match=r"2\.weight.* a few rows at a time"):
        module = rkmate.wrap(model, (x,), loss=nn.CrossEntropyLoss(), loss_args=(y,), budget=least,
                             progress=False)
    assert "def tiled_head" in module.source
    assert peak_of(model, lambda: module(x, loss_args=(y,))) <= least < 256 * 500 * 4
    torch.testing.assert_close(module(x, loss_args=(y,)), F.cross_entropy(model(x), y))


# -- the other public calls ---------------------------------------------------------------

def test_every_public_call_takes_one() -> None:
    x, y = batch()
    options: dict[str, Any] = {"progress": False, "settings": rkmate.Settings(costs="analytic")}
    lossy = rkmate.with_loss(Net(depth=1), as_tuple)
    kwargs = {"loss_args": (y,)}
    model, given = lossy.original, {"loss": as_tuple, "loss_args": (y,)}
    plan = rkmate.plan(model, (x,), budget=1.0, **given, **options)
    with mock.patch("rkmate.comparison.run.Bench", side_effect=InterruptedError) as bench, \
            pytest.raises(InterruptedError):
        rkmate.compare(lossy, (x,), kwargs, budgets=[1.0], planners=["chen"], measure=True, **options)
    assert bench.call_args.args[-1].trains == (0,)                 # what its steps are trained by
    curve = rkmate.tradeoff(model, (x,), budgets=[1.0], **given, **options)
    assert curve[0].fingerprint == plan.fingerprint
    assert rkmate.wrap(model, (x,), plan=plan, progress=False, **given).plan.schedule == plan.schedule
    found = rkmate.max_batch_size(lossy, lambda n: ((x[:n],), {"loss_args": (y[:n],)}), device_memory="1MiB",
                                  most=1, **options)
    assert found.size == 1


def test_the_command_takes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                               capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loss_target.py").write_text(
        "import rkmate, torch\n"
        "def sample():\n"
        "    model = rkmate.with_loss(torch.nn.Linear(8, 4), torch.nn.MSELoss())\n"
        "    return model, (torch.randn(3, 8),), {'loss_args': (torch.randn(3, 4),)}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["plan", "loss_target:sample", "--budget", "1.0", "--analytic", "--device", "cpu",
                 "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_bytes"] > 0
