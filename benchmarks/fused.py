"""Compare layouts and compiled groups (``layouts="auto"``, ``compile=True``) with torch.compile.

Each method runs in a process of its own, and the steps of all methods of a model take turns: peak by the
exact meter over the level that stands before a step, time as ratio of medians. ``inductor`` as the fraction
of a row is the smallest peak of torch.compile's rows.

``--ready`` measures how long methods take to get ready, each alone: seconds until the first step is done,
with empty caches; a second process then finds what the first has compiled, and follows the plan that it has
saved. ``--depths`` does so for GPT-2 with these numbers of layers.

Rows are appended to ``--turns FILE`` and ``--waits FILE`` (JSON, one row a line), so that a run can be
interrupted and continued: existing rows are not measured again. ``--write`` makes docs/fused.md of both
files. ``--small`` is the same with tiny models of the same kinds.

Usage: python benchmarks/fused.py --threads 1 --turns turns.jsonl [--models unet,vit] [--methods "eager,..."]
       python benchmarks/fused.py --threads 2 --waits waits.jsonl --depths 6,12,24
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import peers
import torch
import transformers
from beside import add_row, peak_of, read_rows, step
from fused_rows import Bar, Ready, Turn, Turns, Waits, bars_table, predictions, table, waits_table
from fused_turns import LEAST_ROUNDS, SECONDS, asked, in_turns
from peers import DOCS, Case, Segmenter, gpt, images

from rkmate.device import inductor

PAGE = DOCS / "fused.md"
INDUCTOR = ("1.0", "0.5", "0.1")
FRACTIONS = ("1.0", "0.7", "0.5", "0.35", "inductor")
NAMES = ("gpt", "gpt12", "resnet18", "resnet50", "regnet", "unet", "t5", "vit")
CONVOLUTIONS = ("resnet18", "resnet50", "regnet", "unet")
OWN_BARS = {"gpt": (0.42, 0.84), "resnet18": (0.6, 1.0), "regnet": (0.7, 0.8), "unet": (0.7, 0.8)}
"""Per model a part of eager's peak, and of its time, that compiled groups are to take there at most."""
DEPTHS = ("inductor 1.0", "rkmate compile 1.0")
"""Of which `--depths` says how long they take to get ready."""


def _residual(kind: str) -> Case:
    config = getattr(transformers, f"{kind}Config")(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1],
        **({"groups_width": 8} if kind == "RegNet" else {"layer_type": "basic"}))
    return images(getattr(transformers, f"{kind}ForImageClassification")(config), 2, 32, lambda m: [])


def _segmenter() -> Case:
    return Case(Segmenter(), {"pixels": torch.randn(1, 3, 32, 32),
                              "labels": torch.randint(0, 2, (1, 32, 32))}, lambda m: [])


def _vit() -> Case:
    config = transformers.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                    intermediate_size=32, image_size=32, patch_size=8)
    return images(transformers.ViTForImageClassification(config), 2, 32, lambda m: [])


def _t5() -> Case:
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=64, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False))
    ids = torch.randint(0, 64, (2, 16))
    return Case(model, {"input_ids": ids, "labels": ids}, lambda m: [])


SMALL: dict[str, Callable[[], Case]] = {
    "gpt": functools.partial(gpt, 1, 32, 32, 2, 128), "gpt12": functools.partial(gpt, 2, 32, 32, 2, 128),
    "resnet18": functools.partial(_residual, "ResNet"), "resnet50": functools.partial(_residual, "ResNet"),
    "regnet": functools.partial(_residual, "RegNet"), "unet": _segmenter, "t5": _t5, "vit": _vit}
MODELS: dict[str, Callable[[], Case]] = peers.MODELS


def case_of(model: str, *, small: bool) -> Case:
    """Return a model with its inputs; ``12 layers`` is the GPT-2 of the first table with 12 layers."""
    if model.endswith(" layers"):
        layers = int(model.split()[0])
        return gpt(layers, 32, 32, 2, 128) if small else gpt(layers)
    return (SMALL if small else MODELS)[model]()


def methods_of(model: str) -> list[str]:
    """Names of the methods for a model, in the order of their turns: each kind at all its budgets, and where
    its bar is."""
    convolutions = model in CONVOLUTIONS
    kinds = ("rkmate", "rkmate compile layouts" if convolutions else "rkmate compile")
    own = [bar.method for bar in bars_of(model)]
    found = ["eager", *(["eager channels-last"] if convolutions else []),
             *(f"inductor {f}" for f in INDUCTOR)]
    for kind in kinds:
        found += [*(f"{kind} {f}" for f in FRACTIONS), *(m for m in own if m.rpartition(" ")[0] == kind)]
    return list(dict.fromkeys(found))


