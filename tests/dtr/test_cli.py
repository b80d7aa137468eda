"""The simulate command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rkmate.cli.main import main as rkmate_main

LOGS = Path(__file__).parent / "data" / "logs"
FEATURES = str(LOGS / "features.log")


def main(arguments: list[str]) -> int:
    return rkmate_main(["simulate", *arguments])


def test_json_of_a_known_row(capsys: pytest.CaptureFixture[str]) -> None:
    status = main([str(LOGS / "features.log"), "--heuristic", "DTR", "--ratio", "0.7", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert status == 0
    assert found["status"] == "ok"
    assert found["budget"] == 4069
    assert found["clock"] == 1461
    assert found["remat_compute"] == 776
    assert found["evict_seq_sha1"] == "b523e1bc582ae3d94388d979628e6c8d12d9235c"


def test_budget_in_bytes_gives_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    log = str(LOGS / "features.log")
    outputs = []
    for limit in (["--ratio", "0.7"], ["--budget", "4069"]):
        assert main([log, "--heuristic", "dtr", *limit]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert "1461" in outputs[0]


def test_out_of_memory_is_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(LOGS / "features.log"), "--budget", "10", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "OOM"


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (["missing.log", "--ratio", "0.5"], "FileNotFoundError"),
        ([__file__, "--ratio", "0.5"], "LogError"),
        ([FEATURES, "--ratio", "0.5", "--heuristic", "nonsense"], "ArgumentError"),
        ([FEATURES, "--ratio", "-1"], "ArgumentError"),
        ([FEATURES, "--budget", "-1"], "ArgumentError"),
    ],
)
def test_bad_input(arguments: list[str], kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    plain = capsys.readouterr()
    assert plain.out == ""
    assert plain.err.startswith(f"rkmate simulate: {arguments[0]}: ")
    assert main([*arguments, "--json"]) == 2
    found = capsys.readouterr()
    assert found.err == ""
    answer = json.loads(found.out)
    assert answer["error"] == kind
    assert f"rkmate simulate: {answer['message']}\n" == plain.err


def test_a_budget_is_needed() -> None:
    with pytest.raises(SystemExit):
        main([str(LOGS / "features.log")])


@pytest.mark.parametrize("text", ["", "\n \n\n", '{"INSTRUCTION":"ANNOTATE","ANNOTATION":"START"}\n'])
def test_a_log_without_operations(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "empty.log"
    log.write_text(text, encoding="utf-8")
    assert main([str(log), "--ratio", "0.5", "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer["error"] == "LogError" and "no operation" in answer["message"]
