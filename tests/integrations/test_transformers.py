"""The callback for transformers' Trainer and those made from it."""

from __future__ import annotations

import copy
import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rkmate
from rkmate import device as devices
from tests.device.fake import Ledger
from tests.options import options_of
from tests.semantics.steps import Tower

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
MASKS: Any = importlib.import_module("transformers.masking_utils")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning",
                                        "ignore::DeprecationWarning", "error::rkmate.RkmateWarning")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
OPTIONS: dict[str, Any] = {"costs": "analytic", "progress": False}
X = torch.randn(256, 16)


def callback(budget: int | float | str = 0.8, **options: Any) -> Any:
    named = {"planner": "rotor", **OPTIONS, **options}
    return rkmate.integrations.BudgetCallback(budget, **options_of(**named))


def told(made: Any, event: str, model: nn.Module, n_gpu: int = 1) -> Any:
    """Call one event as Trainer does; returns the state."""
    state = SimpleNamespace(log_history=[], global_step=1, is_world_process_zero=True)
    getattr(made, event)(SimpleNamespace(n_gpu=n_gpu), state, None, model=model)
    return state


def test_what_happens_at_each_event(caplog: pytest.LogCaptureFixture) -> None:
    made, model = callback(), Tower()
    twin = copy.deepcopy(model)
    assert isinstance(made, transformers.TrainerCallback)
    told(made, "on_train_begin", model)
    assert rkmate.applied(model) is not None and made.plans == []
    assert not told(made, "on_substep_end", model).log_history
    model(X).sum().backward()
    with caplog.at_level(logging.WARNING, "rkmate"):
        state = told(made, "on_step_end", model)
    plan, = made.plans
    assert f"Tower is trained inside a budget: {repr(plan)[1:-1]}" in caplog.text
    assert state.log_history == [{
        "rkmate_budget_bytes": plan.budget_bytes, "rkmate_peak_bytes": plan.peak_bytes,
        "rkmate_plain_peak_bytes": plan.baseline_peak_bytes, "rkmate_overhead": plan.overhead, "step": 1}]
    model(X[:128]).sum().backward()
    assert not told(made, "on_step_end", model).log_history          # said once
    assert len(made.plans) == 2
    told(made, "on_train_end", model)
    assert rkmate.applied(model) is None and "forward" not in model.__dict__
    assert len(made.plans) == 2                                       # to be looked at afterwards
    assert torch.equal(model(X), twin(X))
    told(made, "on_step_end", model)


def test_wrong_arguments_are_refused_at_once() -> None:
    with pytest.raises(rkmate.ArgumentError):
        callback("6 apples")
    with pytest.raises(rkmate.ArgumentError, match="DataParallel"):
        told(callback(), "on_train_begin", Tower(), n_gpu=2)
    with pytest.raises(rkmate.ArgumentError, match="on_new_shape"):
        told(callback(on_new_shape="nothing"), "on_train_begin", Tower())
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        rkmate.integrations.Nothing      # noqa: B018


def test_without_transformers_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from rkmate.integrations import trainer

    monkeypatch.delitem(vars(trainer), "BudgetCallback", raising=False)
    monkeypatch.setitem(sys.modules, "transformers.trainer_callback", None)
    with pytest.raises(rkmate.MissingExtra, match="pip install transformers"):
        trainer.BudgetCallback           # noqa: B018


def test_what_the_first_step_took_is_known_where_the_device_counts(
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    counted = Ledger()
    monkeypatch.setattr(devices.of(X.device), "statistics", counted)
    made, model = callback(), Tower()
    told(made, "on_train_begin", model)
    out = model(X)
    counted.add(1234)
    counted.add(-1234)
    out.sum().backward()
    told(made, "on_step_end", model)
    assert made.measured_bytes == 1234
    told(made, "on_train_end", model)
    assert "took 1,234 bytes" in caplog.text


@pytest.mark.parametrize("as_number", [int, torch.tensor])
def test_the_number_of_labels_takes_no_plan_of_its_own(as_number: Callable[[int], Any]) -> None:
    class Counted(Tower):
        def forward(self, x: torch.Tensor, num_items_in_batch: Any = 1) -> torch.Tensor:
            return super().forward(x).square().sum() / num_items_in_batch

    made, model = callback(), Counted()
    twin = copy.deepcopy(model)
    told(made, "on_train_begin", model)
    for count in (7, 31, 1 << 20):
        for m in (model, twin):
            m(X, num_items_in_batch=as_number(count)).backward()
    told(made, "on_step_end", model)
    assert len(made.plans) == 1
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)       # type: ignore[arg-type]


