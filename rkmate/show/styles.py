"""Colours, fonts and markers: each thing and each method looks the same in every picture and in the report.

`LOOKS` says how each method is drawn: a colour, a marker and a line. The colours differ in lightness and hue
for most eyes; for eyes that see two of them alike, no two methods have both the marker and the line in
common.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rkmate.show.replay import Kind

FONT = "Helvetica,Arial,DejaVu Sans,sans-serif"
INK = "#1f2933"
FAINT = "#7b8794"
"""Lines and frames."""
SOFT = "#52606d"
"""Secondary text; dark enough to be read on white."""

KIND_COLOURS: dict[Kind, str] = {
    "kept": "#4c9f70", "back": "#26a8c9", "recomputed": "#f2a541", "gradients": "#8e6fb8",
    "buffers": "#5c7285", "temporaries": "#c8ccd1", "loss": "#8d99a6"}

FORWARD = "#cfe3f7"
FORWARD_LINE = "#3b7dbd"
BACKWARD = "#e5dbf3"
BACKWARD_LINE = "#8e6fb8"
AGAIN = "#f2a541"
AGAIN_TEXT = "#a35a00"
AGAIN_FILL = "#fdecd2"
KEPT = "#d5eedd"
KEPT_LINE = "#4c9f70"
AWAY = "#d2f0f7"
AWAY_LINE = "#26a8c9"
WAIT = "#d1495b"
"""Colour of the times at which the step waits for a copy."""
CONSTANT = "#eceff1"
LOSS = "#f8d7da"
LOSS_LINE = "#c0392b"
BUDGET = "#c0392b"
MEASURED = "#1f2933"
VIEW = "#ffffff"


def class_colours(labels: Sequence[str]) -> dict[str, str]:
    """Return a light colour for each class of blocks; identical blocks share one."""
    result: dict[str, str] = {}
    for label in labels:
        if label not in result:
            hue = (0.57 + len(result) * 0.381966) % 1.0        # golden section: neighbours differ
            r, g, b = colorsys.hls_to_rgb(hue, 0.86, 0.62)
            result[label] = f"#{round(r * 255):02x}{round(g * 255):02x}{round(b * 255):02x}"
    return result


@dataclass(frozen=True)
class Look:
    """A method's colour, marker and line, as matplotlib names them."""

    colour: str
    marker: str
    line: str

    @property
    def of_plot(self) -> dict[str, Any]:
        """Keyword arguments of `Axes.plot`."""
        return {"color": self.colour, "marker": self.marker, "linestyle": self.line}


LOOKS: dict[str, Look] = {
    "rockmate": Look("#3b7dbd", "o", "-"),
    "rk-rotor": Look("#00008b", "s", "--"),
    "rotor": Look("#e69f00", "s", "-"),
    "revolve": Look("#d81b60", "^", "-"),
    "sequential": Look("#117733", "v", "-"),
    "chen": Look("#808000", "D", "-"),
    "checkmate": Look("#661100", "P", "-"),
    "checkmate-lp": Look("#d55e00", "P", "--"),
    "lower-sets": Look("#aa4499", "<", "-"),
    "lower-sets-memory": Look("#6a3d9a", "<", "--"),
    "lower-sets-exact": Look("#c49c94", ">", "-"),
    "lower-sets-exact-memory": Look("#8c6d31", ">", "--"),
    "lower-sets-no-liveness": Look("#882255", "<", ":"),
    "dtr": Look("#17becf", "X", "-"),
    "save-set": Look("#66a61e", "p", "-"),
    "save-all": Look("#1f2933", "*", "-"),
    "recompute-all": Look("#7b8794", "h", "-"),
    "auto": Look("#004d40", "d", "-."),
    "eager": Look("#56b4e9", "*", ":"),
    "checkpoint": Look("#c0392b", "D", "--"),
    "checkpoint_sequential": Look("#cc79a7", "v", "--"),
    "aot_eager": Look("#009e73", "h", "--"),
    "inductor": Look("#b15928", "^", "--"),
}
"""Looks of all planners, and of other tools."""
OTHER = Look("#000000", "8", "-.")
"""A method that is not in the table."""
_ALIASES = {"rkmate": "rockmate"}


def look_of(method: str) -> Look:
    """Return the look of a method by its name, up to the first space: ``checkpoint_sequential 4`` is one of
    many."""
    kind = method.partition(" ")[0]
    return LOOKS.get(_ALIASES.get(kind, kind), OTHER)
