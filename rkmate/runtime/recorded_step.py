"""A planned step that is recorded once and then replayed: ``RunSettings(cuda_graph=True)``.

The forward is one recording and the backward another, so that a step costs the host two calls however many
operations it has. Inputs are copied to where the recording reads them. Outputs are copies. Gradients stand
where the recording writes them: the next step writes over them, which is refused where somebody still refers
to them, and what a parameter's ``.grad`` has there is moved away first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rkmate import device as devices
from rkmate.device.graphs import Recorder, can_record
from rkmate.device.random_state import unchanged_random_state
from rkmate.errors import ArgumentError, BackwardError
from rkmate.runtime.environment import Environment, check_versions
from rkmate.runtime.executable import PlannedStep
from rkmate.runtime.segments import unrecorded, without_autocast
from rkmate.show.plan import Plan
from rkmate.torch_seam.tensors import all_ordinary, storage_users

_OPTION = "cuda_graph=True"
_LEAVE_OUT = f"leave {_OPTION} out"


def check_device(devices: Sequence[torch.device], *, sends: bool) -> None:
    """Raise `ArgumentError` if a step cannot be recorded because of its devices, or because it `sends` data
    away meanwhile."""
    if sends:
        raise ArgumentError(f"{_OPTION} replays only the device's work, without copies to another place: "
                            "leave out offload=")
    wrong = [d for d in devices if not can_record(d)]
    if wrong or not devices:
        raise ArgumentError(f"{_OPTION} records the step on a CUDA device, and the model is on "
                            f"{wrong[0] if wrong else 'none'}: move the model, or {_LEAVE_OUT}")


def check_plan(plan: Plan, step: PlannedStep) -> None:
    """Raise `ArgumentError` if a plan's step cannot be recorded."""
    if plan.gradients == "in_place":
        raise ArgumentError(f'{_OPTION} hands out gradients: it cannot go with gradients="in_place"; '
                            "leave one of them out")
    if plan.calls > 1:
        raise ArgumentError(f"{_OPTION} keeps what one forward leaves for its backward, and "
                            f"calls={plan.calls} says that another forward comes before it: leave one of "
                            "them out")
    if not step.generated.only_known:
        raise ArgumentError(f"{_OPTION} records operations that ask the host for nothing, and the plan has "
                            "others (submodules that run as they are, or custom operators), which may: "
                            f"{_LEAVE_OUT}")
    if written := step.caller.written_inputs:
        raise ArgumentError(f"{_OPTION} runs on copies of the arguments, and the forward writes to tensor "
                            f"{min(written)} among them (counted from 0), which the caller would not see: "
                            f"return the result, or {_LEAVE_OUT}")
    if step.capture.effects.objects or step.capture.effects.collected:
        raise ArgumentError(f"{_OPTION} runs on copies of the arguments, and the forward changes an object "
                            "among them, which the caller would not see: return the tensors, or "
                            f"{_LEAVE_OUT}")
    if answers := step.capture.effects.answers:
        raise ArgumentError(f"{_OPTION} records operations that ask the host for nothing, and this step "
                            f"asks, after each forward, whether {answers[0].what}: take the check out of "
                            f"the forward, or {_LEAVE_OUT}")
    if plan.deferred:
        raise ArgumentError(f"{_OPTION} writes over what a forward has left, and this plan has outputs "
                            'that are computed later: set rkmate.Settings(deferred_outputs="never")')


class _Recording(Environment):
    """Repeated draws come from generators that are made equal before each replay."""

    def draws_from(self, recorder: Recorder, generators: Iterator[torch.Generator]) -> None:
        """Draw from `generators`, which are in the order of the draws."""
        self._recorder, self._generators = recorder, generators

    @contextmanager
    def remember(self, name: str) -> Iterator[None]:
        with self._recorder.drawing_from(next(self._generators)):
            yield

    replay = remember


