"""Graphs for the tests: made up from a list of forward operations, or at random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from rkmate.ir.cd import CDGraph, CNode, DNode


@dataclass
class Op:
    """A forward operation and what its backward reads."""

    name: str
    inputs: Sequence[str]
    outputs: dict[str, int]
    """Name -> bytes."""
    time: float
    saved: Sequence[str] = ()
    """Forward data that its backward nodes read."""
    parameters: dict[str, int] = field(default_factory=dict)
    """Parameters with a gradient: name -> bytes."""
    overhead: int = 0
    split: bool = False
    """One backward node for the input and one for the parameters, as for a matrix product."""
    weight_reads: Sequence[str] = ()
    """With ``split``: what the parameters' backward node reads."""


def differentiate(ops: Sequence[Op], inputs: dict[str, int], outputs: Sequence[str]) -> CDGraph:
    """A block's graph: forward nodes, then one or two backward nodes per operation and the
    accumulations of gradients that meet."""
    d: list[DNode] = []
    index: dict[str, int] = {}

    def data(name: str, size: int, kind: str = "data") -> int:
        index[name] = len(d)
        d.append(DNode(name, size, kind))  # type: ignore[arg-type]
        return index[name]

    sizes = dict(inputs)
    for name, size in inputs.items():
        data(name, size)
    c: list[CNode] = []
    for op in ops:
        made = tuple(data(n, s) for n, s in op.outputs.items())
        sizes.update(op.outputs)
        c.append(CNode(op.name, "forward", tuple(index[n] for n in op.inputs), made, op.time,
                       op.overhead))
    loss = len(c)
    output_grads = tuple(data(f"{n}.grad", sizes[n], "grad") for n in outputs)
    current: dict[str, int] = dict(zip(outputs, output_grads, strict=True))
    leaving: list[int] = []

    def arrive(name: str, parts: list[tuple[str, int]]) -> None:
        """Record a new contribution to a gradient, adding it to what is there."""
        made = data(f"{name}.grad.{len(c)}", sizes[name], "grad")
        parts.append((name, made))

    for op in reversed(ops):
        incoming = tuple(current[n] for n in op.outputs if n in current)
        if not incoming:
            continue
        reads = tuple(index[n] for n in op.saved)
        parts: list[tuple[str, int]] = []
        for name in op.inputs:
            arrive(name, parts)
        weights = tuple(data(f"{n}.grad", s, "grad") for n, s in op.parameters.items())
        leaving += weights
        if op.split:
            c.append(CNode(f"{op.name}.backward", "backward", (*incoming, *reads),
                           tuple(j for _, j in parts), op.time, op.overhead))
            c.append(CNode(f"{op.name}.backward.weights", "backward",
                           (*incoming, *(index[n] for n in op.weight_reads)), weights, op.time))
        else:
            c.append(CNode(f"{op.name}.backward", "backward", (*incoming, *reads),
                           (*(j for _, j in parts), *weights), 2 * op.time, op.overhead))
        for name, made in parts:
            if name in current:
                total = data(f"{name}.grad.sum{len(c)}", sizes[name], "grad")
                c.append(CNode(f"{name}.accumulate", "backward", (current[name], made), (total,),
                               sizes[name] * 1e-10))
                current[name] = total
            else:
                current[name] = made
    return CDGraph(
        tuple(d), tuple(c), loss, inputs=tuple(index[n] for n in inputs),
        outputs=tuple(index[n] for n in outputs), output_grads=output_grads,
        input_grads=tuple(current[n] for n in inputs if n in current and current[n]
                          not in output_grads),
        releases=dict.fromkeys(leaving, len(c) - 1)).verify()


KB = 1024


