"""Compare plans on a GPU with eager mode, a checkpoint around each block, and torch.compile, in pieces.

    python benchmarks/gpu.py check            gradients compared with eager's, on tiny models
    python benchmarks/gpu.py first            GPT-2 medium, ResNet-50 in bf16: eager, checkpoint, 0.7 and 0.5,
                                              and 0.5 with compiled groups
    python benchmarks/gpu.py large            GPT-2 large, Llama 1B, ResNet-101, ViT-L: the same
    python benchmarks/gpu.py compile          torch.compile's `activation_memory_budget`
    python benchmarks/gpu.py reserved         reserved bytes, with expandable segments and without
    python benchmarks/gpu.py table            many kinds of models at 1.0, 0.6 and their smallest budget
    python benchmarks/gpu.py auto             ``budget="auto"`` on the device as it is, ten steps with AdamW
    python benchmarks/gpu.py recorded         CUDA graphs: what the pool of a recorded step holds

Each piece takes less than ten minutes on a large GPU; ``--tiny`` runs it on tiny models of the same kinds.
Peaks are above the level before the step, with gradients of parameters in place; *requested* is what tensors
asked for, *reserved* what torch's allocator holds for the whole process. Times are medians of steps on the
device, *host* the least processor time of a step in turns with eager's, *launches* what one starts (left out
where the profiler sees none), *waits* the operations that wait for the device. Rows are printed, and kept in
``--out`` as JSON, together with those of other models; ``--write`` puts those of that folder into a page of
the documentation.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from gpu_meters import MIB, Row, host_of, measured
from gpu_models import MODELS, Case
from gpu_page import keep, write
from torch import nn

import rkmate

GIB = 2**30
SIZES = {"first": ("gpt2-medium", "resnet50-bf16"),
         "large": ("gpt2-large", "llama-1b", "resnet101-bf16", "vit-large"),
         "compile": ("gpt2-medium", "resnet50-bf16"), "reserved": ("gpt2-medium", "resnet50-bf16"),
         "auto": ("gpt2-fp32", "llama", "vit", "resnet50", "unet"),
         "recorded": ("gpt2-fp32", "gpt2-dropout", "llama", "vit", "resnet50", "unet", "lstm",
                      "lstm-dropout")}
TABLE = ("gpt2-fp32", "gpt2-autocast", "gpt2-dropout", "llama", "vit", "resnet50", "resnet50-channels-last",
         "resnet50-bf16", "regnet", "unet", "lstm", "lstm-dropout", "bert", "t5")
FRACTIONS = (0.7, 0.5)
COMPILED = (1.0, 0.5, 0.3)


@dataclass(frozen=True)
class Options:
    """Of a piece."""

    tiny: bool
    steps: int
    models: tuple[str, ...]

    def case(self, name: str) -> Case:
        """A model, the same each time."""
        torch.manual_seed(0)
        return MODELS[name][self.tiny]()


def step_of(case: Case, run: Callable[..., Any]) -> Callable[[], torch.Tensor]:
    """A training step without its optimizer; returns the loss."""
    def step() -> torch.Tensor:
        with case.around():
            out = run(*case.args, **case.kwargs)
        loss: torch.Tensor = out if isinstance(out, torch.Tensor) else out.loss
        loss.backward()
        return loss.detach()
    return step


def clear(model: nn.Module) -> None:
    """Nothing of a model's steps stays but its parameters."""
    for p in model.parameters():
        p.grad = None
    gc.collect()
    torch.cuda.empty_cache()


def planned(case: Case, budget: float | int, eager: Row, steps: int, *, fused: bool = False) -> Row:
    """A plan's row: what it says, and what is measured. `fused`: with compiled groups."""
    start = time.perf_counter()
    try:
        wrapped = wrapped_at(case, budget, fused=fused)
    except rkmate.InfeasibleBudget as error:
        return needs(error)
    seconds, plan = time.perf_counter() - start, wrapped.plan
    clear(case.model)
    found = measured(step_of(case, wrapped), case.model, steps)
    host = host_of(step_of(case, wrapped), step_of(case, case.model), max(steps, 10))
    return {**found, **beside(found, eager), "host": host, "plan_mib": plan.peak_bytes / MIB,
            "budget_mib": plan.budget_bytes / MIB, "requested_over_plan": found["requested_mib"] * MIB
            / plan.peak_bytes - 1, "predicted": 1 + plan.overhead, "planning_s": seconds}


def wrapped_at(case: Case, budget: float | int | str, *, fused: bool = False) -> Any:
    """A case's model, planned. Raises what `wrap` raises."""
    with case.around():
        return rkmate.wrap(case.model, case.args, case.kwargs, budget=budget, progress=False, compile=fused,
                           settings=rkmate.Settings(run=rkmate.RunSettings(verify=False)))


