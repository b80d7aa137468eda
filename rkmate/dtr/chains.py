"""Programs of the paper's section 3: linear chains, and the adversary's network."""

from __future__ import annotations

from rkmate.dtr.log import Compute, LoggedOperation, Program, Release, Retain
from rkmate.errors import ArgumentError


def linear_chain(length: int) -> Program:
    """A forward and backward pass through ``length`` operations of unit time and size.

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
    return Program(
        steps=steps,
        names=names,
        storages=list(range(count)),
        memory=length,
        compute=count,
        constant_memory=0,
        operations=count,
    )
