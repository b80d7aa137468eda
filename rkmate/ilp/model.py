"""rk-Checkmate: the integer program of one block, built once, solved for many budgets.

Rockmate, section 3.3 and appendix B. BlockStages are counted as in `stages`; within a stage
recomputations run in index order.

Variables (the paper's names where it has them):

- ``R[t, f]``: forward node f is recomputed in stage t.
- ``S[t, d]``: forward data d is carried into stage t. ``S[0, d]`` is what the block saves.
- ``A[t, d, u]``: d is alive in stage t when node u, one of its readers, is about to run; u = -1
  stands for the end of the stage. The paper's *alive*, but only lower bounds act on it, so it may
  be continuous, and neither *create* nor *delete* is needed: a node that recomputes d replaces a
  carried copy, hence ``S[t, d] + R[t, producer(d)] <= 1`` loses nothing, and what is alive at a
  step is what a later step of the stage, or a later stage, reads.
- ``M_peak`` and ``M_save`` are variables that each solve fixes. A program has ``M_peak`` only if some row
  bounds memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property

from rkmate.ilp.highs import Rows, Term
from rkmate.ilp.stages import BlockStages
from rkmate.ir.cd import CDGraph

TIME_SCALE = 1000.0
"""The block's own time in units of the objective: keeps the coefficients near 1."""
TIE = 0.1
"""Weight of the saved bytes in the objective: ties in time go to the one that saves least."""
RECOMPUTE = 1e-3
"""Cost of any recomputation, so that a node whose time was measured as 0 is not run for nothing."""
EXACT_UNITS = 200_000
"""Memory is counted in the greatest common divisor of all sizes as long as the save-all peak is at
most this many of it: nothing is rounded, and what fits exactly is found."""
UNITS = 20_000
"""Otherwise in this fraction of the save-all peak."""

