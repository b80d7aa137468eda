"""Branches: on Python values they are checked, on tensor values they are refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.compiler import is_compiling

import rkmate
from tests.semantics.steps import assert_same_gradients, planned


class OnFlag(nn.Linear):
    def forward(self, x: torch.Tensor, double: bool = False, times: int = 1) -> torch.Tensor:
        y = super().forward(x)
        for _ in range(times):
            y = torch.sin(y)
        return y * 2 if double else y


class OnCompilation(nn.Linear):
    """Takes a shorter way where it is compiled, as sources of libraries do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def scale() -> int:
            return 3 if torch.compiler.is_exporting() else 1
        return super().forward(x) * (5 if torch.compiler.is_compiling() or is_compiling() else scale())


def test_a_forward_that_asks_whether_it_is_compiled_gets_eager_modes_answer() -> None:
    model, x = nn.Sequential(OnCompilation(8, 8), nn.Tanh()), torch.randn(4, 8)
    assert_same_gradients(model, planned(model, x), lambda run: run(x).pow(2).sum())


def test_python_values_decide_per_call() -> None:
    model, x = OnFlag(8, 8), torch.randn(4, 8)
    module = planned(model, x)
    for options in ({"double": True}, {"times": 3}, {}, {"double": True, "times": 2}):
        assert_same_gradients(model, module, lambda run, o=options: run(x, **o).pow(2).sum())


class OnValue(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:                                    # the line that decides
            return super().forward(x)
        return super().forward(-x)


class OnItem(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * x.abs().max().item()   # the line that decides


class OnSelection(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[x[:, 0] > 0])             # the line that decides


@pytest.mark.parametrize("kind", [OnValue, OnItem, OnSelection])
def test_tensor_values_that_decide_are_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(rkmate.CaptureError) as caught:
        planned(kind(8, 8), torch.randn(4, 8))
    message = str(caught.value)
    assert kind.__name__ in message
    assert "rkmate.dtr" in message
    assert "test_control_flow.py" in message
    assert "the line that decides" in message


def test_a_line_in_a_folder_of_the_packages_name_is_named(tmp_path: Path) -> None:
    """As every file of an ordinary clone of this project is."""
    file = tmp_path / "rkmate" / "of_a_user.py"
    file.parent.mkdir()
    file.write_text("from torch import nn\n\n\nclass Theirs(nn.Linear):\n    def forward(self, x):\n"
                    "        return super().forward(x if x.sum() > 0 else -x)\n")
    spec = importlib.util.spec_from_file_location("of_a_user", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(rkmate.CaptureError, match=r"rkmate/of_a_user\.py:6"):
        planned(module.Theirs(8, 8), torch.randn(4, 8))


def test_attention_masks_of_a_library() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                     intermediate_size=32, vocab_size=50)
    model, i = transformers.BertForMaskedLM(config), torch.randint(0, 50, (2, 8))
    mask = torch.ones_like(i)
    mask[1, 5:] = 0
    module = planned(model, kwargs={"input_ids": i, "attention_mask": mask, "labels": i})
    for m in (mask, torch.ones_like(i)):
        assert_same_gradients(
            model, module, lambda run, m=m: run(input_ids=i, attention_mask=m, labels=i).loss)