def ready_methods_of(model: str) -> list[str]:
    """Those of which it is told how long they take to get ready."""
    if model not in NAMES:
        return list(DEPTHS)
    return ["inductor 0.5", "rkmate compile layouts 0.7" if model in CONVOLUTIONS else "rkmate compile 0.7"]


def bars_of(model: str) -> list[Bar]:
    """What is to hold for a model."""
    own = "rkmate compile layouts" if model in CONVOLUTIONS else "rkmate compile"
    bars = [Bar(f"{own} inductor", 1.0, "inductor")]
    if model in OWN_BARS:
        fraction, most = OWN_BARS[model]
        bars.append(Bar(f"{own} {fraction}", most))
    return bars


def made(model: str, *, small: bool) -> Case:
    """A model for training, the same each time."""
    torch.manual_seed(0)
    found = case_of(model, small=small)
    found.model.train()
    return found


def one_ready(row: Ready, plan: Path, *, small: bool) -> Ready:
    """In this process, how long a method takes to get ready. `plan`: where its plan is, or will be."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(row.threads)
    level, case = 0, made(row.model, small=small)
    if row.method.startswith("rkmate") and not plan.exists():
        reference = made(row.model, small=small)
        level = peak_of(lambda: reference.model(**reference.kwargs).loss, reference.model)
    start = time.perf_counter()
    forward, _ = asked(row.method, case, level, plan)
    step(forward, case.model)
    row = replace(row, ready=time.perf_counter() - start)
    return replace(row, groups=inductor.compiled, compiling=inductor.seconds) \
        if "compile" in row.method.split() else row


def _process(arguments: Sequence[str], folder: str, threads: int) -> list[dict[str, Any]]:
    """What another process of this file prints as JSON, one row a line. Raises `RuntimeError`."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "RKMATE_CACHE_DIR": f"{folder}/rk",
           "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run([sys.executable, __file__, *arguments, "--threads", str(threads)],
                          capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        lines = done.stderr.splitlines()
        said = [line for line in lines if "Error" in line] or lines or [f"exit status {done.returncode}"]
        raise RuntimeError(said[-1][:120])
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def run_turns(names: Sequence[str], path: Path | None, *, threads: int, small: bool = False, rounds: int = 0,
              methods: Callable[[str], Sequence[str]] = methods_of) -> Turns:
    """Measure the models that are not in the file yet. `methods`: those of a model."""
    rows: Turns = {row.key: row for row in read_rows(Turn, path)}
    for model in names:
        if any((row.model, row.threads) == (model, threads) for row in rows.values()):
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = _process(["--one", model, "--methods", ",".join(methods(model)), "--rounds", str(rounds),
                              *["--small"] * small], folder, threads)
        for row in (Turn(**fields) for fields in found):
            rows[row.key] = row
            add_row(row, path)
    return rows


def run_ready(names: Sequence[str], path: Path | None, *, threads: int, small: bool = False,
              methods: Callable[[str], Sequence[str]] = ready_methods_of) -> Waits:
    """The same for how long methods take to get ready, of two processes each."""
    rows: Waits = {row.key: row for row in read_rows(Ready, path)}
    for model in names:
        for method in methods(model):
            row = Ready(model, method, threads)
            if row.key in rows:
                continue
            with tempfile.TemporaryDirectory() as folder:
                try:
                    first, second = (Ready(**_process(
                        ["--one-ready", model, method, f"{folder}/plan.json", *["--small"] * small], folder,
                        threads)[0]) for _ in range(2))
                except RuntimeError as error:
                    row = replace(row, failed=str(error))
                else:
                    row = replace(first, again=second.ready, compiling_again=second.compiling)
            rows[row.key] = row
            add_row(row, path)
    return rows


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


