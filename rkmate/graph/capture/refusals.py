"""Models that cannot be captured: refusals before a trace, the meaning of a failed trace for the user, and
workarounds."""

from __future__ import annotations

import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils.rnn import PackedSequence

from rkmate import device as devices
from rkmate.errors import ArgumentError, CaptureError
from rkmate.graph.capture.answers import passes
from rkmate.graph.capture.structure import GIVEN, is_made_of_pieces
from rkmate.graph.ops.properties import ONE_TYPE, READS_HOST
from rkmate.support.warn import PACKAGE, warn
from rkmate.torch_seam.containers import objects_in
from rkmate.torch_seam.dtensor import is_dtensor, is_rebuilt_by_hooks
from rkmate.torch_seam.modules import (
    forward_hooks_of,
    forward_pre_hooks_of,
    has_backward_hooks,
    is_compiled_in_place,
    original_of,
    parts_of_zero,
    running_flat,
)
from rkmate.torch_seam.nodes import VALUE, is_backward
from rkmate.torch_seam.patches.libraries import is_observer, routed_by_loops, weight_made_by
from rkmate.torch_seam.patches.modules import global_backward_hooks, global_forward_hooks

# -- Ways out --------------------------------------------------------------------------------------
#
# What a user can change where a value stops a trace: a switch of the module's library, or another form.
#
# One table. Each way out is looked for in the module and in the line that the trace has stopped at.


_DRAWN = re.compile(r"rand|bernoulli|layer_?drop|drop_?path|dropout_probability|skip_the_layer")
"""Words in lines that branch on a drawn number."""
_DROPS = re.compile(r"layer_?drop$")
_FUSED = "FusedMovingAvgObsFakeQuantize"


OWN_GENERATOR = ("draws from a torch.Generator of its own, whose state a plan cannot keep: draw from the "
                 "default generator (torch.manual_seed seeds it), or draw outside of the forward and pass "
                 "the tensor (numbers that are the same in each step: once, into a buffer)")
"""Said of a model, after its name."""


def way_out(model: nn.Module, place: str, text: str) -> str:
    """Return a sentence that names what to change, with a blank before it.

    `place`: where the trace has stopped, with the source line. `text`: of the error.
    """
    return next((f" {found}" for rule in RULES if (found := rule(model, place, text))), "")


def _own_generator(model: nn.Module, place: str, text: str) -> str:
    if "torch._C.Generator" in text and has_generator(model):
        return f"It {OWN_GENERATOR}."
    return ""


def _layers_dropped(model: nn.Module, place: str, text: str) -> str:
    if not _DRAWN.search(place):
        return ""
    names: dict[str, None] = {}
    for path, module in model.named_modules():
        # Some modules keep a copy of what their configuration says, others read it in each forward.
        holder = next((h for h in (vars(module), vars(module).get("config")) if _dropping(h)), None)
        where = [path] * bool(path) + ["config"] * (holder is not vars(module))
        names |= {".".join([*where, name]): None for name in _dropping(holder)}
    if names:
        return (f"Layers are left out at random: set {' and '.join(f'{n} = 0' for n in list(names)[:3])} on "
                "the module, and a plan can be made.")
    return ("A random number decides: multiply by a drawn mask instead of a branch, or set its probability "
            "to 0, and a plan can be made.")


def _dropping(holder: object) -> list[str]:
    """Return names of the probabilities above 0 with which an object leaves layers out."""
    values = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
    return [k for k, v in values.items() if _DROPS.search(k) and isinstance(v, (int, float)) and v > 0]


def _fake_quantized(model: nn.Module, place: str, text: str) -> str:
    found = [path or "the module" for path, m in model.named_modules()
             if type(m).__name__ == "FakeQuantize" and type(m).__module__.startswith(("torch.ao", "torchao"))]
    if not found:
        return ""
    return (f"{found[0]} is a FakeQuantize, which reads its switches from buffers in each forward, after "
            f"disable_observer, too: {_FUSED} (what get_default_qat_qconfig gives) reads them in its kernel, "
            "and is planned; or run without it (nn.Identity) while its ranges do not count.")


