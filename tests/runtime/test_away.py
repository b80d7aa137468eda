"""Steps that send data away: the same numbers, the predicted memory, and nothing left behind."""

from __future__ import annotations

import copy
import functools
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate.show.plan import Plan
from tests.capturing import captured_once
from tests.copying import BUFFERS, LateEngine, sending, use
from tests.equality import assert_same_step, measured_peak
from tests.models import BANK, Sample
from tests.planners.send_all import send_all

pytestmark = pytest.mark.usefixtures("deterministic")

QUICK = (("batch_norm_cnn", True), ("tied", False))
"""Of the bank; the others run with the slow tests."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateEngine]:
    made = use(monkeypatch, LateEngine())
    yield made
    gc.collect()
    assert made.opened == made.closed


class Small(nn.Module):
    """Dropout, batch norm, a view that is read twice, a write in place; two outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(32, 32) for _ in range(3))
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = nn.functional.dropout(self.norm(self.first(x)).relu(), 0.3)
        z = self.second(y).tanh()
        z = z.clone().add_(1).mul(y.t().reshape(32, -1).t().sin())
        return self.third(z).square().mean(), z.mean()


def sample() -> Sample:
    return Sample(Small(), (torch.randn(64, 32, generator=torch.Generator().manual_seed(1)),), {},
                  lambda output: output[0] + output[1])


@functools.cache
def plan() -> Plan:
    """Of `Small`, without copies."""
    s = sample()
    return rkmate.plan(s.model, s.args, budget=1.0, settings=rkmate.Settings(costs="analytic"),
                       progress=False)


def wrapped(folder: Path) -> rkmate.PlannedModule:
    s = sample()
    with captured_once("small and sent away"):
        return rkmate.wrap(s.model, s.args, s.kwargs, plan=sending(plan()), progress=False,
                           settings=rkmate.Settings(costs="analytic"), offload=str(folder))


@pytest.mark.parametrize(("name", "every_gap"), [
    (n, e) if (n, e) in QUICK else pytest.param(n, e, marks=pytest.mark.slow)
    for n in BANK for e in (False, True)])
def test_everything_away(name: str, every_gap: bool, engine: LateEngine, tmp_path: Path) -> None:
    make = functools.partial(BANK[name], dropout=0.1) if "dropout" in BANK[name].__code__.co_varnames \
        else BANK[name]
    sample, original = make(), make()
    with captured_once():
        plain = rkmate.plan(sample.model, sample.args, sample.kwargs, budget=1.0, progress=False)
        sent = sending(plain, functools.partial(send_all, every_gap=every_gap))
        module = rkmate.wrap(sample.model, sample.args, sample.kwargs, plan=sent, progress=False,
                             offload=str(tmp_path))
    assert sent.schedule.copied and len(sent.schedule.copied) >= 5
    assert_same_step(original.model, module, original)
    assert module.plan.peak_bytes == pytest.approx(measured_peak(module, sample), rel=0.02)


def test_away_and_back(engine: LateEngine, tmp_path: Path) -> None:
    module, original = wrapped(tmp_path), sample()
    assert_same_step(original.model, module, original)
    assert engine.opened == engine.closed == 2
    n = len(module.plan.schedule.copied)
    assert [engine.words.count(w) for w in ("out", "leave", "back", "arrive")] == [2 * n] * 4
    assert "env.copy_out(" in module.source and "\nFour kinds of statements" in module.source


def test_the_first_step_is_verified(engine: LateEngine, tmp_path: Path) -> None:
    module, original = wrapped(tmp_path), sample()
    assert_same_step(original.model, module, original, steps=3)
    assert (engine.opened, engine.verified) == (3, 1)
    again = rkmate.wrap(sample().model, sample().args, plan=sending(plan()), progress=False,
                        settings=rkmate.Settings(run=rkmate.RunSettings(verify=False)), offload=str(tmp_path))
    sum(again(*original.args)).backward()
    assert (engine.opened, engine.verified) == (4, 1)


