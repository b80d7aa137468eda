"""Recurrent layers that eager mode computes step by step on a CPU, as one operation: GRUs, and layers of tanh
or relu. A trace would unroll them: some twenty operations for each step, forward and backward.

Results and gradients have eager mode's bits: the same operations in the same order, on operands of the same
layout. (At the end of a row, kernels compute the remaining elements with a scalar version, which rounds
otherwise.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from rkmate.torch_seam.own import Gradient, OwnOperator, register

aten = torch.ops.aten

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Gradients of what the input contributes to a step, of what the state contributes, and of the state."""


def gates_of(from_input: torch.Tensor, from_hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the reset gate, the update gate and the new value of a GRU's step, and what the state
    contributes to the last. Each argument is (batch, 3 x width)."""
    size = from_hidden.shape[-1] // 3
    gates, new = from_hidden.split_with_sizes([2 * size, size], -1)
    gates_in, new_in = from_input.split_with_sizes([2 * size, size], -1)
    reset, update = (gates + gates_in).chunk(2, -1)      # parts of one tensor, as in eager mode
    reset = reset.sigmoid()
    return reset, update.sigmoid(), (new_in + new * reset).tanh(), new


def gru_step(from_input: torch.Tensor, from_hidden: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return the next state of a GRU."""
    _, update, new, _ = gates_of(from_input, from_hidden)
    return (hidden - new) * update + new


def _gru_gradients(from_input: torch.Tensor, from_hidden: torch.Tensor, hidden: torch.Tensor,
                   _: torch.Tensor, grad: torch.Tensor) -> Gradients:
    reset, update, new, from_state = gates_of(from_input, from_hidden)
    of_update, of_difference = grad * (hidden - new), grad * update
    of_new = aten.tanh_backward.default(grad - of_difference, new)
    of_gates = torch.cat([aten.sigmoid_backward.default(of_new * from_state, reset),
                          aten.sigmoid_backward.default(of_update, update)], -1)
    return torch.cat([of_gates, of_new], -1), torch.cat([of_gates, of_new * reset], -1), of_difference


def _tanh_gradients(from_input: torch.Tensor, from_hidden: torch.Tensor, hidden: torch.Tensor,
                    after: torch.Tensor, grad: torch.Tensor) -> Gradients:
    found = aten.tanh_backward.default(grad, after)
    return found, found, None


def _relu_gradients(from_input: torch.Tensor, from_hidden: torch.Tensor, hidden: torch.Tensor,
                    after: torch.Tensor, grad: torch.Tensor) -> Gradients:
    found = aten.threshold_backward.default(grad, after, 0)
    return found, found, None


class _Cell(NamedTuple):
    """A step of a layer."""

    step: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    gradients: Callable[..., Gradients]
    keeps: bool
    """Whether the gradients need what the state contributes."""


_CELLS = (
    _Cell(gru_step, _gru_gradients, True),
    _Cell(lambda x, h, _: torch.tanh(h + x), _tanh_gradients, False),
    _Cell(lambda x, h, _: torch.relu(h + x), _relu_gradients, False),
)
STEPWISE = {aten.gru.input: 0, aten.rnn_tanh.input: 1, aten.rnn_relu.input: 2}
"""Torch's operations whose layers are written so, each with the number of its cell."""


def _order(length: int, reverse: bool) -> list[int]:
    return list(range(length))[::-1] if reverse else list(range(length))


def _run(x: torch.Tensor, hx: torch.Tensor, w_in: torch.Tensor, w: torch.Tensor, b_in: torch.Tensor | None,
         b: torch.Tensor | None, reverse: bool, kind: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    cell, hidden = _CELLS[kind], hx
    output, _, kept = _form(x, hx, w_in, w, b_in, b, reverse, kind)
    from_input, from_hidden = kept if cell.keeps else (output.new_empty(*x.shape[:2], len(w)), None)
    rows, product = x.reshape(-1, x.shape[2]), from_input.view(-1, len(w))
    if b_in is not None and x.is_contiguous():      # as `linear` does
        torch.addmm(b_in, rows, w_in.t(), out=product)
    else:
        torch.mm(rows, w_in.t(), out=product)
        if b_in is not None:
            product.add_(b_in)
    for t in _order(len(x), reverse):
        now = F.linear(hidden, w, b)
        if from_hidden is not None:
            from_hidden[t] = now
        hidden = cell.step(from_input[t], now, hidden)
        output[t] = hidden
    return output, hidden, kept


def _run_backward(x: torch.Tensor, hx: torch.Tensor, w_in: torch.Tensor, w: torch.Tensor,
                  b_in: torch.Tensor | None, b: torch.Tensor | None, output: torch.Tensor,
                  kept: torch.Tensor, grad_output: torch.Tensor | None, grad_hidden: torch.Tensor | None,
                  of_input: bool, reverse: bool, kind: int) -> list[torch.Tensor]:
    cell, order = _CELLS[kind], _order(len(x), reverse)
    found = output.new_empty(*x.shape[:2], len(w))
    from_input, from_hidden = kept if cell.keeps else (output, output)
    of_w, of_b = w.new_zeros(0), w.new_zeros(0)
    of_state = [] if grad_hidden is None else [grad_hidden]
    for k, t in reversed(list(enumerate(order))):
        # Autograd adds up in the order in which its operations run: the outputs', the step's, the product's.
        parts = of_state if grad_output is None else [grad_output[t], *of_state]
        grad = parts[0] if parts else torch.zeros_like(hx)
        for part in parts[1:]:
            grad = grad + part
        hidden = hx if k == 0 else output[order[k - 1]]
        found[t], of_product, direct = cell.gradients(from_input[t], from_hidden[t], hidden, output[t], grad)
        of_w = of_w.add_(of_product.t().mm(hidden)) if of_w.numel() else of_product.t().mm(hidden)
        if b is not None:
            of_b = of_b.add_(of_product.sum(0)) if of_b.numel() else of_product.sum(0)
        of_state = [*([] if direct is None else [direct]), of_product.mm(w)]
    rows = found.view(-1, len(w))
    of_x = rows.mm(w_in).view(x.shape) if of_input else x.new_empty(0)
    of_w_in = rows.t().mm(x.reshape(-1, x.shape[2]))
    biases = [] if b_in is None else [rows.sum(0) if x.is_contiguous() else found.sum((0, 1)), of_b]
    return [of_x, sum(of_state[1:], of_state[0]), of_w_in, of_w, *biases]


def _form(x: torch.Tensor, hx: torch.Tensor, w_in: torch.Tensor, w: torch.Tensor,
          b_in: torch.Tensor | None, b: torch.Tensor | None, reverse: bool,
          kind: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kept = (2, *x.shape[:2], len(w)) if _CELLS[kind].keeps else 0
    return x.new_empty(len(x), *hx.shape), hx.new_empty(hx.shape), x.new_empty(kept)


def _form_backward(x: torch.Tensor, *others: Any) -> list[torch.Tensor]:
    of_input = others[-3]
    return [x.new_empty(x.shape if of_input else 0), *(
        t.new_empty(t.shape) for t in others[:5] if t is not None)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *tensors, reverse, kind = inputs
    ctx.set_materialize_grads(False)
    ctx.kind = reverse, kind
    ctx.save_for_backward(*tensors, output[0], output[2])


def _gradient(ctx: Any, grad_output: Any, grad_hidden: Any, _: Any) -> tuple[Any, ...]:
    *layer, output, kept = ctx.saved_tensors
    if torch.is_grad_enabled():
        return *_as_a_graph(layer, grad_output, grad_hidden, *ctx.kind), None, None
    found = torch.ops.rkmate.recurrent_steps_backward.default(
        *layer, output, kept, grad_output, grad_hidden, ctx.needs_input_grad[0], *ctx.kind)
    return (found[0] if ctx.needs_input_grad[0] else None, *found[1:], *[None] * (8 - len(found)))


def _as_a_graph(layer: Sequence[Any], grad_output: Any, grad_hidden: Any, reverse: bool,
                kind: int) -> list[torch.Tensor | None]:
    """Return the gradients of a layer's tensors, step by step, by operations that have gradients."""
    x, hidden, w_in, w, b_in, b = layer
    outputs: dict[int, Any] = {}
    for t, from_input in [*enumerate(F.linear(x, w_in, b_in).unbind(0))][::-1 if reverse else 1]:
        hidden = outputs[t] = _CELLS[kind].step(from_input, F.linear(hidden, w, b), hidden)
    results = {torch.stack([outputs[t] for t in sorted(outputs)]): grad_output, hidden: grad_hidden}
    given = {y: grad for y, grad in results.items() if grad is not None}
    wanted = [t for t in layer if t is not None and t.requires_grad]
    found = torch.autograd.grad([*given], wanted, [*given.values()], create_graph=True, allow_unused=True)
    gradients = dict(zip(map(id, wanted), found, strict=True))
    return [gradients.get(id(t)) for t in layer]


def _step_bytes(inputs: Sequence[torch.Tensor]) -> int:
    """Return the bytes of what the input contributes to a step."""
    x, w_in = inputs[0], inputs[2]
    return x.shape[1] * w_in.shape[0] * x.element_size()


def _temporaries(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
    x, step = inputs[0], _step_bytes(inputs)
    contributed = 0 if outputs[2].numel() else len(x) * step
    return 4 * step + contributed + (0 if x.is_contiguous() else x.nbytes)


def _temporaries_backward(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
    x, step = inputs[0], _step_bytes(inputs)
    return (len(x) + 6) * step + inputs[1].nbytes + outputs[3].nbytes + (
        0 if x.is_contiguous() else x.nbytes)


def _flops(x: Sequence[int], hx: Sequence[int], w_in: Sequence[int], w: Sequence[int], *others: Any,
           **more: Any) -> int:
    return 2 * x[0] * x[1] * w[0] * (w_in[1] + w[1])


_LAYER = "Tensor input, Tensor hx, Tensor w_in, Tensor w, Tensor? b_in, Tensor? b"
_KIND = "bool reverse, int kind"
register((
    OwnOperator(f"recurrent_steps({_LAYER}, {_KIND}) -> (Tensor, Tensor, Tensor)", _run, "CPU", shape=_form,
                gradient=Gradient(_gradient, _save), direct=True, temporaries=_temporaries, flops=_flops),
    OwnOperator(f"recurrent_steps_backward({_LAYER}, Tensor output, Tensor kept, Tensor? grad_output, "
                f"Tensor? grad_hidden, bool of_input, {_KIND}) -> Tensor[]", _run_backward, "CPU",
                shape=_form_backward, direct=True, temporaries=_temporaries_backward,
                flops=lambda *args, **more: 2 * _flops(*args, **more)),
))


def stepwise(op: Any, x: torch.Tensor, hidden: Any, weights: Sequence[torch.Tensor],
             has_biases: bool, train: bool, bidirectional: bool) -> tuple[torch.Tensor, ...]:
    """Return what `op`, torch's operation for a layer, returns. x: (steps, batch, width)."""
    outputs, states = [], []
    per_direction = len(weights) // (2 if bidirectional else 1)
    for k in range(2 if bidirectional else 1):
        w_in, w, b_in, b, *_ = [*weights[k * per_direction:(k + 1) * per_direction], None, None]
        y, state, _ = torch.ops.rkmate.recurrent_steps.default(
            x, hidden[k], w_in, w, b_in, b, k == 1, STEPWISE[op])
        outputs.append(y)
        states.append(state)
    return torch.cat(outputs, -1) if bidirectional else outputs[0], torch.stack(states)
