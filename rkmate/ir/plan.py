"""Data of a plan: what is computed when, what it costs, how the plan was found, and for what it was made."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from rkmate.errors import GraphError, PlanError
from rkmate.ir.cd import Cost, read_cost
from rkmate.ir.schedule import Compute, CopyIn, CopyOut, Free, Leave, Loss, Schedule, Start, Step
from rkmate.ir.summary import GraphSummary, read_summary
from rkmate.support.cache import write_json


@dataclass(frozen=True)
class Origin:
    """The model, the sample inputs, the device and the versions that a plan was made with: for people."""

    model: str
    """Name of the model's class."""
    parameters: int
    """Number of elements of the parameters; a parameter that two modules share counts once."""
    trained: int
    """Number of elements of the trained parameters."""
    inputs: tuple[tuple[str, str], ...]
    """(name, ``float32[8, 128]``) of each tensor among the sample inputs."""
    device: str
    """``cpu``, ``cuda:0``."""
    versions: tuple[tuple[str, str], ...]
    """(name, version): rkmate, torch, python."""
    placements: tuple[tuple[str, int], ...] = ()
    """(placement in words, number of parameters) of parameters that are distributed tensors."""


_FORMAT = 4
_KEYS = {"schedule": "steps"}
"""Keys in files of fields that have another name there."""
_KERNEL = "kernel"
_WORDS: dict[str, type[CopyOut | Leave | CopyIn | Start]] = {
    "out": CopyOut, "leave": Leave, "in": CopyIn, "start": Start}
Saved = TypeVar("Saved", bound="PlanData")


@dataclass(frozen=True)
class BlockInfo:
    """Description of a block of the chain."""

    label: str
    """Class of the block: identical blocks have the same label."""
    path: str
    """The module of the model that most of its operations come from."""
    forward_nodes: int
    backward_nodes: int
    options: int
    """Number of options of the block's class."""


@dataclass(frozen=True)
class Run:
    """A run of a block in the schedule."""

    block: int
    phase: str
    """``forward`` or ``backward``."""
    option: int | None
    """Number of the option within the block's class; None for a plain forward that keeps nothing, or for a
    planner without options."""
    saved_bytes: int | None = None
    """Bytes that the option keeps between forward and backward."""


@dataclass(frozen=True)
class PlanData:
    """The result of planning, independent of the model object. Bytes and seconds.

    ``peak_bytes`` is the predicted peak of a training step, on top of the memory in use before the step;
    ``budget_bytes`` is its limit.
    """

    planner: str
    """Name of the planner that was asked."""
    budget_bytes: int
    """Limit of the peak."""
    peak_bytes: int
    """Predicted peak of a step, on top of the memory in use before it."""
    baseline_peak_bytes: int
    """Predicted peak without rematerialization. Fractional budgets refer to this peak, so it counts values
    that are computed before the step, copies to undo a forward, and tensors that the caller holds.
    `budget_bytes` and `peak_bytes` exclude these."""
    step_seconds: float
    """Predicted time of a step."""
    baseline_seconds: float
    """Predicted time of a step without rematerialization."""
    bound_seconds: float | None
    """Lower bound, in seconds, of every schedule within the budget that runs each backward computation once,
    in order; None if the planner knows no bound."""
    minimum_bytes: int | None
    """Smallest budget, in bytes, that the planner is known to meet; None if planning did not compute it."""
    blocks: tuple[BlockInfo, ...]
    """Blocks of the chain, in the order of the forward."""
    runs: tuple[Run, ...]
    """Runs of blocks, in the order of the schedule."""
    schedule: Schedule
    """Steps of the plan: what is computed, freed and copied, in order."""
    fingerprint: str
    """Fingerprint of the model's graph: a plan serves every model with the same fingerprint."""
    graph: GraphSummary = field(repr=False)
    """Summary of the graph that the schedule runs over, for pictures and tables."""
    note: str = ""
    """Sentences about the plan: the planner whose schedule was taken, and what the plan replaces or leaves
    out."""
    variant: str = "plain"
    """Variant of the model's graph that the schedule runs over."""
    deferred: tuple[str, ...] = ()
    """Outputs that no step computes: they are computed when first read. Names, or numbers."""
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each stage of planning."""
    first_seconds: float | None = None
    """Time of a step by the first schedule that was found within the budget: what the search gained since is
    the difference to `step_seconds`. None if nothing was searched."""
    nodes: Mapping[str, int] = field(default_factory=dict)
    """Node counts before and after simplification (Rockmate, figure 9)."""
    calls: int = 1
    """Number of calls before one backward. Peaks and budgets are for a step with this number of calls,
    seconds for one call."""
    gradients: str = "returned"
    """How gradients reach parameters: ``"returned"`` to autograd, or added to ``.grad`` ``"in_place"``."""
    compiled: str = ""
    """Compiler of the groups of operations; empty if there are none."""
    fused: tuple[tuple[str, int], ...] = ()
    """For each compiled group: the names of its operations, and how often the graph contains the group."""
    source: str = field(default="", repr=False, compare=False)
    """Generated Python, if a wrapped module runs the plan. For reading; this text is never executed."""
    origin: Origin | None = field(default=None, repr=False, compare=False)
    """Model, sample inputs, device and versions that the plan was made with; None in files saved before plans
    recorded them."""

    @property
    def costs(self) -> tuple[Cost, ...]:
        """Costs of the C nodes."""
        return tuple(Cost(c.time, c.overhead, c.alternatives) for c in self.graph.cd.c)

    @property
    def overhead(self) -> float:
        """Predicted extra time of a step, as a fraction: step / baseline - 1."""
        return self.step_seconds / self.baseline_seconds - 1 if self.baseline_seconds else 0.0

    @property
    def gap(self) -> float | None:
        """Largest fraction of the step's time that a better schedule could save, among schedules that run
        each backward computation once, in order; None if unknown."""
        if self.bound_seconds is None or not self.step_seconds:
            return None
        return max(0.0, 1 - self.bound_seconds / self.step_seconds)

    def __repr__(self) -> str:
        return f"<{in_one_line(self)}>"

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, completely or not at all. Loading a plan runs no code."""
        content = self._content()
        content["checksum"] = _checksum(content)
        write_json(Path(path), content, indent=1)

    @classmethod
    def load(cls: type[Saved], path: str | Path) -> Saved:
        """Read a saved plan. Raises `PlanError` if the file is not a plan, is incomplete, or was edited."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise PlanError(f"{path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise PlanError(f"{path}: is not a complete plan file ({error})") from error
        if not isinstance(content, dict) or "checksum" not in content:
            raise PlanError(f"{path}: is not an rkmate plan")
        if content.get("format") != _FORMAT:
            raise PlanError(f"{path}: has format {content.get('format')!r}; this version reads "
                            f"{_FORMAT}. Make the plan again")
        checksum = content.pop("checksum")
        if checksum != _checksum(content):
            raise PlanError(f"{path}: was changed after it was saved. Make the plan again")
        try:
            found = read_fields(PlanData, content)
            found["graph"] = read_summary(found["graph"], [read_cost(row) for row in content["costs"]])
            return cls(**found)
        except (KeyError, TypeError, ValueError, IndexError, GraphError) as error:
            raise PlanError(f"{path}: is not a complete plan file ({error})") from error

    def _content(self) -> dict[str, Any]:
        return {"format": _FORMAT, **written_fields(self, ["costs", *(f.name for f in fields(PlanData))])}


def in_one_line(plan: PlanData) -> str:
    """Return the planner, peak, budget, time and number of blocks of a plan in one line."""
    return (f"rkmate.Plan {plan.planner}: peak {_mb(plan.peak_bytes)} of budget {_mb(plan.budget_bytes)} "
            f"(without: {_mb(plan.baseline_peak_bytes)}), "
            f"time {plan.overhead:+.1%}, {len(plan.blocks)} blocks")


def _written(value: Any) -> Any:
    """Return a value of a plan as JSON takes it."""
    if isinstance(value, Schedule):
        return [step_content(s) for s in value.steps]
    if isinstance(value, GraphSummary):
        return value.content()
    if isinstance(value, Cost):
        return value.row()
    if isinstance(value, tuple):
        return [_written(v) for v in value]
    if isinstance(value, Mapping):
        return dict(value)
    if is_dataclass(value):
        return written_fields(value, [f.name for f in fields(value)])
    return value


def written_fields(value: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return fields of a plan, or of a dataclass in it, as JSON takes them."""
    return {_KEYS.get(name, name): _written(getattr(value, name)) for name in names}


