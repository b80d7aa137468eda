"""Passes of a capture, which make a trace compute what eager mode computes, in the order of their work.

A pass is a value: its row gives the function and the reason.
There are two types: a `Patch` is a context around a stage of the capture, and a `Rewrite` changes a graph.
The rewrites of the joint graph that is planned are in `graph.passes.table`. The rows that a capture needs are
here, because a folder imports only from folders below it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import fx, nn

from rkmate.graph.capture.collectives import collectives_refused, refuse_in_joint
from rkmate.graph.capture.opaque import opaque_parts
from rkmate.graph.capture.values import values_of_inputs
from rkmate.torch_seam.patches import features
from rkmate.torch_seam.patches.attention import attention_of_the_device
from rkmate.torch_seam.patches.autograd import (
    backward_without_autocast,
    casts_kept_in_regions,
    closed_over_as_buffers,
    inference_without_gradients,
    leaves_noted,
    lost_tensors_refused,
    regions_entered_in_place,
    regions_left_after_errors,
    regions_marked,
    tag_what_needs_the_loss,
)
from rkmate.torch_seam.patches.cudnn_batch_norm import batch_norms_as_eager_chooses
from rkmate.torch_seam.patches.custom_functions import kept_whole, run_as_they_are
from rkmate.torch_seam.patches.custom_operators import writes_as_values
from rkmate.torch_seam.patches.layouts import as_kernels_return_them
from rkmate.torch_seam.patches.libraries import (
    adapters_hooked_once,
    masks_as_in_eager_mode,
    sources_as_in_eager_mode,
    without_value_checks,
)
from rkmate.torch_seam.patches.modules import (
    attributes_carried,
    calls_uncompiled,
    cumulative_averages_as_tensors,
    frozen_parameters_plain,
    hooks_of_the_model_alone,
    new_buffers_as_writes,
    standing_modules_stay,
)
from rkmate.torch_seam.patches.numerics import (
    as_eager_computes,
    checks_by_value_refused,
    conjugates_of_numbers,
    integers_without_gradient,
    one_hot_of_positions,
    seeds_refused,
    zeros_with_memory,
)
from rkmate.torch_seam.patches.recurrent import (
    as_eager_runs_them,
    gates_as_eager_computes,
    layers_as_one,
    make_recurrent_layers_whole,
    types_of_fused_layers,
)
from rkmate.torch_seam.versions import is_off

Around = Literal["trace", "forward", "export"]
G = TypeVar("G")
T = TypeVar("T")


@dataclass(frozen=True)
class Pass:
    """A row of a table of passes: the fields that all rows have."""

    name: str
    """Subject in a few words; no two passes have the same name."""
    why: str
    """Reason: the result that would be wrong, slower or larger without it, in a sentence or two."""
    run: Callable[..., Any]
    """The function that does the work."""
    feature: str = ""
    """The feature of the seam (`features`) that it needs; without it, the pass is left out. Empty: none."""

    @property
    def place(self) -> str:
        """The file of its function, as a path inside the package."""
        return self.run.__module__.removeprefix("rkmate.").replace(".", "/") + ".py"


@dataclass(frozen=True)
class Patch(Pass):
    """A context around a stage of the capture."""

    run: Callable[[nn.Module], AbstractContextManager[Any] | None]
    """Returns the context for a model; None if the model needs none."""
    around: Around = field(default="trace", kw_only=True)
    """The stage: ``"trace"``, the whole capture of a model; ``"forward"``, the model's own forward while it
    is traced; ``"export"``, its export."""
    may_fail: bool = field(default=False, kw_only=True)
    """Whether an export that fails is tried again without it."""
    direct: bool = field(default=False, kw_only=True)
    """Whether a patch around an export is also around the joint trace of a model that is not exported."""


@dataclass(frozen=True)
class Rewrite(Pass, Generic[G]):
    """A change of a graph: an exported program, a traced graph, or the joint graph that is planned."""

    run: Callable[[G], None]
    """Changes the graph."""
    when: tuple[str, ...] = field(default=(), kw_only=True)
    """Choices of the graph (`Joint.choices`) without which it is left out."""
    unless: tuple[str, ...] = field(default=(), kw_only=True)
    """Choices with which the repair is left out."""

    def applies(self, choices: frozenset[str]) -> bool:
        """Return whether the repair works on a graph with these choices."""
        return choices.issuperset(self.when) and choices.isdisjoint(self.unless)


def _of_any_model(context: Callable[[], AbstractContextManager[Any]]) -> \
        Callable[[nn.Module], AbstractContextManager[Any]]:
    @functools.wraps(context)
    def run(model: nn.Module) -> AbstractContextManager[Any]:
        return context()
    return run


PATCHES = (
    Patch("autocast and the backward",
          "A trace uses the forward's autocast state for the backward, too, and casts the gradients of "
          "operations that the forward computes in float32 (attention with dropout). Eager mode calls the "
          "backward after the autocast region.",
          _of_any_model(backward_without_autocast), feature=features.AUTOCAST),
    Patch("casts of weights under autocast",
          "A trace casts a weight at each of its uses. Eager mode casts it once in an autocast region, keeps "
          "that one cast, and adds up its gradients in the region's type.",
          _of_any_model(casts_kept_in_regions), feature=features.CASTS),
    Patch("inference mode",
          "A trace does not see that a part of the forward runs in `torch.inference_mode`, and would send "
          "gradients through it. The part becomes one without gradients.",
          _of_any_model(inference_without_gradients)),
    Patch("cumulative batch norms",
          "With `momentum=None`, a batch norm reads its number of batches from a buffer, which no static "
          "graph can do. The factor stays a tensor.",
          cumulative_averages_as_tensors, feature=features.AVERAGES),
    Patch("eager kernels",
          "While it traces, torch decomposes some operations (resampling, shrinking, margin losses, "
          "dropout), which round differently from their kernels. Gradients of products choose their formula "
          "by values, which a trace does not have. Autocast casts inside of the kernel of a bilinear layer.",
          _of_any_model(as_eager_computes), feature=features.NUMERICS),
    Patch("gates of a GRU",
          "Torch's decomposition makes each gate a separate tensor. In eager mode, gates are parts of one "
          "tensor, which kernels process row by row: other elements are left for the scalar version, which "
          "rounds differently.",
          _of_any_model(gates_as_eager_computes), feature=features.GATES),
    Patch("types of an LSTM",
          "Under autocast, eager mode gives an LSTM to the fused layer, which returns autocast's type. "
          "Torch's decomposition returns float32 there, and so would be followed by other casts.",
          _of_any_model(types_of_fused_layers), feature=features.GATES),
    Patch("recurrent layers as one operation",
          "An export unrolls a layer, step by step, to find the form of its results.",
          _of_any_model(layers_as_one), feature=features.GATES, around="export"),
    Patch("layouts",
          "Some kernels return other strides than fake tensors say. Strides decide which copies are made, "
          "and in which order a later sum is taken.",
          _of_any_model(as_kernels_return_them), feature=features.LAYOUTS),
    Patch("attention of a device that is not here",
          "Torch asks the present device which kernel attention takes. A plan for another device traces the "
          "kernel of that device, with the values that the kernel keeps for its backward.",
          _of_any_model(attention_of_the_device)),
    Patch("value checks",
          "Distributions check the values of their arguments by default, and a trace has no values.",
          _of_any_model(without_value_checks), feature=features.CHECKS),
    Patch("moves to where a module is",
          "A module that is moved gets new parameters, which a trace cannot follow. Most such calls in a "
          "forward (such as a router's, to its own type) move nothing.",
          _of_any_model(standing_modules_stay), feature=features.MOVES),
    Patch("activated adapters",
          "peft hooks the checkpointed layers of such adapters once more in each forward, for the second run "
          "of their forward, and takes these hooks away in the backward. A plan replaces checkpointing, and "
          "has no such run.",
          adapters_hooked_once),
    Patch("quantised weights",
          "A weight of bitsandbytes is a parameter of its own class, with its scales as attributes. Neither "
          "survives in a trace, which gets plain parameters on the same memory.",
          frozen_parameters_plain),
    Patch("hooks around every module",
          "Such hooks also run around the modules that a trace adds around the model: the plan would "
          "contain their computations more than once.",
          hooks_of_the_model_alone),
    Patch("modules compiled in place",
          "Module.compile replaces a module's call by one that compiles it, which would run inside of the "
          "trace. The module's own call is traced.",
          calls_uncompiled),
    Patch("opaque submodules",
          "A submodule whose inner shapes depend on values has no static graph. A call of a chosen "
          "submodule (`Settings.opaque`) becomes one operation, which runs again in the backward.",
          opaque_parts),
    Patch("checks by value",
          "An operation that checks the values of its result may raise. A plan cannot: torch 2.11 and 2.12 "
          "silently drop the check of a linear solver, and 2.15 that of a distribution. Therefore both are "
          "refused.", checks_by_value_refused),
    Patch("seeds",
          "A forward that sets the state of a random generator does so once, in the trace, and no plan "
          "repeats it. It is refused.", seeds_refused),
    Patch("collectives",
          "Functions of torch.distributed write to their arguments, where neither autograd nor a trace sees "
          "it: a trace runs functional collectives instead, which are operations of the plan. Other ways to "
          "communicate with several ranks are refused when the trace reaches the call.",
          collectives_refused),
    Patch("scales of quantised weights",
          "The tensors that replace such parameters in the trace get their attributes, as the layers read "
          "them there.",
          _of_any_model(attributes_carried), around="forward"),
    Patch("new buffers",
          "A trace sees writes to a tensor, but not that a buffer is another tensor afterwards. A buffer "
          "that the forward makes anew becomes a write.",
          new_buffers_as_writes, around="forward"),
    Patch("lost tensors",
          "The trace silently loses the gradient of a closed-over tensor, and writes to it. Both are "
          "refused. What is assigned to the .data of a frozen parameter is written into it.",
          lost_tensors_refused, around="forward"),
    Patch("values of inputs",
          "A trace has no values: a forward that looks at those of its labels, masks or edges stops it. "
          "Values that depend only on inputs are computed from the real inputs before each planned step. (A "
          "CTC loss also gets its longest target, which determines the size of its results.) Used only if a "
          "trace was stopped.",
          values_of_inputs, around="forward"),
    Patch("library paths",
          "Libraries take another path when they notice that they are traced (for example, explicit "
          "attention masks): other arithmetic, and memory for the masks. Eager's path is tried first.",
          masks_as_in_eager_mode, feature=features.PATHS, around="export", may_fail=True, direct=True),
    Patch("library sources",
          "Some models ask in their own source whether they are compiled or exported "
          "(`torch.compiler.is_compiling`), and take another path (Qwen3-Next of transformers a loop that "
          "copies, in place of a solver). They get the answer no. "
          "If the export fails with it, it is tried again without this patch.",
          sources_as_in_eager_mode, feature=features.PATHS, around="export", may_fail=True, direct=True),
    Patch("custom functions",
          "An export records the operations of a custom function's forward, and their derivative would "
          "replace the function's own backward. Therefore each call is recorded as one operation.",
          _of_any_model(kept_whole), around="export"),
    Patch("checkpointed regions",
          "The plan decides what is recomputed, and a trace runs through `torch.utils.checkpoint`. "
          "Operations carry the number of their region, so that a plan can say what checkpointing would "
          "take.",
          _of_any_model(regions_marked), feature=features.REGIONS, around="export", direct=True),
    Patch("autocast and no-grad regions",
          "An export makes a graph of its own of such a region, loses a no-grad region inside of an autocast "
          "region, and takes the latter apart into several: they are entered and left in the graph itself.",
          _of_any_model(regions_entered_in_place), feature=features.FLAT_REGIONS, around="export"),
)
"""In the order in which they are entered."""

PROGRAM_REWRITES: tuple[Rewrite[fx.GraphModule], ...] = (
    Rewrite("calls of custom functions",
            "The recorded calls become calls of their functions again, so that the joint trace sees their "
            "backward as autograd calls it.",
            run_as_they_are),
    Rewrite("recurrent stacks",
            "Torch's decompositions leave out the dropout between the layers, and use the fused LSTM layer "
            "only for the first layer. They unroll, step by step, GRUs and layers of tanh or relu on CPUs, "
            "and on GPUs what eager mode passes to cuDNN.",
            as_eager_runs_them),
    Rewrite("closed-over tensors",
            "The trace of the gradients does not accept a tensor that is not a parameter, buffer or "
            "argument of the module. It becomes a buffer of the exported program.",
            closed_over_as_buffers),
    Rewrite("leaves under autocast",
            "Autocast keeps casts of leaves that require a gradient. In the trace of the gradients no tensor "
            "is one, so the exported program says which of its tensors are.",
            leaves_noted, feature=features.CASTS),
    Rewrite("integers drawn like a tensor",
            "The operator `randint_like` has no derivative. Its Python function never asks for one, but an "
            "exported call does if the tensor requires a gradient.",
            integers_without_gradient),
    Rewrite("one-hot positions",
            "A trace of `one_hot` asserts that its classes are in range. Positions that `argmax`, `topk`, "
            "`sort` or `multinomial` has found are.",
            one_hot_of_positions),
    Rewrite("regions that fail",
            "A trace that fails in the middle of an autocast region would leave it open.",
            regions_left_after_errors, feature=features.FLAT_REGIONS),
)
"""Changes of the exported forward, before the joint graph is traced from it; in the order of their work."""

TRACE_REWRITES: tuple[Rewrite[fx.Graph], ...] = (
    Rewrite("recurrent layers",
            "The fused layer makes the workspace that its backward reads only while gradients are recorded, "
            "and a trace does not know its size. It is replaced by an operation that always makes the "
            "workspace.",
            make_recurrent_layers_whole),
    Rewrite("tangents that are zero",
            "Forward-mode derivatives (`torch.func.jvp`, `hessian`) begin with zeros that have no memory, "
            "which nothing after the trace can read.",
            zeros_with_memory, feature=features.NUMERICS),
    Rewrite("conjugates of numbers",
            "The gradient of a product with a complex number (`1j * x`) is one with its conjugate, which a "
            "trace makes a view of the number.",
            conjugates_of_numbers),
    Rewrite("custom operators that write",
            "A custom operator that writes to its arguments is a higher-order operation in a trace, whose "
            "first argument is the operator: it becomes an operation on tensors.",
            writes_as_values),
    Rewrite("cuDNN's batch norms",
            "Eager mode passes most batch norms on GPUs to cuDNN. A trace uses torch's own kernels, three "
            "for one, for all of them.",
            batch_norms_as_eager_chooses),
    Rewrite("tags of the backward",
            "Nodes from a nested graph have lost the tag that marks the backward.",
            tag_what_needs_the_loss),
    Rewrite("collectives that were traced",
            "A second check, of the graph itself: no other operation that communicates gets into a plan, "
            "however a version of torch has traced it.",
            refuse_in_joint),
)
"""Changes of the traced joint graph of forward and backward; in the order of their work."""


@contextmanager
def repaired(around: Literal["trace", "forward"], model: nn.Module) -> Iterator[None]:
    """Apply the patches around a stage, until the context ends."""
    with _within([p for p in PATCHES if p.around == around and not is_off(p.feature)], model):
        yield


def ways_to_export(model: nn.Module, *,
                   direct: bool = False) -> list[Callable[[], AbstractContextManager[None]]]:
    """Return the contexts in which to try to export a model, in order: with all patches, without the last of
    the patches that may fail, without the last two, and so on. `direct`: to trace its gradients without an
    export."""
    patches = [p for p in PATCHES if p.around == "export" and (p.direct or not direct)
               and not is_off(p.feature) and p.run(model) is not None]
    optional = [p for p in patches if p.may_fail]
    return [functools.partial(_within, [p for p in patches if p not in optional[n:]], model)
            for n in range(len(optional), -1, -1)]


@contextmanager
def _within(patches: Sequence[Patch], model: nn.Module) -> Iterator[None]:
    with ExitStack() as stack:
        for patch in patches:
            context = patch.run(model)
            if context is not None:
                stack.enter_context(context)
        yield


def retrace(run: Callable[[], T]) -> T:
    """Call a function that runs operations of a captured graph again, on other values, and return its result.
    Inside, operations behave as in the trace of a capture."""
    with torch.no_grad(), ExitStack() as stack:
        for feature, context in ((features.NUMERICS, as_eager_computes),
                                 (features.LAYOUTS, as_kernels_return_them)):
            if not is_off(feature):
                stack.enter_context(context())
        return run()


def repair_program(program: fx.GraphModule) -> None:
    """Change an exported forward."""
    _rewrite(PROGRAM_REWRITES, program)


def repair_joint(graph: fx.Graph) -> None:
    """Change a joint graph."""
    _rewrite(TRACE_REWRITES, graph)


def _rewrite(rewritings: Sequence[Rewrite[G]], graph: G) -> None:
    for each in rewritings:
        if not is_off(each.feature):
            each.run(graph)
