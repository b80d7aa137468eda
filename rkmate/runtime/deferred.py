"""Outputs that a planned step leaves out: what computes them when they are read, and who reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rkmate.errors import DeferredOutputError
from rkmate.graph.blocks.expressions import source_key
from rkmate.graph.capture.structure import Structure
from rkmate.graph.passes.joint import Joint
from rkmate.pipeline.deferred_outputs import name_of
from rkmate.runtime.deferred_tensor import Unread, deferred_tensor, leave_alone
from rkmate.runtime.environment import Environment, version
from rkmate.runtime.segments import without_autocast
from rkmate.support.warn import warn
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.tensors import version_of

IN_A_ROW = 2
"""Calls after another whose deferred outputs were read, until they are planned as ordinary ones."""


@dataclass(frozen=True)
class _Output:
    """One of them, as the generated code has it."""

    number: int
    name: str
    form: torch.Tensor
    """Without contents."""
    function: Callable[[Environment], list[torch.Tensor]]
    kept: Mapping[str, int]
    """Source key -> place among what the forward keeps."""
    sources: tuple[str, ...]
    """Keys of what the caller holds."""


class DeferredOutputs:
    """Those of one planned step."""

    def __init__(self, joint: Joint, result: Structure, functions: Sequence[Callable[..., Any]],
                 device: torch.device) -> None:
        place = {node: k for k, node in enumerate(joint.kept)}
        self._device = device
        self._outputs = [_Output(
            d.output, name_of(result, d.output), _form(d.result.meta[VALUE]), function,
            {source_key(d.sources[mine]): place[theirs] for mine, theirs in d.kept.items()},
            tuple(source_key(s) for s in d.sources.values() if s.kind != "kept"))
            for d, function in zip(joint.deferred, functions, strict=True)]
        if self._outputs:
            leave_alone()

    def fill(self, outputs: list[Any], kept: Sequence[torch.Tensor], sources: Mapping[str, torch.Tensor],
             read: Callable[[str], None] | None) -> None:
        """Put tensors in the places of these outputs. `kept`: what the forward has left for them;
        `sources`: what the caller holds; `read`: told the name of one that is read."""
        for output in self._outputs:
            held = {k: kept[i].detach() for k, i in output.kept.items()}
            held |= {k: sources[k] for k in output.sources}
            outputs[output.number] = deferred_tensor(output.form, self._device,
                                                     Unread(_Reading(output, held, self._device, read)))


def _form(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


class _Reading:
    """Computes the values of one output of one call."""

    def __init__(self, output: _Output, held: Mapping[str, torch.Tensor], device: torch.device,
                 read: Callable[[str], None] | None) -> None:
        self._output, self._held, self._device, self._read = output, held, device, read
        self._versions = {k: version_of(t) for k, t in held.items() if not t.is_inference()}

    def __call__(self) -> torch.Tensor:
        for key, tensor in self._held.items():
            if version(tensor) != self._versions.get(key, 0):
                raise DeferredOutputError(
                    f"the output {self._output.name} is computed when it is read, and {_named(key)} was "
                    "changed in place since the forward: read the output before that (before the optimizer's "
                    'step), or let the step compute it: rkmate.Settings(deferred_outputs="never")')
        env = Environment(self._held, self._versions, self._device)
        with torch.inference_mode(False), torch.no_grad(), without_autocast(self._device):
            values, = self._output.function(env)
        if self._read is not None:
            self._read(self._output.name)
        return values


def _named(key: str) -> str:
    kind, _, name = key.partition(":")
    return {"param": f"the parameter {name!r}", "buffer": f"the buffer {name!r}",
            "input": f"input tensor number {name}", "kept": "another output"}.get(
        kind, f"the constant {name!r}")


class Reads:
    """In how many calls of a module, one after the other, deferred outputs were read."""

    def __init__(self) -> None:
        self._calls = self._latest = self._in_a_row = 0
        self._settled = self._told = False
        self._names: dict[str, None] = {}

    @property
    def often(self) -> bool:
        """Whether they should be planned as ordinary outputs."""
        return self._in_a_row >= IN_A_ROW and not self._settled

    @property
    def names(self) -> tuple[str, ...]:
        """Those that were read in these calls."""
        return tuple(self._names)

    def call(self) -> Callable[[str], None]:
        """A call begins. Returns what is told of a read of its outputs, with the output's name."""
        self._calls += 1
        number = self._calls

        def read(name: str) -> None:
            if self._in_a_row >= IN_A_ROW:
                return
            if number != self._latest:
                follows = number == self._latest + 1
                self._in_a_row = self._in_a_row + 1 if follows else 1
                self._latest = number
                if not follows:
                    self._names.clear()
            self._names[name] = None

        return read

    def tell(self, peak: int) -> None:
        """Say once that they are planned as ordinary outputs from now on. `peak`: of such a plan."""
        if not self._told:
            self._told = True
            warn(f"{self._words()} in every step, which computes it once more, beside the plan. From now on "
                 f"a step computes it, and its budget counts it (peak {peak:,} bytes); "
                 'rkmate.Settings(deferred_outputs="never") does so from the start')

    def stay(self, minimum: int) -> None:
        """Say that they stay as they are, as no plan of the budget has room for them. `minimum`: bytes of
        such a plan."""
        self._settled = True
        warn(f"{self._words()} in every step, which computes it once more, beside the plan: a plan that "
             f"counts it takes {minimum:,} bytes at least, more than the budget. Read it less often, or give "
             "that much")

    def _words(self) -> str:
        return f"the output {' and '.join(self._names)} is read"
