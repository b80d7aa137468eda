"""What an operation's cost is known by."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from rkmate.graph.capture.opaque import FORWARD
from rkmate.measure import remembered as known


def test_views_belong_to_what_reads_them() -> None:
    graph, aten = fx.Graph(), torch.ops.aten
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 4)
    turned = graph.call_function(aten.t.default, (x,))
    turned.meta["val"] = x.meta["val"].t()
    plain, again = (graph.call_function(aten.neg.default, (x,)) for _ in range(2))
    other = graph.call_function(aten.neg.default, (turned,))
    assert known.form_of(plain) == known.form_of(again) != known.form_of(other)


def test_an_opaque_module_is_known_by_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "kind_of", {"a": "one", "b": "one", "c": "other"}.__getitem__)
    graph = fx.Graph()
    a, b, c = (known.form_of(graph.call_function(FORWARD, (key,))) for key in "abc")
    assert a == b != c
