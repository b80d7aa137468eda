"""Reading logs: bad ones fail with their line."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from rkmate.dtr.errors import LogError
from rkmate.dtr.log import parse_log

HEAD = ['{"INSTRUCTION":"CONSTANT","NAME":"a"}', '{"INSTRUCTION":"MEMORY","NAME":"a","MEMORY":"4"}']
CALL = '{"INSTRUCTION":"CALL","NAME":"f","ARGS":["a"],"RESULT":["b"],"TIME":"3"}'
MEMORY = '{"INSTRUCTION":"MEMORY","NAME":"b","MEMORY":"8"}'
ALIAS = '{"INSTRUCTION":"ALIAS","NAME":"b","ALIAS":"-1"}'


@pytest.mark.parametrize(
    ("lines", "line", "words"),
    [
        (["{"], 1, "JSON"),
        (["[1]"], 1, "INSTRUCTION"),
        (['{"INSTRUCTION":"JUMP"}'], 1, "JUMP"),
        ([*HEAD, CALL], 3, "ends"),
        ([*HEAD, CALL, ALIAS, MEMORY], 4, "MEMORY of b"),
        ([*HEAD, CALL.replace('"a"', '"z"')], 3, "z is unknown"),
        ([*HEAD, CALL.replace('"3"', '"-3"')], 3, "negative"),
        ([*HEAD, CALL.replace('"3"', '"3.5"')], 3, "decimal"),
        ([*HEAD, CALL, MEMORY, ALIAS.replace("-1", "4")], 5, "alias"),
        ([*HEAD, CALL, MEMORY, ALIAS, CALL], 6, "ends|second"),
        ([*HEAD, '{"INSTRUCTION":"RELEASE","NAME":"a"}', '{"INSTRUCTION":"RELEASE","NAME":"a"}'],
         4, "more often"),
        ([*HEAD, '{"INSTRUCTION":"MUTATE","NAME":"g","ARGS":["a"],"MUTATE":[1],"TIME":"1"}'], 3,
         "does not have"),
    ],
)
def test_bad_logs_name_the_line(lines: list[str], line: int, words: str) -> None:
    with pytest.raises(LogError, match=words) as caught:
        parse_log(lines)
    assert caught.value.line == line
    assert pickle.loads(pickle.dumps(caught.value)).line == line


def test_lines_before_the_start_are_skipped() -> None:
    start = '{"INSTRUCTION":"ANNOTATE","ANNOTATION":"START"}'
    found = parse_log([*HEAD, start, *[h.replace('"a"', '"c"') for h in HEAD]])
    assert found.names == ["c"]


def test_unknown_release_is_ignored() -> None:
    found = parse_log([*HEAD, '{"INSTRUCTION":"RELEASE","NAME":"q"}'])
    assert found.memory == 4


def test_views_weigh_nothing_and_keep_their_storage() -> None:
    view = [CALL, MEMORY, ALIAS.replace("-1", "0"), '{"INSTRUCTION":"RELEASE","NAME":"a"}']
    found = parse_log([*HEAD, *view])
    assert found.memory == 4
    assert found.storages == [0, 0]


def test_a_file_with_a_missing_tail(tmp_path: Path) -> None:
    whole = "\n".join([*HEAD, CALL, MEMORY, ALIAS])
    with pytest.raises(LogError):
        parse_log(whole[:-9].splitlines())
