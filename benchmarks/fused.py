"""rkmate with and without compiled groups (``compile=True``), beside torch.compile at its own budgets.

Each method in fresh processes, its steps interleaved with eager's: peak by the exact meter over the level
that stands before a step, time as ratio of medians, and seconds until the first step is done: with empty
caches of compiled kernels and of plans, and once more in a second process, which finds both.
Prints Markdown tables. ``--small`` is the same with tiny models, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from peers import MODELS, Case, Forward, budgeted, gpt, step
from torch import nn

import rkmate
from rkmate.measure.meter import measure_peak

FRACTIONS = ("1.0", "0.7", "0.5", "0.35")
METHODS = ("inductor 1.0", "inductor 0.5", *(f"rkmate {f}" for f in FRACTIONS),
           *(f"rkmate compiled {f}" for f in FRACTIONS))
NAMES = ("gpt", "gpt12", "resnet18", "unet", "t5", "vit")
SECONDS = 6
"""Steps are repeated for so long, at least."""


class _Tiny(nn.Module):
    """Two convolutions and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Conv2d(8, 8, 3), nn.SiLU())

    def forward(self, x: torch.Tensor) -> Any:
        """The mean of the squares, as models of transformers return it."""
        return transformers.utils.ModelOutput(loss=self.net(x).square().mean())


SMALL: dict[str, Callable[[], Case]] = {
    "gpt": lambda: gpt(2, 32, 32, 2, 128),
    "convolutions": lambda: Case(_Tiny(), {"x": torch.randn(2, 3, 16, 16)}, lambda m: [])}


def forward_of(name: str, case: Case, eager_peak: int) -> Forward:
    """A forward by some method; a budget that cannot be met ends the process."""
    *kind, fraction = name.split()
    if kind == ["inductor"]:
        return budgeted(case, "inductor", float(fraction))
    try:
        wrapped = rkmate.wrap(case.model, (), case.kwargs, budget=round(float(fraction) * eager_peak),
                              progress=False, compile="compiled" in kind)
    except rkmate.InfeasibleBudget as error:
        raise SystemExit(f"infeasible: at least {error.minimum_bytes / eager_peak:.0%}") from error
    return lambda: wrapped(**case.kwargs).loss


def one(models: dict[str, Callable[[], Case]], model: str, name: str, repeats: int) -> None:
    """Measure one method on one model; prints one line of JSON. Without repeats: how long it takes to get
    ready, alone."""
    transformers.logging.set_verbosity_error()
    cases = []
    for _ in range(2):
        torch.manual_seed(0)
        cases.append(models[model]())
        cases[-1].model.train()
    reference, case = cases

    def plain() -> Any:
        return reference.model(**reference.kwargs).loss

    step(plain, reference.model)
    eager_peak = measure_peak(lambda: step(plain, reference.model)).peak
    start = time.perf_counter()
    forward = forward_of(name, case, eager_peak)
    step(forward, case.model)
    found: dict[str, float] = {"ready": time.perf_counter() - start}
    if repeats:
        step(forward, case.model)
        found["peak"] = measure_peak(lambda: step(forward, case.model)).peak / eager_peak
        own, theirs = [], []
        start = time.perf_counter()
        while len(own) < repeats or time.perf_counter() - start < min(SECONDS, repeats):
            theirs.append(step(plain, reference.model))
            own.append(step(forward, case.model))
        found["time"] = statistics.median(own) / statistics.median(theirs)
    print(json.dumps(found))


def row(model: str, name: str, repeats: int, more: Sequence[str]) -> str:
    """A line of a table, measured in two processes that share empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
               "RKMATE_CACHE_DIR": f"{folder}/rk"}
        found = []
        for count in (0, repeats):
            done = subprocess.run(
                [sys.executable, __file__, "--one", model, name, "--repeats", str(count), *more],
                capture_output=True, text=True, check=False, env=env)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["no message"])[-1][:120]
                return f"| {name} | {reason} | | | |"
            found.append(json.loads(done.stdout.strip().splitlines()[-1]))
    first, r = found
    return f"| {name} | {r['peak']:.1%} | {r['time']:.2f} | {first['ready']:.1f} s | {r['ready']:.1f} s |"


def main() -> None:
    """Measure every method on the models asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", help=f"of {', '.join(MODELS)}; comma separated ({', '.join(NAMES)})")
    parser.add_argument("--methods", help="comma separated; all by default")
    parser.add_argument("--repeats", type=int, default=7, help=f"at least, and for {SECONDS} s")
    parser.add_argument("--small", action="store_true", help="tiny models")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    models = SMALL if options.small else MODELS
    if options.one:
        one(models, *options.one, options.repeats)
        return
    names = options.models.split(",") if options.models else list(SMALL if options.small else NAMES)
    for model in names:
        print(f"\n## {model}\n\n| method | peak | time | first step done | in a second process |"
              "\n|---|--:|--:|--:|--:|")
        for name in options.methods.split(",") if options.methods else METHODS:
            print(row(model, name, options.repeats, ["--small"] * options.small), flush=True)


if __name__ == "__main__":
    main()
