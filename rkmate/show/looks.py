"""How each method is drawn: a colour, a marker and a line of its own, the same in every picture.

The colours differ in lightness and hue for most eyes; for those that see two of them alike, no two methods
have both the marker and the line in common.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
"""Every planner, and what people use without this package."""
OTHER = Look("#000000", "8", "-.")
"""A method that is not in the table."""
_ALIASES = {"rkmate": "rockmate"}


def look_of(method: str) -> Look:
    """The look of a method by its name, up to the first space: ``checkpoint_sequential 4`` is one of many."""
    kind = method.partition(" ")[0]
    return LOOKS.get(_ALIASES.get(kind, kind), OTHER)
