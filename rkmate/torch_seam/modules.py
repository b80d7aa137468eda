"""Modules: the dictionaries in which `nn.Module` keeps its tensors and hooks, and the hooks around all."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

PARAMETERS, BUFFERS, SUBMODULES = "_parameters", "_buffers", "_modules"
"""Names of a module's dictionaries of tensors and of submodules."""
HOOK_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Names of a module's dictionaries of hooks."""
HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
         "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks",
         "_backward_pre_hooks")
"""Names of a module's dictionaries of hooks, and of what is known about hooks."""
HOOKED = "_is_full_backward_hook"
"""Name of the attribute that a module gets with its first backward hook."""
REGISTRIES = (BUFFERS, SUBMODULES, PARAMETERS, *HOOKS)
"""Names of all dictionaries in which a module registers something."""
WEIGHT_LISTS = ("_all_weights", "_flat_weight_refs", "_flat_weights", "_flat_weights_names")
"""Attributes in which a recurrent layer keeps lists of its weights."""
COMPILED_CALL = "_compiled_call_impl"
"""Name of the attribute that replaces a module's call, where it is not None."""
INSIDE_OF_FLAT = "_fsdp_wrapped_module"
"""Name of the module inside of a FullyShardedDataParallel (FSDP1)."""
_FLAT_PARAMETER = "_flat_param"
"""Name of the parameter that such a module has instead of its own, without ``use_orig_params=True``."""
SHARED = frozenset((
    PARAMETERS, BUFFERS, SUBMODULES, "_non_persistent_buffers_set", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"))
"""Names of what a module and one that stands in its place have in common, as the same objects."""

parameters_of: Callable[[nn.Module], dict[str, Any]] = attrgetter(PARAMETERS)
"""Return a module's own parameters, by name: the dictionary itself."""
buffers_of: Callable[[nn.Module], dict[str, Any]] = attrgetter(BUFFERS)
"""Return a module's own buffers, by name: the dictionary itself."""
submodules_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter(SUBMODULES)
"""Return a module's own submodules, by name: the dictionary itself."""
forward_hooks_of: Callable[[nn.Module], dict[int, Callable[..., Any]]] = attrgetter("_forward_hooks")
"""Return the hooks after a module's forward."""
forward_pre_hooks_of: Callable[[nn.Module], dict[int, Callable[..., Any]]] = attrgetter("_forward_pre_hooks")
"""Return the hooks before a module's forward."""


def parameters_by_path(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return a module's parameters, each at every path that leads to it. Some classes shorten the names in
    `named_parameters` (torch's wrapper for checkpointing does)."""
    return list(nn.Module.named_parameters(module, remove_duplicate=False))


def buffers_by_path(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return a module's buffers, each at every path that leads to it, whatever its class calls them."""
    return list(nn.Module.named_buffers(module, remove_duplicate=False))


@contextmanager
def parameters_proper(module: nn.Module) -> Iterator[None]:
    """Let tensors that stand in the place of parameters (`torch.func.functional_call`) be parameters of the
    same values: an export asks for that."""
    swapped = [(parameters_of(m), name, t) for m in module.modules() for name, t in parameters_of(m).items()
               if t is not None and not isinstance(t, nn.Parameter)]
    shadows = gathered_flat(module)
    made = {id(t): nn.Parameter(t.detach(), t.requires_grad) for _, _, t in swapped}
    for held, name, _ in shadows:
        del held[name]
    for held, name, t in swapped:
        held[name] = made[id(t)]
    try:
        yield
    finally:
        for held, name, t in (*swapped, *shadows):
            held[name] = t


def has_backward_hooks(module: nn.Module) -> bool:
    """Return whether hooks are registered around a module's backward."""
    return any(getattr(module, name) for name in HOOK_KINDS[2:])


def is_sharded(module: nn.Module) -> bool:
    """Return whether hooks around a module's forward gather its parameters (those of `fully_shard`, or of
    DeepSpeed's ZeRO stage 3), or the module is a FullyShardedDataParallel (FSDP1)."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    by_layers = fsdp is not None and isinstance(module, fsdp.FSDPModule)
    return by_layers or inside_of_flat(module) is not None or bool(gathered_by_zero(module))


def inside_of_flat(module: nn.Module) -> nn.Module | None:
    """Return the module inside of a FullyShardedDataParallel (FSDP1); None for any other module."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(module, fsdp.FullyShardedDataParallel):
        return None
    inside: nn.Module = getattr(module, INSIDE_OF_FLAT)
    return inside


def inside_of_sharded(module: nn.Module) -> nn.Module | None:
    """Return the module inside of one that is sharded and adds nothing else to it: an FSDP1, or what
    torch.compile has returned; None for any other module."""
    return inside_of_flat(module) or (original_of(module) if is_sharded(module) else None)


def running_flat() -> nn.Module | None:
    """Return the innermost FullyShardedDataParallel (FSDP1) whose forward is running; None if none is."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    frame = inspect.currentframe() if fsdp is not None else None
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and inside_of_flat(module) is not None:
            return module
        frame = frame.f_back
    return None


def gathered_names(module: nn.Module) -> set[str]:
    """Return the names of a module's own parameters that FSDP1 has gathered now."""
    own = vars(module)
    return {name for name, t in parameters_of(module).items() if t is not None and own.get(name) is t}


def flat_views(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that FSDP1 without ``use_orig_params=True`` has left a module instead of its own
    parameters: views of a flat one, by name. Once that is freed, they have no storage."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return {} if fsdp is None else {name: t for name, t in vars(module).items() if isinstance(
        t, torch.Tensor) and isinstance(t._base, fsdp.FlatParameter)}


def _gathered_attributes(module: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Return the parameters that FSDP1 without ``use_orig_params=True`` has gathered now, each with its
    module and its name there."""
    return [(m, name, t) for m in module.modules() for name, t in flat_views(m).items()
            if t.untyped_storage().nbytes() and name not in parameters_of(m)]


@contextmanager
def gathered_registered(module: nn.Module) -> Iterator[None]:
    """Register what FSDP1 has gathered as the module's parameters inside the context, instead of the flat
    one, as ``use_orig_params=True`` does in a forward."""
    own = parameters_of(module)
    if _FLAT_PARAMETER not in own:
        yield
        return
    views, flat = _gathered_attributes(module), own.pop(_FLAT_PARAMETER)
    for m, name, t in views:
        parameters_of(m)[name] = t
    try:
        yield
    finally:
        for m, name, _ in views:
            del parameters_of(m)[name]
        own[_FLAT_PARAMETER] = flat


def gathered_flat(module: nn.Module) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
    """Return the parameters that FSDP1 has gathered now, each with the dictionary of attributes and the name
    under which its module finds it: a view of the flat parameter, which is in the module's dictionary of
    parameters as well."""
    return [(vars(m), name, parameters_of(m)[name]) for m in module.modules() for name in gathered_names(m)]


def gathered_bytes(module: nn.Module) -> int:
    """Return the bytes of the parameters that FSDP1 has gathered now. With ``NO_SHARD``, a rank holds whole
    parameters, and nothing is gathered unless it is cast."""
    found: list[Any] = [t for _, _, t in (*gathered_flat(module), *_gathered_attributes(module))]
    bytes_: int = sum(t.nbytes for t in found if t._base is None or t.untyped_storage().data_ptr()
                      != t._base._local_shard.untyped_storage().data_ptr())
    return bytes_


def flat_gradients(module: nn.Module) -> int:
    """Return the bytes of whole gradients that FSDP1 keeps, because no backward has exchanged them
    (``no_sync``): they are larger than the parameters. Of those that are gathered now, the flat parameter has
    the gradient."""
    own = [*module.parameters()]
    kept = [p.grad for p in own if p.is_leaf and p.grad is not None and p.grad.numel() > p.numel()]
    if kept:
        kept += [t.grad for p in own if not p.is_leaf and (t := p._base) is not None and t.grad is not None]
    return sum({g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in kept}.values())


def ranks_of_flat(model: nn.Module) -> set[int]:
    """Return the ranks that FSDP1 has spread a model's parameters over; all, where there are replicas."""
    flat: list[Any] = [m for m in model.modules() if inside_of_flat(m) is not None]
    return {rank for m in flat for rank in dist.get_process_group_ranks(
        None if "HYBRID" in m.sharding_strategy.name else m.process_group)}


def gathers_all_inside(module: nn.Module) -> bool:
    """Return whether a sharded module is gathered as a whole, with its submodules. One of DeepSpeed's ZeRO
    stage 3 that `deepspeed.utils.set_z3_leaf_modules` has not named gathers its own parameters alone."""
    return not gathered_by_zero(module) or getattr(module, "_z3_leaf", False)


def gathered_by_zero(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that hooks of DeepSpeed's ZeRO stage 3 gather around a module's forward: its own,
    or, if `deepspeed.utils.set_z3_leaf_modules` has named it, those of its submodules as well."""
    if "ds_id" not in vars(module):
        return []
    return [p for p in module.parameters(recurse=getattr(module, "_z3_leaf", False)) if hasattr(p, "ds_id")]


def parts_of_zero(model: nn.Module, *, hooks_outside: bool, later: bool) -> list[nn.Parameter]:
    """Return the parameters that are no more than a part when a model is planned, because DeepSpeed's ZeRO
    stage 3 has spread them over ranks.

    `hooks_outside`: the model's own hooks have gathered theirs. `later`: the model is planned at its first
    call, and `deepspeed.initialize`, which puts hooks into it, may come before.
    """
    if later and not any("ds_id" in vars(m) for m in model.modules()):
        return []
    gathered = {id(p) for p in gathered_by_zero(model)} if hooks_outside else set()
    return [p for p in model.parameters() if hasattr(p, "ds_id") and id(p) not in gathered]


def ranks_of_zero(parameter: nn.Parameter) -> list[int]:
    """Return the ranks that DeepSpeed's ZeRO stage 3 has spread a parameter over; empty for others."""
    group: Any = getattr(parameter, "ds_process_group", None)
    return [] if group is None else dist.get_process_group_ranks(group)


def whole_gradient_type(module: nn.Module) -> torch.dtype | None:
    """Return the type of the whole gradients that a module sharded by `fully_shard` keeps until it exchanges
    them; None for the type of its sharded parameters, or where torch does not tell."""
    find: Any = getattr(module, "_get_fsdp_state", lambda: None)
    policy = getattr(find(), "_mp_policy", None)
    found: torch.dtype | None = getattr(policy, "reduce_dtype", None) or getattr(policy, "param_dtype", None)
    return found


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return what replaces a module's call; None if nothing does."""
    return module._compiled_call_impl


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether `Module.compile` has replaced a module's call."""
    call = compiled_call(module)
    return call is not None and not getattr(call, "is_planned", False)


def original_of(module: Any) -> nn.Module | None:
    """Return the module that torch.compile was given, for the one that it has returned; None for any other
    value. Where `torch._dynamo` is not loaded, which takes seconds, nothing was compiled."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None or not isinstance(module, dynamo.OptimizedModule):
        return None
    original: nn.Module = module._orig_mod
    return original


def replace_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Let `call` replace a module's call, hooks included; None for the module's own."""
    module._compiled_call_impl = call


def own_call(module: nn.Module) -> Callable[..., Any]:
    """Return a module's own call: its forward with its hooks around it."""
    return module._call_impl


def has_call_of_class(module: nn.Module) -> bool:
    """Return whether a module's class has a ``__call__`` of its own, which may change what a call gets. That
    of a graph of torch.fx does not."""
    return type(module).__call__ is not nn.Module.__call__ and not isinstance(module, fx.GraphModule)


def planned_part_of_call(module: nn.Module) -> Callable[..., Any]:
    """Return what a plan of a module's call replaces: the module itself, or, if a plan has been put inside of
    the module (`rkmate.apply`), its call without what a ``__call__`` of its class adds to it."""
    call = compiled_call(module)
    return call if call is not None and getattr(call, "is_planned", False) else module


def apply_to_tensors(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor],
                     recurse: bool = True) -> None:
    """Replace a module's parameters and buffers by what a function makes of them (`Module.to`, say)."""
    module._apply(function, recurse)


def running_data_parallel() -> Any:
    """Return the DistributedDataParallel whose forward is running; None if none is."""
    return torch.nn.parallel.DistributedDataParallel._active_ddp_module


def is_called_equally_often() -> bool:
    """Return whether the DistributedDataParallel whose forward is running reduces gradients as often on all
    ranks: none has left early (``join``)."""
    around = running_data_parallel()
    return around is not None and not around._join_config.enable
