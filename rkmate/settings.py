"""The options of all public calls, declared once, and how a call reads them.

`wrap`, `apply`, `plan`, `tradeoff`, `compare`, `max_batch_size`, `shared_plan`, the callbacks for trainers,
the backend of ``torch.compile`` and the command line take `Options`. Next to them, each of these calls names
only what no other place can say. Loads no torch by itself: the command prints its help from here.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypedDict

from rkmate.errors import ArgumentError, UnknownOption
from rkmate.support.defaults import DEFAULT_PLANNER
from rkmate.support.warn import warn

if TYPE_CHECKING:
    from rkmate.offload.target import Place
    from rkmate.pipeline.settings import Compile, Settings


class Options(TypedDict, total=False):
    """Options of every call that plans a model: choices that depend on the model and on how it is trained.
    For an option that is left out, or None, the value in `settings` holds.

    Choices that a project makes once, or that few users make (the source of costs, the planner, gradients in
    place, what a planned module does with new shapes), are fields of `rkmate.Settings` instead.
    """

    calls: int | None
    """Number of calls of the module before the backward (siamese networks, contrastive losses). 1 by default.
    The budget holds for the whole step of all these calls, and a fraction refers to the original's peak over
    the same number of calls."""
    compile: Compile | None
    """Whether to compile groups of operations into fused kernels. True: torch's compiler makes one kernel of
    each group of operations between products, convolutions and attention, and networks of convolutions use
    channels last if that is faster ([what that gains, and what it needs](compile.md)). A plan then takes less
    time and memory, and numbers agree with the original's within the type's precision. ``"auto"``: True if a
    compiler works. False, the default: all bits are the original's."""
    offload: Place | None
    """Target to which a step may send data while it computes, to copy it back when needed. A folder on a
    disk; ``"host"``, the host's memory, for a model on a GPU; or `rkmate.Offload`, which also bounds the
    bytes. The planner decides what to send and what to recompute, from the measured speed of the target
    ([offload](offload.md)). None, the default: nothing is sent."""
    settings: Settings | None
    """All other choices, which few users change: `rkmate.Settings`. An option of the call overrides the same
    field of the settings."""
    progress: bool
    """Whether to show progress on a terminal and in a notebook. True by default."""


@dataclass(frozen=True)
class Chosen:
    """The merged options of a call."""

    settings: Settings
    """The settings, with the options of the call merged into them."""
    progress: bool
    loss_kwargs: Mapping[str, Any] | None = None
    """The value of an old keyword of calls that take a loss."""
    costs: str | None = None
    """The value of the old keyword ``costs``."""

    def options(self) -> Options:
        """Return the same choice as options for another call, with nothing to warn of."""
        return {"settings": self.settings, "progress": self.progress}


def chosen(options: Mapping[str, Any], call: Callable[..., Any], *, own: tuple[str, ...] | None = None,
           name: str = "") -> Chosen:
    """Merge the options of a call with its settings: the call's win.

    Args:
        options: as the user gave them.
        call: the public function or method that got them.
        own: the names that it takes in addition to `Options`; its parameters by default.
        name: how messages call it; the function's name, or its class, unless given.

    Raises:
        UnknownOption: a keyword that is no option; the message names the nearest one.
        ArgumentError: a value is wrong.
    """
    from rkmate.offload.target import offload_of
    from rkmate.pipeline.settings import Settings

    name = name or call.__qualname__.split(".")[0].lstrip("_")
    own = parameters_of(call) if own is None else own
    old = {k: v for k, v in options.items() if k not in OPTIONS}
    for keyword in old:
        if not _accepts(keyword, own):
            raise UnknownOption(_unknown(keyword, name, own, [f.name for f in fields(Settings)]))
    settings, progress = options.get("settings"), options.get("progress", True)
    if settings is not None and not isinstance(settings, Settings):
        raise ArgumentError(f"settings is {type(settings).__name__}; it should be a rkmate.Settings")
    settings = settings or Settings()
    said = {k: options[k] for k in ("calls", "compile") if options.get(k) is not None}
    if said:
        settings = replace(settings, **said)
    if options.get("offload") is not None:
        settings = replace(settings, offload=offload_of(options["offload"], None, settings.offload))
    for keyword, value in old.items():
        moved = MOVED[keyword]
        warn(f"{name}({keyword}=...) is now {moved.place}; the old keyword goes with the next version")
        if moved.put is not None and value is not None:
            settings = moved.put(settings, value)
    if settings.run.cuda_graph or settings.run.pad is not None:
        # A recording computes all outputs; a call that was padded reads its own, to cut them back.
        settings = replace(settings, deferred_outputs="never")
    return Chosen(settings, bool(progress), old.get("loss_kwargs"), old.get("costs"))