def test_several_forwards_before_a_backward(engine: LateEngine, tmp_path: Path) -> None:
    module, original = wrapped(tmp_path), sample()
    x, y = torch.randn(2, 64, 32)

    def step(m: nn.Module) -> None:
        torch.manual_seed(0)
        a, b = m(x), m(y)
        (b[0] * a[1] + a[0] + b[1]).backward()

    step(original.model)
    step(module)
    assert engine.opened == engine.closed == 2
    for p, q in zip(original.model.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0)


def test_a_forward_without_a_backward(engine: LateEngine, tmp_path: Path) -> None:
    module = wrapped(tmp_path)
    output = module(*sample().args)
    assert (engine.opened, engine.closed) == (1, 0)
    del output
    gc.collect()
    assert engine.closed == 1


def test_an_open_call_holds_its_buffers(engine: LateEngine, tmp_path: Path) -> None:
    module = wrapped(tmp_path)
    output = module(*sample().args)
    call, = module._plans.open_calls.now()
    held = call.env.held()
    loss = sum(output)
    loss.backward()
    assert held >= BUFFERS and call.env.held() == 0


def test_without_gradients_nothing_is_sent(engine: LateEngine, tmp_path: Path) -> None:
    module = wrapped(tmp_path)
    with torch.no_grad():
        module(*sample().args)
    assert engine.opened == 0


@pytest.mark.filterwarnings("ignore:the loss depends on")
def test_a_loss_that_leaves_an_output_out_runs_the_forward_again(engine: LateEngine, tmp_path: Path) -> None:
    module, original = wrapped(tmp_path), sample()
    one = Sample(original.model, original.args, {}, lambda output: output[1])
    assert_same_step(original.model, module, one)


def test_a_graph_that_is_kept(engine: LateEngine, tmp_path: Path) -> None:
    module = wrapped(tmp_path)
    loss = sum(module(*sample().args))
    loss.backward(retain_graph=True)
    assert engine.closed == engine.opened
    before = [p.grad.clone() for p in module.parameters()]
    loss.backward()
    assert engine.closed == engine.opened
    assert all(torch.equal(p.grad, b + b) for p, b in zip(module.parameters(), before, strict=True))
    with pytest.raises(rkmate.BackwardError, match="has been through a backward already"):
        loss.backward()


def test_a_double_backward_beside_it(engine: LateEngine, tmp_path: Path) -> None:
    s = Sample(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()),
               (torch.randn(16, 8, requires_grad=True),), {}, lambda output: output.sum())
    twin = copy.deepcopy(s.model)
    plain = rkmate.plan(s.model, s.args, budget=1.0, settings=rkmate.Settings(costs="analytic"),
                        progress=False)
    module = rkmate.wrap(s.model, s.args, plan=sending(plain), progress=False, offload=str(tmp_path))

    def penalty(m: nn.Module) -> list[torch.Tensor]:
        x = s.args[0].detach().requires_grad_()
        inner, = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        inner.square().sum().backward()
        return [p.grad.clone() for p in m.parameters() if p.grad is not None]

    with pytest.warns(rkmate.RkmateWarning, match="create_graph"):
        actual = penalty(module)
    assert all(torch.equal(a, b) for a, b in zip(penalty(twin), actual, strict=True))
    gc.collect()
    assert engine.opened == engine.closed


def _state(module: nn.Module) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(t.detach().clone() for t in (*module.parameters(), *module.buffers()))]


@pytest.mark.parametrize(("share", "error"), [
    (0.0, rkmate.OffloadError), (0.3, rkmate.OffloadError), (0.6, rkmate.OffloadError),
    (0.99, rkmate.OffloadError), (0.3, KeyboardInterrupt), (0.6, KeyboardInterrupt)])
def test_an_error_between_copies(share: float, error: type[BaseException], monkeypatch: pytest.MonkeyPatch,
                                 tmp_path: Path) -> None:
    """Nothing is left open; the step before the error and the one after it are the original's."""
    copies = 4 * len(sending(plan()).schedule.copied)
    number = int(share * copies)
    engine = use(monkeypatch, LateEngine(number, error))
    module, original = wrapped(tmp_path), sample()
    before, hooks = _state(module), len(module._forward_hooks)
    forward = number < 2 * len(module.plan.schedule.copied)
    with pytest.raises(error, match="failed"):
        sum(module(*original.args)).backward()
    gc.collect()
    assert engine.opened == engine.closed == 1
    after = _state(module)
    if forward:
        same = after[1:] if error is not rkmate.OffloadError else after
        assert all(map(torch.equal, before[-len(same):], same))
    assert len(module._forward_hooks) == hooks
    module.load_state_dict(original.model.state_dict())
    module.zero_grad()
    assert_same_step(original.model, module, original)
    assert engine.opened == engine.closed == 3


