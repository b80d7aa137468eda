"""Plans in words."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import rkmate
from rkmate.show.amounts import count, duration, share, size
from rkmate.show.replay import label, label_lines, replay, shortened
from rkmate.show.words import ModuleRow, alike
from tests.show.models import PLANS, Waves, in_one_process, wrapped

pytestmark = in_one_process


@pytest.mark.parametrize(("n", "text"), [
    (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (8808038, "8.4 MiB"), (104857600, "100 MiB"),
    (1073741823, "1.0 GiB"), (3 << 40, "3.0 TiB"), (5000 << 40, "5000 TiB")])
def test_sizes(n: int, text: str) -> None:
    assert size(n) == text


@pytest.mark.parametrize(("seconds", "text"), [
    (0, "0.00 us"), (1.9e-3, "1.90 ms"), (2.5e-5, "25.0 us"), (0.1234, "123 ms"), (61.2, "61.2 s"),
    (0.99999, "1.00 s")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_shares_and_counts() -> None:
    assert (share(1, 3), share(1, 0)) == ("33%", "-")
    assert (count(1, "block"), count(2, "block"), count(2, "copy", "copies")) == \
        ("1 block", "2 blocks", "2 copies")


def test_print_shows_every_block() -> None:
    plan = wrapped().plan
    lines = str(plan).splitlines()
    rows = [line.split() for line in lines[lines.index("") + 2:]]
    assert [r[:3] for r in rows] == [[str(b), i.label, i.path or "(the"] for b, i in
                                     enumerate(plan.blocks)]
    assert size(plan.peak_bytes) in lines[1]
    assert size(plan.budget_bytes) in lines[1]


def test_repr_is_one_line() -> None:
    assert "\n" not in repr(wrapped().plan)
    assert len(repr(wrapped().plan)) < 200


def test_long_tables_are_cut() -> None:
    plan = rkmate.plan(Waves(48), (torch.randn(16, 8),), budget=1.0,
                       settings=rkmate.Settings(costs="analytic"))
    lines = str(plan).splitlines()
    assert len(plan.blocks) > 40 and len(lines) < 60
    assert lines[-1].strip() == f"... and {len(plan.blocks) - 39} more blocks"


@pytest.mark.parametrize("name", PLANS)
def test_explanations_name_figures_and_modules(name: str) -> None:
    plan = PLANS[name]()
    text = plan.explain()
    assert size(plan.peak_bytes) in text
    assert size(plan.baseline_peak_bytes) in text
    assert ("Recomputation adds" in text) == (plan.step_seconds > plan.baseline_seconds)
    assert ("are forgotten" in text) == bool(plan.schedule.recomputed())
    assert "The peak stands" in text
    assert ("smallest budget" in text) == (plan.minimum_bytes is not None)
    assert "  " not in text


def test_a_known_bound_says_how_good_the_plan_is() -> None:
    plan = replace(wrapped().plan, bound_seconds=0.9 * wrapped().plan.step_seconds)
    assert "could save more than 10.0% of the step." in plan.explain()
    assert "at most 10.0% could be saved" in str(plan)
    assert "in order, is faster." in replace(plan, bound_seconds=plan.step_seconds).explain()
    unknown = replace(plan, bound_seconds=None)
    assert "could save" not in unknown.explain()
    assert "lower bound" not in str(unknown)


def test_what_the_search_gained_is_named() -> None:
    plan = wrapped().plan
    assert "searching gained" not in str(replace(plan, first_seconds=plan.step_seconds))
    slower = replace(plan, first_seconds=plan.step_seconds / 0.8)
    assert "20.0% of the step by the first schedule" in str(slower)


def test_what_costs_most_is_named() -> None:
    text = wrapped().plan.explain()
    assert "the 4 modules layers.* (gelu: " in text


def test_modules_are_named_before_operations() -> None:
    assert label("encoder.layer.3.attention", "softmax") == "encoder.layer.3.attention: softmax"
    assert (label("", "softmax"), label("head", "")) == ("softmax", "head")
    assert label_lines("a.b", "mul") == ("a.b:", "mul")
    assert shortened("transformer.h.0.mlp", 12) == "...r.h.0.mlp"
    peak = replay(wrapped().plan).peak_tensors[0]
    assert f"{peak.path}: {peak.operation} (" in wrapped().plan.explain()


def test_modules_that_differ_in_a_number_are_one_row() -> None:
    rows = [ModuleRow(path, 10 * k, k, 0.5, ("gelu",)) for k, path in
            enumerate(("h.0.mlp", "h.1.mlp", "h.10.mlp", "h2.mlp", ""), 1)]
    assert alike(rows) == (ModuleRow("h.*.mlp", 60, 6, 1.5, ("gelu",), 3), *rows[3:])


def test_notebooks_get_a_table() -> None:
    html = wrapped().plan._repr_html_()
    assert html.count("<tr>") >= 5 + len(wrapped().plan.blocks)
    assert "layers.1" in html
