"""Training loops as people write them, and what goes wrong in them."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate.measure.step import measure_peak
from tests.semantics.steps import (
    Tower,
    assert_equal,
    assert_same_gradients,
    gradients,
    planned,
    tightest,
)


def test_gradients_accumulate_one_at_a_time() -> None:
    model = Tower(width=64, depth=8)
    x = torch.randn(4, 64)
    module = planned(model, x)
    for _ in range(2):
        module(x).sum().backward()
    twin = copy.deepcopy(model)
    twin.zero_grad()
    for _ in range(2):
        twin(x).sum().backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert measure_peak(lambda: module(x).sum().backward()).peak <= module.plan.peak_bytes


def test_gradients_of_one_block_leave_one_at_a_time() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum(torch.tanh(layer(x)) for layer in self.layers)  # type: ignore[return-value]

    model, x = Wide(), torch.randn(1, 1024)
    module = planned(model, x)
    for _ in range(2):
        module(x).sum().backward()
    weight = model.layers[0].weight.numel() * 4
    assert measure_peak(lambda: module(x).sum().backward()).peak < 1.5 * weight


def test_several_forwards_before_the_backwards() -> None:
    model, x = Tower(dropout=0.2), torch.randn(8, 16)
    module = tightest(model, x, calls=3)
    parts = [x, x + 1, x * 2]

    def run(m: nn.Module) -> dict[str, torch.Tensor | None]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        losses = [m(p).sum() for p in parts]
        for k in (1, 2, 0):
            losses[k].backward()
        return {n: p.grad.clone() for n, p in model.named_parameters()}

    assert_equal(run(model), run(module))


def test_a_forward_without_backward_frees_its_memory() -> None:
    model, x = Tower(width=64), torch.randn(64, 64)
    module = planned(model, x)
    module(x)
    gc.collect()
    gc.disable()          # the memory goes by itself, not when the collector comes
    try:
        def forward() -> None:
            module(x)

        assert measure_peak(forward).net == 0
        out = module(x)
        out.sum().backward()

        def step() -> None:
            module(x).sum().backward()

        assert measure_peak(step).net == 0
    finally:
        gc.enable()


def test_two_wrapped_modules_in_one_model() -> None:
    first, second = Tower(dropout=0.2), Tower(dropout=0.2)
    x = torch.randn(8, 16)
    whole = nn.Sequential(first, second)
    parts = nn.Sequential(tightest(first, x), tightest(second, x))
    expected = gradients(whole, whole, lambda run: run(x).pow(2).sum())
    actual = gradients(parts, parts, lambda run: run(x).pow(2).sum())
    assert_equal(expected, actual)


def test_one_wrapped_module_inside_another() -> None:
    inner, x = Tower(), torch.randn(8, 16)
    outer = nn.Sequential(planned(inner, x), nn.Linear(16, 16), nn.Tanh())
    module = tightest(outer, x)
    assert list(module.state_dict()) == list(outer.state_dict())
    assert_same_gradients(outer, module, lambda run: run(x).sum())
    again = planned(module, x)
    assert_same_gradients(outer, again, lambda run: run(x).sum())


class Stop(BaseException):
    """Neither an Exception nor one that anything catches, as a KeyboardInterrupt."""


@pytest.mark.filterwarnings("ignore:the loss that is computed from the outputs")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, Stop])
def test_an_interrupted_step_leaves_the_next_one_whole(error: type[BaseException]) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Interrupt(TorchDispatchMode):
        """Raises from the given operation on; `draws`: only those that draw are counted."""

        def __init__(self, after: int, draws: bool = False) -> None:
            super().__init__()
            self.left = after
            self.draws = draws

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.left -= not self.draws or torch.Tag.nondeterministic_seeded in func.tags
            if self.left < 0:
                raise error
            return func(*args, **(kwargs or {}))

    torch.manual_seed(0)
    model = nn.Sequential(Tower(dropout=0.2), nn.BatchNorm1d(16), Tower(dropout=0.2))
    x = torch.randn(32, 16)
    module = tightest(model, x)
    before = copy.deepcopy(model.state_dict())
    for after in (0, 3, 10):
        with pytest.raises(error), Interrupt(after):
            module(x)
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
    for after, draws in ((0, False), (5, False), (25, False), (0, True), (1, True)):
        loss = module(x).sum()
        state = torch.get_rng_state()
        with pytest.raises(error), Interrupt(after, draws):
            loss.backward()
        assert torch.equal(torch.get_rng_state(), state)
        if after or draws:         # the first operation is still autograd's own
            with pytest.raises(rkmate.BackwardError):
                loss.backward()
        del loss                             # its forward may wait for a backward still
        model.load_state_dict(before)
    assert_same_gradients(model, module, lambda run: run(x).pow(2).sum())


def test_backward_twice() -> None:
    x = torch.randn(8, 16)
    model = Tower()
    module = planned(model, x)
    loss = module(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(rkmate.BackwardError, match="through a backward already"):
        loss.backward()

    def twice(run: Any) -> torch.Tensor:
        loss = run(x).sum()
        loss.backward(retain_graph=True)
        return loss  # type: ignore[no-any-return]

    assert_same_gradients(model, module, twice)


def test_a_part_of_the_backward_and_then_all_of_it() -> None:
    model, x = Tower(depth=16, dropout=0.2), torch.randn(8, 16)
    module = planned(model, x)

    def twice(run: Any) -> torch.Tensor:
        loss = run(x).sum()
        (found,) = torch.autograd.grad(loss, [model.layers[15].weight], retain_graph=True)
        return loss * found.norm()

    assert_same_gradients(model, module, twice)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
def test_copies_are_modules_of_their_own(way: str) -> None:
    model, x = Tower(dropout=0.2), torch.randn(32, 16)
    module = tightest(model, x)
    if way == "deepcopy":
        other = copy.deepcopy(module)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(module))
    else:
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert isinstance(other, rkmate.PlannedModule)
    assert other.plan == module.plan
    for a, b in zip(module.parameters(), other.parameters(), strict=True):
        assert a is not b
        assert torch.equal(a, b)
    assert_same_gradients(other.original, other, lambda run: run(x).sum())
    assert other.plan.schedule == module.plan.schedule


def test_state_dictionaries() -> None:
    model, x = nn.Sequential(Tower(), nn.BatchNorm1d(16)), torch.randn(8, 16)
    module = planned(model, x)
    assert list(module.state_dict()) == list(model.state_dict())
    other = nn.Sequential(Tower(), nn.BatchNorm1d(16))
    module.load_state_dict(other.state_dict())
    assert torch.equal(model[0].layers[0].weight, other[0].layers[0].weight)
    assert_same_gradients(model, module, lambda run: run(x).pow(2).sum())


def test_moving_the_module_afterwards() -> None:
    model, x = Tower(), torch.randn(8, 16)
    module = planned(model, x)
    assert module.to(torch.float64) is module
    assert_same_gradients(model, module, lambda run: run(x.double()).sum())
    module.float()
    assert_same_gradients(model, module, lambda run: run(x).sum())


def in_two_threads(work: Callable[[int], None]) -> None:
    """`work`, called with 0 and with 1 side by side."""
    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()


@pytest.mark.filterwarnings("ignore:the loss that is computed from the outputs")
def test_threads() -> None:
    """Two modules planned and trained side by side: right, or an error that says what happened."""
    x = torch.randn(32, 16)
    models = [Tower(dropout=0.0, depth=3 + k) for k in range(2)]
    expected = [gradients(m, m, lambda run: run(x).pow(2).sum()) for m in models]
    found: list[dict[str, torch.Tensor | None]] = [{}, {}]
    failures: list[BaseException] = []

    def work(k: int) -> None:
        try:
            module = tightest(models[k], x)
            for _ in range(5):
                found[k] = gradients(models[k], module, lambda run: run(x).pow(2).sum())
        except BaseException as error:
            failures.append(error)

    in_two_threads(work)
    assert not failures, failures
    for a, b in zip(expected, found, strict=True):
        assert_equal(a, b)


def test_threads_that_draw() -> None:
    """With dropout, two threads share the generator: a step's gradients are those of the masks that it
    has drawn, or it says that another thread drew between them."""
    class Masks(nn.Module):
        """Returns the masks that it drew, summed over the rows, which are all equal otherwise."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            total, drawn = x.new_zeros(()), []
            for layer in self.layers:
                mask = nn.functional.dropout(torch.ones_like(x), 0.5)
                total = total + (torch.tanh(layer(x)) * mask).sum()
                drawn.append(mask.sum(0))
            return total, torch.stack(drawn).detach()

    x = torch.ones(32, 16)
    modules = [tightest(Masks(), x) for _ in range(2)]
    assert all("env.replay" in m.source for m in modules)
    failures: list[BaseException] = []
    right = [0, 0]

    def work(k: int) -> None:
        model = modules[k].original
        for _ in range(20):
            try:
                loss, drawn = modules[k](x)
                grads = torch.autograd.grad(loss, [layer.bias for layer in model.layers])
            except rkmate.BackwardError as error:
                if "another thread" not in str(error):
                    failures.append(error)
                continue
            except BaseException as error:
                failures.append(error)
                continue
            for layer, grad, mask in zip(model.layers, grads, drawn, strict=True):
                expected = mask * (1 - torch.tanh(layer(x[:1]))[0] ** 2)
                if not torch.allclose(grad, expected, rtol=1e-4, atol=1e-5):
                    failures.append(AssertionError("the gradient is another mask's"))
            right[k] += 1

    in_two_threads(work)
    assert not failures, failures
    assert all(right)


def test_train_and_eval_flags_have_plans_of_their_own() -> None:
    model, x = Tower(dropout=0.5), torch.randn(8, 16)
    module = planned(model, x)
    first = module.plan
    module.eval()
    assert not model.training
    assert not model.dropout.training
    assert_same_gradients(model, module, lambda run: run(x).sum())
    assert module.plan is not first
    module.train()
    assert_same_gradients(model, module, lambda run: run(x).sum())
    assert module.plan is first
    assert_same_gradients(model, module, lambda run: run(x).sum())
    with torch.no_grad():
        assert not module(x).requires_grad
