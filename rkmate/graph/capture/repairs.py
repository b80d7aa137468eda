"""The passes of a capture: what makes a trace compute as eager mode does, in the order of their work.

A `Pass` is a value: this table says what is done, why, and on which versions of torch it was seen
needed; `capture` runs it through the four functions at the end. The passes of the later stages follow in
`graph.passes.table`, which puts all of them into one table: arrows between folders go downwards, so
the rows that a capture needs stand here.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

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
from rkmate.torch_seam.patches.libraries import paths, without_value_checks
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

Phase = Literal["trace", "forward", "export", "exported", "joint", "simplify", "emission"]

PHASES: dict[Phase, str] = {
    "trace": "`run(model)` is a context manager around the whole capture of a model.",
    "forward": "`run(model)` is a context manager around the model's own forward, while it is traced.",
    "export": "`run(model)` lists ways to export a model, each a call that gives a context manager; the "
              "last is always possible, one before it is taken when the export succeeds in it.",
    "exported": "`run(program)` changes the exported forward, before the joint graph is traced from it.",
    "joint": "`run(graph)` changes the joint graph of forward and backward.",
    "simplify": "`run(work)` rewrites the joint graph that is planned (a `Rewriting`). What nobody reads "
                "any more goes after each of them.",
    "emission": "Calls that are written otherwise than they were traced. The graph stays as it is: `run` "
                "says of an operation which other call may stand for it, and the stages after the "
                "graph ask.",
}
"""When a pass does its work, and how its `run` is called; in the order of the stages."""

SEEN = ("2.13",)
"""The versions of torch that the tests run with: what a pass without other word was seen needed on."""


@dataclass(frozen=True)
class Pass:
    """One repair or rewriting, as a row of the table of passes."""

    name: str
    """What it deals with, in a few words; no two passes share it."""
    phase: Phase
    """When it does its work, and so how `run` is called: see `PHASES`."""
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


def _of_any_model(context: Callable[[], AbstractContextManager[Any]]) -> Callable[..., Any]:
    @functools.wraps(context)
    def run(model: nn.Module) -> AbstractContextManager[Any]:
        return context()
    return run


def _one_way(context: Callable[[], AbstractContextManager[Any]]) -> Callable[..., Any]:
    @functools.wraps(context)
    def run(model: nn.Module) -> Sequence[Callable[[], AbstractContextManager[Any]]]:
        return (context,)
    return run


REPAIRS = (
    Pass("autocast and the backward", "trace",
         "A trace takes the forward's autocast state for the backward's, too, and casts the gradients of "
         "what the forward computes in float32 (attention with dropout). Eager mode's backward is called "
         "after the autocast region.",
         _of_any_model(backward_without_autocast), feature=features.AUTOCAST),
    Pass("casts of weights under autocast", "trace",
         "A trace casts a weight at each of its uses. Eager mode casts it once in an autocast region, keeps "
         "that one cast, and adds up its gradients in the region's type.",
         _of_any_model(casts_kept_in_regions), feature=features.CASTS),
    Pass("cumulative batch norms", "trace",
         "With `momentum=None` a batch norm reads its number of batches back from a buffer, which no "
         "static graph can: the factor stays a tensor.",
         cumulative_averages_as_tensors, feature=features.AVERAGES),
    Pass("eager kernels", "trace",
         "Torch decomposes some operations while it traces (resampling, shrinking, margin losses, "
         "dropout) and rounds otherwise than their kernels; the gradients of products choose "
         "their formula by values, which a trace has not.",
         _of_any_model(as_eager_computes), feature=features.NUMERICS),
    Pass("gates of a GRU", "trace",
         "Torch's decomposition makes each gate a tensor of its own. Eager mode's are parts of one, "
         "which kernels go over row by row: other elements fall to the scalar version, which rounds "
         "otherwise.",
         _of_any_model(gates_as_eager_computes), feature=features.GATES),
    Pass("types of an LSTM", "trace",
         "Under autocast, eager mode gives an LSTM to the fused layer, which returns autocast's type. "
         "Torch's decomposition returns float32 there, and so would be followed by other casts.",
         _of_any_model(types_of_fused_layers), feature=features.GATES),
    Pass("layouts", "trace",
         "Some kernels return other strides than fake tensors say. Strides decide which copies are "
         "made, and in which order a later sum is taken.",
         _of_any_model(as_kernels_return_them), feature=features.LAYOUTS),
    Pass("attention of a device that is not here", "trace",
         "Torch asks the device that is there which kernel attention takes. A plan that is made for another "
         "one traces the kernel which that one takes, with what it keeps for its backward.",
         _of_any_model(attention_of_the_device)),
    Pass("value checks", "trace",
         "Distributions check the values of their arguments by default, and a trace has none.",
         _of_any_model(without_value_checks), feature=features.CHECKS),
    Pass("moves to where a module is", "trace",
         "A module that is moved gets its parameters anew, which a trace cannot follow; most such calls in a "
         "forward (a router's, to its type) move nothing.",
         _of_any_model(standing_modules_stay), feature=features.MOVES),
    Pass("hooks around every module", "trace",
         "They run around the modules that a trace puts around the model, too: what they compute would be "
         "in the plan more than once.",
         hooks_of_the_model_alone),
    Pass("opaque submodules", "trace",
         "A submodule whose inner shapes depend on values has no static graph: a call of one that was chosen "
         "(`Settings.opaque`) is one operation, which runs again in the backward.",
         opaque_parts, ()),
    Pass("checks by value", "trace",
         "An operation that checks the values of its result raises by them. A plan cannot: torch 2.11 and "
         "2.12 lose the check of a linear solver without a word, 2.15 that of a distribution, so both are "
         "refused.", checks_by_value_refused, ("2.11", "2.12", "2.13", "2.14", "2.15")),
    Pass("collectives", "trace",
         "Ranks that run their collectives at moments of different plans hang or compute wrong values. Where "
         "there are several ranks, a forward that communicates is refused when the trace reaches that.",
         collectives_refused, ()),
    Pass("new buffers", "forward",
         "A trace sees what is written to a tensor, not which tensor a buffer is afterwards: a buffer "
         "that the forward makes anew becomes a write.",
         new_buffers_as_writes),
    Pass("lost tensors", "forward",
         "Of a closed-over tensor the trace loses the gradient, and what is written to it, without a "
         "word: both are refused.",
         _of_any_model(lost_tensors_refused)),
    Pass("values of inputs", "forward",
         "A trace has no values: a forward that looks at those of its labels, masks or edges stops it. What "
         "depends on inputs alone is computed from the real ones, before each planned step (and a CTC loss "
         "is told its longest target, which says how large its results are). At work where a trace was "
         "stopped.",
         values_of_inputs, ()),
    Pass("library paths", "export",
         "Libraries take another path when they notice that they are traced (explicit attention masks, "
         "say): other arithmetic, and memory for the masks. Eager's path is tried first.",
         paths, feature=features.PATHS),
    Pass("custom functions", "export",
         "An export records the operations of a custom function's forward, and their derivative would "
         "take the place of its own backward: each call is recorded as one operation.",
         _one_way(kept_whole)),
    Pass("checkpointed regions", "export",
         "What is computed again is the plan's business, and a trace runs through `torch.utils.checkpoint`. "
         "Operations carry the number of their region, so that a plan can say what checkpointing would take.",
         _one_way(regions_marked), (), features.REGIONS),
    Pass("autocast and no-grad regions", "export",
         "An export makes a graph of its own of such a region, loses a no-grad region inside of an autocast "
         "region, and takes the latter apart into several: they are entered and left in the graph itself.",
         _one_way(regions_entered_in_place), feature=features.FLAT_REGIONS),
    Pass("calls of custom functions", "exported",
         "The recorded calls are calls of their functions again, so that the joint trace sees their "
         "backward as autograd calls it.",
         run_as_they_are),
    Pass("recurrent stacks", "exported",
         "Torch's decompositions leave out the dropout between the layers, and use the fused LSTM layer "
         "for the first layer only; on GPUs they unroll what eager mode gives to cuDNN, step by step.",
         as_eager_runs_them, ("2.11", "2.12", "2.13")),
    Pass("closed-over tensors", "exported",
         "The trace of the gradients does not take a tensor that is none of the module's parameters, "
         "buffers or arguments: it becomes a buffer of the exported program.",
         closed_over_as_buffers),
    Pass("leaves under autocast", "exported",
         "Autocast keeps casts of leaves that require a gradient. In the trace of the gradients no tensor is "
         "one, so the exported program says which of its tensors are.",
         leaves_noted, feature=features.CASTS),
    Pass("regions that fail", "exported",
         "A trace that fails in the middle of an autocast region would leave it open.",
         regions_left_after_errors, feature=features.FLAT_REGIONS),
    Pass("recurrent layers", "joint",
         "The fused layer makes the workspace that its backward reads only while gradients are recorded, "
         "and a trace does not know its size: an operation that always makes it stands there.",
         make_recurrent_layers_whole),
    Pass("tangents that are zero", "joint",
         "Forward-mode derivatives (`torch.func.jvp`, `hessian`) begin with zeros that have no memory, which "
         "nothing after the trace can read.",
         zeros_with_memory, feature=features.NUMERICS),
    Pass("custom operators that write", "joint",
         "A custom operator that writes to its arguments is a higher-order operation in a trace, whose first "
         "argument is the operator: it becomes an operation on tensors.",
         writes_as_values),
    Pass("cuDNN's batch norms", "joint",
         "Eager mode gives most batch norms on GPUs to cuDNN; a trace has torch's own kernels, three for "
         "one, for all of them.",
         batch_norms_as_eager_chooses),
    Pass("tags of the backward", "joint",
         "Nodes that come out of a nested graph have lost the tag that says that they belong to the "
         "backward.",
         tag_what_needs_the_loss),
    Pass("collectives that were traced", "joint",
         "A second look, at the graph itself: no operation that communicates gets into a plan, however a "
         "version of torch has traced it.",
         refuse_in_joint, ()),
)
"""In the order in which they work; contexts of one phase are entered in it."""


def _of(phase: Phase) -> Iterator[Pass]:
    return (p for p in REPAIRS if p.phase == phase and not is_off(p.feature))


@contextmanager
def repaired(phase: Literal["trace", "forward"], model: nn.Module) -> Iterator[None]:
    """Inside, the repairs of a phase are at work."""
    with ExitStack() as stack:
        for repair in _of(phase):
            stack.enter_context(repair.run(model))
        yield


def ways_to_export(model: nn.Module) -> list[Callable[[], AbstractContextManager[None]]]:
    """In which contexts to export a model, the one to be preferred first."""
    ways = itertools.product(*(repair.run(model) for repair in _of("export")))
    return [functools.partial(_together, way) for way in ways]


@contextmanager
def _together(contexts: Sequence[Callable[[], AbstractContextManager[None]]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


def repair_program(program: fx.GraphModule) -> None:
    """Change an exported forward."""
    for repair in _of("exported"):
        repair.run(program)


def repair_joint(graph: fx.Graph) -> None:
    """Change a joint graph."""
    for repair in _of("joint"):
        repair.run(graph)
