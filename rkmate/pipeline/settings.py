"""What a user may set about the stages."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Any, Literal

from rkmate.errors import ArgumentError, RkmateWarning
from rkmate.graph.blocks.cut import CutSettings
from rkmate.graph.capture.opaque import Opaque
from rkmate.ilp import settings as ilp_settings
from rkmate.ilp.settings import OptionSettings
from rkmate.measure.settings import MeasureSettings
from rkmate.pipeline.offload import Offload
from rkmate.planners import settings as planner_settings
from rkmate.planners.settings import PlannerSettings

CostSource = Literal["measured", "analytic"]
Trains = Literal["all"] | tuple[str | int, ...] | None
"""Outputs that the loss leads to: all, or those of these names and numbers; None: see `Settings.trains`."""
When = Literal["auto", "always", "never"]
Layouts = Literal["keep", "auto", "channels_last", "with_compile"]
NewShape = Literal["plan", "original", "error"]
Gradients = Literal["returned", "in_place"]
Compile = bool | Literal["auto"]


@dataclass(frozen=True)
class RunSettings:
    """How a planned module runs: what it checks, and what it does with calls that were not planned yet."""

    verify: bool = True
    """On devices that count what they allocate (CUDA), measure the first training step of each plan, and warn
    if that step exceeds its budget. On any device, compare checksums of what that step sends away (`offload`)
    and of what comes back."""
    on_new_shape: NewShape = "plan"
    """What a call with other shapes, dtypes or constants does: ``"plan"`` makes a plan for it with the same
    budget, ``"original"`` runs the original module, ``"error"`` raises."""
    training: bool | None = None
    """The train flags to plan sample inputs for. None: the module's own; but a module in eval mode (as
    ``from_pretrained`` returns it) is planned as its `train` sets it, with a warning. True: always as `train`
    sets it. False: as it is. Calls with other flags get plans of their own."""
    lengths: Sequence[int] | None = None
    """Sequence lengths (dimension 1 of the arguments) that `rkmate.wrap` plans in advance, next to the
    sample's own. None: none."""
    pad: Mapping[str, float] | None = None
    """Padding values by argument name, for `rkmate.wrap`: a call whose length is between two of `lengths` is
    padded to the longer one, and its outputs are cut back. None: `lengths` are planned, and nothing is
    padded."""
    cuda_graph: bool = False
    """Whether `rkmate.wrap` records the step of each plan as CUDA graphs, forward and backward, and replays
    them: two calls of the host for each step ([what that needs](limits.md#cuda-graphs))."""

    def __post_init__(self) -> None:
        if self.on_new_shape not in ("plan", "original", "error"):
            raise ArgumentError(f'on_new_shape is {self.on_new_shape!r}; it should be "plan", "original" or '
                                '"error"')
        for name in ("verify", "cuda_graph"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"{name} is {getattr(self, name)!r}; it should be True or False")

    @property
    def of_wrap(self) -> tuple[str, ...]:
        """The fields with a value that only `rkmate.wrap` can follow."""
        return tuple(name for name in ("lengths", "pad", "cuda_graph")
                     if getattr(self, name) not in (None, False))


