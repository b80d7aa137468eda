"""Features of captures that depend on undocumented names of torch, each with its self test."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rkmate.torch_seam import versions
from rkmate.torch_seam.versions import GROUPS, Feature

aten = torch.ops.aten
JOINT_GRAPH = "the joint graph of forward and backward"
AUTOCAST = "the backward outside of autocast"
CASTS = "one cast of a weight in an autocast region"
AVERAGES = "batch norms with cumulative averages"
NUMERICS = "kernels that compute as in eager mode"
GATES = "gates of a GRU as in eager mode"
LAYOUTS = "layouts of results as kernels return them"
CHECKS = "distributions without checks of values"
MOVES = "modules that are moved to where they are"
GLOBAL_HOOKS = "hooks around every module"
VALUES = "values that depend on inputs alone"
FLAT_REGIONS = "autocast and no-grad regions inside of one another"
REGIONS = "regions under torch.utils.checkpoint"
INNER = "gradients inside of a forward"
CUSTOM = "custom autograd functions"
PATHS = "libraries on eager mode's path"
GRADIENTS = "layouts of gradients from outside of a part"
GUARDS = "quick guards"


class _Model(nn.Module):
    """A layer and a buffer, whose gradient has a product and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return torch.tanh(self.layer(x))


def _joint_graph() -> None:
    from rkmate.torch_seam import nodes, trace

    trace.load()
    assert not trace.inside_transform() and not trace.inside_fake_mode()
    with trace.quiet(), trace.graphs_without_code(), torch.enable_grad():
        x = torch.ones(3, 2)
        program = torch.export.export(_Model(), (x,), strict=False).module()
        graph = trace.export_joint(program, (x,)).graph
    inputs = [trace.role_of(nodes.descriptor(n)) for n in graph.nodes if n.op == "placeholder"]
    assert sorted(r.kind for r in inputs) == ["buffer", "input", "parameter", "parameter", "tangent"]
    assert {r.name for r in inputs if r.kind == "parameter"} == {"layer.weight", "layer.bias"}
    assert any(trace.is_tangent(n) for n in graph.nodes)
    end = next(n for n in graph.nodes if n.op == "output")
    outputs = [trace.role_of(d) for d in nodes.descriptor(end) if d is not None]
    assert sorted(r.kind for r in outputs) == ["gradient", "gradient", "mutation", "output"]
    backward = [n for n in graph.nodes if nodes.is_backward(n)]
    product = next(n for n in graph.nodes if n.target in (aten.addmm.default, aten.mm.default))
    assert backward and not nodes.is_backward(product)
    assert isinstance(product.meta[nodes.VALUE], torch.Tensor)
    assert nodes.sequence_number(product) in {nodes.sequence_number(n) for n in backward}
    assert any("layer" in str(path) for path, _ in (nodes.module_stack(product) or {}).values())


def _enters(context: Callable[[], Any]) -> Callable[[], None]:
    def check() -> None:
        with context():
            pass
    return check


def _autocast() -> None:
    from rkmate.torch_seam.patches.autograd import backward_without_autocast
    _enters(backward_without_autocast)()


def _casts() -> None:
    from rkmate.torch_seam.patches.autograd import casts_kept_in_regions, note_leaves

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        note_leaves(weight)
        with torch.autocast("cpu", torch.bfloat16):
            return torch.mm(torch.mm(x, weight), weight)

    x, weight = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
    with casts_kept_in_regions():
        graph = _graph_of(function, x, weight)
    assert [n.target for n in graph.nodes].count(aten._to_copy.default) == 2


def _averages() -> None:
    from rkmate.torch_seam.patches.modules import cumulative_averages_as_tensors

    norm, other = (nn.BatchNorm1d(2, momentum=None) for _ in range(2))
    x = torch.arange(6.0).reshape(3, 2)
    with cumulative_averages_as_tensors(norm):
        assert torch.equal(norm(x), other(x))
    assert torch.equal(norm.state_dict()["running_mean"], other.state_dict()["running_mean"])


