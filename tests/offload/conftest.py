"""A fixture of several files of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rkmate.offload.protocol import CopyEngine
from tests.offload.test_copy_engine import CPU, MIB, files, same, some, there_and_back


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[CopyEngine]:
    """One that works again after the test, and leaves nothing."""
    made = CPU.copy_engine(str(tmp_path), verify=True)
    yield made
    assert same(there_and_back(made, some(MIB + 5)), some(MIB + 5))
    made.close()
    assert not list(tmp_path.iterdir())
    assert not files(tmp_path)
