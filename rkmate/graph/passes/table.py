"""The table of the rewrites of the joint graph, in the order of their work, and the simplification (Rockmate,
appendix A.3), which runs them on a copy of the captured graph.

`graph.capture.repairs` has the earlier passes, and the types of all passes.
"""

from __future__ import annotations

from collections.abc import Sequence

from rkmate.graph.capture.captured import Capture
from rkmate.graph.capture.repairs import Rewrite
from rkmate.graph.passes.cleanup import (
    drop_copies,
    drop_copies_of_outputs,
    drop_dead,
    read_what_was_written,
    shorten_views,
    write_to_parts_of_parts,
)
from rkmate.graph.passes.fusion import fuse
from rkmate.graph.passes.gradients import (
    add_gradients_in_place,
    add_rows_of_embeddings,
    drop_unwanted_gradients,
    own_gradients,
    take_sums_apart,
)
from rkmate.graph.passes.images import channels_last, layouts_of_gradients, multiply_pixels
from rkmate.graph.passes.joint import Joint, joint_of
from rkmate.graph.passes.lean import drop_unread_statistics, split_wide, storages_of_their_own
from rkmate.graph.passes.once import (
    find_constants,
    find_decisions,
    hand_hints_on,
    protect_overwritten,
    take_counters_off,
    wait_at_once,
)
from rkmate.graph.passes.outputs import put_outputs_back, take_outputs_off
from rkmate.graph.passes.tiles.heads import tile_heads
from rkmate.graph.passes.tiles.recurrent import segment_recurrent
from rkmate.graph.passes.tiles.stretches import tile_stretches
from rkmate.graph.passes.verify import Verifier