def test_trainer_finds_the_labels_of_a_wrapped_model() -> None:
    from transformers.utils.generic import find_labels

    class Labelled(nn.Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x)

    wrapped = rkmate.wrap(Labelled(16, 4), (X,), budget=1.0, settings=rkmate.Settings(costs="analytic"),
                          progress=False)
    assert find_labels(wrapped.__class__) == ["labels"]
    assert find_labels(copy.deepcopy(wrapped).__class__) == ["labels"]


def test_scores_are_what_trl_trains_by() -> None:
    """Beside a loss that nobody takes: no forward runs twice (`RkmateWarning` is an error here)."""
    class Scored(Tower):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:    # type: ignore[override]
            scores = super().forward(x).log_softmax(-1)
            return {"loss": scores.mean(), "log_probs": scores, "entropy": scores.exp().sum()}

    model = rkmate.apply(Scored(), budget=0.9, **options_of(planner="rotor", **OPTIONS))
    for _ in range(2):
        model(X)["log_probs"].square().sum().backward()
    shown = rkmate.applied(model)
    assert shown is not None and len(shown._plans.all()) == 1


def test_an_embedding_that_asks_for_gradients_is_nothing_to_warn_of() -> None:
    """transformers, peft and trl let it, so that frozen weights can be checkpointed."""
    def make_inputs_require_grads(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.requires_grad_(True)

    model = Tower()
    model.layers[0].requires_grad_(False)
    twin = copy.deepcopy(model)
    model.layers[0].register_forward_hook(make_inputs_require_grads)
    rkmate.apply(model, (X,), budget=0.9, **options_of(planner="rotor", **OPTIONS))
    for m in (model, twin):
        m(X).sum().backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad)   # type: ignore[arg-type]


