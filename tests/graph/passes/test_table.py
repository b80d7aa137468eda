"""The table of passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rkmate.graph.capture.repairs import PATCHES, PROGRAM_REWRITES, TRACE_REWRITES
from rkmate.graph.passes.table import REWRITES
from rkmate.graph.passes.view_methods import view_method
from tests.graph.passes.graphs import Made, aten


def test_names_tell_passes_apart() -> None:
    rows = (*PATCHES, *PROGRAM_REWRITES, *TRACE_REWRITES, *REWRITES)
    assert len({row.name for row in rows}) == len(rows)


@pytest.mark.parametrize(("target", "args", "method"), [
    (aten.view.default, ([12],), "reshape"), (aten.t.default, (), "t"), (aten.neg.default, (), None)])
def test_views_as_methods(target: Any, args: tuple[Any, ...], method: str | None) -> None:
    made = Made()
    node = made.call(target, made.source("input", 0, 3, 4), *args)
    assert view_method(node) == method
    if method is not None:
        x = torch.randn(3, 4)
        assert torch.equal(getattr(x, method)(*args), target(x, *args))
