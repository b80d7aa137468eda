"""One measurement in a fresh process: the peak of a training step, and its time against eager's."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from rkmate import device as devices
from rkmate.api import wrap
from rkmate.errors import ArgumentError
from rkmate.graph.capture.structure import take_apart
from rkmate.measure.step import measure_step
from rkmate.pipeline.settings import RunSettings, Trains
from rkmate.pipeline.trained_outputs import chosen_outputs
from rkmate.show.plan import Plan

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
        """A step of as many calls as the settings say."""
        return lambda: _backward(_sum([loss_of(run(), trains) for _ in range(settings.calls)]), device)

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
    """Median over rounds of the second's time over the first's, taken in turns."""
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
    """A scalar to start a backward from: the output's ``loss``, else the sum of its scalars, else
    the means of its tensors' tanh; of those that `trains` names, where it does. Raises `ArgumentError`
    when nothing requires a gradient."""
    tensors, structure = take_apart(output, result=True)
    if trains is not None:
        chosen = chosen_outputs(structure, [t.requires_grad for t in tensors], trains)
        return _sum([t if t.dim() == 0 else t.tanh().mean()
                     for t, c in zip(tensors, chosen, strict=True) if c])
    named = structure.index_of("loss")
    if named is not None and tensors[named].requires_grad and tensors[named].dim() == 0:
        return tensors[named]
    able = [t for t in tensors if t.requires_grad]
    scalars = [t for t in able if t.dim() == 0]
    if not able:
        raise ArgumentError("no output requires a gradient, so there is no loss to train")
    return _sum(scalars or [t.tanh().mean() for t in able])    # within what plans leave for a loss outside


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _backward(loss: torch.Tensor, device: torch.device) -> torch.Tensor:
    loss.backward()
    devices.of(device).synchronize()
    return loss.detach()
