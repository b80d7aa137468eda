"""Steps that are recorded and replayed (CUDA graphs)."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate.errors import ArgumentError, BackwardError
from rkmate.runtime import recorded_step
from tests.options import options_of

X = torch.zeros(4, 8)


def _assert_same(some: torch.Tensor | None, other: torch.Tensor | None) -> None:
    """By value, where kernels compute; else by form."""
    assert some is not None and other is not None
    if int(torch.ones(2, device="cuda").sum()) == 2:
        torch.testing.assert_close(some, other)
    assert some.shape == other.shape and some.stride() == other.stride()


def _model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 8))
                           for _ in range(4)))


def _wrapped(model: nn.Module, x: torch.Tensor, **more: Any) -> Any:
    return rkmate.wrap(model, (x,), budget=1.0, progress=False,
                       **options_of(costs="analytic", verify=False, cuda_graph=True, **more))


def test_it_takes_a_cuda_device() -> None:
    with pytest.raises(ArgumentError, match="records the step on a CUDA device, and the model is on cpu"):
        _wrapped(_model(), X)


class _Counts(nn.Linear):
    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        seen.add_(y.detach().mean(0))
        return y


def test_a_forward_that_writes_to_an_argument_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would write to the copy that a recording reads."""
    monkeypatch.setattr(recorded_step, "can_record", lambda device: True)
    with pytest.raises(ArgumentError, match="writes to tensor 1 among them"):
        rkmate.wrap(_Counts(8, 8), (X, torch.zeros(8)), budget=1.0,
                    settings=rkmate.Settings(costs="analytic", run=rkmate.RunSettings(cuda_graph=True)),
                    progress=False)


class _Waiting:
    """Stands for a recorder where an operation of every step waits."""

    def __init__(self, device: torch.device) -> None:
        pass

    def generators(self, names: Sequence[str]) -> list[torch.Generator]:
        return [torch.Generator() for _ in names]

    @contextmanager
    def waiting_is_an_error(self) -> Iterator[None]:
        yield
        raise RuntimeError("called a synchronizing CUDA operation")


def test_a_step_that_waits_is_refused_before_anything_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the step that finds it out leaves no trace: no statistics, no draws."""
    monkeypatch.setattr(recorded_step, "can_record", lambda device: True)
    monkeypatch.setattr(recorded_step, "Recorder", _Waiting)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))
    module = _wrapped(model, X + 1)
    module(X + 1).sum().backward()
    statistics, random = copy.deepcopy(dict(model.named_buffers())), torch.get_rng_state()
    gradients = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    with pytest.raises(ArgumentError, match=r"an operation asks the host.*synchronizing"):
        module(X + 1)
    assert all(torch.equal(statistics[name], b) for name, b in model.named_buffers())
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(g, p.grad) for g, p in zip(gradients, model.parameters(), strict=True))


@pytest.fixture
def x() -> torch.Tensor:
    return X.cuda()


@pytest.mark.gpu
@pytest.mark.parametrize(("more", "why"), [({"gradients": "in_place"}, "in_place"), ({"calls": 2}, "calls=2"),
                                           ({"settings": rkmate.Settings(opaque=("2",))}, "run as they are")])
def test_what_cannot_be_recorded_is_refused(x: torch.Tensor, more: dict[str, Any], why: str) -> None:
    with pytest.raises(ArgumentError, match=why):
        _wrapped(_model().cuda(), x, **more)


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("planner", ["save-all", "recompute-all"])
def test_steps_follow_one_another(x: torch.Tensor, dropout: float, planner: str) -> None:
    model = _model(dropout).cuda()
    plain = copy.deepcopy(model)
    module = _wrapped(model, x, planner=planner)
    for step in range(4):
        given = x + step
        for m in (plain, module):
            torch.manual_seed(step)
            m.zero_grad()
            m(given).sum().backward()
        if not dropout:
            for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                _assert_same(q.grad, p.grad)


def _trained(x: torch.Tensor, steps: int) -> tuple[nn.Module, Any]:
    """A model after some steps, and what wraps it."""
    model = _model().cuda()
    module = _wrapped(model, x)
    for _ in range(steps):
        module.zero_grad()
        module(x).sum().backward()
    return model, module


@pytest.mark.gpu
def test_gradients_are_added_to_those_that_are_there(x: torch.Tensor) -> None:
    model, module = _trained(x + 1, 3)
    once = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    module(x + 1).sum().backward()
    for p, g in zip(model.parameters(), once, strict=True):
        _assert_same(p.grad, 2 * g)


@pytest.mark.gpu
def test_a_forward_finds_no_gradient_in_the_memory_of_the_recording(x: torch.Tensor) -> None:
    """The forward and the backward share memory, so the forward may write to where gradients stood."""
    model, module = _trained(x + 1, 3)
    before = [(p.grad.data_ptr(), p.grad.clone()) for p in model.parameters()]  # type: ignore[union-attr]
    module(x + 1)
    for p, (address, grad) in zip(model.parameters(), before, strict=True):
        assert p.grad is not None and p.grad.data_ptr() != address
        _assert_same(p.grad, grad)


@pytest.mark.gpu
def test_a_gradient_that_is_still_held_is_not_written_over(x: torch.Tensor) -> None:
    model, module = _trained(x, 2)
    held = [p.grad for p in model.parameters()]
    module.zero_grad()
    with pytest.raises(BackwardError, match="still held"):
        module(x).sum().backward()
    del held
    module(x).sum().backward()


@pytest.mark.gpu
def test_a_backward_comes_before_the_next_forward(x: torch.Tensor) -> None:
    module = _wrapped(_model().cuda(), x)
    module(x).sum().backward()
    first, second = module(x), module(x)
    with pytest.raises(BackwardError, match="before the next forward"):
        first.sum().backward()
    second.sum().backward(retain_graph=True)
    with pytest.raises(BackwardError, match="and once"):
        second.sum().backward()
    third = module(x)
    with torch.no_grad():
        next(module.parameters()).add_(1)
    with pytest.raises(BackwardError, match="changed in place"):
        third.sum().backward()


@pytest.mark.gpu
def test_another_place_is_another_recording(x: torch.Tensor) -> None:
    """Parameters that are replaced are followed; and the first step of a plan runs as it is."""
    model = _model().cuda()
    module = _wrapped(model, x)
    module(x).sum().backward()
    recordings = []
    for _ in range(2):
        module(x).sum().backward()
        recordings.append(module._latest.recorded)
    assert recordings[0] is recordings[1] is not None
    first = next(model.children())[0]  # type: ignore[index]
    first.weight = nn.Parameter(first.weight.detach().clone())
    module(x).sum().backward()
    assert module._latest.recorded is not recordings[0] and first.weight.grad is not None


class _ThroughTheHost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x).cpu().sigmoid().to(x.device))
        return y


@pytest.mark.gpu
def test_an_operation_that_waits_is_refused_and_the_process_goes_on(x: torch.Tensor) -> None:
    module = _wrapped(_ThroughTheHost().cuda(), x)
    module(x).sum().backward()
    stream = torch.cuda.current_stream()
    with pytest.raises(ArgumentError, match="asks the host"):
        module(x)
    assert torch.cuda.current_stream() == stream and torch.cuda.get_sync_debug_mode() == 0
    test_steps_follow_one_another(x, 0.0, "save-all")