class RecordedStep:
    """A plan's step, recorded for the tensors that the module has now."""

    def __init__(self, step: PlannedStep, tensors: Sequence[torch.Tensor]) -> None:
        """Record the step. Raises `ArgumentError` if a part of it cannot be recorded."""
        self._step = step
        sources = step.caller.now(tensors)
        elsewhere = sorted(k for k, t in sources.items() if t.device != step.device)
        if elsewhere:
            raise ArgumentError(f"{_OPTION}: {elsewhere[0]} is on {sources[elsewhere[0]].device}, and a "
                                f"recorded step reads tensors of {step.device} only: move it there, or "
                                f"{_LEAVE_OUT}")
        self._inputs = {k: sources[k].clone() for k in step.caller.inputs}
        sources.update(self._inputs)
        self._addresses = _addresses(step, sources)
        self._open = 0
        """Number of the forward whose backward may come."""
        self._versions: dict[str, int] = {}
        recorder = Recorder(step.device)
        self._recorder = recorder
        forward_draws, backward_draws = step.generated.draws
        first, second = recorder.generators(forward_draws), recorder.generators(backward_draws)
        self._draws = [*zip(forward_draws, first, strict=True), *zip(backward_draws, second, strict=True)]
        env = _Recording(sources, {}, step.device)
        env.draws_from(recorder, iter((*first, *second)))
        self._tangents = {i: step.empty_gradient(i).zero_() for i, wanted in enumerate(step.wanted) if wanted}
        env.unrecorded = step.generated.below_autograd and all_ordinary(sources.values())
        with torch.no_grad(), without_autocast(step.device), unrecorded(env.unrecorded):
            try:
                self._rehearse(sources)
                self._forward, self._outputs = recorder.record(lambda: step.run_forward(env), first)
                self._backward, self._grads = recorder.record(
                    lambda: step.run_backward(env, dict(self._tangents)), second)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise ArgumentError(f"{_OPTION}: the step cannot be recorded; an operation asks the host, or "
                                    f"needs it to wait: {error}. To run the step without a recording, "
                                    f"{_LEAVE_OUT}") from error
        env.clear()
        self._unshared = {k: storage_users(g) for k, g in self._grads.items()}

    def _rehearse(self, sources: dict[str, torch.Tensor]) -> None:
        """Run the step once, without any effect, to find operations that wait for the device."""
        env = Environment(sources, {}, self._step.device, dry=True)
        with self._recorder.waiting_is_an_error(), unchanged_random_state(devices.of(self._step.device)):
            self._step.run_forward(env)
            self._step.run_backward(env, dict(self._tangents))
        env.clear()

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether parameters, buffers and constants stand where they stood."""
        return self._addresses == _addresses(self._step, self._step.caller.now(tensors))

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Replay the forward, and return its outputs; the backward follows through autograd."""
        step = self._step
        targets = [step.caller.target(k, tensors) for k in self._grads]
        flat = list(_Replayed.apply(self, tensors, *targets))
        for i in step.outputs.unplanned:
            flat[i] = _Refused.apply(flat[i], *targets)
        return flat

    def forward(self, tensors: Sequence[torch.Tensor]) -> tuple[int, list[torch.Tensor | None]]:
        """Replays the forward: its number, and copies of the outputs."""
        self._make_room(tensors)
        sources = self._step.caller.now(tensors)
        for key, static in self._inputs.items():
            static.copy_(sources[key])
        versions = self._step.caller.versions(sources)
        self._versions = {k: v for k, v in versions.items() if k not in self._inputs}
        self._recorder.seed(self._draws)
        self._forward()
        self._open += 1
        return self._open, [None if o is None else o.clone() for o in self._outputs]

    def backward(self, number: int, given: Sequence[torch.Tensor | None], tensors: Sequence[torch.Tensor]
                 ) -> list[torch.Tensor]:
        """Replay the backward of the forward with this number. Raises `BackwardError`."""
        if number != self._open:
            raise BackwardError(f"with {_OPTION} the backward of a forward comes before the next forward, "
                                "and once: what this one left has been written over. Call one backward for "
                                f"each forward, or {_LEAVE_OUT}")
        missing = [i for i in self._tangents if given[i] is None]
        if missing:
            raise BackwardError(f"with {_OPTION} a loss must depend on all planned outputs, and this one "
                                f"does not depend on output {missing[0]} (counted from 0): name the outputs "
                                "that the loss depends on with Settings(trains=...)")
        sources = self._step.caller.now(tensors)
        check_versions(self._versions, [*sources], [*sources.values()])
        self._open += 1
        for i, static in self._tangents.items():
            static.copy_(given[i])  # type: ignore[arg-type]
        self._backward()
        return [g.detach() for g in self._grads.values()]      # an alias that `.grad` can become

    def _make_room(self, tensors: Sequence[torch.Tensor]) -> None:
        """Move away what is left of the gradients before. The recordings share memory: the forward may write
        over gradients, too."""
        for key, grad in self._grads.items():
            if storage_users(grad) == self._unshared[key]:
                continue
            target = self._step.caller.target(key, tensors)
            if target.grad is not None and \
                    target.grad.untyped_storage().data_ptr() == grad.untyped_storage().data_ptr():
                target.grad = target.grad.clone()
            if storage_users(grad) > self._unshared[key]:
                raise BackwardError(f"with {_OPTION} a step writes over the gradients of the step before, "
                                    f"and that of {key.partition(':')[2]!r} is still held: clone what has "
                                    "to outlast a step")


def _addresses(step: PlannedStep, sources: dict[str, torch.Tensor]) -> list[int]:
    return [t.data_ptr() for k, t in sources.items() if k not in step.caller.inputs]


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recorded: RecordedStep, tensors: Sequence[torch.Tensor],
                *targets: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.number, outputs = recorded.forward(tensors)
        ctx.recorded, ctx.tensors = recorded, tensors
        ctx.mark_non_differentiable(*(o for i, o in enumerate(outputs)
                                      if o is not None and i not in recorded._tangents))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise BackwardError(f"with {_OPTION} there is no double backward (create_graph=True): wrap the "
                                "module without it")
        return None, None, *ctx.recorded.backward(ctx.number, grads, ctx.tensors)


class _Refused(torch.autograd.Function):
    """An output that the plan computes no gradients for."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise BackwardError("the loss depends on an output that the plan was not made for, and with "
                            f"{_OPTION} the forward cannot run a second time: say so with "
                            "Settings(trains=...)")

