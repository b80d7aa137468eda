"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate.errors import RkmateWarning
from rkmate.support.cache import read_json, write_json


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files can be opened, and take half of what is written."""
    write = Path.write_text

    def half(path: Path, text: str, **options: Any) -> int:
        write(path, text[:len(text) // 2], **options)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", half)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert read_json(path) is None
    write_json(path, {"a": [1, 2.5, None, "é"]})
    write_json(path, {"a": [1, 2.5, None, "é"], "b": True}, indent=1)
    assert read_json(path) == {"a": [1, 2.5, None, "é"], "b": True}
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_json(path, [1])
    full_disk(monkeypatch)
    with pytest.raises(OSError, match="No space"):
        write_json(path, [2])
    assert read_json(path) == [1]
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "no"), KeyboardInterrupt()])
def test_a_replacement_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                 error: BaseException) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(type(error)):
        write_json(tmp_path / "a.json", [1])
    assert os.listdir(tmp_path) == []


def test_what_is_no_json_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", object())
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": ', b"\xff\xfe"])
def test_a_broken_file_counts_as_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.warns(RkmateWarning, match=r"a\.json is broken"):
        assert read_json(path) is None


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    link, path = tmp_path / "link.json", tmp_path / "a.json"
    link.symlink_to(path)
    write_json(link, [1])
    assert link.is_symlink() and json.loads(path.read_text()) == [1]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    write_json(pipe, [1])
    reader.join()
    assert got == ["[1]\n"] and pipe.is_fifo()


def test_the_mode_is_what_the_user_asks_of_all_files(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    write_json(tmp_path / "a.json", [1])
    assert (tmp_path / "a.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_many_writers_leave_one_whole_file(tmp_path: Path) -> None:
    path, wrong = tmp_path / "a.json", []

    def work(number: int) -> None:
        for _ in range(50):
            write_json(path, [number] * 1000)
            if len(set(read_json(path))) != 1:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and os.listdir(tmp_path) == ["a.json"]


def test_a_full_disk_leaves_no_half_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1))
    plan = rkmate.plan(model, (torch.randn(2, 4),), budget=1.0, settings=rkmate.Settings(costs="analytic"),
                       progress=False)
    path = tmp_path / "plan.json"
    plan.save(path)
    full_disk(monkeypatch)
    with pytest.raises(OSError, match="No space"):
        plan.save(path)
    with pytest.raises(OSError, match="No space"):
        plan.save(tmp_path / "new.json")
    assert rkmate.Plan.load(path) == plan
    assert os.listdir(tmp_path) == ["plan.json"]