def _spectrum_masked(model: nn.Module, place: str, text: str) -> str:
    config = getattr(model, "config", None)
    masked = getattr(config, "apply_spec_augment", False) and (
        getattr(config, "mask_time_prob", 0) > 0 or getattr(config, "mask_feature_prob", 0) > 0)
    if not masked or "nonzero" not in text:
        return ""
    return "Spans are masked at random: set config.apply_spec_augment = False, and a plan can be made."


def _numpy(model: nn.Module, place: str, text: str) -> str:
    if ".numpy()" not in text:
        return ""
    return "The forward hands a tensor to numpy, which a plan cannot repeat: compute it with torch."


def _asserted(model: nn.Module, place: str, text: str) -> str:
    found = re.match(r" at (.+?):(\d+): ", place)
    if not found or passes(found[1], int(found[2])) is None:
        return ""
    return ("A check reads a number: compare the tensor itself (assert (x >= 0).all()), which a plan checks "
            "after its forward, or leave the check out (python -O leaves assertions out).")


def _residuals(model: nn.Module, place: str, text: str) -> str:
    if "linalg_lstsq" not in text:
        return ""
    return ("The number of residuals that torch.linalg.lstsq returns depends on the rank of the matrix. For "
            "a matrix A of full rank, write: q, r = torch.linalg.qr(A); torch.linalg.solve_triangular(r, "
            "q.mT @ B, upper=True).")


def _nested(model: nn.Module, place: str, text: str) -> str:
    if not re.search(r"torch\.nested|nested_tensor|NotImplemented to Tensor", place + text):
        return ""
    return ("The forward makes a nested tensor, and only dense tensors can be planned: pad instead "
            "(torch.nn.utils.rnn.pad_sequence), and weigh the padding with zeros.")


def _number_read(model: nn.Module, place: str, text: str) -> str:
    if "FakeTensor.__format__" in text:
        return ("The forward writes the value of a tensor into a text: return or keep the number "
                "(tensor.item()), and write the text outside of the forward.")
    if not re.search(r"keeps a number|computes with a number", text) and not (
            "no static plan exists" in text and re.search(r"\b(float|int|bool|complex)\(", place)):
        return ""
    return ("If the forward only returns or keeps the number, read it by tensor.item() or tensor.tolist(), "
            "not by float() or int(), and compute with it outside, or with the tensor before: a plan reads "
            "it when its forward is over. If the number decides something: torch.where for a branch, a mask "
            "or padding for a size.")


def _value_decides(model: nn.Module, place: str, text: str) -> str:
    if "no static plan exists" not in text:
        return ""
    return ("Or write it without the value: torch.where for a branch, a mask or padding for a size; or "
            "decide outside, and pass what was decided as a plain argument.")


RULES: tuple[Callable[[nn.Module, str, str], str], ...] = (
    _own_generator, _layers_dropped, _fake_quantized, _spectrum_masked, _numpy, _asserted, _residuals,
    _nested, _number_read, _value_decides)
"""Explanations, in the order in which they are tried; the first that applies is used."""


# -- Before a trace, and after one that failed -----------------------------------------------------
#
# Models that have no static training step: what is refused before a trace, and what a failed trace means for
# the user.


_TORCH = str(Path(torch.__file__).parent) + os.sep
_HERE = str(PACKAGE) + os.sep
_WRAPPERS = ("contextlib.py", "typing_extensions.py", "warnings.py")
"""Files of wrappers around a user's code, or around functions of torch that are deprecated."""
_RECURRENT = str(Path(torch.nn.modules.rnn.__file__))


_OF_HOOKS = ("their computations are part of the plan, with the tensors that they put into attributes, lists "
             "and dictionaries; other effects happen only while the model is traced")