def _example(name: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    found: Callable[..., Any] = importlib.import_module(name).main
    monkeypatch.delitem(sys.modules, name)
    return found


@pytest.mark.parametrize(("name", "needs", "planner"), [
    pytest.param("trainer_transformers", "transformers", "rotor", marks=pytest.mark.slow),
    pytest.param("trainer_transformers", "transformers", "rockmate", marks=pytest.mark.slow),
    pytest.param("trainer_peft", "peft", "rockmate", marks=pytest.mark.slow),
    pytest.param("trainer_trl_sft", "trl", "rockmate", marks=pytest.mark.slow),
    pytest.param("trainer_trl_dpo", "trl", "rockmate", marks=pytest.mark.slow),
    pytest.param("trainer_trl_dpo", "trl", "rotor", marks=pytest.mark.slow)])
def test_examples(name: str, needs: str, planner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, weights, and what the saved model does are equal to the plain script's, bit for bit."""
    pytest.importorskip(needs)
    main = _example(name, monkeypatch)
    plain, run = main(True), main(False, **options_of(planner=planner, **OPTIONS))
    assert run.losses == plain.losses and len(run.losses) > 3
    for a, b in zip(plain.model.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert run.loaded == plain.loaded
    plan, = run.plans
    assert 0 < run.peak_bytes <= plan.budget_bytes < plain.peak_bytes
    assert rkmate.applied(run.model) is None


@pytest.mark.slow
def test_a_reference_without_adapters_takes_no_plan_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """DPOTrainer switches checkpointing and adapters off and on again in each step."""
    pytest.importorskip("trl")
    main = _example("trainer_trl_dpo", monkeypatch)
    plain, run = main(True, precompute=False), main(False, precompute=False, **options_of(**OPTIONS))
    assert run.losses == plain.losses and run.loaded == plain.loaded
    assert len(run.plans) == 1


def _model() -> Any:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0))


def _trained(folder: Path, budget: bool, resume: str | None = None, examples: int = 10,
             **arguments: Any) -> tuple[Any, list[Any]]:
    """A model, and its losses; the last batch is smaller, labels are missing from each example in turn."""
    torch.manual_seed(1)
    data = []
    for k in range(examples):
        i = torch.randint(0, 50, (16,))
        data.append({"input_ids": i, "labels": i.where(torch.arange(16) >= k % 5, -100)})
    callbacks = [callback()] if budget else []
    trainer = transformers.Trainer(_model(), transformers.TrainingArguments(**{
        "output_dir": str(folder), "num_train_epochs": 1, "per_device_train_batch_size": 4, "use_cpu": True,
        "report_to": [], "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no", **arguments}),
        train_dataset=data, eval_dataset=data[:4], callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    if budget:
        assert len(callbacks[0].plans) <= 2                   # of a whole batch, and of the last one
    logs = trainer.state.log_history
    return trainer.model, [log[k] for log in logs for k in ("loss", "eval_loss", "grad_norm") if k in log]


def _same(folder: Path, **arguments: Any) -> None:
    (one, expected), (other, found) = (_trained(folder, budget, **arguments) for budget in (False, True))
    assert found == expected
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [
    {"gradient_accumulation_steps": 2},
    {"bf16": True, "eval_strategy": "steps", "eval_steps": 1},
    {"label_smoothing_factor": 0.1},
    {"gradient_checkpointing": True}], ids=lambda a: next(iter(a)))
def test_what_trainer_is_asked_for(arguments: dict[str, Any], tmp_path: Path) -> None:
    _same(tmp_path, **arguments)


@pytest.mark.slow
def test_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    whole, expected = _trained(tmp_path / "whole", False, examples=16)
    _trained(tmp_path / "first", True, examples=16, save_strategy="steps", save_steps=2)
    saved = tmp_path / "first" / "checkpoint-2"
    assert {"config.json", "model.safetensors"} <= {f.name for f in saved.iterdir()}
    again, found = _trained(tmp_path / "first", True, str(saved), examples=16)
    assert found[-4:] == expected[-4:]
    for a, b in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_state_that_is_not_the_first_process_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    made, model = callback(), Tower()
    told(made, "on_train_begin", model)
    model(X).sum().backward()
    state = SimpleNamespace(log_history=[], global_step=1, is_world_process_zero=False)
    with caplog.at_level(logging.WARNING, "rkmate"):
        made.on_step_end(None, state, None, model=model)
    assert len(state.log_history) == 1 and "is trained inside" not in caplog.text


_TWO_PROCESSES = """
import sys, torch, transformers, rkmate
transformers.logging.set_verbosity_error()

def train(budget):
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0))
    data = [{"input_ids": (i := torch.randint(0, 50, (16,))), "labels": i} for _ in range(16)]
    made = [rkmate.integrations.BudgetCallback(0.8, progress=False, settings=rkmate.Settings(
        planner="rotor", costs="analytic"))]
    trainer = transformers.Trainer(model, transformers.TrainingArguments(
        output_dir=sys.argv[1], max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        use_cpu=True, ddp_backend="gloo", report_to=[], disable_tqdm=True, save_strategy="no"),
        train_dataset=data, callbacks=made if budget else [])
    trainer.train()
    assert torch.distributed.get_world_size() == 2
    assert not budget or len(made[0].plans) == 1
    return list(trainer.model.parameters())

assert all(map(torch.equal, train(False), train(True)))
"""


@pytest.mark.slow
@pytest.mark.xdist_group("two processes")
def test_two_processes(tmp_path: Path) -> None:
    """DistributedDataParallel calls what the budget was applied to; weights are equal to a plain run's."""
    script = tmp_path / "script.py"
    script.write_text(_TWO_PROCESSES, encoding="utf-8")
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*start, str(script), str(tmp_path)], capture_output=True, text=True, check=False,
                          cwd=EXAMPLES.parent, env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)})
    assert done.returncode == 0, done.stderr


