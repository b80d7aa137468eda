"""Two tables of docs/dtr.md whose times are ratios of alternated runs, medians of each.

    python benchmarks/dtr_beside.py bar static
"""

from __future__ import annotations

import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import rkmate
import rkmate.dtr
from rkmate.measure.step import measure_peak

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

ROUNDS = 7


def _medians(runs: Sequence[Callable[[], object]]) -> list[float]:
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(ROUNDS):
        for run, seen in zip(runs, times, strict=True):
            began = time.perf_counter()
            run()
            seen.append(time.perf_counter() - began)
    return [statistics.median(seen) for seen in times]


def _operation_times(run: Callable[[], object]) -> list[float]:
    """Microseconds of each kernel that the runtime would manage."""
    names = {"aten::addmm", "aten::mm", "aten::mul", "aten::add", "aten::sigmoid", "aten::tanh"}
    names |= {"aten::cat", "aten::sigmoid_backward", "aten::tanh_backward"}
    with torch.autograd.profiler.profile() as profile:
        run()
    return [e.cpu_time_total for e in profile.function_events if e.name in names]


def bar() -> None:
    """A TreeLSTM at half of eager's peak, by the time that its operations take."""
    import dtr_treelstm

    print(
        "| width | batch | us per operation: median | mean | time / eager | run again / eager "
        "| bookkeeping / eager | evictions | run again |\n|---|---|---|---|---|---|---|---|---|"
    )
    for width, batch in ((128, 256), (256, 256), (256, 512), (384, 512), (512, 512)):
        task = dtr_treelstm.task(width, batch)
        torch.manual_seed(0)
        model = task.build()

        def step() -> None:
            model.zero_grad(set_to_none=True)  # noqa: B023
            torch.manual_seed(0)
            task.loss(model, 0).backward()  # noqa: B023

        step()
        model.zero_grad(set_to_none=True)
        budget = measure_peak(step).peak // 2
        kinds = _operation_times(step)
        reports: list[rkmate.dtr.Report] = []

        def ours() -> None:
            with rkmate.dtr(budget, overhead_limit=50) as session:  # noqa: B023
                step()
            reports.append(session.report)  # noqa: B023

        ours()
        eager, inside = _medians((step, ours))
        middle = sorted(reports, key=lambda report: report.rematerializations)[len(reports) // 2]
        again = statistics.median(r.recompute_seconds for r in reports) / eager
        books = statistics.median(r.bookkeeping_seconds for r in reports) / eager
        print(
            f"| {width} | {batch} | {statistics.median(kinds):.0f} | {statistics.mean(kinds):.0f} "
            f"| {inside / eager:.2f} | {again:.2f} | {books:.2f} | {middle.evictions} "
            f"| {middle.rematerializations} |",
            flush=True,
        )


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(inner)) + x)


def _resnet() -> tuple[nn.Module, torch.Tensor]:
    stem = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
    blocks = [_Residual(32) for _ in range(6)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return nn.Sequential(stem, *blocks, head), torch.randn(8, 3, 48, 48)


class _GPT2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.inner = GPT2LMHeadModel(
            GPT2Config(
                n_layer=4, n_head=4, n_embd=192, vocab_size=512, n_positions=128, use_cache=False,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            )
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner(x).logits
        return logits


def _gpt2() -> tuple[nn.Module, torch.Tensor]:
    source = random.Random(0)
    rows = [[source.randrange(512) for _ in range(128)] for _ in range(8)]
    return _GPT2(), torch.tensor(rows)


def _step_of(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).float().square().mean().backward()

    return step


def _peak(model: nn.Module, step: Callable[[], None]) -> int:
    """Bytes above what stands, the gradients that the step leaves taken off."""
    model.zero_grad(set_to_none=True)
    peak = measure_peak(step).peak
    return peak - sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)


def static() -> None:
    """Static models under a plan and under the runtime, at equal budgets."""
    print(
        "| model | budget | plan: peak / budget | time / eager | runtime: peak / budget "
        "| time / eager | evictions | run again |\n|---|---|---|---|---|---|---|---|"
    )
    for name, make in (("GPT-2", _gpt2), ("ResNet", _resnet)):
        torch.manual_seed(0)
        model, x = make()
        eager = _step_of(model, x)
        eager()
        own = _peak(model, eager)
        for ratio in (0.7, 0.5):
            budget = int(own * ratio)
            reports: list[rkmate.dtr.Report] = []

            def ours() -> None:
                # The loss too is inside the budget, as it is with a plan.
                with rkmate.dtr(budget, overhead_limit=50) as session:  # noqa: B023
                    eager()  # noqa: B023
                reports.append(session.report)  # noqa: B023

            try:
                planned = rkmate.wrap(model, (x,), budget=budget, progress=False)
            except rkmate.InfeasibleBudget:
                print(f"| {name} | {ratio:.0%} | no plan | | | | | |", flush=True)
                continue
            plan = _step_of(planned, x)
            for run in (plan, ours):
                run()
            peaks = [_peak(model, run) / budget for run in (plan, ours)]
            base, by_plan, by_runtime = _medians((eager, plan, ours))
            report = reports[-1]
            print(
                f"| {name} | {ratio:.0%} | {peaks[0]:.3f} | {by_plan / base:.2f} | {peaks[1]:.3f} "
                f"| {by_runtime / base:.2f} | {report.evictions} | {report.rematerializations} |",
                flush=True,
            )


TABLES = {"bar": bar, "static": static}

if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in sys.argv[1:] or TABLES:
        print(f"\n## {name}\n")
        TABLES[name]()
