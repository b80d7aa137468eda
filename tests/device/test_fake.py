"""The accelerator of the tests, and the code that it shares with real ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rkmate
from rkmate import device as devices
from rkmate.device import Device, cpu, cuda
from rkmate.device.protocol import PeakWatch
from rkmate.measure.step import measure_peak
from tests.device.fake import FakeDevice, Ledger

KB = 1024


def zeros(kb: int) -> torch.Tensor:
    return torch.zeros(kb * KB, dtype=torch.uint8)


def test_storages_come_and_go() -> None:
    def fn() -> torch.Tensor:
        a = zeros(5)
        del a
        b, c = zeros(2), zeros(4)
        view = c[1:]
        del b
        return view

    with FakeDevice() as device:
        found = measure_peak(fn, timeline=True)
    assert (found.peak, found.net) == (6 * KB, 4 * KB)
    assert [level // KB for _, level in found.timeline if level % KB == 0][-1] == 4
    assert max(level for _, level in found.timeline) == 6 * KB
    assert device.waits == 1
    del found
    assert device.statistics.allocated() == 0


def test_what_stood_before_does_not_count() -> None:
    old = [zeros(3)]
    device = FakeDevice()
    found = device.measure_peak(lambda: (old[0].add_(1), old.clear(), zeros(1))[2])
    assert (found.peak, found.net) == (KB, KB)


def test_rounding() -> None:
    found = FakeDevice(rounding=512).measure_peak(lambda: torch.zeros(5))
    assert (found.peak, found.net) == (512, 512)


def test_parts() -> None:
    meter = FakeDevice().parts_meter()
    with meter.running():
        with meter.part(4):
            a = zeros(6)
        zeros(50)                            # belongs to no part
        with meter.part(2):
            del a
            b = zeros(3)
        with meter.part(9):
            zeros(5)
            zeros(2)
    assert meter.peaks() == {4: 6 * KB, 2: 0, 9: 5 * KB}
    assert b.numel() == 3 * KB


def test_a_clock_of_its_own() -> None:
    device = FakeDevice(seconds=lambda n: 2.0 ** n)
    assert [device.timed(lambda: "done") for _ in range(3)] == [(1.0, "done"), (2.0, "done"), (4.0, "done")]
    assert device.clock == 7.0 and device.calls == 3


@pytest.mark.parametrize(("device", "sizes"), [
    (cpu.Cpu(torch.device("cpu")), {0: 0, 1: 1, 512: 512}),
    (cuda.Cuda(torch.device("cuda")), {0: 0, 1: 512, 512: 512, 513: 1024})])
def test_what_allocators_hand_out(device: Device, sizes: dict[int, int]) -> None:
    assert {size: device.storage_bytes(size) for size in sizes} == sizes


def test_chunks() -> None:
    assert devices.of("cpu").part_bytes(2**40) == cpu.PART_BYTES
    gpu = devices.of("cuda")
    assert gpu.part_bytes(2**20) == cuda.PART_BYTES and gpu.part_bytes(2**40) == 2**36


def test_a_watch_does_not_reset() -> None:
    ledger = Ledger()
    ledger.add(100)
    watch = PeakWatch(ledger)
    ledger.add(50)
    ledger.add(-40)
    assert (watch.start, watch.peak(), ledger.peak(), ledger.resets) == (100, 150, 150, 0)
    later = PeakWatch(ledger)
    ledger.add(20)
    assert (later.start, later.peak(), ledger.resets) == (110, 130, 0), "below the old peak"


def test_an_accelerators_budget() -> None:
    model = nn.Linear(64, 64, bias=False)
    size = 64 * 64 * 4
    with FakeDevice(total=100 * size) as device:
        assert rkmate.auto_budget(model) == 100 * size - 3 * size - 4 * size
        device.statistics.add(90 * size)
        assert rkmate.auto_budget(model) == 3 * size
        device.statistics.add(4 * size)
        with pytest.raises(rkmate.ArgumentError, match="nothing is left"):
            rkmate.auto_budget(model)
        device.statistics.add(-94 * size)
        found = rkmate.max_batch_size(model, lambda n: (torch.randn(n, 64),), most=4,
                                      settings=rkmate.Settings(costs="analytic"), progress=False)
    assert found.size == 4


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("cpu_kernels", [True, False])
def test_a_model_trains_on_it(cpu_kernels: bool) -> None:
    """Code paths of an accelerator, over the CPU's kernels."""
    torch.manual_seed(0)
    # Masks are drawn in another way where the CPU's kernels are not asked for.
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2 * cpu_kernels))
                            for _ in range(4)))
    x = torch.randn(8, 16)
    with FakeDevice(cpu_kernels=cpu_kernels):
        wrapped = rkmate.wrap(model, (x,), budget=0.8, progress=False)
        torch.manual_seed(1)
        wrapped(x).sum().backward()
        ours = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        ours_state = torch.get_rng_state()
    model.zero_grad()
    torch.manual_seed(1)
    model(x).sum().backward()
    theirs = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
    assert torch.equal(ours_state, torch.get_rng_state())
