"""The joint graph as a value: its copy."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import fx

from rkmate.graph.capture.captured import Source
from rkmate.graph.passes.joint import Deferred, Joint
from rkmate.graph.passes.verify import verify
from tests.graph.passes.graphs import Made, aten


def _joint() -> Joint:
    made = Made()
    x, w, b = made.source("input", 0, 3), made.source("param", "w", 3), made.source("buffer", "b", 3)
    grad = made.source("tangent", 0, 3)
    mask = made.call(aten.neg.default, b)
    y = made.call(aten.mul.Tensor, made.call(aten.mul.Tensor, x, w), mask)
    work = made.work([y, None], [(w, made.call(aten.mul.Tensor, grad, x, backward=True))], [(b, mask)],
                     wanted=(True, False), compiled=True)
    later = fx.Graph()
    kept = later.placeholder("kept")
    work.deferred = (Deferred(1, later, {kept: Source("kept", "kept")}, {kept: y}, kept, {kept: y}),)
    work.constant, work.decisions = frozenset([b, mask]), frozenset([y])
    work.counters, work.concerned, work.nodes_before = ((Source("buffer", "n"), 1),), {"compiled": ("w",)}, 9
    return work


def _as_text(value: Any) -> Any:
    """A field's value by the names of nodes."""
    if isinstance(value, fx.Graph):
        return str(value)
    if isinstance(value, Deferred):
        return [_as_text(getattr(value, f.name)) for f in fields(value)]
    if isinstance(value, dict):
        return [(str(k), _as_text(v)) for k, v in value.items()]
    return sorted(map(str, value)) if isinstance(value, frozenset) else \
        [_as_text(v) for v in value] if isinstance(value, tuple) else str(value)


def test_a_copy_has_all_fields_and_shares_no_node() -> None:
    joint = _joint()
    assert all(getattr(joint, f.name) for f in fields(joint))          # else this test shows nothing
    copy = verify(joint.copy())
    for field in fields(Joint):
        assert _as_text(getattr(copy, field.name)) == _as_text(getattr(joint, field.name)), field.name
    nodes = set(joint.graph.nodes)
    assert nodes.isdisjoint(copy.graph.nodes)
    assert nodes.isdisjoint((*copy.sources, *copy.results(), *copy.constant, *copy.decisions, *copy.kept))
    y = copy.outputs[0]
    assert y is not None
    copy.replace(y, next(iter(copy.graph.nodes)))
    assert y not in copy.kept and joint.outputs[0] in joint.kept