def _places_tensors(hook: Any) -> bool:
    """Return whether a hook is one of `parallelize_module`: it only places tensors on ranks."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.tensor")


def refuse_what_cannot_repeat(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *,
                              hooks_outside: bool = False) -> None:
    """Raise for what a trace would silently lose. `hooks_outside`: those of the module itself are no part of
    the trace, only its forward is."""
    refuse_parallelism(model, hooks_outside=hooks_outside)
    refuse_without_shape(model)
    if global_backward_hooks():
        raise CaptureError("there are backward hooks around every module "
                           "(register_module_full_backward_hook), which a planned step cannot run: "
                           "remove them, or hook the parameters or the module's outputs")
    if global_forward_hooks():
        warn(f"there are forward hooks around every module (register_module_forward_hook): {_OF_HOOKS}")
    _refuse_modules(model, hooks_outside)
    _refuse_arguments(model, args, kwargs)
    _refuse_tensors(model)


def _refuse_modules(model: nn.Module, hooks_outside: bool) -> None:
    """Raise for submodules whose calls are more than what a trace sees, and tell of those that are less."""
    hooked: list[str] = []
    compiled: list[str] = []
    for name, m in model.named_modules():
        if hooks_outside and m is model:
            continue
        where = f"{type(model).__name__}{'.' + name if name else ''}"
        if has_backward_hooks(m):
            raise CaptureError(f"{where} has module backward hooks, which a planned step cannot run: "
                               "remove them, or hook the parameters or the module's outputs")
        if not all(weight_made_by(h) is not None or is_observer(h) or _places_tensors(h)
                   for h in (*forward_hooks_of(m).values(), *forward_pre_hooks_of(m).values())):
            hooked.append(where)
        if type(m).__name__ == _FUSED and m.is_per_channel and not m.activation_post_process.min_val.numel():
            raise CaptureError(f"{where} is a {_FUSED} that makes a scale for each channel in its first "
                               "call, which a captured step would not repeat: call the model once before it "
                               "is wrapped")
        if isinstance(m, torch.jit.ScriptModule):
            raise CaptureError(f"{where} is a TorchScript module, which cannot be captured: use the module "
                               "that it was made from instead")
        if original_of(m) is not None or is_compiled_in_place(m):
            compiled.append(where)
    if compiled:
        tell_of_compiled(compiled)
    if hooked:
        warn(f"{_listed(hooked)} {'have' if hooked[1:] else 'has'} forward hooks: {_OF_HOOKS}")


def _refuse_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise for arguments that no plan can hold."""
    for given in (*args, *kwargs.values()):
        if isinstance(given, nn.Module) and not {*given.parameters()} <= {*model.parameters()}:
            raise CaptureError(f"an argument is a module ({type(given).__name__}), whose parameters are not "
                               f"those of {type(model).__name__}: make it a submodule, or call it outside")
    for value in objects_in((args, kwargs)):
        if is_dtensor(value):
            _refuse_uneven(model, value)
        if isinstance(value, torch.Tensor):
            devices.of(value)
        if isinstance(value, torch.Tensor) and (value.layout is not torch.strided or value.is_nested):
            raise CaptureError("an input tensor is nested; only dense tensors can be planned: pad it "
                               "(torch.nested.to_padded_tensor)" if value.is_nested else
                               f"an input tensor has the layout {value.layout}; only dense tensors "
                               "can be planned")
        if isinstance(value, torch.Generator):
            raise CaptureError("a torch.Generator among the arguments cannot be captured: seed the "
                               "default generator (torch.manual_seed), or draw outside and pass the "
                               "tensor")


def _refuse_tensors(model: nn.Module) -> None:
    """Raise for parameters and buffers that no plan can hold."""
    for tensor_name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ArgumentError(f"{tensor_name} is on the meta device: give the model memory first "
                                "(model.to_empty), or plan for a GPU that this machine need not have "
                                "(rkmate.plan(..., device=rkmate.devices.H100))")
        devices.of(tensor)
        if is_made_of_pieces(tensor) and tensor.requires_grad and not is_dtensor(tensor):
            raise ArgumentError(
                f"{tensor_name} is a {type(tensor).__name__} that requires a gradient: weights that are made "
                "of other tensors are planned where they are frozen (requires_grad_(False)), as a quantized "
                "base under adapters is")
        if tensor.layout is not torch.strided:
            raise CaptureError(f"{tensor_name} has the layout {tensor.layout}; only dense tensors "
                               "can be planned")


