"""Recurrent stacks that eager mode gives to cuDNN, as one operation. A trace would unroll them, step by step.

A stack's weights are parts of one tensor (`flatten_parameters`), which cuDNN reads as it is. If they are
not, they are copied into one tensor for each call. Dropout between layers draws from torch's generator,
because cuDNN's own masks come from a state that cannot be restored, so that a second run would draw other
masks. Therefore a stack with dropout becomes several stacks of one layer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from rkmate import device as devices
from rkmate.torch_seam.own import Gradient, OwnOperator, register
from rkmate.torch_seam.tensors import without_modes

aten = torch.ops.aten

MODES = {aten.rnn_relu.input: 0, aten.rnn_tanh.input: 1, aten.lstm.input: 2, aten.gru.input: 3}
"""cuDNN's numbers."""


class _Stack(NamedTuple):
    """A kind of stack, without its batch and its length."""

    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the weights."""
    dtype: torch.dtype
    device: torch.device
    hidden: int
    output: int
    """Width of what a layer gives to the next one, in each direction: with a projection, another one."""
    mode: int
    layers: int
    batch_first: bool
    train: bool
    bidirectional: bool

    @property
    def per_layer(self) -> int:
        """Weights of a layer in one direction."""
        return len(self.shapes) // (self.layers * self.directions)

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def projected(self) -> int:
        """CuDNN's size of the projection; 0 for none."""
        return 0 if self.output == self.hidden else self.output


def _stack(x: torch.Tensor, weights: Sequence[torch.Tensor], hx: torch.Tensor, cx: torch.Tensor | None,
           mode: int, layers: int, batch_first: bool, train: bool, bidirectional: bool) -> _Stack:
    output = hx.shape[2]
    return _Stack(tuple(tuple(w.shape) for w in weights), x.dtype, x.device,
                  output if cx is None else cx.shape[2], output, mode, layers, batch_first, train,
                  bidirectional)


