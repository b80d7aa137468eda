"""The one table of passes: all that stands between what torch traces and what a plan runs.

Its rows for the capture of a model come from `graph.capture.repairs`, which also says what a pass is and how
each phase calls its own. `simplify` runs the phase of its name. What is of the phase ``emission`` is asked
for by the stages after the graph; it stands here so that there is one place to look.
"""

from __future__ import annotations

import functools

from rkmate.graph.capture.repairs import REPAIRS, Pass
from rkmate.graph.passes import chunked_kernels, in_place
from rkmate.graph.passes.added_gradients import add_gradients_in_place
from rkmate.graph.passes.alternatives import alternatives
from rkmate.graph.passes.batch_norms import add_up_by_groups
from rkmate.graph.passes.clusters.rewrite import fuse
from rkmate.graph.passes.constants import find_constants
from rkmate.graph.passes.copies import drop_copies, drop_copies_of_outputs
from rkmate.graph.passes.dead_code import drop_dead
from rkmate.graph.passes.decisions import find_decisions
from rkmate.graph.passes.deferred_outputs import put_outputs_back, take_outputs_off
from rkmate.graph.passes.embedding_sums import add_rows_of_embeddings
from rkmate.graph.passes.joint import Rewriting
from rkmate.graph.passes.layouts import channels_last, layouts_of_gradients
from rkmate.graph.passes.param_gradients import own_gradients, take_sums_apart
from rkmate.graph.passes.pixel_products import multiply_pixels
from rkmate.graph.passes.products import name_products
from rkmate.graph.passes.reduced_losses import storages_of_their_own
from rkmate.graph.passes.running_statistics import (
    drop_unread_statistics,
    protect_overwritten,
    take_counters_off,
)
from rkmate.graph.passes.tiles.heads import tile_heads
from rkmate.graph.passes.tiles.mlps import tile_mlps
from rkmate.graph.passes.unwanted_gradients import drop_unwanted_gradients
from rkmate.graph.passes.view_chains import shorten_views
from rkmate.graph.passes.view_methods import view_method
from rkmate.graph.passes.written_parts import read_what_was_written


@functools.wraps(chunked_kernels.split_wide)
def _split_wide(work: Rewriting) -> None:
    chunked_kernels.split_wide(work.graph, work.replace)