def refuse_without_shape(model: nn.Module) -> None:
    """Raise `ArgumentError` for a lazy module that has not been called yet."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise ArgumentError(f"{name} has no shape yet (a lazy module): run the model once before it is "
                                "wrapped")


def tell_of_compiled(names: Sequence[str]) -> None:
    """Warn of modules that were compiled, and follow a plan now."""
    warn(f"{_listed(names)} {'were' if names[1:] else 'was'} compiled "
         "(Module.compile or torch.compile): planned steps run the operations of the original instead of "
         "the compiled ones. compile=True compiles groups of operations inside of a plan")


def uncompiled(model: Any) -> Any:
    """Return the module that torch.compile was given, with a warning, for the one that it has returned; any
    other value as it is."""
    original = original_of(model)
    if original is not None:
        tell_of_compiled([type(original).__name__])
    return model if original is None else original


def _listed(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    others = f" and {len(names) - 3} others" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{others}"


def has_generator(model: nn.Module) -> bool:
    """Return whether some submodule keeps a generator of its own."""
    return any(isinstance(v, torch.Generator) for m in model.modules() for v in vars(m).values())


def is_data_dependent(error: Exception) -> bool:
    """Return whether a trace has failed because a tensor's value decides how it goes on."""
    text = str(error)
    return any(sign in text for sign in (
        "data-dependent", "Could not guard", "_local_scalar_dense", "Could not extract specialized",
        "data dependent", "DataDependent", "only concrete integers", "unbacked symbol")
    ) or type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException")


def explained(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
              error: Exception, program: nn.Module | None = None) -> Exception:
    """Return the error for a failed trace: it names the operation and the line of the model's source.

    `program`: what was exported, where that went well; it knows the lines that read a value.
    """
    try:
        inspect.signature(model.forward).bind(*args, **{k: v for k, v in kwargs.items() if k != GIVEN})
    except TypeError as mismatch:
        return ArgumentError(f"the sample inputs do not fit {type(model).__name__}.forward: {mismatch}")
    text = str(error).strip()
    reason = text.split("\n")[0] or type(error).__name__
    place = place_of(error, program)
    data_dependent = is_data_dependent(error)
    packed = any(isinstance(v, PackedSequence) for v in (*args, *kwargs.values()))
    if (data_dependent and packed) or (
            isinstance(error, TypeError) and "FakeTensor" in text and _through(error, _RECURRENT)):
        reason = "the lengths of a packed sequence are values of a tensor, and decide its shapes"
        hint = (": pad instead, and read the output at the lengths (gather); rkmate.dtr runs such "
                "models as they are")
    elif data_dependent:
        hint = (" A value of a tensor decides what the forward does (a branch, an index or a size), "
                f"so no static plan exists: {_static_form(model, error, place)}{_opaque(model, place)}"
                "rkmate.dtr runs such models.")
    elif "fake tensor in the exported program constant" in text:
        reason = "the forward makes a tensor in a way that a trace cannot follow"
        hint = ": use no .grad of a tensor, and compute in the thread of the caller"
    else:
        hint = "" if isinstance(error, CaptureError) else f" ({type(error).__name__})"
    found, way = f"{reason}{hint}", way_out(model, place, f"{text} {hint}")
    if not way and hint.startswith(" ("):
        way = " If the model also fails without rkmate, correct its inputs first."
    stop = "." if way and not found.endswith(".") else ""
    return CaptureError(f"{type(model).__name__} cannot be captured{place}: {found}{stop}{way}")


def name_line(model: nn.Module, error: CaptureError) -> None:
    """Add the line of the model's source to the message of an error that a traced forward has raised, unless
    it names one."""
    place = place_of(error, None) or place_in(getattr(error, "stack", ""))
    if place and not re.search(r"\.py:\d", str(error)):
        name = type(model).__name__
        reason = str(error).removeprefix(f"{name}: ")
        error.args = f"{name} cannot be captured{place}: {reason}", *error.args[1:]


def refuse_sparse(model: nn.Module, graph: fx.Graph) -> None:
    """Raise for a traced forward that computes with tensors of another layout than the dense one."""
    for node in graph.nodes:
        value = node.meta.get(VALUE)
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided and not is_backward(node):
            raise CaptureError(f"{type(model).__name__}: the forward makes a tensor with the layout "
                               f"{value.layout} ({node.target}), which a plan cannot hold: compute with "
                               "dense tensors, or with indices (index_add, scatter)")