def needs(error: rkmate.InfeasibleBudget) -> Row:
    """Return the row of a budget that is too small."""
    return {"failed": f"at least {error.minimum_bytes / MIB:.1f} MiB"}


def beside(found: Row, eager: Row) -> Row:
    """Ratios to eager mode."""
    return {"time": found["ms"] / eager["ms"], "host": found["host_ms"] / eager["host_ms"],
            "of_eager": found["requested_mib"] / eager["requested_mib"]}


def against(name: str, options: Options) -> Iterator[Row]:
    """Eager, checkpointing of each block, and plans."""
    case = options.case(name)
    eager = measured(step_of(case, case.model), case.model, options.steps)
    yield {"way": "eager", **eager}
    clear(case.model)
    if case.checkpoint(True):
        found = measured(step_of(case, case.model), case.model, options.steps)
        case.checkpoint(False)
        yield {"way": "checkpoint", **found, **beside(found, eager)}
        clear(case.model)
    for budget, fused in (*((b, False) for b in FRACTIONS), (FRACTIONS[-1], True)):
        yield {"way": f"rkmate {budget}" + " compiled" * fused,
               **planned(case, budget, eager, options.steps, fused=fused)}
        clear(case.model)


def kinds(name: str, options: Options) -> Iterator[Row]:
    """Eager, and plans at 1.0, 0.6 and the smallest budget."""
    case = options.case(name)
    eager = measured(step_of(case, case.model), case.model, options.steps)
    yield {"way": "eager", **eager}
    clear(case.model)
    for label, budget in (("1.0", 1.0), ("0.6", 0.6), ("smallest", 0)):
        yield {"way": label, **planned(case, budget or smallest(case), eager, options.steps)}
        clear(case.model)


def smallest(case: Case) -> int:
    """The smallest budget of a model, in bytes."""
    try:
        with case.around():
            rkmate.plan(case.model, case.args, case.kwargs, budget=1, progress=False)
    except rkmate.InfeasibleBudget as error:
        return error.minimum_bytes
    raise AssertionError("a step in one byte")


def compiled(name: str, options: Options) -> Iterator[Row]:
    """torch.compile at some fractions of its memory budget."""
    import torch._functorch.config as config

    case = options.case(name)
    eager = measured(step_of(case, case.model), case.model, options.steps)
    yield {"way": "eager", **eager}
    for fraction in COMPILED:
        clear(case.model)
        torch._dynamo.reset()
        with config.patch(activation_memory_budget=fraction):
            start = time.perf_counter()
            step = step_of(case, torch.compile(case.model))
            step()
            seconds = time.perf_counter() - start
            found = measured(step, case.model, options.steps)
        yield {"way": f"torch.compile {fraction}", **found, **beside(found, eager), "planning_s": seconds}


def reserved(name: str, options: Options) -> Iterator[Row]:
    """Ten steps with AdamW at a budget, each allocator in a process of its own."""
    for way in ("plain", "expandable"):
        setting = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{way == 'expandable'}"}
        command = [sys.executable, __file__, "steps", "--models", name, *(["--tiny"] if options.tiny else [])]
        done = subprocess.run(command, env={**os.environ, **setting}, capture_output=True, text=True,
                              check=False)
        if done.returncode:
            yield {"way": way, "failed": done.stderr.strip().splitlines()[-1][:200]}
            continue
        for row in (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")):
            yield {**row, "way": f"{way} {row.get('way', '')}".strip()}


def steps_with_adamw(name: str, options: Options) -> Iterator[Row]:
    """What the allocator holds at most in ten steps with AdamW, eager and planned."""
    for way in ("eager", *map(str, FRACTIONS)):
        case = options.case(name)
        try:
            run = case.model if way == "eager" else wrapped_at(case, float(way))
            yield {"way": way, **with_adamw(case, run)}
        except rkmate.InfeasibleBudget as error:
            run = None
            yield {"way": way, **needs(error)}
        del run, case
        gc.collect()
        torch.cuda.empty_cache()


def with_adamw(case: Case, run: Callable[..., Any]) -> Row:
    """What the allocator holds at most in ten steps with AdamW, and how often it freed all to go on."""
    optimizer = torch.optim.AdamW(case.model.parameters())
    clear(case.model)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["num_alloc_retries"]
    for _ in range(10):
        step_of(case, run)()
        optimizer.step()
        optimizer.zero_grad()
    stats = torch.cuda.memory_stats()
    return {**{f"{kind}_mib": stats[f"{kind}_bytes.all.peak"] / MIB
               for kind in ("allocated", "requested", "reserved")},
            "retries": stats["num_alloc_retries"] - before}


def auto(name: str, options: Options) -> Iterator[Row]:
    """What ``budget="auto"`` makes of the device, and what ten steps with AdamW then take of it."""
    case = options.case(name)
    clear(case.model)
    free, total = torch.cuda.mem_get_info()
    given = free + torch.cuda.memory_reserved()
    run = wrapped_at(case, "auto")
    plan, way = run.plan, f"{total / GIB:.4g} GiB"
    row: Row = {"way": way, "given_mib": given / MIB, "budget_mib": plan.budget_bytes / MIB,
                "plan_mib": plan.peak_bytes / MIB, "of_own_peak": plan.peak_bytes / plan.baseline_peak_bytes,
                "predicted": 1 + plan.overhead}
    try:
        row |= with_adamw(case, run)
    except torch.OutOfMemoryError:
        row["failed"] = "out of memory in a step"
    yield row


def recorded(name: str, options: Options) -> Iterator[Row]:
    """Steps as they are and recorded, and what the recording's own pool holds."""
    for budget in (1.0, 0.6):
        case = options.case(name)
        with case.around():
            plan = rkmate.plan(case.model, case.args, case.kwargs, budget=budget, progress=False,
                               settings=rkmate.Settings(deferred_outputs="never"))
        for way in ("plain", "recorded"):
            with case.around():
                run = rkmate.wrap(case.model, case.args, case.kwargs, plan=plan, progress=False,
                                  settings=rkmate.Settings(run=rkmate.RunSettings(
                                      verify=False, cuda_graph=way == "recorded")))
            clear(case.model)
            found = measured(step_of(case, run), case.model, options.steps)
            host = host_of(step_of(case, run), step_of(case, case.model), max(options.steps, 10))
            yield {"way": f"{way} {budget}", **found, "host": host,
                   "plan_mib": plan.peak_bytes / MIB, "pool_mib": private_pools() / MIB,
                   "gradients_mib": sum(p.nbytes for p in case.model.parameters() if p.requires_grad) / MIB}
            del run


def private_pools() -> int:
    """Bytes of the segments that belong to recordings."""
    return sum(s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0))


