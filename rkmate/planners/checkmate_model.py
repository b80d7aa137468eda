"""Checkmate's integer program on a whole CD graph (Jain et al., MLSys 2020, section 4).

Stage t ends with the first run of C node t; before it, earlier forward nodes may run again, each at
most once, in the graph's order. The constraints carry the paper's equation names where it has them.
What the paper leaves out and a captured graph has: several outputs of one node, temporary memory,
outputs that take a dying input's place, the loss between forward and backward, gradients that run
once. Backward nodes are never run again.

Only R is integer: with R decided, the retention of a value is forced to 1 from where it is made (or
the stage's start) to where it is read, and may be 0 elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

from rkmate.ilp.highs import Rows
from rkmate.ir.cd import CDGraph
from rkmate.ir.recompute import missing_nodes
from rkmate.ir.schedule import Schedule
from rkmate.ir.simulate import LOSS_SCALARS

Recompute = Literal["any", "after-loss"]

UNITS = 1e5
"""Memory is counted in this fraction of the graph's total, times in the same of the step's."""


def rerunnable(graph: CDGraph, recompute: Recompute) -> list[list[int]]:
    """Return, for each stage, the C nodes that may run again in it: forward nodes before it that a first run
    from this stage on depends on."""
    n = len(graph.c)
    ancestors: set[int] = set()
    result: list[list[int]] = [[] for _ in range(n)]
    for t in range(n - 1, -1, -1):
        ancestors |= missing_nodes(graph, graph.c[t].inputs, known=ancestors)
        if recompute == "any" or t >= graph.loss:
            result[t] = sorted(i for i in ancestors if i < t)
    return result


class Variable(NamedTuple):
    """A variable of the program."""

    name: str
    column: int


Value = Variable | int
"""A variable, or what it would be where nothing is to be decided: 0 or 1."""
Term = tuple[float, Value]
"""A weight, and what it multiplies."""


class CheckmateModel:
    """The program; the budget is a variable with equal bounds, so one model serves all budgets."""

    def __init__(self, graph: CDGraph, recompute: Recompute = "any",
                 pinned: Iterable[int] = (), reserve_at_loss: int = 0) -> None:
        self.graph = graph
        self.reserve = reserve_at_loss
        self._loss_keeps = min(reserve_at_loss, LOSS_SCALARS)
        self.pinned = set(pinned)
        n = len(graph.c)
        self.base_seconds = sum(c.time for c in graph.c)
        self.second = (self.base_seconds or 1.0) / UNITS
        self.byte = max(1.0, sum(d.size for d in graph.d) / UNITS)
        self.rerunnable = rerunnable(graph, recompute)
        self.program = Rows()
        # (1a) the objective: time of everything that runs again.
        self.R = {(t, i): self._variable(f"R_{t}_{i}", cost=graph.c[i].time / self.second, integer=True)
                  for t in range(n) for i in self.rerunnable[t]}
        self._fixed = self._gradients()
        self._free = [made is not None and made < graph.loss and j not in self.pinned
                      and j not in graph.inputs for j, made in enumerate(graph.producer)]
        self._now: dict[int, Value] = {}      # retention of each value, so far
        self._used: Value = 0                 # U of the paper, so far
        self.S: list[dict[int, Variable]] = []
        """For each stage, which values are there at its start, as variables."""
        self._last_use = self._last_uses()
        for t in range(n):
            self._stage(t)
        if graph.loss == n:
            self._loss()

    def _gradients(self) -> list[int]:
        """Return bytes at each stage's start that no decision changes: gradients, held values, and what the
        loss keeps."""
        graph, n = self.graph, len(self.graph.c)
        result = [0] * graph.loss + [self._loss_keeps] * (n + 1 - graph.loss)
        for j, node in enumerate(graph.d):
            made = graph.producer[j]
            if j in graph.output_grads:
                first, last = graph.loss, max(graph.readers[j], default=graph.loss - 1)
            elif made is None:
                continue
            elif made >= graph.loss:
                first, last = made + 1, max([*graph.readers[j], graph.releases.get(j, -1)], default=-1)
            elif j in self.pinned:
                first, last = made + 1, n
            else:
                continue
            if j in graph.input_grads or j in self.pinned:
                last = n
            for t in range(first, min(last, n) + 1):
                result[t] += node.size
        return result

    def _is_gradient(self, j: int) -> bool:
        made = self.graph.producer[j]
        return j in self.graph.output_grads if made is None else made >= self.graph.loss

    def _last_uses(self) -> list[int]:
        """Return the last stage in which a value can be read."""
        result = [-1] * len(self.graph.d)
        for t, nodes in enumerate(self.rerunnable):
            for i in (*nodes, t):
                for j in self.graph.c[i].inputs:
                    result[j] = t
        return result

    @cached_property
    def budget(self) -> Variable:
        """The variable that each solve fixes: the budget."""
        top = sum(d.size for d in self.graph.d) * 2 + sum(c.overhead for c in self.graph.c)
        return self._variable("budget", top / self.byte + 1)

    def _variable(self, name: str, upper: float = 1, cost: float = 0.0, *, integer: bool = False) -> Variable:
        return Variable(name, self.program.column(name, 0, upper, cost, integer=integer))

    def _require(self, *terms: Term, least: float = -math.inf) -> None:
        """Add a row: the sum of the terms is at most 0, and at least `least`."""
        known = sum(weight * value for weight, value in terms if not isinstance(value, Variable))
        self.program.weighted(least - known, [(value.column, weight) for weight, value in terms
                                              if isinstance(value, Variable)], -known)

    def _loss(self) -> None:
        """Require the outputs when the loss is computed, and add their gradients."""
        graph = self.graph
        for j in graph.outputs:
            if self._free[j]:
                self._require((1, 1), (-1, self._now[j]))
        extra = max(graph.bytes(graph.output_grads) + self._loss_keeps, self.reserve)
        pinned = sum(graph.d[j].size for j in self.pinned
                   if (made := graph.producer[j]) is not None and made < graph.loss)
        self._require((1, self._used), ((extra + pinned) / self.byte, 1), (-1, self.budget))
        change: list[Term] = []
        for j in graph.outputs:
            if self._free[j]:
                before = self._now[j]
                after: Value = 0
                if self._last_use[j] >= graph.loss:
                    after = self._variable(f"S_loss_{j}")
                    self._require((1, after), (-1, before))
                self._now[j] = after
                change += self._change(j, before, after)
        self._use(change, "loss")

    def _stage(self, t: int) -> None:
        graph = self.graph
        if t == graph.loss:
            self._loss()
        self.S.append({j: v for j, v in self._now.items() if isinstance(v, Variable)})
        steps = [*self.rerunnable[t], t]
        uses: dict[int, list[int]] = {}
        for i in steps:
            for j in dict.fromkeys((*graph.c[i].inputs, *graph.c[i].outputs)):
                if self._free[j]:
                    uses.setdefault(j, []).append(i)
        changed = False
        for i in steps:
            node = graph.c[i]
            runs: Value = 1 if i == t else self.R[t, i]
            # (1b) inputs are there when a node runs.
            for j in node.inputs:
                if self._free[j]:
                    self._require((1, runs), (-1, self._now.get(j, 0)))
            change: list[Term] = []
            after_of: dict[int, Value] = {}
            for j in dict.fromkeys((*node.inputs, *node.outputs)):
                if not self._free[j]:
                    continue
                before = self._now.get(j, 0)
                after: Value = 0
                needed = (self._last_use[j] > t or (j in graph.outputs and t < graph.loss)
                          or uses[j][-1] != i)
                if needed:
                    after = self._variable(f"S_{t}_{j}_{i}")
                    # (1c) a value stays, or its node runs.
                    self._require((1, after), (-1, before), (-int(j in node.outputs), runs))
                self._now[j] = after_of[j] = after
                change += self._change(j, before, after)
            # (1d, 7) memory during the step: what is there, its outputs, its temporaries.
            own = (graph.bytes(node.outputs) + node.overhead) / self.byte
            if own or changed:
                self._require((1, self._used), (own, runs), (self._fixed[t] / self.byte, 1),
                              *self._overwritten(i, t, runs, after_of), (-1, self.budget))
            if change:
                self._use(change, f"{t}_{i}")
                changed = True

    def _change(self, j: int, before: Value, after: Value) -> list[Term]:
        """Return the terms by which a value changes U."""
        size = self.graph.d[j].size / self.byte
        return [(sign * size, value) for sign, value in ((1, after), (-1, before))
                if size and isinstance(value, Variable)]

    def _use(self, change: Sequence[Term], name: str) -> None:
        """Apply equation (5) with U as a separate variable; otherwise every row would name every value."""
        if change:
            used = self._variable(f"U_{name}", math.inf)
            self._require((1, self._used), *change, (-1, used), least=0)
            self._used = used

    def _overwritten(self, i: int, t: int, runs: Value, after: Mapping[int, Value]) -> list[Term]:
        """Return memory that a run of node i in stage t does not take, because its output takes the storage
        of an input that dies with it."""
        graph = self.graph
        node = graph.c[i]
        saving: list[Term] = []
        chosen: list[Term] = []
        for j in node.donors:
            if self._free[j]:
                dies = after.get(j, 0)
            elif (self._is_gradient(j) and j not in graph.input_grads
                    and graph.releases.get(j, -1) <= t and max(graph.readers[j]) == t):
                dies = 0
            else:
                continue
            taken = self._variable(f"W_{t}_{i}_{j}")
            self._require((1, taken), (-1, runs))
            self._require((1, taken), (1, dies), (-1, 1))
            saving.append((-graph.d[j].size / self.byte, taken))
            chosen.append((1, taken))
        if len(chosen) > 1:
            self._require(*chosen, (-1, 1))
        return saving

    def order(self, values: Mapping[str, float]) -> tuple[list[int], int]:
        """Return the order of C nodes that a solution stands for, and where the loss stands in it."""
        order: list[int] = []
        loss_at = 0
        for t in range(len(self.graph.c)):
            if t == self.graph.loss:
                loss_at = len(order)
            order += [i for i in self.rerunnable[t] if values.get(self.R[t, i].name, 0.0) > 0.5]
            order.append(t)
        return order, loss_at if self.graph.loss < len(self.graph.c) else len(order)

    def start(self, schedule: Schedule) -> dict[str, float] | None:
        """Return R of a schedule; None if the schedule is not of this program's kind."""
        result = dict.fromkeys((r.name for r in self.R.values()), 0.0)
        t = 0
        for i in schedule.order:
            if i == t:
                t += 1
            elif (t, i) in self.R:
                result[self.R[t, i].name] = 1.0
            elif t >= len(self.rerunnable) or i > t or (not self.rerunnable[t] and i < self.graph.loss):
                return None
            # What is left runs again for nothing: no first run to come depends on it.
        return result