REWRITES: tuple[Rewrite[Joint], ...] = (
    Rewrite("hints",
            "`rkmate.keep(x)` and `rkmate.recompute(x)` leave an alias with a wish in the trace. From here "
            "on, the value carries the wish.",
            hand_hints_on),
    Rewrite("collectives and their waits",
            "A collective and its wait become one operation, so that no schedule frees a buffer while other "
            "ranks use it. It runs once in a step, and in the order of the trace.",
            wait_at_once),
    Rewrite("dead code",
            "A trace keeps assertions on metadata, which hold for every call of the same signature, and "
            "values that only these assertions read.",
            drop_dead),
    Rewrite("unwanted gradients",
            "The trace has a gradient for every output. Autograd computes none for an output that the loss "
            "does not depend on.",
            drop_unwanted_gradients),
    Rewrite("copies of outputs",
            "The capture copies each output, so that no output is an alias of an input or of another "
            "output. The planned step returns the value itself.",
            drop_copies_of_outputs),
    Rewrite("copies",
            "Aliases, and copies with their input's layout, would each cost a tensor and a call.",
            drop_copies),
    Rewrite("written parts",
            "Kernels that work tile by tile write and read parts of one buffer. In a trace, each write "
            "would copy the whole buffer.",
            read_what_was_written),
    Rewrite("parts of parts",
            "In a trace, `x[:, t, :2] += y` writes to a copy of a part, and this to a copy of the whole. "
            "Torch copies a part with its strides, which may take as many bytes as the whole.",
            write_to_parts_of_parts),
    Rewrite("tiles",
            "One layer often sets the smallest budget. If a budget needs it, stretches of operations run a "
            "few images of a batch, bands of an image, blocks of a sequence or columns of weights at a time; "
            "last bits differ.",
            tile_stretches),
    Rewrite("segments of recurrent layers",
            "A fused recurrent layer keeps several values of its width for each step of a sequence. If a "
            "budget needs it, it runs one segment of the sequence at a time, with the state carried; last "
            "bits of its weights' gradients differ.",
            segment_recurrent),
    Rewrite("channels last",
            "Convolutions, batch norms and poolings may have faster kernels for images with channels last. "
            "On request, networks of convolutions use this layout. Last bits differ, because other kernels "
            "compute.",
            channels_last),
    Rewrite("products of pixels",
            "An image with channels last is a matrix of pixels by channels, and a convolution of 1 x 1 is a "
            "product with it. Kernels for windows copy such images, or fill gradients with zeros first.",
            multiply_pixels, when=("channels-last",)),
    Rewrite("unread statistics",
            "In training mode, a batch norm's gradient takes the updated running statistics but does not "
            "read them. Held until the backward, they would be memory that eager mode does not need.",
            drop_unread_statistics),
    Rewrite("overwritten values",
            "The forward overwrites a buffer or an input at its end. Operations that need the old value "
            "later, above all a second run in the backward, read a copy.",
            protect_overwritten),
    Rewrite("counters",
            "Each batch norm counts its batches in a buffer of its own: an operation and a kernel for each. "
            "Counters that nothing reads are increased after the forward, in one call.",
            take_counters_off),
    Rewrite("reduced losses",
            "Torch's kernels of some losses (`mse_loss`, `smooth_l1_loss`, `binary_cross_entropy`, "
            "`soft_margin_loss`) return a number in a storage as large as their input, `F.fold` images "
            "in one as large as its columns, and a transposed convolution of volumes a result in one as "
            "large as its input: memory that no plan counts.",
            storages_of_their_own),
    Rewrite("chunked kernels",
            "Torch's gradients of a wide cross entropy and of a wide batch norm allocate two or three "
            "tensors of that size. The package's operators have the same bits, and overwrite one.",
            split_wide),
    Rewrite("deferred outputs",
            "A caller holds the logits that are returned together with the loss, and most callers never "
            "read them. If the loss does not need the whole logits, the step keeps the values that they are "
            "computed from instead.",
            take_outputs_off, when=("deferred-outputs",)),
    Rewrite("chunked loss",
            "The logits of a language model are often its largest tensors. If a budget needs it, a wide "
            "product, its losses and their gradients are computed a few rows at a time; the last bits of "
            "the weight's gradient differ. Rows that a loss takes one by one and stacks are computed at once "
            "first.",
            tile_heads),
    Rewrite("rows of embeddings",
            "Torch makes an embedding's gradient as large as its table, mostly zeros. If the table has "
            "another gradient (of a head that it is tied to), this would be a second matrix of that size: "
            "instead, the rows are added to the first one in place.",
            add_rows_of_embeddings, unless=("in-place",)),
    Rewrite("outputs that stay",
            "An output that was removed, but whose values the step computes anyway, becomes an ordinary "
            "output again.",
            put_outputs_back, when=("deferred-outputs",)),
    Rewrite("sums of gradients",
            "A parameter that is used in several places has a gradient from each. Autograd adds them "
            "itself, in the same order, and each gradient leaves as soon as it is made.",
            take_sums_apart),
    Rewrite("layouts of gradients",
            "Autograd copies a gradient whose layout differs from its parameter's, and no plan would count "
            "this copy.",
            layouts_of_gradients, when=("channels-last",), unless=("in-place",)),
    Rewrite("gradients in place",
            "On request, products, convolutions and embeddings add to the existing `.grad`, and no gradient "
            "of a weight is a separate tensor.",
            add_gradients_in_place, when=("in-place",)),
    Rewrite("shared gradients",
            "A gradient that autograd receives belongs to the user, who may write to it. It therefore "
            "shares its storage with no other value.",
            own_gradients),
    Rewrite("chains of views",
            "A traced backward looks at values through chains of reshapes and transposes. Each is a call in "
            "every step, and many undo one another.",
            shorten_views),
    Rewrite("constants",
            "Masks and position ids depend on no trained value. They are computed once in a step, and never "
            "again in the backward; all layers of a transformer need the same ones.",
            find_constants),
    Rewrite("decisions",
            "What a forward chooses by computed numbers (a top-k, an argmax, a mask) may change when an "
            "accelerator computes the numbers again. Therefore the choice is computed once and kept.",
            find_decisions),
    Rewrite("fused groups",
            "Between products, convolutions and attention, eager mode reads and writes a tensor for every "
            "operation. If compiled kernels are requested, neighbouring operations become one computation, "
            "unless the budget holds no schedule with them.",
            fuse, when=("compiled",)),
)
"""All rewrites, in the order in which they run."""


# -- Simplification --------------------------------------------------------------------------------

VERIFY = False
"""Whether `simplify` verifies the graph after each pass, unless its caller says so. The tests set it; a
graph that breaks an invariant is a bug of a pass, and nothing that a user could do."""


def simplify(capture: Capture, wanted: tuple[bool, ...], choices: frozenset[str] = frozenset(), *,
             verify: bool | None = None) -> Joint:
    """Return the graph that is planned.

    `wanted`: per output, whether its gradient will come. `choices`: as of `Joint`. `verify`: whether to check
    the graph after each pass (None: as `VERIFY` says); raises `GraphError` that names the pass.
    """
    joint = joint_of(capture, wanted, choices)
    rewrite(joint, REWRITES, verify=VERIFY if verify is None else verify)
    return joint


def rewrite(joint: Joint, passes: Sequence[Rewrite[Joint]], *, verify: bool = False) -> None:
    """Run those of some passes that apply to the graph, in order. Raises `GraphError` when asked to
    `verify`."""
    verifier = Verifier(joint) if verify else None
    for each in passes:
        if each.applies(joint.choices):
            each.run(joint)
            drop_dead(joint)
            if verifier is not None:
                verifier.check(joint, each.name)
