"""Libraries that take another path when they notice that they are traced, put back on eager's path.

Hugging Face's transformers build explicit attention masks while they are exported, where eager mode
leaves the masks out and tells the attention kernel that it is causal. A plan is for one shape, so
what depends on shapes and constants alone may take eager's path: the arithmetic is then eager's, bit
for bit, and the masks take no memory. What depends on the values of an input keeps the traced path.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.distributions import Distribution
from torch.fx.experimental import proxy_tensor
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from rkmate.torch_seam.schema import OpOverload
from rkmate.torch_seam.tensors import is_unwrapped, unset_fake_temporarily

_MASKS = "transformers.masking_utils"
_EXPORTING = "is_torchdynamo_exporting"
_TRACED = ("is_torchdynamo_compiling", _EXPORTING)
"""Functions by which transformers' source asks whether it is traced."""
_OBSERVERS = "transformers.utils.output_capturing"
_ASKING_FOR_GRADIENTS = ("make_inputs_require_grads", "make_inputs_require_grad")
"""Hooks of transformers, peft and trl on an embedding, for checkpointing above frozen weights."""


def is_observer(hook: Any) -> bool:
    """Return whether a forward hook is a library's own, which computes nothing: it records outputs that the
    forward asks for, or makes embeddings require a gradient, without which reentrant checkpointing has none.

    A model installs the first in its first forward, so they come and go without a change of meaning.
    """
    return getattr(hook, "__module__", None) == _OBSERVERS or \
        getattr(hook, "__name__", None) in _ASKING_FOR_GRADIENTS


def weight_made_by(hook: Any) -> str | None:
    """Return the attribute that torch's own (old) normalisations and pruning compute before each forward."""
    if isinstance(hook, (WeightNorm, SpectralNorm)):
        return str(hook.name)
    return str(hook._tensor_name) if isinstance(hook, BasePruningMethod) else None


def routed_by_loops(model: nn.Module) -> str:
    """Return where a model of transformers loops over experts, each with the tokens that chose it: ``model``,
    or a submodule's name; empty if it does not, or if the library has no other way."""
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        asks = getattr(module, "_can_set_experts_implementation", None)
        if asks is not None and getattr(config, "_experts_implementation", None) == "eager" and asks():
            return f"model.{name}" if name else "model"
    return ""


@contextmanager
def without_value_checks() -> Iterator[None]:
    """Let distributions skip the checks of their arguments' values while a module is captured, because a
    trace has no values."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def masks_as_in_eager_mode(model: nn.Module) -> AbstractContextManager[None] | None:
    """Let transformers make masks as in eager mode while a module is exported. A mask that depends on values
    cannot be traced this way. None if the library is not loaded."""
    return as_in_eager_mode() if _MASKS in sys.modules else None


def mask_that_eager_drops(model: nn.Module, arguments: dict[str, Any]) -> str:
    """Return the name of the argument that is a mask of ones, which transformers leave out in eager mode and
    keep in a trace; empty if there is none."""
    name = "attention_mask"
    mask = arguments.get(name)
    drops = _MASKS in sys.modules and any(
        getattr(getattr(m, "config", None), "_attn_implementation", "") == "sdpa" for m in model.modules())
    full = drops and isinstance(mask, torch.Tensor) and is_unwrapped(mask) and mask.dim() == 2 \
        and not mask.is_meta and bool(mask.all())
    return name if full else ""


def sources_as_in_eager_mode(model: nn.Module) -> AbstractContextManager[None] | None:
    """Return a context for an export, in which the modules of transformers' source that ask whether they are
    compiled or exported get the answer no. Return None if no part of the model asks."""
    named = {type(m).__module__: sys.modules.get(type(m).__module__) for m in model.modules()}
    asking = [(m, name) for m in named.values() if m is not None and m.__name__.startswith("transformers.")
              for name in _TRACED if hasattr(m, name)] if _MASKS in sys.modules else []
    return _as_not_traced(asking) if asking else None


@contextmanager
def _as_not_traced(asking: Sequence[tuple[ModuleType, str]]) -> Iterator[None]:
    with ExitStack() as stack:
        for module, name in asking:
            stack.enter_context(mock.patch.object(module, name, _no))
        yield


_LAYERS, _LAYER = "transformers.modeling_layers", "GradientCheckpointingLayer"
_ADAPTERS = "alora_invocation_tokens"


def adapters_hooked_once(model: nn.Module) -> AbstractContextManager[Any] | None:
    """Return a context in which peft's activated LoRA hooks its layers for the forward alone, and not again
    for the second run of checkpointed ones, which a plan has none of. Return None for other models."""
    layers = sys.modules.get(_LAYERS)
    configs = [c for m in model.modules() if isinstance(c := getattr(m, "peft_config", None), dict)]
    if not hasattr(layers, _LAYER) or not any(
            getattr(c, _ADAPTERS, None) for found in configs for c in found.values()):
        return None
    # peft looks for layers of this class, and transformers has made its own long ago.
    return mock.patch.object(layers, _LAYER, type(_LAYER, (nn.Module,), {}))


@contextmanager
def as_in_eager_mode() -> Iterator[None]:
    """Let loaded libraries decide as in eager mode, while a module is exported."""
    masks = sys.modules.get(_MASKS)
    with ExitStack() as stack:
        if masks is not None and hasattr(masks, _EXPORTING):
            stack.enter_context(mock.patch.object(masks, _EXPORTING, _no))
        if masks is not None and hasattr(masks, "find_packed_sequence_indices"):
            find = masks.find_packed_sequence_indices

            def packed(position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                known = known_value(position_ids)
                if known is not None and all(b - a == 1 for row in known
                                             for a, b in zip(row, row[1:], strict=False)):
                    return None        # one sequence in each row, whatever the inputs are
                return find(position_ids, *args, **kwargs)

            stack.enter_context(mock.patch.object(masks, "find_packed_sequence_indices", packed))
        yield


def _no() -> bool:
    return False


def known_value(tensor: torch.Tensor) -> Any:
    """Return the value, as nested lists, of a traced tensor that depends on no input; None when it does."""
    mode = proxy_tensor.get_proxy_mode()
    if mode is None:
        return None
    found = proxy_tensor.get_proxy_slot(tensor, mode.tracer, None)
    proxy = getattr(found, "proxy", None)
    if not isinstance(proxy, fx.Proxy):
        return None
    needed: dict[fx.Node, None] = {}
    todo = [proxy.node]
    while todo:
        node = todo.pop()
        if node.op != "call_function" or not isinstance(node.target, OpOverload) \
                or torch.Tag.nondeterministic_seeded in node.target.tags:
            return None
        needed[node] = None
        todo += [n for n in node.all_input_nodes if n not in needed]
    values: dict[fx.Node, Any] = {}
    with proxy_tensor.disable_proxy_modes_tracing(), unset_fake_temporarily(), \
            torch._C.DisableTorchFunction(), torch.no_grad():
        for node in proxy.node.graph.nodes:        # in the order of the trace
            if node in needed:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
        result = values[proxy.node]
        return result.tolist() if isinstance(result, torch.Tensor) else None

