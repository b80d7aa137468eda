"""Settings of the stages."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields, replace
from typing import Any, Literal

from rkmate.errors import ArgumentError, RkmateWarning
from rkmate.graph.blocks.cut import CutSettings
from rkmate.graph.capture.hints import Wish
from rkmate.graph.capture.opaque import Opaque
from rkmate.ilp import settings as ilp_settings
from rkmate.ilp.settings import OptionSettings
from rkmate.measure.settings import MeasureSettings
from rkmate.offload.target import Offload
from rkmate.planners import settings as planner_settings
from rkmate.planners.settings import PlannerSettings
from rkmate.support.defaults import Default

CostSource = Literal["measured", "analytic"]
Trains = Literal["all"] | tuple[str | int, ...] | None
"""Outputs that the loss is computed from: all, or a tuple of names and numbers; None: see
`Settings.trains`."""
When = Literal["auto", "always", "never"]
Layouts = Literal["keep", "auto", "channels_last", "with_compile"]
NewShape = Literal["plan", "original", "error"]
Gradients = Literal["returned", "in_place"]
Compile = bool | Literal["auto"]
WHEN_TILED: Default[When] = Default("auto")
"""`Settings.tiles` unless it is given."""


@dataclass(frozen=True)
class RunSettings:
    """How a planned module runs: what it checks, and what it does with calls that were not planned yet."""

    verify: bool = True
    """On devices that count what they allocate (CUDA), measure the first training step of each plan, and warn
    if that step exceeds its budget. On any device, compare checksums of what that step sends away (`offload`)
    and of what comes back."""
    on_new_shape: NewShape = "plan"
    """The action for a call with other shapes, dtypes or constants: ``"plan"`` makes a plan for it with the
    same budget, ``"original"`` runs the original module, ``"error"`` raises `ArgumentError`."""
    training: bool | None = None
    """The train flags to plan sample inputs for. None: the module's own; but a module in eval mode (as
    ``from_pretrained`` returns it) is planned as its `train` sets it, and the logger "rkmate" says so. True:
    always as `train` sets it. False: as it is. Calls with other flags get plans of their own."""
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
        for own in fields(self):
            if isinstance(own.default, bool) and not isinstance(value := getattr(self, own.name), bool):
                raise ArgumentError(f"{own.name} is {value!r}; it should be True or False")

    @property
    def of_wrap(self) -> tuple[str, ...]:
        """The fields with a value that only `rkmate.wrap` can follow."""
        return tuple(name for name in ("lengths", "pad", "cuda_graph")
                     if getattr(self, name) not in (None, False))


@dataclass(frozen=True)
class Settings:
    """Options that calls share and that few users change: how the stages of planning work, and how planned
    modules run. The defaults are the paper's if the paper gives a value."""

    costs: CostSource = "measured"
    """``"measured"`` runs each distinct operation, several times. ``"analytic"`` estimates from operations
    and bytes and runs nothing, except compiled groups, once, for their memory. The temporary memory of
    convolutions, recurrent layers and fused attention is then unknown, and a step may exceed its budget by
    it."""
    cut: CutSettings = CutSettings()
    """How the graph is cut into blocks."""
    measure: MeasureSettings = MeasureSettings()
    """How operations are measured."""
    options: OptionSettings = field(default_factory=ilp_settings.DEFAULT.now)
    """Settings of the integer programs of the blocks."""
    trains: Trains = None
    """Outputs that the loss is computed from: ``"all"``, or names (keys and fields, ``"aux.0"`` for the first
    output under ``aux``) and numbers of output tensors. None: ``log_probs`` if it exists (trl's trainers read
    it), else the output named ``loss`` if it is a scalar, else all scalars, else all outputs except
    by-products such as caches and hidden states. A loss that is computed from other outputs is correct, too,
    but its first step runs the forward twice."""
    calls: int = 1
    """Number of calls of the module before the backward. The budget holds for the step with all of these
    calls; a fraction refers to the original's peak over the same number of calls."""
    slots: int | None = None
    """Memory slots of the default planner's dynamic program; None: the value in `planner`."""
    planning_seconds: float | None = None
    """Time limit of planning, in seconds, including capture and measuring. Stages that can stop early share
    the time that is left: the options of blocks get half of it, then follow the planner's search (the integer
    programs on the whole graph, ``auto``, ``dtr``), larger tiles and other variants of the graph. If the
    capture alone takes longer, the first plan within the budget is taken. On a curve, the search for each
    budget gets this many seconds. None: each stage has its own limit."""
    chunked_loss: When = "auto"
    """When to compute the last product and its cross entropy a few rows at a time. ``"auto"``: if the whole
    step does not fit, and either this is faster by more than a percent of the step or nothing else meets the
    budget. ``"always"``: at every budget. The last bits of that weight's gradient then differ."""
    deferred_outputs: Literal["auto", "never"] = "auto"
    """If the loss is computed a few rows at a time, ``"auto"`` defers a wide output that the loss does not
    depend on (logits returned next to the loss) until you read it. ``"never"``: the step computes the output,
    and the budget counts it."""
    tiles: When = field(default_factory=lambda: WHEN_TILED.now())
    """When to run stretches of operations in tiles: images of a batch, bands of an image, blocks of a
    sequence, columns of weights. ``"auto"``: if nothing else meets the budget; ``"always"``: at every budget.
    The backward computes each tile again. Last bits of results and gradients differ ([tiles](tiles.md))."""
    layouts: Layouts | None = "with_compile"
    """Memory layout of images. ``"keep"`` (or None): the model's own, bit for bit. ``"channels_last"``:
    convolutions, and the operations between them, have their channels last. ``"auto"``: channels last if the
    step, as measured, is faster by more than a percent, at any budget. Other kernels then do the work, so
    that last bits differ. Parameters, outputs and gradients keep their layout. ``"with_compile"``, the
    default: ``"auto"`` if groups are compiled (`compile`), else ``"keep"``."""
    gradients: Gradients = "returned"
    """``"returned"``: autograd receives the gradients of parameters, one after the other. ``"in_place"``: the
    step adds gradients directly to ``.grad``, and no gradient is a separate tensor. Hooks on parameters, data
    parallelism and ``torch.autograd.grad`` of parameters need separate tensors, and are refused ([what that
    saves](gradients-in-place.md))."""
    compile: Compile = False
    """Whether to compile groups of operations into fused kernels: the `compile=` of calls that do not pass
    it."""
    offload: Offload | None = None
    """Target to which data may be sent while a step computes, to be copied back when needed: the `offload=`
    of calls that do not pass it. None: no target."""
    planner: str | PlannerSettings | None = None
    """Planner that makes the schedule: its name ([all planners](planners.md)), or `rkmate.PlannerSettings`
    with a name and limits of the default planner's search. None: the default planner, ``"rockmate"``."""
    fraction_of: Literal["plain", "checkpointed"] = "checkpointed"
    """The peak that a fractional budget refers to, for a model that calls ``torch.utils.checkpoint``: the
    peak of its step with checkpointing, as you run it today, or without (``"plain"``)."""
    kept_plans_bytes: int = 1 << 30
    """Approximate limit, in bytes of host memory, of the plans that one wrapped module keeps. There is one
    plan for each signature (shapes, flags); the least recently used plans are dropped first, never the
    latest."""
    opaque: Opaque = ()
    """Submodules that run as they are inside the plan: names, or patterns (``"layers.*.experts"``);
    ``"auto"``: submodules that cannot be traced. A call of such a submodule is one operation, which keeps its
    inputs and runs again in the backward. Its temporary memory is that for the sample's values."""
    parts: Literal["auto", "never"] | tuple[str, ...] | None = None
    """How `rkmate.apply` and `rkmate.wrap` continue if a model cannot be planned as a whole (it has no static
    graph, or it is trained through other methods than its forward). ``"auto"``: they plan the submodules that
    can be planned, which share the budget; the rest runs as it is ([by parts](recipes.md#by-parts)).
    ``"never"``: an error. Names or patterns (``("encoder.layers.*",)``): they plan these submodules, and not
    the model as a whole. None: ``"auto"`` for `apply`, ``"never"`` for `wrap`. Other calls plan whole models
    only."""
    pins: Mapping[str, Wish] = field(default_factory=dict, hash=False)
    """Wishes by names of modules, or patterns: ``{"encoder.layers.*.attn": "keep", "encoder.layers.*.mlp":
    "recompute"}``. ``"keep"``: what the module's forward leaves for the backward is never computed again.
    ``"recompute"``: it is never kept from the forward to the backward; the module's results are left to the
    planner, unless it leaves nothing else. `rkmate.keep` and `rkmate.recompute` say the same about one tensor
    ([wishes](recipes.md#wishes))."""
    loss_bytes: int | None = None
    """Bytes that the loss allocates for itself, if it is computed outside of the module. None: three times
    the outputs that it is computed from."""
    run: RunSettings = RunSettings()
    """How a planned module runs: what it checks, calls of other shapes, lengths planned in advance, CUDA
    graphs."""
    split_head: InitVar[When | None] = None
    """Old name of `chunked_loss`, accepted for one more version."""
    tiled_mlps: InitVar[When | None] = None
    """Has no effect, and is accepted for one more version: `tiles` run MLPs in tiles, too."""
    keep_pages: InitVar[bool | None] = None
    """Has no effect, and is accepted for one more version: planned modules leave the C library alone. Call
    `rkmate.keep_pages()` to keep the memory that steps free."""

    def __post_init__(self, split_head: When | None, tiled_mlps: When | None,
                      keep_pages: bool | None) -> None:
        if split_head is not None:
            warnings.warn("Settings(split_head=...) is now called chunked_loss; the old name goes with the "
                          "next version", RkmateWarning, stacklevel=3)
            object.__setattr__(self, "chunked_loss", split_head)
        if tiled_mlps is not None:
            warnings.warn("Settings(tiled_mlps=...) has no effect: Settings(tiles=...) says when MLPs run in "
                          "tiles; the old keyword goes with the next version", RkmateWarning, stacklevel=3)
        if keep_pages is not None:
            warnings.warn("Settings(keep_pages=...) is now rkmate.keep_pages(), which planned modules do not "
                          "call by themselves; the old keyword has no effect, and goes with the next version",
                          RkmateWarning, stacklevel=3)
        if isinstance(self.calls, bool) or not isinstance(self.calls, int) or self.calls < 1:
            raise ArgumentError(f"calls is {self.calls!r}; it should be how many times the module is called "
                                "before the backward: 1, 2, ...")
        object.__setattr__(self, "trains", checked_trains(self.trains))
        object.__setattr__(self, "parts", _checked_parts(self.parts))
        object.__setattr__(self, "pins", _checked_pins(self.pins))
        if self.pins and self.parts not in (None, "never"):
            raise ArgumentError(f"Settings(parts={self.parts!r}, pins=...): pins need a model that is "
                                "planned as a whole: leave one of them out")
        bytes_ = self.loss_bytes
        if bytes_ is not None and (isinstance(bytes_, bool) or not isinstance(bytes_, int) or bytes_ < 0):
            raise ArgumentError(f"loss_bytes is {bytes_!r}; it should be a number of bytes, or None")
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
        for name, value, allowed in (("costs", self.costs, ("measured", "analytic")),
                                     ("gradients", self.gradients, ("returned", "in_place")),
                                     ("chunked_loss", self.chunked_loss, ("auto", "always", "never")),
                                     ("deferred_outputs", self.deferred_outputs, ("auto", "never")),
                                     ("tiles", self.tiles, ("auto", "always", "never")),
                                     ("layouts", self.layouts,
                                      ("keep", "auto", "channels_last", "with_compile")),
                                     ("fraction_of", self.fraction_of, ("plain", "checkpointed"))):
            if value not in allowed:
                raise ArgumentError(f"{name} is {value!r}; it should be "
                                    f"{', '.join(map(repr, allowed[:-1]))} or {allowed[-1]!r}")

    @property
    def of_planner(self) -> PlannerSettings:
        """Settings that the default planner uses."""
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


