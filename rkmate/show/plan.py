"""A plan that can be looked at: the data, with its tables, pictures and report."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rkmate.ir.peak import Peak
from rkmate.ir.plan import PlanData
from rkmate.show.replay import Occupancy

if TYPE_CHECKING:
    from rkmate.show.draw import Picture


class Plan(PlanData):
    """The result of planning, independent of the model object. Bytes and seconds.

    ``peak_bytes`` is the predicted peak of a training step above what stands before it, as
    ``budget_bytes`` bounds it.
    """

    def __str__(self) -> str:
        """A table of the blocks under a few lines of figures."""
        from rkmate.show.words import table

        return table(self)

    def _repr_html_(self) -> str:
        from rkmate.show.report import summary_html

        return summary_html(self)

    def explain(self) -> str:
        """Plain sentences: where the memory goes, what the peak is made of, what less would cost."""
        from rkmate.show.words import explain

        return explain(self)

    def replay(self) -> Occupancy:
        """The schedule step by step: what is in memory, of which kind, and whose it is."""
        from rkmate.show.replay import replay

        return replay(self)

    def draw(self, path: str | Path, what: Picture = "chain", block: int | str | None = None, *,
             whole: bool = False) -> Path:
        """Draw into a file; its suffix says how: .svg, .png, .pdf, or .dot for the text alone.

        Args:
            path: the file to write.
            what: ``"chain"``: the blocks, identical ones in one colour. ``"forward"``: the operations
                as captured. ``"simplified"``: the computations that are planned. ``"block"``: the
                computations and data of one block. ``"schedule"``: when each of a block's tensors is
                in memory. ``"copies"``: when the step computes, waits, copies data away and copies them
                back; the memory and what is away meanwhile.
            block: number or class label of a block, for ``"block"`` and ``"schedule"``.
            whole: draw every operation of ``"forward"`` and ``"simplified"``, however many there are.

        A chain, and a graph of more nodes than a page holds, is drawn as blocks that link to pages of
        their own, in a folder beside the file; of such a graph, blocks that repeat are drawn once. Without
        the ``dot`` program, the DOT text is written instead, and an `RkmateWarning` says what to install.

        Returns:
            The path of the file that was written.

        Raises:
            ArgumentError: an argument is wrong, or copies are asked for of a plan that has none.
            MissingExtra: a schedule or copies are drawn without matplotlib.
        """
        from rkmate.show.draw import draw

        return draw(self, path, what, block, whole)

    def plot(self, path: str | Path | None = None, *, measured: Peak[Any] | None = None,
             title: str = "") -> Any:
        """Draw the step's memory over time, by kind; per block, what is kept and when; and, where the plan
        copies data away, when it does and when the step waits for that.

        Args:
            path: where to write the picture (.svg, .png, .pdf); without it, nothing is written.
            measured: a training step's memory as `rkmate.measure_step` returns it, drawn on top.
            title: of the picture; the plan's own figures unless given.

        Returns:
            The matplotlib figure.

        Raises:
            MissingExtra: matplotlib is not installed (``pip install "rkmate[plots]"``).
        """
        from rkmate.show.timeline import plot_timeline

        return plot_timeline(self, path, measured, title)

    def report(self, path: str | Path, *, curve: Sequence[Plan] = (),
               measured: Peak[Any] | None = None, date: datetime.date | None = None) -> Path:
        """Write one self-contained HTML page: figures, pictures, graphs and the generated source.

        Args:
            path: the file to write.
            curve: plans for other budgets, as `rkmate.tradeoff` returns them.
            measured: a training step's memory as `rkmate.measure_step` returns it.
            date: that the page names; today's unless given.

        Raises:
            MissingExtra: matplotlib is not installed (``pip install "rkmate[plots]"``).
        """
        from rkmate.show.report import report

        return report(self, path, curve, measured, date or datetime.date.today())
