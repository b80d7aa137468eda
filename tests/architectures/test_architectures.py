"""Public architectures: captured, planned, trained; equal gradients, within the budget."""

from __future__ import annotations

import pytest

import rkmate
from rkmate.ilp.settings import OptionSettings
from rkmate.pipeline.settings import Settings
from tests.architectures.bank import ARCHITECTURES, BY_NAME, REFUSED, Architecture
from tests.capturing import captured_once
from tests.equality import assert_same_step, measured_peak

pytestmark = pytest.mark.filterwarnings("ignore::rkmate.RkmateWarning", "ignore::FutureWarning",
                                        "ignore::DeprecationWarning", "ignore::UserWarning")


# A small grid: the options need not be the best here, only right.
QUICK = Settings(options=OptionSettings(grid=(6, 6), time_limit=0.5, block_limit=2.0))


def train(architecture: Architecture, fraction: float,
          settings: Settings | None = None) -> rkmate.PlannedModule:
    """Wrap, hold two steps against the original's, and measure; at least the smallest budget."""
    sample = architecture.build()
    twin = architecture.build().model
    with captured_once():
        try:
            module = rkmate.wrap(sample.model, sample.args, sample.kwargs, budget=fraction, progress=False,
                                 settings=settings)
        except rkmate.InfeasibleBudget as error:
            module = rkmate.wrap(sample.model, sample.args, sample.kwargs, budget=error.minimum_bytes,
                                 progress=False, settings=settings)
    assert_same_step(twin, module, sample)
    peak = measured_peak(module, sample)
    assert peak <= module.plan.budget_bytes
    assert abs(module.plan.peak_bytes - peak) <= 0.02 * peak
    return module


def _cases() -> list[object]:
    return [pytest.param(a, f, id=f"{a.name}-{f}", marks=[] if a.fast and f < 1 else [pytest.mark.slow])
            for a in ARCHITECTURES if a.name not in REFUSED for f in (1.0, 0.6)]


@pytest.mark.parametrize(("architecture", "fraction"), _cases())
def test_trains(architecture: Architecture, fraction: float) -> None:
    train(architecture, fraction, QUICK)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in REFUSED])
def test_is_refused_for_the_documented_reason(name: str) -> None:
    sample = BY_NAME[name].build()
    with pytest.raises(rkmate.CaptureError, match=REFUSED[name]):
        rkmate.wrap(sample.model, sample.args, sample.kwargs, budget=1.0, progress=False)