def check_default_planner(settings: Settings, instead: str) -> None:
    """Raise `ArgumentError` for settings that name a planner, in a call that cannot follow them. `instead`:
    what the call does."""
    if settings.planner_name != DEFAULT_PLANNER:
        raise ArgumentError(f"Settings(planner={settings.planner_name!r}): {instead}")


def check_no_settings_of_wrap(settings: Settings, name: str) -> None:
    """Raise `ArgumentError` for settings that only `rkmate.wrap` follows."""
    if names := settings.run.of_wrap:
        raise ArgumentError(f"RunSettings({', '.join(f'{n}=...' for n in names)}): only rkmate.wrap follows "
                            f"{'this' if len(names) == 1 else 'these'}, and {name} was called: leave "
                            f"{'it' if len(names) == 1 else 'them'} out, or use rkmate.wrap")


@functools.cache
def parameters_of(call: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the parameters that a call takes in addition to `Options`."""
    return tuple(p.name for p in inspect.signature(call).parameters.values()
                 if p.kind is not p.VAR_KEYWORD and p.name != "self")


@functools.cache
def option_docs() -> dict[str, str]:
    """Return what the declaration says about each option. The class keeps no strings: they are read from this
    file."""
    body = ast.parse(inspect.getsource(Options)).body[0]
    assert isinstance(body, ast.ClassDef)
    return {field.target.id: " ".join(about.value.value.split())
            for field, about in zip(body.body, body.body[1:], strict=False)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            and isinstance(about, ast.Expr) and isinstance(about.value, ast.Constant)
            and isinstance(about.value.value, str)}


OPTIONS = tuple(Options.__annotations__)
"""The names of the options."""


# -- keywords of earlier versions ---------------------------------------------------------

@dataclass(frozen=True)
class Moved:
    """A keyword that calls took in earlier versions."""

    place: str
    """The text to write instead."""
    put: Callable[[Settings, Any], Settings] | None = None
    """Puts its value into settings; None: the call itself knows what to do with it."""
    needs: str = ""
    """The parameter that calls have which took it; empty: all did."""
    never_with: tuple[str, ...] = ()
    """Parameters of calls that never took it."""


def _field(name: str) -> Moved:
    return Moved(f"settings=rkmate.Settings({name}=...)",
                 lambda settings, value: replace(settings, **{name: value}))


def _of_run(name: str) -> Moved:
    return Moved(f"settings=rkmate.Settings(run=rkmate.RunSettings({name}=...))",
                 lambda settings, value: replace(settings, run=replace(settings.run, **{name: value})))


def _with_planner(settings: Settings, name: Any) -> Settings:
    known = settings.planner
    return replace(settings, planner=name if known is None or isinstance(known, str)
                   else replace(known, name=name))


def _with_most_bytes(settings: Settings, most: Any) -> Settings:
    from rkmate.offload.target import offload_of

    return replace(settings, offload=offload_of(None, most, settings.offload))


MOVED: dict[str, Moved] = {
    "planner": replace(_field("planner"), put=_with_planner, never_with=("planners", "make_inputs")),
    **{name: _field(name) for name in ("costs", "trains", "gradients", "planning_seconds")},
    "offload_bytes": Moved("offload=rkmate.Offload(place, most_bytes)", _with_most_bytes),
    **{name: _of_run(name)
       for name in ("verify", "on_new_shape", "training", "lengths", "pad", "cuda_graph")},
    "loss_kwargs": Moved('kwargs={..., "loss_kwargs": ...}', needs="loss"),
}
"""Old keywords by name. They will be removed in the next version."""


def _accepts(keyword: str, own: tuple[str, ...]) -> bool:
    moved = MOVED.get(keyword)
    return (moved is not None and (not moved.needs or moved.needs in own)
            and not set(moved.never_with) & set(own))


def _unknown(keyword: str, name: str, own: tuple[str, ...], of_settings: list[str]) -> str:
    """Say of a keyword that a call does not take it, and which one is nearest."""
    never = {old for old in MOVED if not _accepts(old, own)}
    places = {**{field: f"settings=rkmate.Settings({field}=...)" for field in of_settings},
              **{old: moved.place for old, moved in MOVED.items()},
              **{option: f"{option}=" for option in (*own, *OPTIONS)}}
    near = difflib.get_close_matches(keyword, sorted(set(places) - never), n=1)
    hint = f"did you mean {places[near[0]]}? It" if near else "it"
    return (f"{name} takes no {keyword!r}: {hint} takes {', '.join((*own, *OPTIONS))}; everything else is in "
            "settings=rkmate.Settings(...)")
