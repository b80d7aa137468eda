"""What kernels take beside their results is known without running them, for those of a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rkmate.measure.analytic import analytic_costs
from rkmate.measure.settings import MeasureSettings
from rkmate.measure.temporaries import temporary_bytes
from rkmate.pipeline.prepare import prepare, trace
from rkmate.pipeline.settings import Settings
from rkmate.support.progress import Progress

X, Y = torch.randn(64, 64), torch.rand(64, 64)
ONCE = Settings(measure=MeasureSettings(passes=1, repeats=1))


class _Ends(nn.Module):
    """A layer, dropout, a layer, and a function of what comes out."""

    def __init__(self, end: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 64))
        self.end = end

    def forward(self, x: torch.Tensor) -> Any:
        return self.end(self.layers(x))


def _images(h: torch.Tensor) -> torch.Tensor:
    return h.view(4, 16, 8, 8)


def _all_of(*ends: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda h: torch.stack([end(h).mean() for end in ends]).sum()


ENDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "losses": _all_of(
        lambda h: F.mse_loss(h, Y), lambda h: F.smooth_l1_loss(h, Y), lambda h: F.huber_loss(h, Y),
        lambda h: F.binary_cross_entropy_with_logits(h, Y), lambda h: F.l1_loss(h, Y),
        lambda h: F.binary_cross_entropy(h.sigmoid(), Y), lambda h: F.soft_margin_loss(h, Y.round() * 2 - 1)),
    "norms": _all_of(
        lambda h: F.layer_norm(h, (64,)), lambda h: F.layer_norm(h.t(), (64,)).square(),
        lambda h: F.group_norm(_images(h), 4).square(), lambda h: F.instance_norm(_images(h)).square(),
        lambda h: F.batch_norm(_images(h), None, None, training=True).square()),
    "reductions": _all_of(
        lambda h: h.logsumexp(1), lambda h: h.sort(0)[0], lambda h: h.kthvalue(3)[0], lambda h: h.median(),
        lambda h: h * (h > 0), lambda h: torch.cdist(h, Y)),
    "others": _all_of(
        lambda h: F.prelu(h, Y[0]), lambda h: F.scaled_dot_product_attention(
            *(h.view(2, 4, 32, 16),) * 3, dropout_p=0.1),
        lambda h: F.unfold(_images(h), 3),
        lambda h: F.interpolate(_images(h), scale_factor=2, mode="bilinear"),
        lambda h: F.dropout2d(_images(h), 0.1)),
    "exponentials": _all_of(torch.linalg.matrix_exp, lambda h: torch.linalg.matrix_exp(h.view(16, 16, 16))),
}


@pytest.mark.parametrize("name", ENDS)
def test_no_kernel_takes_more_than_is_counted(name: str) -> None:
    measured = prepare(trace(_Ends(ENDS[name]), (X,), {}, ONCE, Progress(False)))
    counted = analytic_costs(measured.partition)
    more = {str(node.target): (measured.costs[i].overhead, counted[i].overhead)
            for i, node in enumerate(measured.partition.program.operation)
            if measured.costs[i].overhead > counted[i].overhead}
    assert not more


def test_other_devices_are_not_in_the_table() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["val"], number = torch.empty(4, device="cuda"), torch.empty((), device="cuda")
    node = graph.call_function(torch.ops.aten.mse_loss.default, (x, x))
    node.meta["val"] = number
    assert temporary_bytes(node, random=True) == 0