def write(turns: Turns, waits: Waits) -> None:
    """The page of the documentation, of all rows."""
    about = ("# Layouts and compiled groups, measured\n\nPeak and time of a training step, relative to "
             "eager's, next to torch.compile at its own budgets: [compiled groups](compile.md), and "
             "`layouts=\"auto\"` for networks of convolutions. Each method of a table ran in a process of "
             "its own, and their steps took turns; times are medians. Parameters and their gradients are "
             "allocated before the step and are not counted. Predicted times are compared with steps of the "
             "same module right after it was planned, without existing gradients, because a machine's speed "
             "changes from minute to minute. When this was measured, planned modules kept [pages of up to "
             "32 MiB](pages.md), and compiled plans multiplied by oneDNN where that was faster; they no "
             "longer do. Processes of other methods manage memory as the C "
             "library does: whether their steps wait for fresh pages depends on what is at the end of their "
             "heaps. Errors of gradients, "
             "compared with double precision, are the median of several batches. `python "
             "benchmarks/fused.py --turns FILE --waits FILE --write` makes this page. Measured on a CPU "
             f"({platform.machine()}), torch "
             f"{torch.__version__.partition('+')[0]}.\n\n{predictions(turns)}\n")
    kinds = dict.fromkeys((row.model, row.threads) for row in turns.values())
    sections = []
    for threads in sorted({threads for _, threads in kinds}):
        names = [name for name in NAMES if (name, threads) in kinds]
        holds = bars_table(names, threads, turns, {name: bars_of(name) for name in names})
        sections.append(f"## In short, {_threads(threads)}\n\nEach model at the smallest peak of "
                        "torch.compile or below it, and some models at a part of eager's peak. A ratio "
                        f"varies by up to a twentieth from run to run.\n\n{holds}\n")
    for threads in sorted({row.threads for row in waits.values()}):
        names = list(dict.fromkeys(row.model for row in waits.values() if row.threads == threads))
        sections.append(f"## How long it takes to get ready, {_threads(threads)}\n\nEach method in "
                        "processes of its own, with empty caches. When this was measured, a second process "
                        "found groups in files of rkmate, without the compiler. It now finds them in "
                        "inductor's cache, which takes about 2 s more of processor time.\n\n"
                        f"{waits_table(names, threads, waits)}\n")
    sections += [f"## {model}, {_threads(threads)}\n\n{MODELS[model].__doc__ or ''}\n\n"
                 f"{table(model, threads, turns)}\n"
                 for threads in sorted({threads for _, threads in kinds})
                 for model in NAMES if (model, threads) in kinds]
    PAGE.write_text("\n".join([about, *sections]), encoding="utf-8")


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help=f"of {', '.join(MODELS)}; comma separated")
    parser.add_argument("--methods", help="comma separated; all by default")
    parser.add_argument("--ready", action="store_true", help="measure how long methods take to get ready")
    parser.add_argument("--depths", help="numbers of layers, comma separated: only measure how long GPT-2 "
                        "with these takes to get ready")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=0,
                        help=f"of turns, exactly; by default {LEAST_ROUNDS} at least, and for {SECONDS} s a "
                        "method")
    parser.add_argument("--turns", type=Path, help="file of rows, read and appended to")
    parser.add_argument("--waits", type=Path, help="the same of how long methods take to get ready")
    parser.add_argument("--small", action="store_true", help="tiny models")
    parser.add_argument("--write", action="store_true", help="docs/fused.md")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--one-ready", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_ready:
        model, method, plan = options.one_ready
        print(json.dumps(asdict(one_ready(Ready(model, method, options.threads), Path(plan),
                                          small=options.small))))
        return
    if options.one:
        transformers.logging.set_verbosity_error()
        how = {"least_rounds": options.rounds, "seconds": 0.0} if options.rounds else {}
        for row in in_turns(options.one, options.threads, options.methods.split(","),
                            functools.partial(made, options.one, small=options.small), **how).values():
            print(json.dumps(asdict(row)))
        return
    named = options.methods.split(",") if options.methods else None
    names = options.models.split(",") if options.models else list(NAMES)
    if options.depths:
        names = [f"{n} layers" for n in options.depths.split(",")]
    if options.depths or options.ready:
        waits = run_ready(names, options.waits, threads=options.threads, small=options.small,
                          methods=lambda model: named or ready_methods_of(model))
        print(f"\n{waits_table(names, options.threads, waits)}", flush=True)
    elif options.models or not options.write:
        turns = run_turns(names, options.turns, threads=options.threads, small=options.small,
                          rounds=options.rounds, methods=lambda model: named or methods_of(model))
        for model in names:
            print(f"\n{model}\n\n{table(model, options.threads, turns)}", flush=True)
        print(f"\n{bars_table(names, options.threads, turns, {m: bars_of(m) for m in names})}", flush=True)
    if options.write:
        write({row.key: row for row in read_rows(Turn, options.turns)},
              {row.key: row for row in read_rows(Ready, options.waits)})


if __name__ == "__main__":
    main()
