"""The public names: all that `__all__` says, and nothing that it does not say by accident."""

from __future__ import annotations

import inspect
import types

import pytest

import rkmate


def test_every_public_name_exists_and_has_a_docstring() -> None:
    assert len(rkmate.__all__) == len(set(rkmate.__all__))
    for name in rkmate.__all__:
        assert inspect.getdoc(getattr(rkmate, name)), name


def test_nothing_else_is_public() -> None:
    for name in rkmate.__all__:
        getattr(rkmate, name)               # loaded when it is first used
    visible = {name for name, value in vars(rkmate).items()
               if not name.startswith("_") and not isinstance(value, types.ModuleType)}
    assert visible == set(rkmate.__all__)


def test_the_names_that_people_rely_on() -> None:
    assert {"wrap", "plan", "tradeoff", "compare", "auto_budget", "max_batch_size", "measure_step",
            "Plan", "PlannedModule", "Curve", "InfeasibleBudget", "RkmateError"} <= set(rkmate.__all__)


def test_public_functions_are_annotated() -> None:
    for name in rkmate.__all__:
        value = getattr(rkmate, name)
        if inspect.isfunction(value):
            signature = inspect.signature(value)
            assert signature.return_annotation is not signature.empty, name
            assert all(p.annotation is not p.empty for p in signature.parameters.values()), name


def test_other_names_are_missing() -> None:
    with pytest.raises(AttributeError, match="module 'rkmate' has no attribute 'nothing'"):
        rkmate.nothing  # noqa: B018
