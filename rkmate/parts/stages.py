"""One budget for modules that nothing around them calls: the stages of a rank's pipeline.

A schedule calls the stages of its rank in turn, forward and backward, with several microbatches in flight.
A step that was measured shows which calls hold something at each moment, and what else there is (losses, what
is sent, gradients), as that of a sharded model does; all stages share what that leaves of the budget. Of a
sharded stage, the sharded layers are planned.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from rkmate.errors import ArgumentError
from rkmate.parts.one_budget import sharded_layers
from rkmate.parts.sharded import Sharded
from rkmate.parts.sharded_step import Follower, Signature
from rkmate.runtime.kept_plans import Planning
from rkmate.torch_seam.modules import own_call


class Stages(Sharded):
    """The members of a container, and one budget for all of their calls up to an optimizer's step."""

    _too_large = (
        "{name}: no plans of its modules keep a step within {budget:,} bytes: what is outside of all plans "
        "(losses, outputs, what is sent, gradients, gathered parameters) takes up to {outside:,}, and the "
        "smallest budget that can be met is about {least:,} bytes ({share:.0%} of the step's own peak of "
        "about {plain:,} bytes). A schedule's step keeps the outputs of the last stage, and returns a copy "
        "of them, unless return_outputs=False")
    _has_further_calls = True

    def __init__(self, model: nn.Module, planning: Planning) -> None:
        """Raises `ArgumentError`: a number of calls was given."""
        if planning.settings.calls != 1:
            raise ArgumentError(f"calls is {planning.settings.calls}, and calls of the modules in a "
                                f"{type(model).__name__} are counted: leave calls out")
        layers = {member: sharded_layers(member) for member in model.children()}
        self.planned = [m for member, inside in layers.items() for m in inside or [member]]
        """Modules that have plans: the members, or their sharded layers."""
        super().__init__(model, self.planned, planning)
        self.units, self._too_large = [*layers], type(self)._too_large
        self._keeps_gradients = any(layers.values())
        self._kind = self._signatures[None] = Signature()

    def called_inside(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a sharded stage."""
        with self._entered():
            return own_call(module)(*args, **kwargs)

    @contextmanager
    def running(self, follower: Follower) -> Iterator[None]:
        """Around a planned call."""
        with self._entered(), super().running(follower):
            yield

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Inside of a call. The first one after an optimizer's step begins a step."""
        if self._now is not None:
            yield
            return
        if self._leading is None or self._version != self._version_now():
            self._close(is_over=True)
            self._begin_step(self._kind, ())
        self._now = self._leading
        try:
            yield
        except BaseException:
            self._close()
            raise
        finally:
            self._now = None
