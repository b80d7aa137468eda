"""What ``torch.utils.checkpoint`` in a model's forward means for its plan."""

from __future__ import annotations

import logging

from rkmate.budget import Budget
from rkmate.pipeline.prepare import Prepared

logger = logging.getLogger("rkmate")


def limit_of(prepared: Prepared, budget: Budget) -> int:
    """The bytes that a budget leaves a schedule: a fraction is one of the peak that ``Settings.fraction_of``
    names."""
    return max(0, budget.of(_reference(prepared) + prepared.beside) - prepared.beside)


def _reference(prepared: Prepared) -> int:
    if prepared.settings.fraction_of == "checkpointed":
        found = prepared.as_checkpointed
        if found is not None:
            return found.peak
    return prepared.baseline_peak


def note_of(prepared: Prepared) -> str:
    """What a plan says about the checkpointing of the model; empty where there is none."""
    found = prepared.as_checkpointed
    if found is None:
        return ""
    n = found.regions
    return (f"the plan takes the place of torch.utils.checkpoint in {n} region{'s' if n > 1 else ''}; with "
            f"it, the model's own step would have a peak of {found.peak:,} bytes and take "
            f"{found.seconds / prepared.baseline.seconds - 1:+.0%} time")


def tell(prepared: Prepared, budget: Budget) -> None:
    """Say which peak a fraction is of, where there are two."""
    if budget.fraction is None or prepared.settings.fraction_of == "checkpointed":
        return
    found = prepared.as_checkpointed
    if found is not None:
        logger.warning(
            "the model calls torch.utils.checkpoint, which a plan takes the place of: a budget of %g is that "
            "part of the peak without checkpointing (%s bytes). "
            'rkmate.Settings(fraction_of="checkpointed") makes it one of the peak with it (%s bytes)',
            budget.fraction, f"{prepared.baseline_peak:,}", f"{found.peak:,}")
