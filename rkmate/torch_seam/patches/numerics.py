"""Operations that torch traces with another arithmetic than eager mode's, put back on eager's.

Torch decomposes some operations in Python while it traces (resampling, shrinking, margin losses:
rounded otherwise, and one of the losses wrong), and chooses some gradients' formulas by values, which
a trace has not. While a module is captured, the first take torch's own kernels, and the second become
operations that ask eager autograd when they run.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import fx, nn

from rkmate import device as devices
from rkmate.device.random_state import RandomState
from rkmate.errors import CaptureError
from rkmate.torch_seam import schema
from rkmate.torch_seam.dtensor import is_dtensor, local_part, placed
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.own import Gradient, Over, OwnOperator, own_operator, register
from rkmate.torch_seam.schema import python_kernels_replaced
from rkmate.torch_seam.trace import fake_operations_seen, setting_refused

aten = torch.ops.aten


def _product(x: torch.Tensor, dim: int | None, keepdim: bool) -> torch.Tensor:
    return torch.prod(x) if dim is None else torch.prod(x, dim, keepdim)


def _cumulative_product(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.cumprod(x, dim)


def _layout_of_product(grad: torch.Tensor, x: torch.Tensor, dim: int | None,
                       keepdim: bool) -> torch.Tensor:
    """Return a tensor with the strides of a product with the incoming gradient, as all formulas of eager mode
    have them."""
    if dim is None or not x.dim():
        return torch.empty_like(x)
    return (grad if keepdim else grad.unsqueeze(dim)) * x


def _layout_of_cumulative_product(grad: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.empty_like(x)


def _define(name: str, arguments: str, forward: Callable[..., torch.Tensor],
            layout: Callable[..., torch.Tensor]) -> None:
    """Define an operation whose gradient is eager autograd's, found when it runs. `layout`: the gradient's
    shape and strides, on fake tensors."""

    def backward(grad: torch.Tensor, x: torch.Tensor, *args: Any) -> torch.Tensor:
        # In this thread: another one of autograd's may wait for a lock that this one holds.
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            leaf = x.detach().requires_grad_()
            result: torch.Tensor = torch.autograd.grad(forward(leaf, *args), leaf, grad)[0]
        return result

    def save(ctx: Any, inputs: Sequence[Any], output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.args = inputs[1:]

    def gradient(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        backward_op = own_operator(f"{name}_backward")
        return (backward_op(grad, ctx.saved_tensors[0], *ctx.args), *(None for _ in ctx.args))

    def below_autograd(x: torch.Tensor, *args: Any) -> torch.Tensor:
        with schema.below_autograd():
            return forward(x, *args)

    register((
        OwnOperator(f"{name}({arguments}) -> Tensor", below_autograd, shape=below_autograd,
                    gradient=Gradient(gradient, save)),
        OwnOperator(f"{name}_backward(Tensor grad, {arguments}) -> Tensor", backward, shape=layout,
                    uses_autograd=True),
    ))


_define("product", "Tensor x, int? dim, bool keepdim", _product, _layout_of_product)
_define("cumulative_product", "Tensor x, int dim", _cumulative_product, _layout_of_cumulative_product)


def _one_zero(like: torch.Tensor) -> torch.Tensor:
    one = torch.ones_like(like)
    if one.numel():
        one[(-1,) * one.dim()] = 0
    return one


MOST_MEMORY_AT: dict[Any, tuple[int, tuple[Callable[[torch.Tensor], torch.Tensor], ...]]] = {
    torch.ops.rkmate.product_backward.default: (1, (torch.zeros_like, _one_zero)),
    torch.ops.rkmate.cumulative_product_backward.default: (1, (torch.zeros_like, _one_zero)),
    aten.linalg_matrix_exp.default: (0, (lambda like: torch.full_like(like, 3),)),
}
"""Operations that choose a formula by values: by how many zeros there are, or by the norm of a matrix.
Operation -> position of that value among its arguments, and values of its form at which one of the formulas
needs the most temporary memory: costs are measured at these, too."""


def _prod_all(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _multiplied(x, dtype, None, False)


def _prod_dim(x: torch.Tensor, dim: int, keepdim: bool = False, *,
              dtype: torch.dtype | None = None) -> torch.Tensor:
    return _multiplied(x, dtype, dim, keepdim)


def _multiplied(x: torch.Tensor, dtype: torch.dtype | None, dim: int | None,
                keepdim: bool) -> torch.Tensor:
    result: torch.Tensor = torch.ops.rkmate.product(_cast(x, dtype), dim, keepdim)
    return result


def _cumprod(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    result: torch.Tensor = torch.ops.rkmate.cumulative_product(_cast(x, dtype), dim)
    return result


def _cast(x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype is None and not x.is_floating_point() and not x.is_complex():
        dtype = torch.int64
    return x if dtype is None else x.to(dtype)


def _drop(x: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout, and its mask. Draws and rounds as eager mode does on a CPU: in the order of memory, and with
    the factor rounded to the type of the tensor. The mask takes a byte for each number, and no other memory
    is taken beside the result."""
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
    return mask.to(x.dtype).div_(1 - p).mul_(x), mask


