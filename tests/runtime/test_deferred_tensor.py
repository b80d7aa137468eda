"""Tensors whose values are computed when somebody reads them."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from rkmate.runtime.deferred import DeferredTensor, Unread, deferred_tensor

VALUES = torch.arange(12.0).view(3, 4) / 7


class Deferred:
    """A deferred tensor, the plain one that it stands for, and how often the values were computed."""

    def __init__(self, differentiable: bool = False) -> None:
        self.computed = 0
        self.weight, self.other = (torch.ones(3, 4).requires_grad_(differentiable) for _ in range(2))
        made = deferred_tensor(torch.empty(3, 4, device="meta"), torch.device("cpu"), Unread(self._compute))
        self.tensor: Any = _Scaled.apply(self.weight, [made]) if differentiable else made
        self.plain = VALUES * self.other if differentiable else VALUES.clone()

    def _compute(self) -> torch.Tensor:
        self.computed += 1
        return VALUES.clone()


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, box: list[torch.Tensor]) -> torch.Tensor:
        return box[0].detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * VALUES, None


def test_its_form_is_known_without_the_values() -> None:
    for differentiable in (False, True):
        d = Deferred(differentiable)
        t = d.tensor
        assert isinstance(t, torch.Tensor)
        assert (t.shape, t.size(-1), t.dim(), len(t), t.numel(), t.nbytes) == ((3, 4), 4, 2, 3, 12, 48)
        assert (t.dtype, t.device, t.stride()) == (torch.float32, torch.device("cpu"), (4, 1))
        assert t.layout is torch.strided
        assert t.is_contiguous() and t.is_floating_point() and not t.is_cuda and not t.is_complex()
        assert t.requires_grad is differentiable and (t.grad_fn is not None) is differentiable
        assert {t: 1}[t] == 1
        passed_on, = pytree.tree_map(lambda x: x, [t])
        for later in (t.detach(), t.float(), t.double(), t.narrow(1, 0, 2), passed_on):
            assert isinstance(later, DeferredTensor)
        assert t.detach().requires_grad is False
        assert t.narrow(1, 0, 2).stride() == (4, 1)
        assert d.computed == 0


READS: dict[str, Callable[[Any], Any]] = {
    "repr": lambda t: repr(t.detach()), "numpy": lambda t: t.detach().numpy(), "tolist": lambda t: t.tolist(),
    "item": lambda t: t[0, 1].item(), "index": lambda t: t[..., :-1], "argmax": lambda t: t.argmax(-1),
    "cpu": lambda t: t.cpu(), "half": lambda t: t.half(), "double": lambda t: t.double() * 2,
    "narrow": lambda t: t.narrow(1, 1, 2) * 2, "view": lambda t: t.view(-1),
    "cat": lambda t: torch.cat([t, t]),
    "clone": lambda t: t.clone(), "add": lambda t: t + 1, "subtracted": lambda t: 1 - t,
    "equal": lambda t: torch.equal(t, t), "compared": lambda t: (t > 0.5).any(), "iter": lambda t: list(t),
    "data": lambda t: t.data, "turned": lambda t: t.T, "softmax": lambda t: F.softmax(t, -1),
    "operator": lambda t: torch.ops.aten.mul.Tensor(t, 2),
    "dispatched": lambda t: torch.ops.aten.detach.default(t),
    "einsum": lambda t: torch.einsum("ij,kj->ik", t, t), "copy": lambda t: copy.copy(t.detach()),
    "deepcopy": lambda t: copy.deepcopy(t.detach()), "storage": lambda t: t.untyped_storage().nbytes(),
    "pickle": lambda t: pickle.loads(pickle.dumps(t.detach())), "in place": lambda t: t.detach().mul_(3),
    "tree": lambda t: pytree.tree_map(lambda x: x * 2, {"a": [t]}),
    "bfloat16": lambda t: t.to(torch.bfloat16),
    "contiguous": lambda t: t.contiguous().view(-1), "dlpack": lambda t: torch.from_dlpack(t.detach()),
    "autocast": lambda t: _under_autocast(t)}


def _under_autocast(t: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return t @ torch.ones(4, 4)


@pytest.mark.parametrize("name", READS)
def test_a_read_gives_what_the_plain_tensor_gives(name: str) -> None:
    for differentiable in (False, True):
        d = Deferred(differentiable)
        found, expected = READS[name](d.tensor), READS[name](d.plain)
        again = READS[name](d.tensor) if name != "in place" else found
        for a, b, c in zip(*map(pytree.tree_leaves, (found, expected, again)), strict=True):
            if isinstance(b, torch.Tensor):
                a = a.read() if isinstance(a, DeferredTensor) else a
                assert torch.equal(a, b) and a.dtype == b.dtype
                assert type(a) is torch.Tensor
                if name != "dispatched":
                    assert a.requires_grad == b.requires_grad
            else:
                assert (a == b).all() if name == "numpy" else a == b
            assert c is not None
        assert d.computed == 1


def test_files_have_plain_tensors() -> None:
    file = io.BytesIO()
    torch.save({"logits": Deferred().tensor}, file)
    file.seek(0)
    found = torch.load(file)["logits"]
    assert type(found) is torch.Tensor and torch.equal(found, VALUES)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * ctx.saved_tensors[0] * grads[0]


LOSSES: dict[str, Callable[[Any], Any]] = {
    "sum": lambda t: t.sum(), "narrow": lambda t: t.narrow(1, 1, 2).pow(2).sum(),
    "double": lambda t: t.double().pow(2).sum(), "twice": lambda t: (t.narrow(0, 0, 2) * t[:2]).sum(),
    "custom function": lambda t: _Square.apply(t).sum(), "in place": lambda t: _halved(t).pow(2).sum(),
    "written part": lambda t: _written(t).pow(2).sum(),
    "first without gradients": lambda t: _looked_at(t).sum()}


def _halved(t: torch.Tensor) -> torch.Tensor:
    t /= 2
    return t


def _written(t: torch.Tensor) -> torch.Tensor:
    t[0, 0] = 5.0
    return t


def _looked_at(t: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        assert t.argmax(-1).shape == (3,)
    with torch.no_grad():
        assert not (t * 2).requires_grad
    return t * 3


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_go_through_it(name: str) -> None:
    d = Deferred(differentiable=True)
    LOSSES[name](d.tensor).backward()
    LOSSES[name](d.plain).backward()
    assert d.weight.grad is not None and d.other.grad is not None
    assert torch.equal(d.weight.grad, d.other.grad)
    assert d.computed == 1


def test_hooks_and_gradients_of_itself() -> None:
    d, seen = Deferred(differentiable=True), []
    loss = (d.tensor * 2).sum()
    assert torch.equal(torch.autograd.grad(loss, d.tensor, retain_graph=True)[0], torch.full((3, 4), 2.0))
    d.tensor.register_hook(lambda g: seen.append(g.sum().item()))
    d.tensor.retain_grad()
    loss.backward()
    assert seen == [24.0]
    assert torch.equal(d.tensor.grad, torch.full((3, 4), 2.0))


def test_a_failure_is_said_at_each_read() -> None:
    def fails() -> torch.Tensor:
        raise RuntimeError("the weights have moved")

    t = deferred_tensor(torch.empty(2, device="meta"), torch.device("cpu"), Unread(fails))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="have moved"):
            t.sum()
    assert t.shape == (2,)
