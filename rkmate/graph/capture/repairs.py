"""The passes of a capture: what makes a trace compute as eager mode does, in the order of their work.

A pass is a value: its row says what is done, why, and on which versions of torch it was seen needed. There
are two types: a `Patch` is a context around a stage of the capture, a `Rewrite` changes a graph. Those of the
joint graph that is planned follow in `graph.passes.table`: arrows between folders go downwards, so the rows
that a capture needs stand here.
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
    masks_as_in_eager_mode,
    sources_as_in_eager_mode,
    without_value_checks,
)
from rkmate.torch_seam.patches.modules import (
    cumulative_averages_as_tensors,
    hooks_of_the_model_alone,
    new_buffers_as_writes,
    standing_modules_stay,
)
from rkmate.torch_seam.patches.numerics import (
    as_eager_computes,
    checks_by_value_refused,
    zeros_with_memory,
)
from rkmate.torch_seam.patches.recurrent import (
    as_eager_runs_them,
    gates_as_eager_computes,
    make_recurrent_layers_whole,
    types_of_fused_layers,
)
from rkmate.torch_seam.versions import is_off

SEEN = ("2.13",)
"""The versions of torch that the tests run with: what a pass without other word was seen needed on."""
Around = Literal["trace", "forward", "export"]
G = TypeVar("G")
T = TypeVar("T")


@dataclass(frozen=True)
class Pass:
    """What all rows say."""

    name: str
    """What it deals with, in a few words; no two passes share it."""
    why: str
    """What would be wrong, slower or larger without it, in a sentence or two."""
    run: Callable[..., Any]
    """What does it."""
    torch_versions: tuple[str, ...] = SEEN
    """Versions of torch that it was seen needed on, oldest first. Empty: no version does without, as
    torch is not what it makes up for."""
    feature: str = ""
    """The feature of the seam (`features`) that it needs, without which it is left out. Empty: none."""

    @property
    def place(self) -> str:
        """The file that it stands in, as a path inside the package."""
        return self.run.__module__.removeprefix("rkmate.").replace(".", "/") + ".py"


@dataclass(frozen=True)
class Patch(Pass):
    """A context around a stage of the capture."""

    run: Callable[[nn.Module], AbstractContextManager[Any] | None]
    """Returns the context for a model; None where the model needs none."""
    around: Around = field(default="trace", kw_only=True)
    """The stage: ``"trace"``, the whole capture of a model; ``"forward"``, the model's own forward while it
    is traced; ``"export"``, its export."""
    may_fail: bool = field(default=False, kw_only=True)
    """Whether an export that fails is tried again without it."""


@dataclass(frozen=True)
class Rewrite(Pass, Generic[G]):
    """A change of a graph: an exported program, a traced graph, or the joint graph that is planned."""

    run: Callable[[G], None]
    """Changes the graph."""
    when: tuple[str, ...] = field(default=(), kw_only=True)
    """Choices of the graph (`Joint.choices`) without which it is left out."""
    unless: tuple[str, ...] = field(default=(), kw_only=True)
    """Choices with which it is left out."""

    def applies(self, choices: frozenset[str]) -> bool:
        """Return whether it works on a graph with these choices."""
        return choices.issuperset(self.when) and choices.isdisjoint(self.unless)


def _of_any_model(context: Callable[[], AbstractContextManager[Any]]) -> \
        Callable[[nn.Module], AbstractContextManager[Any]]:
    @functools.wraps(context)
    def run(model: nn.Module) -> AbstractContextManager[Any]:
        return context()
    return run


PATCHES = (
    Patch("autocast and the backward",
          "A trace takes the forward's autocast state for the backward's, too, and casts the gradients of "
          "what the forward computes in float32 (attention with dropout). Eager mode's backward is called "
          "after the autocast region.",
          _of_any_model(backward_without_autocast), feature=features.AUTOCAST),
    Patch("casts of weights under autocast",
          "A trace casts a weight at each of its uses. Eager mode casts it once in an autocast region, keeps "
          "that one cast, and adds up its gradients in the region's type.",
          _of_any_model(casts_kept_in_regions), feature=features.CASTS),
    Patch("cumulative batch norms",
          "With `momentum=None` a batch norm reads its number of batches back from a buffer, which no "
          "static graph can: the factor stays a tensor.",
          cumulative_averages_as_tensors, feature=features.AVERAGES),
    Patch("eager kernels",
          "Torch decomposes some operations while it traces (resampling, shrinking, margin losses, "
          "dropout) and rounds otherwise than their kernels; the gradients of products choose "
          "their formula by values, which a trace has not.",
          _of_any_model(as_eager_computes), feature=features.NUMERICS),
    Patch("gates of a GRU",
          "Torch's decomposition makes each gate a tensor of its own. Eager mode's are parts of one, "
          "which kernels go over row by row: other elements fall to the scalar version, which rounds "
          "otherwise.",
          _of_any_model(gates_as_eager_computes), feature=features.GATES),
    Patch("types of an LSTM",
          "Under autocast, eager mode gives an LSTM to the fused layer, which returns autocast's type. "
          "Torch's decomposition returns float32 there, and so would be followed by other casts.",
          _of_any_model(types_of_fused_layers), feature=features.GATES),
    Patch("layouts",
          "Some kernels return other strides than fake tensors say. Strides decide which copies are "
          "made, and in which order a later sum is taken.",
          _of_any_model(as_kernels_return_them), feature=features.LAYOUTS),
    Patch("attention of a device that is not here",
          "Torch asks the device that is there which kernel attention takes. A plan that is made for another "
          "one traces the kernel which that one takes, with what it keeps for its backward.",
          _of_any_model(attention_of_the_device)),
    Patch("value checks",
          "Distributions check the values of their arguments by default, and a trace has none.",
          _of_any_model(without_value_checks), feature=features.CHECKS),
    Patch("moves to where a module is",
          "A module that is moved gets its parameters anew, which a trace cannot follow; most such calls in "
          "a forward (a router's, to its type) move nothing.",
          _of_any_model(standing_modules_stay), feature=features.MOVES),
    Patch("hooks around every module",
          "They run around the modules that a trace puts around the model, too: what they compute would be "
          "in the plan more than once.",
          hooks_of_the_model_alone),
    Patch("opaque submodules",
          "A submodule whose inner shapes depend on values has no static graph: a call of one that was "
          "chosen (`Settings.opaque`) is one operation, which runs again in the backward.",
          opaque_parts, ()),
    Patch("checks by value",
          "An operation that checks the values of its result raises by them. A plan cannot: torch 2.11 and "
          "2.12 lose the check of a linear solver without a word, 2.15 that of a distribution, so both are "
          "refused.", checks_by_value_refused, ("2.11", "2.12", "2.13", "2.14", "2.15")),
    Patch("collectives",
          "Ranks that run their collectives at moments of different plans hang or compute wrong values. "
          "Where there are several ranks, a forward that communicates is refused when the trace reaches "
          "that.",
          collectives_refused, ()),
    Patch("new buffers",
          "A trace sees what is written to a tensor, not which tensor a buffer is afterwards: a buffer "
          "that the forward makes anew becomes a write.",
          new_buffers_as_writes, around="forward"),
    Patch("lost tensors",
          "Of a closed-over tensor the trace loses the gradient, and what is written to it, without a "
          "word: both are refused.",
          _of_any_model(lost_tensors_refused), around="forward"),
    Patch("values of inputs",
          "A trace has no values: a forward that looks at those of its labels, masks or edges stops it. What "
          "depends on inputs alone is computed from the real ones, before each planned step (and a CTC loss "
          "is told its longest target, which says how large its results are). At work where a trace was "
          "stopped.",
          values_of_inputs, (), around="forward"),
    Patch("library paths",
          "Libraries take another path when they notice that they are traced (explicit attention masks, "
          "say): other arithmetic, and memory for the masks. Eager's path is tried first.",
          masks_as_in_eager_mode, feature=features.PATHS, around="export", may_fail=True),
    Patch("library sources",
          "Some models of transformers ask in their own source whether they are compiled, and take another "
          "path. They hear that they are not, where the export succeeds so.",
          sources_as_in_eager_mode, feature=features.PATHS, around="export", may_fail=True),
    Patch("custom functions",
          "An export records the operations of a custom function's forward, and their derivative would "
          "take the place of its own backward: each call is recorded as one operation.",
          _of_any_model(kept_whole), around="export"),
    Patch("checkpointed regions",
          "What is computed again is the plan's business, and a trace runs through "
          "`torch.utils.checkpoint`. Operations carry the number of their region, so that a plan can say "
          "what checkpointing would take.",
          _of_any_model(regions_marked), (), features.REGIONS, around="export"),
    Patch("autocast and no-grad regions",
          "An export makes a graph of its own of such a region, loses a no-grad region inside of an autocast "
          "region, and takes the latter apart into several: they are entered and left in the graph itself.",
          _of_any_model(regions_entered_in_place), feature=features.FLAT_REGIONS, around="export"),
)
"""In the order in which they are entered."""

PROGRAM_REWRITES: tuple[Rewrite[fx.GraphModule], ...] = (
    Rewrite("calls of custom functions",
            "The recorded calls are calls of their functions again, so that the joint trace sees their "
            "backward as autograd calls it.",
            run_as_they_are),
    Rewrite("recurrent stacks",
            "Torch's decompositions leave out the dropout between the layers, and use the fused LSTM layer "
            "for the first layer only; on GPUs they unroll what eager mode gives to cuDNN, step by step.",
            as_eager_runs_them, ("2.11", "2.12", "2.13")),
    Rewrite("closed-over tensors",
            "The trace of the gradients does not take a tensor that is none of the module's parameters, "
            "buffers or arguments: it becomes a buffer of the exported program.",
            closed_over_as_buffers),
    Rewrite("leaves under autocast",
            "Autocast keeps casts of leaves that require a gradient. In the trace of the gradients no tensor "
            "is one, so the exported program says which of its tensors are.",
            leaves_noted, feature=features.CASTS),
    Rewrite("regions that fail",
            "A trace that fails in the middle of an autocast region would leave it open.",
            regions_left_after_errors, feature=features.FLAT_REGIONS),
)
"""Changes of the exported forward, before the joint graph is traced from it; in the order of their work."""

TRACE_REWRITES: tuple[Rewrite[fx.Graph], ...] = (
    Rewrite("recurrent layers",
            "The fused layer makes the workspace that its backward reads only while gradients are recorded, "
            "and a trace does not know its size: an operation that always makes it stands there.",
            make_recurrent_layers_whole),
    Rewrite("tangents that are zero",
            "Forward-mode derivatives (`torch.func.jvp`, `hessian`) begin with zeros that have no memory, "
            "which nothing after the trace can read.",
            zeros_with_memory, feature=features.NUMERICS),
    Rewrite("custom operators that write",
            "A custom operator that writes to its arguments is a higher-order operation in a trace, whose "
            "first argument is the operator: it becomes an operation on tensors.",
            writes_as_values),
    Rewrite("cuDNN's batch norms",
            "Eager mode gives most batch norms on GPUs to cuDNN; a trace has torch's own kernels, three for "
            "one, for all of them.",
            batch_norms_as_eager_chooses),
    Rewrite("tags of the backward",
            "Nodes that come out of a nested graph have lost the tag that says that they belong to the "
            "backward.",
            tag_what_needs_the_loss),
    Rewrite("collectives that were traced",
            "A second look, at the graph itself: no operation that communicates gets into a plan, however a "
            "version of torch has traced it.",
            refuse_in_joint, ()),
)
"""Changes of the traced joint graph of forward and backward; in the order of their work."""


@contextmanager
def repaired(around: Literal["trace", "forward"], model: nn.Module) -> Iterator[None]:
    """Inside, the patches around a stage are at work."""
    with _within([p for p in PATCHES if p.around == around and not is_off(p.feature)], model):
        yield


def ways_to_export(model: nn.Module) -> list[Callable[[], AbstractContextManager[None]]]:
    """In which contexts to export a model, the one to be preferred first: without the last of the patches
    that may fail, then without the last two, and so on."""
    patches = [p for p in PATCHES
               if p.around == "export" and not is_off(p.feature) and p.run(model) is not None]
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
    """Return what a function returns that runs operations of a captured graph again, on other values: there
    they return what they return in the trace of a capture."""
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
