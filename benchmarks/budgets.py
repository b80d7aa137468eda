"""Measure one model at twenty budgets: the peak never exceeds the budget, never falls as the budget
grows, and is as predicted. Also measure twenty fractions of torch.compile's
`activation_memory_budget`. Prints a Markdown table; ``--write`` draws docs/images/budgets-MODEL.svg.

Peaks are measured with the exact meter; parameter gradients are allocated beforehand.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import torch
import transformers
from beside import Forward
from peers import DOCS, MODELS, budgeted

import rkmate
from rkmate.measure.step import measure_peak

COUNT = 20


def peak(forward: Forward, model: torch.nn.Module) -> int:
    """Of a step after the first two, in bytes."""
    def step() -> None:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.zero_()
        forward().backward()

    step()
    step()
    return measure_peak(step).peak


def peer(name: str, fraction: float) -> None:
    """One fraction of `activation_memory_budget`, in a process of its own."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    case = MODELS[name]()
    case.model.train()
    eager = peak(lambda: case.model(**case.kwargs).loss, case.model)
    print(json.dumps(peak(budgeted(case, "aot_eager", fraction), case.model) / eager))


def ours(name: str) -> list[tuple[float, float, float, float]]:
    """(budget, predicted peak, measured peak: parts of eager's peak; predicted time ratio) for each."""
    torch.manual_seed(0)
    case = MODELS[name]()
    case.model.train()
    eager = peak(lambda: case.model(**case.kwargs).loss, case.model)
    try:
        rkmate.plan(case.model, (), case.kwargs, budget=1, progress=False)
    except rkmate.InfeasibleBudget as error:
        low = error.minimum_bytes
    budgets = [low + (eager - low) * k // (COUNT - 1) for k in range(COUNT)]
    result = []
    for plan in rkmate.tradeoff(case.model, (), case.kwargs, budgets=budgets, progress=False):
        wrapped = rkmate.wrap(case.model, (), case.kwargs, plan=plan, progress=False)
        measured = peak(lambda w=wrapped: w(**case.kwargs).loss, case.model)
        result.append((plan.budget_bytes / eager, plan.peak_bytes / eager, measured / eager,
                       1 + plan.overhead))
        del wrapped
    return result


def main() -> None:
    """Measure, check, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="gpt,resnet18,llama32")
    parser.add_argument("--peer", action="store_true", help="activation_memory_budget, too (minutes)")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        peer(options.one[0], float(options.one[1]))
        return
    transformers.logging.set_verbosity_error()
    for name in options.models.split(","):
        found = ours(name)
        print(f"\n{name}\n\n| budget | predicted peak | measured peak | predicted time |\n|--:|--:|--:|--:|")
        for row in found:
            print(f"| {row[0]:.1%} | {row[1]:.2%} | {row[2]:.2%} | {row[3]:.3f} |")
        over = sum(m > b for b, _, m, _ in found)
        falls = sum(a[2] > b[2] for a, b in zip(found, found[1:], strict=False))
        worst = max(abs(p / m - 1) for _, p, m, _ in found)
        print(f"\nabove the budget: {over} of {COUNT}; falling: {falls}; "
              f"prediction off by at most {worst:.2%}", flush=True)
        theirs = []
        for k in range(COUNT) if options.peer else ():
            fraction = k / (COUNT - 1)
            done = subprocess.run([sys.executable, __file__, "--one", name, str(fraction)],
                                  capture_output=True, text=True, check=False)
            if done.returncode == 0:
                theirs.append((fraction, json.loads(done.stdout.strip().splitlines()[-1])))
                print(f"activation_memory_budget {fraction:.2f}: {theirs[-1][1]:.1%}", flush=True)
            else:
                print(f"activation_memory_budget {fraction:.2f} failed: {done.stderr.strip()[-300:]}")
        if options.write:
            draw(name, found, theirs)


def draw(name: str, found: list[tuple[float, float, float, float]],
         theirs: list[tuple[float, float]]) -> None:
    """Measured peak against what was asked for."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([b * 100 for b, *_ in found], [m * 100 for _, _, m, _ in found], marker="o",
              label="rkmate, a budget in bytes")
    if theirs:
        axes.plot([f * 100 for f, _ in theirs], [m * 100 for _, m in theirs], marker="x",
                  label="activation_memory_budget (aot_eager), a fraction")
    axes.plot([0, 100], [0, 100], linestyle=":", color="gray", label="what was asked for")
    axes.set(title=name, xlabel="asked for, %", ylabel="measured peak, % of eager")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(DOCS / "images" / f"budgets-{name}.svg")


if __name__ == "__main__":
    main()
