"""A plan that can be looked at: the data, with its tables, pictures and report."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rkmate.ir.plan import PlanData
from rkmate.ir.simulate import Peak
from rkmate.show.replay import Occupancy

if TYPE_CHECKING:
    from rkmate.show.draw import Picture


class Plan(PlanData):
    """The result of planning, independent of the model object. Bytes and seconds.

    ``peak_bytes`` is the predicted peak of a training step, on top of the memory in use before the step;
    ``budget_bytes`` is its limit.
    """

    def __str__(self) -> str:
        """Return a few lines of figures and a table of the blocks."""
        from rkmate.show.words import table

        return table(self)

    def _repr_html_(self) -> str:
        from rkmate.show.notebook import plan_html

        return plan_html(self)

    def explain(self) -> str:
        """Explain the plan in sentences: where the memory goes, what the peak consists of, and what a smaller
        budget would cost."""
        from rkmate.show.words import explain

        return explain(self)

    def replay(self) -> Occupancy:
        """Replay the schedule: for each step, what is in memory, of which kind, and for which part of the
        model."""
        from rkmate.show.replay import replay

        return replay(self)

    def draw(self, path: str | Path, what: Picture = "chain", block: int | str | None = None, *,
             whole: bool = False) -> Path:
        """Draw the plan into a file. The suffix chooses the format: .svg, .png, .pdf, or .dot for DOT text.

        Args:
            path: the file to write.
            what: ``"chain"``: the blocks, identical ones in one colour. ``"forward"``: the operations
                as captured. ``"simplified"``: the computations that are planned. ``"block"``: the
                computations and data of one block. ``"schedule"``: when each of a block's tensors is
                in memory. ``"copies"``: when the step computes, waits, copies data away and copies data
                back, with the memory and the data that is away at each moment.
            block: number or class label of a block, for ``"block"`` and ``"schedule"``.
            whole: draw every operation of ``"forward"`` and ``"simplified"``, regardless of their number.

        A chain, and a graph with more nodes than a page holds, is drawn as blocks. Each block links to a page
        of its own, in a folder next to the file; in such a graph, blocks that repeat are drawn once. Without
        the ``dot`` program, the DOT text is written instead, and an `RkmateWarning` says what to install.

        Returns:
            The path of the file that was written.

        Raises:
            ArgumentError: an argument is wrong, or ``"copies"`` is requested for a plan without copies.
            MissingExtra: ``"schedule"`` or ``"copies"`` is requested, and matplotlib is not installed.
        """
        from rkmate.show.draw import draw

        return draw(self, path, what, block, whole)

    def plot(self, path: str | Path | None = None, *, measured: Peak[Any] | None = None,
             title: str = "") -> Any:
        """Draw the step's memory over time, by kind, and for each block, what is kept and when. If the plan
        copies data away, also draw the copies and the waits for them.

        Args:
            path: where to write the picture (.svg, .png, .pdf); without it, nothing is written.
            measured: a training step's memory as `rkmate.measure_step` returns it, drawn on top.
            title: title of the picture; by default, the plan's own figures.

        Returns:
            The matplotlib figure.

        Raises:
            MissingExtra: matplotlib is not installed (``pip install "rkmate[plots]"``).
        """
        from rkmate.show.timeline import plot_timeline

        return plot_timeline(self, path, measured, title)

    def report(self, path: str | Path, *, curve: Sequence[Plan] = (),
               measured: Peak[Any] | None = None, date: datetime.date | None = None) -> Path:
        """Write one interactive HTML page: memory at each step, the tensors in memory by module or by name,
        what is recomputed and why, a search, graphs and the generated source. The page needs no network.

        Args:
            path: the file to write.
            curve: plans for other budgets, as `rkmate.tradeoff` returns them. A slider on the page shows
                them.
            measured: a training step's memory as `rkmate.measure_step` returns it.
            date: date on the page; today's by default.

        Returns:
            The path of the file that was written.
        """
        from rkmate.show.report import report

        return report(self, path, curve, measured, date or datetime.date.today())

    def to_chrome_trace(self, path: str | Path) -> Path:
        """Write the predicted step as a trace for Perfetto (https://ui.perfetto.dev) and chrome://tracing:
        computations and waits, copies away and back on clocks of their own, and counters of the memory.

        Returns:
            The path of the file that was written.
        """
        from rkmate.show.viewers import write_chrome_trace

        return write_chrome_trace(self, path)

    def to_memory_snapshot(self, path: str | Path) -> Path:
        """Write the predicted step as a snapshot for PyTorch's memory viewer (https://pytorch.org/memory_viz),
        in the format of torch's own snapshots of CUDA memory. An allocation names its tensor, module and
        operation instead of a stack trace, and its category is its kind.

        Returns:
            The path of the file that was written.
        """
        from rkmate.show.viewers import write_memory_snapshot

        return write_memory_snapshot(self, path)
