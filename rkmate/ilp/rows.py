"""An integer program to minimize, as the arrays that HiGHS takes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from rkmate.errors import SolverError

Term = tuple[int, float]
"""A variable, by its number, and its weight."""


class Rows:
    """A program to minimize: variables with bounds and costs, and rows that bound weighted sums of them.

    Arrays, because writing a large program as expressions takes as long as solving it.
    """

    def __init__(self) -> None:
        self.columns: dict[str, int] = {}
        """Columns by name."""
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._cost: list[float] = []
        self._integer: list[bool] = []
        self._start = [0]
        self._index: list[int] = []
        self._value: list[float] = []
        self._least: list[float] = []
        self._most: list[float] = []

    def column(self, name: str, lower: float, upper: float = math.inf, cost: float = 0.0, *,
               integer: bool = False) -> int:
        """Return a variable, by the number that rows name it by."""
        self.columns[name] = len(self._lower)
        self._lower.append(lower)
        self._upper.append(upper)
        self._cost.append(cost)
        self._integer.append(integer)
        return len(self._lower) - 1

    def at_least(self, least: float, plus: Iterable[int], minus: Iterable[int] = ()) -> None:
        """Add a row: the sum of some variables minus the sum of others is at least `least`."""
        for sign, columns in ((1.0, plus), (-1.0, minus)):
            for k in columns:
                self._index.append(k)
                self._value.append(sign)
        self._end_row(least)

    def weighted(self, least: float, terms: Iterable[Term], most: float = math.inf) -> None:
        """Bound the weighted sum of some variables, each named once: no less than `least`, no more than
        `most`."""
        for k, weight in terms:
            if weight:
                self._index.append(k)
                self._value.append(weight)
        self._end_row(least, most)

    def _end_row(self, least: float, most: float = math.inf) -> None:
        self._start.append(len(self._index))
        self._least.append(least)
        self._most.append(most)

    def handed_over(self, highs: Any) -> None:
        """Make this the program of a solver, its variables in the order of their names: which of several
        solutions is found, and how soon, depends on the order."""
        import highspy

        names = sorted(self.columns)
        old = np.array([self.columns[name] for name in names])
        place = np.empty(len(old), dtype=np.int32)
        place[old] = np.arange(len(old))
        self.columns = {name: k for k, name in enumerate(names)}
        kinds = highspy.HighsVarType
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = len(old), len(self._least)
        program.col_cost_ = np.array(self._cost)[old]
        program.col_lower_, program.col_upper_ = np.array(self._lower)[old], np.array(self._upper)[old]
        program.row_lower_ = np.array(self._least)
        program.row_upper_ = np.array(self._most)
        program.integrality_ = [kinds.kInteger if self._integer[k] else kinds.kContinuous for k in old]
        matrix = program.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.start_, matrix.index_ = np.array(self._start), place[self._index]
        matrix.value_ = np.array(self._value)
        if highs.passModel(program) == highspy.HighsStatus.kError:
            raise SolverError("HiGHS rejects the program")
