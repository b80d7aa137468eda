"""Strides of a trace: those that the kernels return."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import rkmate
from rkmate.device.elsewhere import planning_for
from rkmate.devices import H100
from rkmate.graph.capture.capture import capture
from rkmate.torch_seam.patches import layouts
from rkmate.torch_seam.patches.layouts import _FORMS, as_kernels_return_them, strides_of_view
from tests.equality import assert_same_step
from tests.models.sample import Sample, weighted_mean


class _ScaledBranch(nn.Module):
    """A branch with a scale per channel, and a layer norm over the channels of an image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width, 1, 1))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.scale * x.square()
        normed: torch.Tensor = self.norm(y.permute(0, 2, 3, 1))
        return normed.permute(0, 3, 1, 2).flatten(2).mean(-1)


def test_the_gradient_of_a_layer_norm_over_channels_has_the_layout_of_its_kernel() -> None:
    """Its product with the branch, which the gradient of the scale sums over, has that layout too:
    written over the branch, it would be summed in another order."""
    torch.manual_seed(0)
    model, x = _ScaledBranch(8), torch.randn(2, 8, 4, 4, requires_grad=True)
    module = rkmate.wrap(copy.deepcopy(model), (x,), budget=1.0, progress=False)
    assert_same_step(model, module, Sample(model, (x,), {}, weighted_mean(2, 8)))


