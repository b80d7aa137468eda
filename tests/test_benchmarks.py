"""The benchmarks of real sizes run: on tiny models of the same kinds."""

from __future__ import annotations

import sys
from dataclasses import replace
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
    monkeypatch.setattr(sys, "argv", ["vocabulary.py", "--small", "--heads", "--repeats", "1"])
    vocabulary.main()
    last = capsys.readouterr().out.splitlines()[-1]
    assert float(last.split("|")[4].strip(" %")) < 100 and "chunked-loss" in last


@pytest.mark.slow
def test_layouts(on_the_path: None, tmp_path: Path) -> None:
    import fused

    methods = ["eager channels-last", "rkmate 1.0", "rkmate layouts 1.0"]
    rows = fused.run(["regnet", "unet"], tmp_path / "rows.jsonl", threads=1, repeats=1, small=True,
                     methods=lambda model: methods)
    assert list(rows) == [(model, method, 1) for model in ("regnet", "unet") for method in methods]
    for row in rows.values():
        assert not row.failed and row.groups is None and row.again is None
        assert row.error < 100 * row.eager_error
    for model in ("regnet", "unet"):
        lines = fused.table(model, 1, rows).splitlines()
        assert len(lines) == 5 and all(line.count("|") == 9 for line in lines)


@pytest.mark.slow
def test_compiled_groups_beside_the_compiler(on_the_path: None, tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    import fused

    path, methods = tmp_path / "rows.jsonl", ["inductor 0.5", "rkmate compile inductor"]
    with pytest.raises(SystemExit, match="needs the peaks of inductor"):
        fused.run(["gpt"], None, threads=1, repeats=1, small=True,
                  methods=lambda model: methods[1:])
    rows = fused.run(["gpt"], path, threads=1, repeats=1, small=True, methods=lambda model: methods)
    theirs, ours = rows.values()
    assert not theirs.failed and not ours.failed
    assert ours.peak <= theirs.peak and abs(ours.predicted_peak / ours.peak - 1) < 0.02
    assert ours.groups > 0 and ours.again is not None and ours.compiling_again < ours.compiling
    assert ours.error < 2 * ours.eager_error
    assert theirs.of_inductor is None and ours.of_inductor > 0

    def never(*args: Any, **more: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(fused, "measured", never)
    assert fused.run(["gpt"], path, threads=1, repeats=1, small=True, methods=lambda model: methods) == rows
    bars = {"gpt": [fused.Bar("rkmate compile inductor", 100.0, "inductor"),
                    fused.Bar("rkmate compile inductor", 0.0), fused.Bar("rkmate compile 0.42", 0.84)]}
    cells = [line.split(" | ") for line in fused.bars_table(["gpt"], 1, rows, bars).splitlines()[2:]]
    assert [row[7] for row in cells[:2]] == ["yes", "no"] and cells[2][2] == "not measured"
    assert float(cells[0][3]) == round(ours.of_inductor, 2) and float(cells[1][3]) == round(ours.time, 2)
    apart = {row.key: replace(row, of_inductor=None) for row in rows.values()}
    row, *_ = fused.bars_table(["gpt"], 1, apart, bars).splitlines()[2:]
    assert f"{ours.time / theirs.time:.2f} | inductor | of each with eager's" in row


@pytest.mark.slow
def test_how_long_depths_take(on_the_path: None, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                              monkeypatch: pytest.MonkeyPatch) -> None:
    import fused

    monkeypatch.setattr(sys, "argv", ["fused.py", "--small", "--depths", "1", "--rows",
                                      str(tmp_path / "rows.jsonl"), "--threads", "1"])
    fused.main()
    theirs, ours = (line.split(" | ") for line in capsys.readouterr().out.splitlines()[-2:])
    assert [row[1] for row in (theirs, ours)] == list(fused.DEPTHS)
    assert theirs[3] == theirs[4] == "" and int(ours[4]) > 0


def test_rows_of_fused_are_measured_in_order(on_the_path: None) -> None:
    import fused

    for model in fused.NAMES:
        methods = fused.methods_of(model)
        assert len(set(methods)) == len(methods) == (25 if model in fused.CONVOLUTIONS else 14)
        first = next(k for k, m in enumerate(methods) if m.startswith("rkmate") and m.endswith("inductor"))
        assert all(methods.index(f"inductor {f}") < first for f in fused.INDUCTOR)
        for bar in fused.bars_of(model):
            assert bar.of in ("eager", "inductor") and bar.method.startswith("rkmate compile")
    assert fused.methods_of("24 layers")[-1] == "rkmate compile 1.0"
    assert len(fused.case_of("3 layers", small=True).model.transformer.h) == 3
    assert set(fused.NAMES) == set(fused.SMALL) <= set(fused.MODELS)


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
            offload.Row("unet", "offload", 0.25, 0.25, 1.04, 8.3, 8.2, 0.2501, 1.031, 12, 3 << 30, 0.25, 0.6,
                        1.5e9, 1.25e9, 20.0, **eager)]
    text = offload.table("unet", {(row.model, row.method): row for row in rows})
    about, _, *lines = text.splitlines()
    assert about == ("Eager takes 4.0 GiB and 8.00 s: 512 MiB for each second of the step. "
                     "The link takes 1.4 GiB/s and gives 1.2 GiB/s.")
    assert len(lines) == 5 and all(line.count("|") == 12 for line in lines)
    assert lines[-1] == ("| offload, at 25.0% | 25.0% | 1.040 | 8.30 s | 25.0% | 1.031 | 8.20 s | 3.0 GiB | "
                         "250 ms | 60% | 20 s |")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="pages are counted in /proc")
def test_steps_are_measured_with_pages_that_stay(on_the_path: None) -> None:
    import pages

    rows = [row for budget in (None, 1.0) for row in pages.measured("gpt", budget, small=True, repeats=1)]
    assert [(r.budget, r.kept) for r in rows] == [(b, kept) for b in (None, 1.0) for kept in (False, True)]
    assert all(row.resident > row.counted > 0 for row in rows)
    assert pages.table(rows).count("\n") == 5
