"""The benchmarks of real sizes run: on tiny models of the same kinds."""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import rkmate

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
    assert float(last.split("|")[4]) <= 1e-5
    monkeypatch.setattr(sys, "argv", ["vocabulary.py", "--small", "--heads", "--repeats", "1"])
    vocabulary.main()
    last = capsys.readouterr().out.splitlines()[-1]
    assert float(last.split("|")[4].strip(" %")) < 100 and "chunked-loss" in last


@pytest.mark.slow
def test_methods_take_turns_once(on_the_path: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fused

    path = tmp_path / "turns.jsonl"
    methods = ["eager", "eager channels-last", "rkmate 1.0", "rkmate 0.1", "rkmate layouts 1.0"]

    def run() -> dict[tuple[str, str, int], Any]:
        return fused.run_turns(["regnet", "unet"], path, threads=1, small=True, rounds=2,
                               methods=lambda model: methods)

    turns = run()
    assert list(turns) == [(model, method, 1) for model in ("regnet", "unet") for method in methods]
    for row in turns.values():
        if row.method == "rkmate 0.1":
            assert row.failed.startswith("infeasible: at least") and row.seconds is None
            continue
        assert not row.failed and row.rounds == 2 and row.error < 100 * row.eager_error
        assert row.time == 1 if row.method == "eager" else row.time > 0
        assert row.pages >= 0
        assert (row.predicted > 0) if row.method.startswith("rkmate") else (row.predicted is None)
    monkeypatch.setattr(fused, "_process", None)
    assert run() == turns


@pytest.mark.slow
def test_compiled_groups_beside_the_compiler(on_the_path: None, tmp_path: Path) -> None:
    import fused

    methods = ["eager", "inductor 1.0", "inductor 0.5", "rkmate compile inductor"]
    turns = fused.run_turns(["gpt"], None, threads=1, small=True, rounds=1, methods=lambda model: methods)
    _, whole, half, ours = turns.values()
    assert half.peak < 0.9 * whole.peak                 # the code of one budget is not the other's
    assert ours.peak <= half.peak and abs(ours.predicted_peak / ours.peak - 1) < 0.02
    assert ours.error < 2 * ours.eager_error and ours.predicted_seconds > 0


def test_turns_need_what_they_are_measured_by(on_the_path: None) -> None:
    import fused
    import fused_turns

    made = functools.partial(fused.made, "gpt", small=True)
    with pytest.raises(ValueError, match="eager comes first"):
        fused_turns.in_turns("gpt", 1, ["rkmate 1.0"], made)
    with pytest.raises(ValueError, match="needs a peak of inductor's"):
        fused_turns.in_turns("gpt", 1, ["eager", "rkmate inductor"], made)


@pytest.mark.slow
def test_how_long_depths_take(on_the_path: None, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                              monkeypatch: pytest.MonkeyPatch) -> None:
    import fused

    path = tmp_path / "waits.jsonl"
    monkeypatch.setattr(sys, "argv", ["fused.py", "--small", "--depths", "1", "--waits", str(path),
                                      "--threads", "1"])
    fused.main()
    said = capsys.readouterr().out.splitlines()[-2:]
    theirs, ours = (line.split(" | ") for line in said)
    assert [row[1] for row in (theirs, ours)] == list(fused.DEPTHS)
    assert theirs[3] == theirs[4] == "" and int(ours[4]) > 0
    row = read_last(path)
    assert row["again"] is not None and row["compiling_again"] < row["compiling"]
    monkeypatch.setattr(fused, "_process", None)
    fused.main()
    assert capsys.readouterr().out.splitlines()[-2:] == said


def read_last(path: Path) -> dict[str, Any]:
    """The last row of a file of JSON lines."""
    return dict(json.loads(path.read_text(encoding="utf-8").splitlines()[-1]))


def test_predictions_are_beside_steps_of_their_time(on_the_path: None) -> None:
    from fused_rows import Turn

    row = Turn("gpt", "rkmate 1.0", 1, seconds=3.0, eager_seconds=4.0, predicted_seconds=1.0)
    assert row.predicted is None
    assert replace(row, seconds_then=2.0).predicted == 0.5
    assert replace(row, seconds_then=2.0, predicted_seconds=None).predicted is None


def test_how_well_times_are_predicted_is_a_sentence(on_the_path: None) -> None:
    from fused_rows import Turn, predictions

    rows = [Turn("gpt", f"rkmate {k}", 1, predicted_seconds=predicted, seconds_then=1.0)
            for k, predicted in enumerate((0.98, 1.04, 0.92, 1.5))]
    said = predictions({row.key: row for row in (Turn("gpt", "eager", 1, seconds=1.0), *rows)})
    assert said.startswith("Of 4 predicted times, 1 are within 3% of")
    assert "2 within 5% and 3 within 10%" in said
    assert said.endswith("+11.0% off.") and predictions({}) == ""


def test_rows_of_fused_are_measured_in_order(on_the_path: None) -> None:
    import fused

    for model in fused.NAMES:
        methods = fused.methods_of(model)
        many = (15 if model in fused.CONVOLUTIONS else 14) + (model in ("gpt", "resnet18"))
        assert methods[0] == "eager" and len(set(methods)) == len(methods) == many
        first = next(k for k, m in enumerate(methods) if m.startswith("rkmate") and m.endswith("inductor"))
        assert all(methods.index(f"inductor {f}") < first for f in fused.INDUCTOR)
        for bar in fused.bars_of(model):
            assert bar.of in ("eager", "inductor") and bar.method.startswith("rkmate compile")
            assert bar.method in methods
    assert fused.ready_methods_of("24 layers")[-1] == "rkmate compile 1.0"
    assert set(fused.ready_methods_of("unet")) < set(fused.methods_of("unet"))
    assert len(fused.case_of("3 layers", small=True).model.transformer.h) == 3
    assert set(fused.NAMES) == set(fused.SMALL) <= set(fused.MODELS)


def test_the_page_of_fused_says_what_holds(on_the_path: None, tmp_path: Path,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    import fused
    from fused_rows import Bar, Ready, Turn, bars_table, smallest

    def turn(method: str, peak: float, seconds: float, **more: Any) -> Turn:
        return Turn("gpt", method, 2, peak=peak, seconds=seconds, eager_seconds=2.0, rounds=7, **more)

    turns = {t.key: t for t in (
        turn("eager", 1.0, 2.0), turn("inductor 0.5", 0.5, 1.6), turn("inductor 0.1", 0.6, 1.0),
        turn("rkmate 0.5", 0.0, 0.0), turn("rkmate compile inductor", 0.5, 1.2, predicted_seconds=1.0,
                                          seconds_then=0.8, pages=1234.0),
        turn("rkmate compile 0.42", 0.42, 1.7),
        Turn("gpt", "rkmate compile 0.35", 2, failed="infeasible: at least 40.0%"))}
    assert smallest("gpt", 2, turns).method == "inductor 0.5" and smallest("gpt", 1, turns) is None
    bars = {"gpt": [Bar("rkmate compile inductor", 0.8, "inductor"), Bar("rkmate compile inductor", 0.7),
                    Bar("rkmate compile 0.42", 0.84), Bar("rkmate compile 0.35", 1.0), Bar("rkmate 9", 1.0),
                    Bar("inductor 0.1", 1.0, "inductor")]}
    cells = [line.split(" | ") for line in bars_table(["gpt"], 2, turns, bars).splitlines()[2:]]
    assert [row[3] for row in cells[:3]] == ["0.75", "0.60", "0.85"]
    assert [row[-1][:3] for row in cells] == ["yes", "yes", "no ", "|", "|", "no "]
    assert [row[2] for row in cells[3:5]] == ["infeasible: at least 40.0%", "not measured"]

    monkeypatch.setattr(fused, "PAGE", tmp_path / "fused.md")
    waits = {r.key: r for r in (Ready("gpt", "inductor 0.5", 2, ready=9.0, again=3.0),
                                Ready("6 layers", "rkmate compile 1.0", 1, failed="no compiler"))}
    fused.write(turns, waits)
    page = (tmp_path / "fused.md").read_text(encoding="utf-8")
    assert [line for line in page.splitlines() if line.startswith("#")] == [
        "# Layouts and compiled groups, measured", "## In short, 2 threads",
        "## How long it takes to get ready, 1 thread", "## How long it takes to get ready, 2 threads",
        "## gpt, 2 threads"]
    assert "| rkmate compile inductor | 50.0% | 0.60 | 1,234 |  | +25.0% |" in page
    assert "| no compiler |" in page
    tables = page.split("\n\n")
    assert all(len({line.count("|") for line in t.splitlines()}) == 1 for t in tables if t.startswith("|"))


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
def test_parts_are_measured_beside_checkpointed_layers(on_the_path: None) -> None:
    import parts

    rows = parts.Bench("retinanet", 1).rows()
    assert [r.method for r in rows] == ["checkpoint", "0.6", "0.4"]
    assert all(r.peak <= r.budget for r in rows) and all(r.time for r in rows)
    assert rows[1].budget <= 0.6 and 0.8 < rows[1].planned < 1


def test_a_line_of_parts_says_what_could_not_be_met(on_the_path: None) -> None:
    import parts

    rows = [parts.Row("vae", "checkpoint", 1.0, 0.418, 2.02, 0.0),
            parts.Row("vae", "0.6", 0.6, 0.593, 1.01, 1.0),
            parts.Row("vae", "0.4", 0.43, 0.421, None, 1.0), parts.Row("clip", "0.4", 0.4, 0.39, 1.0, 1.0)]
    lines = parts.table(rows).splitlines()
    assert len(lines) == 3 and {line.count("|") for line in lines} == {6}
    assert lines[-1].endswith("| 100% | 41.8%, 2.02 times | 59.3%, 1.01 times | 42.1% (smallest: 43.0%) |")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="pages are counted in /proc")
def test_steps_are_measured_with_pages_that_stay(on_the_path: None) -> None:
    import pages

    rows = [row for budget in (None, 1.0) for row in pages.measured("gpt", budget, small=True, repeats=1)]
    assert [(r.budget, r.pages) for r in rows] == [(b, pages) for b in (None, 1.0)
                                                   for pages in ("fresh", "stay")]
    assert all(row.resident > row.counted > 0 for row in rows)
    assert pages.table(rows).count("\n") == 5


def test_features_are_planned_on_and_off_once(on_the_path: None, tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    import ablation

    monkeypatch.setenv("RKMATE_CACHE_DIR", str(tmp_path / "cache"))
    path, how = tmp_path / "rows.jsonl", {"costs": "analytic", "small": True}
    asked = ["gpt", "resnet18"], ["order in blocks", "products of pixels"], ["1.0"], path
    rows = ablation.run(*asked, **how)
    assert [row.key[:3] for row in rows] == [
        (model, feature, budget) for model in asked[0] for feature in asked[1] for budget in asked[2]
        if (model, feature) != ("gpt", "products of pixels")]
    for row in rows:
        assert row.whole > 0 and row.on_seconds is not None and row.on_planning > 0
        assert row.on_peak <= row.whole and row.off_peak is not None
    monkeypatch.delattr(ablation.Bench, "row")              # nothing is planned again
    assert ablation.run(*asked, **how) == rows


@pytest.mark.slow
def test_steps_with_and_without_a_feature_take_turns(on_the_path: None, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    import ablation

    monkeypatch.setenv("RKMATE_CACHE_DIR", str(tmp_path))
    row, = ablation.run(["unet"], ["order in blocks"], ["smallest"], None, costs="measured", steps=2,
                        small=True)
    assert row.on_step > 0 and row.off_step > 0 and row.on_peak < row.whole
    assert "| unet | smallest |" in ablation.table([row])


def test_every_switch_turns_something_off(on_the_path: None) -> None:
    import ablation

    from rkmate.graph.passes import table
    from rkmate.pipeline import attempts, prepare, search, variants
    from rkmate.planners import default, finish
    from rkmate.planners.save_set import SaveSet
    from rkmate.planners.settings import PlannerSettings

    def state() -> list[Any]:
        entries = default.table(PlannerSettings(), SaveSet())
        return [table.REWRITES, variants.VARIANTS, [e.origin for e in entries], prepare.reordered,
                attempts.with_larger_tiles, search.find_planner, default.finished]

    before = state()
    assert default.finished is finish.finished
    for name, how in ablation.FEATURES.items():
        with how.off():
            assert (state() != before) is not bool(how.without), name
        assert state() == before
        assert how.about and set(how.models) <= {*ablation.fused.NAMES, *ablation.FURTHER}
        rkmate.Settings(**{**how.where, **how.without})
    with ablation.FEATURES["save-set"].off():
        assert search.find_planner("rockmate").save_set.plan(None, 1).status == "infeasible"


def test_a_feature_keeps_its_place_where_it_gains_enough(on_the_path: None) -> None:
    import ablation

    def row(model: str, budget: str, off: float | None, on_peak: int = 100, off_peak: int | None = 100,
            on: float | None = 1.0) -> Any:
        return ablation.Row(model, "finishing", budget, "analytic", 200, on, on_peak, 2.0, off, off_peak, 1.0)

    assert row("gpt", "0.5", 1.25).gain == pytest.approx(0.2)
    assert row("gpt", "0.5", 1.0, on_peak=90).gain == 0             # a budget that is used up
    assert row("gpt", "0.5", 1.0, off_peak=125).gain == pytest.approx(0.2)      # more than the budget
    assert row("gpt", "smallest", 1.0, off_peak=200).gain == 0.5
    assert row("gpt", "0.5", 1.0, off_peak=50).gain == 0
    assert row("gpt", "0.5", None, off_peak=None).gain == 1
    assert row("gpt", "0.5", None, off_peak=None, on=None).gain == 0
    one = [row("gpt", "1.0", 1.0), row("gpt", "smallest", 1.04), row("unet", "0.5", 1.02)]
    assert ablation.worth_on(one) == ["gpt"] and "open (gpt12, resnet18, " in ablation.verdicts(one)
    rest = [row(model, "0.5", 1.0) for model in ablation.fused.NAMES]
    assert "| none | 16 | 8 | does not stay |" in ablation.verdicts(rest)
    two = [*one, row("unet", "smallest", 1.0, off_peak=110)]
    assert ablation.worth_on(two) == ["gpt", "unet"] and "| stays" in ablation.verdicts(two)
    assert "| 9.1% (unet, smallest) | gpt, unet | 8 | 4 |" in ablation.verdicts(two)
    page = ablation.page([*two, row("vit", "0.5", None, off_peak=None)])
    assert "| vit | 0.5 | not met |" in page and "| unet | 0.5 | 1.020 |  | 2.0 s | 1.0 s |" in page
    tables = page.split("\n\n")
    assert all(len({line.count("|") for line in t.splitlines()}) == 1 for t in tables if t.startswith("|"))


def test_scenarios_of_the_field(on_the_path: None, tmp_path: Path) -> None:
    import field

    path, names = tmp_path / "rows.jsonl", ["mlp", "layer drop", "custom function"]
    given = ["--libraries", "torch", "--costs", "analytic", "--rows", str(path), "--names", *names]
    found = {r.name: r for r in field.main(given)}
    assert {n: found[n].outcome for n in names} == {
        "mlp": "right", "layer drop": "by parts", "custom function": "right"}
    assert all(r.peak <= r.budget for r in found.values()) and 0.5 < found["layer drop"].planned < 1
    assert "rkmate.apply(model, budget=0.7)" in found["mlp"].lines
    page = field.page(list(found.values()))
    assert "| torch | 2 | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 0 |" in page and page.count("`rkmate.apply(model") == 3
    assert len({(s.library, s.name) for s in field.SCENARIOS}) == len(field.SCENARIOS) >= 550
    files = {p.stem for p in (BENCHMARKS / "scenarios").glob("*.py")}
    assert files == {*field.MODULES, "__init__", "base", "models"}
    assert field.main(given) == list(found.values()), "what is there is not run again"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:this is .* faster than the fastest schedule of the original's")
def test_a_mesh_that_is_not_here(on_the_path: None) -> None:
    import mesh

    about, _, *table, _ = mesh.rows_of(mesh.CASES["8b"], 2)
    assert "on 8 H100s" in about and len(table) == 7 and all(line.count("|") == 7 for line in table)
    gathers = [int(line.split("|")[6]) for line in table[2:4]]
    assert gathers == [7 * 2 * 2 + 2, 7 * 2 + 2]


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="no torch.distributed")
def test_ranks_with_a_budget_and_without(on_the_path: None) -> None:
    import ranks

    *_, row = ranks.table(["function"], [2])
    name, count, _, share, budget, peak, collectives, off = (c.strip() for c in row.strip("|").split("|"))
    assert (name, count, share) == (ranks.ROWS["function"].label, "2", "0.7")
    assert float(peak.removesuffix(" MiB")) <= float(budget.removesuffix(" MiB"))
    assert (collectives, off) == ("all_reduce 4", "bits")
    assert len({r.label for r in ranks.ROWS.values()}) >= 9 and len(ranks.PIPELINES) == 2


def test_smallest_budgets_in_tiles(on_the_path: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    import tiles
    import torch

    small = ("convolutions, 4 x 3 x 16 x 16", lambda: (
        tiles._chain([3, 8, 32]), (torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4,)))))
    page, rows = tmp_path / "tiles.md", tmp_path / "rows.jsonl"
    page.write_text(f"before\n{tiles._BEGIN}{tiles._END}\nafter\n", encoding="utf-8")
    monkeypatch.setattr(tiles, "MODELS", {"small": small})
    monkeypatch.setattr(tiles, "PAGE", page)
    monkeypatch.setattr(sys, "argv", ["tiles.py", "--models", "all", "--rows", str(rows), "--write"])
    tiles.main()
    (row,) = tiles.read_rows(tiles.Row, rows)
    assert row.budget < 0.8 * row.without and row.peak <= row.budget and row.by_images < 1
    assert row.error < 1e-3 and row.time is row.by_images_time is None
    head, *lines, last = page.read_text(encoding="utf-8").splitlines()
    assert (head, last) == ("before", "after")
    assert len(lines) == 5 and lines[3].startswith("| convolutions, 4 x 3 x 16 x 16 |")
    assert lines[3] in capsys.readouterr().out
