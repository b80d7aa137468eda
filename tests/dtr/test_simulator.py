"""The simulator against an independent one, row by row."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from rkmate.dtr.log import Compute, Program, parse_log, read_log
from rkmate.dtr.neighbourhood import EvictedRegions
from rkmate.dtr.simulator import simulate
from rkmate.errors import ArgumentError

DATA = Path(__file__).parent / "data"
RESULTS: dict[str, Any] = json.loads((DATA / "results.json").read_text())
FIELDS = (
    "status",
    "clock",
    "model_compute",
    "remat_compute",
    "max_memory",
    "evict_choices",
    "tied_choices",
    "evict_seq_sha1",
)


@cache
def program(name: str) -> Program:
    return read_log(DATA / "logs" / RESULTS[name]["log"])


@pytest.mark.parametrize("name", RESULTS)
def test_baseline(name: str) -> None:
    found, expected = program(name), RESULTS[name]["baseline"]
    assert found.memory == expected["memory"]
    assert found.compute == expected["compute"]
    assert found.constant_memory == expected["const_memory"]
    assert sum(isinstance(step, Compute) for step in found.steps) == expected["n_ops"]


@pytest.mark.parametrize("name", RESULTS)
def test_every_row_agrees(name: str) -> None:
    # Rows with ties agree too: the pool's order is part of what is replayed.
    case = RESULTS[name]
    for row in case["results"]:
        result = simulate(
            program(name),
            row["heuristic"],
            row["budget"],
            overhead_limit=case["overhead_limit"],
            seed=row.get("seed", 0),
        ).as_dict()
        expected = {field: row[field] for field in FIELDS}
        assert {field: result[field] for field in FIELDS} == expected, row["heuristic"]


def test_without_pressure_nothing_is_evicted() -> None:
    found = program("unet_small_3")
    result = simulate(found, "dtr-eq", 10 * found.memory)
    assert result.status == "ok"
    assert result.clock == found.compute + 1
    assert result.evict_choices == 0


def test_deep_rematerialization_does_not_recurse() -> None:
    # Everything of a long chain is evicted before its end is asked for again.
    lines = ['{"INSTRUCTION":"CONSTANT","NAME":"c"}', '{"INSTRUCTION":"MEMORY","NAME":"c","MEMORY":"0"}']
    length = 5000
    for step in range(length):
        source = f"t{step - 1}" if step else "c"
        lines += [
            f'{{"INSTRUCTION":"CALL","NAME":"f","ARGS":["{source}"],"RESULT":["t{step}"],"TIME":"1"}}',
            f'{{"INSTRUCTION":"MEMORY","NAME":"t{step}","MEMORY":"1"}}',
            f'{{"INSTRUCTION":"ALIAS","NAME":"t{step}","ALIAS":"-1"}}',
        ]
        if step and step < length - 1:
            lines.append(f'{{"INSTRUCTION":"RELEASE","NAME":"t{step - 1}"}}')
    lines += [
        '{"INSTRUCTION":"CALL","NAME":"g","ARGS":["c"],"RESULT":["u"],"TIME":"1"}',
        '{"INSTRUCTION":"MEMORY","NAME":"u","MEMORY":"2"}',
        '{"INSTRUCTION":"ALIAS","NAME":"u","ALIAS":"-1"}',
        '{"INSTRUCTION":"RELEASE","NAME":"u"}',
    ]
    result = simulate(parse_log(lines), "lru", 3)
    assert result.status == "ok"
    assert result.remat_compute >= length - 2


@pytest.mark.parametrize("budget", [-1, 1.5, True])
def test_bad_budget(budget: Any) -> None:
    with pytest.raises(ArgumentError, match="budget"):
        simulate(program("features"), "lru", budget)


def test_bad_heuristic_and_limit() -> None:
    with pytest.raises(ArgumentError, match="nonsense"):
        simulate(program("features"), "nonsense", 100)
    with pytest.raises(ArgumentError, match="overhead_limit"):
        simulate(program("features"), "lru", 100, overhead_limit=0.5)


def _random_log(seed: int) -> Program:
    """Views (of two arguments as well), writes, several results and releases, 150 operations."""
    source = random.Random(seed)
    lines: list[dict[str, Any]] = []
    names = ["c0", "c1"]
    for name in names:
        lines += [{"INSTRUCTION": "CONSTANT", "NAME": name},
                  {"INSTRUCTION": "MEMORY", "NAME": name, "MEMORY": "64"}]
    for step in range(150):
        args = list(dict.fromkeys(source.choices(names[-30:], k=3)))
        kind = source.random()
        time = str(source.randrange(1, 200))
        if kind < 0.1 and args[0][0] != "c":
            lines.append({"INSTRUCTION": "MUTATE", "NAME": "add_", "ARGS": args, "MUTATE": ["0"],
                          "TIME": time})
            continue
        view = kind < 0.5
        made = [f"x{step}"] if kind < 0.85 else [f"x{step}", f"y{step}"]
        lines.append({"INSTRUCTION": "CALL", "NAME": "f", "ARGS": args, "RESULT": made,
                      "TIME": time})
        for name in made:
            size = "0" if view else str(source.randrange(1, 100))
            lines += [{"INSTRUCTION": "MEMORY", "NAME": name, "MEMORY": size},
                      {"INSTRUCTION": "ALIAS", "NAME": name, "ALIAS": "0" if view else "-1"}]
        names += made
        if len(names) > 40:
            lines.append({"INSTRUCTION": "RELEASE", "NAME": names.pop(source.randrange(2, 20))})
    return parse_log(json.dumps(line) for line in lines)


@pytest.mark.parametrize("heuristic", ["dtr", "msps", "e*"])
@pytest.mark.parametrize("seed", range(6))
def test_regions_are_as_walked_anew(heuristic: str, seed: int) -> None:
    log = _random_log(seed)
    budget = int(log.memory * 0.4)
    found = simulate(log, heuristic, budget, overhead_limit=4).as_dict()
    with mock.patch.object(EvictedRegions, "_shorten", return_value=False):
        expected = simulate(log, heuristic, budget, overhead_limit=4).as_dict()
    del found["metadata_accesses"], expected["metadata_accesses"]
    assert found["evict_choices"] > 50
    assert found == expected
