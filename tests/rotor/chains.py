"""Random chains, and an exhaustive search that knows nothing of the dynamic program."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from hypothesis import strategies as st

from rkmate.ir.chain import Backward, Block, Chain, Forward, ForwardPlain, Op, Option

small = st.integers(0, 4)


@st.composite
def options(draw: st.DrawFn) -> Option:
    return Option((), (), draw(st.integers(0, 3)), draw(small), draw(small), draw(st.integers(0, 8)),
                  draw(st.integers(0, 10)))


@st.composite
def chains(draw: st.DrawFn, longest: int = 4) -> Chain:
    """Chains whose cuts are sets: tensors may pass by blocks."""
    n = draw(st.integers(1, longest))
    blocks = tuple(
        Block(draw(st.integers(0, 3)), draw(st.integers(0, 8)),
              tuple(draw(st.lists(options(), min_size=1, max_size=2))), draw(st.integers(0, 2)))
        for _ in range(n))
    cuts: list[set[int]] = [set() for _ in range(n + 1)]
    sizes = {}
    for tensor in range(draw(st.integers(n, n + 3))):
        first = draw(st.integers(0, n))
        for i in range(first, draw(st.integers(first, n)) + 1):
            cuts[i].add(tensor)
        sizes[tensor] = draw(small)
    grads = tuple(draw(small) for _ in range(n + 1))
    pinned = sorted(draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
    return Chain(blocks, tuple(map(frozenset, cuts)), sizes, grads,
                 tuple(pinned) if draw(st.booleans()) else (),
                 draw(st.integers(0, 2))).verify()


State = tuple[int, frozenset[int], int | None, tuple[tuple[int, int], ...]]


def best_time(chain: Chain, budget: int, *, keep: bool = True) -> float | None:
    """Least time of all persistent sequences within a budget, by search over memory states.

    A state: the next backward, the cuts that stay until their backward, the cut that was just
    made and need not stay, and the saved options. `keep`: an option may stay while other blocks run.
    """
    n = len(chain)
    start: State = (n - 1, frozenset({0}), None, ())
    queue: list[tuple[float, int, State]] = [(0.0, 0, start)]
    done: set[State] = set()
    ticket = 0
    while queue:
        time, _, state = heapq.heappop(queue)
        if state[0] < 0:
            return time
        if state in done:
            continue
        done.add(state)
        for op, after, used in _moves(chain, state):
            if not keep and isinstance(op, Forward) and op.block != state[0]:
                continue
            if used <= budget and after not in done:
                ticket += 1
                heapq.heappush(queue, (time + chain.seconds(op), ticket, after))
    return None


def _moves(chain: Chain, state: State) -> Iterator[tuple[Op, State, int]]:
    waiting, kept, live, saved = state
    n = len(chain)
    options = dict(saved)
    loss = waiting < n - 1
    bytes_saved = sum(chain.blocks[b].options[o].saved_bytes for b, o in saved)

    def alive(cuts: set[int]) -> int:
        return sum(chain.sizes[j] for j in set().union(*(chain.cuts[i] for i in cuts)))

    if waiting in options and waiting in kept:
        o = options[waiting]
        option = chain.blocks[waiting].options[o]
        after = {b: k for b, k in saved if b != waiting}
        others = (alive(set(kept) - {waiting + 1}) + bytes_saved - option.saved_bytes
                  + int(chain.held_by[-1]))
        used = others + option.backward_peak_bytes + chain.blocks[waiting].passing_bytes
        if not loss:
            used = max(used, alive(set(kept) | {n}) + bytes_saved + int(chain.held_by[-1])
                       + chain.grads[-1])
        # The input cut goes too, unless the block before saved an option: it may read its outputs.
        stay = kept - {waiting + 1} - (set() if waiting - 1 in options or not waiting else {waiting})
        yield Backward(waiting, o), (waiting - 1, stay, None, tuple(sorted(after.items()))), used
    # As in the paper's proof, nothing below a kept cut runs before that cut's own backward.
    b = max(set(kept) | ({live} if live is not None else set()))
    if b <= waiting and b not in options:
        block = chain.blocks[b]
        # Held bytes grow when a block runs for the first time; sequences without the block before
        # the loss do not exist, so the furthest block so far is b or beyond.
        reached = max([b, *(k - 1 for k in kept)])
        around = (int(chain.held_by[-1]) + chain.grads[waiting + 1] if loss
                  else int(chain.held_by[reached]) + chain.grads_at_start)
        used = alive((set(kept) | {b}) - {b + 1}) + bytes_saved + around
        for stay in ({kept, kept | {b}}):
            yield (ForwardPlain(b), (waiting, frozenset(stay), b + 1, saved),
                   used + block.forward_peak_bytes)
        for k, option in enumerate(block.options):
            after = {**options, b: k}
            stay = kept | {b} | ({b + 1} if b < waiting else set())
            yield (Forward(b, k),
                   (waiting, frozenset(stay), None, tuple(sorted(after.items()))),
                   used + option.forward_peak_bytes)
