"""Operations on a part of their result, and their gradients, tile by tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from rkmate.graph.passes.tiles.stretch import Port, Stretch, backward_of, forward_of, statistics_of
from rkmate.torch_seam.trace import operations_of

Made = tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _conv(size: int = 11, **options: Any) -> Made:
    return lambda x, w: F.conv2d(x, w, **options), (_x(2, 3, size, 7), _x(4, 3, 3, 3))


def _turned(**options: Any) -> Made:
    return lambda x, w: F.conv_transpose2d(x, w, **options), (_x(2, 3, 6, 5), _x(3, 4, 3, 3))


def _volume(images: int, **options: Any) -> Made:
    shapes = (images, 3, 9, 5, 4), (4, 3, 3, 2, 3), (4,)
    return lambda x, w, b: F.conv3d(x, w, b, **options), tuple(_x(*shape).float() for shape in shapes)


def _of(function: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> Made:
    return function, tuple(_x(*shape) for shape in shapes)


IMAGE, VOLUME, TOKENS = (2, 4, 8, 6), (2, 4, 8, 4, 4), (2, 6, 8)
CASES: dict[str, tuple[Made, int]] = {
    "convolution, images": (_conv(padding=1), 0),
    "convolution, bands": (_conv(padding=1), 2),
    "convolution, strides": (_conv(padding=1, stride=2), 2),
    "convolution, far apart": (_conv(padding=3, dilation=2), 2),
    "convolution of volumes": (_of(lambda x, w: F.conv3d(x, w, padding=1), VOLUME, (2, 4, 3, 3, 3)), 2),
    "layers of a volume": (_volume(1, padding=(1, 0, 1)), 2),
    "layers, strides": (_volume(1, padding=(3, 0, 1), stride=2, dilation=(2, 1, 1)), 2),
    "layers of one of several volumes": (_volume(3, padding=(1, 0, 1)), 0),
    "transposed": (_turned(stride=2), 2),
    "transposed, padding": (_turned(stride=2, padding=1, output_padding=1), 2),
    "transposed, strides of one": (_turned(padding=1), 2),
    "transposed, windows apart": (_of(lambda x, w: F.conv_transpose2d(x, w, stride=(3, 1), output_padding=(
        1, 0)), (2, 3, 6, 5), (3, 4, 1, 3)), 2),
    "max pool": (_of(lambda x: F.max_pool2d(x, 2), IMAGE), 2),
    "max pool, overlap": (_of(lambda x: F.max_pool2d(x, 3, 2, 1), IMAGE), 2),
    "max pool, ceil": (_of(lambda x: F.max_pool2d(x[..., 1:, 1:], 2, ceil_mode=True), IMAGE), 2),
    "max pool of volumes": (_of(lambda x: F.max_pool3d(x, 2), VOLUME), 2),
    "average pool": (_of(lambda x: F.avg_pool2d(x, 2), IMAGE), 2),
    "nearest": (_of(lambda x: F.interpolate(x, scale_factor=2.0), IMAGE), 2),
    "bilinear": (_of(lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), IMAGE), 2),
    "pixel shuffle": (_of(lambda x: F.pixel_shuffle(x, 2), IMAGE), 2),
    "pixel unshuffle": (_of(lambda x: F.pixel_unshuffle(x, 2), IMAGE), 2),
    "padding": (_of(lambda x: F.pad(x, (1, 0, 1, 2, 0, 1), value=2.0), IMAGE), 2),
    "cropped": (_of(lambda x: F.pad(x, (0, 0, -2, -1)), IMAGE), 2),
    "slopes": (_of(lambda x, w: F.prelu(F.hardswish(x), w), IMAGE, (4,)), 2),
    "gates": (_of(lambda x: F.glu(x, 1), IMAGE), 2),
    "pointwise": (_of(lambda x, y: F.gelu(x) * y + 1, IMAGE, (4, 1, 6)), 2),
    "layer norm": (_of(lambda x, w: F.layer_norm(x, (8,), w), TOKENS, (8,)), 1),
    "group norm": (_of(lambda x, w: F.group_norm(x, 2, w), IMAGE, (4,)), 0),
    "instance norm": (_of(lambda x: F.instance_norm(x), IMAGE), 0),
    "instance norms of bands": (_of(lambda x, v, w: F.instance_norm(F.conv2d(F.instance_norm(
        x) * w, v, padding=1)), IMAGE, (4, 4, 3, 3), (4, 1, 1)), 2),
    "group norms of bands": (_of(lambda x, v, w: F.group_norm(F.conv2d(F.relu(F.group_norm(
        x, 2, w, w)), v, padding=1), 4), IMAGE, (4, 4, 3, 3), (4,)), 2),
    "trained batch norms": (_of(lambda x, v, w: F.batch_norm(F.conv2d(x.tanh(), v), None, None, w, w, True) \
        + F.batch_norm(x, None, None, w, training=True), IMAGE, (4, 4, 1, 1), (4,)), 0),
    "trained batch norms of bands": (_of(lambda x, w: F.batch_norm(
        F.max_pool2d(x, 2), None, None, w, training=True), IMAGE, (4,)), 2),
    "attention": (_of(F.scaled_dot_product_attention, *[(2, 2, 6, 4)] * 3), 2),
    "causal attention": (_of(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
                             *[(2, 2, 6, 4)] * 3), 2),
    "product": (_of(torch.addmm, (5,), (6, 8), (8, 5)), 0),
    "heads": (_of(lambda x: x.view(2, 6, 2, 4).transpose(1, 2).contiguous(), TOKENS), 2),
    "softmax": (_of(lambda x: x.softmax(-1).mean(-1, keepdim=True), TOKENS), 1),
    "concatenation": (_of(lambda x, y: torch.cat([x, y], -1)[..., 3:9], TOKENS, TOKENS), 1),
    "parts": (_of(lambda x: x.chunk(2, -1)[1] * x.unbind(1)[0].unsqueeze(1)[..., :4], TOKENS), 0),
}


SUMS: dict[str, tuple[Made, int]] = {
    "contracted": (_of(lambda x, v, b, w: torch.addmm(b, (x.view(12, 8) @ v).relu(), w), TOKENS, (8, 6), (5,),
                       (6, 5)), 1),
    "columns of one value": (_of(lambda x, v, w: (x.view(12, 8) @ v) * (x.view(12, 8) @ v.sin()) @ w, TOKENS,
                                 (8, 6), (6, 5)), 1),
    "mean": (_of(lambda x: F.gelu(x).mean(), IMAGE), 2),
}
"""Cases whose result is a sum over the dimension that is cut."""


OVER = {"slopes", "pointwise", "layer norm", "group norm", "instance norm", "instance norms of bands",
        "group norms of bands", "trained batch norms", "attention", "causal attention"}
"""Cases whose first gradient may take the memory of the result's."""


