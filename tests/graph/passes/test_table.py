"""The table of passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import rkmate
from rkmate.graph.capture.repairs import PHASES, SEEN, Pass
from rkmate.graph.passes.table import PASSES
from rkmate.graph.passes.view_methods import view_method
from tests.graph.passes.graphs import Made, aten

PACKAGE = Path(rkmate.__file__).parent


def test_names_tell_passes_apart() -> None:
    assert len({p.name for p in PASSES}) == len(PASSES)


def test_phases_stand_in_the_order_of_the_stages() -> None:
    order = list(PHASES)
    found = [order.index(p.phase) for p in PASSES]
    assert found == sorted(found)
    assert set(found) == set(range(len(order)))


@pytest.mark.parametrize("each", PASSES, ids=lambda p: p.name)
def test_a_row(each: Pass) -> None:
    assert (PACKAGE / each.place).is_file()
    assert not each.torch_versions or set(SEEN) <= set(each.torch_versions)
    assert list(each.torch_versions) == sorted(each.torch_versions)


def test_a_row_is_a_value() -> None:
    with pytest.raises(AttributeError):
        PASSES[0].name = "another"  # type: ignore[misc]


@pytest.mark.parametrize(("target", "args", "method"), [
    (aten.view.default, ([12],), "reshape"), (aten.t.default, (), "t"), (aten.neg.default, (), None)])
def test_views_as_methods(target: Any, args: tuple[Any, ...], method: str | None) -> None:
    made = Made()
    node = made.call(target, made.source("input", 0, 3, 4), *args)
    assert view_method(node) == method
    if method is not None:
        x = torch.randn(3, 4)
        assert torch.equal(getattr(x, method)(*args), target(x, *args))