REWRITINGS = (
    Pass("dead code", "simplify",
         "A trace keeps assertions on metadata, which hold for every call of the same signature, and "
         "values that only they read.",
         drop_dead),
    Pass("unwanted gradients", "simplify",
         "The trace has a gradient for every output. Autograd computes none for an output that the loss "
         "leaves out.",
         drop_unwanted_gradients, ()),
    Pass("copies of outputs", "simplify",
         "Capture copies each output, so that none is an alias of an input or of another one. The "
         "planned step returns the value itself.",
         drop_copies_of_outputs, ()),
    Pass("copies", "simplify",
         "Aliases, and copies with their input's layout, would each be a tensor and a call more.",
         drop_copies),
    Pass("channels last", "simplify",
         "Kernels of convolutions, batch norms and poolings may be faster on images whose channels lie side "
         "by side. Where it is asked for, networks of convolutions get them so; last bits differ, as other "
         "kernels do the work.",
         channels_last, ()),
    Pass("products of pixels", "simplify",
         "An image that has its channels last is a matrix of pixels by channels, and a convolution of 1 x 1 "
         "a product with it: kernels for windows copy such images, or fill gradients with zeros first.",
         multiply_pixels, ()),
    Pass("sums over pixels", "simplify",
         "On a CPU, torch's batch norm adds up a channel's pixels one after the other where channels lie "
         "side by side: of thousands, the statistics are some fifty times less exact than in the other "
         "layout. There it adds up groups of pixels, which are put together.",
         add_up_by_groups),
    Pass("written parts", "simplify",
         "Kernels that work tile by tile write and read a part of one buffer; in a trace each write would "
         "copy the whole buffer.",
         read_what_was_written),
    Pass("unread statistics", "simplify",
         "A batch norm's gradient in training mode takes the updated running statistics and reads none: "
         "held until the backward, they are memory that eager mode does not need.",
         drop_unread_statistics),
    Pass("overwritten values", "simplify",
         "The forward writes to a buffer or an input when it is over; who needs the value from before, a "
         "second run in the backward above all, reads a copy.",
         protect_overwritten, ()),
    Pass("counters", "simplify",
         "Each batch norm counts its batches in a buffer of its own: an operation, and a kernel, for each. "
         "What nobody reads is counted up after the forward, all in one call.",
         take_counters_off, ()),
    Pass("reduced losses", "simplify",
         "Torch's kernels of some losses (`mse_loss`, `smooth_l1_loss`, `binary_cross_entropy`, "
         "`soft_margin_loss`) return a number in a storage as large as what it sums up, and `F.fold` images "
         "in one as large as its columns. Held to the end of the step, it would be memory that no plan has.",
         storages_of_their_own),
    Pass("chunked kernels", "simplify",
         "Torch's gradients of a wide cross entropy and of a wide batch norm allocate two or three tensors "
         "of that size. Our operators have the same bits, and overwrite one.",
         _split_wide),
    Pass("deferred outputs", "simplify",
         "Logits that are returned beside the loss are held by the caller, and most callers never read them. "
         "Where the loss needs no whole logits, what they are computed from is kept in their place.",
         take_outputs_off, ()),
    Pass("chunked loss", "simplify",
         "The logits of a language model are often its largest tensors. Where a budget needs it, a wide "
         "product, its losses and their gradients are computed a few rows at a time; the last bits of the "
         "weight's gradient differ.",
         tile_heads),
    Pass("tiled MLPs", "simplify",
         "Between the two products of a transformer's MLP a token takes some four times what it takes "
         "elsewhere. Where a budget needs it, MLPs run a few rows at a time; the last bits of their "
         "weights' gradients differ.",
         tile_mlps),
    Pass("rows of embeddings", "simplify",
         "Torch makes an embedding's gradient as large as its table, mostly zeros. Where the table has "
         "another gradient, of a head that it is tied to, that would be a second matrix of this size beside "
         "it: the rows are added to the first one where it stands.",
         add_rows_of_embeddings),
    Pass("outputs that stay", "simplify",
         "An output that was taken off, and whose values the step computes all the same, is an ordinary one.",
         put_outputs_back, ()),
    Pass("sums of gradients", "simplify",
         "A parameter used in several places has a gradient from each. Autograd adds them itself, in the "
         "same order, and each leaves as soon as it is made.",
         take_sums_apart),
    Pass("layouts of gradients", "simplify",
         "Autograd copies a gradient whose layout is not its parameter's, which no plan would count.",
         layouts_of_gradients, ()),
    Pass("gradients in place", "simplify",
         "Where the caller asks for it, products, convolutions and embeddings add to what stands in `.grad`, "
         "and no gradient of a weight is a tensor of its own.",
         add_gradients_in_place, ()),
    Pass("shared gradients", "simplify",
         "A gradient that is handed to autograd becomes the user's, who may write to it: it shares its "
         "storage with nothing else.",
         own_gradients),
    Pass("chains of views", "simplify",
         "A traced backward looks at values through chains of reshapes and transposes, each a call at "
         "every step, and many undo one another.",
         shorten_views),
    Pass("constants", "simplify",
         "Masks and position ids depend on no trained value. They are computed once in a step, and never "
         "again in the backward; every layer of a transformer asks for the same.",
         find_constants, ()),
    Pass("decisions", "simplify",
         "What a forward chooses by computed numbers (a top-k, an argmax, a mask) may come out otherwise "
         "when an accelerator computes the numbers again: it is computed once and kept.",
         find_decisions, ()),
    Pass("fused groups", "simplify",
         "Between products, convolutions and attention, eager mode reads and writes a tensor for every "
         "operation. Where the caller asks for compiled kernels, neighbouring ones become one computation.",
         fuse, ()),
    Pass("products", "simplify",
         "On a CPU, two libraries multiply matrices of single precision, and which is faster depends on "
         "processor and shapes. Where the caller asks for compiled kernels, each product runs by the faster "
         "one; last bits differ.",
         name_products, ()),
)
"""In the order in which they work."""

EMISSION = (
    Pass("in-place donors", "emission",
         "A trace has no operations in place, and eager mode has them: one that may write its result over "
         "an input that dies there takes a tensor less. Which input dies is the schedule's business.",
         in_place.in_place_ways),
    Pass("alternative kernels", "emission",
         "An operation that works part by part takes longer the smaller its parts are. Larger ones, or "
         "torch's own kernel, may take their place where memory leaves room. A product may be another "
         "library's.",
         alternatives),
    Pass("views as methods", "emission",
         "A kernel may lay its result out otherwise than the trace says, and a view of it then has to "
         "copy: `view` is written as `reshape`, the other everyday views as methods, which are faster "
         "to call.",
         view_method),
)
"""Asked for where calls are chosen and written."""

PASSES = (*REPAIRS, *REWRITINGS, *EMISSION)
"""All of them, in the order in which they work."""
