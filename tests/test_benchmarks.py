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


@pytest.mark.slow
def test_offload_is_measured_beside_recomputation(on_the_path: None, tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    import offload

    (tmp_path / "away").mkdir()
    path = tmp_path / "rows.json"

    def run() -> dict[tuple[str, str], Any]:
        return offload.run(["gpt2-6", "unet"], offload.METHODS, path, tmp_path / "away", small=True,
                           repeats=1, fraction=0.8)

    found = run()
    assert [*found] == [(model, method) for model in ("gpt2-6", "unet") for method in offload.METHODS]
    for (_, method), row in found.items():
        assert not row.failed and row.eager_bytes > 0
        if method != "checkpoint":
            assert row.peak <= 0.8 and abs(row.predicted_peak / row.peak - 1) < 0.02
        assert (row.out_rate is not None) == (method == "offload")
    assert not any((tmp_path / "away").iterdir())
    monkeypatch.delattr(offload, "measured")                # nothing is measured again
    assert run() == found


def test_offload_s_table_has_a_line_for_each_method(on_the_path: None) -> None:
    import offload

    eager: dict[str, Any] = {"eager_bytes": 4 << 30, "eager_seconds": 8.0}
    rows = [offload.Row("unet", "checkpoint", None, 0.5, 1.3, **eager),
            offload.Row("unet", "recompute", 0.25, ready=3.0, failed="infeasible: at least 30.0%", **eager),
            offload.Row("unet", "offload", 0.25, 0.25, 1.04, 0.2501, 1.031, 12, 3 << 30, 0.25, 0.6, 1.5e9,
                        1.25e9, 20.0, **eager)]
    text = offload.table("unet", {(row.model, row.method): row for row in rows})
    about, _, *lines = text.splitlines()
    assert about == ("Eager takes 4.0 GiB and 8.00 s: 512 MiB for each second of the step. "
                     "The link takes 1.4 GiB/s and gives 1.2 GiB/s.")
    assert len(lines) == 5 and all(line.count("|") == 10 for line in lines)
    assert lines[-1] == ("| offload, at 25.0% | 25.0% | 1.040 | 25.0% | 1.031 | 3.0 GiB | 250 ms | 60% | "
                         "20 s |")
