"""What holds between two passes; an error names the pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from rkmate.errors import GraphError
from rkmate.graph.capture.capture import capture
from rkmate.graph.capture.captured import Source
from rkmate.graph.capture.repairs import Rewrite
from rkmate.graph.passes import table
from rkmate.graph.passes.joint import Joint
from rkmate.graph.passes.table import rewrite, simplify
from rkmate.graph.passes.verify import verify
from tests.graph.passes.graphs import Made, aten


def _work() -> Joint:
    made = Made()
    x, w = made.source("input", 0, 3), made.source("param", "w", 3)
    grad = made.source("tangent", 0, 3)
    y = made.call(aten.exp.default, made.call(aten.mul.Tensor, x, w))
    of_y = made.call(aten.mul.Tensor, grad, y, backward=True)
    return made.work([y], [(w, made.call(aten.mul.Tensor, of_y, x, backward=True)),
                           (x, made.call(aten.mul.Tensor, of_y, w, backward=True))])


def _node(work: Joint, place: int) -> fx.Node:
    return [n for n in work.graph.nodes if n.op == "call_function"][place]


def test_a_graph_in_order() -> None:
    joint = _work()
    assert verify(joint) is joint


def _order(work: Joint) -> None:
    _node(work, 0).prepend(_node(work, 1))


def _phase(work: Joint) -> None:
    work.outputs = (_node(work, 2),)
    _node(work, 2).meta["partitioner_tag"] = "is_forward"


def _source(work: Joint) -> None:
    del work.sources[next(iter(work.sources))]


def _stranger(work: Joint) -> None:
    work.outputs = (fx.Graph().placeholder("stranger"),)


def _constant(work: Joint) -> None:
    work.constant = frozenset([_node(work, 2)])


def _gradient(work: Joint) -> None:
    work.grads[0][1].meta["val"] = torch.empty(4)


def _no_source(work: Joint) -> None:
    work.grads = ((Source("param", "v"), work.grads[0][1]), *work.grads[1:])


def _value(work: Joint) -> None:
    del _node(work, 0).meta["val"]


@pytest.mark.parametrize(("fault", "message"), [
    (_order, "does not stand before it"), (_phase, "of the forward reads"), (_source, "has no source"),
    (_stranger, "no node of the graph"), (_constant, "no constant"), (_gradient, "another form"),
    (_no_source, "does not have"), (_value, "no value")])
def test_a_fault_is_found_and_its_pass_named(fault: Callable[[Joint], None], message: str) -> None:
    work = _work()
    with pytest.raises(GraphError, match=f"after the pass 'faulty': .*{message}"):
        rewrite(work, [Rewrite("faulty", "a test", fault)], verify=True)
    unseen = _work()
    rewrite(unseen, [Rewrite("faulty", "a test", fault)])


def test_dead_code_is_a_fault() -> None:
    work = _work()
    with work.graph.inserting_after(_node(work, 0)):
        dead = work.graph.call_function(aten.neg.default, (_node(work, 0),))
    dead.meta = dict(_node(work, 0).meta)
    with pytest.raises(GraphError, match="nobody reads neg"):
        verify(work)


def _wider(work: Joint) -> None:
    """An operation reads a value of another shape, which its own value does not tell."""
    w, product = next(n for n, s in work.sources.items() if s.kind == "param"), _node(work, 0)
    with work.graph.inserting_before(product):
        wide = work.graph.call_function(aten.unsqueeze.default, (w, 0))
    wide.meta = {"val": w.meta["val"].unsqueeze(0)}
    product.replace_input_with(w, wide)


def _output(work: Joint) -> None:
    y = _node(work, 1)
    with work.graph.inserting_after(y):
        wide = work.graph.call_function(aten.unsqueeze.default, (y, 0))
    wide.meta = {"val": y.meta["val"].unsqueeze(0)}
    work.outputs = (wide,)


def _form(work: Joint) -> None:
    _node(work, 0).meta["val"] = torch.empty(1, 3)


@pytest.mark.parametrize(("fault", "message"), [
    (_wider, "mul.* reads unsqueeze.* of the form"), (_output, "an output has"),
    (_form, "mul.* has another form")])
def test_forms_stay(fault: Callable[[Joint], None], message: str) -> None:
    with pytest.raises(GraphError, match=f"after the pass 'faulty': {message}"):
        rewrite(_work(), [Rewrite("faulty", "a test", fault)], verify=True)


def test_all_tests_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    """`simplify` verifies where its caller does not say; a caller may say no."""
    assert table.VERIFY
    model = nn.Linear(2, 2)
    captured = capture(model, (torch.randn(3, 2),), {})
    monkeypatch.setattr(table, "REWRITES", [Rewrite("faulty", "a test", _source)])
    with pytest.raises(GraphError, match="faulty"):
        simplify(captured, (True,))
    simplify(captured, (True,), verify=False)
