"""Rules for the forms of results, against torch's own kernels on tensors without memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rkmate.graph.capture.form_rules import CERTAIN, LEARNED, TensorForm, broadcast
from rkmate.graph.capture.meta_kernels import form_of

aten = torch.ops.aten
META = torch.device("meta")


def some(draw: random.Random, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of this shape, whose dimensions stand in memory in one of several ways."""
    way = draw.randrange(5)
    if way == 0 and len(shape) > 1:
        order = list(range(len(shape)))
        draw.shuffle(order)
        return torch.empty([shape[d] for d in order], dtype=dtype, device=META).permute(
            [order.index(d) for d in range(len(shape))])
    if way == 1 and shape:
        return torch.empty((*shape[:-1], shape[-1] + 3), dtype=dtype, device=META)[..., 2:2 + shape[-1]]
    if way == 2 and shape:
        return torch.empty((1, *shape[1:]), dtype=dtype, device=META).expand(shape)
    return torch.empty(shape, dtype=dtype, device=META)


def shape_of(draw: random.Random, rank: int) -> tuple[int, ...]:
    return tuple(draw.choice((1, 2, 3, 4, 6)) for _ in range(rank))


def views(draw: random.Random) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Calls of what has a rule that holds as it stands."""
    shape = shape_of(draw, draw.randrange(1, 5))
    x = some(draw, shape)
    n = x.numel()
    size = draw.choice([[n], [-1], [1, n], [n, 1], [-1, shape[-1]], [*shape[:1], -1], [*shape, 1],
                        [1, *shape], [n + 1], [shape[0], n // shape[0]]])
    yield aten.view.default, (x, size)
    yield aten._unsafe_view.default, (x, size)
    yield aten.detach.default, (x,)
    rank = len(shape)
    yield aten.transpose.int, (x, draw.randrange(-rank - 1, rank + 1), draw.randrange(-rank, rank))
    yield aten.t.default, (x,)
    b, i, k, j = shape_of(draw, 4)
    yield aten.mm.default, (some(draw, (i, k)), some(draw, (k, j)))
    yield aten.mm.default, (some(draw, (i, k)), some(draw, (k + draw.randrange(2), j)))
    yield aten.bmm.default, (some(draw, (b, i, k)), some(draw, (b, k, j)))
    yield aten.addmm.default, (some(draw, draw.choice([(j,), (1,), (i, j)])), some(draw, (i, k)),
                               some(draw, (k, j)))


def others(draw: random.Random) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Calls of what has a rule that is learned."""
    shape = shape_of(draw, draw.randrange(1, 5))
    x = some(draw, shape)
    y = x if draw.randrange(2) else some(draw, shape)
    dim = draw.randrange(len(shape))
    yield aten._log_softmax.default, (x, dim, False), {}
    yield aten._softmax.default, (x, dim, False), {}
    yield aten._log_softmax_backward_data.default, (x, y, dim, torch.float32), {}
    yield aten._softmax_backward_data.default, (x, y, dim, torch.float32), {}
    yield aten.cumsum.default, (x, dim), {}
    if len(shape) > 1:
        yield aten.tril.default, (x,), {}
        yield aten.triu.default, (x, 1), {}
    yield aten.empty_like.default, (x,), {}
    yield aten.zeros_like.default, (x,), {"pin_memory": False}
    yield aten.ones_like.default, (x,), {"memory_format": torch.contiguous_format}
    yield aten.clone.default, (x,), {}
    yield aten.clone.default, (x,), {"memory_format": torch.contiguous_format}
    yield aten.sum.dim_IntList, (x, [dim]), {}
    yield aten.sum.dim_IntList, (x, sorted({0, dim - len(shape)}) if dim else [0], True), {}
    yield aten.mean.dim, (x, [-1], bool(draw.randrange(2))), {}
    last = list(shape[-draw.randrange(1, 3):])
    w, statistics = torch.empty(last, device=META), torch.empty(
        (*shape[:len(shape) - len(last)], *(1 for _ in last)), device=META)
    yield aten.native_layer_norm.default, (x, last, w, w, 1e-5), {}
    yield aten.native_layer_norm_backward.default, (y, x, last, statistics, statistics, w, w,
                                                    [True, True, True]), {}
    n, c = shape_of(draw, 2)
    scores, of = some(draw, (n, c)), some(draw, (n,), torch.int64)
    number = torch.empty((), device=META)
    for reduction in (0, 1, 2):
        yield aten.nll_loss_forward.default, (scores, of, None, reduction, -100), {}
        yield aten.nll_loss_backward.default, (number if reduction else torch.empty(n, device=META), scores,
                                               of, None, reduction, -100, number), {}
    rows = some(draw, shape, torch.int64)
    yield aten.embedding.default, (torch.empty(7, 5, device=META), rows), {}
    gradient = torch.empty((*shape, 5), device=META)
    yield aten.embedding_dense_backward.default, (gradient, rows, 7, -1, False), {}


def results_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[TensorForm] | None:
    """What torch says; None where it refuses."""
    try:
        found = op(*args, **kwargs)
    except (RuntimeError, IndexError, ValueError):
        return None
    return [form_of(t) for t in (found if isinstance(found, (tuple, list)) else (found,))]


def test_rules_that_hold_as_they_stand() -> None:
    draw, said = random.Random(0), dict.fromkeys(CERTAIN, 0)
    for _ in range(400):
        for op, args in views(draw):
            made = CERTAIN[id(op)](args, form_of)
            if made is not None:
                said[id(op)] += 1
                assert results_of(op, args, {}) == [made], (op, args)
    assert min(said.values()) > 50


def test_rules_that_are_learned() -> None:
    """They are the layouts of contiguous operands. Where operands lie otherwise, torch may say something
    else: then it does so for the whole kind of calls, and its calls are asked for one by one."""
    draw, said = random.Random(1), dict.fromkeys(LEARNED, 0)
    for _ in range(300):
        for op, args, kwargs in others(draw):
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            made = LEARNED[id(op)](args, kwargs, [form_of(t) for t in tensors], form_of)
            found = results_of(op, args, kwargs)
            if made is None or not all(t.is_contiguous() for t in tensors):
                continue
            assert found is not None, (op, args)
            said[id(op)] += 1
            assert [f[:2] for f in found] == made, (op, args)
    assert min([n for k, n in said.items() if k != id(aten._safe_softmax.default)]) > 20


@pytest.mark.parametrize("contiguous", [True, False])
def test_pointwise_operations(contiguous: bool) -> None:
    draw, said = random.Random(2), 0
    for _ in range(3000):
        shape = tuple(draw.choice((2, 3, 5)) for _ in range(draw.randrange(1, 4)))

        def operand(shape: tuple[int, ...] = shape) -> torch.Tensor:
            kept = tuple(n if draw.randrange(3) else 1 for n in shape[draw.randrange(len(shape)):])
            return torch.empty(kept, device=META) if contiguous else some(draw, kept)

        a, b = operand(), operand()
        made = broadcast([form_of(a), form_of(b)])
        if made is not None:
            said += 1
            assert [f[:2] for f in results_of(aten.add.Tensor, (a, b), {}) or ()] == made
    assert said > 100
