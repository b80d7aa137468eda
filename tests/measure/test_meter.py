"""The meter against allocations whose sizes are known."""

from __future__ import annotations

import subprocess
import sys
import threading
from queue import Queue
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rkmate import device
from rkmate.device.events import OpenRun, profiling
from rkmate.errors import ArgumentError
from rkmate.ir.simulate import Peak
from rkmate.measure.step import MeterError, measure_peak, tracking
from rkmate.torch_seam.memory import is_profiling, mark

KB = 1024


def zeros(kb: int) -> torch.Tensor:
    return torch.empty(kb * KB, dtype=torch.uint8)


def test_an_allocation_that_stays() -> None:
    measured = measure_peak(lambda: zeros(3))
    assert measured.peak == measured.net == 3 * KB
    assert measured.result.numel() == 3 * KB
    assert measured.seconds > 0
    assert measured.timeline == ()


def test_nothing_allocated() -> None:
    assert measure_peak(lambda: 7) == Peak(0, 0, pytest.approx(0, abs=10), 7)


def test_peak_is_not_the_sum() -> None:
    def fn() -> torch.Tensor:
        a = zeros(5)
        del a
        b, c = zeros(2), zeros(4)
        del b
        return c

    measured = measure_peak(fn)
    assert (measured.peak, measured.net) == (6 * KB, 4 * KB)


def test_temporary_memory_inside_an_operation() -> None:
    x = torch.randn(64, 64).t()              # the operation needs a contiguous copy
    measured = measure_peak(lambda: torch.cumsum(x.contiguous().view(-1), 0))
    assert (measured.peak, measured.net) == (2 * x.nbytes, x.nbytes)

    def operation_with_hidden_copy() -> torch.Tensor:
        return torch.logsumexp(x, dim=1)     # exponentials of all of x

    hidden = measure_peak(operation_with_hidden_copy)
    assert hidden.net == 64 * 4
    assert hidden.peak >= x.nbytes


def test_timeline_ends_at_net_and_reaches_the_peak() -> None:
    def fn() -> torch.Tensor:
        a = zeros(8)
        b = zeros(1)
        del a
        return b

    measured = measure_peak(fn, timeline=True)
    assert [level for _, level in measured.timeline] == [8 * KB, 9 * KB, KB]
    times = [t for t, _ in measured.timeline]
    assert times == sorted(times) and times[0] >= 0


def test_blocks_from_before_count_under_tracking() -> None:
    with tracking():
        old = [zeros(100)]
        measured = measure_peak(lambda: (old.clear(), zeros(10))[1])
        assert (measured.peak, measured.net) == (0, -90 * KB)


def test_blocks_from_before_do_not_count_without_tracking() -> None:
    old = [zeros(100)]
    measured = measure_peak(lambda: (old.clear(), zeros(10))[1])
    assert (measured.peak, measured.net) == (10 * KB, 10 * KB)


def test_tracking_nests_and_ends() -> None:
    with tracking():
        with tracking():
            pass
        old = [zeros(100)]
        assert measure_peak(old.clear).net == -100 * KB
    late = [zeros(100)]
    assert measure_peak(late.clear).net == 0


def test_an_address_used_again_after_a_measurement() -> None:
    """The allocator remembers sizes from one measurement to the next, when they may be wrong."""
    for _ in range(100):
        pinned = [measure_peak(lambda: zeros(20)).result]
        address = pinned[0].data_ptr()
        pinned.clear()                         # not seen by the allocator's book-keeping
        pinned = [zeros(19)]
        if pinned[0].data_ptr() == address:
            break
    else:
        pytest.skip("this allocator used no address again")
    assert measure_peak(lambda: (pinned.clear(), zeros(1))[1]).net == KB


def test_backward_is_included() -> None:
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False))
    x = torch.randn(16, 32)

    def step() -> None:
        model(x).sum().backward()

    first = measure_peak(step)
    gradients = sum(p.nbytes for p in model.parameters())
    assert first.net == gradients
    again = measure_peak(step)               # accumulates: gradients are there
    assert again.net == 0
    hidden, out = 16 * 64 * 4, 16 * 32 * 4
    assert again.peak >= hidden + out


