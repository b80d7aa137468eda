"""Layouts and compiled groups (``layouts="auto"``, ``compile=True``), beside torch.compile and its budgets.

Each row in fresh processes, its steps interleaved with eager's: peak by the exact meter over the level that
stands before a step, time as ratio of medians, and seconds until the first step is done. That is with empty
caches; a second process then finds what the first has compiled, and follows the plan that it has saved.
``inductor`` as the fraction of a row is the smallest peak of torch.compile's rows, which are measured first;
such a row's steps are also interleaved with those of torch.compile at that budget, in the same process.

Each row is appended to ``--rows FILE`` (JSON, one row a line), so that a run can be broken off and taken up
again: what is there is not measured again. ``--write`` makes docs/fused.md of such a file.
``--small`` is the same with tiny models of the same kinds.

Usage: python benchmarks/fused.py --threads 1 --rows fused.jsonl [--models unet,vit] [--methods "eager,..."]
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
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
from beside import Forward, add_row, beside, peak_of, read_rows, step
from fused_rows import Bar, Row, Rows, bars_table, depths_table, table
from peers import DOCS, Case, Segmenter, budgeted, gpt, images

import rkmate
from rkmate.device import inductor

PAGE = DOCS / "fused.md"
INDUCTOR = ("1.0", "0.5", "0.1")
FRACTIONS = ("1.0", "0.7", "0.5", "0.35", "inductor")
NAMES = ("gpt", "gpt12", "resnet18", "resnet50", "regnet", "unet", "t5", "vit")
CONVOLUTIONS = ("resnet18", "resnet50", "regnet", "unet")
SMALLEST = ("inductor 0.5", "inductor 0.1")
"""Of torch.compile's budgets, those of which one has the smallest peak: it depends on the model which."""
OWN_BARS = {"gpt": (0.42, 0.84), "resnet18": (0.6, 1.0), "regnet": (0.7, 0.8), "unet": (0.7, 0.8)}
"""Per model a part of eager's peak, and of its time, that compiled groups are to take there at most."""
DEPTHS = ("inductor 1.0", "rkmate compile 1.0")
"""Of which `--depths` says how long they take to get ready."""
SECONDS = 6
"""Steps are repeated for so long, at least."""


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
    """A model with its inputs; ``12 layers`` is the GPT-2 of the first table with so many."""
    if model.endswith(" layers"):
        layers = int(model.split()[0])
        return gpt(layers, 32, 32, 2, 128) if small else gpt(layers)
    return (SMALL if small else MODELS)[model]()


def methods_of(model: str) -> list[str]:
    """Names of the methods for a model, in the order in which they are measured."""
    if model not in NAMES:
        return list(DEPTHS)
    kinds = ["rkmate", "rkmate compile"]
    if model in CONVOLUTIONS:
        kinds += ["rkmate layouts", "rkmate compile layouts"]
    return ["eager", *(["eager channels-last"] if model in CONVOLUTIONS else []),
            *(f"inductor {f}" for f in INDUCTOR), *(f"{kind} {f}" for f in FRACTIONS for kind in kinds)]


def bars_of(model: str) -> list[Bar]:
    """What is to hold for a model."""
    own = "rkmate compile layouts" if model in CONVOLUTIONS else "rkmate compile"
    bars = [Bar(f"{own} inductor", 1.0, "inductor")]
    if model in OWN_BARS:
        fraction, most = OWN_BARS[model]
        bars.append(Bar(f"{own} {fraction}", most))
    return bars


def in_format(kwargs: dict[str, Any], form: torch.memory_format) -> dict[str, Any]:
    """The arguments, with images of a layout."""
    return {k: v.contiguous(memory_format=form) if v.dim() == 4 else v for k, v in kwargs.items()}


def _asked(method: str, case: Case, eager_peak: int, plan: Path) -> tuple[Forward, rkmate.Plan | None]:
    """A forward by some method. `plan`: where rkmate's plan is, or will be."""
    kind, *more = method.split()
    model, kwargs = case.model, case.kwargs
    if kind == "inductor":
        return budgeted(case, kind, float(more[0])), None
    if kind == "eager":
        if more:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            kwargs = in_format(kwargs, torch.channels_last)
        return lambda: model(**kwargs).loss, None
    how: dict[str, Any] = {"plan": rkmate.Plan.load(plan)} if plan.exists() else {
        "budget": round(float(more[-1]) * eager_peak)}
    settings = rkmate.Settings(layouts="auto" if "layouts" in more else "keep", compile="compile" in more)
    wrapped = rkmate.wrap(model, (), kwargs, progress=False, settings=settings, **how)
    wrapped.plan.save(plan)
    return lambda: wrapped(**kwargs).loss, wrapped.plan