def is_cudnns(x: torch.Tensor, tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether eager mode gives a stack to cuDNN. `tensors`: its states and weights."""
    if devices.of(x).cpu_kernels or any(
            t.dtype != x.dtype or t.device != x.device or not t.numel() for t in (x, *tensors)):
        return False
    with without_modes():
        return bool(torch.cudnn_is_acceptable(torch.empty(1, dtype=x.dtype, device=x.device)))


def as_autocast_gives_them(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a stack's inputs as autocast passes them to cuDNN: in float16, whatever type was requested."""
    if not torch.is_autocast_enabled(devices.of(tensors[0]).autocast_kind):
        return list(tensors)
    return [t if t.dtype is torch.float64 else t.to(torch.float16) for t in tensors]


@functools.lru_cache(maxsize=64)
def _laid_out(of: _Stack) -> tuple[tuple[int, ...], int]:
    """Return the position of each weight in cuDNN's single tensor, in elements, and the tensor's number of
    elements."""
    weights = [torch.zeros(s, dtype=of.dtype, device=of.device) for s in of.shapes]
    whole = torch._cudnn_rnn_flatten_weight(
        weights, of.per_layer, of.shapes[0][1], of.mode, of.hidden, of.projected, of.layers, of.batch_first,
        of.bidirectional)
    return tuple(int(w.storage_offset()) for w in weights), whole.numel()


@functools.lru_cache(maxsize=64)
def _pieces(of: _Stack) -> tuple[int, ...]:
    """Return the content of cuDNN's single tensor, in order: the number of a weight, or a negative number -n
    for n elements that nothing reads."""
    places, count = _laid_out(of)
    found, at = [], 0
    for k in sorted(range(len(places)), key=places.__getitem__):
        found += [at - places[k], k] if at < places[k] else [k]
        at = places[k] + math.prod(of.shapes[k])
    return (*found, at - count) if at < count else tuple(found)


def whole_weights(of: _Stack, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the weights as the one tensor that cuDNN reads: the one that they are parts of, or a copy."""
    places, count = _laid_out(of)
    first = weights[0]
    storage = first.untyped_storage()
    start = first.storage_offset() - places[0]
    if 0 <= start <= storage.nbytes() // of.dtype.itemsize - count and all(
            w.untyped_storage().data_ptr() == storage.data_ptr() and w.is_contiguous()
            and w.storage_offset() == start + place for w, place in zip(weights, places, strict=True)):
        return first.as_strided((count,), (1,), start)
    return torch.cat([first.new_empty(-k) if k < 0 else weights[k].reshape(-1) for k in _pieces(of)])


def _run(x: torch.Tensor, weights: Sequence[torch.Tensor], hx: torch.Tensor, cx: torch.Tensor | None,
         *kind: Any) -> tuple[torch.Tensor, ...]:
    of = _stack(x, weights, hx, cx, *kind)
    return _forward(of, x, weights, whole_weights(of, weights), hx, cx)


def _forward(of: _Stack, x: torch.Tensor, weights: Sequence[torch.Tensor], whole: torch.Tensor,
             hx: torch.Tensor, cx: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return tuple(torch._cudnn_rnn(
        x, list(weights), of.per_layer, whole, hx.contiguous(), None if cx is None else cx.contiguous(),
        of.mode, of.hidden, of.projected, of.layers, of.batch_first, 0.0, of.train, of.bidirectional, [],
        None)[:4])


def _run_backward(x: torch.Tensor, weights: Sequence[torch.Tensor], hx: torch.Tensor,
                  cx: torch.Tensor | None, y: torch.Tensor, grad_y: torch.Tensor | None,
                  grad_hy: torch.Tensor | None, grad_cy: torch.Tensor | None, reserve: torch.Tensor,
                  *kind: Any) -> list[torch.Tensor]:
    of = _stack(x, weights, hx, cx, *kind)
    # What the forward has kept is written to, and a schedule may read it again.
    dx, dhx, dcx, of_weights = aten._cudnn_rnn_backward.default(
        x, list(weights), of.per_layer, whole_weights(of, weights), hx.contiguous(),
        None if cx is None else cx.contiguous(), y, grad_y, grad_hy, grad_cy, of.mode, of.hidden,
        of.projected, of.layers, of.batch_first, 0.0, of.train, of.bidirectional, [], None, reserve.clone(),
        [True, True, cx is not None, True])
    return [dx, dhx, *([] if cx is None else [dcx]), *of_weights]


@functools.lru_cache(maxsize=256)
def reserve_bytes(of: _Stack, batch: int, length: int) -> int:
    """Return the bytes that cuDNN keeps for the backward. They are known after a run on zeros."""
    with without_modes(), torch.no_grad():
        zero = torch.zeros((), dtype=of.dtype, device=of.device)
        states = of.layers * of.directions, batch
        x = zero.expand(*((batch, length) if of.batch_first else (length, batch)), of.shapes[0][1])
        cx = zero.expand(*states, of.hidden) if of.mode == MODES[aten.lstm.input] else None
        found = _forward(of, x, [zero.expand(s) for s in of.shapes], zero.repeat(_laid_out(of)[1]),
                         zero.expand(*states, of.output), cx)
        return found[3].untyped_storage().nbytes()


def _form(x: torch.Tensor, weights: Sequence[torch.Tensor], hx: torch.Tensor, cx: torch.Tensor | None,
          *kind: Any) -> tuple[torch.Tensor, ...]:
    of = _stack(x, weights, hx, cx, *kind)
    length, batch = (x.shape[1], x.shape[0]) if of.batch_first else x.shape[:2]
    y = x.new_empty(length, batch, of.output * of.directions)
    return (y.transpose(0, 1) if of.batch_first else y, hx.new_empty(hx.shape),
            hx.new_empty(0) if cx is None else cx.new_empty(cx.shape),
            x.new_empty(reserve_bytes(of, int(batch), int(length)), dtype=torch.uint8))


def _form_backward(x: torch.Tensor, weights: Sequence[torch.Tensor], hx: torch.Tensor,
                   cx: torch.Tensor | None, *rest: Any) -> list[torch.Tensor]:
    batch_first = rest[-3]
    dx = x.new_empty(x.shape[1], x.shape[0], x.shape[2]).transpose(0, 1) if batch_first \
        else x.new_empty(x.shape)
    states = [hx] if cx is None else [hx, cx]
    return [dx, *(t.new_empty(t.shape) for t in (*states, *weights))]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weights, hx, cx, *kind = inputs
    ctx.set_materialize_grads(False)
    ctx.kind, ctx.has_cell = kind, cx is not None
    ctx.save_for_backward(x, hx, *([] if cx is None else [cx]), output[0], output[3], *weights)


def _gradient(ctx: Any, grad_y: Any, grad_hy: Any, grad_cy: Any, _: Any) -> tuple[Any, ...]:
    x, hx, *rest = ctx.saved_tensors
    cx = rest.pop(0) if ctx.has_cell else None
    y, reserve, *weights = rest
    dx, dhx, *rest = torch.ops.rkmate.cudnn_rnn_backward.default(
        x, weights, hx, cx, y, grad_y, grad_hy, grad_cy if ctx.has_cell else None, reserve, *ctx.kind)
    dcx = rest.pop(0) if ctx.has_cell else None
    return dx, rest, dhx, dcx, *(None for _ in ctx.kind)


_KIND = "int mode, int layers, bool batch_first, bool train, bool bidirectional"
register((
    OwnOperator(f"cudnn_rnn(Tensor input, Tensor[] weights, Tensor hx, Tensor? cx, {_KIND}) -> "
                "(Tensor, Tensor, Tensor, Tensor)", _run, "CUDA", shape=_form,
                gradient=Gradient(_gradient, _save), direct=True),
    OwnOperator("cudnn_rnn_backward(Tensor input, Tensor[] weights, Tensor hx, Tensor? cx, Tensor output, "
                "Tensor? grad_output, Tensor? grad_hy, Tensor? grad_cy, Tensor reserve, "
                f"{_KIND}) -> Tensor[]", _run_backward, "CUDA", shape=_form_backward, direct=True),
))


def layers_of_cudnn(op: Any, x: torch.Tensor, hidden: Any, weights: Sequence[torch.Tensor], layers: int,
                    train: bool, bidirectional: bool, batch_first: bool) -> tuple[torch.Tensor, ...]:
    """Return a stack without dropout: what `op`, torch's operation for it, returns."""
    hx, cx = hidden if op is aten.lstm.input else (hidden, None)
    y, hy, cy, _ = torch.ops.rkmate.cudnn_rnn.default(
        x, list(weights), hx, cx, MODES[op], layers, batch_first, train, bidirectional)
    return (y, hy) if cx is None else (y, hy, cy)

