"""What a library's first forward sets, and later ones find set."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.semantics.steps import assert_same_gradients, planned


@pytest.mark.parametrize("library", [True, False], ids=["of transformers", "of another class"])
def test_a_configuration_that_a_library_completes_takes_no_second_trace(
        monkeypatch: pytest.MonkeyPatch, library: bool) -> None:
    kind = pytest.importorskip("transformers").PretrainedConfig if library else SimpleNamespace
    exports: list[int] = []
    export = torch.export.export

    def counted(*args: Any, **kwargs: Any) -> Any:
        exports.append(1)
        return export(*args, **kwargs)

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config, self.head = kind(problem_type=None), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.config.problem_type is None:
                self.config.problem_type = "regression"
            return self.head(x).square() if self.config.problem_type == "regression" else self.head(x)

    monkeypatch.setattr(torch.export, "export", counted)
    model, x = Classifier(), torch.randn(4, 8)
    module = planned(model, x)
    assert len(exports) == (1 if library else 2)
    assert model.config.problem_type == "regression"
    assert_same_gradients(model, module, lambda run: run(x).sum())
