"""Models that have no static training step: what is refused before a trace, and what a failed
trace means for the user.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from rkmate import device as devices
from rkmate.errors import ArgumentError, CaptureError
from rkmate.graph.capture.pieces import is_made_of_pieces
from rkmate.graph.capture.switches import way_out
from rkmate.support.warn import PACKAGE, warn
from rkmate.torch_seam.containers import objects_in
from rkmate.torch_seam.modules import (
    compiled_call,
    forward_hooks_of,
    forward_pre_hooks_of,
    has_backward_hooks,
)
from rkmate.torch_seam.patches.libraries import is_observer, routed_by_loops, weight_made_by
from rkmate.torch_seam.patches.modules import global_backward_hooks, global_forward_hooks

_TORCH = str(Path(torch.__file__).parent) + os.sep
_READS = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)
_HERE = str(PACKAGE) + os.sep
_DEPRECATING = ("typing_extensions.py", "warnings.py")
"""Wrappers around functions of torch that are deprecated."""
_DISTRIBUTIONS = str(Path(torch.distributions.__file__).parent)
_RECURRENT = str(Path(torch.nn.modules.rnn.__file__))


def refuse_what_cannot_repeat(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *,
                              hooks_outside: bool = False) -> None:
    """Raise for what a trace would silently lose. `hooks_outside`: those of the module itself are no part of
    the trace, only its forward is."""
    if global_backward_hooks():
        raise CaptureError("there are backward hooks around every module "
                           "(register_module_full_backward_hook), which a planned step cannot run: "
                           "remove them, or hook the parameters or the module's outputs")
    if global_forward_hooks():
        warn("there are forward hooks around every module (register_module_forward_hook): what they compute "
             "is part of the plan, what else they do happens only while it is traced")
    for name, m in model.named_modules():
        if hooks_outside and m is model:
            continue
        where = f"{type(model).__name__}{'.' + name if name else ''}"
        if has_backward_hooks(m):
            raise CaptureError(f"{where} has module backward hooks, which a planned step cannot run: "
                               "remove them, or hook the parameters or the module's outputs")
        hooks = [h for h in (*forward_hooks_of(m).values(), *forward_pre_hooks_of(m).values())
                 if weight_made_by(h) is None and not is_observer(h)]
        if hooks:
            warn(f"{where} has forward hooks: what they compute is part of the plan, what "
                 "else they do happens only while it is traced")
        if isinstance(m, torch.jit.ScriptModule):
            raise ArgumentError(f"{where} is a TorchScript module, which cannot be captured: put the module "
                                "that it was made from in its place")
        if _is_compiled(m):
            raise ArgumentError(f"{where} was compiled (torch.compile): wrap the model itself, or compile "
                                'it with backend="rkmate"')
    for value in objects_in((args, kwargs)):
        if isinstance(value, torch.Tensor):
            devices.of(value)
        if isinstance(value, torch.Tensor) and (value.layout is not torch.strided or value.is_nested):
            raise ArgumentError("an input tensor is nested; only dense tensors can be planned: pad it "
                                "(torch.nested.to_padded_tensor)" if value.is_nested else
                                f"an input tensor has the layout {value.layout}; only dense tensors "
                                "can be planned")
        if isinstance(value, torch.Generator):
            raise ArgumentError("a torch.Generator among the arguments cannot be captured: seed the "
                                "default generator (torch.manual_seed), or draw outside and pass the "
                                "tensor")
    for tensor_name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise ArgumentError(f"{tensor_name} has no shape yet (a lazy module): run the model once "
                                "before wrapping it")
        if tensor.is_meta:
            raise ArgumentError(f"{tensor_name} is on the meta device: give the model memory first "
                                "(model.to_empty)")
        devices.of(tensor)
        if type(tensor).__name__ == "DTensor":
            raise ArgumentError(
                f"{tensor_name} is a DTensor: a sharded model cannot be captured. Wrap the model "
                "first, and shard the wrapped module (fully_shard(rkmate.wrap(...)))")
        if is_made_of_pieces(tensor) and tensor.requires_grad:
            raise ArgumentError(
                f"{tensor_name} is a {type(tensor).__name__} that requires a gradient: weights that are made "
                "of other tensors are planned where they are frozen (requires_grad_(False)), as a quantized "
                "base under adapters is")
        if tensor.layout is not torch.strided:
            raise ArgumentError(f"{tensor_name} has the layout {tensor.layout}; only dense tensors "
                                "can be planned")


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile made it. Where `torch._dynamo` is not loaded, which takes seconds, nothing
    was compiled."""
    dynamo = sys.modules.get("torch._dynamo")
    call = compiled_call(module)
    return (call is not None and not getattr(call, "is_planned", False)) or (
        dynamo is not None and isinstance(module, dynamo.OptimizedModule))


def has_generator(model: nn.Module) -> bool:
    """Whether some submodule keeps a generator of its own."""
    return any(isinstance(v, torch.Generator) for m in model.modules() for v in vars(m).values())


