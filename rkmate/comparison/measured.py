"""Measure training steps in fresh processes: the peak of a step, and its time against eager's.

`Bench` writes a job into a folder and starts a process; `work`, in that process, does the job and leaves a
result there, or the error.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from rkmate import device as devices
from rkmate.api import wrap
from rkmate.comparison.table import Row
from rkmate.errors import ArgumentError
from rkmate.graph.capture.structure import take_apart
from rkmate.measure.step import measure_step
from rkmate.pipeline.loss import chosen_outputs
from rkmate.pipeline.settings import RunSettings, Settings, Trains
from rkmate.show.plan import Plan

ROUNDS = 9
"""Pairs of timed steps, one of the original model and one of what is measured."""
CHECKPOINT = "checkpoint_sequential"


class Bench:
    """Runs jobs on one model: a context in which the model and its inputs are in a file."""

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
                                f"measured in a process of its own: {error}. Leave measure=True out, or "
                                "define the model's class at the top of a module") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        assert self._folder is not None
        self._folder.cleanup()

    def measured(self, row: Row, plan: Plan) -> Row:
        """Return a row with the measured peak and time of a plan."""
        assert self._folder is not None
        plan.save(Path(self._folder.name) / PLAN)
        return self._run(row, {"kind": "plan"})

    def today(self) -> list[Row]:
        """Return the original model, and sequential checkpointing where it applies."""
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


MODEL, PLAN, JOB, RESULT, ERROR = "model.pt", "plan.json", "job.json", "result.json", "error.txt"

Step = Callable[[], torch.Tensor]


def work(folder: str) -> None:
    """Do the job of a folder and leave a result there, or the error."""
    place = Path(folder)
    try:
        result = _measure(place, json.loads((place / JOB).read_text(encoding="utf-8")))
    except Exception as error:            # whatever it is, the table shall say it
        (place / ERROR).write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
    else:
        (place / RESULT).write_text(json.dumps(result), encoding="utf-8")


def _measure(folder: Path, job: dict[str, Any]) -> dict[str, float]:
    torch.set_num_threads(job["threads"])
    torch.use_deterministic_algorithms(job["deterministic"])
    # The file was written by the parent process a moment ago; a whole module needs full unpickling.
    model, args, kwargs, settings = torch.load(folder / MODEL, weights_only=False)
    device = next(model.parameters()).device
    trains: Trains = settings.trains

    def step_of(run: Callable[[], Any]) -> Step:
        """Return a step of as many calls as the settings say."""
        def step() -> torch.Tensor:
            outputs = [run() for _ in range(settings.calls)]        # named, as plans count them
            return _backward(_sum([loss_of(output, trains) for output in outputs]), device)
        return step

    eager = step_of(lambda: model(*args, **kwargs))

    step: Step = eager
    trained: nn.Module = model
    if job["kind"] == "plan":
        trained = wrap(model, args, kwargs, plan=Plan.load(folder / PLAN), progress=False,
                       settings=replace(settings, run=RunSettings(verify=False)))
        planned = trained
        step = step_of(lambda: planned(*args, **kwargs))
    elif job["kind"] == "checkpoint":
        run: Any = checkpoint_sequential
        step = step_of(lambda: run(model, job["segments"], args[0], use_reentrant=False))
    peak = measure_step(trained, step, timeline=False).peak
    if job["kind"] == "eager":
        return {"peak": peak, "ratio": 1.0}
    return {"peak": peak, "ratio": interleaved(eager, step, job["rounds"])}


def interleaved(first: Step, second: Step, rounds: int) -> float:
    """Return the median, over rounds, of the second step's time relative to the first's; the steps take
    turns."""
    ratios = []
    for k in range(rounds + 1):
        seconds = []
        for step in (first, second):
            begin = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begin)
        if k:                             # the first round allocates gradients and warms caches
            ratios.append(seconds[1] / seconds[0])
    return statistics.median(ratios)


def loss_of(output: Any, trains: Trains = None) -> torch.Tensor:
    """Return a scalar to start a backward from: the output's ``loss``, else the sum of its scalars, else the
    means of its tensors' tanh; of those that `trains` names, where it does. Raises `ArgumentError` when
    nothing requires a gradient."""
    tensors, structure = take_apart(output, result=True)
    if trains is not None:
        chosen = chosen_outputs(structure, [t.requires_grad for t in tensors], trains)
        return _sum([_number(t) for t, c in zip(tensors, chosen, strict=True) if c])
    named = structure.index_of("loss")
    if named is not None and tensors[named].requires_grad and tensors[named].dim() == 0:
        return _number(tensors[named])
    able = [t for t in tensors if t.requires_grad]
    scalars = [t for t in able if t.dim() == 0]
    if not able:
        raise ArgumentError("no output requires a gradient, so there is no loss to train: check "
                            "requires_grad, or return a loss")
    return _sum([_number(t) for t in scalars or able])


def _number(found: torch.Tensor) -> torch.Tensor:
    """Return a real number that depends on all of a tensor: itself, or the mean of its tanh, which stays
    within what plans leave for a loss outside. Of complex numbers, it reads both parts."""
    parts = torch.view_as_real(found.resolve_conj()) if found.is_complex() else found
    if found.dim() == 0:
        return parts.sum() if found.is_complex() else found
    return parts.tanh().mean()


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _backward(loss: torch.Tensor, device: torch.device) -> torch.Tensor:
    loss.backward()
    devices.of(device).synchronize()
    return loss.detach()
