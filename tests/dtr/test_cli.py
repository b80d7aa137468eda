"""The simulate command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rkmate.dtr.cli import main

LOGS = Path(__file__).parent / "data" / "logs"


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
    "arguments",
    [
        ["missing.log", "--ratio", "0.5"],
        [str(LOGS / "features.log"), "--ratio", "0.5", "--heuristic", "nonsense"],
        [str(LOGS / "features.log"), "--ratio", "-1"],
        [str(LOGS / "features.log"), "--budget", "-1"],
    ],
)
def test_bad_input(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "rkmate simulate" in capsys.readouterr().err


def test_a_budget_is_needed() -> None:
    with pytest.raises(SystemExit):
        main([str(LOGS / "features.log")])
