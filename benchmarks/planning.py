"""How long planning takes, by depth: GPT-2 with 6 to 48 layers, cold and for a second budget.

Each depth runs in a fresh process with an empty cache, and in another one that measures what planning
allocates in addition to the model. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any


def gpt(layers: int, width: int, length: int) -> tuple[Any, dict[str, Any]]:
    """The model, and the arguments of its forward."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=8, n_positions=length, vocab_size=4096, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False)
    model = transformers.GPT2LMHeadModel(config).train()
    ids = torch.randint(0, 4096, (4, length))
    return model, {"input_ids": ids, "labels": ids}


class _Unmetered:
    """In place of the meter that planning itself uses: the two cannot run at once."""

    def running(self) -> AbstractContextManager[None]:
        return nullcontext()

    def part(self, number: int) -> AbstractContextManager[None]:
        return nullcontext()

    def peaks(self) -> dict[int, int]:
        return {}


def allocated(layers: int, width: int, length: int) -> None:
    """Print the bytes that planning allocates in addition to the model, and those that training the largest
    block takes: one line of JSON."""
    from rkmate.device.cpu import Cpu
    from rkmate.ir.schedule import from_order
    from rkmate.ir.simulate import simulate
    from rkmate.measure.step import measure_peak
    from rkmate.pipeline.prepare import prepare, trace
    from rkmate.pipeline.search import plan_prepared
    from rkmate.pipeline.settings import Settings
    from rkmate.support.progress import Progress

    model, kwargs = gpt(layers, width, length)
    Cpu.parts_meter = lambda device: _Unmetered()  # type: ignore[assignment,method-assign,misc]
    found = []

    def plan() -> None:
        here = prepare(trace(model, (), kwargs, Settings(), Progress(False)))
        plan_prepared(here, here.baseline.peak // 2)
        found.append(here)

    peak = measure_peak(plan).peak
    prepared, blocks = found[0], []
    cd = prepared.graph
    for block, graph in zip(prepared.partition.blocks, prepared.block_graphs, strict=True):
        # As torch runs it: nothing is written over what dies, and the model's outputs stay.
        plain = replace(graph, c=tuple(replace(c, donors=()) for c in graph.c))
        returned = {j for i in block.c for j in cd.c[i].outputs} & set(cd.outputs)
        blocks.append(simulate(plain, from_order(plain, range(len(plain.c)), plain.loss)).peak
                      + sum(cd.d[j].size for j in returned))
    print(json.dumps({"planning": peak, "block": max(blocks)}))


def measure(layers: int, width: int, length: int) -> None:
    """One depth; prints one line of JSON."""
    from rkmate.pipeline.attempts import attempted
    from rkmate.pipeline.prepare import prepare, trace
    from rkmate.pipeline.settings import Settings
    from rkmate.pipeline.solve import solve
    from rkmate.planners.chain import smallest_of_chain
    from rkmate.planners.registry import planner
    from rkmate.support.progress import Progress

    model, kwargs = gpt(layers, width, length)
    start = time.perf_counter()
    prepared = prepare(trace(model, (), kwargs, Settings(), Progress(False)))
    solved, method, whole = solve(prepared), planner("rockmate"), prepared.baseline
    first = attempted(prepared, solved, method, whole.peak // 2)
    cold = time.perf_counter() - start
    start = time.perf_counter()
    attempted(prepared, solved, method, int(whole.peak * 0.7), known=first.found)
    second = time.perf_counter() - start
    overheads = {}
    for fraction in (1.0, 0.7, 0.5, 0.35):
        found = attempted(prepared, solved, method, int(whole.peak * fraction), known=first.found)
        overheads[str(fraction)] = float("nan") if found.plan is None else found.plan.overhead
    assert first.plan is not None
    print(json.dumps({
        "layers": layers, "cold": cold, "second": second, "stages": dict(first.plan.stage_seconds),
        "nodes": dict(first.plan.nodes), "overheads": overheads,
        "smallest": smallest_of_chain(solved.problem).peak / whole.peak}))


def fresh(layers: int, width: int, length: int, *more: str) -> dict[str, Any]:
    """One depth in a process of its own, with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, __file__, "--one", str(layers), "--width", str(width), "--length",
             str(length), *more],
            env={**os.environ, "RKMATE_CACHE_DIR": folder}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def main() -> None:
    """Run all depths and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", default="6,12,24,48")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        (allocated if options.memory else measure)(options.one, options.width, options.length)
        return
    print("| layers | captured / computations | blocks / unique | capture | measure | options | chain "
          "| cold | second budget | smallest | overhead at 1.0 / 0.7 / 0.5 / 0.35 "
          "| memory of planning / of a block |")
    print("|" + "---|" * 12)
    for layers in map(int, options.layers.split(",")):
        r = fresh(layers, options.width, options.length)
        memory = fresh(layers, options.width, options.length, "--memory")
        s, n = r["stages"], r["nodes"]
        over = " / ".join(f"{v:.1%}" for v in r["overheads"].values())
        print(f"| {layers} | {n['captured']} / {n['computations']} | {n['blocks']} / {n['unique']} "
              f"| {s['capture']:.1f} s | {s['measure']:.1f} s | {s['options']:.1f} s "
              f"| {max(0.0, s['chain'] - s['options']):.2f} s | {r['cold']:.1f} s | {r['second']:.2f} s "
              f"| {r['smallest']:.0%} | {over} "
              f"| {memory['planning'] / 2**20:.1f} / {memory['block'] / 2**20:.1f} MiB |", flush=True)


if __name__ == "__main__":
    main()
