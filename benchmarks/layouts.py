"""Networks of convolutions with their channels last, CPU: eager and rkmate in both layouts, in one process.

Eager as the model is, eager after ``model.to(memory_format=torch.channels_last)``, and rkmate at fractions of
the model's own peak with ``Settings(layouts="keep")`` and ``"auto"``. The models are those of `peers`. Peaks
are measured by the CPU meter (`rkmate.measure_step`); the methods take their timed steps in turn, so that the
machine's mood is the same for all. Prints a table of Markdown: peaks and medians relative to eager's, and
what plans said.

Usage: OMP_NUM_THREADS=1 python benchmarks/layouts.py [--models regnet unet] [--steps 9] [--small]
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import peers
import torch
import transformers
from peers import Case, images
from torch import nn

import rkmate

FRACTIONS = (1.0, 0.7, 0.5)


def case_of(name: str, small: bool) -> Case:
    """A model of the tables, or a tiny one of its kind."""
    if not small:
        made: Case = getattr(peers, name)()
        return made
    if name == "unet":
        return Case(peers.Segmenter(), {"pixels": torch.randn(1, 3, 32, 32),
                                        "labels": torch.randint(0, 2, (1, 32, 32))}, lambda m: [])
    kind = "RegNet" if name == "regnet" else "ResNet"
    config = getattr(transformers, f"{kind}Config")(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1])
    return images(getattr(transformers, f"{kind}ForImageClassification")(config), 2, 32, lambda m: [])


MODELS = ("regnet", "unet", "resnet18", "resnet50")


def in_format(kwargs: dict[str, Any], form: torch.memory_format) -> dict[str, Any]:
    """The arguments, with images of a layout."""
    return {k: v.contiguous(memory_format=form) if v.dim() == 4 else v for k, v in kwargs.items()}


def step(model: nn.Module, kwargs: dict[str, Any]) -> None:
    """A training step without its optimizer."""
    model(**kwargs).loss.backward()


def measured(name: str, steps: int, small: bool, fractions: Sequence[float]) -> list[str]:
    """Rows of the table: one model, every method."""
    torch.manual_seed(0)
    case = case_of(name, small)
    model, kwargs, last = case.model.train(), case.kwargs, torch.channels_last
    methods = {"eager": (model, kwargs), "eager, channels last": (
        copy.deepcopy(model).to(memory_format=last), in_format(kwargs, last))}
    said = dict.fromkeys(methods, "")
    for fraction in fractions:
        for layouts in ("keep", "auto"):
            start = time.perf_counter()
            module = rkmate.wrap(copy.deepcopy(model), (), kwargs, budget=fraction, progress=False,
                                 settings=rkmate.Settings(layouts=layouts))
            key = f"rkmate {fraction}, {layouts}"
            methods[key] = module, kwargs
            plan = module.plan
            share = plan.step_seconds / plan.baseline_seconds
            said[key] = f"{plan.variant}, {share:.2f} of the original's, {time.perf_counter() - start:.0f} s"
    peaks = {key: rkmate.measure_step(m, functools.partial(step, m, given), timeline=False).peak
             for key, (m, given) in methods.items()}
    times: dict[str, list[float]] = {key: [] for key in methods}
    for _ in range(steps):
        for key, (m, given) in methods.items():
            m.zero_grad(set_to_none=False)
            start = time.perf_counter()
            step(m, given)
            times[key].append(time.perf_counter() - start)
    reference = statistics.median(times["eager"])
    return [f"| {name} | {key} | {peaks[key] / peaks['eager']:.1%} "
            f"| {statistics.median(times[key]) / reference:.3f} | {said[key]} |" for key in methods]


def main() -> None:
    """Measure, and print a table of Markdown."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--fractions", nargs="+", type=float, default=list(FRACTIONS))
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--small", action="store_true", help="tiny models: does it run?")
    options = parser.parse_args()
    print("| model | method | peak | time | plan |\n|---|---|---|---|---|")
    for name in options.models:
        for row in measured(name, options.steps, options.small, options.fractions):
            print(row, flush=True)


if __name__ == "__main__":
    main()
