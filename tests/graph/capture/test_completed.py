"""What a first forward sets or makes, and later ones find."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
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


class Sets(nn.Linear):
    """Sets plain attributes in its first call alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "rows"):
            self.rows, self.shape, self.scale, self.cache = len(x), x.shape, 0.5, {}
            self.text, self.flag, self.none, self.kind, self.act = "slow", True, None, x.dtype, torch.tanh
            self.__dict__.setdefault("gain", 3.0)
        return self.act(super().forward(x) * self.scale * self.gain / self.rows)


class Makes(nn.Linear):
    """Makes what each call changes, and what each call reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "means"):
            self.means, self.calls, self.table = [], 0, torch.arange(4.0)
        y = super().forward(x) + self.table
        self.means.append(y.detach().mean())
        self.calls += 1
        return y


def _left(model: nn.Module) -> dict[str, Any]:
    return {k: [*map(float, v)] if k in ("means", "table") else v
            for k, v in vars(model).items() if not k.startswith("_")}


@pytest.mark.parametrize(("make", "rows"), [(Sets, (8, 8, 4, 6, 5, 8)), (Makes, (8, 8, 8))])
def test_attributes_of_a_first_call_are_what_they_are_without_a_plan(
        make: Callable[..., nn.Module], rows: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = make(4, 4)
    plain = copy.deepcopy(model)
    module = planned(model, torch.ones(8, 4), on_new_shape="error" if make is Makes else "plan")
    for n in rows:
        x = torch.randn(n, 4)
        results = [run(x) for run in (plain, module)]
        assert torch.equal(*results)
        results[1].sum().backward()
        assert _left(model) == _left(plain)
    assert len(module._plans) == len({*rows})


@pytest.mark.parametrize("make", [Sets, Makes])
def test_what_plans_alone_or_fails_sets_nothing(make: Callable[..., nn.Module]) -> None:
    model, x, settings = make(4, 4), torch.ones(8, 4), rkmate.Settings(costs="analytic")
    before = _left(model)
    rkmate.plan(model, (x,), budget=1.0, settings=settings, progress=False)
    assert _left(model) == before
    with pytest.raises(rkmate.InfeasibleBudget):
        rkmate.wrap(model, (x,), budget=1, settings=settings, progress=False)
    assert _left(model) == before
    rkmate.apply(model, budget=1, settings=settings, progress=False)
    with pytest.raises(rkmate.InfeasibleBudget):
        model(x)
    assert _left(rkmate.remove(model)) == before
    assert planned(model, x) is not None and _left(model) != before


def test_a_first_call_that_adds_hooks_sets_nothing() -> None:
    class Hooks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "hooked"):
                self.hooked = self.register_forward_hook(lambda *of: of[2] * 2) is not None
            return super().forward(x)

    model = nn.Sequential(Hooks(4, 4), nn.Tanh())
    with pytest.raises(rkmate.CaptureError):
        planned(model, torch.ones(2, 4))
    assert not hasattr(model[0], "hooked") and not model[0]._forward_hooks


def test_a_first_forward_leaves_buffers_that_wait_for_a_backward_as_they_were() -> None:
    """The norm of a sharded model is called before the rest of its forward is planned, in the same step."""
    norm, x = nn.BatchNorm1d(8), torch.randn(4, 8)
    waits = norm(x).square().sum()
    planned(nn.Sequential(norm, Makes(8, 4)), x)
    waits.backward()
    assert norm.weight.grad is not None and bool(norm.weight.grad.any())
