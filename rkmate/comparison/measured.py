"""Measuring training steps in processes of their own."""

from __future__ import annotations

import json
import math
import multiprocessing
import pickle
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from rkmate.comparison.table import Row
from rkmate.comparison.worker import ERROR, JOB, MODEL, PLAN, RESULT, work
from rkmate.errors import ArgumentError
from rkmate.pipeline.settings import Settings
from rkmate.show.plan import Plan

ROUNDS = 9
"""Pairs of timed steps, one of the original model and one of what is measured."""
CHECKPOINT = "checkpoint_sequential"


class Bench:
    """Runs jobs on one model: a context in which the model and its inputs stand in a file."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any],
                 settings: Settings | None = None) -> None:
        self._settings = settings or Settings()
        self._model, self._args, self._kwargs = model, args, dict(kwargs)
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Bench:
        self._folder = tempfile.TemporaryDirectory(prefix="rkmate-")
        try:
            torch.save((self._model, self._args, self._kwargs, self._settings),
                       Path(self._folder.name) / MODEL)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            self._folder.cleanup()
            raise ArgumentError(f"{type(self._model).__name__} cannot be pickled, so it cannot be "
                                f"measured in a process of its own: {error}") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        assert self._folder is not None
        self._folder.cleanup()

    def measured(self, row: Row, plan: Plan) -> Row:
        """A row with the measured peak and time of a plan."""
        assert self._folder is not None
        plan.save(Path(self._folder.name) / PLAN)
        return self._run(row, {"kind": "plan"})

    def today(self) -> list[Row]:
        """The original model, and sequential checkpointing where it applies."""
        rows = [self._run(Row("eager", None, "ok", None), {"kind": "eager"})]
        why = self._not_sequential()
        if why is not None:
            return [*rows, Row(CHECKPOINT, None, "does not apply", None, note=why)]
        children = len(self._model)  # type: ignore[arg-type]
        for count in sorted({2, max(2, math.isqrt(children)), max(2, children // 2)}):
            row = Row(f"{CHECKPOINT} {count}", None, "ok", None, note=f"{count} segments")
            rows.append(self._run(row, {"kind": "checkpoint", "segments": count}))
        return rows

    def _not_sequential(self) -> str | None:
        if not isinstance(self._model, nn.Sequential):
            return f"{type(self._model).__name__} is no nn.Sequential"
        if len(self._model) < 2 or len(self._args) != 1 or self._kwargs:
            return "it takes two children or more and one positional input"
        return None

    def _run(self, row: Row, job: Mapping[str, Any]) -> Row:
        assert self._folder is not None
        folder = Path(self._folder.name)
        for name in (RESULT, ERROR):
            (folder / name).unlink(missing_ok=True)
        everything = {**job, "rounds": ROUNDS, "threads": torch.get_num_threads(),
                      "deterministic": torch.are_deterministic_algorithms_enabled()}
        (folder / JOB).write_text(json.dumps(everything), encoding="utf-8")
        process = multiprocessing.get_context("spawn").Process(target=work, args=(str(folder),))
        process.start()
        process.join()
        if (folder / RESULT).exists():
            result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
            return replace(row, measured_peak_bytes=int(result["peak"]),
                           measured_ratio=float(result["ratio"]))
        if (folder / ERROR).exists():
            why = (folder / ERROR).read_text(encoding="utf-8")
        else:
            why = (f"the process ended with status {process.exitcode}; a script that measures needs "
                   'an `if __name__ == "__main__":` guard')
        return replace(row, status="failed", note=why)
