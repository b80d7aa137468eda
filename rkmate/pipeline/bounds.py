"""What no schedule of a variant does better, known before the options of its blocks are solved."""

from __future__ import annotations

from rkmate.ir.kernels import seconds_to_save
from rkmate.pipeline.prepare import Prepared
from rkmate.planners.save_set import SaveSetProgram

SECONDS = 0.6
"""How long the program of one variant may take."""


def bytes_of_any(prepared: Prepared) -> int:
    """Bytes that some backward computation needs by itself: nothing fits in less."""
    return _program(prepared).least_bytes


def seconds_of_any(prepared: Prepared, limit: int) -> float:
    """Seconds that every schedule within so many bytes takes that runs each backward computation once, in
    order, by the fastest kernels (`rkmate.planners.save_set`)."""
    program = _program(prepared)
    kept = None if limit < program.least_bytes else program.solve(limit, (), time_limit=SECONDS)
    again = 0.0 if kept is None else kept.bound
    return max(0.0, program.seconds + again - seconds_to_save(prepared.graph))


def _program(prepared: Prepared) -> SaveSetProgram:
    return SaveSetProgram(prepared.graph, prepared.pinned, prepared.reserve_at_loss)