def same(name: str, options: Options) -> Iterator[Row]:
    """Compare loss and gradients with eager's, from the same random numbers; and two eager runs."""
    case = Options(True, options.steps, ()).case(name)
    twin = copy.deepcopy(case.model)

    def run_once(run: Any, model: nn.Module) -> tuple[float, list[torch.Tensor]]:
        clear(model)
        torch.manual_seed(1)
        loss = step_of(case, run)().item()
        return loss, [p.grad.float() for p in model.parameters() if p.grad is not None]

    def furthest(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
        """Of the largest gradient: some are zero but for rounding, such as those of the keys' biases."""
        largest = max(y.norm().item() for y in b)
        return max((x - y).norm().item() for x, y in zip(a, b, strict=True)) / max(largest, 1e-12)

    expected, again = run_once(twin, twin), run_once(twin, twin)
    for budget in (1.0, 0.6):
        try:
            wrapped = wrapped_at(case, budget)
        except rkmate.InfeasibleBudget as error:
            yield {"way": f"rkmate {budget}", **needs(error)}
            continue
        found = run_once(wrapped, case.model)
        yield {"way": f"rkmate {budget}", "same_loss": found[0] == expected[0],
               "gradients_off": furthest(found[1], expected[1]), "eager_off": furthest(again[1], expected[1])}


PIECES: dict[str, Callable[[str, Options], Iterator[Row]]] = {
    "check": same, "first": against, "large": against, "compile": compiled, "reserved": reserved,
    "table": kinds, "auto": auto, "recorded": recorded, "steps": steps_with_adamw}


def rows_of(piece: str, options: Options) -> Iterator[Row]:
    """A piece's rows, one after the other; a model that fails is a row, too."""
    for name in options.models or SIZES.get(piece, TABLE):
        try:
            for row in PIECES[piece](name, options):
                yield {"piece": piece, "model": name, **row}
        except Exception as error:
            yield {"piece": piece, "model": name, "failed": f"{type(error).__name__}: {error}"[:200]}
        gc.collect()
        torch.cuda.empty_cache()


def line(row: Row) -> str:
    """A row to read."""
    def shown(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    return "  ".join([f"{row['model']:24}", f"{row.get('way', ''):18}",
                      *(f"{k} {shown(v)}" for k, v in row.items() if k not in ("piece", "model", "way"))])


def main() -> None:
    """Run a piece, print its rows and keep them."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("piece", choices=PIECES)
    parser.add_argument("--models", nargs="+", default=(), choices=MODELS, metavar="MODEL")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, help="a folder for the rows, as PIECE.json")
    parser.add_argument("--write", type=Path, metavar="PAGE",
                        help="put the rows of --out where a page of Markdown has marks for them")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device")
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    for row in rows_of(given.piece, Options(given.tiny, given.steps, tuple(given.models))):
        print(json.dumps(row) if given.piece == "steps" else line(row), flush=True)
        if given.out is not None:
            keep(given.out / f"{given.piece}.json", row, order=tuple(MODELS))
    if given.out is not None and given.write is not None:
        write(given.write, given.out)


if __name__ == "__main__":
    main()
