"""Submodules that are planned alike: by parts, a call of one is captured, and the others follow its plans."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from rkmate.graph.capture.structure import Structure
from rkmate.pipeline.prepare import Traced
from rkmate.runtime.guards import Guards
from rkmate.runtime.kept_plans import is_alike
from rkmate.runtime.observed_step import PartCall
from rkmate.runtime.one_budget import Part, is_one_operation, operations
from rkmate.torch_seam.patches.autograd import region_of

ABOUT = 0.05
"""The share of its bytes by which a call may differ from another one of about the same size."""


@dataclass
class Kind:
    """Calls that are alike: of submodules of one class, with parameters and arguments of the same shapes."""

    name: str
    """Of the class."""
    key: object
    """The properties that its submodules have in common."""
    sizes: tuple[torch.Size, ...] = ()
    """The shapes of the arguments of the call that was captured."""
    part: Part | None = None
    """What was captured; None where nothing was."""
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

    def takes(self, guards: Guards) -> bool:
        """Return whether a call belongs here, as far as is known without a capture."""
        return self.part is None or self.part.fits(guards) or (
            self.as_large and is_alike(guards, self.part.key, attributes=False))

    def note(self, guards: Guards, traced: Traced) -> bool:
        """Note, and return, whether a call of a submodule with other attributes that was captured belongs
        here: it computes the same, or as much."""
        if self.part is None or not is_alike(guards, self.part.key, attributes=False):
            return False
        if self.part.note(guards, traced):
            return True
        self.as_large |= operations(self.part.traced.capture.graph) == operations(traced.capture.graph)
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
    def is_checkpointed(self) -> bool:
        """Whether it calls torch.utils.checkpoint: what it saves as it is says little."""
        return self.part is not None and any(
            region_of(n) is not None for n in self.part.traced.capture.graph.nodes)

    @property
    def taught(self) -> tuple[int, ...]:
        """Numbers of the outputs through which gradients came."""
        return tuple(sorted({k for _, call in self.calls for k in call.taught}))


def kind_key(module: nn.Module) -> object:
    """Return what submodules have in common that are planned alike."""
    forward = module.__dict__.get("forward")
    return (type(module), module.training, getattr(forward, "__func__", forward),
            tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in module.named_parameters()),
            tuple((n, type(m)) for n, m in module.named_modules()))


def is_worth_looking_at(module: nn.Module) -> bool:
    """Whether a submodule may be more than one operation of torch."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
        return False
    return not is_one_operation(module)
