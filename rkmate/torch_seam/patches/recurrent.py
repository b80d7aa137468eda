"""Recurrent layers: three places where torch's own tracing is not what eager mode does. On GPUs, stacks are
cuDNN's (`cudnn_rnn`) where eager mode's are; GRUs and layers of tanh or relu on a CPU are one operation for
each layer and direction (`recurrent_steps`).

`aten.mkldnn_rnn_layer` makes the workspace that its backward reads only while gradients are
recorded, and its fake result does not know the workspace's size. The operation registered here
always makes it, and reports its size.

The gates of a GRU are parts of one tensor, and eager mode's kernels go over such parts row by row.
Torch's decomposition makes each a tensor of its own, which is gone over as a whole: where a row ends,
other elements fall to the scalar version of the same function, which rounds otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.nn import functional as F

from rkmate import device as devices
from rkmate.errors import CaptureError
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.own import OwnOperator, register
from rkmate.torch_seam.patches.cudnn_rnn import as_autocast_gives_them, is_cudnns, layers_of_cudnn
from rkmate.torch_seam.patches.recurrent_steps import STEPWISE, gru_step, stepwise
from rkmate.torch_seam.schema import DispatchKey, python_kernels_replaced
from rkmate.torch_seam.tensors import without_modes

aten = torch.ops.aten


def _run(*args: Any) -> Any:
    plain = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
    with torch.enable_grad():
        return aten.mkldnn_rnn_layer.default(*plain)


register((OwnOperator(
    "recurrent_layer(Tensor input, Tensor w1, Tensor w2, Tensor w3, Tensor w4, Tensor hx, Tensor cx, "
    "bool reverse, int[] batch_sizes, int mode, int hidden_size, int num_layers, bool has_biases, "
    "bool bidirectional, bool batch_first, bool train) -> (Tensor, Tensor, Tensor, Tensor)",
    _run, "CPU", uses_autograd=True),))


def make_recurrent_layers_whole(graph: fx.Graph) -> None:
    """Let every fused recurrent layer of a captured graph be the operation of this file."""
    for node in graph.nodes:
        if node.target is aten.mkldnn_rnn_layer.default:
            node.target = torch.ops.rkmate.recurrent_layer.default
            node.meta[VALUE] = values_of(node, node.meta[VALUE])
            for user in node.users:
                user.meta[VALUE] = node.meta[VALUE][user.args[1]]


def values_of(node: fx.Node, like: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return fake tensors like a layer's results: output, states, and the workspace, whose bytes are measured
    on zeros of the layer's own shapes. `like`: results of a layer that differs in its number of steps at
    most."""
    sequence: Any = node.args[0]
    output, hidden, cell, _ = like
    with output.fake_mode:                                                  # type: ignore[attr-defined]
        return (output.new_empty(sequence.meta[VALUE].shape[0], *output.shape[1:]),
                hidden.new_empty(hidden.shape), cell.new_empty(cell.shape),
                torch.empty(_workspace_bytes(node), dtype=torch.uint8, device=output.device))


def _workspace_bytes(node: fx.Node) -> int:
    def real(argument: Any) -> Any:
        if not isinstance(argument, fx.Node):
            return argument
        like = argument.meta[VALUE]
        return torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    with without_modes():
        workspace = _run(*map(real, node.args))[3]
    return int(workspace.numel() * workspace.element_size())


_LAYERED = {aten.lstm.input, *STEPWISE}
_PACKED = {aten.lstm.data, aten.gru.data, aten.rnn_tanh.data, aten.rnn_relu.data}
_LSTM = 2
"""The fused layer's number for an LSTM."""


def as_eager_runs_them(program: fx.GraphModule) -> None:
    """Let the recurrent stacks of an exported program be traced as eager mode runs them.

    Torch's decompositions (seen in 2.11 to 2.13) leave out the dropout between the layers, and use the fused
    LSTM layer for the first layer only; they unroll what is one operation here. A single cell is decomposed
    as in eager mode.
    """
    found = [n for n in program.graph.nodes
             if n.target is aten.gru_cell.default or n.target in _LAYERED or n.target in _PACKED]
    for node in found:
        if node.target is aten.gru_cell.default and devices.of(node.meta[VALUE]).cpu_kernels:
            node.target = _cell
        if node.target in _LAYERED:
            node.args = (node.target, *node.args)
            node.target = _layer_by_layer
        elif node.target in _PACKED and _has_dropout(node):
            raise CaptureError(f"{node.target} with dropout between the layers of a packed sequence "
                               "cannot be captured: stack single layers and nn.Dropout instead")
    if found:
        program.recompile()


