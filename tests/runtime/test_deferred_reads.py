"""Deferred outputs that are read in every step, and where they are decided on."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rkmate
from rkmate.pipeline.settings import Settings
from rkmate.runtime.deferred import DeferredTensor, Reads

WIDTH, CLASSES = 16, 512
CHUNKED = Settings(costs="analytic", chunked_loss="always")
COUNTED = Settings(costs="analytic", chunked_loss="always", deferred_outputs="never")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rkmate.device.cpu.PART_BYTES", 2**13)


class Classifier(nn.Module):
    """Returns its loss and its logits. `capped`: as Gemma does."""

    def __init__(self, capped: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.capped = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES), capped

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.body(x)))
        loss = F.cross_entropy(logits.view(-1, CLASSES), y.view(-1))
        return {"loss": loss, "logits": torch.tanh(logits / 30) * 30 if self.capped else logits}


def _inputs(batch: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(batch, 32, WIDTH, generator=generator),
            torch.randint(0, CLASSES, (batch, 32), generator=generator))


def _whole(settings: Settings) -> int:
    return rkmate.plan(Classifier(), _inputs(), budget=1.0, settings=settings, progress=False).peak_bytes


def test_what_counts_as_every_step() -> None:
    reads = Reads()
    first, second, third = reads.call(), reads.call(), reads.call()
    first("logits")
    first("aux")
    assert not reads.often
    third("logits")
    assert not reads.often
    second("logits")                    # late, and not after another
    fourth = reads.call()
    fourth("logits")
    assert not reads.often
    reads.call()("logits")
    assert reads.often
    with pytest.warns(rkmate.RkmateWarning, match="the output logits is read in every step"):
        reads.tell(1)
    reads.call()("logits")
    assert reads.often


def test_outputs_that_are_read_in_every_step_are_planned() -> None:
    budget = 2 * _whole(COUNTED)
    wrapped = rkmate.wrap(Classifier(), _inputs(), budget=budget, settings=CHUNKED, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for read in (True, False, True, True):                 # a look now and then changes nothing
            out = wrapped(*_inputs())
            assert isinstance(out["logits"], DeferredTensor)
            if read:
                out["logits"].sum()
                out["logits"].sum()
            out["loss"].backward()
    with pytest.warns(rkmate.RkmateWarning, match=r"output logits is read in every step.*deferred_outputs"):
        out = wrapped(*_inputs())
    out["loss"].backward()
    assert type(out["logits"]) is torch.Tensor
    assert wrapped.plan.deferred == () and wrapped.plan.peak_bytes <= budget
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in (3, 4):
            out = wrapped(*_inputs(batch))
            assert type(out["logits"]) is torch.Tensor
            out["loss"].backward()


def test_saved_plans_do_not_bring_them_back() -> None:
    made = rkmate.plan(Classifier(), _inputs(), budget=2 * _whole(COUNTED), settings=CHUNKED, progress=False)
    wrapped = rkmate.wrap(Classifier(), _inputs(), plan=made, settings=CHUNKED, progress=False)
    for _ in range(2):
        wrapped(*_inputs())["logits"].sum()
    with pytest.warns(rkmate.RkmateWarning, match="is read in every step"):
        assert type(wrapped(*_inputs())["logits"]) is torch.Tensor


def test_they_stay_deferred_where_no_plan_has_room_for_them() -> None:
    wrapped = rkmate.wrap(Classifier(), _inputs(), budget=_whole(CHUNKED), settings=CHUNKED, progress=False)
    for _ in range(2):
        wrapped(*_inputs())["logits"].sum()
    with pytest.warns(rkmate.RkmateWarning, match=r"in every step.*bytes at least, more than the budget"):
        wrapped(*_inputs())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            logits = wrapped(*_inputs())["logits"]
            assert isinstance(logits, DeferredTensor)
            logits.sum()
            del logits                   # else two calls would be open


def test_logits_that_something_is_done_to() -> None:
    model, reference = Classifier(capped=True), Classifier(capped=True)
    wrapped = rkmate.wrap(model, _inputs(), budget=1.0, settings=CHUNKED, progress=False)
    out, expected = wrapped(*_inputs()), reference(*_inputs())
    assert wrapped.plan.deferred == ("logits",) and isinstance(out["logits"], DeferredTensor)
    assert torch.equal(out["logits"], expected["logits"])
    out["loss"].backward()
    expected["loss"].backward()
    assert "tanh" in wrapped.source.rpartition("def output_1_values_1")[2]


def test_under_autocast_they_are_what_autocast_makes() -> None:
    model, reference = Classifier(), Classifier()
    with torch.autocast("cpu", torch.bfloat16):
        wrapped = rkmate.wrap(model, _inputs(), budget="1MiB", settings=CHUNKED, progress=False)
        out, expected = wrapped(*_inputs()), reference(*_inputs())
    assert wrapped.plan.deferred == ("logits",)
    assert out["logits"].dtype is torch.bfloat16 and torch.equal(out["logits"], expected["logits"])
    later = wrapped(*_inputs())["logits"]
    assert later.dtype is torch.float32 and torch.equal(later, reference(*_inputs())["logits"])


def test_trained_logits_and_padded_calls_have_ordinary_ones() -> None:
    trained = rkmate.wrap(Classifier(), _inputs(), budget=1.0,
                          settings=replace(CHUNKED, trains="all"), progress=False)
    assert trained.plan.deferred == () and type(trained(*_inputs())["logits"]) is torch.Tensor
    padded = rkmate.wrap(Classifier(), _inputs(), budget=1.0,
                         settings=replace(CHUNKED, run=rkmate.RunSettings(
                             lengths=(32,), pad={"x": 0.0, "y": -100})), progress=False)
    assert padded.plan.deferred == ()


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_in_a_compiled_function() -> None:
    wrapped = rkmate.wrap(Classifier(), _inputs(), budget=1.0, settings=CHUNKED, progress=False)
    reference = Classifier()

    @torch.compile(backend="eager")
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = wrapped(x, y)
        return out["loss"] + out["logits"].detach().mean()

    expected = reference(*_inputs())
    torch.testing.assert_close(step(*_inputs()), expected["loss"] + expected["logits"].mean())
