"""The table of passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rkmate.graph.capture.repairs import PATCHES, PROGRAM_REWRITES, TRACE_REWRITES, Rewrite
from rkmate.graph.passes.table import REWRITES
from rkmate.graph.passes.view_methods import view_method
from rkmate.pipeline.prepare import choices_of
from rkmate.pipeline.settings import Settings
from rkmate.pipeline.variants import VARIANTS
from tests.graph.passes.graphs import Made, aten


def test_names_tell_passes_apart() -> None:
    rows = (*PATCHES, *PROGRAM_REWRITES, *TRACE_REWRITES, *REWRITES)
    assert len({row.name for row in rows}) == len(rows)


def test_rows_ask_for_choices_that_a_variant_or_a_setting_makes() -> None:
    made = frozenset().union(*(
        choices_of(variant, Settings(gradients=gradients, compile=True))
        for variant in VARIANTS for gradients in ("returned", "in_place")))
    for row in REWRITES:
        assert made.issuperset((*row.when, *row.unless)), row.name


def test_a_row_applies_when_all_it_asks_for_is_chosen() -> None:
    row = Rewrite("a row", "a test", print, when=("a", "b"), unless=("c",))
    assert row.applies(frozenset("abd"))
    assert not row.applies(frozenset("a")) and not row.applies(frozenset("abc"))


@pytest.mark.parametrize(("target", "args", "method"), [
    (aten.view.default, ([12],), "reshape"), (aten.t.default, (), "t"), (aten.neg.default, (), None)])
def test_views_as_methods(target: Any, args: tuple[Any, ...], method: str | None) -> None:
    made = Made()
    node = made.call(target, made.source("input", 0, 3, 4), *args)
    assert view_method(node) == method
    if method is not None:
        x = torch.randn(3, 4)
        assert torch.equal(getattr(x, method)(*args), target(x, *args))
