"""Views that only undo or repeat other views."""

from __future__ import annotations

from torch import fx

from tests.graph.passes.graphs import Made, aten, run, targets


def _value(made: Made, *shape: int) -> fx.Node:
    return made.call(aten.relu.default, made.source("input", 0, *shape))


def test_transposed_twice_is_the_value_itself() -> None:
    made = Made()
    x = _value(made, 3, 4)
    turned = made.call(aten.t.default, made.call(aten.t.default, x))
    y = made.call(aten.exp.default, turned)
    assert targets(run("chains of views", made.work([y]))) == [aten.relu.default, aten.exp.default]
    assert y.args == (x,)


def test_the_first_of_two_reshapes_goes() -> None:
    made = Made()
    x = _value(made, 3, 4)
    last = made.call(aten.view.default, made.call(aten.view.default, x, [12]), [2, 6])
    y = made.call(aten.exp.default, last)
    run("chains of views", made.work([y]))
    assert last.args == (x, [2, 6])
    assert y.args == (last,)


def test_what_becomes_an_earlier_value_again() -> None:
    made = Made()
    x = _value(made, 3, 4)
    row = made.call(aten.unsqueeze.default, x, 0)
    again = made.call(aten.squeeze.dim, row, 0)
    y, z = made.call(aten.exp.default, again), made.call(aten.exp.default, row)
    run("chains of views", made.work([y, z]))
    assert y.args == (x,) and z.args == (row,)


def test_an_output_stays_the_view_that_it_is() -> None:
    made = Made()
    x = _value(made, 3, 4)
    turned = made.call(aten.t.default, made.call(aten.t.default, x))
    work = run("chains of views", made.work([x, turned]))
    assert work.outputs == (x, turned)
    assert targets(work).count(aten.t.default) == 2


def test_a_chain_that_only_some_strides_have_stays() -> None:
    """It comes back to where it began, but from a value in rows it would not."""
    made = Made()
    columns = made.source("param", "w", 8, 6)
    columns.meta["val"] = columns.meta["val"].t()
    rows = made.call(aten.t.default, columns)
    parts = made.call(aten.unsqueeze.default, made.call(aten.view.default, rows, [16, 3]), 0)
    apart = made.call(aten.view.default, parts, [8, 2, 3])
    again = made.call(aten.view.default, made.call(aten.permute.default, apart, [1, 2, 0]), [6, 8])
    assert again.meta["val"].stride() == columns.meta["val"].stride()
    y = made.call(aten.exp.default, again)
    work = made.work([y])
    before = targets(work)
    assert targets(run("chains of views", work)) == before
    assert y.args == (again,)
