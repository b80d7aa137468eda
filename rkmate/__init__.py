"""rkmate: train any PyTorch model inside a memory budget."""

import typing

from rkmate.support.lazy import lazy_names as _lazy_names

__version__ = "0.1.0"

_PLACES = {
    "rkmate.api": ("applied", "apply", "max_batch_size", "plan", "remove", "shared_plan", "tradeoff", "wrap"),
    "rkmate.comparison.parity": ("Parity", "check"),
    "rkmate.comparison.run": ("compare",),
    "rkmate.comparison.table": ("Comparison",),
    "rkmate.device.kept_pages": ("keep_pages",),
    "rkmate.diagnosis.machine": ("Finding",),
    "rkmate.diagnosis.model": ("Diagnosis", "doctor"),
    "rkmate.errors": (
        "ArgumentError", "BackwardError", "CaptureError", "CompilerError", "DeferredOutputError",
        "DeviceMemoryError",
        "GraphError", "InfeasibleBudget", "MissingExtra", "OffloadError", "PlanError", "PlanningTimeout",
        "RankError", "RkmateError", "RkmateWarning", "ScheduleError", "SolverError",
        "TorchVersionError", "UnknownOption", "WishError"),
    "rkmate.graph.blocks.cut": ("CutSettings",),
    "rkmate.graph.capture.hints": ("keep", "recompute"),
    "rkmate.ilp.settings": ("OptionSettings",),
    "rkmate.measure.settings": ("MeasureSettings",),
    "rkmate.measure.step": ("measure_step",),
    "rkmate.pipeline.device_budget": ("BatchSize", "auto_budget"),
    "rkmate.pipeline.loss": ("with_loss",),
    "rkmate.offload.target": ("Offload",),
    "rkmate.pipeline.settings": ("RunSettings", "Settings"),
    "rkmate.planners.settings": ("PlannerSettings",),
    "rkmate.runtime.module": ("PlannedModule",),
    "rkmate.settings": ("Options",),
    "rkmate.show.curve": ("Curve",),
    "rkmate.show.plan": ("Plan",),
}
"""The module in which each public name is defined. A name is loaded on first use, and torch with it if it
needs torch. No module has the name of a public function, which it would replace."""
__all__ = sorted(name for names in _PLACES.values() for name in names)

if typing.TYPE_CHECKING:
    from rkmate.api import applied as applied
    from rkmate.api import apply as apply
    from rkmate.api import max_batch_size as max_batch_size
    from rkmate.api import plan as plan
    from rkmate.api import remove as remove
    from rkmate.api import shared_plan as shared_plan
    from rkmate.api import tradeoff as tradeoff
    from rkmate.api import wrap as wrap
    from rkmate.comparison.parity import Parity as Parity
    from rkmate.comparison.parity import check as check
    from rkmate.comparison.run import compare as compare
    from rkmate.comparison.table import Comparison as Comparison
    from rkmate.device.kept_pages import keep_pages as keep_pages
    from rkmate.diagnosis.machine import Finding as Finding
    from rkmate.diagnosis.model import Diagnosis as Diagnosis
    from rkmate.diagnosis.model import doctor as doctor
    from rkmate.errors import ArgumentError as ArgumentError
    from rkmate.errors import BackwardError as BackwardError
    from rkmate.errors import CaptureError as CaptureError
    from rkmate.errors import CompilerError as CompilerError
    from rkmate.errors import DeferredOutputError as DeferredOutputError
    from rkmate.errors import DeviceMemoryError as DeviceMemoryError
    from rkmate.errors import GraphError as GraphError
    from rkmate.errors import InfeasibleBudget as InfeasibleBudget
    from rkmate.errors import MissingExtra as MissingExtra
    from rkmate.errors import OffloadError as OffloadError
    from rkmate.errors import PlanError as PlanError
    from rkmate.errors import PlanningTimeout as PlanningTimeout
    from rkmate.errors import RankError as RankError
    from rkmate.errors import RkmateError as RkmateError
    from rkmate.errors import RkmateWarning as RkmateWarning
    from rkmate.errors import ScheduleError as ScheduleError
    from rkmate.errors import SolverError as SolverError
    from rkmate.errors import TorchVersionError as TorchVersionError
    from rkmate.errors import UnknownOption as UnknownOption
    from rkmate.errors import WishError as WishError
    from rkmate.graph.blocks.cut import CutSettings as CutSettings
    from rkmate.graph.capture.hints import keep as keep
    from rkmate.graph.capture.hints import recompute as recompute
    from rkmate.ilp.settings import OptionSettings as OptionSettings
    from rkmate.measure.settings import MeasureSettings as MeasureSettings
    from rkmate.measure.step import measure_step as measure_step
    from rkmate.offload.target import Offload as Offload
    from rkmate.pipeline.device_budget import BatchSize as BatchSize
    from rkmate.pipeline.device_budget import auto_budget as auto_budget
    from rkmate.pipeline.loss import with_loss as with_loss
    from rkmate.pipeline.settings import RunSettings as RunSettings
    from rkmate.pipeline.settings import Settings as Settings
    from rkmate.planners.settings import PlannerSettings as PlannerSettings
    from rkmate.runtime.module import PlannedModule as PlannedModule
    from rkmate.settings import Options as Options
    from rkmate.show.curve import Curve as Curve
    from rkmate.show.plan import Plan as Plan


def _explain(error: Exception) -> Exception | None:
    """Return the error that names the torch to install, where one that nobody has tested may be the cause."""
    import sys
    versions = sys.modules.get("rkmate.torch_seam.versions")
    if versions is None or versions.was_seen() or isinstance(error, versions.TorchVersionError):
        return None
    return versions.refusal(f"{type(error).__name__}: {error}")     # type: ignore[no-any-return]


__getattr__, __dir__ = _lazy_names(
    __name__, _PLACES, ("devices", "distributed", "dtr", "integrations"), _explain)
