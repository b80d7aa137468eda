"""The last product and its cross entropy, a few rows at a time: torch's gradients, in less memory."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rkmate
from rkmate.device import cpu
from rkmate.graph.capture.capture import capture
from rkmate.graph.passes.table import simplify
from rkmate.graph.passes.tiles.tiled import Tiled
from rkmate.pipeline.settings import Settings
from tests.capturing import captured_once
from tests.equality import measured_peak
from tests.models import Sample

ROWS, WIDTH, CLASSES = 96, 24, 500
NEVER = Settings(chunked_loss="never")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a few kibibytes, so that small tensors have many."""
    monkeypatch.setattr(cpu, "PART_BYTES", 2**13)


class _Classifier(nn.Module):
    """Rows of features, a wide product and its loss; `returns`: what stands beside the loss."""

    def __init__(self, returns: str = "", biased: bool = False, turned: bool = False,
                 tied: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES, bias=biased)
        self.turned = nn.Parameter(torch.randn(WIDTH, CLASSES) / 5) if turned else None
        self.table = nn.Embedding(CLASSES, WIDTH)
        if tied:
            self.table.weight = self.head.weight
        self.returns = returns

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        h = self.body(x) + self.table(labels)
        logits = self.head(h) if self.turned is None else (h.view(-1, WIDTH) @ self.turned).view(
            *h.shape[:2], -1)
        loss = F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), ignore_index=3)
        if self.returns == "logits":
            return {"loss": loss, "logits": logits}
        if self.returns == "entropy":
            return loss + 1e-4 * torch.softmax(logits, 0).pow(2).mean()
        return loss


def _inputs(batch: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return (torch.randn(batch, 64, WIDTH, generator=generator),
            torch.randint(0, CLASSES, (batch, 64), generator=generator))


def _loss(result: Any) -> torch.Tensor:
    loss: torch.Tensor = result["loss"] if isinstance(result, dict) else result
    return loss


def _model(**kwargs: Any) -> _Classifier:
    torch.manual_seed(0)
    return _Classifier(**kwargs)


def _least(model: nn.Module, settings: Settings, inputs: Any = None) -> int:
    with pytest.raises(rkmate.InfeasibleBudget) as info:
        rkmate.wrap(model, inputs or _inputs(), budget=1, settings=settings, progress=False)
    return info.value.minimum_bytes


@pytest.mark.parametrize("kwargs", [
    {"biased": True}, {"tied": True}, {"returns": "logits"}, *(
        pytest.param(kwargs, marks=pytest.mark.slow) for kwargs in (
            {}, {"turned": True}, {"returns": "logits", "biased": True}))], ids=str)
@captured_once()
def test_budgets_that_nothing_else_meets(kwargs: dict[str, Any]) -> None:
    model, reference, inputs = _model(**kwargs), _model(**kwargs), _inputs()
    plain, least = _least(model, NEVER), _least(model, Settings())
    logits = 4 * 64 * CLASSES * 4
    assert plain - least > 0.7 * logits
    with pytest.warns(rkmate.RkmateWarning, match=r"a few rows at a time.*its last bits differ"):
        wrapped = rkmate.wrap(model, inputs, budget=least, progress=False)
    assert "few rows at a time" in wrapped.plan.note
    assert "def tiled_head" in wrapped.source
    loss, expected = _loss(wrapped(*inputs)), _loss(reference(*inputs))
    assert torch.equal(loss, expected) or kwargs.get("returns") != "logits"
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        if q.grad is None:
            assert p.grad is None
            continue
        assert p.grad is not None
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7, msg=name)
    sample = Sample(model, inputs, {}, _loss)
    assert measured_peak(wrapped, sample) <= least


@captured_once()
def test_off_where_the_step_fits_and_where_it_is_not_wanted() -> None:
    model, inputs = _model(), _inputs()
    plain = _least(model, NEVER)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = rkmate.wrap(model, inputs, budget=1.0, progress=False)
        wrapped = rkmate.wrap(model, inputs, budget=plain, settings=NEVER, progress=False)
    assert "tiled_head" not in whole.source and "tiled_head" not in wrapped.source
    with pytest.raises(rkmate.InfeasibleBudget):
        rkmate.wrap(model, inputs, budget=plain - 1, settings=NEVER, progress=False)
    always = rkmate.wrap(model, inputs, budget=plain, settings=Settings(chunked_loss="always"),
                         progress=False)
    assert "def tiled_head" in always.source


