"""Trainers of other libraries: one line differs from the plain script, and the weights are equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rkmate
from rkmate.runtime.executable import PlannedStep
from tests.semantics.steps import Tower, planned

pytestmark = [
    pytest.mark.xdist_group("trainers"),           # one process imports these libraries
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning",
                               "ignore::DeprecationWarning", "error::rkmate.RkmateWarning")]

STEPS = 3


def _same_weights(train: Callable[[bool], nn.Module]) -> None:
    seen: list[list[torch.Tensor]] = []
    call = PlannedStep.__call__

    def spied(run: PlannedStep, *args: Any) -> Any:
        seen.append([run.caller.target(k, ()).detach().clone() for keys in run.targets.params for k in keys])
        return call(run, *args)

    plain = train(False)
    with mock.patch.object(PlannedStep, "__call__", spied):
        wrapped = train(True)
    assert len(seen) >= STEPS, "the planned step did not run"
    assert any(not torch.equal(a, b) for a, b in zip(seen[0], seen[-1], strict=True)), "no step was taken"
    for (name, a), (other, b) in zip(plain.named_parameters(), wrapped.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(a, b), name


@pytest.mark.slow
def test_transformers_trainer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    def train(wrap: bool) -> nn.Module:
        torch.manual_seed(0)
        model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0,
            eos_token_id=0))
        data = [{"input_ids": (i := torch.randint(0, 50, (8,))), "labels": i} for _ in range(4 * STEPS)]
        if wrap:
            sample = {k: torch.stack([d[k] for d in data[:4]]) for k in data[0]}
            model = planned(model, kwargs=sample, budget=0.9)
        trainer = transformers.Trainer(model, transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=STEPS, per_device_train_batch_size=4, report_to=[],
            disable_tqdm=True, use_cpu=True, save_strategy="no"), train_dataset=data)
        trainer.train()
        return model  # type: ignore[no-any-return]

    _same_weights(train)


def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")

    def train(wrap: bool) -> nn.Module:
        torch.manual_seed(0)
        model, x = Tower(dropout=0.2), torch.randn(64 * STEPS, 16)
        inner: nn.Module = planned(model, x[:64], budget=0.9) if wrap else model
        accelerator = accelerate.Accelerator(cpu=True)
        run, optimizer, loader = accelerator.prepare(
            inner, torch.optim.SGD(inner.parameters(), lr=0.1), DataLoader(TensorDataset(x), 64))
        torch.manual_seed(1)
        for (batch,) in loader:
            optimizer.zero_grad()
            accelerator.backward(run(batch).pow(2).mean())
            optimizer.step()
        return model

    _same_weights(train)


def test_accelerate_with_gradients_in_place() -> None:
    """Two batches for one step of the optimizer; the last bits of their sum may differ."""
    accelerate = pytest.importorskip("accelerate")

    def train(budget: float | None) -> nn.Module:
        torch.manual_seed(0)
        model, x = Tower(), torch.randn(32 * STEPS, 16)
        if budget is not None:
            rkmate.apply(model, budget=budget,
                         settings=rkmate.Settings(costs="analytic", gradients="in_place"), progress=False)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        run, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(x), 16))
        for (batch,) in loader:
            with accelerator.accumulate(run):
                accelerator.backward(run(batch).pow(2).mean())
                accelerator.clip_grad_norm_(run.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        shown = rkmate.applied(model)
        assert (shown is not None and shown.plan.gradients == "in_place") == (budget is not None)
        return model

    for a, b in zip(train(None).parameters(), train(1.0).parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_copies_that_accelerate_makes_are_beyond_the_plan_of_a_wrapped_module() -> None:
    """And within that of one that a budget is applied to."""
    from accelerate.utils import convert_outputs_to_fp32

    def half(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return nn.functional.linear(x, model.layers[0].weight)

    model, x = Tower(depth=1), torch.randn(512, 16)
    model.forward = half
    wrapped = planned(model, x)
    wrapped.forward = convert_outputs_to_fp32(wrapped.forward)
    with pytest.warns(rkmate.RkmateWarning, match=r"float32 copies.*rkmate\.apply"):
        assert wrapped(x).dtype == torch.float32
    wrapped(x)                                  # said once
    del wrapped
    model.forward = convert_outputs_to_fp32(half)
    rkmate.apply(model, budget=1.0, progress=False)
    g = torch.randn(512, 16)
    model(x).backward(g)
    shown = rkmate.applied(model)
    assert shown is not None
    assert rkmate.measure_step(model, lambda: model(x).backward(g)).peak <= shown.plan.budget_bytes


def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Task(lightning.LightningModule):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            return self.net(batch[0]).pow(2).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def train(wrap: bool) -> nn.Module:
        torch.manual_seed(0)
        model, x = Tower(), torch.randn(4 * STEPS, 16)
        net: nn.Module = planned(model, x[:4], budget=0.9) if wrap else model
        trainer = lightning.Trainer(
            max_steps=STEPS, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path)
        trainer.fit(Task(net), DataLoader(TensorDataset(x), 4))
        return model

    _same_weights(train)


@pytest.mark.slow
def test_transformers_trainer_counts_items(tmp_path: Path) -> None:
    """With accumulation the Trainer passes the number of labels, another one for every step: it is a
    tensor, so that all steps share a plan."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    plans: list[int] = []

    def train(wrap: bool) -> nn.Module:
        torch.manual_seed(0)
        model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0,
            eos_token_id=0))
        data = []
        for k in range(8 * STEPS):
            i = torch.randint(0, 50, (8,))
            data.append({"input_ids": i, "labels": i.where(torch.arange(8) >= k % 5, -100)})
        if wrap:
            sample = {k: torch.stack([d[k] for d in data[:4]]) for k in data[0]}
            model = planned(model, kwargs={**sample, "num_items_in_batch": torch.tensor(1)}, budget=0.9)
        trainer = transformers.Trainer(model, transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=STEPS, per_device_train_batch_size=4, report_to=[],
            gradient_accumulation_steps=2, disable_tqdm=True, use_cpu=True, save_strategy="no"),
            train_dataset=data)
        trainer.train()
        if wrap:
            plans.append(len(model._plans))
        return model  # type: ignore[no-any-return]

    _same_weights(train)
    assert plans[0] <= 2                   # the sample's, and one for all steps


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_a_budget_that_is_applied_before_or_after_the_adapters(first: bool) -> None:
    """The forward of the base is called by itself, from peft."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    i, losses = torch.randint(0, 50, (2, 8)), []
    for budget in (None, 0.9):
        torch.manual_seed(0)
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            num_hidden_layers=1, hidden_size=16, intermediate_size=32, num_attention_heads=2,
            vocab_size=50))
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        settings = rkmate.Settings(planner="rotor", costs="analytic")
        options: dict[str, Any] = {"budget": budget, "settings": settings, "progress": False}
        base = model
        if budget and first:
            rkmate.apply(base, **options)
        model = peft.get_peft_model(base, config).train()
        if budget and not first:
            rkmate.apply(base := model, **options)
        loss = model(input_ids=i, labels=i).loss
        loss.backward()
        losses.append([loss, *(p.grad for p in model.parameters() if p.requires_grad)])
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    for a, b in zip(*losses, strict=True):
        assert torch.equal(a, b)
    shown = rkmate.applied(base)
    assert shown is not None and shown.plan.peak_bytes <= shown.plan.budget_bytes
    assert all("lora" in name for name in peft.get_peft_model_state_dict(model))
    rkmate.remove(base)
    merged = model.merge_and_unload()
    assert type(merged) is transformers.LlamaForCausalLM
    assert merged.generate(i, max_new_tokens=2, min_new_tokens=2).shape == (2, 10)


@pytest.mark.slow
def test_adapters_of_peft() -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    base = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0,
        eos_token_id=0))
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    i = torch.randint(0, 50, (2, 8))
    module = planned(model, kwargs={"input_ids": i, "labels": i}, budget=0.95)
    from tests.semantics.steps import assert_same_gradients

    assert_same_gradients(model, module, lambda run: run(input_ids=i, labels=i).loss)
    assert isinstance(module, rkmate.PlannedModule)
