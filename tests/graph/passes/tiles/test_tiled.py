"""A tiled computation: what it says of itself, and that any number of parts computes the same."""

from __future__ import annotations

import functools

import pytest
import torch

from rkmate.graph.passes.tiles.region import Region, grow
from rkmate.graph.passes.tiles.rewrite import build, default_parts
from rkmate.graph.passes.tiles.tiled import Tiled
from rkmate.measure.step import measure_peak
from rkmate.measure.temporaries import temporary_bytes
from tests.graph.passes.graphs import Made, aten

ROWS, WIDTH, CLASSES = 30, 4, 64


@functools.cache
def _entropy() -> tuple[Tiled, Region]:
    """Per row the log of the sum of exponentials; of its sum, the gradients of x (as [5, 6, WIDTH]) and of
    the weight."""
    made = Made()
    x = made.source("input", 0, 5, 6, WIDTH, dtype=torch.float64)
    w = made.source("param", "w", WIDTH, CLASSES, dtype=torch.float64)
    flat = made.call(aten.view.default, x, [ROWS, WIDTH])
    logits = made.call(aten.view.default, made.call(aten.mm.default, flat, w), [5, 6, CLASSES])
    lse = made.call(aten.logsumexp.default, logits, [-1])
    shifted = made.call(aten.sub.Tensor, logits, made.call(aten.unsqueeze.default, lse, -1))
    grad = made.call(aten.view.default, made.call(aten.exp.default, shifted), [ROWS, CLASSES])
    dx = made.call(aten.mm.default, grad, made.call(aten.t.default, w))
    dw = made.call(aten.mm.default, made.call(aten.t.default, grad), flat)
    db = made.call(aten.sum.dim_IntList, grad, [0])
    seed = next(n for n in made.graph.nodes if n.target is aten.mm.default)
    region = grow(seed)
    # What reads narrow values is outside; what stands between is not.
    for node in made.graph.nodes:
        if node.op == "call_function" and node not in region.forms and node.target is aten.unsqueeze.default:
            assert region.fit(node)
    built = build(region, set(region.forms), [lse, dx, dw, db], "entropy", 4)
    assert built is not None and [a.name for a in built[1]][:2] == [flat.name, w.name]
    return built[0], region


def _arguments() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator)
    w = torch.randn(WIDTH, CLASSES, dtype=torch.float64, generator=generator)
    return x, w, w.t()


def _expected() -> list[torch.Tensor]:
    x, w, _ = _arguments()
    p = torch.softmax(x @ w, 1)
    return [torch.logsumexp(x @ w, 1).view(5, 6), p @ w.t(), p.t() @ x, p.sum(0)]


@pytest.mark.parametrize("parts", [1, 2, 4, 7, 30])
def test_parts_make_the_whole(parts: int) -> None:
    tiled = _entropy()[0].with_parts(parts)
    assert tiled.parts == parts
    for mine, theirs in zip(tiled(*_arguments()), _expected(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_equal_texts_are_equal() -> None:
    tiled, _ = _entropy()
    other = tiled.with_parts(7)
    assert other != tiled and other.with_parts(4) == tiled and hash(other.with_parts(4)) == hash(tiled)
    assert tiled.function("another").startswith("def another(all_x, w, w_1):")


def test_more_parts_take_less() -> None:
    tiled, _ = _entropy()
    one, many = (tiled.with_parts(k).tile_bytes(lambda n: temporary_bytes(n, random=False)) for k in (1, 10))
    assert one > ROWS * CLASSES * 8 > 4 * many


@pytest.mark.parametrize("parts", [1, 5])
def test_it_takes_what_it_says(parts: int) -> None:
    tiled = _entropy()[0].with_parts(parts)
    arguments = _arguments()
    measured = measure_peak(lambda: tiled(*arguments)).peak
    results = sum(v.nbytes for v in tiled.values())
    said = results + tiled.tile_bytes(lambda n: temporary_bytes(n, random=False))
    assert 0.7 * said < measured <= said


def test_sums_start_from_an_argument() -> None:
    tiled = _entropy()[0].with_into([2, 3])
    first = [torch.full((CLASSES, WIDTH), 2.0, dtype=torch.float64), torch.ones(CLASSES, dtype=torch.float64)]
    given = [t.clone() for t in first]
    found = tiled(*_arguments(), *given)
    for mine, start, theirs in zip(found[2:], first, _expected()[2:], strict=True):
        torch.testing.assert_close(mine, start + theirs)
    assert all(mine is start for mine, start in zip(found[2:], given, strict=True))


def test_what_has_rows_has_no_first_value() -> None:
    with pytest.raises(ValueError, match="no first value"):
        _entropy()[0].with_into([0])


def test_the_default_number_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rkmate.device.cpu.PART_BYTES", 2**12)
    wide = Region(rows=1024, width=64)
    assert [default_parts(r, torch.empty(0)) for r in (_entropy()[1], wide, Region(128, 64))] == [1, 32, 4]
    monkeypatch.setattr("rkmate.device.cpu.PART_BYTES", 2**17)
    assert default_parts(wide, torch.empty(0)) == 2
