"""Copies to a folder and back: what comes back, in which memory, and what they hold meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rkmate import device as devices
from rkmate.errors import ArgumentError, OffloadError, RkmateWarning
from rkmate.measure.step import measure_peak, tracking
from rkmate.offload import disk as away_file
from rkmate.offload.protocol import CopyEngine
from rkmate.torch_seam.tensors import as_bytes
from tests.device.fake import FakeDevice

pytestmark = pytest.mark.filterwarnings("ignore:.* is memory:rkmate.errors.RkmateWarning")
CPU = devices.of("cpu")
MIB = 2**20


def bits(tensor: torch.Tensor) -> list[int]:
    """All of its storage."""
    return as_bytes(tensor.untyped_storage()).tolist()


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether it is another tensor of the same bytes and form."""
    return found.untyped_storage()._cdata != expected.untyped_storage()._cdata \
        and (found.dtype, found.shape, found.stride(), found.storage_offset()) \
        == (expected.dtype, expected.shape, expected.stride(), expected.storage_offset()) \
        and (found.is_conj(), found.is_neg()) == (expected.is_conj(), expected.is_neg()) \
        and torch.equal(as_bytes(found.untyped_storage()), as_bytes(expected.untyped_storage()))


def some(size: int, seed: int = 0) -> torch.Tensor:
    """Random bytes."""
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def files(folder: Path) -> list[str]:
    """Open files of this process that are, or were, in a folder."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):        # another thread has closed it
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [path for path in found if str(folder) in path]


@pytest.fixture(params=["direct", "buffers", "cached"])
def engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
           ) -> Iterator[CopyEngine]:
    """One for a disk that takes memory as it stands, one that needs buffers, and one that is not direct."""
    nameless = away_file._nameless
    if request.param == "buffers":
        made = CPU.copy_engine(str(tmp_path))
        away_file.shared(tmp_path)._descriptor.aligned = 2**62
    elif request.param == "cached":
        monkeypatch.setattr(away_file, "_kind", lambda folder: None)
        monkeypatch.setattr(away_file, "_nameless",
                            lambda folder, direct: None if direct else nameless(folder, 0))
        with pytest.warns(RkmateWarning, match="refuses direct reads and writes"):
            made = CPU.copy_engine(str(tmp_path))
    else:
        made = CPU.copy_engine(str(tmp_path))
    yield made
    assert not list(tmp_path.iterdir())
    made.close()
    assert not files(tmp_path)


def there_and_back(engine: CopyEngine, tensor: torch.Tensor) -> torch.Tensor:
    call = engine.open()
    call.out("a", tensor)
    call.leave("a")
    found = call.back("a")
    call.arrive("a")
    call.close()
    return found


TENSORS = {
    **{str(dtype): some(4096 * 3).view(dtype) for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64,
        torch.int64, torch.int16)},
    "bool": some(5000) > 100,
    "number": torch.tensor(3.5),
    "nothing": torch.empty(0, 3),
    "transposed": some(4 * 700).view(torch.float32).view(7, 100).t(),
    "part": some(40_000).view(torch.float32)[100:900:3],
    "repeated": some(12).view(torch.float32).expand(5, 3),
    "conjugate": some(800).view(torch.complex64).conj(),
    "negative": some(800).view(torch.complex64).conj().imag,
    "channels last": torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last),
    "odd memory": torch.frombuffer(bytearray(some(70_001).tolist()), dtype=torch.uint8, offset=1),
    **{f"{size:,} bytes": some(size) for size in (
        1, 4095, 4096, 4097, 2**17, 2**17 + 1, MIB - 1, MIB, MIB + 4096, 3 * MIB + 5000)},
}


def test_every_form_of_tensor_comes_back(engine: CopyEngine) -> None:
    for name, tensor in TENSORS.items():
        assert same(there_and_back(engine, tensor), tensor), name


def test_only_the_ends_of_a_storage_are_copied_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                         ) -> None:
    moved: list[int] = []
    move = ctypes.memmove

    def counting(to: int, of: int, size: int) -> None:
        moved.append(size)
        move(to, of, size)

    engine = CPU.copy_engine(str(tmp_path), verify=True)
    monkeypatch.setattr(ctypes, "memmove", counting)
    memory = some(3 * MIB + 9000)
    for begin in (0, 64, 512, 4096 - 64):
        moved.clear()
        tensor = torch.frombuffer(memory.numpy(), dtype=torch.uint8, offset=begin + -memory.data_ptr() % 4096)
        call = engine.open()
        call.out("a", tensor)
        call.leave("a")
        assert sum(moved) < 2 * 4096
        found = call.back("a")          # where memory may begin elsewhere
        call.arrive("a")
        assert same(found, tensor)
        call.close()


def test_many_of_a_call_return_several_times(engine: CopyEngine) -> None:
    tensors = [some(300_000 + 77 * k, k) for k in range(12)]
    call = engine.open()
    for k, tensor in enumerate(tensors):
        call.out(str(k), tensor)
    for k in reversed(range(12)):
        call.leave(str(k))
    for _ in range(3):
        found = {k: call.back(str(k)) for k in (7, 3, 11, 0)}
        for k, tensor in found.items():
            call.arrive(str(k))
            call.arrive(str(k))         # for another reader
            assert same(tensor, tensors[k])
            tensor.zero_()              # which the copy that is away does not see
    call.close()
    call.close()


def test_calls_in_any_order(tmp_path: Path) -> None:
    engine, numbers = CPU.copy_engine(str(tmp_path), verify=True), random.Random(0)
    calls = {k: engine.open() for k in range(3)}
    away: dict[tuple[int, str], torch.Tensor] = {}
    for turn in range(150):
        k, key = numbers.randrange(3), str(turn)
        there = [name for call, name in away if call == k]
        if numbers.random() < 0.1:
            calls[k].close()
            calls[k] = engine.open()
            away = {(call, name): t for (call, name), t in away.items() if call != k}
        elif there and numbers.random() < 0.5:
            name = numbers.choice(there)
            found = calls[k].back(name)
            if numbers.random() < 0.8:          # else it is given up, or waited for by the next
                calls[k].arrive(name)
                assert same(found, away[k, name])
        else:
            away[k, key] = some(int(2 ** numbers.uniform(0, 21)), turn)
            calls[k].out(key, away[k, key].clone())
            calls[k].leave(key)
    for call in calls.values():
        call.close()


def test_room_is_used_again(tmp_path: Path) -> None:
    engine = CPU.copy_engine(str(tmp_path))
    file = away_file.shared(tmp_path)
    for _ in range(3):
        call = engine.open()
        for k in range(4):
            call.out(str(k), some(100_000))
        call.close()
        assert file.room.end in range(4 * 102_400, 4 * 106_496 + 1, 4096)


def test_who_has_left_is_held_by_nobody(engine: CopyEngine) -> None:
    call, tensor = engine.open(), some(3 * MIB)
    storage = weakref.ref(tensor.untyped_storage())
    call.out("a", tensor)
    del tensor
    call.leave("a")
    assert storage() is None
    found = weakref.ref(call.back("a"))
    call.arrive("a")
    assert found() is None
    call.close()


def test_the_meter_sees_buffers_and_what_comes_back(engine: CopyEngine) -> None:
    with tracking():
        assert measure_peak(lambda: engine.open()).peak == engine.buffer_bytes > 0
        assert measure_peak(lambda: engine.open().close()).net == 0
        call, held = engine.open(), [some(MIB + 100)]
        assert measure_peak(lambda: call.out("a", held[0])).peak == 0
        assert measure_peak(lambda: (held.clear(), call.leave("a"))).net == -MIB - 100
        back = measure_peak(lambda: held.append(call.back("a")))
        assert (back.peak, back.net) == (MIB + 100, MIB + 100)
        assert measure_peak(lambda: call.arrive("a")).peak == 0
        call.close()


def test_no_more_is_away_than_may_be(tmp_path: Path) -> None:
    engine = CPU.copy_engine(str(tmp_path), 10_000)
    first, second = engine.open(), engine.open()
    first.out("a", some(6000))
    second.out("a", some(4000))
    with pytest.raises(OffloadError, match=rf"{tmp_path}: 1 more bytes would make 10,001 .* limit is 10,000"):
        second.out("b", some(1))
    first.close()
    second.out("c", some(6000))
    second.leave("c")
    second.close()
    unlimited = CPU.copy_engine(str(tmp_path)).open()
    unlimited.out("a", some(20_000))
    unlimited.close()


def test_a_mistake_of_the_caller_is_an_error(tmp_path: Path) -> None:
    call = CPU.copy_engine(str(tmp_path)).open()
    call.out("a", some(10))
    with pytest.raises(ValueError, match="a was already sent away"):
        call.out("a", some(10))
    with pytest.raises(ValueError, match="a has not left"):
        call.back("a")
    with pytest.raises(KeyError):
        call.leave("b")
    call.close()
    for use in (call.leave, call.back, call.arrive):
        with pytest.raises(OffloadError, match="these copies were closed"):
            use("a")


def test_engines_of_a_folder_share_a_file_until_nobody_has_it(tmp_path: Path) -> None:
    one, other = CPU.copy_engine(str(tmp_path)), CPU.copy_engine(f"{tmp_path}/../{tmp_path.name}")
    call = one.open()
    assert len(files(tmp_path)) == 1
    assert "rkmate-" in files(tmp_path)[0]
    call.out("a", some(5000))
    call.leave("a")
    one.close()
    other.close()
    found = call.back("a")
    call.arrive("a")
    assert same(found, some(5000))
    with pytest.raises(OffloadError, match="no data can be sent there any more"):
        one.open()
    call.close()
    del call
    assert not files(tmp_path)


def test_what_is_collected_is_closed(tmp_path: Path) -> None:
    engine = CPU.copy_engine(str(tmp_path), 5000)
    call = engine.open()
    call.out("a", some(5000))
    del call
    call = engine.open()
    call.out("a", some(5000))
    call.leave("a")
    del call, engine
    assert not files(tmp_path)


def test_the_place_has_to_fit_the_device(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r'offload is "host".* give a folder on a disk \(offload="/some'):
        CPU.copy_engine("host")


def test_the_tests_accelerator_copies_too() -> None:
    with FakeDevice(copy_buffer_bytes=1024) as device:
        engine = device.copy_engine("host", 70_000)
        tensor = some(40_000).view(torch.float32)[4:].view(3, -1).t()

        def step() -> torch.Tensor:
            call = engine.open()
            call.out("a", tensor)
            with pytest.raises(OffloadError, match="host: 40,000 more bytes would make 80,000"):
                call.out("b", tensor)
            call.leave("a")
            found = call.back("a")
            call.arrive("a")
            assert len(engine.calls) == 1
            call.close()
            return found

        found = device.measure_peak(step)
        assert same(found.result, tensor)
        assert (found.peak, found.net) == (1024 + 40_448, 40_448)
        assert not engine.calls


def test_the_tests_accelerator_counts_all_calls_as_others_do() -> None:
    engine = FakeDevice().copy_engine("host", 10_000)
    first, second = engine.open(), engine.open()
    first.out("a", some(6000))
    with pytest.raises(OffloadError, match=r"host: 6,000 more bytes would make 12,000 .* limit is 10,000"):
        second.out("a", some(6000))
    del first
    second.out("a", some(6000))
    assert len(engine.calls) == 1
    with pytest.raises(ValueError, match="a has not left"):
        second.back("a")
    second.leave("a")
    with pytest.raises(ValueError, match="a was already freed after its copy-out"):
        second.leave("a")
