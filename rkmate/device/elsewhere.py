"""A GPU of another machine, over tensors of this one: code that plans for that GPU asks this class.

Nothing runs on it, so nothing can be measured. It stands for devices of the kind that the model is on, as
`FakeDevice` does in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NoReturn, TypeVar

import torch

from rkmate.device.cuda import Cuda
from rkmate.device.protocol import MemoryState
from rkmate.device.registry import standing_in
from rkmate.devices import GPU, Rates
from rkmate.errors import ArgumentError
from rkmate.ir.simulate import Peak
from rkmate.offload.protocol import CopyEngine, StepCopies

T = TypeVar("T")


class Elsewhere(Cuda):
    """A GPU of another machine, known by its published figures."""

    def __init__(self, gpu: GPU, taken: int = 0) -> None:
        """`taken`: bytes of the GPU's memory that parameters, buffers and gradients take."""
        super().__init__(torch.device("cuda", 0))
        self.gpu = self.elsewhere = gpu
        self._taken = taken

    @property
    def rates(self) -> Rates:
        return self.gpu.expected

    def available(self) -> bool:
        return False

    def key(self) -> str:
        return f"elsewhere {self.gpu.name}"

    def memory(self) -> MemoryState:
        return MemoryState(max(0, self.gpu.memory_bytes - self._taken), self.gpu.memory_bytes, 0)

    def measure_peak(self, fn: Callable[[], T], *, timeline: bool = False) -> Peak[T]:
        self._refuse()

    def parts_meter(self) -> NoReturn:
        self._refuse()

    def timed(self, call: Callable[[], T]) -> tuple[float, T]:
        self._refuse()

    def synchronize(self) -> None:
        """Do nothing: nothing runs there."""

    def generator(self) -> torch.Generator:
        return torch.default_generator

    def copy_engine(self, place: str, most_bytes: int | None = None, *, verify: bool = False) -> CopyEngine:
        self._refuse()

    def ends_of(self, call: StepCopies, begin: Callable[[], object], out: Sequence[str], back: Sequence[str],
                compute: Callable[[], object]) -> tuple[float, float]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ArgumentError(f"nothing can be measured on {self.gpu.name}, a GPU of another machine: leave "
                            "out costs=")


@contextmanager
def planning_for(gpu: GPU, places: Collection[torch.device], taken: int = 0) -> Iterator[None]:
    """Plan for a GPU of another machine inside the context. In the whole process, tensors on the model's
    device (the CPU by default) or on CUDA then count as being on that GPU. Raises `ArgumentError`."""
    kinds = {place.type for place in places} or {"cpu"}
    if len(kinds) > 1 or not kinds <= {"cpu", "cuda"}:
        raise ArgumentError(f"device is {gpu.name}: to plan for it, the model must be on the CPU, on the "
                            f"meta device or on CUDA, and it is on {' and '.join(sorted(kinds))}")
    device = Elsewhere(gpu, taken)
    with ExitStack() as stack:
        for kind in sorted({*kinds, "cuda"}):
            stack.enter_context(standing_in(kind, device))
        yield