def _graph_of(function: Callable[..., Any], *args: torch.Tensor) -> torch.fx.Graph:
    """Return a trace of a function."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, tracing_mode="symbolic")(*args).graph


def _traced(function: Callable[..., Any], *args: torch.Tensor) -> set[Any]:
    """Return the operators that a function calls, as a trace of it sees them."""
    return {n.target for n in _graph_of(function, *args).nodes if n.op == "call_function"}


def _numerics() -> None:
    from rkmate.torch_seam.patches.numerics import as_eager_computes

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.prod(x) + nn.functional.softshrink(x).sum()

    with as_eager_computes():
        called = _traced(function, torch.ones(3))
    assert torch.ops.rkmate.product.default in called and aten.softshrink.default in called


def _gates() -> None:
    from torch._decomp import decompositions

    from rkmate.torch_seam.patches.recurrent import gates_as_eager_computes

    cell = nn.GRUCell(2, 2).requires_grad_(False)
    x, hidden = torch.ones(3, 2), torch.ones(3, 2)
    with gates_as_eager_computes():
        made = decompositions.gru_cell_data(
            x, hidden, cell.weight_ih, cell.bias_ih, cell.weight_hh, cell.bias_hh)
    assert torch.equal(made, cell(x, hidden))


def _layouts() -> None:
    from rkmate.torch_seam.patches.layouts import as_kernels_return_them
    from rkmate.torch_seam.tensors import FakeTensorMode

    with as_kernels_return_them(), FakeTensorMode():
        images = torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last)
        grad = aten.mse_loss_backward.default(torch.empty(()), images, images, 1)
        assert grad.is_contiguous()
        assert torch.empty(2, 6).view(2, 1, 6).stride() == (6, 6, 1)


def _checks() -> None:
    from rkmate.torch_seam.patches.libraries import without_value_checks

    with without_value_checks():
        torch.distributions.Normal(torch.zeros(()), -torch.ones(()))


def _moves() -> None:
    from rkmate.torch_seam.patches.modules import standing_modules_stay

    layer = nn.Linear(2, 2)
    weight = layer.weight
    with standing_modules_stay():
        assert layer.to(torch.float32).weight is weight
        assert layer.to(torch.float64).weight.dtype is torch.float64


def _global_hooks() -> None:
    from rkmate.torch_seam.patches.modules import global_backward_hooks, global_forward_hooks
    global_forward_hooks(), global_backward_hooks()


def _values() -> None:
    from rkmate.torch_seam.trace import values_refused
    _enters(values_refused)()


def _regions() -> None:
    from torch.utils.checkpoint import checkpoint

    from rkmate.torch_seam.patches.autograd import regions_marked

    with regions_marked():
        x = torch.ones(2, requires_grad=True)
        checkpoint(torch.tanh, x, use_reentrant=False).sum().backward()
        assert x.grad is not None


class _Regions(nn.Module):
    """A region without gradients inside of an autocast region."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                factor = torch.mm(x, x)
            return torch.mm(x, factor).float()


def _flat_regions() -> None:
    from rkmate.torch_seam import trace
    from rkmate.torch_seam.patches.autograd import regions_entered_in_place, regions_left_after_errors

    x, other = (torch.full((2, 2), 1.2, requires_grad=True) for _ in range(2))
    with trace.quiet(), torch.enable_grad(), regions_entered_in_place():
        program = torch.export.export(_Regions(), (x,), strict=False).module()
    regions_left_after_errors(program)
    torch.fx.Interpreter(program).run(x).sum().backward()
    _Regions()(other).sum().backward()
    assert x.grad is not None and other.grad is not None and torch.equal(x.grad, other.grad)
    assert not torch.is_autocast_enabled("cpu")


def _inner() -> None:
    from rkmate.torch_seam.patches.autograd import noting_inner_gradients

    seen: list[None] = []
    x = torch.ones(2, requires_grad=True)
    with noting_inner_gradients(lambda: seen.append(None)):
        torch.autograd.grad(x.sum(), x)
    assert seen == [None]


