"""Options on disk, so that a block that was solved once is never solved again.

One JSON file per block. Its name is a hash of the block's structure and sizes, of the settings and
of the package's version. Times are measured and never the same twice, so they are stored inside:
an entry serves while the block's times are close to those that it was solved with, and every
option is judged anew by the simulator with the block's own times and sizes. An entry can therefore
be old, broken or edited without ever giving a wrong number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rkmate.errors import ScheduleError
from rkmate.ilp.grid import OptionSet, evaluate_option, undominated
from rkmate.ilp.settings import OptionSettings
from rkmate.ir.cd import CDGraph
from rkmate.support.cache import read_json, store_json
from rkmate.support.version import source_state
from rkmate.support.warn import warn

FORMAT = 1
"""Grows when the content of an entry changes its meaning."""


def fingerprint(graph: CDGraph, settings: OptionSettings) -> str:
    """Hash everything that the options of a block depend on, except names and times."""
    label = _labels(graph)
    data: list[tuple[int, str]] = [(0, "")] * len(graph.d)
    for j, d in enumerate(graph.d):
        data[label[j]] = d.size, d.kind

    def labels(ds: Iterable[int]) -> list[int]:
        return sorted({label[j] for j in ds})

    content = [
        FORMAT, source_state(), sorted(asdict(settings).items()), data,
        [(c.phase, labels(c.inputs), labels(c.outputs), c.overhead, c.random,
          [label[j] for j in c.donors]) for c in graph.c],
        graph.loss, labels(graph.inputs), labels(graph.outputs), labels(graph.output_grads),
        labels(graph.input_grads), sorted((label[j], i) for j, i in graph.releases.items()),
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _labels(graph: CDGraph) -> list[int]:
    """Return a number for each D node that does not depend on how they are numbered in the graph.

    What a C node creates is named by its place; what comes from outside by all that is known of it
    (those that are alike in everything are interchangeable).
    """
    made = [j for c in graph.c for j in c.outputs]
    groups = (graph.inputs, graph.outputs, graph.output_grads, graph.input_grads)

    def description(j: int) -> tuple[Any, ...]:
        d = graph.d[j]
        return (d.size, d.kind, graph.readers[j], *(j in g for g in groups),
                graph.releases.get(j, -1))

    external = sorted(set(range(len(graph.d))).difference(made), key=description)
    label = [0] * len(graph.d)
    for k, j in enumerate([*made, *external]):
        label[j] = k
    return label


@dataclass(frozen=True)
class OptionCache:
    """Entries in one folder. Safe under concurrent writers: a file appears whole or not at all."""

    folder: Path
    tolerance: float = 0.05
    """An entry serves when the times of the nodes differ from its own by at most this fraction of
    the block's whole time, summed over the nodes. 0: only for exactly the same times."""

    def _path(self, graph: CDGraph, settings: OptionSettings) -> Path:
        return self.folder / "options" / f"{fingerprint(graph, settings)}.json"

    def load(self, graph: CDGraph, settings: OptionSettings) -> OptionSet | None:
        """Return the stored options, judged for this graph; None when there are none that serve."""
        entry = read_json(self._path(graph, settings))
        if entry is None:
            return None
        try:
            if not self._close(graph, entry["times"]):
                return None
            orders = [_order(graph, order) for order in entry["backward"]]
            options = undominated(evaluate_option(graph, order) for order in orders)
            timed_out = int(entry["timed_out"])
        except (ValueError, KeyError, TypeError, IndexError, ScheduleError):
            return None   # of another graph, or edited: it will be replaced
        if not options:
            return None
        return OptionSet(options, solves=0, timed_out=timed_out, seconds=0.0)

    def _close(self, graph: CDGraph, times: Any) -> bool:
        if len(times) != len(graph.c):
            raise ValueError("times of another graph")
        apart = sum(abs(c.time - float(t)) for c, t in zip(graph.c, times, strict=True))
        return apart <= self.tolerance * sum(c.time for c in graph.c)

    def store(self, graph: CDGraph, settings: OptionSettings, found: OptionSet) -> None:
        """Write an entry, replacing what was there. Warns when the folder cannot be written."""
        path = self._path(graph, settings)
        entry = {"times": [c.time for c in graph.c], "timed_out": found.timed_out,
                 "backward": [list(o.backward) for o in found.options]}
        error = store_json(path, entry)
        if error is not None:
            warn(
                f"the cache folder {self.folder} cannot be written ({error.strerror}): these "
                "options will be solved again next time; RKMATE_CACHE_DIR names another folder")


def _order(graph: CDGraph, order: Any) -> tuple[int, ...]:
    """Return a backward order from an entry. Raises `ValueError` if the order does not belong to this
    graph."""
    if any(type(i) is not int or not 0 <= i < len(graph.c) for i in order):
        raise ValueError("a node that the graph does not have")
    if [i for i in order if i >= graph.loss] != list(graph.backward):
        raise ValueError("backward nodes run once each, in order")
    return tuple(order)
