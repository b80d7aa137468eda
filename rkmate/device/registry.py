"""Find the device of a tensor, or the device with a name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from rkmate.device.cpu import Cpu
from rkmate.device.cuda import Cuda
from rkmate.device.protocol import Device
from rkmate.errors import ArgumentError

_PRESENT: dict[str, Callable[[torch.device], Device]] = {"cpu": Cpu, "cuda": Cuda}
_KINDS = dict(_PRESENT)
_made: dict[torch.device, Device] = {}


def of(where: torch.device | torch.Tensor | str) -> Device:
    """Return the device of a tensor, or with a name.

    Raises:
        ArgumentError: rkmate has no implementation for devices of this kind, or it is ``meta``.
    """
    device = where.device if isinstance(where, torch.Tensor) else where
    if isinstance(device, str):
        try:
            device = torch.device(device)
        except RuntimeError as error:
            raise ArgumentError(f"device is {device!r}; it should be one of {_kinds()}") from error
    found = _made.get(device)
    return _make(device) if found is None else found


def _make(device: torch.device) -> Device:
    if device.type == "meta":
        raise ArgumentError("the device is meta, which has no memory and computes nothing: give the model "
                            "memory first (model.to_empty), or plan for a GPU that this machine need not "
                            "have (rkmate.plan(..., device=rkmate.devices.H100))")
    if device.type not in _KINDS:
        raise ArgumentError(f"the device is {device}, and rkmate works on {_kinds()} only: move the model "
                            "and its inputs there")
    made = _made[device] = _KINDS[device.type](device)
    return made


def _kinds() -> str:
    return " and ".join(_KINDS)


def common(tensors: Iterable[torch.Tensor]) -> Device:
    """Return the one device that a computation over tensors is planned for: an accelerator, if some tensors
    are on one (scalars and tables may stay on the CPU), else the CPU.

    Raises:
        ArgumentError: as `of`; or the tensors are on several accelerators.
    """
    devices = {t.device: of(t) for t in tensors}
    accelerators = [d for d in devices.values() if not d.host]
    if len(accelerators) > 1:
        raise ArgumentError(f"the model and its inputs are on several devices: "
                            f"{', '.join(sorted(map(str, devices)))}; a plan is for one device: move "
                            "them to one, or plan the parts on each (rkmate.apply(part, budget=...))")
    return next(iter(accelerators or devices.values()), of("cpu"))


def in_use() -> tuple[Device, ...]:
    """Return the CPU, and every accelerator that the process may have used."""
    return of("cpu"), *map(of, Cuda.initialized())


def accelerators() -> dict[str, Device]:
    """Return every accelerator that torch sees here, by its name and its hardware's."""
    return {f"{where}: {name}": of(where) for where, name in Cuda.present().items()}


def autocast_kinds(devices: Iterable[torch.device]) -> frozenset[str]:
    """Return the names that `torch.autocast` uses for devices, including devices without an
    implementation."""
    return frozenset(d.type for d in devices)


def all_present() -> bool:
    """Return whether no other device stands in for one of this machine (`standing_in`)."""
    return _KINDS == _PRESENT


@contextmanager
def standing_in(kind: str, device: Device) -> Iterator[None]:
    """Let tensors of this kind of device count as being on `device`, inside the context and in the whole
    process."""
    before = _KINDS[kind]
    _made.clear()
    _KINDS[kind] = lambda _: device
    try:
        yield
    finally:
        _KINDS[kind] = before
        _made.clear()