def mlp_half(rows: int = 1024, width: int = 256) -> CDGraph:
    """Layer norm, linear, tanh-GELU from elementary operations, linear, dropout, residual."""
    x, u = rows * width * 4, rows * width * 16
    stat = rows * 4
    touch = 1e-10   # seconds per byte
    mm = 2 * rows * width * width * 4 / 1e11

    def unary(name: str, inputs: Sequence[str], output: str, saved: Sequence[str],
              cost: float = 2.0) -> Op:
        return Op(name, inputs, {output: u}, cost * u * touch, saved)

    ops = [
        Op("norm", ["x"], {"h": x, "mean": stat, "rstd": stat}, 3 * x * touch,
           ["x", "mean", "rstd"], {"gamma": 4 * width, "beta": 4 * width}),
        Op("up", ["h"], {"u": u}, mm, [], {"W1": 16 * width * width, "b1": 16 * width},
           split=True, weight_reads=["h"]),
        unary("half", ["u"], "u_half", []),
        unary("cube", ["u"], "u3", ["u"], 6.0),
        unary("scale", ["u3"], "u3s", []),
        unary("add", ["u", "u3s"], "inner", [], 3.0),
        unary("mul", ["inner"], "arg", []),
        unary("tanh", ["arg"], "t", ["t"], 8.0),
        unary("plus1", ["t"], "t1", []),
        unary("gate", ["u_half", "t1"], "a", ["u_half", "t1"], 3.0),
        Op("down", ["a"], {"v": x}, mm, [], {"W2": 16 * width * width, "b2": 4 * width},
           split=True, weight_reads=["a"]),
        Op("dropout", ["v"], {"w": x, "mask": x // 4}, 4 * x * touch, ["mask"]),
        Op("residual", ["x", "w"], {"y": x}, 3 * x * touch),
    ]
    return differentiate(ops, {"x": x}, ["y"])


def attention_half(rows: int = 1024, width: int = 256, heads: int = 4, length: int = 256,
                   dropout: bool = True) -> CDGraph:
    """Layer norm, query-key-value product, explicit softmax attention, projection, residual."""
    x = rows * width * 4
    stat = rows * 4
    scores = rows * heads * length * 4
    touch = 1e-10
    mm = 2 * rows * width * width / 1e11
    att = 2 * rows * length * width / 1e11
    big = scores * touch
    ops = [
        Op("norm", ["x"], {"h": x, "mean": stat, "rstd": stat}, 3 * x * touch,
           ["x", "mean", "rstd"], {"gamma": 4 * width, "beta": 4 * width}),
        Op("qkv", ["h"], {"qkv": 3 * x}, 3 * mm, [],
           {"W": 12 * width * width, "b": 12 * width}, split=True, weight_reads=["h"]),
        Op("q", ["qkv"], {"q": x}, 2 * x * touch),
        Op("k", ["qkv"], {"k": x}, 2 * x * touch),
        Op("v", ["qkv"], {"v": x}, 2 * x * touch),
        Op("kt", ["k"], {"kt": x}, 2 * x * touch),
        Op("scores", ["q", "kt"], {"s": scores}, att, ["q", "kt"]),
        Op("scale", ["s"], {"s2": scores}, 2 * big),
        Op("mask", ["s2"], {"s3": scores}, 3 * big),
        Op("softmax", ["s3"], {"p": scores}, 5 * big, ["p"]),
    ]
    last = "p"
    if dropout:
        ops.append(Op("drop", ["p"], {"pd": scores, "pm": scores // 4}, 4 * big, ["pm"]))
        last = "pd"
    ops += [
        Op("context", [last, "v"], {"o": x}, att, [last, "v"]),
        Op("merge", ["o"], {"o2": x}, 2 * x * touch),
        Op("proj", ["o2"], {"z": x}, mm, [], {"Wo": 4 * width * width, "bo": 4 * width},
           split=True, weight_reads=["o2"]),
    ]
    last = "z"
    if dropout:
        ops.append(Op("zdrop", ["z"], {"zd": x, "zm": x // 4}, 4 * x * touch, ["zm"]))
        last = "zd"
    ops.append(Op("residual", ["x", last], {"y": x}, 3 * x * touch))
    return differentiate(ops, {"x": x}, ["y"])


def chain(count: int, *, seed: int = 0, skips: float = 0.0) -> CDGraph:
    """`count` operations in a row, each saving its input, its output or nothing; some also read
    an earlier value."""
    rng = random.Random(seed)
    names = ["x"]
    ops: list[Op] = []
    for i in range(count):
        reads = [names[-1]]
        if len(names) > 3 and rng.random() < skips:
            reads.append(rng.choice(names[-6:-1]))
        outputs = {f"a{i}": rng.choice([1, 2, 4, 4, 8]) * KB}
        if rng.random() < 0.2:
            outputs[f"m{i}"] = rng.choice([1, 2]) * KB
        saved = [n for n in (*reads, *outputs) if rng.random() < 0.4]
        ops.append(Op(f"f{i}", reads, outputs, rng.choice([1, 1, 2, 5, 20]) * 1e-3, saved,
                      overhead=rng.choice([0, 0, 0, 2 * KB])))
        names.append(f"a{i}")
    return differentiate(ops, {"x": 4 * KB}, [names[-1]])


def random_graph(rng: random.Random, forward: int = 4, backward: int = 4) -> CDGraph:
    """Any valid block: several outputs, overheads, size-0 data, exits, arbitrary reads."""
    d: list[DNode] = [DNode("x", rng.randint(0, 9))]
    c: list[CNode] = []
    there = [0]

    def places(reads: Sequence[int], made: Sequence[int]) -> tuple[int, ...]:
        """Sometimes, the inputs that the only output may overwrite: those of its size."""
        if len(made) != 1 or rng.random() < 0.4:
            return ()
        return tuple(j for j in reads if d[j].size == d[made[0]].size)

    for i in range(forward):
        made = []
        for _ in range(rng.choice([1, 1, 2])):
            made.append(len(d))
            d.append(DNode(f"d{len(d)}", rng.choice([0, 1, 2, 4, 4, 4, 8])))
        reads = tuple(sorted(rng.sample(there, min(len(there), rng.choice([1, 1, 2])))))
        c.append(CNode(f"f{i}", "forward", reads, tuple(made), float(rng.choice([0, 1, 2, 5, 9])),
                       rng.choice([0, 0, 3]), donors=places(reads, made)))
        there += made
    data = [j for j in there if j]
    outputs = tuple(sorted({data[-1], rng.choice(data)})) if data and rng.random() < 0.9 else ()
    output_grads = []
    for j in outputs:
        output_grads.append(len(d))
        d.append(DNode(f"g{j}", d[j].size, "grad"))
    grads = list(output_grads)
    stay: list[int] = []
    releases: dict[int, int] = {}
    for i in range(backward):
        reads = set(rng.sample(there, min(len(there), rng.choice([0, 1, 1, 2]))))
        if grads:
            reads.add(rng.choice(grads))
        made = []
        for _ in range(rng.choice([0, 1, 1, 2])):
            made.append(len(d))
            d.append(DNode(f"g{len(d)}", rng.choice([0, 1, 4, 4]), "grad"))
            kind = rng.random()
            if kind < 0.2:
                stay.append(made[-1])
            elif kind < 0.4:
                releases[made[-1]] = rng.randint(forward + i, forward + backward - 1)
        c.append(CNode(f"b{i}", "backward", tuple(sorted(reads)), tuple(made),
                       float(rng.choice([1, 2, 3])), rng.choice([0, 0, 2]),
                       donors=places(tuple(sorted(reads)), made)))
        grads += made
    return CDGraph(tuple(d), tuple(c), forward, inputs=(0,), outputs=outputs,
                   output_grads=tuple(output_grads), input_grads=tuple(stay), releases=releases).verify()
