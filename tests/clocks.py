"""Plans that do not depend on how busy the machine is."""

from __future__ import annotations

from typing import Any

import pytest

from rkmate.ilp.settings import OptionSettings
from rkmate.measure.analytic import analytic_costs
from rkmate.pipeline import prepare
from rkmate.pipeline.settings import Settings
from rkmate.planners.settings import PlannerSettings

NO_CLOCK = Settings(options=OptionSettings(grid=(5, 5), time_limit=60.0, block_limit=60.0, total_limit=120.0),
                    planner=PlannerSettings(save_set_seconds=0.0, first_seconds=0.0, smallest_seconds=0.0))
"""No program is cut short: one run's schedule is another's, whatever else the machine does."""


def count_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let measured costs have times as they are counted; their temporary memory stays as measured."""
    measure = prepare.measure

    def counted(partition: Any, *args: Any, **kwargs: Any) -> Any:
        times = analytic_costs(partition)
        return {i: cost._replace(time=times[i].time, alternatives=tuple(
            own._replace(time=other.time) for own, other in zip(cost.alternatives, times[i].alternatives,
                                                                strict=False)))
                for i, cost in measure(partition, *args, **kwargs).items()}

    monkeypatch.setattr(prepare, "measure", counted)
