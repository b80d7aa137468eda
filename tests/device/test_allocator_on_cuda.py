"""The model of the allocator against torch's own, event by event; and what is read from its history."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import rkmate
from rkmate import device as devices
from rkmate.device.history import History
from rkmate.ir.allocator import Block, CachingAllocator
from rkmate.measure.step import measure_peak

pytestmark = pytest.mark.gpu
MIB = 1 << 20


def differences(fn: Callable[[], object]) -> list[tuple[int, int, int]]:
    """(event, bytes that the model has reserved, bytes that torch has) wherever these differ while `fn` runs,
    from an allocator as it stands."""
    device = devices.of("cuda")
    device.give_back()
    small = torch.empty(1, device="cuda")           # the history's marks find room beside it
    model = device.allocator()
    assert isinstance(model, CachingAllocator)
    torchs = torch.cuda.memory_reserved()
    assert model.reserved == torchs
    held: dict[int, Block | None] = {}
    found: list[tuple[int, int, int]] = []
    history = History(torch.cuda.current_device())
    with history.recording():
        fn()
    for k, entry in enumerate(history.entries):
        if entry["action"] in ("segment_alloc", "segment_map"):
            torchs += entry["size"]
        elif entry["action"] == "alloc":
            held[entry["addr"]] = model.allocate(entry["size"])
            if model.reserved != torchs:
                found.append((k, model.reserved, torchs))
        elif entry["action"] == "free_completed" and entry["addr"] in held:
            model.free(held.pop(entry["addr"]))
    del small
    return found


@pytest.mark.parametrize("seed", range(8))
def test_it_reserves_what_torch_reserves(seed: int) -> None:
    def fn() -> None:
        numbers = random.Random(seed)
        held = []
        for _ in range(400):
            if held and numbers.random() < 0.48:
                held.pop(numbers.randrange(len(held)))
            else:
                some = int(2 ** numbers.uniform(2, 26))
                edge = numbers.choice([MIB, MIB + 1, 10 * MIB, 10 * MIB - 1, 512, 513, 9 * MIB, 11 * MIB])
                held.append(torch.empty(some if numbers.random() < 0.8 else edge, dtype=torch.uint8,
                                        device="cuda"))

    torch.cuda.synchronize()
    assert differences(fn) == []


def test_a_measurement_leaves_the_users_peak_and_sees_every_free() -> None:
    big = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    del big
    before = torch.cuda.max_memory_allocated()

    def fn() -> torch.Tensor:
        a = torch.empty(3 * MIB + 5, dtype=torch.uint8, device="cuda")
        b = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        del a
        return b

    found = measure_peak(fn, "cuda", timeline=True)
    assert (found.peak, found.net) == (4 * MIB + 512, MIB)
    assert [level for _, level in found.timeline] == [3 * MIB + 512, 4 * MIB + 512, MIB]
    assert torch.cuda.max_memory_allocated() == before


def test_it_listens_in_where_the_user_records() -> None:
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(context=None, stacks="python")
    try:
        found = measure_peak(lambda: torch.empty(MIB, device="cuda", dtype=torch.uint8), "cuda")
        assert found.peak == MIB
        assert torch._C._cuda_isHistoryEnabled()
    finally:
        torch.cuda.memory._record_memory_history(None)


def test_the_first_step_does_not_warn_of_what_libraries_keep() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda()
    x = torch.randn(16, 64, device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped = rkmate.wrap(model, (x,), budget=1.0, settings=rkmate.Settings(costs="analytic"),
                              progress=False)
        wrapped(x).sum().backward()


def test_the_key_of_costs_knows_the_precision_of_products() -> None:
    device = devices.of("cuda")
    before, key = torch.backends.cuda.matmul.fp32_precision, device.key()
    try:
        torch.backends.cuda.matmul.fp32_precision = "ieee" if before == "tf32" else "tf32"
        assert device.key() != key
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_the_key_of_costs_knows_the_workspaces_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    device = devices.of("cuda")
    key = device.key()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":32:4")
    assert device.key() != key
