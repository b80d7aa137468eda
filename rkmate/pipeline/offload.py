"""The target that data may be sent to while a step computes: the user's choice, and the speed of the link."""

from __future__ import annotations

import copy
import os
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from rkmate.budget import parse_budget
from rkmate.device import Device
from rkmate.device.copy_engine import CopyEngine
from rkmate.devices import DISK_BYTES_PER_SECOND, DISK_SECONDS_PER_COPY
from rkmate.errors import ArgumentError
from rkmate.ilp import cache_folder
from rkmate.ir.link import Link
from rkmate.measure.bandwidth import measure_link

HOST = "host"
"""The place that is the host's own memory."""
LEAST_BYTES = 4096
"""Smallest limit of bytes that may be away: less means that a unit was forgotten."""


@dataclass(frozen=True, init=False)
class Offload:
    """A target to which a step may send data, with a limit."""

    place: str
    """``"host"``: the host's memory, for a model on an accelerator; otherwise the absolute path of a folder
    on a disk, for a model on the CPU."""
    most_bytes: int | None
    """Bytes that may be away at once, over all calls of a module (with `apply`, over all its layers) that
    wait for their backward; None: limited by the free space."""
    verify: bool
    """Whether every step compares checksums of the data that comes back, which takes time."""

    def __init__(self, place: str | os.PathLike[str], most_bytes: int | str | None = None,
                 verify: bool = False) -> None:
        """Describe a target.

        `place`: ``"host"``, or a folder; the path may be relative, or begin with ``~``. `most_bytes`: bytes,
        or text such as ``"20GiB"``. Raises `ArgumentError` if either is invalid.
        """
        if not isinstance(place, (str, os.PathLike)) or not (text := str(os.fspath(place))):
            raise ArgumentError(f'offload is {place!r}; it should be a folder on a disk, or "host"')
        if not isinstance(verify, bool):
            raise ArgumentError(f"verify is {verify!r}; it should be True or False")
        path = text if text == HOST else os.path.abspath(os.path.expanduser(text))
        for name, value in (("place", path), ("verify", verify),
                            ("most_bytes", None if most_bytes is None else _bytes(most_bytes))):
            object.__setattr__(self, name, value)

    def part(self, share: int, whole: int) -> Offload:
        """Return the target with a share of its limit, for one of several users of that limit."""
        if self.most_bytes is None or share == whole:
            return self
        found = copy.copy(self)
        object.__setattr__(found, "most_bytes", self.most_bytes * share // whole)
        return found

    def check_folder(self) -> None:
        """Raise `ArgumentError` if the folder does not exist or is not writable."""
        if self.place == HOST:
            return
        if not os.path.isdir(self.place):
            raise ArgumentError(f"offload is {self.place!r}; there is no such folder")
        if not os.access(self.place, os.W_OK | os.X_OK):
            raise ArgumentError(f"offload is {self.place!r}; the folder cannot be written to")

    def check(self, device: Device) -> None:
        """Raise `ArgumentError` if the device cannot send data to this target."""
        if device.elsewhere is None:
            self.check_folder()
            self.engine(device).close()
        elif self.place != HOST:
            raise ArgumentError(f"offload is {self.place!r}, and from a GPU data is sent to the host's "
                                'memory: offload="host"')

    def engine(self, device: Device) -> CopyEngine:
        """Return the engine that copies data from a device to this target and back. Raises `ArgumentError` if
        none can."""
        return device.copy_engine(self.place, self.most_bytes, verify=self.verify)

    def buffer_bytes(self, device: Device) -> int:
        """Return bytes of the device that copying takes in each call that waits for its backward."""
        with closing(self.engine(device)) as engine:
            return engine.buffer_bytes


Place = str | os.PathLike[str] | Offload
"""Target as users write it."""


def offload_of(place: Any, most: Any, before: Offload | None = None) -> Offload | None:
    """Return the target that a user gave as `offload` and `offload_bytes`. `before`: the value for an
    argument that is left out. Raises `ArgumentError` if a value is invalid."""
    found = before if place is None else place if isinstance(place, Offload) else Offload(place)
    if most is None:
        return found
    if found is None:
        raise ArgumentError(f"offload_bytes is {most!r}, and offload does not say where to: give a "
                            'folder, or "host"')
    return replace(found, most_bytes=most)


def _bytes(most: Any) -> int:
    try:
        found = parse_budget(most).bytes
    except ArgumentError:
        found = None
    if found is None or found < LEAST_BYTES:
        unit = "" if found is None else f", {found:,} bytes, which is less than any tensor worth sending"
        raise ArgumentError(f"most_bytes is {most!r}{unit}; it should be bytes (an int), or text such as "
                            '"20GiB"')
    return found


def link_of(offload: Offload | None, device: Device, costs: str, calls: int = 1) -> Link | None:
    """Return the link from a device to the target of its data, for each of `calls` calls of a step. None if
    no data may be sent, or if the limit is too small to be useful. The link is measured if `costs` are, and
    estimated otherwise. Raises `ArgumentError`, and `OffloadError` if the target fails."""
    if offload is None:
        return None
    most = offload.part(1, calls).most_bytes
    if most is not None and most < LEAST_BYTES:
        return None
    if costs != "measured":
        buffers = 0 if device.elsewhere is not None else offload.buffer_bytes(device)
        link = stated_link(offload, device, buffers)
    else:
        with closing(offload.engine(device)) as engine:
            link = measure_link(device, engine, cache_folder())
    return replace(link, most_bytes=most)


def stated_link(offload: Offload, device: Device, buffer_bytes: int) -> Link:
    """Return a link by published rates, or by those of an ordinary disk, without measuring."""
    speed, each = DISK_BYTES_PER_SECOND, DISK_SECONDS_PER_COPY
    if offload.place == HOST:
        speed, each = device.rates.host_bytes_per_second, device.rates.seconds_per_call
    return Link(speed, speed, each, buffer_bytes, offload.most_bytes, offload.place)


def note_of(link: Link | None, costs: str) -> str:
    """Return a plan's note about a link that was not measured; empty if it was, or if there is none."""
    if link is None or costs == "measured":
        return ""
    where = "the host's memory" if link.place == HOST else link.place
    return (f"that data goes to {where} and back at {link.out_bytes_per_second / 1e9:.3g} GB/s each way is "
            "an estimate")