def _keep_mask(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    ctx.p = inputs[1]
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _drop_gradient(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    return grad * ctx.saved_tensors[0].to(grad.dtype).div(1 - ctx.p), None


def _whole_numbers(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
    """Bytes of the whole numbers that are drawn first, beyond those of the result that comes later."""
    return max(0, 4 * outputs[0].numel() - outputs[0].nbytes)


def _drawn_beside(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
    return 4 * outputs[0].numel()


def _drawn_over(x: torch.Tensor, p: float) -> torch.Tensor:
    return x.bernoulli_(p)


def _drawn(x: torch.Tensor, p: float) -> torch.Tensor:
    """A draw in the layout of a tensor, which `torch.bernoulli` does not keep."""
    return torch.empty_like(x).bernoulli_(p)


register((
    OwnOperator("dropout(Tensor x, float p) -> (Tensor, Tensor)", _drop, shape=_drop,
                gradient=Gradient(_drop_gradient, _keep_mask), tags=(torch.Tag.nondeterministic_seeded,),
                temporaries=_whole_numbers),
    OwnOperator("bernoulli(Tensor x, float p) -> Tensor", _drawn, shape=_drawn,
                in_place=Over("bernoulli_", 0), tags=(torch.Tag.nondeterministic_seeded,),
                temporaries=_drawn_beside),
    OwnOperator("bernoulli_(Tensor(a!) x, float p) -> Tensor(a!)", _drawn_over,
                tags=(torch.Tag.nondeterministic_seeded,), temporaries=_drawn_beside),
))


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Dropout that keeps a mask of bytes, with the draws and the rounding of eager mode: on a CPU, each rank
    draws for its part of a DTensor."""
    if not train or p == 0 or not x.numel():
        return x.clone()
    if p == 1:
        return x * torch.zeros((), dtype=x.dtype, device=x.device)
    on_cpu = devices.of(x).cpu_kernels      # others have one kernel for it, which keeps a mask of bytes
    if on_cpu and is_dtensor(x):
        where = placed(x)
        if any(placement.is_partial() for placement in where.placements):
            return cast(torch.Tensor, schema.composed(aten.dropout.default, x, p, train))
        return where.of(_dropout(local_part(x), p, train))
    result: torch.Tensor = torch.ops.rkmate.dropout(x, p)[0] if on_cpu else aten.native_dropout(x, p, True)[0]
    return result


def _bernoulli(x: torch.Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> Any:
    """A draw into a tensor (`bernoulli_`), as a trace writes it: eager mode fills it in the order of its
    memory."""
    return torch.ops.rkmate.bernoulli(x, p) if generator is None else NotImplemented


def _weight_of_targets(weight: torch.Tensor, target: torch.Tensor, ignored: torch.Tensor) -> torch.Tensor:
    return weight.gather(0, target.masked_select(~ignored)).sum()


register((OwnOperator("weight_of_targets(Tensor weight, Tensor target, Tensor ignored) -> Tensor",
                      _weight_of_targets, shape=lambda weight, *_: weight.new_empty(())),))


def _cross_entropy(x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None,
                   reduction: int = 1, ignore_index: int = -100, label_smoothing: float = 0.0
                   ) -> torch.Tensor:
    """The mean with weights and smoothing, as eager mode computes it: it adds up the weights of the targets
    that count, where a trace adds zeros for the others, in another order."""
    if weight is None or reduction != 1 or not label_smoothing or target.is_floating_point() \
            or weight.requires_grad:
        result: torch.Tensor = schema.composed(
            aten.cross_entropy_loss.default, x, target, weight, reduction, ignore_index, label_smoothing)
        return result
    dim = min(1, x.dim() - 1)
    log = x.log_softmax(dim)
    likely: torch.Tensor = aten.nll_loss_nd(log, target, weight, reduction, ignore_index)
    smooth = -(log * weight.view([-1 if k == dim else 1 for k in range(x.dim())])).sum(dim)
    ignored = target == ignore_index
    whole = torch.ops.rkmate.weight_of_targets(weight, target, ignored)
    mean: torch.Tensor = smooth.masked_fill_(ignored, 0.0).sum() / whole
    return mean * (label_smoothing / x.shape[dim]) + likely * (1 - label_smoothing)


def _covariance(x: torch.Tensor, *, correction: int = 1, fweights: torch.Tensor | None = None,
                aweights: torch.Tensor | None = None) -> torch.Tensor:
    """The covariance without weights, for which eager mode reads the number of rows from a tensor."""
    rows = x.view(1, -1) if x.dim() < 2 else x
    count = rows.shape[-1]
    if fweights is not None or aweights is not None or x.dim() > 2 or count <= correction:
        result: torch.Tensor = schema.composed(aten.cov.default, x, correction=correction,
                                               fweights=fweights, aweights=aweights)
        return result
    centred = rows - (rows.sum(-1) / count).unsqueeze(1)
    return (centred @ centred.t().conj() / (count - correction)).squeeze()


def _trilinear_cast(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, of_a: list[int], of_b: list[int],
                    of_c: list[int], added: list[int], unroll: int, dtype: torch.dtype) -> torch.Tensor:
    with torch.autocast(devices.of(a).autocast_kind, dtype, cache_enabled=False):
        result: torch.Tensor = aten._trilinear.default(a, b, c, of_a, of_b, of_c, added, unroll)
    return result


def _keep_factors(ctx: Any, inputs: Sequence[Any], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.dims = inputs[3:7]


def _trilinear_gradient(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """Compute torch's formulas, in the types of the inputs: the backward runs outside of the region."""
    (a, b, c), (of_a, of_b, of_c, added) = ctx.saved_tensors, ctx.dims
    given, product = ctx.needs_input_grad, aten._trilinear.default
    return (product(grad, b, c, added, of_b, of_c, of_a) if given[0] else None,
            product(a, grad, c, of_a, added, of_c, of_b) if given[1] else None,
            product(a, b, grad, of_a, of_b, added, of_c) if given[2] else None, *(None for _ in range(6)))


register((OwnOperator(
    "trilinear(Tensor a, Tensor b, Tensor c, int[] of_a, int[] of_b, int[] of_c, int[] added, "
    "int unroll, ScalarType dtype) -> Tensor", _trilinear_cast,
    shape=lambda *given: aten._trilinear.default(*given[:-1]),
    gradient=Gradient(_trilinear_gradient, _keep_factors)),))


def _trilinear(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, of_a: list[int], of_b: list[int],
               of_c: list[int], added: list[int], unroll_dim: int = 1) -> torch.Tensor:
    """The sums of a bilinear layer. Autocast does not cast its operands, but those of the products inside of
    its kernel."""
    kind = devices.of(a).autocast_kind
    given = (a, b, c, of_a, of_b, of_c, added, unroll_dim)
    if torch.is_autocast_enabled(kind):
        return torch.ops.rkmate.trilinear(*given, torch.get_autocast_dtype(kind))  # type: ignore[no-any-return]
    with schema.without_python_kernels():
        return aten._trilinear.default(*given)      # type: ignore[no-any-return]


WRITTEN_ANEW: dict[Any, Callable[..., Any]] = {aten.bernoulli.p: _bernoulli}
"""Operations that a trace makes of writes in place, with the layout of what was written to."""


_OWN: dict[Any, Callable[..., Any]] = {
    aten.prod.default: _prod_all, aten.prod.dim_int: _prod_dim, aten.cumprod.default: _cumprod,
    aten.dropout.default: _dropout, aten.cross_entropy_loss.default: _cross_entropy,
    aten.cov.default: _covariance, aten._trilinear.default: _trilinear}
_DECOMPOSED = ("softshrink", "hardshrink", "multi_margin_loss", "multilabel_margin_loss_forward",
               *(f"{exact}{kind}" for exact in ("upsample_", "_upsample_") for kind in (
                   "nearest1d", "nearest2d", "nearest3d", "nearest_exact1d", "nearest_exact2d",
                   "nearest_exact3d", "linear1d", "bilinear2d", "trilinear3d", "bicubic2d",
                   "bilinear2d_aa", "bicubic2d_aa", "lanczos2d_aa")))


def _decomposed() -> list[Any]:
    packets = [getattr(aten, name) for name in _DECOMPOSED if hasattr(aten, name)]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


@contextmanager
def as_eager_computes() -> Iterator[None]:
    """Trace eager mode's kernels while a module is captured. (Other threads that trace meanwhile see these
    kernels, too.)"""
    with python_kernels_replaced({**dict.fromkeys(_decomposed()), **_OWN}):
        yield


def integers_without_gradient(program: fx.GraphModule) -> None:
    """Let `randint_like` read a tensor without its gradient, as its Python function does."""
    drawn = [n for n in program.graph.nodes
             if getattr(n.target, "overloadpacket", None) is aten.randint_like]
    for node in drawn:
        with program.graph.inserting_before(node):
            node.update_arg(0, program.graph.call_function(aten.detach.default, (node.args[0],)))
    if drawn:
        program.recompile()


_POSITIONS: dict[Any, int | None] = {
    aten.argmax.default: None, aten.argmin.default: None, aten.max.dim: 0, aten.min.dim: 0,
    **dict.fromkeys((aten.topk.default, aten.sort.default, aten.sort.stable, aten.argsort.default,
                     aten.argsort.stable, aten.multinomial.default), -1)}
"""Operators that find positions along a dimension: which, if their argument `dim` does not say so. (None: in
the whole tensor.)"""
_SAME_POSITIONS = frozenset((
    aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.squeeze.default, aten.squeeze.dim,
    aten.unsqueeze.default, aten.select.int, aten.slice.Tensor, aten.transpose.int, aten.permute.default,
    aten.t.default, aten.expand.default, aten.clone.default, aten.contiguous.default, aten.detach.default,
    aten.alias.default, aten.chunk.default, aten.unbind.int, operator.getitem))


def _count_of_positions(node: Any) -> int:
    """Return the number of positions from which a tensor's values are; 0 for other values."""
    while isinstance(node, fx.Node) and node.target in _SAME_POSITIONS:
        of, *rest = node.args
        if isinstance(of, fx.Node) and of.target in _POSITIONS and node.target is operator.getitem \
                and rest != [1]:
            return 0                            # the values at these positions
        node = of
    if not isinstance(node, fx.Node) or node.target not in _POSITIONS:
        return 0
    source = node.args[0]
    assert isinstance(source, fx.Node)
    shape = source.meta[VALUE].shape
    given = schema.given_to(cast("Any", node.target), node.args, node.kwargs)
    dim: int | None = given.get("dim", _POSITIONS[node.target])
    return math.prod(shape) if dim is None or not shape else int(shape[dim])


def one_hot_of_positions(program: fx.GraphModule) -> None:
    """Compute `one_hot` of positions, which are in range, without its check."""
    for node in list(program.graph.nodes):
        if node.target is not aten.one_hot.default or not 0 < _count_of_positions(node.args[0]) <= (
                *node.args, 0)[1]:
            continue
        with program.graph.inserting_before(node):
            classes = program.graph.call_function(aten.arange.default, (node.args[1],), {
                "dtype": torch.int64, "device": node.meta[VALUE].device})
            column = program.graph.call_function(aten.unsqueeze.default, (node.args[0], -1))
            same = program.graph.call_function(aten.eq.Tensor, (column, classes))
            node.replace_all_uses_with(program.graph.call_function(
                aten.to.dtype, (same, torch.int64, False, False, torch.contiguous_format)))
        program.graph.erase_node(node)
        program.recompile()


def zeros_with_memory(graph: fx.Graph) -> None:
    """Let tangents that are zero be ordinary tensors: torch's have no memory, whose bytes can be counted."""
    for node in graph.nodes:
        if node.target is aten._efficientzerotensor.default:
            node.target = aten.zeros.default
            value = node.meta[VALUE]
            with value.fake_mode:
                node.meta[VALUE] = torch.zeros(value.shape, dtype=value.dtype, device=value.device)


def conjugates_of_numbers(graph: fx.Graph) -> None:
    """Replace the conjugate of a Python number, which a trace makes a view, by a number."""
    for node in graph.nodes:
        if node.target is aten._conj.default and not isinstance(node.args[0], fx.Node):
            number = complex(node.args[0]).conjugate()
            for user in list(node.users):
                user.args = tuple([number if a is node else a for a in user.args])
            graph.erase_node(node)


_CHECKS = {id(op): op for op in (aten._linalg_check_errors.default, aten._assert_async.default,
                                aten._assert_async.msg)}
"""Operators by id: torch computes an operator's hash in Python, and every operation of a trace is looked
up."""


class ChecksByValue(CaptureError):
    """An operation checks the values of its result."""

    stack = ""
    """The stack of the operation's call in the model's source, as text; empty where it is not known."""


@contextmanager
def checks_by_value_refused(model: nn.Module) -> Iterator[None]:
    """Raise `CaptureError` where an operation checks the values of its result while a module is captured.

    The check of a linear solver has no result, so a graph does not show that it was there (torch 2.11 and
    2.12), or has to keep it in order with other effects (from 2.13 on). `torch._assert_async` is an assertion
    without a result, as are the check of a distribution and `torch._assert` (from 2.15 on).
    """
    def look(func: Any, args: Any, kwargs: Any) -> None:
        if id(func) not in _CHECKS:
            return
        if func is aten._linalg_check_errors.default:
            error = ChecksByValue(f"{type(model).__name__} uses an operation that {CHECKS_BY_VALUE}")
            error.stack = "\n".join(torch.fx.traceback.format_stack())
            raise error
        raise ValueError("data-dependent check of values")

    with fake_operations_seen(look):
        yield


@contextmanager
def seeds_refused(model: nn.Module) -> Iterator[None]:
    """Raise `CaptureError` where a forward sets the state of a default generator (to draw the same numbers
    each time, say): it would do so while it is captured, and never again."""
    there, draws = devices.in_use(), dict[int, bool]()
    before = RandomState.of(*there)         # a trace does not draw from generators

    def refuse() -> None:
        raise CaptureError(
            f"{type(model).__name__} sets the state of a random generator in its forward (as "
            "torch.manual_seed does), which a plan would not repeat: draw these numbers once and keep them "
            "in a buffer, or draw them outside and pass the tensor")

    def check() -> None:
        if RandomState.of(*there) != before:
            refuse()

    def look(func: Any, args: Any, kwargs: Any) -> None:
        drawn = draws.get(id(func))
        if drawn is None:
            drawn = draws[id(func)] = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        if drawn:
            check()

    # To go back to a state changes none in a trace.
    with fake_operations_seen(look), setting_refused(refuse):
        yield
        check()


CHECKS_BY_VALUE = (
    "checks its result or has other effects (torch.linalg.lu_factor, eig and matrix_power do), which a plan "
    "cannot order: use the one without the check (torch.linalg.lu_factor_ex), or torch.linalg.inv, solve or "
    "cholesky")
"""Text of an error: the operation's effect, and what to use instead."""
