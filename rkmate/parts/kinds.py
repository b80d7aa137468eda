"""Submodules that are planned alike: by parts, a call of one is captured, and the others follow its plans."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
from torch import nn

from rkmate.errors import InfeasibleBudget, RkmateError
from rkmate.graph.capture.structure import Structure, take_apart
from rkmate.parts.observed_step import ObservedStep
from rkmate.parts.one_budget import Part, Rest, Shared, bytes_made, is_one_operation
from rkmate.parts.part_calls import PartCall
from rkmate.pipeline.prepare import Traced, trace
from rkmate.pipeline.settings import Settings
from rkmate.planners.several_calls import Item, Moment
from rkmate.runtime.guards import Guards
from rkmate.runtime.kept_plans import Planning, Prototype, attributes_in
from rkmate.support.progress import Progress
from rkmate.support.warn import warn
from rkmate.torch_seam.containers import tensors_in
from rkmate.torch_seam.modules import is_compiled_in_place
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.patches.autograd import region_of
from rkmate.torch_seam.patches.features import GRADIENTS
from rkmate.torch_seam.tensors import has_strides
from rkmate.torch_seam.trace import gradients_laid_out
from rkmate.torch_seam.versions import is_off

ABOUT = 0.05
"""The share of its bytes by which a call may differ from another one of about the same size."""


class Put(Protocol):
    """Puts plans into a submodule."""

    def __call__(self, module: nn.Module, planning: Planning, plans: tuple[Prototype, ...],
                 refused: Callable[[nn.Module, RkmateError], None]) -> None:
        """`plans`: to follow where they fit. `refused`: told of a call that cannot be planned."""


@dataclass
class Kind:
    """Calls that are alike: of submodules of one class, with parameters and arguments of the same shapes."""

    name: str
    """Name of the class."""
    key: object
    """The properties that its submodules have in common."""
    sizes: tuple[torch.Size, ...] = ()
    """The shapes of the arguments of the call that was captured."""
    part: Part | None = None
    """The captured call, with its schedules; None if no call was captured."""
    why: str = ""
    """Why none of its calls can be planned."""
    calls: list[tuple[nn.Module, PartCall]] = field(default_factory=list)
    """Calls in the latest observed step that has some."""
    observed_in: int = 0
    """The number of that step."""
    given: tuple[Structure, list[torch.Tensor]] | None = None
    """The arguments of the captured call, until it is planned."""
    known_shared: frozenset[int] = frozenset()
    """Numbers of the arguments whose gradients plans hand out as terms of a sum."""

    as_large: bool = False
    """Whether submodules with other attributes compute as much, with other numbers (a rate of dropout)."""

    def capture(self, module: nn.Module, guards: Guards, traced: Traced, args: tuple[Any, ...],
                kwargs: dict[str, Any]) -> None:
        """Keep what was captured of a call, and the call's arguments."""
        before = self.part
        self.part = Part(module, guards, traced)
        if before is not None and before.fits(guards):
            self.part.also += [before.key, *before.also]
        tensors, structure = take_apart((args, kwargs), result=False)
        self.given = structure, [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        self.sizes = sizes_in(args, kwargs)

    def lay_out(self, settings: Settings) -> None:
        """Capture a call again where gradients come in other layouts than those of its outputs: kernels round
        by layouts."""
        assert self.part is not None and self.given is not None
        capture = self.part.traced.capture
        strides = dict(Counter(tuple(c.strides.items()) for _, c in self.calls).most_common(1)[0][0])
        traced = {int(s.key): n.meta[VALUE] for n, s in capture.sources.items() if s.kind == "tangent"}
        if is_off(GRADIENTS) or all(k not in traced or has_strides(traced[k], found)
                                    for k, found in strides.items()):
            return
        wanted = [strides.get(k) for k, differentiable in enumerate(capture.differentiable) if differentiable]
        structure, tensors = self.given
        args, kwargs = structure.fill(list(tensors))
        try:
            with gradients_laid_out(wanted):
                self.part.traced = trace(self.part.model, args, kwargs, settings, Progress(False))
        except RkmateError as error:
            warn(f"{type(self.part.model).__name__} gets gradients in other layouts than its outputs, and "
                 f"cannot be planned for them ({error}): they are copied, and last bits may differ. Make its "
                 "outputs contiguous (.contiguous()) before the loss")

    def results(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: int
                ) -> list[torch.Tensor | None]:
        """Return the tensors of a result, and then those that the call has put into its arguments; None for
        others that a plan returns. `given`: the number of tensors among the arguments."""
        found: list[torch.Tensor | None] = [*take_apart(result, result=True)[0]]
        if self.part is not None:
            left = self.part.traced.capture.effects.left_in(args, kwargs)
            found += [left.get(k) for k in range(given + len(found), max(left, default=0) + 1)]
        return found

    def takes(self, guards: Guards) -> bool:
        """Return whether a call of a submodule with these attributes belongs here, as far as is known
        without a capture."""
        return self.part is None or self.as_large or any(
            attributes_in(guards) == attributes_in(known) for known in (self.part.key, *self.part.also))

    def note(self, guards: Guards, traced: Traced) -> bool:
        """Note, and return, whether a call of a submodule with other attributes that was captured belongs
        here: it computes the same, or as much."""
        if self.part is None:
            return False
        if self.part.note(guards, traced):
            return True
        known, found = (bytes_made(t.capture.graph) for t in (self.part.traced, traced))
        self.as_large |= abs(found / known - 1) <= ABOUT
        return self.as_large

    @property
    def saved(self) -> int:
        """Bytes that its calls have saved."""
        return sum(call.saved for _, call in self.calls)

    def sizes_of(self, module: nn.Module) -> tuple[float, float]:
        """Return the average and the largest bytes that a call of a submodule saves, divided by those of the
        captured call; 1 for a submodule that was not called."""
        mine = [call.saved for m, call in self.calls if m is module]
        captured = next((call.saved for m, call in self.calls if self.part and m is self.part.model), 0)
        if not mine or not captured or all(abs(b / captured - 1) <= ABOUT for b in mine):
            return 1.0, 1.0
        return sum(mine) / len(mine) / captured, max(mine) / captured

    @property
    def shared(self) -> frozenset[int]:
        """Numbers of the arguments that others contribute gradients to."""
        return frozenset(k for _, call in self.calls for k in call.shared)

    @property
    def dropped(self) -> frozenset[int]:
        """Numbers of the outputs that nothing held after the forward, in each of its calls."""
        return frozenset.intersection(*(frozenset(call.dropped) for _, call in self.calls))

    @property
    def is_checkpointed(self) -> bool:
        """Whether the submodules call torch.utils.checkpoint: what they save as they are says little."""
        return self.part is not None and any(
            region_of(n) is not None for n in self.part.traced.capture.graph.nodes)

    @property
    def taught(self) -> tuple[int, ...]:
        """Numbers of the outputs through which gradients came."""
        return tuple(sorted({k for _, call in self.calls for k in call.taught}))


@dataclass(frozen=True)
class Asked:
    """The observed step that a budget is shared out for: its parts, and the rest."""

    step: ObservedStep
    kinds: Sequence[Kind]
    places: Sequence[tuple[Kind, Part, nn.Module]]
    """The kind, what was captured of it, and the submodule of each item."""
    calls: Sequence[int]
    """Number of calls of each of these submodules."""
    share: float
    """About how much of what the calls hold without recomputation they can hold within the budget."""
    rest: Rest
    moments: Sequence[Moment]
    is_estimate: bool = True
    """Whether the bytes of a step as it is were not measured in a step that ran without observers."""

    @property
    def items(self) -> list[Item]:
        """Each submodule with the schedules that it may follow."""
        return [Item([way.scaled(*kind.sizes_of(module)) for way in part.ways], calls)
                for (kind, part, module), calls in zip(self.places, self.calls, strict=True)]

    @property
    def outside(self) -> int:
        """Bytes of the step outside of all plans, at most."""
        return max((m.bytes for m in self.moments), default=max(self.rest.figures[:3]))

    def with_more_outside(self, more: int) -> Asked:
        """Return a copy with more bytes outside of all plans, at each moment."""
        beside, alone, early, _ = (size + more for size in self.rest.figures)
        return replace(
            self, rest=self.rest._replace(beside=beside, alone=alone, early=early),
            moments=[replace(m, bytes=m.bytes + more) for m in self.moments])

    def in_words(self, name: Callable[[nn.Module], str]) -> str:
        """Return the names of each kind's first and last submodule. `name`: of a submodule."""
        parts = []
        for key in dict.fromkeys(kind.key for kind in self.kinds):
            mine = [(kind, module) for kind, _, module in self.places if kind.key == key]
            names = list(dict.fromkeys(name(module) for _, module in mine))
            several = f" to {names[-1]}, {len(names)} in all" if len(names) > 1 else ""
            parts.append(f"{names[0]}{several} ({mine[0][0].name})")
        return ", ".join(parts)

    def shared_out(self, share_out: Callable[..., Shared], budget: int, planner: str) -> Shared:
        """Share a budget out among the schedules of all parts. Where it is too small, look for schedules of
        variants of their graphs, too, one variant after the other. Raises `InfeasibleBudget`.

        `planner`: that looks for them; empty where the parts are to keep their bits."""
        parts = [kind.part for kind in self.kinds if kind.part is not None and kind.given is not None]
        while True:
            try:
                return share_out([part for _, part, _ in self.places], self.items, self.rest, budget,
                                 self.moments)
            except InfeasibleBudget:
                if not planner or not sum(part.add_form(planner, budget, self.share) for part in parts):
                    raise


def over_in_words(name: str, peak: int, budget: int, enough: int) -> str:
    """Return the message for a step that takes more than its budget, all in bytes. `enough`: a budget that
    leaves room for it."""
    return (f"a step of {name}, planned by parts, takes {peak:,} bytes, and its budget is {budget:,}: what "
            "is not planned takes more than it did in the step that was observed, or keeps outputs of parts "
            f"that it let go of then. A budget of {enough:,} bytes leaves room for that")


def sizes_in(args: Any, kwargs: Any) -> tuple[torch.Size, ...]:
    """Return the shapes of the tensors among arguments."""
    return tuple(t.shape for t in tensors_in((args, kwargs)))


def kind_key(module: nn.Module) -> object:
    """Return what submodules have in common that are planned alike."""
    forward = module.__dict__.get("forward")
    return (type(module), module.training, getattr(forward, "__func__", forward),
            tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in module.named_parameters()),
            tuple((n, type(m)) for n, m in module.named_modules()))


