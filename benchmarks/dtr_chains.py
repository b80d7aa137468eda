"""Programs of the paper's section 3: linear chains, and the adversary's network."""

from __future__ import annotations

from dataclasses import dataclass

from rkmate.dtr.heuristics import make_heuristic
from rkmate.dtr.log import CONSTANT, Compute, LoggedOperation, Program, Release, Retain
from rkmate.dtr.simulator import Replay
from rkmate.errors import ArgumentError


def linear_chain(length: int) -> Program:
    """Make a forward and backward pass through ``length`` operations of unit time and size.

    As in appendix A.1: the gradient of operation i reads the output of operation i - 1 and the
    gradient of operation i + 1; the input stays in memory and weighs nothing. Each output is
    released at its last use, and each gradient when the next one has read it.
    """
    if length < 2:
        raise ArgumentError(f"length must be at least 2, and is {length}")
    steps: list[Compute | Retain | Release] = []
    names: list[str] = []

    def compute(name: str, *arguments: int) -> int:
        tensor = len(names)
        names.append(name)
        operation = LoggedOperation(name, arguments, (tensor,), (1,), (-1,), 1)
        steps.append(Compute(operation))
        return tensor

    forward = [compute("t1")]
    for step in range(2, length + 1):
        forward.append(compute(f"t{step}", forward[-1]))
    steps.append(Release(forward[-1]))
    gradient = compute(f"g{length}", forward[-2])
    for step in range(length - 1, 0, -1):
        before = (forward[step - 2],) if step > 1 else ()
        following = compute(f"g{step}", *before, gradient)
        steps += [Release(gradient), Release(forward[step - 1])]
        gradient = following
    steps.append(Retain(gradient, pin=True))
    count = len(names)
    return Program(steps, names, list(range(count)), memory=length, compute=count, constant_memory=0,
                   operations=count)


@dataclass(frozen=True)
class Duel:
    """An adversary's network against a heuristic."""

    nodes: int
    """Tensors of the network, its root left out: what a static schedule computes once each."""
    operations: int
    """Operations that the heuristic needed."""
    paths: tuple[int, ...]
    """Length of each path from the root."""


def adversary(heuristic: str, paths: int, nodes: int) -> Duel:
    """Grow theorem 3.2's network against ``heuristic``, under a budget of ``paths`` tensors.

    A root that stays in memory has ``paths`` paths below it, so that one of them always has no
    tensor in memory; the next node goes to the end of such a path, the longest one (appendix B).
    Every tensor has unit size and time.
    """
    if paths < 2 or nodes < paths:
        raise ArgumentError("paths must be at least 2, and nodes at least as many")
    names = [str(number) for number in range(nodes + 1)]
    program = Program([], names, list(range(nodes + 1)), nodes + 1, nodes, 1, nodes)
    replay = Replay(program, make_heuristic(heuristic), paths, float("inf"), None)
    replay.first(LoggedOperation(CONSTANT, (), (0,), (1,), (-1,), 0))
    replay.pin(0)
    ends: list[list[int]] = []
    for number in range(1, nodes + 1):
        if number <= paths:
            path: list[int] = [0]
            ends.append(path)
        else:
            free = [p for p in ends if not any(replay.resident(tensor) for tensor in p[1:])]
            path = max(free, key=len)
        replay.first(LoggedOperation("f", (path[-1],), (number,), (1,), (-1,), 1))
        path.append(number)
    result = replay.result("ok")
    operations = result.model_compute + result.remat_compute
    return Duel(nodes, operations, tuple(len(path) - 1 for path in ends))
