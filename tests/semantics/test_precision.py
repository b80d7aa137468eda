"""Number types, autocast and loss scaling."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import rkmate
from tests.semantics.steps import Tower, assert_same_gradients, planned, three_budgets, tightest


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_number_types(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Tower(dropout=0.2).to(dtype), torch.randn(8, 16, dtype=dtype)
    for wrapper in (planned, tightest):
        assert_same_gradients(model, wrapper(model, x), lambda run: run(x).float().pow(2).sum())


def test_complex_numbers() -> None:
    model = nn.Sequential(nn.Linear(8, 8, dtype=torch.complex64), nn.Linear(8, 8, dtype=torch.complex64))
    x = torch.randn(4, 8, dtype=torch.complex64)
    assert_same_gradients(model, planned(model, x), lambda run: run(x).abs().pow(2).sum())
    assert_same_gradients(model, planned(model, x), lambda run: run(x).conj().real.sum())


class Conjugates(nn.Module):
    """Steps of a complex state, whose gradients are products with conjugates; one weight is used in each."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(8, 8, dtype=torch.complex64) / 8 for _ in range(3))
        self.shared = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for w in self.weights:
            x = x @ w
            x = torch.polar(x.abs().tanh(), x.angle()) * self.shared.conj()
        return 1j * x


def test_conjugates() -> None:
    torch.manual_seed(0)
    model, x = Conjugates(), torch.randn(16, 8, dtype=torch.complex64)
    for module in three_budgets(model, x):
        assert_same_gradients(model, module, lambda run: run(x).abs().pow(2).sum())
        module(x).abs().pow(2).sum().backward()
        assert not any(p.grad.is_conj() for p in model.parameters())        # an optimizer views it as real
        model.zero_grad()


class Mixed(nn.Module):
    """Low and full precision under autocast, with a part that switches it off."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.a(x))
        with torch.autocast("cpu", enabled=False):
            h = h.float() @ h.float().t()
        return self.b(h @ x)


def test_autocast_is_part_of_the_signature() -> None:
    torch.manual_seed(0)
    model, x = Mixed(), torch.randn(8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module = planned(model, x)
        assert module(x).dtype is torch.bfloat16
        # Forward and backward inside, which is unusual and must not cast anything twice.
        assert_same_gradients(model, module, lambda run: run(x).float().sum())

    def outside(run: object) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = run(x)  # type: ignore[operator]
        return out.float().pow(2).sum()

    assert_same_gradients(model, module, outside)
    assert_same_gradients(model, module, lambda run: run(x).pow(2).sum())      # without autocast
    assert module(x).dtype is torch.float32


class Products(TorchDispatchMode):
    """The number types in which products of real tensors are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if "mm" in func.__name__ and type(args[0]) is torch.Tensor:
            self.found.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_what_autocast_leaves_alone_is_measured_so() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), Products() as seen:
        rkmate.plan(Mixed(), (torch.randn(9, 8),), budget=1.0, progress=False)
    assert seen.found == {torch.bfloat16, torch.float32}


def test_scaled_losses() -> None:
    x = torch.randn(8, 16)
    results = []
    for wrap in (lambda m: m, lambda m: tightest(m, x)):
        torch.manual_seed(0)
        model = Tower()
        with torch.autocast("cpu", dtype=torch.float16):
            run = wrap(model)
        optimizer = torch.optim.SGD(list(model.parameters()), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = run(x).float().pow(2).mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        results.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


class Attention(nn.Module):
    """With dropout, its weights are float32, whatever autocast says of the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.view(2, 8, 2, 8).transpose(1, 2) for t in self.into(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        return self.out(y.transpose(1, 2).reshape(2, 8, 16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_with_dropout(dtype: torch.dtype) -> None:
    """Its backward is called after the autocast region, and casts nothing."""
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 8, 16)
    with torch.autocast("cpu", dtype=dtype):
        module = planned(model, x)

    def loss(run: Callable[..., torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype):
            out = run(x)
        return out.float().square().sum()

    assert_same_gradients(model, module, loss)


class Precisions(TorchDispatchMode):
    """The setting in force at each matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if "mm" in func.__name__:
            self.found.append(torch.get_float32_matmul_precision())
        return func(*args, **(kwargs or {}))


def test_matmul_precision() -> None:
    model, x = Tower(), torch.randn(8, 16)
    module = planned(model, x)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert_same_gradients(model, module, lambda run: run(x).sum())
        module = tightest(model, x)
        assert torch.get_float32_matmul_precision() == "medium"
        with Precisions() as seen:
            module(x).sum().backward()
        assert set(seen.found) == {"medium"}
    finally:
        torch.set_float32_matmul_precision(before)
