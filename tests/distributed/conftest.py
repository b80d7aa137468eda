"""What several ranks have found, for the tests that compare them."""

from __future__ import annotations

import pytest

from tests.distributed.ranks import Found, found_by_ranks


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What the ranks of a module's ``TASKS`` have found, by task; its ``RANKS`` are other options of
    `found_by_ranks`."""
    options = getattr(request.module, "RANKS", {})
    return found_by_ranks(request.module.__name__, tmp_path_factory.mktemp("ranks"), **options)
