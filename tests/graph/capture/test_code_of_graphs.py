"""The Python of traced graphs: written when a graph is called, and not for each change of it."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import fx, nn

from rkmate.graph.capture import capture as capturing
from rkmate.graph.capture.capture import capture


def captured(monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[str]]:
    """How many times the Python of a graph is written in a capture, and the operations of its graph."""
    written: list[fx.Graph] = []
    write = fx.Graph.python_code

    def noted(graph: fx.Graph, *of: object, **how: object) -> object:
        written.append(graph)
        return write(graph, *of, **how)  # type: ignore[arg-type]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with monkeypatch.context() as here:
        here.setattr(fx.Graph, "python_code", noted)
        found = capture(model, (torch.randn(3, 4),), {})
    return len(written), [f"{n.name} {n.target} {n.args}" for n in found.graph.nodes]


def test_a_capture_writes_less_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    few, graph = captured(monkeypatch)
    monkeypatch.setattr(capturing, "graphs_without_code", contextlib.nullcontext)
    many, same = captured(monkeypatch)
    assert few < many and graph == same