def _has_dropout(packed: fx.Node) -> bool:
    arguments: Any = packed.args[5:8]
    layers, dropout, train = arguments
    return bool(train and dropout > 0 and layers > 1)


def _layer_by_layer(op: Any, x: torch.Tensor, hidden: Any, params: list[torch.Tensor],
                    has_biases: bool, layers: int, dropout: float, train: bool,
                    bidirectional: bool, batch_first: bool, here: bool | None = None
                    ) -> tuple[torch.Tensor, ...]:
    here = _has_library() if here is None else here
    directions = 2 if bidirectional else 1
    several = isinstance(hidden, (list, tuple))
    states = list(hidden) if several else [hidden]
    per_layer = len(params) // layers
    run = _fused if op is aten.lstm.input and here and _fusable(x, states, params) else \
        stepwise if op in STEPWISE and _is_stepwise(x, states, params) else _plain
    read = [x, *states, *params]
    if not devices.of(x).cpu_kernels:
        read = as_autocast_gives_them(read)
    if is_cudnns(read[0], read[1:]):
        x, states, params = read[0], read[1:1 + len(states)], read[1 + len(states):]
        hidden = states if several else states[0]
        if not (train and dropout > 0 and layers > 1):
            return layers_of_cudnn(op, x, hidden, params, layers, train, bidirectional, batch_first)
        run = _by_cudnn
    found: list[list[torch.Tensor]] = [[] for _ in states]
    if batch_first:
        x = x.transpose(0, 1)
    for k in range(layers):
        entering = [s[k * directions:(k + 1) * directions] for s in states]
        weights = params[k * per_layer:(k + 1) * per_layer]
        x, *leaving = run(op, x, entering if several else entering[0], weights, has_biases, train,
                          bidirectional)
        for kept, state in zip(found, leaving, strict=True):
            kept.append(state)
        if train and dropout > 0 and k + 1 < layers:
            x = torch.dropout(x, dropout, True)
    if batch_first:
        x = x.transpose(0, 1)
    return (x, *(torch.cat(kept) for kept in found))


def _plain(op: Any, x: torch.Tensor, hidden: Any, weights: list[torch.Tensor], has_biases: bool,
           train: bool, bidirectional: bool) -> tuple[torch.Tensor, ...]:
    return tuple(op(x, hidden, weights, has_biases, 1, 0.0, train, bidirectional, False))


def _by_cudnn(op: Any, x: torch.Tensor, hidden: Any, weights: list[torch.Tensor], has_biases: bool,
              train: bool, bidirectional: bool) -> tuple[torch.Tensor, ...]:
    return layers_of_cudnn(op, x, hidden, weights, 1, train, bidirectional, False)


def _has_library() -> bool:
    return bool(torch.backends.mkldnn.enabled) and torch.backends.mkldnn.is_available()


def _fusable(x: torch.Tensor, states: list[torch.Tensor], params: list[torch.Tensor]) -> bool:
    tensors = [x, *states, *params]
    projected = states[0].shape[2] != states[1].shape[2]
    # Under autocast the layer casts what it takes, and eager mode asks for the type of the input alone.
    kind = devices.of(x).autocast_kind
    typed = x.dtype is torch.float32 if torch.is_autocast_enabled(kind) else \
        all(t.dtype is torch.float32 for t in tensors)
    return not projected and typed and all(
        devices.of(t).cpu_kernels and t.numel() > 0 for t in tensors)