def test_a_place_that_refuses_a_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = use(monkeypatch, LateEngine())
    module, original = wrapped(tmp_path), sample()

    def refused(*, verify: bool) -> Any:
        raise rkmate.OffloadError("no room")

    monkeypatch.setattr(engine, "open", refused)
    with pytest.raises(rkmate.OffloadError, match="no room"):
        module(*original.args)
    monkeypatch.undo()
    use(monkeypatch, engine)
    assert_same_step(original.model, module, original)


def test_the_engine_goes_with_the_plan(engine: LateEngine, tmp_path: Path) -> None:
    module = wrapped(tmp_path)
    before = engine.ended                   # it was asked for its buffers
    del module
    gc.collect()
    assert engine.ended == before + 1


def test_peaks_of_several_calls_count_buffers(engine: LateEngine, tmp_path: Path) -> None:
    s = sample()
    plain = rkmate.plan(s.model, s.args, budget=1.0, settings=rkmate.Settings(costs="analytic"),
                        progress=False, calls=2)
    module = rkmate.wrap(s.model, s.args, plan=sending(plain), progress=False, offload=str(tmp_path))
    both = Sample(s.model, s.args, {}, s.loss)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = self.inner(x), self.inner(x)
            return a[0] + b[0], a[1] + b[1]

    assert measured_peak(Twice(), both) <= module.plan.peak_bytes


def on_disk(folder: Path, *, verify: bool) -> rkmate.PlannedModule:
    """`verify`: in every step."""
    s = sample()
    with captured_once("small and sent away"):
        plain = rkmate.plan(s.model, s.args, budget=1.0, settings=rkmate.Settings(costs="analytic"),
                            progress=False, offload=folder)
        return rkmate.wrap(s.model, s.args, plan=sending(plain, link=plain.graph.cd.link), progress=False,
                           settings=rkmate.Settings(costs="analytic"),
                           offload=rkmate.Offload(folder, verify=verify))


# Of a file system that is memory.
@pytest.mark.filterwarnings("ignore::rkmate.errors.RkmateWarning")
def test_a_folder_on_a_disk(tmp_path: Path) -> None:
    module, s, original = on_disk(tmp_path, verify=True), sample(), sample()
    assert_same_step(original.model, module, original)
    assert module.plan.peak_bytes == pytest.approx(measured_peak(module, s), rel=0.02)
    assert not [*tmp_path.iterdir()]


@pytest.mark.filterwarnings("ignore::rkmate.errors.RkmateWarning")
def test_bytes_that_the_disk_loses_are_missed_in_the_first_step(monkeypatch: pytest.MonkeyPatch,
                                                                tmp_path: Path) -> None:
    module, original, read = on_disk(tmp_path, verify=False), sample(), os.preadv

    def lossy(number: int, buffers: list[Any], offset: int) -> int:
        count = read(number, buffers, offset)
        buffers[0][0] ^= 1
        return count

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lossy)
        with pytest.raises(rkmate.OffloadError, match=f"{tmp_path}: some of .* differ from those"):
            sum(module(*original.args)).backward()
        sum(module(*original.args)).backward()      # nobody looks any more
    module.load_state_dict(original.model.state_dict())
    module.zero_grad()
    assert_same_step(original.model, module, original)


@pytest.mark.filterwarnings("ignore::rkmate.errors.RkmateWarning")
def test_a_folder_that_is_removed_serves_the_plans_that_are_there(tmp_path: Path) -> None:
    folder = tmp_path / "away"
    folder.mkdir()
    module, original = on_disk(folder, verify=False), sample()
    folder.rmdir()
    assert_same_step(original.model, module, original)
    with pytest.raises(rkmate.ArgumentError, match=f"{folder}.*there is no such folder"):
        module(torch.randn(48, 32))
    assert_same_step(original.model, module, original)