def refuse_mixed_types(model: nn.Module, graph: fx.Graph) -> None:
    """Raise for a traced forward whose products, sums and the like get operands of several types: a trace
    runs no kernel, and only a kernel asks for one type."""
    for node in graph.nodes:
        if node.target not in ONE_TYPE or is_backward(node):
            continue
        operands = [node.args[k] for k in ONE_TYPE[node.target] if k < len(node.args)]
        types = dict.fromkeys(str(v.dtype).removeprefix("torch.") for n in operands if isinstance(n, fx.Node)
                              and isinstance(v := n.meta.get(VALUE), torch.Tensor))
        if len(types) > 1:
            place = place_in(node.stack_trace or "")
            raise CaptureError(
                f"{type(model).__name__} does not run on the sample inputs{place}: {node.target} gets "
                f"tensors of the types {' and '.join(types)}, and needs one. Correct the inputs, or the "
                "dtypes of the model, or use torch.autocast")


def _static_form(model: nn.Module, error: Exception, place: str) -> str:
    """Return what to do about a value that decides, if the library has a flag or a form is known."""
    if routed := routed_by_loops(model):
        return f'{routed}.set_experts_implementation("grouped_mm") routes without it; else, '
    if "_ctc_loss" in str(error) or (type(model).__name__.endswith("CTC") and not _DRAWN.search(place)):
        return ("a CTC loss reads its lengths. Let the model return its logits (call it without labels), and "
                "compute the loss from them ('Speech' in docs/recipes.md); else, ")
    if "self_loops" in "".join(traceback.format_exception(error)):      # PyTorch Geometric
        return ("self-loops are searched for. Add them to the data once (AddRemainingSelfLoops), and build "
                "the layer with add_self_loops=False ('Graphs' in docs/recipes.md); else, ")
    if "nonzero" in str(error) or "(Size-like symbols: u" in str(error):
        return ("the number of elements that a mask or nonzero() picks is such a value. Compute all rows and "
                "weigh with zeros those that are not picked ('Routing' in docs/recipes.md); else, ")
    return ""


def _opaque(model: nn.Module, place: str) -> str:
    """Return the setting, where the line stands in the forward of a submodule."""
    found = re.match(r" at (.+?):(\d+): ", place)
    for module in model.modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if found and code and module is not model and type(module) is not type(model) and \
                code.co_filename == found[1] and int(found[2]) in {line for *_, line in code.co_lines()}:
            return 'rkmate.Settings(opaque="auto") runs such a submodule as it is, inside of the plan; '
    return ""


def place_of(error: Exception, program: nn.Module | None) -> str:
    """Return the innermost line of the user's source that took part."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _users(f.filename)]
    if frames:
        return f" at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}"
    # Errors of a replayed graph carry the trace of the original run as text.
    reads = [] if not isinstance(program, fx.GraphModule) else [
        n.stack_trace or "" for n in program.graph.nodes if n.target in READS_HOST]
    return place_in("\n".join([*reads, str(error)]))


def place_in(text: str) -> str:
    """Return the innermost line of the user's source in the text of a stack."""
    lines = re.findall(r'File "([^"]+)", line (\d+), in \S+\n\s*(.*)', text)
    mine = [m for m in lines if _users(m[0])]
    if mine:
        return f" at {mine[-1][0]}:{mine[-1][1]}: {mine[-1][2].strip()}"
    return ""


def at_fault(model: nn.Module, error: BaseException) -> str:
    """Return the innermost submodule whose code took part in an error, or in its cause; empty where none
    did."""
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
    """Return whether an error came through a file, or a folder of files."""
    return any(f.filename.startswith(place) for f in traceback.extract_tb(error.__traceback__))


def _users(filename: str) -> bool:
    return not filename.startswith(("<", _TORCH, _HERE)) and Path(filename).name not in _WRAPPERS


# -- Models that are parallel already --------------------------------------------------------------
#
# Wrappers that exchange gradients or gather parameters, and parameters that are spread over ranks: what each
# of them needs instead of a plan of the whole.


