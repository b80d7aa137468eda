"""The logits of a language model that is trained by its loss: computed only if somebody reads them."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate.errors import DeferredOutputError
from rkmate.pipeline.settings import Settings
from rkmate.runtime.deferred import DeferredTensor
from tests.capturing import captured_once
from tests.equality import assert_same_tensor, measured_peak
from tests.models import Sample

WORDS, BATCH, LENGTH, WIDTH = 4096, 2, 32, 32
LOGITS = BATCH * LENGTH * WORDS * 4
CHUNKED = Settings(costs="analytic", chunked_loss="always")
COUNTED = Settings(costs="analytic", chunked_loss="always", deferred_outputs="never")

pytestmark = [
    pytest.mark.xdist_group("trainers")]           # one process imports transformers


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a few kibibytes, so that the loss of a small model has many."""
    monkeypatch.setattr("rkmate.device.cpu.PART_BYTES", 2**14)


@pytest.fixture(autouse=True)
def one_capture() -> Iterator[None]:
    """Equal models have one capture, one graph, and one plan."""
    with captured_once("gpt2 with logits"):
        yield


def _model() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=1, n_embd=WIDTH, n_head=2, vocab_size=WORDS, n_positions=LENGTH, bos_token_id=0,
        eos_token_id=0, use_cache=False)).train()


def _inputs(batch: int = BATCH) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    i = torch.randint(0, WORDS, (batch, LENGTH), generator=generator)
    return {"input_ids": i, "labels": i}


@functools.cache
def _plan(settings: Settings = CHUNKED) -> rkmate.Plan:
    return rkmate.plan(_model(), (), _inputs(), budget=6 * LOGITS, settings=settings, progress=False)


def _wrapped() -> tuple[Any, Any]:
    """A model, and it wrapped with deferred logits."""
    model = _model()
    return model, rkmate.wrap(model, (), _inputs(), plan=_plan(), settings=CHUNKED, progress=False)


def _seeded(run: Any, **more: Any) -> Any:
    torch.manual_seed(3)
    return run(**_inputs(), **more)


