"""Several blocks at once, and the cache on disk."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from rkmate.errors import ArgumentError, RkmateWarning
from rkmate.ilp import solve_all
from rkmate.ilp.cache import OptionCache, fingerprint
from rkmate.ilp.grid import OptionSet, block_options
from rkmate.ilp.settings import OptionSettings
from rkmate.ilp.solve_all import solve_options
from rkmate.ir.cd import CDGraph
from rkmate.support.cache import cache_folder
from tests.ilp.bank import chain, mlp_half

SMALL = OptionSettings(grid=(3, 3), time_limit=30, block_limit=60)


def renamed(graph: CDGraph) -> CDGraph:
    return replace(graph, d=tuple(replace(d, name=f"other_{d.name}") for d in graph.d),
                   c=tuple(replace(c, name=f"other_{c.name}") for c in graph.c))


def renumbered(graph: CDGraph) -> CDGraph:
    """The same graph with its D nodes in another order."""
    n = len(graph.d)
    new = [n - 1 - j for j in range(n)]

    def moved(ds: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(new[j] for j in ds))

    return CDGraph(
        tuple(graph.d[n - 1 - k] for k in range(n)),
        tuple(replace(c, inputs=moved(c.inputs), outputs=tuple(new[j] for j in c.outputs))
              for c in graph.c),
        graph.loss, moved(graph.inputs), moved(graph.outputs), moved(graph.output_grads),
        moved(graph.input_grads), {new[j]: i for j, i in graph.releases.items()}).verify()


def slower(graph: CDGraph, factor: float) -> CDGraph:
    return replace(graph, c=tuple(replace(c, time=c.time * factor) for c in graph.c))


def entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.json"))


def test_several_workers_give_what_one_gives(tmp_path: Path) -> None:
    graphs = [mlp_half(), chain(8), chain(9, seed=1), chain(8)]
    seen: list[tuple[int, int]] = []
    one = solve_options(graphs, SMALL, workers=1, cache=False)
    two = solve_options(graphs, SMALL, workers=2, cache=OptionCache(tmp_path),
                        on_progress=lambda done, total: seen.append((done, total)))
    assert [s.options for s in one] == [s.options for s in two]
    assert seen[-1] == (4, 4)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert two[1] is two[3], "equal graphs are solved once"
    assert len(entries(tmp_path)) == 3


def test_no_graphs() -> None:
    assert solve_options([], SMALL, cache=False) == []


def test_a_second_run_solves_nothing(tmp_path: Path) -> None:
    cache = OptionCache(tmp_path)
    first, = solve_options([mlp_half()], SMALL, cache=cache)
    second, = solve_options([renamed(mlp_half())], SMALL, cache=cache)
    assert first.solves > 0
    assert second.solves == 0
    assert second.options == first.options


def test_other_settings_sizes_or_wiring_are_other_entries() -> None:
    graph = mlp_half()
    keys = {fingerprint(graph, SMALL), fingerprint(graph, replace(SMALL, grid=(3, 4))),
            fingerprint(mlp_half(width=512), SMALL), fingerprint(chain(8), SMALL),
            fingerprint(replace(graph, releases={}), SMALL)}
    assert len(keys) == 5
    assert fingerprint(renamed(graph), SMALL) in keys
    assert fingerprint(renumbered(graph), SMALL) in keys


def test_times_that_moved_a_little_are_served_with_their_own_seconds(tmp_path: Path) -> None:
    cache = OptionCache(tmp_path)
    graph = mlp_half()
    first, = solve_options([graph], SMALL, cache=cache)
    near, = solve_options([slower(graph, 1.04)], SMALL, cache=cache)
    assert near.solves == 0
    assert near.options[0].backward_seconds == pytest.approx(
        1.04 * first.options[0].backward_seconds)
    far, = solve_options([slower(graph, 1.2)], SMALL, cache=cache)
    assert far.solves > 0
    strict, = solve_options([slower(graph, 1.21)], SMALL, cache=replace(cache, tolerance=0.0))
    assert strict.solves > 0


@pytest.mark.parametrize("damage", [
    "", "{", "[]", "null", '{"times": 3}', '{"times": [], "timed_out": 0, "backward": []}',
    '{"times": %s, "timed_out": 0, "backward": []}',
    '{"times": %s, "timed_out": 0, "backward": [[0]]}',
    '{"times": %s, "timed_out": 0, "backward": [[99999]]}',
    '{"times": %s, "timed_out": 0, "backward": ["abc"]}',
    '{"times": %s, "timed_out": 0, "backward": 7}',
])
def test_a_broken_entry_is_ignored_and_replaced(tmp_path: Path, damage: str) -> None:
    cache = OptionCache(tmp_path)
    graph = mlp_half()
    first, = solve_options([graph], SMALL, cache=cache)
    path, = entries(tmp_path)
    path.write_text(damage % [c.time for c in graph.c] if "%" in damage else damage)
    no_json = damage in ("", "{")
    with pytest.warns(RkmateWarning, match="is broken") if no_json else nullcontext():
        again, = solve_options([graph], SMALL, cache=cache)
    assert again.solves > 0
    assert again.options == first.options
    served, = solve_options([graph], SMALL, cache=cache)
    assert served.solves == 0


def test_an_order_that_cannot_run_is_a_broken_entry(tmp_path: Path) -> None:
    """An edited entry that skips a recomputation would read what is not there."""
    graph = mlp_half()
    cache = OptionCache(tmp_path)
    cache.store(graph, SMALL, block_options(graph, SMALL))
    path, = entries(tmp_path)
    backward = list(graph.backward)
    text = '{"times": %s, "timed_out": 0, "backward": [%s]}'
    path.write_text(text % ([c.time for c in graph.c], [*backward[1:], backward[0]]))
    assert cache.load(graph, SMALL) is None


def test_many_writers_leave_one_whole_entry(tmp_path: Path) -> None:
    graph = chain(8)
    found = block_options(graph, SMALL)
    cache = OptionCache(tmp_path)
    wrong: list[object] = []

    def work() -> None:
        for _ in range(30):
            cache.store(graph, SMALL, found)
            loaded = cache.load(graph, SMALL)
            if loaded is None or loaded.options != found.options:
                wrong.append(loaded)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert [p.suffix for p in (tmp_path / "options").iterdir()] == [".json"]


def test_a_folder_that_cannot_be_written_warns(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.warns(RkmateWarning, match="RKMATE_CACHE_DIR"):
        found, = solve_options([chain(5)], SMALL, cache=OptionCache(blocked))
    assert found.options


def test_the_folder_follows_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RKMATE_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_folder() == Path.home() / ".cache" / "rkmate"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder() == tmp_path / "x" / "rkmate"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder() == Path.home() / "Library" / "Caches" / "rkmate"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache_folder() == tmp_path / "local" / "rkmate" / "Cache"
    monkeypatch.setenv("RKMATE_CACHE_DIR", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"


def test_the_default_cache_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RKMATE_CACHE_DIR", str(tmp_path))
    solve_options([chain(5)], SMALL)
    assert len(entries(tmp_path)) == 1
    assert solve_options([chain(5)], SMALL)[0].solves == 0


def test_many_blocks_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets its share of what is left; what one does not take is for the others."""
    limits: list[float] = []
    clock = [0.0]

    def taken(graph: CDGraph, settings: OptionSettings, **_: object) -> OptionSet:
        limits.append(settings.block_limit)
        clock[0] += 0.0 if len(limits) == 1 else settings.block_limit
        return OptionSet((), 0, 0, 0.0)

    monkeypatch.setattr(solve_all, "block_options", taken)
    monkeypatch.setattr(solve_all.time, "perf_counter", lambda: clock[0])
    solve_options([chain(n) for n in range(4, 10)], OptionSettings(total_limit=30, block_limit=7),
                  workers=1, cache=False)
    assert limits == pytest.approx([5, 6, 6, 6, 6, 6])
    limits.clear()
    solve_options([chain(5), chain(6)], OptionSettings(total_limit=30, block_limit=7), workers=1,
                  cache=False)
    assert limits == [7, 7]