@dataclass(frozen=True)
class Settings:
    """What calls share, and what few users change: how the stages of planning work, and how planned modules
    run. The defaults are the paper's where the paper names them."""

    costs: CostSource = "measured"
    """``"measured"`` runs the operations of each unique block several times; ``"analytic"`` counts operations
    and bytes, and runs nothing (except compiled groups, once, for their memory): what convolutions, recurrent
    layers and fused attention take beside their results is then not known, and a step may exceed its budget
    by that."""
    cut: CutSettings = CutSettings()
    """How the graph is cut into blocks."""
    measure: MeasureSettings = MeasureSettings()
    """How long operations are measured."""
    options: OptionSettings = field(default_factory=ilp_settings.DEFAULT.now)
    """The integer programs of the blocks."""
    trains: Trains = None
    """The outputs that the loss is computed from: ``"all"``, or names (keys and fields, ``"aux.0"`` for the
    first output under ``aux``) and numbers of output tensors. None: ``log_probs`` if there is one (what trl's
    trainers take), else the output named ``loss`` if it is a scalar, else the scalars, else all outputs
    except by-products such as caches and hidden states. A loss that is computed from other outputs is
    correct, too, but its first step runs the forward twice."""
    calls: int = 1
    """How many times the module is called before the backward: the budget holds for the step of all of
    them, and a fraction is one of the original's peak over as many."""
    slots: int | None = None
    """Memory slots of the default planner's dynamic program; None: what `planner` says."""
    planning_seconds: float | None = None
    """Seconds that a planner may take that can stop early (the integer programs on the whole graph, ``auto``,
    ``dtr``). None: the planner's own limit."""
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
    layouts: Layouts | None = "with_compile"
    """The memory layout of images. ``"keep"`` (or None): as the model has it, bit for bit.
    ``"channels_last"``: convolutions, and what is between them, work with the channels last. ``"auto"``:
    where the step is measured to be faster by more than a percent, at any budget. Other kernels then do the
    work, so that last bits differ. Parameters, outputs and gradients keep the layout that they have.
    ``"with_compile"``, the default: ``"auto"`` where groups are compiled (`compile`), else ``"keep"``."""
    gradients: Gradients = "returned"
    """``"returned"``: autograd gets the gradients of parameters, one after the other. ``"in_place"``: the
    step itself adds them to what stands in ``.grad``, so that no gradient of a weight is a tensor of its own;
    hooks on parameters, data parallelism and ``torch.autograd.grad`` of parameters, which need such tensors,
    are refused ([what that saves](gradients-in-place.md))."""
    compile: Compile = False
    """Whether groups of operations are compiled into kernels of their own: the `compile=` of calls that do
    not say it."""
    offload: Offload | None = None
    """Where data may be sent while a step computes, to come back when it is needed: the `offload=` of calls
    that do not say it. None: nowhere."""
    planner: str | PlannerSettings | None = None
    """How the schedule is found: the name of a planner ([all of them](planners.md)), or
    `rkmate.PlannerSettings` with a name and how long the default planner looks. None: the default planner,
    ``"rockmate"``."""
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
    run: RunSettings = RunSettings()
    """How a planned module runs: what it checks, calls of other shapes, lengths planned in advance, CUDA
    graphs."""
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
        object.__setattr__(self, "trains", checked_trains(self.trains))
        if self.layouts is None:
            object.__setattr__(self, "layouts", "keep")
        seconds = self.planning_seconds
        if seconds is not None and not seconds > 0:
            raise ArgumentError(f"planning_seconds is {seconds}; it should be a positive number of seconds")
        if not isinstance(self.run, RunSettings):
            raise ArgumentError(f"run is {self.run!r}; it should be a rkmate.RunSettings")
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
                                     ("layouts", self.layouts,
                                      ("keep", "auto", "channels_last", "with_compile")),
                                     ("fraction_of", self.fraction_of, ("plain", "checkpointed"))):
            if value not in allowed:
                raise ArgumentError(f"{name} is {value!r}; it should be "
                                    f"{', '.join(map(repr, allowed[:-1]))} or {allowed[-1]!r}")

    @property
    def of_planner(self) -> PlannerSettings:
        """What the default planner works with."""
        planner = self.planner
        if not isinstance(planner, PlannerSettings):
            planner = planner_settings.DEFAULT.now()
        return planner if self.slots is None else replace(planner, slots=self.slots)

    @property
    def planner_name(self) -> str:
        """The name of the planner."""
        if self.planner is None or isinstance(self.planner, PlannerSettings):
            return self.of_planner.name
        return self.planner


def checked_trains(trains: Any) -> Trains:
    """Return what a user gave as `trains` as a value to plan with. Raises `ArgumentError` for wrong types."""
    if trains is None or trains == "all":
        return trains  # type: ignore[no-any-return]
    one = isinstance(trains, (str, int))
    chosen = (trains,) if one else tuple(trains) if isinstance(trains, Sequence) else ()
    if not chosen or any(isinstance(t, bool) or not isinstance(t, (str, int)) for t in chosen):
        raise ArgumentError(f'trains is {trains!r}; it should be "all", or the names ("logits", '
                            '"aux.0") or numbers of the outputs that the loss is computed from')
    return chosen
