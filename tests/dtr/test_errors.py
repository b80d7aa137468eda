"""What an error or an interrupt leaves behind."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rkmate.dtr
from rkmate.dtr import BudgetExceeded, RuntimeStateError
from rkmate.dtr.runtime.rematerialize import Rematerializer
from rkmate.dtr.runtime.sizes import Sizes
from rkmate.errors import ArgumentError


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.3), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def state(model: nn.Module) -> list[torch.Tensor]:
    return [t.clone() for t in (*model.parameters(), *model.buffers(), torch.get_rng_state())]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, first, second))


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_the_block_puts_buffers_and_generators_back(error: type[BaseException]) -> None:
    model, x = network(), torch.randn(128, 64)
    before = state(model)
    with pytest.raises(error):
        with rkmate.dtr("200KiB", overhead_limit=1000, restore=model):
            model(x)
            assert not same(before, state(model))
            raise error
    assert same(before, state(model))


def test_a_budget_error_puts_them_back() -> None:
    model, x = network(), torch.randn(128, 64)
    before = state(model)
    with pytest.raises(BudgetExceeded):
        with rkmate.dtr("100KiB", restore=model):
            model(x)
            torch.ones(1000, 1000) + 1
    assert same(before, state(model))


def test_without_an_error_nothing_is_put_back() -> None:
    model, x = network(), torch.randn(128, 64)
    before = state(model)
    with rkmate.dtr("1MiB", restore=model):
        model(x).sum().backward()
    assert not same(before, state(model))


def test_only_a_module_is_put_back() -> None:
    with pytest.raises(ArgumentError, match="restore"):
        rkmate.dtr("1MiB", restore="model")
    with pytest.raises(ArgumentError, match="restore"):
        rkmate.dtr.wrap(network(), "1MiB", restore=network())


def interrupt_after(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, calls: int
) -> list[int]:
    """Ctrl-C arrives when ``method`` returns for the ``calls``-th time."""
    original: Callable[..., Any] = getattr(owner, method)
    left = [calls]

    def run(self: Any, *args: Any) -> Any:
        result = original(self, *args)
        left[0] -= 1
        if left[0] == 0:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(owner, method, run)
    return left


@pytest.mark.parametrize("calls", [5, 6, 7, 8, 30, 41])
@pytest.mark.parametrize("place", [(Sizes, "run"), (Rematerializer, "_call")])
def test_an_interrupt_waits_for_the_operation(
    monkeypatch: pytest.MonkeyPatch, place: tuple[type, str], calls: int
) -> None:
    # Additions in place: an interrupt between a kernel and its record would lose one of them.
    kept: list[torch.Tensor] = []
    left = interrupt_after(monkeypatch, *place, calls)
    with pytest.raises(KeyboardInterrupt):
        with rkmate.dtr(60_000, overhead_limit=1000):
            for step in range(200):
                kept.append(torch.full((1000,), float(step)))
                kept[-1].add_(1)
                kept[step // 3].mul_(2)
                kept[step // 3].mul_(0.5)
    assert left[0] <= 0
    for step, value in enumerate(kept[:-1]):
        # The last product may have been doubled only.
        assert value.eq(step + 1).all() or value.eq(2 * step + 2).all()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with rkmate.dtr("1MiB"):
        assert torch.equal(torch.ones(3) + 1, torch.full((3,), 2.0))


def test_an_interrupted_call_leaves_a_wrapped_module_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = network(), torch.randn(128, 64)
    wrapped = rkmate.dtr.wrap(model, "1MiB")
    before = state(model)
    with monkeypatch.context() as patch:
        interrupt_after(patch, Sizes, "run", 11)
        with pytest.raises(KeyboardInterrupt):
            wrapped(x)
    assert same(before, state(model))
    assert not model._forward_hooks and not wrapped._forward_hooks
    wrapped(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    again = network()
    torch.set_rng_state(before[-1])
    again(x).sum().backward()
    assert same(expected, [p.grad for p in again.parameters() if p.grad is not None])


def test_what_is_asked_at_the_wrong_time() -> None:
    session = rkmate.dtr("1MiB")
    with pytest.raises(RuntimeStateError, match="no report before the block has run"):
        _ = session.report
    with pytest.raises(RuntimeStateError, match="belongs inside the with block"):
        session.batch()
    with session, pytest.raises(RuntimeStateError, match="cannot be inside another one"):
        rkmate.dtr("1MiB").__enter__()
    with pytest.raises(ArgumentError, match="wrapped already"):
        rkmate.dtr.wrap(rkmate.dtr.wrap(nn.Linear(2, 2), "1MiB"), "1MiB")
    with pytest.raises(ArgumentError, match="must be a name, not int"):
        rkmate.dtr.make_heuristic(3)  # type: ignore[arg-type]