def test_an_error_in_a_worker_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> OptionSet:
        raise MemoryError("no room")

    monkeypatch.setattr(solve_all, "block_options", fail)
    with pytest.raises(MemoryError, match="no room"):
        solve_options([chain(5), chain(6)], SMALL, workers=2, cache=False)


def test_an_interrupt_stops_the_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ctrl-C in the middle of a long solve: every worker ends, and no half entry is left."""
    started = threading.Event()
    honest = solve_all.block_options

    def announced(*args: object, **kwargs: object) -> OptionSet:
        started.set()
        return honest(*args, **kwargs)  # type: ignore[arg-type]

    def interrupt(_: object) -> object:
        started.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr(solve_all, "block_options", announced)
    monkeypatch.setattr(solve_all, "_next", interrupt)
    long = OptionSettings(time_limit=600, block_limit=600)
    with pytest.raises(KeyboardInterrupt):
        solve_options([chain(60, skips=0.3)], long, cache=OptionCache(tmp_path))
    assert not [t for t in threading.enumerate() if t.name.startswith("rkmate-options")]
    assert not list(tmp_path.rglob("*.*"))


def test_wrong_workers() -> None:
    with pytest.raises(ArgumentError, match="workers"):
        solve_options([chain(5)], SMALL, workers=0, cache=False)


def test_no_module_here_imports_torch() -> None:
    """The integer program works on sizes, times and edges."""
    code = ("import sys, types, importlib\n"
            "package = types.ModuleType('rkmate'); package.__path__ = [sys.argv[1]]\n"
            "sys.modules['rkmate'] = package\n"
            "importlib.import_module('rkmate.ilp')\n"
            "assert 'torch' not in sys.modules\n")
    package = Path(solve_all.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code, os.fspath(package)], check=True)
