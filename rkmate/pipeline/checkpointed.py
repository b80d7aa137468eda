"""What ``torch.utils.checkpoint`` in a model's forward means for its plan."""

from __future__ import annotations

import logging
from typing import NamedTuple

from rkmate.budget import Budget
from rkmate.graph.capture.checkpoints import region_of
from rkmate.ir.checkpointed import checkpointed
from rkmate.pipeline.prepare import Prepared

logger = logging.getLogger("rkmate")


class AsCheckpointed(NamedTuple):
    """A step as a program checkpoints it."""

    peak: int
    """Bytes, of as many calls as the settings say."""
    seconds: float
    """Of one call."""


def limit_of(prepared: Prepared, budget: Budget) -> int:
    """A budget in bytes: a fraction is one of the peak that ``Settings.fraction_of`` names."""
    return budget.of(_reference(prepared))


def _reference(prepared: Prepared) -> int:
    if prepared.settings.fraction_of == "checkpointed":
        found = as_checkpointed(prepared)
        if found is not None:
            return found.peak
    return prepared.baseline_peak


def as_checkpointed(prepared: Prepared) -> AsCheckpointed | None:
    """The simulator's verdict on the step as the program checkpoints it; None where it does not."""
    regions = _regions(prepared)
    if not any(r is not None for r in regions):
        return None
    schedule = prepared.with_kernels(checkpointed(prepared.graph, regions, prepared.pinned))
    return AsCheckpointed(prepared.peak(schedule, prepared.settings.calls),
                          prepared.simulate(schedule).seconds)


def note_of(prepared: Prepared) -> str:
    """What a plan says about the checkpointing of the model; empty where there is none."""
    found = as_checkpointed(prepared)
    if found is None:
        return ""
    n = len({r for r in _regions(prepared) if r is not None})
    return (f"the plan takes the place of torch.utils.checkpoint in {n} region{'s' if n > 1 else ''}; with "
            f"it, the model's own step would have a peak of {found.peak:,} bytes and take "
            f"{found.seconds / prepared.baseline.seconds - 1:+.0%} time")


def tell(prepared: Prepared, budget: Budget) -> None:
    """Say which peak a fraction is of, where there are two."""
    if budget.fraction is None or prepared.settings.fraction_of == "checkpointed":
        return
    found = as_checkpointed(prepared)
    if found is not None:
        logger.warning(
            "the model calls torch.utils.checkpoint, which a plan takes the place of: a budget of %g is that "
            "part of the peak without checkpointing (%s bytes). "
            'rkmate.Settings(fraction_of="checkpointed") makes it one of the peak with it (%s bytes)',
            budget.fraction, f"{prepared.baseline_peak:,}", f"{found.peak:,}")


def _regions(prepared: Prepared) -> list[int | None]:
    loss = prepared.graph.loss
    return [region_of(node) if i < loss else None
            for i, node in enumerate(prepared.partition.program.operation)]
