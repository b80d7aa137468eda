"""Published figures of GPUs, to plan for a GPU of another machine.

``rkmate.plan(model, args, budget=0.5, device=rkmate.devices.H100)``. Rates are those of the makers' data
sheets, for dense products; memory is what torch reports of the device, which is a little less than what is
on its label. A device that is not here can be written down: `GPU` takes the same figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from rkmate.errors import ArgumentError

GIB = 2**30
_TERA = 1e12
_PCIE = {3: 15.75e9, 4: 31.5e9, 5: 63e9}
"""Bytes per second each way of sixteen lanes, by generation."""
_NVLINK = {2: 150e9, 3: 300e9, 4: 450e9}
"""Bytes per second each way of all links of a GPU, by generation."""
_INFINIBAND = {"EDR": 12.5e9, "HDR": 25e9, "NDR": 50e9}
"""Bytes per second each way of an adapter, by its kind."""
DISK_BYTES_PER_SECOND = 1e9
"""Rate of an ordinary disk in each direction while it copies in both, if it is not measured."""
DISK_SECONDS_PER_COPY = 1e-3
"""Seconds of a copy to or from such a disk, however small the copy is."""
_LABELS = ("NVIDIA", "GeForce", "SXM", "SXM2", "GB", "32", "40", "80", "141")
"""Parts of a device name that do not tell the kind."""


@dataclass(frozen=True)
class Rates:
    """Speed of a device, for estimates of times that are not measured."""

    bytes_per_second: float
    """Rate of memory, read and written."""
    flops_per_second: float
    """Rate of operations that are not products."""
    product_flops_per_second: Mapping[str, float]
    """Rate of products of matrices, convolutions and attention, by type: ``float32``, ``bfloat16``, and
    ``tf32`` for float32 if that is allowed. Other types have the rate of operations that are not products."""
    seconds_per_call: float
    """Seconds of an operation, however small it is."""
    host_bytes_per_second: float = 12e9
    """Rate of copies between the device's memory and the host's, in each direction while it copies in
    both."""
    peer_bytes_per_second: float = 2e9
    """Rate at which the device sends to another one in a collective."""
    seconds_per_exchange: float = 5e-5
    """Seconds of a collective, however small it is."""
    network_bytes_per_second: float = math.inf
    """Rate at which the device sends to another machine: that of its own adapter."""
    peers: int = 8
    """Devices in a machine."""

    def seconds(self, arithmetic: float, moved: int) -> float:
        """Return the seconds of an operation: the larger one of its arithmetic (in seconds) and the time to
        move its bytes, plus the time of a call."""
        return self.seconds_per_call + max(arithmetic, moved / self.bytes_per_second)

    def between(self, ranks: Sequence[int]) -> float:
        """Return the bytes per second that each of some ranks sends in a collective. Machines have `peers`
        ranks with consecutive numbers. Between machines, a ring goes through the adapters of all devices that
        take part."""
        here = sum(r // self.peers == ranks[0] // self.peers for r in ranks)
        return self.peer_bytes_per_second if here == len(ranks) else min(
            self.peer_bytes_per_second, here * self.network_bytes_per_second)

    def of_products(self, dtype: str, *, tf32: bool = False) -> float:
        """Return the rate of products of a type, in floating-point operations per second. `tf32`: whether
        float32 may be cut to 19 bits."""
        known = self.product_flops_per_second
        if tf32 and dtype == "float32" and "tf32" in known:
            return known["tf32"]
        return known.get(dtype, self.flops_per_second)


HOST = Rates(2e10, 1e11, MappingProxyType({}), 5e-6)
"""Approximate rates of a processor."""


@dataclass(frozen=True)
class GPU:
    """A GPU to plan for, which this machine need not have."""

    name: str
    """Name of the device, as its maker writes it."""
    memory_bytes: int
    """Bytes of memory that torch reports."""
    capability: tuple[int, int]
    """CUDA's compute capability: which kernels there are."""
    rates: Rates = field(repr=False)
    """Published rates."""
    launch_seconds: float = field(default=4e-6, repr=False)
    """Seconds to start a kernel."""
    reached: float = field(default=0.7, repr=False)
    """The share of published rates that large operations come to."""

    def is_called(self, name: str) -> bool:
        """Return whether torch means this kind of device by a name ("NVIDIA H100 80GB HBM3")."""
        words = name.replace("-", " ").split()
        kind = [w for w in self.name.split() if w not in _LABELS]
        return all(w in words for w in kind[:2])

    @property
    def expected(self) -> Rates:
        """Rates that large operations reach: the published ones times `reached`."""
        r, share = self.rates, self.reached
        return Rates(share * r.bytes_per_second, share * r.flops_per_second,
                     {k: share * v for k, v in r.product_flops_per_second.items()}, self.launch_seconds,
                     share * r.host_bytes_per_second, share * r.peer_bytes_per_second, r.seconds_per_exchange,
                     share * r.network_bytes_per_second, r.peers)