def _stretch(function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], dim: int, *,
             summed: bool) -> Stretch:
    mode = FakeTensorMode()
    graph = operations_of(function, [mode.from_tensor(x) for x in inputs])
    ports = {n: Port(n, n, True) for n in graph.nodes if n.op == "placeholder"}
    result: Any = graph.output_node().args[0]
    dims, sums = ({}, {result: dim}) if summed else ({result: dim}, {})
    return Stretch("parts", graph, dims, sums, ports, results=[result])


IN_TWO = ("convolution, strides", "transposed, padding", "max pool, overlap", "group norms of bands",
          "trained batch norms of bands", "causal attention", "contracted")
"""Cases that are also cut into two parts: of three, the middle one has a neighbour on each side."""


@pytest.mark.parametrize(("name", "parts"), [*((name, 3) for name in CASES | SUMS),
                                             *((name, 2) for name in IN_TWO)])
def test_tiles_compute_what_the_whole_does(name: str, parts: int) -> None:
    torch.manual_seed(0)
    (function, inputs), dim = (CASES | SUMS)[name]
    stretch = _stretch(function, inputs, dim, summed=name in SUMS)
    parts = min(parts, stretch.most_parts())
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = function(*leaves)
    entering = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, leaves, entering)
    by_port = dict(zip(stretch.ports, inputs, strict=True))
    norms = stretch.norms(stretch.results)
    if norms:
        counted = statistics_of(stretch, norms, "statistics", parts)
        assert counted is not None
        tiled, keys = counted
        values = iter(tiled(*(by_port[of] for of, _ in keys)))
        for norm in norms:
            next(values), next(values)
            by_port |= {port.of: next(values) for port in stretch.statistics(norm)}

    forward = forward_of(stretch, stretch.results, "forward", parts)
    assert forward is not None
    tiled, keys = forward
    assert tiled.parts == parts > 1
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if inputs[0].dtype == torch.float32 else {}
    torch.testing.assert_close(tiled(*(by_port[of] for of, _ in keys))[0], expected.detach(), **tolerance)

    backward = backward_of(stretch, {r: r for r in stretch.results},
                           [([p], p.of) for p in stretch.ports.values()], "backward", parts)
    assert backward is not None
    tiled, keys = backward
    given = [*(by_port[of] for of, _ in keys), entering]
    found = tiled(*given)[:len(gradients)]
    for mine, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)
    assert (tiled.over == len(keys)) == (name in OVER)
    if tiled.over is not None:
        first, *others = tiled(*given, over=given[tiled.over])
        assert first.data_ptr() == given[tiled.over].data_ptr()
        for mine, theirs in zip((first, *others), found, strict=False):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_a_result_that_other_tiles_need_as_well_has_its_gradient_once() -> None:
    def function(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.conv2d(x, v, padding=1)
        return y, F.conv2d(y, w, padding=1)

    inputs = _x(2, 3, 8, 6), _x(3, 3, 3, 3), _x(3, 3, 3, 3)
    mode = FakeTensorMode()
    graph = operations_of(function, [mode.from_tensor(x) for x in inputs])
    ports = {n: Port(n, n, True) for n in graph.nodes if n.op == "placeholder"}
    results: Any = graph.output_node().args[0]
    stretch = Stretch("parts", graph, dict.fromkeys(results, 2), {}, ports, results=list(results))
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = function(*leaves)
    entering = [torch.randn_like(value) for value in expected]
    backward = backward_of(stretch, {r: r for r in stretch.results}, [([p], p.of) for p in ports.values()],
                           "backward", 2)
    assert backward is not None
    tiled, keys = backward
    given = dict(zip(ports, inputs, strict=True))
    found = tiled(*(given[of] for of, _ in keys), *entering)
    for mine, theirs in zip(found, torch.autograd.grad(expected, leaves, entering), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(("function", "shape", "dim"), [
    (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=True), IMAGE, 2),
    (lambda x: F.pad(x, (0, 0, 1, 1), mode="replicate"), IMAGE, 2),
    (lambda x: x.softmax(1), TOKENS, 1),
    (lambda x: F.group_norm(x.half(), 2), IMAGE, 2),
    (lambda x: F.dropout(x, 0.5), IMAGE, 0)],
    ids=["aligned corners", "padding", "softmax", "statistics in half precision", "dropout"])
def test_what_mixes_elements_is_not_cut(function: Callable[..., torch.Tensor], shape: tuple[int, ...],
                                        dim: int) -> None:
    stretch = _stretch(function, (_x(*shape),), dim, summed=False)
    assert forward_of(stretch, stretch.results, "forward", 2) is None
