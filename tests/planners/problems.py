"""Random captured models: a CD graph, its blocks, and the chain of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hypothesis import strategies as st

from rkmate.ilp.grid import evaluate_option, without_waste
from rkmate.ir.cd import CDGraph, CNode, DNode
from rkmate.ir.chain import Block, Chain, Option
from rkmate.planners.canonical import Dag
from rkmate.planners.protocol import Problem


def training_graph(reads: Sequence[Sequence[int]], sizes: Sequence[int], times: Sequence[int],
                   overheads: Sequence[int], saved: Sequence[int],
                   needs_output: Sequence[bool]) -> CDGraph:
    """Forward nodes with one value (and a saved one) each, and a backward node for each of them.

    ``reads[i]``: forward nodes whose values node i reads; none: the model's input. What nobody
    reads is an output. The backward of i makes one gradient for each value that i reads.
    """
    n = len(reads)
    d = [DNode("x", 0)] + [DNode(f"v{i}", sizes[i]) for i in range(n)]
    extra: dict[int, int] = {}
    for i in range(n):
        if saved[i]:
            extra[i] = len(d)
            d.append(DNode(f"s{i}", saved[i], "saved"))
    readers: list[list[int]] = [[] for _ in range(n)]
    for i, inputs in enumerate(reads):
        for j in inputs:
            readers[j].append(i)
    gradient: dict[tuple[int, int], int] = {}     # (reader, value) -> D node
    arriving: dict[int, int] = {}
    for j in range(n):
        if not readers[j]:
            arriving[j] = len(d)
            d.append(DNode(f"dout{j}", sizes[j], "grad"))
    c = []
    for i in range(n):
        inputs = tuple(1 + j for j in reads[i]) or (0,)
        outputs = (1 + i, extra[i]) if i in extra else (1 + i,)
        c.append(CNode(f"f{i}", "forward", inputs, outputs, float(times[i]), overheads[i]))
    releases = {}
    for i in range(n - 1, -1, -1):
        inputs = [gradient[r, i] for r in readers[i]] or [arriving[i]]
        inputs += [1 + j for j in reads[i]] or [0]
        if i in extra:
            inputs.append(extra[i])
        if needs_output[i]:
            inputs.append(1 + i)
        outputs = []
        for j in reads[i]:
            gradient[i, j] = len(d)
            outputs.append(len(d))
            d.append(DNode(f"d{j}_{i}", sizes[j], "grad"))
        if not outputs or sizes[i] % 2:
            releases[len(d)] = len(c)
            outputs.append(len(d))
            d.append(DNode(f"w{i}", 1, "grad"))
        c.append(CNode(f"b{i}", "backward", tuple(dict.fromkeys(inputs)), tuple(outputs),
                       float(2 * times[i]), overheads[i]))
    return CDGraph(tuple(d), tuple(c), n, (0,), tuple(1 + j for j in arriving),
                   tuple(arriving.values()), (), releases).verify()


def problem_of(graph: CDGraph, edges: Sequence[int]) -> Problem:
    """Cut a graph of `training_graph` into blocks: ``edges`` are the first nodes of the blocks."""
    n = graph.loss
    of = [sum(e <= i for e in edges) for i in range(n)]
    of += [of[2 * n - 1 - k] for k in range(n, 2 * n)]
    count = of[n - 1] + 1
    held = frozenset(graph.outputs)
    cuts: list[set[int]] = [set() for _ in range(count + 1)]
    grads: list[set[int]] = [set() for _ in range(count + 1)]
    for j in range(len(graph.d)):
        made = graph.producer[j]
        if j in graph.output_grads or (made is not None and made >= n):
            start = count if made is None else of[made]
            low = min((of[r] for r in graph.readers[j]), default=start)
            for b in range(low + 1, start + 1):
                grads[b].add(j)
        elif made is not None:
            last = max([of[made], *(of[r] for r in graph.readers[j] if r < n)])
            for b in range(of[made] + 1, (count if j in held else last) + 1):
                cuts[b].add(j)
    blocks, block_c = [], []
    for b in range(count):
        c = tuple(i for i in range(2 * n) if of[i] == b)
        local_graph = _local(graph, c, cuts, grads, b, held)
        blocks.append(_options(local_graph))
        block_c.append(c)
    sizes = {j: 0 if j in held else graph.d[j].size for j in range(len(graph.d))}
    total = sum(graph.d[j].size for j in held)
    chain = Chain(tuple(blocks), tuple(map(frozenset, cuts)), sizes,
                  tuple(sum(graph.d[j].size for j in g) for g in grads), (total,) * count)
    return Problem(replace(graph, held=tuple(sorted(held))), chain.verify(), tuple(block_c))


def _local(graph: CDGraph, c: Sequence[int], cuts: Sequence[set[int]], grads: Sequence[set[int]],
           b: int, held: frozenset[int]) -> CDGraph:
    made = {j for i in c for j in graph.c[i].outputs}
    arriving = sorted(grads[b + 1])
    touched = [j for i in c for j in (*graph.c[i].inputs, *graph.c[i].outputs)]
    d = list(dict.fromkeys([*sorted(cuts[b]), *touched, *arriving, *sorted(grads[b])]))
    place = {j: k for k, j in enumerate(d)}
    nodes = tuple(DNode(graph.d[j].name, 0 if j in held else graph.d[j].size, graph.d[j].kind)
                  for j in d)
    computations = tuple(
        CNode(graph.c[i].name, graph.c[i].phase, tuple(place[j] for j in graph.c[i].inputs),
              tuple(place[j] for j in graph.c[i].outputs), graph.c[i].time, graph.c[i].overhead)
        for i in c)
    return CDGraph(nodes, computations, len(c) // 2,
                   tuple(place[j] for j in d if j not in made and j not in arriving),
                   tuple(place[j] for j in sorted(cuts[b + 1]) if j in made),
                   tuple(place[j] for j in arriving), tuple(place[j] for j in sorted(grads[b])),
                   {place[j]: c.index(i) for j, i in graph.releases.items() if j in made}).verify()


def _options(graph: CDGraph) -> Block:
    """Two options: nothing recomputed, and all of the forward computed again."""
    everything = evaluate_option(graph, graph.backward)
    again = evaluate_option(graph, without_waste(graph, [*graph.forward, *graph.backward]))
    options: tuple[Option, ...] = (everything, again)
    peak = sum(graph.d[j].size for i in graph.forward for j in graph.c[i].outputs)
    peak += max(graph.c[i].overhead for i in graph.forward)
    return Block(everything.forward_seconds, peak, options)


@st.composite
def problems(draw: st.DrawFn, least: int = 2, most: int = 6) -> Problem:
    n = draw(st.integers(least, most))
    reads = [[]]
    for i in range(1, n):
        reads.append(sorted(draw(st.sets(st.integers(max(0, i - 3), i - 1), min_size=1,
                                         max_size=2))))

    def numbers(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=n, max_size=n))

    graph = training_graph(reads, numbers(1, 6), numbers(1, 5), numbers(0, 3), numbers(0, 2),
                           draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    edges = sorted(draw(st.sets(st.integers(1, n - 1), max_size=3)))
    return problem_of(graph, edges)


def stack(layers: int, seed: int = 0) -> Problem:
    """A deterministic model of `layers` residual blocks of four nodes."""
    reads: list[list[int]] = [[]]
    edges = []
    for _ in range(layers):
        x = len(reads) - 1
        edges.append(x + 1)
        reads += [[x], [x + 1], [x + 2], [x, x + 3]]
    n = len(reads)
    sizes = [4 + (7 * i + seed) % 5 for i in range(n)]
    times = [1 + (5 * i + seed) % 7 for i in range(n)]
    graph = training_graph(reads, sizes, times, [i % 3 for i in range(n)], [i % 2 for i in range(n)],
                           [i % 4 == 2 for i in range(n)])
    return problem_of(graph, edges)


def plain_graph(reads: Iterable[Iterable[int]], times: Iterable[float],
                sizes: Iterable[int]) -> CDGraph:
    """Return a DAG of nodes with one value each, all of which may run again (Checkmate, section 4.1).

    `reads`: for each node, in topological order, the nodes whose values it reads.
    """
    names = list(reads)
    return CDGraph(
        tuple(DNode(f"v{k}", size) for k, size in enumerate(sizes)),
        tuple(CNode(f"v{k}", "forward", tuple(inputs), (k,), t)
              for k, (inputs, t) in enumerate(zip(names, times, strict=True))),
        len(names)).verify()


def overhead(dag: Dag, sets: Sequence[int]) -> float:
    """Seconds of recomputation of a sequence of lower sets: Kusumoto et al. 2019, equation (1)."""
    result, before = 0.0, 0
    for lower in sets:
        result += dag.time(lower & ~before & ~dag.boundary(lower))
        before = lower
    return result


def peak(dag: Dag, sets: Sequence[int]) -> int:
    """Peak in bytes, without liveness analysis: equation (2)."""
    result = kept = before = 0
    for lower in sets:
        own = dag.readers(lower) & ~lower
        others = dag.read(dag.readers(lower)) & ~lower
        result = max(result, dag.bytes(kept) + 2 * dag.bytes(lower & ~before) + dag.bytes(own)
                     + dag.bytes(others))
        kept |= dag.boundary(lower)
        before = lower
    return result