class _Activated(nn.Module):
    """An activation whose gradient comes with the channels last."""

    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.activation = activation
        self.scale = nn.Parameter(torch.rand(8, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.activation(x + self.scale * x.square())
        return y.permute(0, 2, 3, 1).flatten(1)


@pytest.mark.parametrize("activation", [F.elu, F.relu6, F.hardswish, F.hardsigmoid, F.softplus])
def test_the_gradient_of_an_activation_has_the_layout_of_its_kernel(
        activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Gradient and value differ in layout: the gradient's is the result's."""
    torch.manual_seed(0)
    model, x = _Activated(activation), torch.randn(2, 8, 4, 4, requires_grad=True)
    module = rkmate.wrap(copy.deepcopy(model), (x,), budget=1.0, progress=False)
    assert_same_step(model, module, Sample(model, (x,), {}, weighted_mean(2, 128)))


aten = torch.ops.aten
ORDERS = ((0, 1, 2, 3), (0, 2, 3, 1), (1, 0, 2, 3), (0, 1, 3, 2))
"""Dimensions of an image in the order of memory."""
GRADIENTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor | tuple[torch.Tensor, ...]]] = {
    "log_softmax": lambda g, x: aten._log_softmax_backward_data(g, x, 1, torch.float32),
    "softmax": lambda g, x: aten._softmax_backward_data(g, x, 1, torch.float32),
    "glu": lambda g, x: aten.glu_backward(g[:, :4], x, 1),
    "mse_loss": lambda g, x: aten.mse_loss_backward(g, x, x * 2, 0),
    "smooth_l1_loss": lambda g, x: aten.smooth_l1_loss_backward(g, x, x * 2, 0, 1.0),
    "huber_loss": lambda g, x: aten.huber_loss_backward(g, x, x * 2, 0, 1.0),
    "binary_cross_entropy": lambda g, x: aten.binary_cross_entropy_backward(
        g, x.sigmoid(), x * 0, None, 0),
    "logit": lambda g, x: aten.logit_backward(g, x),
    "elu": lambda g, x: aten.elu_backward(g, 1.0, 1.0, 1.0, False, x),
    "hardtanh": lambda g, x: aten.hardtanh_backward(g, x, 0.0, 6.0),
    "group_norm": lambda g, x: aten.native_group_norm_backward(
        g, _image(x, 0), torch.zeros(2, 2), torch.ones(2, 2), torch.ones(8), 2, 8, 16, 2,
        [True, True, True]),
}


def _image(like: torch.Tensor, order: int) -> torch.Tensor:
    places = ORDERS[order]
    made = torch.ones([like.shape[k] for k in places])
    return made.permute([places.index(k) for k in range(4)])


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_have_the_strides_of_their_kernels(name: str) -> None:
    like = torch.empty(2, 8, 4, 4)

    def strides(a: int, b: int) -> Any:
        found = GRADIENTS[name](_image(like, a), _image(like, b))
        return [t.stride() for t in pytree.tree_leaves(found)]

    orders = list(itertools.product(range(4), repeat=2))
    real = [strides(*of) for of in orders]
    with as_kernels_return_them(), FakeTensorMode():
        assert [strides(*of) for of in orders] == real


class _Attended(nn.Module):
    """Pixels as a sequence, as they come back from an attention, and a group norm over their channels."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(8, 8), nn.GroupNorm(2, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mix(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape)
        normed: torch.Tensor = self.norm((y + x.square()) / 2)
        return normed.flatten(2).mean(-1)


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_batch_of_one_has_the_strides_of_its_view(batch: int, form: torch.memory_format) -> None:
    """Whether an image counts as channels-last hangs on the stride of its batch, also where that is one."""
    torch.manual_seed(0)
    model, x = _Attended(), torch.randn(batch, 8, 4, 4).to(memory_format=form).requires_grad_()
    module = rkmate.wrap(copy.deepcopy(model), (x,), budget=1.0, progress=False)
    assert_same_step(model, module, Sample(model, (x,), {}, weighted_mean(batch, 8)))


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_views_have_the_strides_that_torch_gives_them(order: tuple[int, ...]) -> None:
    for shape in ((1, 4, 2, 6), (2, 1, 1, 4), (3, 4, 1, 2), (1, 1, 4, 1)):
        real = torch.empty(shape).permute(order)
        n = real.numel()
        for new in ((1, n), (n, 1), (1, 2, n // 2), (2, 1, n // 4, 2), (n // 2, 1, 1, 2), (4, n // 4),
                    (1, *real.shape), (*real.shape, 1), (*real.shape[:2], 1, -1), tuple(shape)):
            try:
                expected = real.view(new)
            except RuntimeError:
                continue
            assert strides_of_view(real.shape, real.stride(), expected.shape) == expected.stride()
            with as_kernels_return_them(), FakeTensorMode() as mode:
                assert mode.from_tensor(real).view(new).stride() == expected.stride()


def _norm_arguments(operation: Any, x: torch.Tensor, own: torch.dtype, affine: bool, training: bool) -> Any:
    """Return the arguments of a batch norm, or of its gradient, for an image."""
    def of_channels() -> torch.Tensor:
        return torch.empty(6, dtype=own)

    weight, bias = (of_channels(), of_channels()) if affine else (None, None)
    running = of_channels(), of_channels()
    if operation is torch.ops.aten.native_batch_norm_backward.default:
        return torch.empty_like(x), x, weight, *running, *running, training, 1e-5, [True, affine, affine]
    if operation is torch.ops.aten._native_batch_norm_legit.no_stats:
        return x, weight, bias, True, 0.1, 1e-5
    return x, weight, bias, *running, training, 0.1, 1e-5


@pytest.mark.parametrize("operation", _FORMS, ids=str)
def test_a_batch_norm_has_the_form_that_its_trace_has(operation: Any) -> None:
    decomposition = torch._decomp.decomposition_table[operation]
    known = 0
    floats = (torch.float32, torch.float64)
    for dtype, own, last, affine, training in itertools.product(
            (*floats, torch.bfloat16), floats, *[(True, False)] * 3):
        with FakeTensorMode():
            x = torch.empty(4, 6, 5, 5, dtype=dtype).to(
                memory_format=torch.channels_last if last else torch.contiguous_format)
            args = _norm_arguments(operation, x, own, affine, training)
            found = _FORMS[operation](*args)
            if found is not NotImplemented:
                known += 1
                assert [None if t is None else (t.shape, t.dtype, t.device) for t in found] \
                    == [None if t is None else (t.shape, t.dtype, t.device) for t in decomposition(*args)]
    assert known >= 8


def test_a_capture_finds_results_of_an_earlier_one(monkeypatch: pytest.MonkeyPatch,
                                                   deterministic: None) -> None:
    """Torch's own results stay apart, and those for another device, or with other settings, are others."""
    monkeypatch.setattr(layouts, "_known", {})
    others = dict(FakeTensorMode.cache)

    def found_anew() -> int:
        before = FakeTensorMode.cache_misses
        capture(nn.Sequential(nn.Linear(3, 5), nn.Tanh()), (torch.randn(2, 3),), {})
        return FakeTensorMode.cache_misses - before

    assert found_anew() > 0 == found_anew()
    with planning_for(H100, []):
        assert found_anew() == found_anew() > 0
    assert found_anew() == 0
    torch.use_deterministic_algorithms(False)
    assert found_anew() > 0 == found_anew()
    assert dict(FakeTensorMode.cache) == others