class _Doubled(torch.autograd.Function):
    """Rounds, and doubles the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return 2 * grads[0]


class _Rounding(nn.Module):
    """Calls a custom function by a reference that was taken before."""

    apply_it = _Doubled.apply

    def forward(self, x: torch.Tensor) -> Any:
        return type(self).apply_it(x)


def _custom_functions() -> None:
    from rkmate.torch_seam import trace
    from rkmate.torch_seam.patches.custom_functions import kept_whole, run_as_they_are

    x = torch.full((2,), 1.2, requires_grad=True)
    with trace.quiet(), torch.enable_grad(), kept_whole():
        program = torch.export.export(_Rounding(), (x,), strict=False).module()
    run_as_they_are(program)
    program(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0, 2.0]


def _gradients() -> None:
    from rkmate.torch_seam import nodes, trace

    trace.load()
    with trace.quiet(), torch.enable_grad(), trace.gradients_laid_out([(1, 3)]):
        x = torch.ones(3, 2)
        program = torch.export.export(_Model(), (x,), strict=False).module()
        graph = trace.export_joint(program, (x,)).graph
    assert [n.meta[nodes.VALUE].stride() for n in graph.nodes if trace.is_tangent(n)] == [(1, 3)]


def _paths() -> None:
    from torch._subclasses.functional_tensor import dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx

    from rkmate.torch_seam.patches.libraries import as_in_eager_mode, known_value

    seen: list[Any] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(3)
        known = known_value(places)
        seen.extend((None if known is None else known.tolist(), known_value(x)))
        return x + places

    with as_in_eager_mode():
        make_fx(function)(torch.ones(3))
        make_fx(dispatch_functionalize(function))(torch.ones(3))        # as models with DTensors are traced
    assert seen == [[0, 1, 2], None] * 2


def _groups() -> None:
    from rkmate.torch_seam import compiler

    compiler.load()
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    assert callable(compile_fx_inner) and select_decomp_table()
    assert isinstance(compiler.has_triton(), bool)


def _guards() -> None:
    from rkmate.torch_seam.compiler import TensorGuards, dict_version

    known = {"a": 1}
    before = dict_version(known)
    assert dict_version(known) == before
    known["a"] = 2
    assert dict_version(known) != before
    t = torch.ones(2)
    guards = TensorGuards(t, dynamic_dims_sizes=[[2]], dynamic_dims_strides=[[1]])
    assert guards.check(t) and not guards.check(torch.ones(3))


_BITS = "outputs and gradients of models that use it may differ in their last bits"
FEATURES = (
    Feature(JOINT_GRAPH, _joint_graph, None),
    Feature(AUTOCAST, _autocast, "gradients under autocast may be computed in another type"),
    Feature(CASTS, _casts, "gradients of weights that are used several times under autocast may differ"),
    Feature(AVERAGES, _averages, "batch norms with momentum=None are refused"),
    Feature(NUMERICS, _numerics, _BITS),
    Feature(GATES, _gates, _BITS),
    Feature(LAYOUTS, _layouts, f"{_BITS}, and predicted bytes may be off"),
    Feature(CHECKS, _checks, "distributions in a forward are refused"),
    Feature(MOVES, _moves, "forwards that call Module.to are refused"),
    Feature(GLOBAL_HOOKS, _global_hooks, None),
    Feature(VALUES, _values, None),
    Feature(REGIONS, _regions, "what checkpointing takes is not known"),
    Feature(FLAT_REGIONS, _flat_regions, "numbers of models with such regions may differ"),
    Feature(INNER, _inner, "forwards that differentiate are refused"),
    Feature(CUSTOM, _custom_functions, None),
    Feature(PATHS, _paths, "models of transformers may hold explicit masks, and differ in their last bits"),
    Feature(GROUPS, _groups, "compile=True is refused"),
    Feature(GRADIENTS, _gradients, "gradients of models that are planned by parts may differ in last bits"),
    Feature(GUARDS, _guards, "each planned call takes longer on the host"),
)
"""Features of captures and of compiled groups, in the order of their checks."""


@functools.cache
def check_once() -> None:
    """Check a torch that was not tested, before the first capture of the process.

    Raises:
        TorchVersionError: nothing can be captured with it.
    """
    if not versions.was_seen():
        versions.check(FEATURES)