def is_data_dependent(error: Exception) -> bool:
    """Whether a trace has failed because a tensor's value decides how it goes on."""
    text = str(error)
    return any(sign in text for sign in (
        "data-dependent", "Could not guard", "_local_scalar_dense", "Could not extract specialized",
        "data dependent", "DataDependent")) or type(error).__name__ in (
        "DataDependentOutputException", "DynamicOutputShapeException")


def explained(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
              error: Exception, program: nn.Module | None = None) -> Exception:
    """The error for a failed trace: it names the operation and the line of the model's source.

    `program`: what was exported, where that went well; it knows the lines that read a value.
    """
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as mismatch:
        return ArgumentError(f"the sample inputs do not fit {type(model).__name__}.forward: {mismatch}")
    text = str(error).strip()
    reason = text.split("\n")[0] or type(error).__name__
    place = place_of(error, program)
    data_dependent = is_data_dependent(error)
    if data_dependent and _through(error, _DISTRIBUTIONS):
        reason = "a distribution with validate_args=True checks its arguments' values, which a trace has not"
        hint = ": leave that out (what it checks by default is left out of a plan)"
    elif isinstance(error, TypeError) and "FakeTensor" in text and _through(error, _RECURRENT):
        reason = "the lengths of a packed sequence are values of a tensor, and decide its shapes"
        hint = (": pad instead, and read the output at the lengths (gather); rkmate.dtr runs such "
                "models as they are")
    elif data_dependent:
        hint = (" A value of a tensor decides what the forward does (a branch, an index or a size), "
                f"so no static plan exists: {_static_form(model, error)}{_opaque(model, place)}"
                "rkmate.dtr runs such models.")
    elif "fake tensor in the exported program constant" in text:
        reason = "the forward reads .data or .grad of a tensor, which a trace cannot follow"
        hint = ": use .detach()"
    else:
        hint = "" if isinstance(error, CaptureError) else f" ({type(error).__name__})"
    return CaptureError(f"{type(model).__name__} cannot be captured{place}: {reason}{hint}"
                        f"{way_out(model, place, f'{text} {hint}')}")


def _static_form(model: nn.Module, error: Exception) -> str:
    """What to do about a value that decides, where the library has a flag or there is a known form."""
    if routed := routed_by_loops(model):
        return f'{routed}.set_experts_implementation("grouped_mm") routes without it; else, '
    if "_ctc_loss" in str(error) or hasattr(getattr(model, "config", None), "ctc_loss_reduction"):
        return ("a CTC loss reads its lengths. Let the model return its logits (call it without labels), and "
                "compute the loss from them ('Speech' in docs/recipes.md); else, ")
    if any(getattr(m, "add_self_loops", False) is True for m in model.modules()):     # PyTorch Geometric
        return ("self-loops are searched for. Add them to the data once (AddRemainingSelfLoops), and build "
                "the layer with add_self_loops=False ('Graphs' in docs/recipes.md); else, ")
    if "nonzero" in str(error) or "(Size-like symbols: u" in str(error):
        return ("the number of elements that a mask or nonzero() picks is such a value. Compute all rows and "
                "weigh with zeros those that are not picked ('Routing' in docs/recipes.md); else, ")
    return ""


def _opaque(model: nn.Module, place: str) -> str:
    """The setting, where the line stands in the forward of a submodule."""
    found = re.match(r" at (.+?):(\d+): ", place)
    for module in model.modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if found and code and module is not model and type(module) is not type(model) and \
                code.co_filename == found[1] and int(found[2]) in {line for *_, line in code.co_lines()}:
            return 'rkmate.Settings(opaque="auto") runs such a submodule as it is, inside of the plan; '
    return ""


def place_of(error: Exception, program: nn.Module | None) -> str:
    """The innermost line of the user's source that took part."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _users(f.filename)]
    if frames:
        return f" at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}"
    # Errors of a replayed graph carry the trace of the original run as text.
    reads = [] if not isinstance(program, fx.GraphModule) else [
        n.stack_trace or "" for n in program.graph.nodes if n.target in _READS]
    lines = re.findall(r'File "([^"]+)", line (\d+), in \S+\n\s*(.*)', "\n".join([*reads, str(error)]))
    mine = [m for m in lines if _users(m[0])]
    if mine:
        return f" at {mine[-1][0]}:{mine[-1][1]}: {mine[-1][2].strip()}"
    return ""


def at_fault(model: nn.Module, error: BaseException) -> str:
    """The innermost submodule whose code took part in an error, or in its cause; empty where none did."""
    names = {id(m): n for n, m in model.named_modules()}
    found = ""
    causes: BaseException | None = error
    while causes is not None:
        trace = causes.__traceback__
        while trace is not None:
            name = names.get(id(trace.tb_frame.f_locals.get("self")))
            found = name or found
            trace = trace.tb_next
        causes = causes.__cause__ or (None if causes.__suppress_context__ else causes.__context__)
    return found


def _through(error: Exception, place: str) -> bool:
    """Whether an error came through a file, or a folder of files."""
    return any(f.filename.startswith(place) for f in traceback.extract_tb(error.__traceback__))


def _users(filename: str) -> bool:
    return not filename.startswith(("<", _TORCH, _HERE)) and Path(filename).name not in _DEPRECATING
