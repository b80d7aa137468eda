"""What a user may set about the stages."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Any, Literal

from rkmate.errors import ArgumentError, RkmateWarning
from rkmate.graph.blocks.cut import CutSettings
from rkmate.graph.capture.opaque_parts import Opaque
from rkmate.ilp import settings as ilp_settings
from rkmate.ilp.settings import OptionSettings
from rkmate.measure.settings import MeasureSettings
from rkmate.pipeline.offload import Offload, Place, offload_of
from rkmate.planners import settings as planner_settings
from rkmate.planners.settings import PlannerSettings

CostSource = Literal["measured", "analytic"]
Trains = Literal["all"] | tuple[str | int, ...] | None
"""Outputs that the loss leads to: all, or those of these names and numbers; None: see `Settings.trains`."""
When = Literal["auto", "always", "never"]
Layouts = Literal["keep", "auto", "channels_last"]
Gradients = Literal["returned", "in_place"]
Compile = bool | Literal["auto"]


@dataclass(frozen=True)
class Settings:
    """How the stages work; the defaults are the paper's where it names them."""

    costs: CostSource = "measured"
    """``"measured"`` runs each unique block; ``"analytic"`` counts operations and bytes, and runs nothing
    (but compiled groups, once, for their memory): what convolutions, recurrent layers and fused attention
    take beside their results is then not known, and a step may exceed its budget by that."""
    cut: CutSettings = CutSettings()
    """How the graph is cut into blocks."""
    measure: MeasureSettings = MeasureSettings()
    """How long operations are measured."""
    options: OptionSettings = field(default_factory=ilp_settings.DEFAULT.now)
    """The integer programs of the blocks."""
    trains: Trains = None
    """Outputs that the loss is computed from. None: ``log_probs`` where there is one, else the one
    named ``loss`` if it is a scalar, else the scalars, else all but by-products such as caches."""
    calls: int = 1
    """How many times the module is called before the backward: the budget holds for the step of all of
    them, and a fraction is one of the original's peak over as many."""
    slots: int | None = None
    """Memory slots of the default planner's dynamic program; None: what `planner` says."""
    planning_seconds: float | None = None
    """Limit of a planner that can stop early; None: its own."""
    chunked_loss: When = "auto"
    """Compute the last product and its cross entropy a few rows at a time: where the step does not fit whole,
    and that is faster by more than a percent of it or nothing else meets the budget; always; or never. The
    last bits of that weight's gradient then differ."""
    deferred_outputs: Literal["auto", "never"] = "auto"
    """Where the loss is computed a few rows at a time, a wide output that it is not computed from (the logits
    that are returned beside it) is computed when somebody reads it. ``"never"``: it is computed in the step,
    and counted in the budget."""
    tiled_mlps: When = "auto"
    """Run wide MLPs a few rows at a time: where nothing else meets the budget, always, or never. What they
    hold between their two products then does not grow with the sequence; the backward computes the first
    product again, and the last bits of their weights' gradients differ."""
    layouts: Layouts = "keep"
    """The memory layout of images. ``"keep"``: as the model has it, bit for bit. ``"channels_last"``:
    convolutions, and what is between them, work with the channels last. ``"auto"``: where the step is
    measured to be faster by more than a percent, at any budget. Other kernels then do the work, so that last
    bits differ. Parameters, outputs and gradients keep the layout that they have."""
    gradients: Gradients = "returned"
    """``"returned"``: autograd gets the gradients of parameters, one after the other. ``"in_place"``: the
    step itself adds them to what stands in ``.grad``, so that none is a tensor of its own; hooks on
    parameters, data parallelism and ``torch.autograd.grad`` of parameters, which want it, are refused."""
    compile: Compile = False
    """Compile groups of operations between products, convolutions and attention into kernels of their own,
    which takes seconds, and planned steps less time and memory; numbers differ from the original's within
    the type's precision. ``"auto"``: where a compiler works."""
    offload: Offload | None = None
    """Where data may be sent while a step computes, to come back when it is needed (`offload=` of a call);
    None: nowhere."""
    planner: PlannerSettings | None = None
    """How long the default planner looks; None: its defaults."""
    fraction_of: Literal["plain", "checkpointed"] = "plain"
    """Which peak a fractional budget is a part of, for a model that calls ``torch.utils.checkpoint``: that of
    its step without checkpointing, or as it checkpoints."""
    kept_plans_bytes: int = 1 << 30
    """About how much host memory the plans of one wrapped module may take: one is made for each signature
    (shapes, flags), and the least recently used go first. The latest always stays."""
    keep_pages: bool = True
    """On a CPU, with the GNU C library on Linux: the process keeps the memory that steps free, in blocks of
    up to 32 MiB, as long as the wrapped module is there, and steps write to pages that were used before.
    False: the C library gives it back to the system, and takes fresh pages. `rkmate.keep_pages()` is the same
    for all blocks, and for as long as is wished."""
    opaque: Opaque = ()
    """Submodules that run as they are inside of the plan: names, or patterns (``"layers.*.experts"``);
    ``"auto"``: those that cannot be traced. A call of one is one operation, which keeps what goes in and runs
    again in the backward; its temporary memory is that of the sample's values."""
    split_head: InitVar[When | None] = None
    """The old name of `chunked_loss`, understood for one more version."""

    def __post_init__(self, split_head: When | None) -> None:
        if split_head is not None:
            warnings.warn("Settings(split_head=...) is now called chunked_loss; the old name goes with the "
                          "next version", RkmateWarning, stacklevel=3)
            object.__setattr__(self, "chunked_loss", split_head)
        if isinstance(self.calls, bool) or not isinstance(self.calls, int) or self.calls < 1:
            raise ArgumentError(f"calls is {self.calls!r}; it should be how many times the module is called "
                                "before the backward: 1, 2, ...")
        if not isinstance(self.offload, Offload | None):
            raise ArgumentError(f"Settings(offload={self.offload!r}): give it to the call (offload=), or a "
                                "rkmate.Offload")
        if self.compile not in (False, True, "auto"):
            raise ArgumentError(f'compile is {self.compile!r}; it should be False, True or "auto"')
        if not isinstance(self.keep_pages, bool):
            raise ArgumentError(f"keep_pages is {self.keep_pages!r}; it should be True or False")
        for name, value, allowed in (("costs", self.costs, ("measured", "analytic")),
                                     ("gradients", self.gradients, ("returned", "in_place")),
                                     ("chunked_loss", self.chunked_loss, ("auto", "always", "never")),
                                     ("deferred_outputs", self.deferred_outputs, ("auto", "never")),
                                     ("tiled_mlps", self.tiled_mlps, ("auto", "always", "never")),
                                     ("layouts", self.layouts, ("keep", "auto", "channels_last")),
                                     ("fraction_of", self.fraction_of, ("plain", "checkpointed"))):
            if value not in allowed:
                raise ArgumentError(f"{name} is {value!r}; it should be "
                                    f"{', '.join(map(repr, allowed[:-1]))} or {allowed[-1]!r}")

    @property
    def of_planner(self) -> PlannerSettings:
        """What the default planner works with."""
        planner = self.planner or planner_settings.DEFAULT.now()
        return planner if self.slots is None else replace(planner, slots=self.slots)