class _Reentrant(torch.autograd.Function):
    """A backward inside a backward: after sixty levels the engine moves to threads of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int) -> torch.Tensor:
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        if ctx.depth == 0:
            _Reentrant.kept.append(zeros(300))
            _Reentrant.thread = threading.get_ident()
        else:
            with torch.enable_grad():
                x = torch.zeros(1, requires_grad=True)
                _Reentrant.apply(x, ctx.depth - 1).sum().backward()
        return grad.clone(), None

    kept: ClassVar[list[torch.Tensor]] = []
    thread = 0


def test_threads_of_the_autograd_engine() -> None:
    x = torch.zeros(1, requires_grad=True)
    measured = measure_peak(lambda: _Reentrant.apply(x, 80).sum().backward())
    assert _Reentrant.thread != threading.get_ident()
    assert measured.net >= 300 * KB
    _Reentrant.kept.clear()

def test_what_other_threads_free_and_allocate() -> None:
    """As threads of gloo do, which have no profiler: what they free is gone, what they allocate is theirs."""
    given: Queue[list[torch.Tensor] | None] = Queue()

    def serve() -> None:
        while (work := given.get()) is not None:
            work.clear()
            zeros(50)
            given.task_done()

    def fn() -> torch.Tensor:
        for _ in range(3):
            given.put([zeros(8)])
            given.join()
            before = [zeros(2), zeros(1)]
            del before
        return zeros(4)

    other = threading.Thread(target=serve)
    other.start()
    try:
        measured = measure_peak(fn)
        meter = device.of("cpu").parts_meter()
        with meter.running():
            with meter.part(0):
                fn()
            with meter.part(1):
                kept = zeros(4)
    finally:
        given.put(None)
        other.join()
    assert kept.numel() and (measured.peak, measured.net) == (8 * KB, 4 * KB)
    assert meter.levels() == {0: (0, 8 * KB), 1: (0, 4 * KB)}


def test_parts_of_one_run() -> None:
    meter = device.of("cpu").parts_meter()
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


def test_parts_of_a_run_with_pauses() -> None:
    """What is measured in a pause leaves something, and frees something of the run."""
    meter, kept = device.of("cpu").parts_meter(), []
    with meter.running():
        with meter.part(0):
            kept += [zeros(6), zeros(2), zeros(1)]
        with meter.paused():
            assert measure_peak(lambda: kept.append(zeros(30))).net == 30 * KB
            del kept[1]
        with meter.part(1):
            kept.append(zeros(4))
            del kept[0]
        zeros(50)                            # belongs to no part
        with pytest.raises(MeterError, match="planned"), meter.paused():
            raise MeterError("cannot be planned")
        with meter.part(2):
            kept.clear()
    assert not is_profiling()
    assert meter.levels() == {0: (0, 9 * KB), 1: (37 * KB, 41 * KB), 2: (35 * KB, 35 * KB)}


def test_parts_inside_a_profiler() -> None:
    meter = device.of("cpu").parts_meter()
    with torch.autograd.profiler.profile(), pytest.raises(MeterError), meter.running():
        pass


def test_inside_a_profiler() -> None:
    with torch.autograd.profiler.profile(), pytest.raises(MeterError, match="a profiler"):
        measure_peak(lambda: None)
    assert measure_peak(lambda: zeros(1)).peak == KB


def test_beside_a_profiler_with_a_schedule() -> None:
    """Torch ends the process where a profiler that warms up goes on after another one has run."""
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU],
                                      schedule=torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=1))
    with profiler:
        assert measure_peak(lambda: zeros(1)).peak == KB        # the profiler waits
        with pytest.raises(MeterError, match="a profiler has a schedule"):
            OpenRun(device.of("cpu").parts_meter(), lambda: None)
        for _ in range(2):                                      # it warms up, and runs
            profiler.step()
            with pytest.raises(MeterError, match="a profiler is running"):
                measure_peak(lambda: zeros(1))
    assert profiler.events()
    assert measure_peak(lambda: zeros(1)).peak == KB


def test_what_stays_open_ends_at_an_optimizers_step() -> None:
    model, stopped = nn.Linear(2, 2), []
    running = OpenRun(device.of("cpu").parts_meter(), lambda: stopped.append(running.close()),
                      lambda: model.weight.grad is not None)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.step()                                            # in the middle: of another model
    assert is_profiling() and not stopped
    model(torch.randn(1, 2)).sum().backward()
    seen: list[object] = []
    with register_optimizer_step_pre_hook(lambda *_: seen.append(1)):       # of somebody else, behind ours
        for _ in range(2):
            optimizer.step()
    assert not is_profiling() and len(stopped) == 1 and len(seen) == 2


def test_inside_a_profiler_of_another_thread() -> None:
    errors: list[BaseException] = []

    def other() -> None:
        try:
            measure_peak(lambda: None)
        except MeterError as error:
            errors.append(error)

    with torch.autograd.profiler.profile():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(errors) == 1


def test_inside_itself() -> None:
    with pytest.raises(MeterError, match="measured already"):
        measure_peak(lambda: measure_peak(lambda: None))
    assert measure_peak(lambda: zeros(1)).peak == KB


def test_an_error_passes_and_leaves_nothing_running() -> None:
    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        measure_peak(fail)
    assert measure_peak(lambda: zeros(1)).peak == KB


def test_operations_that_end_after_the_profiler_are_not_recorded() -> None:
    """Torch would write the end of what is exchanged with other ranks into memory that is free by then."""
    with profiling() as session, record_function("exchanged"), mark("part"):
        zeros(10)
    names = [event.name() for event in session.kineto_results.events()]
    assert "part" in names and "[memory]" in names and "exchanged" not in names


STAY_OPEN = """
import os, sys, threading, torch
from rkmate import device
from rkmate.device.events import OpenRun