def is_named(module: nn.Module, model: nn.Module, patterns: Sequence[str]) -> bool:
    """Return whether a submodule has one of the names that were asked for; or none were."""
    names = [n for n, m in model.named_modules() if m is module]
    return not patterns or any(fnmatchcase(n, pattern) for n in names for pattern in patterns)


def why_not(kinds: Iterable[Kind]) -> str:
    """Return which kinds have no plans, and why, for a message; empty if all have some."""
    names: dict[str, dict[str, None]] = defaultdict(dict)
    for k in kinds:
        if k.why:
            names[k.why.removeprefix(k.name).removeprefix(":").strip()][k.name] = None
    reasons = "; ".join(f"{', '.join(found)}: {why}" for why, found in names.items())
    return reasons and f"Not planned: {reasons}"


def modules_of(model: nn.Module, kind: Kind, kinds: Sequence[Kind],
               may_be_planned: Callable[[nn.Module], bool]) -> list[tuple[nn.Module, int]]:
    """Return the submodules of a kind, each with how often it is called in a step: also those that were left
    out of the step that was observed. `kinds`: all that are planned."""
    counts: dict[int, int] = defaultdict(int)
    for module, _ in kind.calls:
        counts[id(module)] += 1
    called = {id(m) for k in kinds for m, _ in k.calls}
    if any(k.key == kind.key for k in kinds[:kinds.index(kind)]):
        return list({id(m): (m, counts[id(m)]) for m, _ in kind.calls}.values())
    inside = {id(m) for k in kinds for part, _ in k.calls for m in part.modules() if m is not part}
    found = {id(m): m for m, _ in kind.calls}
    for module in model.modules():
        if id(module) not in called | inside and kind_key(module) == kind.key and may_be_planned(module):
            found[id(module)] = module
    return [(m, counts.get(i, 1)) for i, m in found.items()]


def outermost(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost submodules that are called."""
    for module in model.children():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            yield from outermost(module)
        else:
            yield module


def growth_of_rest(model: nn.Module, called: Container[int]) -> float:
    """Return by what factor the rest of a step may grow if all members of a model's outermost lists of
    modules are called. `called`: ids of the modules that were.

    A list without a called member does not count: it may be of another use of the model.
    """
    lists: list[nn.ModuleList] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and module not in inside:
            inside.update(module.modules())
            lists.append(module)

    def ran(module: nn.Module) -> bool:
        return id(module) in called or is_compiled_in_place(module)     # whose calls are not watched

    layers = [[m for m in each if is_worth_looking_at(m)] for each in lists]
    whole = [m for each in layers if any(map(ran, each)) for m in each]
    now = [m for m in whole if ran(m)]
    weight = [sum(p.nbytes for m in some for p in m.parameters()) for some in (whole, now)]
    return max(len(whole) / max(1, len(now)), weight[0] / max(1, weight[1]), 1.0)


def is_worth_looking_at(module: nn.Module) -> bool:
    """Whether a submodule may be more than one operation of torch."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
        return False
    return not is_one_operation(module)
