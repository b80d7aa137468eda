"""A training step measured beside eager's, and rows of measurements that stand in a file."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from rkmate.measure.step import measure_peak

Forward = Callable[[], Any]
"""Runs a forward and returns the loss."""
R = TypeVar("R")


@dataclass(frozen=True)
class Beside:
    """A method's step, and eager's."""

    peak: int
    """Of the method, in bytes over the level that stands before a step."""
    seconds: float
    """Of the method: the median."""
    eager_seconds: float
    """The same of eager's steps, taken in turn with the method's."""

    @property
    def ratio(self) -> float:
        """The method's time, eager's being one."""
        return self.seconds / self.eager_seconds


def step(forward: Forward, module: nn.Module) -> float:
    """Seconds of a step. Gradients stand from step to step, as zeros."""
    for p in module.parameters():
        if p.grad is not None:
            p.grad.zero_()
    start = time.perf_counter()
    forward().backward()
    return time.perf_counter() - start


def peak_of(forward: Forward, module: nn.Module) -> int:
    """The peak of a step in bytes, once its gradients stand."""
    step(forward, module)
    return measure_peak(lambda: step(forward, module)).peak


def beside(eager: Forward, reference: nn.Module, forward: Forward, module: nn.Module, repeats: int,
           least_seconds: float = 0.0) -> Beside:
    """Measure a method's steps in turn with eager's, `repeats` times and for `least_seconds` at least. Of one
    repeat, the step whose peak is measured is the one that warms up."""
    if repeats > 1:
        step(forward, module)
    peak = measure_peak(lambda: step(forward, module)).peak
    own, theirs = [], []
    start = time.perf_counter()
    while len(own) < repeats or time.perf_counter() - start < least_seconds:
        theirs.append(step(eager, reference))
        own.append(step(forward, module))
    return Beside(peak, statistics.median(own), statistics.median(theirs))


def read_rows(kind: Callable[..., R], path: Path | None) -> list[R]:
    """The rows of a file of JSON lines; none where there is no file."""
    if path is None or not path.exists():
        return []
    return [kind(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def add_row(row: Any, path: Path | None) -> None:
    """Print a row, and put it into a file, where one is given."""
    line = json.dumps(asdict(row))
    print(line, flush=True)
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def options_of(about: str | None, models: Iterable[str], rows: Path, page: Path, folders: Iterable[str] = ()
               ) -> tuple[argparse.Namespace, list[str]]:
    """The options of a benchmark whose rows stand in a page, and the models that are asked for. `folders`:
    further options, each of which names a folder."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--models", default="", help=f"all, or some of {', '.join(models)}")
    parser.add_argument("--repeats", type=int, default=0, help="steps that are timed; 0: memory alone")
    parser.add_argument("--rows", type=Path, default=rows)
    parser.add_argument("--write", action="store_true", help=f"write {page.name}")
    for option in folders:
        parser.add_argument(option, type=Path)
    options = parser.parse_args()
    return options, [*models] if options.models == "all" else [*filter(None, options.models.split(","))]


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replace what stands between two marks of a page."""
    head, rest = page.read_text(encoding="utf-8").split(begin)
    page.write_text(f"{head}{begin}{text}{end}{rest.split(end)[1]}", encoding="utf-8")
