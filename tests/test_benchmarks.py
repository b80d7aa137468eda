"""The benchmarks of real sizes run: on tiny models of the same kinds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.slow
def test_a_paper_s_table_is_measured_once(on_the_path: None, tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    import papers

    path = tmp_path / "rows.json"
    found = papers.run(["gpt2-large-2x512"], [0.6], path, small=True, repeats=1)
    assert [method for _, method in found] == ["checkpoint", "rkmate 0.6", "rotor 0.6"]
    ours = found["gpt2-large-2x512", "rkmate 0.6"]
    assert not ours.failed and ours.peak <= 0.6 and abs(ours.predicted_peak / ours.peak - 1) < 0.02
    assert found["gpt2-large-2x512", "checkpoint"].peak < 1
    lines = papers.table("gpt2-large-2x512", found).splitlines()
    assert len(lines) == 5 and all(line.count("|") == 9 for line in lines)

    def never(*args: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(papers, "measured", never)
    assert papers.run(["gpt2-large-2x512"], [0.6], path, small=True, repeats=1) == found


def test_papers_rows_stand_at_their_budgets(on_the_path: None) -> None:
    import papers

    for model in papers.MODELS.values():
        for method in papers.methods_of(model, None):
            kind = method.split()[0]
            assert kind in ("checkpoint", "rkmate", *model.planners)
    large = papers.MODELS["gpt2-large-2x512"]
    said = papers._said(large, "rkmate 0.41")
    assert round(said.peak, 3) == 0.409 and round(said.time, 3) == 1.054
    assert round(papers._said(large, "rkmate 0.122").time, 3) == 1.234
    assert papers._said(large, "rkmate 0.5") is None


@pytest.mark.slow
def test_host_time(on_the_path: None, capsys: pytest.CaptureFixture[str],
                   monkeypatch: pytest.MonkeyPatch) -> None:
    import host

    monkeypatch.setattr(sys, "argv", ["host.py", "vit", "--layers", "1", "--steps", "1"])
    host.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[1] for line in lines[2:]] == ["eager", "checkpoint", "plan 1", "guards"]
    assert all(line.count("|") == 7 for line in lines)


@pytest.mark.slow
def test_a_large_vocabulary(on_the_path: None, capsys: pytest.CaptureFixture[str],
                            monkeypatch: pytest.MonkeyPatch) -> None:
    import vocabulary

    monkeypatch.setattr(sys, "argv", ["vocabulary.py", "--small", "--fractions", "0.9", "--repeats", "1",
                                      "--steps", "3"])
    vocabulary.main()
    last = capsys.readouterr().out.splitlines()[-1]
    assert float(last.split("|")[3]) <= 1e-5


@pytest.mark.slow
def test_layouts(on_the_path: None, capsys: pytest.CaptureFixture[str],
                 monkeypatch: pytest.MonkeyPatch) -> None:
    import layouts

    monkeypatch.setattr(sys, "argv", ["layouts.py", "--small", "--models", "regnet", "unet", "--fractions",
                                      "1.0", "--steps", "1"])
    layouts.main()
    rows = capsys.readouterr().out.splitlines()[2:]
    assert len(rows) == 8 and all(row.count("|") == 6 for row in rows)


def test_rows_of_gpus_stand_on_their_page(on_the_path: None, tmp_path: Path) -> None:
    import gpu_page

    file, page = tmp_path / "rows" / "table.json", tmp_path / "page.md"
    for row in ({"model": "vit", "way": "1.0", "plan_mib": 3.14159, "requested_mib": 1869.2,
                 "requested_over_plan": -0.001, "launches": None, "waits": 0},
                {"model": "bert", "failed": "OutOfMemoryError: no"},
                {"model": "bert", "way": "1.0", "waits": 1},
                {"model": "vit", "way": "0.6", "failed": "at least 2.0 MiB"},
                {"model": "bert", "way": "1.0", "waits": 0}):
        gpu_page.keep(file, row, order=("bert", "vit"))
    page.write_text("Before.\n<!-- table: begin -->\nold\n<!-- table: end -->\nAfter <!-- auto: begin -->.\n",
                    encoding="utf-8")
    gpu_page.write(page, file.parent)
    first = page.read_text(encoding="utf-8")
    gpu_page.write(page, file.parent)
    assert first == page.read_text(encoding="utf-8")
    lines = [line for line in first.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1 and "old" not in first
    assert [line.split("|")[1:3] for line in lines[2:]] == [
        [" bert ", " 1.0 "], [" vit ", " 1.0 "], [" vit ", " 0.6 "]]
    assert "| 3.14 | 1869 | -0.10% |" in lines[3] and "at least 2.0 MiB" in lines[4]
    assert first.startswith("Before.") and first.endswith("After <!-- auto: begin -->.\n")