def _assert_close_gradients(model: nn.Module, reference: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_a_plan_goes_below_the_logits_and_says_so(tmp_path: Path) -> None:
    plan, counted = _plan(), _plan(COUNTED)
    assert plan.deferred == ("logits",)
    assert plan.peak_bytes < counted.peak_bytes - 0.9 * LOGITS
    assert "the output logits is computed when somebody reads it" in plan.note
    assert "computed when somebody reads it" in plan.explain()
    plan.report(tmp_path / "report.html")
    assert "computed when somebody reads it" in (tmp_path / "report.html").read_text(encoding="utf-8")
    kept = [s for j, s in enumerate(plan.graph.cd.d) if j in plan.graph.cd.held and s.size > 1000]
    assert [s.size for s in kept] == [BATCH * LENGTH * WIDTH * 4]          # the last hidden state


def test_a_step_that_reads_no_logits() -> None:
    reference = _model()
    model, wrapped = _wrapped()
    out, expected = _seeded(wrapped), _seeded(reference)
    assert type(out) is type(expected)
    logits = out.logits
    assert isinstance(logits, DeferredTensor)
    assert (logits.shape, logits.dtype, logits.stride()) == (
        expected.logits.shape, expected.logits.dtype, expected.logits.stride())
    assert logits.requires_grad and logits.grad_fn is not None
    torch.testing.assert_close(out.loss, expected.loss)
    out.loss.backward()
    expected.loss.backward()
    _assert_close_gradients(model, reference)
    assert measured_peak(wrapped, Sample(model, (), _inputs(), lambda o: o.loss)) <= _plan().peak_bytes
    kept = weakref.ref(logits._unread)
    del out, logits
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("after", [pytest.param(False, marks=pytest.mark.slow), True])
def test_logits_that_are_read_are_those_of_the_plain_forward(after: bool) -> None:
    reference = _model()
    model, wrapped = _wrapped()
    out, expected = _seeded(wrapped), _seeded(reference)
    if after:
        out.loss.backward()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():           # of the reader, not of the forward
        assert torch.equal(out.logits.argmax(-1), expected.logits.argmax(-1))
    assert_same_tensor(expected.logits, out.logits, "logits")
    held = out.logits._unread
    assert held._compute is None                                           # the hidden state is let go
    if not after:
        out.loss.backward()
    expected.loss.backward()
    _assert_close_gradients(model, reference)


def test_a_loss_of_the_logits_runs_the_forward_a_second_time() -> None:
    reference = _model()
    model, wrapped = _wrapped()
    out, expected = _seeded(wrapped), _seeded(reference)
    with pytest.warns(rkmate.RkmateWarning, match="runs a second time"):
        out.logits.pow(2).mean().backward()
    expected.logits.pow(2).mean().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert torch.equal(p.grad, q.grad)


def test_both_losses_add_up() -> None:
    reference = _model()
    model, wrapped = _wrapped()
    for run in (wrapped, reference):
        out = _seeded(run)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", rkmate.RkmateWarning)
            (out.loss + out.logits.pow(2).mean()).backward()
    _assert_close_gradients(model, reference)


def test_weights_that_have_moved_are_refused() -> None:
    model, wrapped = _wrapped()
    out = wrapped(**_inputs())
    out.loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert out.logits.shape == (BATCH, LENGTH, WORDS)
    for _ in range(2):
        with pytest.raises(DeferredOutputError, match=r"'lm_head\.weight' was changed.*deferred_outputs="):
            out.logits.sum()
    wrapped(**_inputs()).logits.sum()


def test_it_can_be_switched_off() -> None:
    wrapped = rkmate.wrap(_model(), (), _inputs(), budget=6 * LOGITS, settings=COUNTED, progress=False)
    out = wrapped(**_inputs())
    assert wrapped.plan.deferred == () and type(out.logits) is torch.Tensor
    assert "logits" not in wrapped.plan.note
    with pytest.raises(rkmate.ArgumentError, match="deferred_outputs"):
        Settings(deferred_outputs="always")  # type: ignore[arg-type]


def test_a_plan_is_saved_and_followed(tmp_path: Path) -> None:
    _plan().save(tmp_path / "plan.json")
    loaded = rkmate.Plan.load(tmp_path / "plan.json")
    assert loaded.deferred == ("logits",)
    _plan(COUNTED).save(tmp_path / "counted.json")
    counted = rkmate.Plan.load(tmp_path / "counted.json")
    assert counted.deferred == () and counted.variant == loaded.variant
    for settings in (CHUNKED, COUNTED):                        # a plan says by itself what it leaves out
        wrapped = rkmate.wrap(_model(), (), _inputs(), plan=loaded, settings=settings, progress=False)
        assert isinstance(wrapped(**_inputs()).logits, DeferredTensor)
        wrapped = rkmate.wrap(_model(), (), _inputs(), plan=counted, settings=settings, progress=False)
        assert type(wrapped(**_inputs()).logits) is torch.Tensor
    copied = copy.deepcopy(rkmate.wrap(_model(), (), _inputs(), plan=counted, settings=CHUNKED,
                                       progress=False))
    assert type(copied(**_inputs()).logits) is torch.Tensor


def test_a_budget_that_is_applied_in_place() -> None:
    model, reference = _model(), _model()
    rkmate.apply(model, budget=1.0, settings=CHUNKED, progress=False)
    out, expected = _seeded(model), _seeded(reference)
    assert isinstance(out["logits"], DeferredTensor) and isinstance(out[1], DeferredTensor)
    assert_same_tensor(expected.logits, out.logits, "logits")
    out.loss.backward()
    shown = rkmate.applied(model)
    assert shown is not None and shown.plan.deferred == ("logits",)
    model.eval()
    with torch.no_grad():
        assert type(_seeded(model).logits) is torch.Tensor


@pytest.mark.slow
def test_a_budget_that_nothing_but_this_meets() -> None:
    model, reference = _model(), _model()
    least = []
    for settings in (Settings(), Settings(deferred_outputs="never")):
        with pytest.raises(rkmate.InfeasibleBudget) as info:
            rkmate.plan(model, (), _inputs(), budget=1, settings=settings, progress=False)
        least.append(info.value.minimum_bytes)
    assert least[0] < least[1] - LOGITS / 2
    with pytest.warns(rkmate.RkmateWarning, match="a few rows at a time"):
        wrapped = rkmate.wrap(model, (), _inputs(), budget=least[0], progress=False)
    assert wrapped.plan.deferred == ("logits",)
    assert measured_peak(wrapped, Sample(model, (), _inputs(), lambda o: o.loss)) <= least[0]
    assert_same_tensor(_seeded(reference).logits, _seeded(wrapped).logits, "logits")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning",
                            "error::rkmate.RkmateWarning")
def test_transformers_trainer(tmp_path: Path) -> None:
    """Training reads no logits, and evaluation with metrics runs the model as it is."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    data = [{k: v[0] for k, v in _inputs().items()} for _ in range(8)]
    weights, seen = [], []

    class Trainer(transformers.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            loss, out = super().compute_loss(model, inputs, return_outputs=True, **more)
            if torch.is_grad_enabled():
                seen.append(isinstance(out.logits, DeferredTensor))
            return (loss, out) if return_outputs else loss

    for planned in (False, True):
        model = _model()
        if planned:
            rkmate.apply(model, budget=1.0, settings=CHUNKED, progress=False)
        trainer = Trainer(model, transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=BATCH, report_to=[],
            disable_tqdm=True, use_cpu=True, save_strategy="no", eval_strategy="steps", eval_steps=1),
            train_dataset=data, eval_dataset=data[:2],
            compute_metrics=lambda p: {"right": float((p.predictions.argmax(-1) == p.label_ids).mean())})
        trainer.train()
        assert "eval_right" in trainer.evaluate()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert seen == [False] * 3 + [True] * 3
    for a, b in zip(*weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
