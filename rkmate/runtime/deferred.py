"""Outputs that a planned step leaves out: what computes them when they are read, and who reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rkmate.errors import DeferredOutputError
from rkmate.graph.blocks.expressions import source_key
from rkmate.graph.passes.joint import Joint
from rkmate.runtime.deferred_tensor import Unread, deferred_tensor
from rkmate.runtime.environment import Environment, version
from rkmate.runtime.segments import without_autocast
from rkmate.support.warn import warn

IN_A_ROW = 2
"""Calls after another whose deferred outputs were read, until they are planned as ordinary ones."""


@dataclass(frozen=True)
class _Output:
    """One of them, as the generated code has it."""

    number: int
    form: torch.Tensor
    """Without contents."""
    function: Callable[[Environment], list[torch.Tensor]]
    kept: Mapping[str, int]
    """Source key -> place among what the forward keeps."""
    sources: tuple[str, ...]
    """Keys of what the caller holds."""


class DeferredOutputs:
    """Those of one planned step."""

    def __init__(self, joint: Joint, functions: Sequence[Callable[..., Any]], device: torch.device) -> None:
        place = {node: k for k, node in enumerate(joint.kept)}
        self._device = device
        self._outputs = [_Output(
            d.output, d.result.meta["val"], function,
            {source_key(d.sources[mine]): place[theirs] for mine, theirs in d.kept.items()},
            tuple(source_key(s) for s in d.sources.values() if s.kind != "kept"))
            for d, function in zip(joint.deferred, functions, strict=True)]

    def fill(self, outputs: list[Any], kept: Sequence[torch.Tensor], sources: Mapping[str, torch.Tensor],
             read: Callable[[], None] | None) -> None:
        """Put tensors in the places of these outputs. `kept`: what the forward has left for them;
        `sources`: what the caller holds; `read`: called when one of them is read."""
        for output in self._outputs:
            held = {k: kept[i].detach() for k, i in output.kept.items()} | {k: sources[k] for k in output.sources}
            outputs[output.number] = deferred_tensor(output.form, self._device,
                                                     Unread(_Reading(output, held, self._device, read)))


class _Reading:
    """Computes the values of one output of one call."""

    def __init__(self, output: _Output, held: Mapping[str, torch.Tensor], device: torch.device,
                 read: Callable[[], None] | None) -> None:
        self._output, self._held, self._device, self._read = output, held, device, read
        self._versions = {k: version(t) for k, t in held.items()}

    def __call__(self) -> torch.Tensor:
        for key, tensor in self._held.items():
            if version(tensor) != self._versions[key]:
                raise DeferredOutputError(
                    f"an output of the module is computed when it is read, and {_named(key)} was changed in "
                    "place since the forward: read the output before that (before the optimizer's step), or "
                    'let the step compute it: rkmate.Settings(deferred_outputs="never")')
        env = Environment(self._held, self._versions, self._device)
        with torch.inference_mode(False), torch.no_grad(), without_autocast(self._device):
            values, = self._output.function(env)
        if self._read is not None:
            self._read()
        return values


def _named(key: str) -> str:
    kind, _, name = key.partition(":")
    return {"param": f"the parameter {name!r}", "buffer": f"the buffer {name!r}",
            "input": f"input tensor number {name}", "kept": "another output"}.get(kind, f"the constant {name!r}")


class Reads:
    """In how many calls of a module, one after the other, deferred outputs were read."""

    def __init__(self) -> None:
        self._calls = self._latest = self._in_a_row = 0
        self._settled = self._told = False

    @property
    def often(self) -> bool:
        """Whether they should be planned as ordinary outputs."""
        return self._in_a_row >= IN_A_ROW and not self._settled

    def call(self) -> Callable[[], None]:
        """A call begins. Returns what is told of a read of its outputs."""
        self._calls += 1
        number = self._calls

        def read() -> None:
            if number != self._latest and self._in_a_row < IN_A_ROW:
                self._in_a_row = self._in_a_row + 1 if number == self._latest + 1 else 1
                self._latest = number

        return read

    def tell(self, names: Sequence[str], taken: int) -> None:
        """Say once that they are planned as ordinary outputs from now on."""
        told, self._told = self._told, True
        if not told:
            warn(f"the output {' and '.join(names)} is read in every step, which computes it once more, beside "
                 f"the plan. From now on a step computes it, and its budget counts it (peak {taken:,} bytes); "
                 'rkmate.Settings(deferred_outputs="never") does so from the start')

    def stay(self, names: Sequence[str], minimum: int) -> None:
        """Say that they stay as they are, as no plan of the budget has room for them."""
        self._settled = True
        warn(f"the output {' and '.join(names)} is read in every step, which computes it once more, beside the "
             f"plan: a plan that counts it takes {minimum:,} bytes at least, more than the budget. Read it "
             "less often, or give that much")
