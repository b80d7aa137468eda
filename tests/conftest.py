"""What holds for all tests: where plans are remembered, and what needs a GPU."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

# torch, the package and hypothesis are imported where tests run: the process that starts the workers of
# pytest-xdist needs none of them, and these wait for it.

_MADE: list[Path] = []
_DEFAULTS = ExitStack()


def pytest_configure(config: pytest.Config) -> None:
    """A cache of the run's own: what an earlier run left decides nothing. Workers inherit it."""
    if config.getoption("dist", "no") == "no":          # tests run in this process, not in its workers
        _set_defaults()
    # From torch 2.15 on, each product on a GPU takes a workspace, larger than the models here.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "128")     # not more than that one, in KiB
    if not hasattr(config, "workerinput"):
        _MADE.append(Path(tempfile.mkdtemp(prefix="rkmate-tests-")))
        os.environ["RKMATE_CACHE_DIR"] = str(_MADE[0])
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As in the background of a shell; tests interrupt themselves.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _set_defaults() -> None:
    """Smallest budgets are those of the original's operations, whose bits are compared; tests of tiles ask
    for them. Each run tries the same random examples; `make slow` looks for new ones."""
    from hypothesis import HealthCheck, settings

    from rkmate.pipeline.settings import WHEN_TILED

    _DEFAULTS.enter_context(WHEN_TILED.within("never"))
    lenient: Any = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("same", derandomize=True, database=None, **lenient)
    settings.register_profile("new", **lenient)
    settings.load_profile("new" if os.environ.get("RKMATE_NEW_EXAMPLES") else "same")


def pytest_unconfigure() -> None:
    """The run's cache goes with it."""
    _DEFAULTS.close()
    for folder in _MADE:
        shutil.rmtree(folder, ignore_errors=True)
        os.environ.pop("RKMATE_CACHE_DIR", None)
    _MADE.clear()


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported stays: the collector of garbage need not go through it, now or later."""
    gc.disable()
    yield
    _freeze()
    gc.enable()


_FROZEN_MODULES = 0
_MANY_MODULES = 50


def _freeze() -> None:
    """Leave all objects that there are to no collection, and to nobody who looks through the collector's."""
    global _FROZEN_MODULES
    gc.freeze()
    _FROZEN_MODULES = len(sys.modules)


@pytest.fixture(autouse=True)
def frozen_imports() -> Iterator[None]:
    """What a test has imported stays, too."""
    yield
    if len(sys.modules) >= _FROZEN_MODULES + _MANY_MODULES:
        gc.collect()
        _freeze()


@pytest.fixture(autouse=True, scope="module")
def frozen_remains() -> Iterator[None]:
    """What a file of tests has left in caches stays: steps that are measured look through all objects."""
    yield
    gc.collect()
    gc.freeze()


# -- How long each test takes ----------------------------------------------------------------------

DURATIONS = Path(__file__).with_name("durations.json")
"""Processor seconds of the tests that take longest, with their set-up: from `make durations`."""
LEAST_RECORDED, LONG = 1.0, 1.2
"""Processor seconds from which a test stands in the record, and from which it is `long`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--record-durations FOLDER`: each process writes there what each test has taken."""
    parser.addoption("--record-durations", metavar="FOLDER")


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Record what a test takes, with its set-up, if that is asked for."""
    folder, begun = item.config.getoption("record_durations"), _processor_seconds()
    yield
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with Path(folder, f"{os.getpid()}.jsonl").open("a") as file:
            print(json.dumps([_name(item), _processor_seconds() - begun]), file=file)


def _processor_seconds() -> float:
    """Return those of this process and of the processes that it has waited for: other work does not count."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _group(item: pytest.Item) -> str:
    """Return the group of a test, whose tests share what is set up for them; empty for none."""
    marker = item.get_closest_marker("xdist_group")
    return "" if marker is None else str(marker.args[0] if marker.args else marker.kwargs["name"])


def _name(item: pytest.Item) -> str:
    """Return a test's name, without the group that pytest-xdist puts behind it."""
    return item.nodeid.removesuffix(f"@{_group(item)}")


def write_durations(folder: Path) -> None:
    """Write the record from what processes have written to a folder."""
    rows = [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    kept = {name: round(seconds, 1) for name, seconds in rows if seconds >= LEAST_RECORDED}
    DURATIONS.write_text(json.dumps(dict(sorted(kept.items())), indent=0) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that take long, and those that share their set-up; their files begin first, so that no
    process waits for another at the end. Tests marked `gpu` are skipped where there is none."""
    import torch

    seconds = json.loads(DURATIONS.read_text())
    longest: dict[Any, float] = {}
    for item in items:
        for key in (item.path, (item.path, _group(item) or item)):
            longest[key] = max(longest.get(key, 0.0), seconds.get(_name(item), 0.0))
    items.sort(key=lambda item: -longest[item.path])
    for item in items:
        if longest[item.path, _group(item) or item] >= LONG:
            item.add_marker("long")
        if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def impatient() -> Iterator[None]:
    """Every test searches briefly."""
    from tests.options import few_seconds

    with few_seconds():
        yield


@pytest.fixture(autouse=True)
def searched_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds a plan that another one has searched for, perhaps with other functions in the place of
    the package's."""
    from rkmate.pipeline import search

    monkeypatch.setattr(search, "place_of", lambda *of: None)


@pytest.fixture(autouse=True)
def verified_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every graph that a test simplifies is verified after each pass."""
    from rkmate.graph.passes import table

    monkeypatch.setattr(table, "VERIFY", True)


@pytest.fixture(autouse=True)
def no_accelerator_before() -> Iterator[None]:
    """Accelerate keeps its precision for the whole process: each test begins without one."""
    _forget_accelerator()
    yield
    _forget_accelerator()


def _forget_accelerator() -> None:
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """One order of additions, for results that can be compared bit for bit."""
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