def _fused(op: Any, x: torch.Tensor, hidden: list[torch.Tensor], weights: list[torch.Tensor],
           has_biases: bool, train: bool, bidirectional: bool) -> tuple[torch.Tensor, ...]:
    outputs, states, cells = [], [], []
    per_direction = len(weights) // (2 if bidirectional else 1)
    h, c = hidden
    for k in range(2 if bidirectional else 1):
        w = weights[k * per_direction:(k + 1) * per_direction]
        if not has_biases:
            w = [*w, w[0].new_zeros(w[0].shape[0]), w[1].new_zeros(w[1].shape[0])]
        y, hy, cy, _ = aten.mkldnn_rnn_layer.default(
            x.contiguous(), *w, h[k].contiguous(), c[k].contiguous(), k == 1, [], _LSTM, h.shape[2],
            1, has_biases, bidirectional, False, train)
        outputs.append(y)
        states.append(hy.reshape(h[k].shape))
        cells.append(cy.reshape(c[k].shape))
    y = torch.cat(outputs, -1) if bidirectional else outputs[0]
    return y, torch.stack(states), torch.stack(cells)


def _is_stepwise(x: torch.Tensor, states: list[torch.Tensor], params: list[torch.Tensor]) -> bool:
    """Return whether a layer can be written as `recurrent_steps`. Autocast casts inside of each step. Where
    layers or directions share a weight, autograd adds the parts of all steps to one sum."""
    each = len(params) // states[0].shape[0]
    own = [{id(t) for t in params[k:k + each]} for k in range(0, len(params), each)]
    shared = sum(map(len, own)) > len(set().union(*own))
    return not shared and not torch.is_autocast_enabled(devices.of(x).autocast_kind) and all(
        devices.of(t).cpu_kernels and t.numel() > 0 and t.dtype is x.dtype for t in (x, *states, *params))


def _gated(inp: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor,
           bias: torch.Tensor | None) -> torch.Tensor:
    """Run a step of a GRU. `inp`: what the input contributes to the gates."""
    return gru_step(inp, F.linear(hidden, weight, bias), hidden)


def _cell(x: torch.Tensor, hidden: torch.Tensor, w_in: torch.Tensor, w: torch.Tensor,
          b_in: torch.Tensor | None = None, b: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `aten.gru_cell`."""
    return _gated(F.linear(x, w_in, b_in), hidden, w, b)


def types_of_fused_layers() -> AbstractContextManager[None]:
    """While a module is captured: an LSTM returns the type that the fused layer returns. Torch's
    decomposition computes the cells themselves, and under autocast in another type."""
    here = _has_library()           # an export switches it off for its own time
    return _layer_by_layer_where(lambda *tensors: here and _fusable(*tensors), [aten.lstm.input], here)


def layers_as_one() -> AbstractContextManager[None]:
    """While a module is exported, layers that become one operation are not unrolled."""
    return _layer_by_layer_where(_is_stepwise, STEPWISE)


def _layer_by_layer_where(is_so: Callable[..., bool], ops: Iterable[Any],
                          here: bool | None = None) -> AbstractContextManager[None]:
    def kernel(op: Any) -> Any:
        decomposed = op.py_kernels[DispatchKey.CompositeImplicitAutograd]

        def run(x: torch.Tensor, hidden: Any, params: list[torch.Tensor], has_biases: bool, layers: int,
                dropout: float, train: bool, *others: bool) -> Any:
            states = list(hidden) if isinstance(hidden, (list, tuple)) else [hidden]
            run = partial(_layer_by_layer, op, here=here) if is_so(x, states, params) else decomposed
            return run(x, hidden, params, has_biases, layers, dropout, train, *others)

        return run

    return python_kernels_replaced({op: kernel(op) for op in ops})


@contextmanager
def gates_as_eager_computes() -> Iterator[None]:
    """Decompose GRUs on the CPU to eager mode's arithmetic while a module is captured."""
    from torch._decomp import decompositions

    def on_cpu(name: str, cell: Callable[..., torch.Tensor]) -> Any:
        original = getattr(decompositions, name)

        def run(inp: torch.Tensor, hidden: torch.Tensor, *weights: Any) -> Any:
            return (cell if devices.of(hidden).cpu_kernels else original)(inp, hidden, *weights)

        return mock.patch.object(decompositions, name, run)

    with ExitStack() as stack:
        stack.enter_context(on_cpu("gru_cell", lambda inp, hidden, w_in, b_in, w, b: _gated(
            inp, hidden, w, b)))
        stack.enter_context(on_cpu("gru_cell_data", lambda inp, hidden, w_in, b_in, w, b: _gated(
            F.linear(inp, w_in, b_in), hidden, w, b)))
        yield

