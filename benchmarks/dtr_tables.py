"""The tables of docs/dtr.md, measured anew.

    python benchmarks/dtr_tables.py agreement theorem search replays overhead models

Without arguments, all of them.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from dtr_chains import adversary, linear_chain
from torch import nn

import rkmate.dtr

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))


def agreement() -> None:
    """Rows of the reference results that the simulator reproduces in full."""
    data = ROOT / "tests" / "dtr" / "data"
    fields = ("status", "clock", "remat_compute", "max_memory", "tied_choices", "evict_seq_sha1")
    counts = {True: [0, 0], False: [0, 0]}
    for case in json.loads((data / "results.json").read_text()).values():
        program = rkmate.dtr.read_log(data / "logs" / case["log"])
        for row in case["results"]:
            found = rkmate.dtr.simulate(
                program, row["heuristic"], row["budget"], seed=row.get("seed", 0)
            ).as_dict()
            count = counts[row["tied_choices"] == 0]
            count[0] += all(found[field] == row[field] for field in fields)
            count[1] += 1
    print("| rows | agree | of |\n|---|---|---|")
    print(f"| without ties | {counts[True][0]} | {counts[True][1]} |")
    print(f"| with ties | {counts[False][0]} | {counts[False][1]} |")


def theorem() -> None:
    """Operations per node of a linear chain, and of the adversary's network."""
    print("| N | budget | e* | h_DTR | h_DTR-eq | LRU |\n|---|---|---|---|---|---|")
    for length in (16, 64, 256, 1024, 4096):
        budget = 2 * math.ceil(math.sqrt(length))
        cells = []
        for heuristic in ("e*", "dtr", "dtr-eq", "lru"):
            result = rkmate.dtr.simulate(
                linear_chain(length), heuristic, budget, overhead_limit=1000
            )
            cells.append(f"{(result.model_compute + result.remat_compute) / length:.2f}")
        print(f"| {length} | {budget} | {' | '.join(cells)} |")
    print("\n| nodes | paths | operations / nodes | bound N / 2B |\n|---|---|---|---|")
    for nodes, paths in ((200, 10), (400, 16), (800, 16)):
        duel = adversary("dtr-eq", paths, nodes)
        ratio = duel.operations / nodes
        print(f"| {nodes} | {paths} | {ratio:.1f} | {nodes / (2 * paths):.1f} |")


def search() -> None:
    """Time of a replay, and what plain scans would have evaluated."""
    print(
        "| heuristic | status | evictions | scores of plain scans | neighbourhood accesses "
        "| seconds |\n|---|---|---|---|---|---|"
    )
    program = linear_chain(4096)
    for heuristic in rkmate.dtr.HEURISTICS:
        began = time.perf_counter()
        result = rkmate.dtr.simulate(program, heuristic, 1024, overhead_limit=100)
        print(
            f"| {heuristic} | {result.status} | {result.evict_choices} | {result.evaluations} "
            f"| {result.metadata_accesses} | {time.perf_counter() - began:.2f} |",
            flush=True,
        )


def replays() -> None:
    """Processor time of replays of logs of 100,000 instructions, at a part of each log's own peak."""
    from dtr_logs import KINDS, make

    print(
        "| log | instructions | heuristic | ratio | status | evictions | seconds |"
        "\n|---|---|---|---|---|---|---|"
    )
    ratio = 0.7
    for kind in KINDS:
        lines = make(kind, 100_000)
        program = rkmate.dtr.parse_log(lines)
        for heuristic in ("dtr-eq", "dtr-local", "lru", "size", "dtr"):
            began = time.process_time()
            found = rkmate.dtr.simulate(program, heuristic, int(program.memory * ratio))
            print(
                f"| {kind} | {len(lines)} | {heuristic} | {ratio} | {found.status} "
                f"| {found.evict_choices} | {time.process_time() - began:.1f} |",
                flush=True,
            )


def _best(run: Callable[[], object], times: int = 7) -> float:
    best = math.inf
    for _ in range(times):
        began = time.process_time()
        run()
        best = min(best, time.process_time() - began)
    return best


def overhead() -> None:
    """Processor time per operation that the runtime adds when nothing is evicted."""
    print("| operations | eager ms | runtime ms | ratio | us per operation |\n|---|---|---|---|---|")
    for depth, width, rows in ((50, 8, 8), (200, 8, 8), (200, 256, 64), (200, 512, 256)):
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.Tanh()]
        model, x = nn.Sequential(*layers), torch.randn(rows, width)

        def step(model: nn.Module = model, x: torch.Tensor = x) -> None:
            model.zero_grad(set_to_none=True)
            model(x).square().mean().backward()

        def inside(step: Callable[[], None] = step) -> rkmate.dtr.Report:
            with rkmate.dtr(budget=None) as session:
                step()
            return session.report

        inside()
        count = inside().operations
        eager, ours = _best(step), _best(inside)
        print(
            f"| {count} | {eager * 1e3:.1f} | {ours * 1e3:.1f} | {ours / eager:.2f} "
            f"| {(ours - eager) / count * 1e6:.0f} |"
        )


def models() -> None:
    """Dynamic models at 100%, 60% and 40% of their own peak."""
    import dtr_language_model
    import dtr_maml
    import dtr_routing
    import dtr_treelstm
    from dtr_compare import compare, show

    show(compare(dtr_treelstm.task(), steps=1, heuristic="dtr"))
    for module in (dtr_language_model, dtr_maml, dtr_routing):
        show(compare(module.task()))


TABLES = {
    "agreement": agreement,
    "theorem": theorem,
    "search": search,
    "replays": replays,
    "overhead": overhead,
    "models": models,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or TABLES:
        print(f"\n## {name}\n")
        TABLES[name]()
