"""The chain that the dynamic program works on: blocks, their options, and the cuts between them.

Rockmate (ICML 2023), section 3.4 and appendix C.1. Sizes are bytes, times are seconds. A cut is a
*set* of tensors, so every directed acyclic graph becomes a chain: keeping cut i while cut s is kept
costs the bytes of ``cuts[i] - cuts[s]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rkmate.errors import GraphError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class ForwardPlain(NamedTuple):
    """Run a block's forward and keep nothing but its outputs (the paper's F^0)."""

    block: int
    save_index: int | None = None
    """Index in `Block.partial_saves` of the save that is in memory already; None: none. So in the operations
    below."""


class ForwardSaving(NamedTuple):
    """Run a block's forward, and keep its outputs together with data that makes later runs cheaper."""

    block: int
    save_index: int
    """Index in `Block.partial_saves` of the save that stays until the block's backward."""


class Forward(NamedTuple):
    """Run a block's forward with one of its options: what its backward needs stays (F^o)."""

    block: int
    option: int
    save_index: int | None = None


class Backward(NamedTuple):
    """Run a block's backward with the option that its last forward used (B^o)."""

    block: int
    option: int
    save_index: int | None = None


Op = ForwardPlain | ForwardSaving | Forward | Backward


@dataclass(frozen=True)
class Option:
    """A way to run a block: a solution of the block's own problem."""

    forward: tuple[int, ...]
    """Local C nodes that run in the forward, in order."""
    backward: tuple[int, ...]
    """Local C nodes that run in the backward (recomputations too), in order."""
    forward_seconds: float
    backward_seconds: float
    saved_bytes: int
    """Kept between forward and backward, without the block's outputs (the next cut) and without
    its input cut."""
    forward_peak_bytes: int
    """Most bytes during the forward, outputs and temporaries included, input cut left out."""
    backward_peak_bytes: int
    """Most bytes during the backward: kept data, outputs that are still needed, gradients of
    outputs and inputs; input cut left out, `Block.passing_bytes` left out."""


@dataclass(frozen=True)
class PartialSave:
    """Data that may stay from a block's first forward on, and how later runs use it.

    Rockmate, section 3.4, names what is lost without it (its second sub-optimality): forwards that
    run several times save nothing for one another.
    """

    bytes: int
    """Bytes that stay; not counted in the bytes below, except in `first_peak_bytes`."""
    forward: tuple[int, ...]
    """Local C nodes of a plain forward that finds it in memory."""
    forward_seconds: float
    forward_peak_bytes: int
    first_peak_bytes: int
    """Most bytes during the forward that it stays of, input cut left out."""
    options: tuple[Option, ...]
    """Options of a forward and a backward that find the save in memory."""


@dataclass(frozen=True)
class Block:
    """A block of the chain."""

    forward_seconds: float
    """Time of the plain forward, which saves nothing."""
    forward_peak_bytes: int
    """Most bytes during the plain forward, outputs included, input cut left out."""
    options: tuple[Option, ...]
    passing_bytes: int = 0
    """Gradients that are alive during the block's backward, but that it neither reads nor writes
    (those of tensors that pass by the block); they are no part of an option's peaks."""
    partial_saves: tuple[PartialSave, ...] = ()
    """Data that may stay from the block. All blocks of a chain have the same number of saves; those of one
    index are used together."""

    def with_partial_save(self, index: int | None) -> Block:
        """Return the block where one of its partial saves is in memory."""
        if index is None:
            return self
        k = self.partial_saves[index]
        return Block(k.forward_seconds, k.forward_peak_bytes, k.options, self.passing_bytes)