def in_double_precision(case: Case) -> Case:
    """A copy of a model and its inputs, after a step."""
    exact = Case(copy.deepcopy(case.model).double(), {
        k: v.double() if v.is_floating_point() else v for k, v in case.kwargs.items()}, case.lists)
    step(lambda: exact.model(**exact.kwargs).loss, exact.model)
    return exact


def error_of(case: Case, exact: Case) -> float:
    """How far the gradients of a step are from the exact ones: the norm, relative to theirs."""
    pairs = [(p.grad, e.grad) for p, e in zip(case.model.parameters(), exact.model.parameters(), strict=True)
             if p.grad is not None and e.grad is not None]
    return math.sqrt(sum(float((p.double() - e).square().sum()) for p, e in pairs)
                     / sum(float(e.square().sum()) for _, e in pairs))


def one(row: Row, plan: Path, repeats: int, *, small: bool, against: str | None = None) -> Row:
    """Measure one method on one model. Without repeats: how long it takes to get ready, alone. The method
    names a budget by a number. `against`: a method whose steps are then taken in turn with its own, too."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(row.threads)

    def made_case() -> Case:
        torch.manual_seed(0)
        found = case_of(row.model, small=small)
        found.model.train()
        return found

    reference, case = made_case(), made_case()

    def plain() -> Any:
        return reference.model(**reference.kwargs).loss

    level = peak_of(plain, reference.model)
    start = time.perf_counter()
    try:
        forward, made = _asked(row.method, case, level, plan)
    except rkmate.InfeasibleBudget as error:
        return replace(row, failed=f"infeasible: at least {error.minimum_bytes / level:.1%}")
    step(forward, case.model)
    row = replace(row, ready=time.perf_counter() - start, eager_bytes=level)
    if "compile" in row.method.split():
        row = replace(row, groups=inductor.compiled, compiling=inductor.seconds)
    if made is not None:
        row = replace(row, predicted_peak=made.peak_bytes / level, predicted_time=1 + made.overhead,
                      variant=made.variant)
    if repeats:
        found = beside(plain, reference.model, forward, case.model, repeats, min(SECONDS, repeats))
        exact = in_double_precision(reference)
        row = replace(row, peak=found.peak / level, time=found.ratio, eager_seconds=found.eager_seconds,
                      error=error_of(case, exact), eager_error=error_of(reference, exact))
    if repeats and against is not None:
        rival = made_case()
        theirs, _ = _asked(against, rival, level, plan)
        step(theirs, rival.model)
        row = replace(row, of_inductor=beside(theirs, rival.model, forward, case.model, repeats,
                                              min(SECONDS, repeats)).ratio)
    return row


def measured(row: Row, asked: str, repeats: int, *, small: bool, against: str | None = None) -> Row:
    """A row, of one process and, where something is compiled, of a second one. `asked`: the method, with its
    budget as a number; `against`: another one that it is measured beside, too."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
               "RKMATE_CACHE_DIR": f"{folder}/rk", "OMP_NUM_THREADS": str(row.threads)}
        found: list[Row] = []
        for count in (repeats, 0):
            done = subprocess.run(
                [sys.executable, __file__, "--one", row.model, asked, f"{folder}/plan.json", "--repeats",
                 str(count), "--threads", str(row.threads), *["--small"] * small,
                 *([] if against is None else ["--against", against])],
                capture_output=True, text=True, check=False, env=env)
            if done.returncode:
                return replace(row, failed=(done.stderr.strip().splitlines() or ["no message"])[-1][:120])
            found.append(Row(**json.loads(done.stdout.strip().splitlines()[-1])))
            if found[0].failed or not {"compile", "inductor"} & set(asked.split()):
                break
    result = replace(found[0], method=row.method, took=time.perf_counter() - begin)
    return replace(result, again=found[1].ready, compiling_again=found[1].compiling) if found[1:] else result


