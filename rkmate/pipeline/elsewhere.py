"""Planning for a GPU of another machine: a trace on this machine, as that GPU would make it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from rkmate import device as devices
from rkmate.device.elsewhere import planning_for
from rkmate.devices import GPU, checked
from rkmate.errors import ArgumentError
from rkmate.graph.capture.captured import Capture
from rkmate.graph.capture.refusals import refuse_parallelism
from rkmate.pipeline.settings import Settings
from rkmate.show.plan import Plan
from rkmate.support.planning_lock import capture_lock, planning_lock
from rkmate.torch_seam.containers import pytree
from rkmate.torch_seam.dtensor import bytes_held, is_dtensor, local_part, placed
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.tensors import FakeTensor, storage_id

_P = TypeVar("_P", bound=Plan)


@contextmanager
def on_gpu(gpu: GPU | None, model: nn.Module) -> Iterator[None]:
    """Plan for a GPU of another machine inside the context; None: for the device that the model is on. No
    other thread captures or begins a step meanwhile."""
    if gpu is None:
        yield
        return
    tensors = [*model.parameters(), *model.buffers()]
    taken = sum(map(bytes_held, (*tensors, *(p.grad for p in tensors if p.grad is not None))))
    with planning_lock, capture_lock, planning_for(gpu, {t.device for t in tensors}, taken):
        yield


def estimating(settings: Settings, costs: str | None) -> Settings:
    """Return settings for a device of another machine. Raises `ArgumentError` if costs should be measured."""
    if costs == "measured":
        raise ArgumentError('costs is "measured", and nothing can be measured on a device that is not here: '
                            "leave it out")
    return replace(settings, costs="analytic")


def sample_for(device: GPU | str | None, model: Any, args: Any, kwargs: Any,
               ) -> tuple[GPU | None, Any, Any, Any]:
    """Return the GPU of a name, with a model and sample inputs to plan on. What is on the meta device gets
    memory on the CPU, which nobody touches: the system gives none for it. Raises `ArgumentError`."""
    if device is None:
        return None, model, args, kwargs
    gpu = checked(device)
    if isinstance(model, nn.Module):
        refuse_parallelism(model)           # before a copy, which sharded modules refuse
    memo: dict[int, Any] = {}
    for t in (*model.parameters(), *model.buffers()) if isinstance(model, nn.Module) else ():
        if t.is_meta:
            part = local_part(t) if is_dtensor(t) else t
            made = torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device="cpu")
            made = placed(t).of(made) if is_dtensor(t) else made
            memo[id(t)] = nn.Parameter(made, t.requires_grad) if isinstance(t, nn.Parameter) else made
    if memo:
        model = copy.deepcopy(model, memo)
    return gpu, model, *pytree.tree_map(_with_memory, (args, kwargs))


def _with_memory(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.is_meta:
        return torch.zeros(leaf.shape, dtype=leaf.dtype).requires_grad_(leaf.requires_grad)
    return leaf


def told(plan: _P, gpu: GPU | None) -> _P:
    """Return a plan whose note says which device it was made for, and from which figures."""
    if gpu is None:
        return plan
    r = gpu.expected
    text = (f"for {gpu.name}, which was not there: times are estimates from published rates "
            f"({r.bytes_per_second / 1e9:,.0f} GB/s and {r.of_products('float16') / 1e12:,.0f} Tflop/s of "
            f"float16 products reckoned with, {gpu.reached:.0%} of them), and temporary memory is known of "
            f"few operations{_translated(plan)}")
    return replace(plan, note="; ".join(part for part in (plan.note, text) if part))


_KERNELS = {"scaled_dot_product_flash_attention": "flash", "scaled_dot_product_efficient_attention":
            "memory-efficient", "scaled_dot_product_cudnn_attention": "cuDNN's"}
_AS_TRACED = {"native_batch_norm": "batch norms", "native_batch_norm_legit": "batch norms",
              "native_batch_norm_legit_functional": "batch norms", "convolution": "convolutions"}


def _translated(plan: Plan) -> str:
    names = {c.operation for c in plan.graph.computations}
    kernels = sorted({_KERNELS[n] for n in names if n in _KERNELS})
    others = sorted({_AS_TRACED[n] for n in names if n in _AS_TRACED})
    text = "; traced on this machine"
    if kernels:
        text += f", attention translated ({', '.join(kernels)} kernel)"
    if others:
        text += f", {' and '.join(others)} as without cuDNN"
    return text


def as_there(captured: Capture, device: torch.device) -> Capture:
    """Move the values of a captured graph to another device, in place, and return the capture."""
    storages: dict[int, torch.UntypedStorage] = {}

    def moved(value: Any) -> Any:
        if not isinstance(value, FakeTensor) or value.device == device:
            return value
        own = value.untyped_storage()
        held = storages.setdefault(storage_id(own), torch.UntypedStorage(own.nbytes(), device="meta"))
        plain = torch.empty(0, dtype=value.dtype, device="meta").set_(
            held, value.storage_offset(), value.shape, value.stride())
        return FakeTensor(value.fake_mode, plain, device)

    def argument(value: torch.device) -> torch.device:
        return value if devices.of(value).elsewhere is None else device

    kept = [n.meta[VALUE] for n in captured.graph.nodes if VALUE in n.meta]      # their storages stay apart
    for node in captured.graph.nodes:
        node.args, node.kwargs = (pytree.tree_map_only(torch.device, argument, a)
                                  for a in (node.args, node.kwargs))
        if VALUE in node.meta:
            node.meta[VALUE] = pytree.tree_map(moved, node.meta[VALUE])
    del kept
    return captured