def checked_trains(trains: Any) -> Trains:
    """What a user gave as `trains`, as a value to plan with. Raises `ArgumentError` for wrong types."""
    if trains is None or trains == "all":
        return trains  # type: ignore[no-any-return]
    one = isinstance(trains, (str, int))
    chosen = (trains,) if one else tuple(trains) if isinstance(trains, Sequence) else ()
    if not chosen or any(isinstance(t, bool) or not isinstance(t, (str, int)) for t in chosen):
        raise ArgumentError(f'trains is {trains!r}; it should be "all", or the names ("logits", '
                            '"aux.0") or numbers of the outputs that the loss is computed from')
    return chosen


def settings_of_call(settings: Settings | None, costs: str | None, trains: Any = None,
                     gradients: str | None = None, compile: Compile | None = None,
                     offload: Place | None = None, offload_bytes: int | str | None = None) -> Settings:
    """The settings, with the source of costs, the outputs of the loss, the way of gradients, the compiling
    and the place for data that a call names; those that it leaves out are the settings' own. Raises
    `ArgumentError`."""
    settings = settings or Settings()
    if gradients is not None:
        settings = replace(settings, gradients=gradients)  # type: ignore[arg-type]
    if compile is not None:
        settings = replace(settings, compile=compile)
    if offload is not None or offload_bytes is not None:
        settings = replace(settings, offload=offload_of(offload, offload_bytes, settings.offload))
    if trains is not None:
        settings = replace(settings, trains=checked_trains(trains))
    if costs is None:
        return settings
    if costs not in ("measured", "analytic"):
        raise ArgumentError(f'costs is {costs!r}; it should be "measured" or "analytic"')
    return replace(settings, costs=costs)  # type: ignore[arg-type]
