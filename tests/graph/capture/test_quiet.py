"""What is said while a model is captured: what torch says of a failed trace is its exception's, all else
is seen."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

import rkmate
from rkmate.graph.capture.capture import capture
from rkmate.torch_seam.trace import quiet


class _Doing(nn.Linear):
    """A layer whose forward does something beside."""

    def __init__(self, what: Callable[[], object]) -> None:
        super().__init__(4, 4)
        self.what = what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.what()
        return super().forward(x)


def _elsewhere(what: Callable[[], object]) -> None:
    thread = threading.Thread(target=what)
    thread.start()
    thread.join()


def test_what_another_thread_writes_meanwhile_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []

    def write() -> None:
        print("from elsewhere", file=sys.stderr)
        seen.append(capsys.readouterr().err)

    capture(_Doing(lambda: _elsewhere(write)), (torch.randn(2, 4),), {})
    assert seen and all("from elsewhere" in text for text in seen)


def test_what_the_model_writes_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    capture(_Doing(lambda: print("from the model", file=sys.stderr)), (torch.randn(2, 4),), {})
    assert "from the model" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor"])
def test_what_another_thread_logs_meanwhile_is_seen(name: str, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger(name)
    logger.addHandler(caplog.handler)
    try:
        with quiet():
            logger.error("a failure of this thread")
            _elsewhere(lambda: logger.error("a failure elsewhere"))
        logger.error("a failure afterwards")
    finally:
        logger.removeHandler(caplog.handler)
    messages = [r.getMessage() for r in caplog.records]
    assert "a failure of this thread" not in messages
    assert "a failure elsewhere" in messages and "a failure afterwards" in messages


class _Plain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)


class _Branches(nn.Linear):
    """The export fails."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else x


class _Reads(nn.Linear):
    """The export goes well, and the trace of the joint graph fails."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * x.sum().item()


@pytest.mark.parametrize("kind", [_Branches, _Reads])
def test_a_failed_trace_says_what_it_has_to_in_its_exception(kind: type[nn.Linear],
                                                             capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(rkmate.CaptureError, match="value of a tensor"):
        capture(kind(4, 4), (torch.randn(2, 4),), {})
    out, err = capfd.readouterr()
    assert not out and not err


def test_a_line_of_a_traced_graph_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    program = fx.symbolic_trace(_Plain())
    for said in (quiet(), contextlib.nullcontext()):
        with said, pytest.raises(TypeError):
            program("no tensor")
        err = capsys.readouterr().err
        assert bool(err) == isinstance(said, contextlib.nullcontext)
