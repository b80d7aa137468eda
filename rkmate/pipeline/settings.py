"""What a user may set about the stages."""

from __future__ import annotations

import warnings
from dataclasses import InitVar, dataclass, replace
from typing import Literal

from rkmate.errors import ArgumentError, RkmateWarning
from rkmate.graph.blocks.cut import CutSettings
from rkmate.ilp.settings import OptionSettings
from rkmate.measure.settings import MeasureSettings
from rkmate.planners.settings import PlannerSettings, default_settings

CostSource = Literal["measured", "analytic"]
When = Literal["auto", "always", "never"]


@dataclass(frozen=True)
class Settings:
    """How the stages work; the defaults are the paper's where it names them."""

    costs: CostSource = "measured"
    """``"measured"`` runs each unique block; ``"analytic"`` counts operations and bytes, and runs nothing."""
    cut: CutSettings = CutSettings()
    """How the graph is cut into blocks."""
    measure: MeasureSettings = MeasureSettings()
    """How long operations are measured."""
    options: OptionSettings = OptionSettings()
    """The integer programs of the blocks."""
    slots: int = 500
    """Memory slots of the dynamic program."""
    planning_seconds: float | None = None
    """Limit of a planner that can stop early; None: its own."""
    chunked_loss: When = "auto"
    """Compute the last product and its cross entropy a few rows at a time: where nothing else meets the
    budget, always, or never. The last bits of that weight's gradient then differ."""
    planner: PlannerSettings | None = None
    """How long the default planner looks; None: its defaults."""
    split_head: InitVar[When | None] = None
    """The old name of `chunked_loss`, understood for one more version."""

    def __post_init__(self, split_head: When | None) -> None:
        if split_head is not None:
            warnings.warn("Settings(split_head=...) is now called chunked_loss; the old name goes with the "
                          "next version", RkmateWarning, stacklevel=3)
            object.__setattr__(self, "chunked_loss", split_head)
        for name, value, allowed in (("costs", self.costs, ("measured", "analytic")),
                                     ("chunked_loss", self.chunked_loss, ("auto", "always", "never"))):
            if value not in allowed:
                raise ArgumentError(f"{name} is {value!r}; it should be "
                                    f"{', '.join(map(repr, allowed[:-1]))} or {allowed[-1]!r}")

    @property
    def of_planner(self) -> PlannerSettings:
        """What the default planner works with."""
        return replace(self.planner or default_settings(), slots=self.slots)


def with_costs_from(settings: Settings | None, costs: str | None) -> Settings:
    """The settings, with the source of costs that a call names; without one, their own. Raises
    `ArgumentError`."""
    settings = settings or Settings()
    if costs is None:
        return settings
    if costs not in ("measured", "analytic"):
        raise ArgumentError(f'costs is {costs!r}; it should be "measured" or "analytic"')
    return replace(settings, costs=costs)  # type: ignore[arg-type]