def _checked_pins(pins: Any) -> dict[str, Wish]:
    """Return the setting `pins` as a dictionary. Raises `ArgumentError`."""
    if not isinstance(pins, Mapping) or not all(isinstance(p, str) and p for p in pins):
        raise ArgumentError(f'pins is {pins!r}; it should be a mapping of names of modules, or patterns, to '
                            '"keep" or "recompute"')
    wrong = next((p for p, wish in pins.items() if wish not in ("keep", "recompute")), None)
    if wrong is not None:
        raise ArgumentError(f'pins[{wrong!r}] is {pins[wrong]!r}; it should be "keep" or "recompute"')
    return dict(pins)


def _checked_parts(parts: Any) -> Any:
    """Check the setting `parts`. Raises `ArgumentError`."""
    if parts in (None, "auto", "never"):
        return parts
    names = (parts,) if isinstance(parts, str) else tuple(parts) if isinstance(parts, Sequence) else ()
    if not names or not all(isinstance(n, str) and n for n in names):
        raise ArgumentError(f'parts is {parts!r}; it should be "auto", "never", or names of submodules or '
                            'patterns ("encoder.layers.*")')
    return names


def checked_trains(trains: Any) -> Trains:
    """Check the argument `trains` of a public call. Raises `ArgumentError` if it has a wrong type."""
    if trains is None or trains == "all":
        return trains  # type: ignore[no-any-return]
    one = isinstance(trains, (str, int))
    chosen = (trains,) if one else tuple(trains) if isinstance(trains, Sequence) else ()
    if not chosen or any(isinstance(t, bool) or not isinstance(t, (str, int)) for t in chosen):
        raise ArgumentError(f'trains is {trains!r}; it should be "all", or the names ("logits", '
                            '"aux.0") or numbers of the outputs that the loss is computed from')
    return chosen
