"""What a user may set about the stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rkmate.graph.blocks.cut import CutSettings
from rkmate.ilp.settings import OptionSettings
from rkmate.measure.settings import MeasureSettings

CostSource = Literal["measured", "analytic"]
Split = Literal["auto", "always", "never"]
Trains = Literal["all"] | tuple[str | int, ...] | None
"""Outputs that the loss leads to: all, or those of these names and numbers; None: see `Settings.trains`."""


@dataclass(frozen=True)
class Settings:
    """How the stages work; the defaults are the paper's where it names them."""

    costs: CostSource = "measured"
    cut: CutSettings = CutSettings()
    measure: MeasureSettings = MeasureSettings()
    options: OptionSettings = OptionSettings()
    trains: Trains = None
    """Outputs that the loss is computed from. None: the one named ``loss`` if it is a scalar, else the
    scalars, else all but by-products such as caches."""
    slots: int = 500
    """Memory slots of the dynamic program."""
    planning_seconds: float | None = None
    """Limit of a planner that can stop early; None: its own."""
    split_head: Split = "auto"
    """Compute the last product and its cross entropy a few rows at a time: where nothing else meets the
    budget, always, or never. The last bits of that weight's gradient then differ."""
