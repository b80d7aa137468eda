"""How long planning takes, by depth: GPT-2 with 6 to 48 layers, cold and for a second budget.

Each depth in a fresh process with an empty cache. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time


def measure(layers: int, width: int, length: int) -> None:
    """One depth; prints one line of JSON."""
    import resource

    import torch
    import transformers

    import rkmate
    from rkmate.budget import Budget
    from rkmate.pipeline import Settings, prepare
    from rkmate.progress import Progress
    from rkmate.search import Searcher

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=8, n_positions=length, vocab_size=4096, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False)
    model = transformers.GPT2LMHeadModel(config).train()
    ids = torch.randint(0, 4096, (4, length))
    kwargs = {"input_ids": ids, "labels": ids}
    start = time.perf_counter()
    searcher = Searcher(prepare(model, (), kwargs, Settings(), Progress(False)))
    plan = searcher.plan(Budget(fraction=0.5))
    cold = time.perf_counter() - start
    start = time.perf_counter()
    searcher.plan(Budget(fraction=0.7))
    second = time.perf_counter() - start
    overheads = {}
    for fraction in (1.0, 0.7, 0.5, 0.35):
        try:
            overheads[str(fraction)] = searcher.plan(Budget(fraction=fraction)).overhead
        except rkmate.InfeasibleBudget:
            overheads[str(fraction)] = float("nan")
    print(json.dumps({
        "layers": layers, "cold": cold, "second": second, "stages": dict(plan.stage_seconds),
        "nodes": dict(plan.nodes), "overheads": overheads,
        "smallest": searcher.smallest.peak / searcher.baseline.peak,
        "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))


def main() -> None:
    """Run all depths and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", default="6,12,24,48")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measure(options.one, options.width, options.length)
        return
    print("| layers | captured / computations | blocks / unique | capture | measure | options | chain "
          "| cold | second budget | smallest | overhead at 1.0 / 0.7 / 0.5 / 0.35 |")
    print("|" + "---|" * 11)
    for layers in map(int, options.layers.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, __file__, "--one", str(layers), "--width", str(options.width),
                 "--length", str(options.length)],
                env={**os.environ, "RKMATE_CACHE_DIR": folder}, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        r = json.loads(done.stdout.strip().splitlines()[-1])
        s, n = r["stages"], r["nodes"]
        over = " / ".join(f"{v:.1%}" for v in r["overheads"].values())
        print(f"| {layers} | {n['captured']} / {n['computations']} | {n['blocks']} / {n['unique']} "
              f"| {s['capture']:.1f} s | {s['measure']:.1f} s | {s['options']:.1f} s "
              f"| {max(0.0, s['chain'] - s['options']):.2f} s | {r['cold']:.1f} s | {r['second']:.2f} s "
              f"| {r['smallest']:.0%} | {over} |", flush=True)


if __name__ == "__main__":
    main()
