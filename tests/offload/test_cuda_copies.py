"""Copies between a GPU and the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from rkmate import device as devices
from rkmate.errors import ArgumentError, OffloadError
from rkmate.measure.step import measure_peak
from rkmate.offload.cuda import SLAB, pool_of
from rkmate.offload.target import measure_link

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode")]
MIB = 2**20


@contextmanager
def no_waiting() -> Iterator[None]:
    """Inside, an operation for which the host waits is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_only_the_host_can_be_sent_to(tmp_path: object) -> None:
    with pytest.raises(ArgumentError, match='to the host\'s memory: offload="host"'):
        devices.of("cuda").copy_engine(str(tmp_path))


def test_nothing_waits_for_the_device_and_memory_is_used_again() -> None:
    engine = devices.of("cuda").copy_engine("host")
    call = engine.open()
    big = torch.ones(SLAB // 4 + 1000, device="cuda")           # more than one slab
    views = [big, torch.ones(30, 7, device="cuda").t(), torch.ones(90, device="cuda")[10::3],
             torch.empty(0, device="cuda")]
    with no_waiting():
        for k, tensor in enumerate(views):
            call.out(str(k), tensor)
        forms = [(t.shape, t.stride(), t.storage_offset(), t.untyped_storage().nbytes()) for t in views]
        before = torch.cuda.memory_allocated()
        del big, tensor
        views.clear()
        assert torch.cuda.memory_allocated() == before      # they are read still
        for k in range(4):
            call.leave(str(k))
        assert torch.cuda.memory_allocated() < before - SLAB
        for _ in range(2):
            for k, form in enumerate(forms):
                found = call.back(str(k))
                call.arrive(str(k))
                assert form == (found.shape, found.stride(), found.storage_offset(),
                                found.untyped_storage().nbytes())
        call.back("0")
        call.close()
        call.close()
    with pytest.raises(OffloadError, match="these copies were closed"):
        call.leave("0")


def test_pinned_memory_is_taken_once_and_given_back() -> None:
    engine, other = (devices.of("cuda").copy_engine("host", 3 * MIB) for _ in range(2))
    pool = pool_of(torch.device("cuda", 0))
    for _ in range(3):
        call, second = engine.open(), other.open()
        call.out("a", torch.ones(2 * MIB, dtype=torch.uint8, device="cuda"))
        with pytest.raises(OffloadError, match="host: 2,097,152 more bytes would make 4,194,304 bytes there"):
            call.out("b", torch.ones(2 * MIB, dtype=torch.uint8, device="cuda"))
        second.out("a", torch.ones(2 * MIB, dtype=torch.uint8, device="cuda"))
        del call, second                    # closed by the collector of garbage
        assert pool.room.end == SLAB


def test_the_meter_sees_what_comes_back() -> None:
    call = devices.of("cuda").copy_engine("host").open()
    call.out("a", torch.ones(MIB, dtype=torch.uint8, device="cuda"))
    call.leave("a")
    found = measure_peak(lambda: call.back("a"), "cuda")
    assert (found.peak, found.net) == (MIB, MIB)


def test_the_link_is_measured() -> None:
    link = measure_link(devices.of("cuda"), devices.of("cuda").copy_engine("host"))
    assert min(link.out_bytes_per_second, link.in_bytes_per_second) > 0
    assert link.place == "host"


@pytest.mark.values
def test_values_come_back_while_the_device_computes() -> None:
    engine = devices.of("cuda").copy_engine("host", verify=True)
    torch.cuda.synchronize()
    for turn in range(3):
        call = engine.open()
        made = [torch.randn(3 * MIB, device="cuda") for _ in range(8)]
        kept = [t.clone() for t in made]
        for k in range(8):
            call.out(str(k), made[k])
        made.clear()
        for k in range(8):
            call.leave(str(k))
            torch.randn(3 * MIB, device="cuda").mul_(turn)      # takes the memory that was left
        for k in reversed(range(8)):
            found = call.back(str(k))
            torch.randn(3 * MIB, device="cuda").mul_(turn)
            call.arrive(str(k))
            assert torch.equal(found, kept[k])
        call.close()