@captured_once()
def test_fractions_are_of_the_models_own_peak() -> None:
    model, inputs = _model(), _inputs()
    own = rkmate.plan(model, inputs, budget=1.0, progress=False).peak_bytes
    least = _least(model, Settings())
    fraction = (least + 1) / own
    assert rkmate.plan(model, inputs, budget=1.0, settings=Settings(chunked_loss="always"),
                       progress=False).peak_bytes < own
    with pytest.warns(rkmate.RkmateWarning, match="a few rows at a time"):
        made = rkmate.plan(model, inputs, budget=fraction, progress=False)
    assert made.budget_bytes == int(fraction * own)
    with pytest.warns(rkmate.RkmateWarning, match="a few rows at a time"):
        wrapped = rkmate.wrap(model, inputs, budget=fraction, progress=False)
    assert wrapped.plan.budget_bytes == int(fraction * own)


@captured_once()
def test_curves_reach_as_far_as_plans() -> None:
    model, inputs = _model(), _inputs()
    plain, least = _least(model, NEVER), _least(model, Settings())
    with pytest.warns(rkmate.RkmateWarning, match="a few rows at a time"):
        curve = rkmate.tradeoff(model, inputs, budgets=[least, 1.0, plain - 1], progress=False)
    assert [p.budget_bytes for p in curve] == [least, curve[1].baseline_peak_bytes, plain - 1]
    assert ["few rows" in p.note for p in curve] == [True, False, True]
    assert all(p.peak_bytes <= p.budget_bytes for p in curve)
    with pytest.warns(rkmate.RkmateWarning, match="a few rows at a time"):
        own = rkmate.tradeoff(model, inputs, progress=False)
    assert len(own) == 10 and own[-1].budget_bytes == least and "few rows" not in own[0].note
    with pytest.raises(rkmate.InfeasibleBudget) as info:
        rkmate.tradeoff(model, inputs, budgets=[least - 1, plain], progress=False)
    assert info.value.minimum_bytes == least


@captured_once()
def test_plans_of_it_are_saved_and_followed(tmp_path: Path) -> None:
    model, inputs = _model(returns="logits"), _inputs()
    least = _least(model, Settings())
    with pytest.warns(rkmate.RkmateWarning, match="a few rows at a time"):
        made = rkmate.plan(model, inputs, budget=least, progress=False)
    made.save(tmp_path / "plan.json")
    wrapped = rkmate.wrap(model, inputs, plan=rkmate.Plan.load(tmp_path / "plan.json"), progress=False)
    assert "def tiled_head" in wrapped.source
    wrapped(*inputs)["loss"].backward()


def test_other_losses_and_calls_get_it_too() -> None:
    model = _model()
    least = _least(model, Settings())
    with pytest.warns(rkmate.RkmateWarning, match="a few rows at a time"):
        wrapped = rkmate.wrap(model, _inputs(), budget=least, progress=False)
    small = [t[:3].clone() for t in _inputs()]
    with pytest.warns(rkmate.RkmateWarning, match="a few rows at a time"):
        wrapped(*small).backward()


@pytest.mark.parametrize("model", [
    _model(returns="entropy"), nn.Linear(WIDTH, CLASSES)], ids=["rows are mixed", "no loss"])
def test_what_is_not_recognised_stays(model: nn.Module) -> None:
    x, labels = _inputs()
    args = (x, labels) if isinstance(model, _Classifier) else (x,)
    captured = capture(model, args, {})
    joint = simplify(captured, captured.differentiable, frozenset(["chunked-loss"]))
    assert not joint.concerned["chunked-loss"]
    assert not any(isinstance(n.target, Tiled) for n in joint.graph.nodes)


def test_under_autocast() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = _model()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            with torch.autocast("cpu", torch.float16):
                return self.inner(x, labels)

    model, reference = Half(), Half()
    with captured_once():
        least = _least(model, Settings())
        with pytest.warns(rkmate.RkmateWarning, match="a few rows at a time"):
            wrapped = rkmate.wrap(model, _inputs(), budget=least, progress=False)
    loss, expected = wrapped(*_inputs()), reference(*_inputs())
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(model.inner.head.weight.grad, reference.inner.head.weight.grad, rtol=2e-2,
                               atol=1e-4)


@captured_once()
def test_parts_in_half_precision_are_added_up_in_float32() -> None:
    model, reference, exact = (
        _model(biased=True).to(t) for t in (torch.bfloat16, torch.bfloat16, torch.float64))
    exact.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    x, labels = _inputs()
    x = x.bfloat16()
    least = _least(model, Settings(), (x, labels))
    with pytest.warns(rkmate.RkmateWarning, match="a few rows at a time"):
        wrapped = rkmate.wrap(model, (x, labels), budget=least, progress=False)
    run, own = wrapped(x, labels), reference(x, labels)
    assert torch.equal(run, own)
    for loss in (run, own, exact(x.double(), labels)):
        loss.backward()
    for name in ("weight", "bias"):
        found, of_torch, true = (getattr(m.head, name).grad.double() for m in (model, reference, exact))
        assert (found - true).norm() <= 1.02 * (of_torch - true).norm(), name
    differ = torch.ne(model.head.weight.grad, reference.head.weight.grad)
    assert differ.float().mean() < 0.02
