"""CPU kernels for the operators of `nn.SyncBatchNorm`, which torch has on GPUs only: its autograd function
then runs on gloo ranks."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules._functions import SyncBatchNorm

Found = tuple[torch.Tensor, ...]


def _wide(statistics: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return statistics.view(1, -1, *[1] * (x.dim() - 2))


def _over(x: torch.Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _stats(x: torch.Tensor, eps: float) -> Found:
    return x.mean(_over(x)), (x.var(_over(x), unbiased=False) + eps).rsqrt()


def _gather(x: torch.Tensor, means: torch.Tensor, invstds: torch.Tensor, running_mean: torch.Tensor | None,
            running_var: torch.Tensor | None, momentum: float, eps: float, counts: torch.Tensor) -> Found:
    n, total = counts.view(-1, 1), counts.sum()
    mean = (means * n).sum(0) / total
    var = ((invstds ** -2 - eps + (means - mean) ** 2) * n).sum(0) / total
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(var * total / (total - 1), momentum)
    return mean, (var + eps).rsqrt()


def _elemt(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor,
           invstd: torch.Tensor, eps: float) -> torch.Tensor:
    return (x - _wide(mean, x)) * _wide(invstd * weight, x) + _wide(bias, x)


def _backward_reduce(grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor,
                     weight: torch.Tensor, *wanted: bool) -> Found:
    dy, dy_xmu = grad.sum(_over(x)), (grad * (x - _wide(mean, x))).sum(_over(x))
    return dy, dy_xmu, dy_xmu * invstd, dy.clone()


def _backward_elemt(grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor,
                    weight: torch.Tensor, dy: torch.Tensor, dy_xmu: torch.Tensor,
                    counts: torch.Tensor) -> torch.Tensor:
    total = counts.sum()
    centred = (x - _wide(mean, x)) * _wide(invstd ** 2 * dy_xmu / total, x)
    return (grad - _wide(dy / total, x) - centred) * _wide(invstd * weight, x)


_KERNELS = {"batch_norm_stats": _stats, "batch_norm_gather_stats_with_counts": _gather,
            "batch_norm_elemt": _elemt, "batch_norm_backward_reduce": _backward_reduce,
            "batch_norm_backward_elemt": _backward_elemt}


@functools.cache
def _registered() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in _KERNELS.items():
        library.impl(name, kernel, "CPU")
        library.impl(name, kernel, "Meta")
    return library


class SynchronizedNorm(nn.SyncBatchNorm):
    """Torch's norm, with its autograd function, of tensors of the CPU."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        _registered()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = SyncBatchNorm.apply(
            x, self.weight, self.bias, self.running_mean, self.running_var, self.eps, self.momentum,
            dist.group.WORLD, dist.get_world_size())
        return found
