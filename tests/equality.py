"""Holding a wrapped module against the original: the same step, bit for bit, and its memory."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from rkmate.measure.step import measure_peak
from tests.models import Sample

_SEED = 1234


@dataclass(frozen=True)
class Trace:
    """Everything that a training step leaves behind, copied."""

    output: Any
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    """Of the parameters by name, and of the inputs by position."""
    buffers: dict[str, torch.Tensor]
    random_state: torch.Tensor


def assert_same_step(original: nn.Module, wrapped: nn.Module, sample: Sample,
                     steps: int = 2) -> None:
    """Train both, from equal states, on the sample's inputs: after every step all must be equal.

    The modules must not share parameters. Gradients accumulate over two steps and the parameters
    move after each, so that neither is a repetition of the first.
    """
    for step in range(steps):
        expected = trace_step(original, sample, _SEED + step)
        actual = trace_step(wrapped, sample, _SEED + step)
        assert_same_trace(expected, actual, f"step {step}")
        for module in (original, wrapped):
            move_parameters(module)
            if step % 2:
                module.zero_grad()


def trace_step(module: nn.Module, sample: Sample, seed: int) -> Trace:
    """Run forward, loss and backward from a known random state."""
    args, kwargs = fresh_inputs(sample)
    torch.manual_seed(seed)
    output = module(*args, **kwargs)
    loss = sample.loss(output)
    kept = pytree.tree_map(detached, output)     # before the backward: it may free what it returned
    loss.backward()
    leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    gradients = {n: detached(p.grad) for n, p in module.named_parameters()}
    gradients |= {f"input {i}": detached(t.grad) for i, t in enumerate(leaves)}
    return Trace(kept, loss.detach().clone(), gradients,
                 {n: detached(b) for n, b in module.named_buffers()}, torch.get_rng_state())


def fresh_inputs(sample: Sample) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies of the inputs, leaves of their own, so that two modules do not share gradients."""
    def leaf(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        return t.detach().clone().requires_grad_(t.requires_grad)

    args, kwargs = pytree.tree_map(leaf, (sample.args, sample.kwargs))
    return args, kwargs


def detached(value: Any) -> Any:
    """A copy without autograd history; of what is no tensor, a deep copy with such tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.deepcopy(value, {id(t): t.detach().clone() for t in tensors_of(value)})


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Tensors in containers and in attributes of objects, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors_of(v)]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in tensors_of(v)]
    if hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
        return tensors_of(vars(value))
    return []


def move_parameters(module: nn.Module) -> None:
    """One step of gradient descent, in place."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-0.01)


def assert_same_trace(expected: Trace, actual: Trace, where: str) -> None:
    """All fields equal, bit for bit."""
    assert_same_output(expected.output, actual.output, where)
    assert_same_tensor(expected.loss, actual.loss, f"{where}: loss")
    assert list(expected.gradients) == list(actual.gradients), where
    for name, gradient in expected.gradients.items():
        other = actual.gradients[name]
        assert (gradient is None) == (other is None), f"{where}: gradient of {name}"
        if gradient is not None and other is not None:
            assert_same_tensor(gradient, other, f"{where}: gradient of {name}")
    assert list(expected.buffers) == list(actual.buffers), where
    for name, buffer in expected.buffers.items():
        assert_same_tensor(buffer, actual.buffers[name], f"{where}: buffer {name}")
    assert torch.equal(expected.random_state, actual.random_state), f"{where}: random state"


def assert_same_output(expected: Any, actual: Any, where: str) -> None:
    """The same containers, with equal values in them."""
    assert type(expected) is type(actual), f"{where}: {type(expected)} became {type(actual)}"
    left, left_spec = pytree.tree_flatten(expected)
    right, right_spec = pytree.tree_flatten(actual)
    assert left_spec == right_spec, f"{where}: structure of the output"
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        assert type(a) is type(b), f"{where}: output {i}"
        inside, others = tensors_of(a), tensors_of(b)
        assert len(inside) == len(others), f"{where}: tensors of output {i}"
        for x, y in zip(inside, others, strict=True):
            assert_same_tensor(x, y, f"{where}: output {i}")
        if not inside and not hasattr(a, "__dict__"):
            assert a == b, f"{where}: output {i}"


def assert_same_tensor(expected: torch.Tensor, actual: torch.Tensor, where: str) -> None:
    """Equal shape, type and bytes: a NaN equals the same NaN, and -0.0 is not 0.0."""
    assert expected.shape == actual.shape, f"{where}: shape {tuple(expected.shape)} became " \
                                           f"{tuple(actual.shape)}"
    assert expected.dtype == actual.dtype, f"{where}: {expected.dtype} became {actual.dtype}"
    if not torch.equal(as_bytes(expected), as_bytes(actual)):
        gap = (expected.double() - actual.double()).abs().max().item()
        raise AssertionError(f"{where}: values differ by up to {gap:.3g}")


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    """The values' bytes, in order of the elements."""
    return t.detach().contiguous().reshape(-1).view(torch.uint8)


def measured_peak(module: nn.Module, sample: Sample) -> int:
    """Bytes that a training step takes above what stands before it, gradients included in that, where the
    training loop names the module's outputs.

    One step goes first: it makes the gradients, and whatever is made once.
    """
    args, kwargs = sample.args, sample.kwargs

    def step() -> None:
        output = module(*args, **kwargs)
        sample.loss(output).backward()

    step()
    leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    for t in [*module.parameters(), *leaves]:
        if t.grad is not None:
            t.grad.zero_()
    return measure_peak(step).peak
