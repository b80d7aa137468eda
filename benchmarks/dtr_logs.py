"""Logs of up to 100,000 instructions to replay: made, not measured, so that they stay the same.

    python benchmarks/dtr_logs.py lstm 100000 lstm.log
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable


class Writer:
    """A program written operation by operation, in the paper's format (appendix C.6)."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._count = 0

    def _write(self, kind: str, **fields: object) -> None:
        self.lines.append(json.dumps({"INSTRUCTION": kind, **fields}))

    def _name(self) -> str:
        self._count += 1
        return f"x{self._count}"

    def _sized(self, name: str, size: int) -> None:
        self._write("MEMORY", NAME=name, MEMORY=str(size))

    def constant(self, size: int) -> str:
        """A parameter or an input."""
        name = self._name()
        self._write("CONSTANT", NAME=name)
        self._sized(name, size)
        return name

    def call(self, name: str, args: list[str], time: int, *sizes: int, alias: int = -1) -> list[str]:
        """An operation with one result per size; ``alias`` is the argument that all are views of."""
        results = [self._name() for _ in sizes]
        self._write("CALL", NAME=name, ARGS=args, RESULT=results, TIME=str(time))
        for result, size in zip(results, sizes, strict=True):
            self._sized(result, size)
            self._write("ALIAS", NAME=result, ALIAS=str(alias))
        return results

    def one(self, name: str, args: list[str], time: int, size: int) -> str:
        """An operation with one result of its own."""
        return self.call(name, args, time, size)[0]

    def mutate(self, name: str, args: list[str], time: int) -> None:
        """An operation that writes to its first argument."""
        self._write("MUTATE", NAME=name, ARGS=args, MUTATE=["0"], TIME=str(time))

    def release(self, *names: str) -> None:
        """The program drops its names."""
        for name in names:
            self._write("RELEASE", NAME=name)


def lstm(instructions: int, source: random.Random) -> list[str]:
    """One layer of LSTM cells, forward and backward; four gates are views of one product."""
    log, width = Writer(), 4096
    weight = log.constant(16 * width)
    hidden, cell = log.constant(width), log.constant(width)
    steps: list[tuple[str, list[str], str, str, str]] = []
    for _ in range(max(1, instructions // 125)):
        x = log.constant(width)
        both = log.one("cat", [x, hidden], 20, 2 * width)
        product = log.one("mm", [both, weight], 800 + source.randrange(50), 4 * width)
        views = log.call("chunk", [product], 1, 0, 0, 0, 0, alias=0)
        gates = [log.one("sigmoid", [view], 40, width) for view in views]
        log.release(product, *views)
        new = log.one("mul", [gates[0], gates[1]], 10, width)
        kept = log.one("mul", [gates[2], cell], 10, width)
        following = log.one("add", [new, kept], 10, width)
        log.release(new, kept)
        squashed = log.one("tanh", [following], 45, width)
        output = log.one("mul", [gates[3], squashed], 10, width)
        steps.append((both, gates, cell, squashed, output))
        hidden, cell = output, following
    gradient = log.one("loss", [hidden], 10, width)
    carried = log.one("zeros", [], 5, width)
    total = log.one("zeros", [], 5, 16 * width)
    for both, gates, before, squashed, output in reversed(steps):
        log.release(output)
        of_gate = log.one("mul", [gradient, squashed], 10, width)
        of_tanh = log.one("mul", [gradient, gates[3]], 10, width)
        of_cell = log.one("tanh_backward", [of_tanh, squashed], 20, width)
        log.mutate("add_", [of_cell, carried], 10)
        log.release(gradient, carried, of_tanh, squashed)
        parts = [
            log.one("mul", [of_cell, gates[1]], 10, width),
            log.one("mul", [of_cell, gates[0]], 10, width),
            log.one("mul", [of_cell, before], 10, width),
            of_gate,
        ]
        carried = log.one("mul", [of_cell, gates[2]], 10, width)
        log.release(of_cell)
        back = [
            log.one("sigmoid_backward", [part, gate], 20, width)
            for part, gate in zip(parts, gates, strict=True)
        ]
        log.release(*parts, *gates)
        joined = log.one("cat", back, 30, 4 * width)
        log.release(*back)
        of_both = log.one("mm", [joined, weight], 800, 2 * width)
        of_weight = log.one("mm", [joined, both], 800, 16 * width)
        log.mutate("add_", [total, of_weight], 60)
        (view,) = log.call("slice", [of_both], 1, 0, alias=0)
        gradient = log.one("copy", [view], 10, width)
        log.release(joined, both, of_weight, of_both, view)
    log.release(gradient, carried)
    return log.lines


def chain(instructions: int, source: random.Random) -> list[str]:
    """A deep residual network, forward and backward: two outputs per norm, additions in place."""
    log, width = Writer(), 8192
    state = log.constant(width)
    blocks: list[tuple[str, list[str], list[str], str]] = []
    for _ in range(max(1, instructions // 66)):
        weights = [log.constant(width), log.constant(width)]
        normed = log.call("norm", [state], 60, width, 64)
        wide = log.one("mm", [normed[0], weights[0]], 900 + source.randrange(90), 4 * width)
        active = log.one("gelu", [wide], 200, 4 * width)
        added = log.one("mm", [active, weights[1]], 900, width)
        log.mutate("add_", [added, state], 20)
        blocks.append((state, [*normed, *weights], [wide, active], added))
        state = added
    gradient = log.one("loss", [state], 10, width)
    for before, (normed, mean, first, second), (wide, active), after in reversed(blocks):
        log.release(after)
        of_active = log.one("mm", [gradient, second], 900, 4 * width)
        of_second = log.one("mm", [gradient, active], 900, width)
        of_wide = log.one("gelu_backward", [of_active, wide], 250, 4 * width)
        log.release(of_active, active, wide)
        of_normed = log.one("mm", [of_wide, first], 900, width)
        of_first = log.one("mm", [of_wide, normed], 900, width)
        inner = log.one("norm_backward", [of_normed, before, mean], 120, width)
        log.mutate("add_", [inner, gradient], 20)
        log.release(gradient, of_normed, of_wide, normed, mean, of_first, of_second)
        gradient = inner
    log.release(gradient)
    return log.lines


def graph(instructions: int, source: random.Random) -> list[str]:
    """A random graph: recent results are read more, one in ten is a view or is written over."""
    log = Writer()
    names = [log.constant(1024) for _ in range(4)]
    fixed = set(names)
    while len(log.lines) < instructions:
        recent = names[-400:]
        args = [recent[-1 - int(len(recent) * source.random() ** 3)] for _ in range(3)]
        args = list(dict.fromkeys(args))
        kind = source.random()
        if kind < 0.05:
            names += log.call("view", args[:1], 1, 0, alias=0)
        elif kind < 0.1 and args[0] not in fixed:
            log.mutate("add_", args, source.randrange(5, 50))
        elif kind < 0.2:
            names += log.call("split", args, source.randrange(50, 500), 2048, 1024)
        else:
            names.append(log.one("f", args, source.randrange(5, 1000), source.randrange(512, 8192)))
        if len(names) > 400:
            gone = names.pop(source.randrange(4, len(names) // 2))
            log.release(gone)
    return log.lines


KINDS: dict[str, Callable[[int, random.Random], list[str]]] = {
    "lstm": lstm,
    "chain": chain,
    "graph": graph,
}


def make(kind: str, instructions: int) -> list[str]:
    """A log's lines: about as many as asked for."""
    return KINDS[kind](instructions, random.Random(0))


if __name__ == "__main__":
    kind, instructions, path = sys.argv[1:]
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in make(kind, int(instructions)))