def test_compiling_a_planned_model_is_said_to_be_in_vain() -> None:
    made, model = callback(), Tower()
    with pytest.warns(rkmate.RkmateWarning, match="torch_compile=True compiles nothing"):
        made.on_train_begin(SimpleNamespace(n_gpu=1, torch_compile=True), None, None, model=model)
    assert rkmate.remove(model) is model


def test_as_a_context_it_is_taken_off_after_an_error() -> None:
    model = Tower()
    with pytest.raises(KeyError), callback() as made:
        told(made, "on_train_begin", model)
        model(X).sum().backward()
        assert rkmate.applied(model) is not None
        raise KeyError
    assert rkmate.applied(model) is None
    with callback():
        pass                                # nothing was trained


class Masked(nn.Module):
    """Attention that leaves out a mask of ones in eager mode, as a model of transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(9, 16), nn.Linear(16, 48), nn.Linear(16, 9)

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        n, seen = ids.shape[1], attention_mask.to(torch.bool)
        x = self.embed(ids)
        q, k, v = self.qkv(x).unflatten(-1, (2, 24)).transpose(1, 2).chunk(3, -1)
        if MASKS._ignore_causal_mask_sdpa(seen, n, n, 0, 0):
            x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            causal = torch.ones(n, n, dtype=torch.bool).tril() & seen[:, None, None]
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=causal)
        return F.cross_entropy(self.head(x.transpose(1, 2).flatten(2)).flatten(0, 1), ids.flatten())


def test_a_mask_of_ones_is_left_out_as_in_eager_mode() -> None:
    """Calls with a mask of ones and with padding have a plan each, and either is derived for other sizes."""
    model = Masked()
    wrapped = rkmate.wrap(copy.deepcopy(model), *_masked(12, 0), budget=1.0, **options_of(**OPTIONS))
    for n, padding in [(12, 0), (12, 3), (12, 0), (16, 0), (16, 3), (20, 0), (20, 3), (20, 0)]:
        results = []
        for module in (model, wrapped):
            args, kwargs = _masked(n, padding)
            loss = module(*args, **kwargs)
            results.append([loss, *torch.autograd.grad(loss, [*module.parameters()])])
        assert all(map(torch.equal, *results)), (n, padding)
    assert len(wrapped._plans) == 6 and wrapped._plans.new_sizes.derived == 2


def _masked(n: int, padding: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    mask = torch.ones(3, n, dtype=torch.long)
    mask[1, n - padding:] = 0
    return (torch.arange(3 * n).reshape(3, n) * 5 % 9,), {"attention_mask": mask}


class Unmasked(nn.Module):
    """Attention without a mask, which asks whether it may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (2, 24)).transpose(1, 2).chunk(3, -1)
        n = x.shape[1]
        left_out = MASKS._ignore_bidirectional_mask_sdpa(None, n)
        mask = None if left_out else torch.ones(n, n, dtype=torch.bool)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).square().sum()


def test_no_mask_is_made_where_a_release_asks_whether_it_is_traced_first(monkeypatch: pytest.MonkeyPatch
                                                                         ) -> None:
    """As older releases do; nobody has given a mask."""
    def asked(padding_mask: torch.Tensor | None, kv_length: int, local: int | None = None) -> bool:
        return not MASKS.is_tracing(padding_mask) and (padding_mask is None or bool(padding_mask.all()))

    monkeypatch.setattr(MASKS, "_ignore_bidirectional_mask_sdpa", asked)
    wrapped = rkmate.wrap(Unmasked(), (torch.randn(2, 12, 16),), budget=1.0, **options_of(**OPTIONS))
    assert "flash" in wrapped.source and "ones" not in wrapped.source