def _gpu(name: str, gib: float, capability: tuple[int, int], gigabytes: float, plain: float, half: float, *,
         tf32: float | None = None, pcie: int = 4, nvlink: int | None = None,
         infiniband: str = "HDR") -> GPU:
    """Make a `GPU` from published figures. `gigabytes`: of memory bandwidth per second. `plain`, `half`,
    `tf32`: Tflop/s of float32 on the ordinary cores, of products of float16, and of products of shortened
    float32. `pcie`: generation of the link to the host, with sixteen lanes. `nvlink`: generation of the links
    to the other GPUs of a machine; None: as to the host. `infiniband`: kind of the adapter that each GPU has
    to other machines."""
    products = {"float32": plain, "float16": half}
    if tf32 is not None:
        products |= {"tf32": tf32, "bfloat16": half}
    rates = Rates(gigabytes * 1e9, plain * _TERA,
                  MappingProxyType({k: v * _TERA for k, v in products.items()}), 0.0, _PCIE[pcie],
                  _PCIE[pcie] if nvlink is None else _NVLINK[nvlink], 2e-5, _INFINIBAND[infiniband])
    return GPU(name, int(gib * GIB), capability, rates)


T4 = _gpu("NVIDIA T4", 14.5, (7, 5), 320, 8.1, 65, pcie=3)
V100 = _gpu("NVIDIA V100 SXM2 32 GB", 31.7, (7, 0), 900, 15.7, 125, pcie=3, nvlink=2, infiniband="EDR")
A10G = _gpu("NVIDIA A10G", 22.0, (8, 6), 600, 35, 70, tf32=35)
A100_40 = _gpu("NVIDIA A100 SXM 40 GB", 39.3, (8, 0), 1555, 19.5, 312, tf32=156, nvlink=3)
A100 = _gpu("NVIDIA A100 SXM 80 GB", 79.1, (8, 0), 2039, 19.5, 312, tf32=156, nvlink=3)
RTX_3090 = _gpu("NVIDIA GeForce RTX 3090", 23.5, (8, 6), 936, 35.6, 71, tf32=35.6)
RTX_4090 = _gpu("NVIDIA GeForce RTX 4090", 23.5, (8, 9), 1008, 82.6, 165.2, tf32=82.6)
L4 = _gpu("NVIDIA L4", 22.0, (8, 9), 300, 30.3, 121, tf32=60)
L40S = _gpu("NVIDIA L40S", 44.4, (8, 9), 864, 91.6, 362, tf32=183)
H100 = _gpu("NVIDIA H100 SXM 80 GB", 79.1, (9, 0), 3350, 66.9, 989, tf32=494, pcie=5, nvlink=4,
            infiniband="NDR")
H200 = _gpu("NVIDIA H200 SXM 141 GB", 139.7, (9, 0), 4800, 66.9, 989, tf32=494, pcie=5, nvlink=4,
            infiniband="NDR")

NAMES: Mapping[str, GPU] = MappingProxyType({
    "t4": T4, "v100": V100, "a10g": A10G, "a100-40": A100_40, "a100": A100, "rtx3090": RTX_3090,
    "rtx4090": RTX_4090, "l4": L4, "l40s": L40S, "h100": H100, "h200": H200})
"""GPUs by the names that the command uses."""


def known(name: str) -> GPU | None:
    """Return the GPU of a name as people write it (``H100``, ``rtx-4090``, ``A100_80``); None for other
    names."""
    plain = "".join(ch for ch in name.lower() if ch.isalnum())
    for ours, gpu in NAMES.items():
        if plain.removesuffix("80" if ours == "a100" else "") == ours.replace("-", ""):
            return gpu
    return None


def called(name: str) -> GPU | None:
    """Return the GPU that torch means by a name ("NVIDIA A100-SXM4-80GB"); None if it is not known. Of GPUs
    that differ only in memory, return the one whose size the name has."""
    sizes = {word.removesuffix("GB") for word in name.replace("-", " ").split()}
    found = [gpu for gpu in NAMES.values() if gpu.is_called(name)]
    return max(found, key=lambda gpu: len(sizes & set(gpu.name.split()[2:])), default=None)


def checked(device: GPU | str) -> GPU:
    """Return the GPU, or the known GPU of that name. Raises `ArgumentError` for any other value."""
    found = known(device) if isinstance(device, str) else device
    if not isinstance(found, GPU):
        raise ArgumentError(f"device is {device!r}; it should be a rkmate.devices.GPU, or one of "
                            f"{', '.join(NAMES)}")
    return found