def _unit(graph: CDGraph, save_all_peak: int) -> int:
    divisor = math.gcd(*(d.size for d in graph.d), *(c.overhead for c in graph.c)) or 1
    return divisor if save_all_peak <= EXACT_UNITS * divisor else max(1, save_all_peak // UNITS)


class BlockModel:
    """The program of one block. Only the two budgets change between solves."""

    def __init__(self, stages: BlockStages, save_all_peak: int) -> None:
        """Build the program. `save_all_peak`: bytes that the block needs if nothing is recomputed."""
        self.stages = stages
        self.graph: CDGraph = stages.graph
        self.unit = _unit(self.graph, save_all_peak)
        """Bytes per unit of memory. Sizes round up, budgets round down."""
        self.base_seconds = sum(c.time for c in self.graph.c)
        self.program = Rows()
        self.S: dict[tuple[int, int], int] = {}
        self.R: dict[tuple[int, int], int] = {}
        self.A: dict[tuple[int, int, int], int] = {}
        self._floor = self._units(stages.floor)
        self._variables()
        self._feasibility()
        for t in range(len(stages.stages)):
            self._memory(t)
        self._saved()

    @staticmethod
    def entries(stages: BlockStages) -> int:
        """Estimate how many coefficients the program would have, which is what building it costs."""
        return sum(len(s.recomputable) * len(s.carried) for s in stages.stages)

    @property
    def lowest_peak(self) -> int:
        """Bytes below which the program has no solution, whatever is recomputed."""
        return self._floor * self.unit

    # -- the pieces --------------------------------------------------------------------------

    @cached_property
    def _readers(self) -> dict[int, tuple[int, ...]]:
        """Forward readers of each D node, ascending."""
        loss = self.graph.loss
        return {j: tuple(sorted({u for u in readers if u < loss}))
                for j, readers in enumerate(self.graph.readers)}

    def _units(self, n: int) -> int:
        return -(-n // self.unit)

    def _size(self, j: int) -> int:
        return self._units(self.graph.d[j].size)

    def _producer(self, j: int) -> int:
        i = self.graph.producer[j]
        assert i is not None
        return i

    @cached_property
    def _m_peak(self) -> int:
        return self.program.column("M_peak", 0)

    def _at_most(self, most: float, terms: Iterable[Term]) -> None:
        self.program.weighted(-math.inf, terms, most)

    def _variables(self) -> None:
        """Add S and R. Their costs are the time of recomputations and, to break ties, the bytes saved."""
        total = sum(self._size(j) for stage in self.stages.stages[:1] for j in stage.carried
                    if j not in self.stages.outputs)
        for t, stage in enumerate(self.stages.stages):
            for j in stage.carried:
                saved = t == 0 and j not in self.stages.outputs and total
                cost = TIE * self._size(j) / total if saved else 0.0
                self.S[t, j] = self.program.column(f"S_{t}_{j}", 0, 1, cost, integer=True)
            for f in stage.recomputable:
                self.R[t, f] = self.program.column(f"R_{t}_{f}", 0, 1, self.cost(f), integer=True)

    def cost(self, f: int) -> float:
        """Return the cost of one recomputation of f in the objective."""
        scale = TIME_SCALE / self.base_seconds if self.base_seconds > 0 else 0.0
        return self.graph.c[f].time * scale + RECOMPUTE

    def _feasibility(self) -> None:
        stages = self.stages.stages
        for t, stage in enumerate(stages):
            need = set(stage.need)
            for j in stage.carried:
                i = self._producer(j)
                # Needed by the stage's backward node: there, one way or the other. Elsewhere at
                # most one way: a recomputation replaces what was carried.
                least = 1 if j in need else -math.inf
                self.program.weighted(least, [(self.S[t, j], 1), (self.R[t, i], 1)], 1)
                if t + 1 < len(stages) and (t + 1, j) in self.S:
                    # S[t+1, e] <= S[t, e] + R[t, t']
                    self._at_most(0, [(self.S[t + 1, j], 1), (self.S[t, j], -1), (self.R[t, i], -1)])
            for f in stage.recomputable:
                for j in dict.fromkeys(self.graph.c[f].inputs):
                    if j not in self.stages.free:
                        # R[t, t'] <= R[t, t''] + S[t, e]
                        i = self._producer(j)
                        self._at_most(0, [(self.R[t, f], 1), (self.R[t, i], -1), (self.S[t, j], -1)])

    def _alive(self, t: int, j: int, k: int) -> int | None:
        """Return the variable for: d is alive when step k of stage t is about to run, given that it was made
        or carried before. None: never. For data that the stage's backward node does not read."""
        assert j not in self.stages.stages[t].need
        for u in self._readers[j]:
            if u >= k and (t, u) in self.R:
                return self._alive_at_reader(t, j, u)
        return self.S.get((t + 1, j))

    def _alive_at_reader(self, t: int, j: int, u: int) -> int:
        if (t, j, u) in self.A:
            return self.A[t, j, u]
        later = self._alive(t, j, u + 1)
        if later is None:
            # The last reader decides alone.
            self.A[t, j, u] = self.R[t, u]
            return self.R[t, u]
        alive = self.A[t, j, u] = self.program.column(f"A_{t}_{j}_{u}", 0, 1)
        self.program.weighted(0, [(alive, 1), (self.R[t, u], -1)])
        self.program.weighted(0, [(alive, 1), (later, -1)])
        return alive

    def _memory(self, t: int) -> None:
        """Add U[t, t'] + tmp R[t, t'] <= M_peak at each step of stage t, including its backward node.

        If a step does not run, the sum is what stays alive from the step before: the
        inequality holds without a big M.
        """
        stage = self.stages.stages[t]
        unit = self._units
        carried = [(self.S[t, j], float(self._size(j))) for j in stage.carried]
        self._peak(carried, unit(stage.idle))
        for k in stage.recomputable:
            node = self.graph.c[k]
            fixed = unit(stage.before)
            terms: list[Term] = []
            donors = self._donors_of(t, k)
            donor = donors[0] if len(donors) == 1 else None
            for j in stage.carried:
                if self._producer(j) >= k:
                    terms.append((self.S[t, j], float(self._size(j))))
                    continue
                if j in stage.need:
                    fixed += self._size(j)
                    continue
                # If the output overwrites an input, that input counts only if it lives on.
                alive = self._alive(t, j, k + 1 if j == donor else k)
                if alive is not None:
                    terms.append((alive, float(self._size(j))))
            own = sum(self._size(j) for j in node.outputs) + unit(node.overhead)
            terms.append((self.R[t, k], float(own)))
            if len(donors) > 1:
                alive_after = [self._alive(t, j, k + 1) for j in donors]
                terms.append(self._taken(f"{t}_{k}", donors, alive_after, self.R[t, k]))
            self._peak(terms, fixed)
        terms = []
        fixed = unit(stage.during)
        donor = stage.donors[0] if len(stage.donors) == 1 else None
        for j in stage.carried:
            if j in stage.need and j != donor:
                fixed += self._size(j)
            elif (t + 1, j) in self.S:
                terms.append((self.S[t + 1, j], float(self._size(j))))
        if len(stage.donors) > 1:
            alive_after = [self.S.get((t + 1, j)) for j in stage.donors]
            terms.append(self._taken(f"{t}_backward", stage.donors, alive_after))
        self._peak(terms, fixed)

    def _donors_of(self, t: int, k: int) -> tuple[int, ...]:
        """Return the inputs whose place the output of k takes when they die in step k of stage t."""
        need = self.stages.stages[t].need
        return tuple(j for j in self.graph.c[k].donors
                     if j not in self.stages.free and j not in need)

    def _taken(self, name: str, donors: Sequence[int], alive_after: Sequence[int | None],
               runs: int | None = None) -> Term:
        """Return the term for an output that overwrites one of several inputs, whichever dies. Only upper
        bounds act on the variable, so it may be continuous."""
        taken = self.program.column(f"T_{name}", 0, 1)
        if runs is not None:
            self._at_most(0, [(taken, 1), (runs, -1)])
        alive = [a for a in dict.fromkeys(alive_after) if a is not None]
        self._at_most(len(donors), [(taken, 1), *((a, 1) for a in alive)])
        return taken, -float(min(self._size(j) for j in donors))

    def _peak(self, terms: Iterable[Term], fixed: int) -> None:
        merged: dict[int, float] = {}
        for variable, weight in terms:
            merged[variable] = merged.get(variable, 0.0) + weight
        self._floor = max(self._floor, fixed + int(sum(w for w in merged.values() if w < 0)))
        if fixed + sum(w for w in merged.values() if w > 0) <= self.budget(self.stages.floor):
            return   # holds at every budget that can be met at all
        self._at_most(-fixed, [*merged.items(), (self._m_peak, -1)])

    def _saved_terms(self) -> list[Term]:
        return [(s, float(self._size(j))) for (t, j), s in self.S.items()
                if t == 0 and j not in self.stages.outputs]

    def _saved(self) -> None:
        """Add the limits M_save at the loss, and M_peak during the forward with all saved values in
        memory."""
        self._at_most(0, [*self._saved_terms(), (self.program.column("M_save", 0), -1)])
        for i, (base, dead) in enumerate(zip(self.stages.forward_base, self.stages.forward_dead,
                                             strict=True)):
            last = i + 1 == len(self.stages.forward_base)
            donors = self.stages.forward_donors
            if last or donors[i + 1] or base > self.stages.forward_base[i + 1]:
                # A node that needs no more than the next one, with no more data saved, cannot bind.
                terms = [(self.S[0, j], float(self._size(j))) for j in dead]
                if donors[i]:
                    out, = self.graph.c[i].outputs
                    terms.append(self._taken(
                        f"forward_{i}", donors[i], [self.S.get((0, j)) for j in donors[i]],
                        self.S[0, out] if out not in self.stages.outputs and not any(
                            r < self.graph.loss for r in self.graph.readers[out]) else None))
                self._peak(terms, self._units(base))

    # -- in and out --------------------------------------------------------------------------

    def budget(self, n: int) -> int:
        """Return bytes to units, rounded down."""
        return n // self.unit

    def order(self, values: dict[str, float]) -> tuple[int, ...]:
        """Return the backward order of a solution, from the values of the variables by name."""
        position = {stage.node: t for t, stage in enumerate(self.stages.stages)}
        order: list[int] = []
        for b in self.graph.backward:
            t = position.get(b)
            if t is not None:
                order += [f for f in self.stages.stages[t].recomputable
                          if values.get(f"R_{t}_{f}", 0.0) > 0.5]
            order.append(b)
        return tuple(order)

    def values(self, order: Sequence[int]) -> dict[str, float]:
        """Inverse of `order`: return R and S of a backward order that recomputes right before its stages'
        nodes. A solver may start from them."""
        position = {stage.node: t for t, stage in enumerate(self.stages.stages)}
        runs: list[set[int]] = [set() for _ in self.stages.stages]
        pending: set[int] = set()
        for i in order:
            if i < self.graph.loss:
                pending.add(i)
            elif i in position:
                runs[position[i]], pending = pending, set()
        values = {f"R_{t}_{f}": float(f in runs[t]) for t, f in self.R}
        carried_on: set[int] = set()
        for t in range(len(runs) - 1, -1, -1):
            read = set(self.stages.stages[t].need) | carried_on
            for f in runs[t]:
                read.update(self.graph.c[f].inputs)
            made = {j for f in runs[t] for j in self.graph.c[f].outputs}
            carried_on = {j for j in read - made if (t, j) in self.S}
            for j in self.stages.stages[t].carried:
                values[f"S_{t}_{j}"] = float(j in carried_on)
        return values
