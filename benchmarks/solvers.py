"""How long two dynamic programs take on problems as large as the largest of their papers.

Rotor: a chain of 339 stages, as long as ResNet-1001's, with 500 memory slots (Beaumont et al. 2019,
section 5.2). Pruned lower sets: a graph of the shape of DenseNet-161, 568 nodes (Kusumoto et al.
2019, section 5). Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rkmate.planners.canonical import Dag
from rkmate.planners.lower_sets import LowerSetProgram

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.rotor.paper import large_chain, rotor


def densenet(layers: Sequence[int] = (6, 12, 36, 24), growth: int = 48, side: int = 224) -> Dag:
    """The forward of a DenseNet for one image: a convolution takes 10, any other node 1, as in the
    paper's experiment; sizes are bytes."""
    times: list[float] = []
    sizes: list[int] = []
    edges: list[tuple[int, int]] = []

    def node(reads: Sequence[int], channels: int, side: int, convolution: bool = False) -> int:
        times.append(10.0 if convolution else 1.0)
        sizes.append(4 * channels * side * side)
        edges.extend((v, len(times) - 1) for v in reads)
        return len(times) - 1

    def unit(x: int, width: int, channels: int, side: int) -> int:
        """Batch norm, ReLU, convolution."""
        relu = node([node([x], width, side)], width, side)
        return node([relu], channels, side, convolution=True)

    width, side = 2 * growth, side // 2
    x = node([node([], 3, 2 * side)], width, side, convolution=True)
    x = node([node([x], width, side)], width, side)
    side //= 2
    x = node([x], width, side)
    for number, count in enumerate(layers):
        features = [x]
        for _ in range(count):
            joined = node(features, width, side) if len(features) > 1 else x
            features.append(unit(unit(joined, width, 4 * growth, side), 4 * growth, growth, side))
            width += growth
        x = node(features, width, side)
        if number < len(layers) - 1:
            x = unit(x, width, width // 2, side)
            width, side = width // 2, side // 2
            x = node([x], width, side)
    x = node([node([x], width, side)], width, side)
    x = node([node([x], width, 1)], 1000, 1)
    node([x], 1, 1)
    return Dag(tuple(times), tuple(sizes), tuple(sorted(edges)))


def seconds(call: Callable[[], object], runs: int) -> float:
    """Median of some runs."""
    taken = []
    for _ in range(runs):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def main() -> None:
    """Time both and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=339, help="of the chain (default: 339)")
    parser.add_argument("--slots", type=int, default=500, help="of memory (default: 500)")
    parser.add_argument("--runs", type=int, default=3, help="the median counts (default: 3)")
    options = parser.parse_args()
    problem, dag = large_chain(options.stages), densenet()
    program = LowerSetProgram(dag)
    budget = 2 * program.minimum_bytes()
    print("| planner | problem | seconds |")
    print("|---|---|--:|")
    for planner, what, call in (
            ("rotor", f"{options.stages} stages, {options.slots} slots, all budgets at once",
             lambda: rotor(problem, options.slots)),
            ("lower-sets", f"{len(dag)} nodes, the program and its smallest budget",
             lambda: LowerSetProgram(dag).minimum_bytes()),
            ("lower-sets", f"{len(dag)} nodes, one budget", lambda: program.solve(budget))):
        print(f"| {planner} | {what} | {seconds(call, options.runs):.1f} |", flush=True)


if __name__ == "__main__":
    main()