def begin():
    running = OpenRun(device.of("cpu").parts_meter(), lambda: running.close())
    sys.waits = torch.ones(2, requires_grad=True) * 2
    sys.waits.grad_fn.register_prehook(lambda *_: (running, sys.waits))     # torch lives longer than Python

def begin_in_a_thread():
    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()

for start in (begin, begin_in_a_thread):
    if not os.fork():
        start()
        print("ends")
        break
    print(os.wait()[1], flush=True)
"""


def test_python_ends_while_something_is_measured() -> None:
    """In the main thread, and in a thread that has ended, each in a process of its own."""
    ended = subprocess.run([sys.executable, "-c", STAY_OPEN], stdout=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "ends\n0\n" * 2)


def test_unknown_device() -> None:
    with pytest.raises(ArgumentError, match="meta"):
        measure_peak(lambda: None, "meta")


def test_silent(capfd: pytest.CaptureFixture[str]) -> None:
    old = [zeros(10)]
    capfd.readouterr()      # what was printed before
    measure_peak(old.clear)
    assert capfd.readouterr() == ("", "")


@pytest.mark.gpu
def test_cuda() -> None:
    old = [torch.empty(1 << 20, dtype=torch.uint8, device="cuda")]

    def fn() -> torch.Tensor:
        a = torch.empty(4 << 20, dtype=torch.uint8, device="cuda")
        b = torch.empty(2 << 20, dtype=torch.uint8, device="cuda")
        del a
        old.clear()
        return b

    measured = measure_peak(fn, "cuda")
    assert (measured.peak, measured.net) == (6 << 20, 1 << 20)
    old.append(torch.empty(1 << 20, dtype=torch.uint8, device="cuda"))
    del measured
    with_levels = measure_peak(fn, torch.device("cuda"), timeline=True)
    assert [level >> 20 for _, level in with_levels.timeline] == [4, 6, 2, 1]
    assert (with_levels.peak, with_levels.net) == (6 << 20, 1 << 20)