_BY_LAYERS = "shard with fully_shard (FSDP2), whose layers rkmate.apply(model, budget=...) plans"
_FLAT = ("FullyShardedDataParallel (FSDP1), whose parameters are whole only while it runs. Use "
         "rkmate.apply(model, budget=...) without sample inputs, which plans the model at its first step, by "
         "layers if each has an FSDP of its own (auto_wrap_policy=ModuleWrapPolicy({Block})); or "
         f"{_BY_LAYERS}")


def refuse_parallelism(model: nn.Module, *, hooks_outside: bool = False, later: bool = False) -> None:
    """Raise `ArgumentError` for a model that was made parallel by others, with what to do instead.

    `hooks_outside`: the module's own hooks run around the trace: if it is sharded, they have gathered its
    parameters. `later`: it is planned at its first call, before which `deepspeed.initialize` may still come.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    layers: set[int] = set()
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ArgumentError("the model is a DistributedDataParallel, which prepares the exchange of "
                            "gradients around each forward: apply a budget to the module inside of it "
                            "(rkmate.apply(ddp.module, budget=...)), or wrap that module first "
                            "(DistributedDataParallel(rkmate.wrap(module, ...)))")
    if is_rebuilt_by_hooks(model):
        raise ArgumentError(
            f"{type(model).__name__} is tensor-parallel inside of DistributedDataParallel(device_mesh=...), "
            "whose hooks make DTensors of its parameters in each forward, which no plan can hold. Replicate "
            "with fully_shard instead (fully_shard(layer, mesh=mesh[\"replicas\", \"shards\"]), where "
            "\"shards\" may have one rank), and use rkmate.apply(model, budget=...), which plans each layer")
    for name, m in model.named_modules() if fsdp is not None else ():
        if isinstance(m, fsdp.FullyShardedDataParallel):
            raise ArgumentError(f"{name or 'the model'} is a {_FLAT}")
        if isinstance(m, fsdp.FSDPModule) and not (m is model and hooks_outside):
            layers.update(map(id, m.parameters()))
    parts = set(map(id, parts_of_zero(model, hooks_outside=hooks_outside, later=later)))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) in parts:
            raise ArgumentError(
                f"{name} is sharded by DeepSpeed's ZeRO stage 3, and exists as a whole only while its layer "
                "runs. Name the classes of the layers before deepspeed.initialize "
                "(deepspeed.utils.set_z3_leaf_modules(model, [Block]), or \"leaf_module\" in the "
                "configuration's \"zero_optimization\"), and use rkmate.apply(model, budget=...) without "
                "sample inputs, which plans each of them at the first step")
        if not is_dtensor(tensor):
            continue
        if id(tensor) in layers:
            raise ArgumentError(
                f"{name} is a DTensor that fully_shard has sharded, and exists as a whole only while its "
                "layer runs. Use rkmate.apply(model, budget=...) without sample inputs, which plans each "
                "sharded layer at the first step; or wrap the model first, and shard the wrapped module as "
                "one unit (fully_shard(rkmate.wrap(...)))")
        if not isinstance(tensor, nn.Parameter):
            raise ArgumentError(f"{name} is a buffer that is a DTensor, which no plan can hold: only "
                                "parameters may be DTensors")


def refuse_flat_parameters(model: nn.Module) -> None:
    """Raise `ArgumentError` inside of the forward of a FullyShardedDataParallel (FSDP1)."""
    if running_flat() is not None:
        raise ArgumentError(f"{type(model).__name__} runs inside of a {_FLAT}")


def _refuse_uneven(model: nn.Module, value: Any) -> None:
    """Raise `ArgumentError` for an input that is a DTensor, unless the model computes with DTensors, and all
    ranks have parts of one size."""
    if not any(map(is_dtensor, model.parameters())):
        raise ArgumentError(f"an input tensor is a DTensor, and {type(model).__name__} has no parameters "
                            "that are: give it the local part (to_local)")
    for dim, placement in enumerate(value.placements):
        if placement.is_shard() and value.shape[placement.dim] % value.device_mesh.size(dim):
            raise ArgumentError(f"an input tensor is a DTensor of {tuple(value.shape)}, of which ranks have "
                                f"parts of different sizes ({placement}): pad it")