def run(names: Sequence[str], path: Path | None, *, threads: int, repeats: int, small: bool = False,
        methods: Callable[[str], Sequence[str]] = methods_of) -> Rows:
    """Measure what is not in the file yet. `methods`: those of a model."""
    rows: Rows = {row.key: row for row in read_rows(Row, path)}
    for model in names:
        for method in methods(model):
            row = Row(model, method, threads)
            if row.key in rows:
                continue
            asked, against = method, None
            if method.startswith("rkmate") and method.endswith(" inductor"):
                peaks = [(r.peak, r.method) for r in rows.values() if r.method.startswith("inductor")
                         and r.peak and (r.model, r.threads) == (model, threads)]
                if not peaks:
                    raise SystemExit(f"{method} needs the peaks of inductor on {model}, measured before it")
                peak, against = min(peaks)
                asked = method.removesuffix("inductor") + str(peak)
            row = rows[row.key] = measured(row, asked, repeats if model in MODELS else 0, small=small,
                                           against=against)
            add_row(row, path)
    return rows


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


def write(rows: Rows) -> None:
    """The page of the documentation, of all rows."""
    about = ("# Layouts and compiled groups, measured\n\nPeak and time of a training step relative to "
             "eager's in the same process, beside torch.compile's at its own budgets: [compiled "
             "groups](compile.md), and `layouts=\"auto\"` for networks of convolutions. Parameters and their "
             "gradients stand, and are not counted. Made by `python benchmarks/fused.py --rows FILE --write` "
             "on a CPU "
             f"({platform.machine()}), torch {torch.__version__.partition('+')[0]}.\n")
    kinds = dict.fromkeys((row.model, row.threads) for row in rows.values())
    sections = []
    for threads in sorted({n for model, n in kinds if model in MODELS}):
        names = [name for name in NAMES if (name, threads) in kinds]
        holds = bars_table(names, threads, rows, {name: bars_of(name) for name in names})
        sections.append(f"## In short, {_threads(threads)}\n\nAt the smallest peak of torch.compile or "
                        "below it, and of some models at a part of eager's. One ratio moves by up to a "
                        f"twentieth from run to run.\n\n{holds}\n")
    sections += [f"## {model}, {_threads(threads)}\n\n{MODELS[model].__doc__ or ''}\n\n"
                 f"{table(model, threads, rows)}\n" for model, threads in kinds if model in MODELS]
    for threads in sorted({threads for model, threads in kinds if model not in MODELS}):
        deep = [model for model, n in kinds if model not in MODELS and n == threads]
        sections.append(f"## How long it takes to get ready, {_threads(threads)}\n\n"
                        f"{depths_table(deep, threads, rows, DEPTHS)}\n")
    PAGE.write_text("\n".join([about, *sections]), encoding="utf-8")


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(NAMES), help=f"of {', '.join(MODELS)}; comma separated")
    parser.add_argument("--methods", help="comma separated; all by default")
    parser.add_argument("--bars", action="store_true", help="measure what is to hold alone, and say "
                        "whether it does: torch.compile's smallest peak, groups there and at their own bar")
    parser.add_argument("--depths", help="of GPT-2, comma separated: how long so many layers take to get "
                        "ready, and nothing else")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7, help=f"at least, and for {SECONDS} s")
    parser.add_argument("--rows", type=Path, help="file of rows, read and appended to")
    parser.add_argument("--small", action="store_true", help="tiny models")
    parser.add_argument("--write", action="store_true", help="docs/fused.md")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--against", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        model, method, plan = options.one
        found = one(Row(model, method, options.threads), Path(plan), options.repeats, small=options.small,
                    against=options.against)
        print(json.dumps(asdict(found)))
        return
    how: dict[str, Any] = {"threads": options.threads, "repeats": options.repeats, "small": options.small}
    names = options.models.split(",")
    if options.depths:
        names = [f"{n} layers" for n in options.depths.split(",")]
        rows = run(names, options.rows, **how)
        print(f"\n{depths_table(names, options.threads, rows, DEPTHS)}", flush=True)
    elif options.bars:
        rows = run(names, options.rows, **how, methods=lambda model: [
            *SMALLEST, *(bar.method for bar in bars_of(model))])
        bars = {model: bars_of(model) for model in names}
        print(f"\n{bars_table(names, options.threads, rows, bars)}", flush=True)
    else:
        named = options.methods.split(",") if options.methods else None
        rows = run(names, options.rows, **how, methods=lambda model: named or methods_of(model))
        for model in names:
            print(f"\n{model}\n\n{table(model, options.threads, rows)}", flush=True)
    if options.write and not options.small:
        write(rows)


if __name__ == "__main__":
    main()
