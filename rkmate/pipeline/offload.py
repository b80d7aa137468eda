"""Where data may be sent while a step computes: what a user says of it, and how fast the way there is."""

from __future__ import annotations

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


@dataclass(frozen=True)
class Offload:
    """A place to which a step may send data, and how much of it."""

    place: str
    """``"host"``: the host's memory, for a model on an accelerator; else a folder on a disk."""
    most_bytes: int | None = None
    """That may be away at once; None: as many as there is room for."""
    verify: bool = False
    """Whether what comes back must have the checksum of what went, which takes time."""

    def check_folder(self) -> None:
        """Raise `ArgumentError` for a folder that is not there, or that cannot be written."""
        if self.place == HOST:
            return
        if not os.path.isdir(self.place):
            raise ArgumentError(f"offload is {self.place!r}; there is no such folder")
        if not os.access(self.place, os.W_OK | os.X_OK):
            raise ArgumentError(f"offload is {self.place!r}; the folder cannot be written to")

    def check(self, device: Device) -> None:
        """Raise `ArgumentError` where nothing can be sent there from a device; nobody knows of one that is
        not here."""
        if device.elsewhere is None:
            self.check_folder()
            self.engine(device).close()

    def engine(self, device: Device) -> CopyEngine:
        """What copies data from a device there, and back. Raises `ArgumentError` where nothing can."""
        return device.copy_engine(self.place, self.most_bytes, verify=self.verify)

    def buffer_bytes(self, device: Device) -> int:
        """Bytes of the device that copying takes in each step."""
        with closing(self.engine(device)) as engine:
            return engine.buffer_bytes


def offload_of(place: Any, most: Any) -> Offload | None:
    """What a user gave as `offload` and `offload_bytes`. Raises `ArgumentError` for what is neither."""
    if place is None:
        if most is not None:
            raise ArgumentError(f"offload_bytes is {most!r}, and offload does not say where to: give a "
                                'folder, or "host"')
        return None
    size = None if most is None else _bytes(most)
    if isinstance(place, Offload):
        return place if size is None else replace(place, most_bytes=size)
    if not isinstance(place, (str, os.PathLike)) or not os.fspath(place):
        raise ArgumentError(f'offload is {place!r}; it should be a folder on a disk, or "host"')
    text = str(os.fspath(place))
    return Offload(text if text == HOST else os.path.abspath(os.path.expanduser(text)), size)


def _bytes(most: Any) -> int:
    try:
        found = parse_budget(most).bytes
    except ArgumentError:
        found = None
    if found is None:
        raise ArgumentError(f"offload_bytes is {most!r}; it should be bytes (an int), or text such as "
                            '"20GiB"')
    return found


def link_of(offload: Offload | None, device: Device, costs: str) -> Link | None:
    """The way from a device to where its data may be sent; None where it may not. It is measured where
    `costs` are, and stated otherwise. Raises `ArgumentError`, and `OffloadError` where the place fails."""
    if offload is None:
        return None
    if costs != "measured":
        buffers = 0 if device.elsewhere is not None else offload.buffer_bytes(device)
        return stated_link(offload, device, buffers)
    with closing(offload.engine(device)) as engine:
        return measure_link(device, engine, cache_folder())


def stated_link(offload: Offload, device: Device, buffer_bytes: int) -> Link:
    """The same without measuring: by published rates, or those of an ordinary disk."""
    speed, each = DISK_BYTES_PER_SECOND, DISK_SECONDS_PER_COPY
    if offload.place == HOST:
        speed, each = device.rates.host_bytes_per_second, device.rates.seconds_per_call
    return Link(speed, speed, each, buffer_bytes, offload.most_bytes, offload.place)


def note_of(link: Link | None, costs: str) -> str:
    """What a plan says of a way that was not measured; empty where it was, or there is none."""
    if link is None or costs == "measured":
        return ""
    where = "the host's memory" if link.place == HOST else link.place
    return (f"that data goes to {where} and back at {link.out_bytes_per_second / 1e9:.3g} GB/s each way is "
            "an estimate")