def _read(kind: Any, value: Any) -> Any:
    """Return a value of a type that `_written` wrote. Raises `KeyError`, `TypeError` or `ValueError`."""
    inner = get_args(kind)
    if kind is Schedule:
        return Schedule(tuple(map(read_step, value)))
    if kind is GraphSummary:
        return value                                            # is read with the costs
    if is_dataclass(kind):
        return kind(**read_fields(kind, value))                 # type: ignore[operator]
    if get_origin(kind) is tuple and ... in inner:
        return tuple(_read(inner[0], v) for v in value)
    if get_origin(kind) is tuple:
        return tuple(_read(k, v) for k, v in zip(inner, value, strict=True))
    if type(None) in inner:
        return None if value is None else _read(inner[0], value)
    return dict(value) if get_origin(kind) is Mapping else kind(value)


_types_of = functools.cache(get_type_hints)


def read_fields(kind: Any, content: Mapping[str, Any], names: Collection[str] | None = None
                ) -> dict[str, Any]:
    """Return fields of a dataclass that `written_fields` wrote; those that have a default, and are not there,
    are left out. Raises `KeyError`, `TypeError` or `ValueError`. `names`: None for all fields."""
    kinds, found = _types_of(kind), {}
    for f in fields(kind) if names is None else [f for f in fields(kind) if f.name in names]:
        key = _KEYS.get(f.name, f.name)
        if key in content or f.default is f.default_factory is MISSING:
            found[f.name] = _read(kinds[f.name], content[key])
    return found


def step_content(step: Step) -> int | str:
    """Return a step as JSON. ``3``: compute node 3, ``"3 kernel 1"`` by the first of its other kernels;
    ``-4``: free storage 3; ``"loss"``; ``"out 3"``, ``"leave 3"``, ``"in 3"``: copy storage 3 away, free it
    then, copy it back. ``"start 3"``: begin compute node 3, a collective, which ``3`` waits for."""
    if isinstance(step, Compute):
        return f"{step.c} {_KERNEL} {step.kernel}" if step.kernel else step.c
    if isinstance(step, Loss):
        return step.kind
    if isinstance(step, Free):
        return -step.d - 1
    if isinstance(step, Start):
        return f"{step.kind} {step.c}"
    return f"{step.kind} {step.d}"


def read_step(value: Any) -> Step:
    """Read a step that `step_content` wrote. Raises `ValueError` or `TypeError`."""
    if value == "loss":
        return Loss()
    if isinstance(value, str) and value.partition(" ")[0] in _WORDS:
        word, number = value.split()
        return _WORDS[word](int(number))
    if isinstance(value, str):
        number, word, which = value.split()
        if word != _KERNEL:
            raise ValueError(f"no kernel is called {value!r}")
        return Compute(int(number), int(which))
    return Compute(int(value)) if int(value) >= 0 else Free(-int(value) - 1)


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _mb(n: int) -> str:
    return f"{n / 2**20:.1f} MiB"
