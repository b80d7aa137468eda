"""Operators of our own: torch's, done part by part, with the same bits as a result.

Each works on a few rows (or channels) at a time, so that its temporaries are as large as one part
and stay in the processor's cache, and each can put its result where an argument stands.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rkmate import device as devices
from rkmate.device.quick_code import call_directly, quickest

aten = torch.ops.aten
_NLL_BACKWARD = quickest(aten.nll_loss_backward.default)
_SOFTMAX_BACKWARD = quickest(aten._log_softmax_backward_data.out)
_NLL2D_BACKWARD = quickest(aten.nll_loss2d_backward.default)
_library = torch.library.Library("rkmate", "FRAGMENT")


def part_bytes(like: torch.Tensor, total: int) -> int:
    """About how many bytes of `total` to work on at a time; all of them where nothing is computed."""
    return total if like.is_meta else devices.of(like).part_bytes(total)


def stretches(length: int, total: int, part: int) -> Iterator[slice]:
    """Stretches of a dimension of so many indices and bytes, of about a part's bytes each."""
    step = rows_of(length, total, part)
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def rows_of(length: int, total: int, part: int) -> int:
    """How many of so many indices, which have so many bytes, have about a part's bytes."""
    return max(1, length * part // max(1, total))


def cross_entropy_backward_out(
        grad_output: torch.Tensor, log_probs: torch.Tensor, target: torch.Tensor,
        weight: torch.Tensor | None, reduction: int, ignore_index: int, total_weight: torch.Tensor,
        dim: int, *, out: torch.Tensor) -> torch.Tensor:
    """Gradient of the logits; `out` may be `log_probs` itself.

    The first dimension, of `log_probs`, `target` and (without reduction) `grad_output`, is cut.
    """
    nll_backward = _NLL2D_BACKWARD if log_probs.dim() == 4 else _NLL_BACKWARD
    rows = rows_of(log_probs.shape[0], log_probs.nbytes, part_bytes(log_probs, log_probs.nbytes))
    kept, targets = log_probs.split(rows), target.split(rows)
    grads = [grad_output] * len(kept) if reduction else grad_output.split(rows)
    over = kept if out is log_probs else out.split(rows)
    for grad, part, wanted, into in zip(grads, kept, targets, over, strict=True):
        _SOFTMAX_BACKWARD(nll_backward(grad, part, wanted, weight, reduction, ignore_index, total_weight),
                          part, dim, part.dtype, out=into)
    return out


def cross_entropy_backward(
        grad_output: torch.Tensor, log_probs: torch.Tensor, target: torch.Tensor,
        weight: torch.Tensor | None, reduction: int, ignore_index: int, total_weight: torch.Tensor,
        dim: int) -> torch.Tensor:
    """As above, into memory of its own."""
    return cross_entropy_backward_out(grad_output, log_probs, target, weight, reduction,
                                      ignore_index, total_weight, dim,
                                      out=torch.empty_like(log_probs))


def batch_norm_backward_over(
        grad_out: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None,
        save_mean: torch.Tensor, save_invstd: torch.Tensor, eps: float, *,
        out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of input, weight and bias in training mode; `out`, for the first, may be `grad_out`.

    The channels are cut. torch's own kernel allocates the first gradient twice.
    """
    if not (grad_out.is_contiguous() and input.is_contiguous() and input.shape[2:].numel() > 1):
        # Another layout goes through another kernel, whose sums are ordered otherwise.
        gradient, weights, biases = _batch_norm_backward(grad_out, input, weight, save_mean,
                                                         save_invstd, eps)
        return out.copy_(gradient), weights, biases
    parts = []
    for channels in stretches(input.shape[1], input.nbytes, part_bytes(input, input.nbytes)):
        gradient, *rest = _batch_norm_backward(
            grad_out[:, channels].contiguous(), input[:, channels].contiguous(),
            None if weight is None else weight[channels], save_mean[channels],
            save_invstd[channels], eps)
        out[:, channels].copy_(gradient)
        del gradient
        parts.append(rest)
    return out, torch.cat([w for w, _ in parts]), torch.cat([b for _, b in parts])


def batch_norm_backward(
        grad_out: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None,
        save_mean: torch.Tensor, save_invstd: torch.Tensor,
        eps: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As above, into memory of its own."""
    return batch_norm_backward_over(grad_out, input, weight, save_mean, save_invstd, eps,
                                    out=torch.empty_like(input))


def _batch_norm_backward(grad_out: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None,
                         save_mean: torch.Tensor, save_invstd: torch.Tensor,
                         eps: float) -> tuple[torch.Tensor, ...]:
    result: tuple[torch.Tensor, ...] = aten.native_batch_norm_backward.default(
        grad_out, input, weight, None, None, save_mean, save_invstd, True, eps, [True, True, True])
    return result


def scale(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """A gradient for an incoming gradient of one, times the one that came."""
    return x * by


def scale_over(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """The same over itself. On a CPU a scalar of one is seen without waiting, and nothing is to do then."""
    return x if devices.of(by).host and by.item() == 1 else x.mul_(by)


_CROSS_ENTROPY = ("Tensor grad_output, Tensor log_probs, Tensor target, Tensor? weight, "
                  "int reduction, SymInt ignore_index, Tensor total_weight, int dim")
_BATCH_NORM = ("Tensor grad_out, Tensor input, Tensor? weight, Tensor save_mean, "
               "Tensor save_invstd, float eps")
for _schema, _function in {
    f"cross_entropy_backward({_CROSS_ENTROPY}) -> Tensor": cross_entropy_backward,
    f"cross_entropy_backward.out({_CROSS_ENTROPY}, *, Tensor(a!) out) -> Tensor(a!)":
        cross_entropy_backward_out,
    "scale(Tensor x, Tensor by) -> Tensor": scale,
    "scale_(Tensor(a!) x, Tensor by) -> Tensor(a!)": scale_over,
    f"batch_norm_backward({_BATCH_NORM}) -> (Tensor, Tensor, Tensor)": batch_norm_backward,
    f"batch_norm_backward.over({_BATCH_NORM}, *, Tensor(a!) out) -> (Tensor(a!), Tensor, Tensor)":
        batch_norm_backward_over,
}.items():
    _library.define(_schema)
    _library.impl(_schema.split("(")[0], _function, "CompositeExplicitAutograd")
call_directly(torch.ops.rkmate.cross_entropy_backward.out, cross_entropy_backward_out)