@dataclass(frozen=True)
class Chain:
    """Blocks 0 .. L-1 and the L+1 cuts around them."""

    blocks: tuple[Block, ...]
    cuts: tuple[frozenset[int], ...]
    """``cuts[i]`` is the input of block i, ``cuts[L]`` the model's outputs. A tensor's cuts are
    consecutive; otherwise the memory is overestimated, never underestimated."""
    sizes: Mapping[int, int]
    """Bytes of each tensor of a cut; 0 for what somebody else holds (inputs, `pinned` outputs)."""
    grads: tuple[int, ...]
    """Bytes of the gradients alive between the backward of block i and that of block i-1;
    ``grads[L]``: of the outputs, there from the loss on."""
    pinned: tuple[int, ...] = ()
    """For each block: bytes that the user holds once its first forward has run, cumulative over the blocks so
    far, to the end (outputs of the model). Counted here and nowhere else."""
    grads_at_start: int = 0
    """The part of ``grads[L]`` that is there during the first forward already."""

    def __len__(self) -> int:
        return len(self.blocks)

    def verify(self) -> Chain:
        """Check lengths and signs; returns the chain itself. Raises `GraphError`."""
        n = len(self.blocks)
        if not n:
            raise GraphError("the chain has no block")
        if len(self.cuts) != n + 1 or len(self.grads) != n + 1:
            raise GraphError(f"a chain of {n} blocks needs {n + 1} cuts and gradient sizes, got "
                             f"{len(self.cuts)} and {len(self.grads)}")
        if self.pinned and (len(self.pinned) != n or list(self.pinned) != sorted(self.pinned)):
            raise GraphError("`pinned` must be cumulative: one non-decreasing number per block")
        for i, cut in enumerate(self.cuts):
            for j in cut:
                if self.sizes.get(j, -1) < 0:
                    raise GraphError(f"tensor {j} of cut {i} has no size")
        if min(self.grads) < 0 or min((0, *self.pinned)) < 0:
            raise GraphError("a size of the chain is negative")
        for i, block in enumerate(self.blocks):
            if not block.options:
                raise GraphError(f"block {i} has no option")
            saves = block.partial_saves
            if len(saves) != len(self.blocks[0].partial_saves) or not all(k.options for k in saves):
                raise GraphError(f"block {i} has not as many partial saves as block 0, or one without "
                                 "options")
            numbers = [block.forward_seconds, block.forward_peak_bytes, block.passing_bytes]
            for k in block.partial_saves:
                numbers += [k.bytes, k.forward_seconds, k.forward_peak_bytes, k.first_peak_bytes]
            for o in (*block.options, *(o for k in block.partial_saves for o in k.options)):
                numbers += [o.forward_seconds, o.backward_seconds, o.saved_bytes,
                            o.forward_peak_bytes, o.backward_peak_bytes]
            if not min(numbers) >= 0:
                raise GraphError(f"a size or time of block {i} is negative")
        return self

    @cached_property
    def held_by(self) -> Ints:
        """`pinned`, zeros where it is empty."""
        return np.array(self.pinned or (0,) * len(self.blocks), dtype=np.int64)

    @cached_property
    def between(self) -> Ints:
        """``between[s, i]``: bytes of ``cuts[i] - cuts[s]`` for s < i, 0 elsewhere."""
        n = len(self.cuts)
        result = np.zeros((n, n), dtype=np.int64)
        for s, base in enumerate(self.cuts):
            for i in range(s + 1, n):
                result[s, i] = sum(self.sizes[j] for j in self.cuts[i] - base)
        return result

    @cached_property
    def input_bytes(self) -> int:
        """Bytes of the first cut, which stays from start to end."""
        return sum(self.sizes[j] for j in self.cuts[0])

    def seconds(self, op: Op) -> float:
        """Time of one operation."""
        if isinstance(op, ForwardSaving):
            return self.blocks[op.block].forward_seconds
        block = self.blocks[op.block].with_partial_save(op.save_index)
        if isinstance(op, ForwardPlain):
            return block.forward_seconds
        option = block.options[op.option]
        return option.forward_seconds if isinstance(op, Forward) else option.backward_seconds

    def nodes(self, op: Op) -> tuple[int, ...] | None:
        """Return the local C nodes that an operation runs, in order; None: the block's whole forward."""
        if isinstance(op, ForwardSaving):
            return None
        block = self.blocks[op.block]
        if isinstance(op, ForwardPlain):
            return None if op.save_index is None else block.partial_saves[op.save_index].forward
        option = block.with_partial_save(op.save_index).options[op.option]
        return option.forward if isinstance(op, Forward) else option.backward

    def with_partial_saves(self, index: int) -> Chain:
        """Return the chain where the partial save of one index of each block is in memory."""
        return replace(self, blocks=tuple(b.with_partial_save(index) for b in self.blocks))
