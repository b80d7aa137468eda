"""What the examples share: their arguments, a training loop, and the table at the end."""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

import rkmate
from rkmate.measure.step import measure_peak

Batch = dict[str, torch.Tensor]


def arguments(description: str, budget: str, steps: int) -> argparse.Namespace:
    """The command line of an example."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--budget", type=as_budget, default=as_budget(budget), metavar="B",
                        help="memory of a training step: bytes, text such as 600MiB, or a fraction "
                             f"of the model's own peak (default: {budget})")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default: cpu)")
    parser.add_argument("--steps", type=int, default=steps,
                        help=f"training steps (default: {steps})")
    parser.add_argument("--compare", action="store_true",
                        help="also train a copy without rkmate, in alternating steps")
    return parser.parse_args()


def as_budget(text: str) -> int | float | str:
    """``1000000`` is bytes, ``0.5`` a fraction, anything else is for rkmate to read."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@dataclass
class Runner:
    """One model in training, and what was seen of it."""

    name: str
    module: nn.Module
    optimizer: torch.optim.Optimizer
    seconds: list[float] = field(default_factory=list)
    """Of the steps that were timed: not the first two, which warm up and measure memory."""
    losses: list[float] = field(default_factory=list)
    peak: int = 0
    """Bytes that forward, loss and backward took in the second step, over what stood before."""

    def step(self, batch: Batch, device: torch.device) -> None:
        """One training step."""
        def compute() -> float:
            loss: torch.Tensor = self.module(**batch).loss
            loss.backward()
            return loss.item()

        if len(self.losses) == 1:
            measured = measure_peak(compute, device)
            self.peak = measured.peak
            self.losses.append(measured.result)
        else:
            begin = time.perf_counter()
            self.losses.append(compute())
            if len(self.losses) > 2:
                self.seconds.append(time.perf_counter() - begin)
        self.optimizer.step()
        # In place: a gradient that stays where it is belongs to what stands before the step.
        self.optimizer.zero_grad(set_to_none=False)


def train(model: nn.Module, batches: Callable[[], Batch], options: argparse.Namespace) -> None:
    """Wrap the model, train it, and print how it went."""
    device = torch.device(options.device)
    model.to(device).train()

    def next_batch() -> Batch:
        return {name: t.to(device) for name, t in batches().items()}

    sample = next_batch()
    runners: list[Runner] = []
    if options.compare:
        plain = copy.deepcopy(model)
        runners.append(Runner("plain", plain, torch.optim.AdamW(plain.parameters(), lr=3e-4)))
    print(f"planning: {type(model).__name__}, {count(model):,} parameters, "
          f"budget {options.budget}", flush=True)
    begin = time.perf_counter()
    rk = rkmate.wrap(model, kwargs=sample, budget=options.budget)
    print(f"planned in {time.perf_counter() - begin:.1f} s: {rk.plan!r}", flush=True)
    runners.append(Runner("rkmate", rk, torch.optim.AdamW(rk.parameters(), lr=3e-4)))

    for step in range(options.steps):
        batch = next_batch()
        for runner in runners:
            runner.step(batch, device)
        shown = ", ".join(f"{r.name} {r.losses[-1]:.4f}" for r in runners)
        print(f"step {step + 1:3} of {options.steps}: loss {shown}", flush=True)
    print()
    print(table(runners, rk.plan))


def count(model: nn.Module) -> int:
    """Numbers in the parameters."""
    return sum(p.numel() for p in model.parameters())


def table(runners: list[Runner], plan: rkmate.Plan) -> str:
    """One column per run."""
    rows: list[list[str]] = [["", *(r.name for r in runners)]]
    rows.append(["measured peak", *(mebibytes(r.peak) for r in runners)])
    rows.append(["predicted peak", *(mebibytes(plan.baseline_peak_bytes if r.name == "plain"
                                               else plan.peak_bytes) for r in runners)])
    rows.append(["budget", *("none" if r.name == "plain" else mebibytes(plan.budget_bytes)
                             for r in runners)])
    if all(r.seconds for r in runners):
        rows.append(["time per step (median)",
                     *(f"{statistics.median(r.seconds) * 1e3:.0f} ms" for r in runners)])
    rows.append(["loss at the end", *(f"{r.losses[-1]:.6f}" for r in runners)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]),
                        *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
             for row in rows]
    lines.insert(1, "-" * len(lines[0]))
    if len(runners) == 2:
        lines.append("")
        lines.append(verdict(*runners))
    return "\n".join(lines)


def verdict(plain: Runner, ours: Runner) -> str:
    """Whether the two runs computed the same."""
    gap = max(abs(a - b) for a, b in zip(plain.losses, ours.losses, strict=True))
    same = f"equal, bit for bit, at all {len(ours.losses)} steps" if gap == 0 \
        else f"differ by up to {gap:.2g} (random numbers or another order of additions)"
    return f"losses: {same}"


def mebibytes(n: int) -> str:
    """Bytes for people."""
    return f"{n / 2**20:.1f} MiB"
