"""matplotlib, which is optional: imported when a picture is asked for."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rkmate.errors import ArgumentError, MissingExtra

_SUFFIXES = (".svg", ".png", ".pdf")
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "rkmate", "font.size": 9.0, "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"],
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#7b8794",
    "axes.labelcolor": "#1f2933", "text.color": "#1f2933", "xtick.color": "#52606d",
    "ytick.color": "#52606d", "axes.titlesize": 10.0, "axes.titlelocation": "left",
    "legend.frameon": False, "figure.facecolor": "white", "hatch.linewidth": 0.5,
}

NARROW = 3.7
"""Inches: a picture for a page as wide as a telephone, where its letters are still 12 pixels high."""
BESIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "alignment": "left"}
"""Where a legend stands that would hide what is drawn."""


def below(axes: Any) -> dict[str, Any]:
    """Where the legend of a narrow picture stands: under the axis of x and what is written there."""
    height = axes.get_position().height * axes.figure.get_figheight()
    return {"loc": "upper left", "bbox_to_anchor": (-0.05, -0.5 / height), "alignment": "left"}


def figure(width: float, height: float, **subplots: Any) -> tuple[Any, Any]:
    """A figure of its own (no global state) and its axes. Sizes in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("pictures of time and memory need matplotlib: "
                           'pip install "rkmate[plots]"') from error
    made = Figure(figsize=(width, height), layout="constrained")
    return made, made.subplots(**subplots)


@contextmanager
def styled() -> Iterator[None]:
    """Inside, matplotlib draws in this package's style."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtra("pictures of time and memory need matplotlib: "
                           'pip install "rkmate[plots]"') from error
    with matplotlib.rc_context(_STYLE):
        yield


def time_unit(seconds: float) -> tuple[float, str]:
    """The factor and the unit in which a span of time is drawn."""
    return (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")


def corners(times: Any, levels: Any) -> tuple[Any, Any]:
    """Of arrays of times and of levels (one row each), only the points where a level changes."""
    changes = (levels[:, 1:] != levels[:, :-1]).any(axis=0)
    kept = np.append(True, changes) | np.append(changes, True)
    kept[[0, -1]] = True
    return times[kept], levels[:, kept]


def save(made: Any, path: str | Path | None) -> None:
    """Write a figure, when a path is given. Raises `ArgumentError` for an unknown suffix."""
    if path is None:
        return
    path = check_suffix(path)
    with styled():
        made.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def check_suffix(path: str | Path) -> Path:
    """A path that a figure can be written to. Raises `ArgumentError`."""
    path = Path(path)
    if path.suffix not in _SUFFIXES:
        raise ArgumentError(f"path is {str(path)!r}; its suffix should be one of "
                            f"{', '.join(_SUFFIXES)}")
    return path


def svg_text(made: Any) -> str:
    """A figure as an SVG element."""
    buffer = io.StringIO()
    with styled():
        made.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg"):]
