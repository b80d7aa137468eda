"""Which device is meant, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import rkmate
import rkmate.dtr
from rkmate import device as devices
from rkmate.cli import targets
from rkmate.device.cpu import Cpu
from rkmate.device.cuda import Cuda
from tests.device.fake import FakeDevice

PACKAGE = Path(rkmate.__file__).parent


def on(kind: str, *shape: int) -> torch.Tensor:
    """A tensor that says it is on a device, whether this machine has one or not."""
    with FakeTensorMode():
        return torch.empty(*shape, device=kind)


def test_names_tensors_and_torchs_devices() -> None:
    assert isinstance(devices.of("cpu"), Cpu)
    assert devices.of(torch.zeros(1)) is devices.of(torch.device("cpu"))
    assert isinstance(devices.of("cuda:1"), Cuda)
    assert devices.of(on("cuda", 1)).torch_device == torch.device("cuda:0")


@pytest.mark.parametrize("name", ["mps", "xpu", "privateuseone"])
def test_without_an_implementation(name: str) -> None:
    with pytest.raises(rkmate.ArgumentError, match=rf"device is {name}.*works on cpu and cuda only"):
        devices.of(torch.device(name))


def test_no_devices() -> None:
    with pytest.raises(rkmate.ArgumentError, match="meta"):
        devices.of("meta")
    with pytest.raises(rkmate.ArgumentError, match="'abacus'"):
        devices.of("abacus")


def test_the_device_of_many() -> None:
    cpu, one, two = torch.zeros(1), on("cuda:0", 1), on("cuda:1", 1)
    assert devices.common([]) is devices.common([cpu]) is devices.of("cpu")
    assert devices.common([cpu, one, one]) is devices.of("cuda:0")
    with pytest.raises(rkmate.ArgumentError, match="several devices: cpu, cuda:0, cuda:1"):
        devices.common([one, cpu, two])
    with pytest.raises(rkmate.ArgumentError, match="xpu"):
        devices.common([cpu, on("xpu", 1)])


def test_a_stand_in_stands_inside_only() -> None:
    with FakeDevice() as fake:
        assert devices.of(torch.zeros(1)) is devices.common([]) is fake
        assert devices.in_use()[0] is fake
    assert isinstance(devices.of("cpu"), Cpu)


def model_on(kind: str) -> nn.Module:
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(on(kind, 4, 4))
    return model


CALLS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "wrap": lambda m, x: rkmate.wrap(m, (x,), budget=0.5),
    "wrap auto": lambda m, x: rkmate.wrap(m, (x,), budget="auto"),
    "plan": lambda m, x: rkmate.plan(m, (x,), budget=0.5),
    "tradeoff": lambda m, x: rkmate.tradeoff(m, (x,)),
    "compare": lambda m, x: rkmate.compare(m, (x,)),
    "max_batch_size": lambda m, x: rkmate.max_batch_size(m, lambda n: (x,), device_memory="1GiB"),
    "auto_budget": lambda m, x: rkmate.auto_budget(m),
    "measure_step": lambda m, x: rkmate.measure_step(m, lambda: pytest.fail("ran a step")),
    "dtr": lambda m, x: rkmate.dtr.wrap(m, "1MiB"),
}


@pytest.mark.parametrize("kind", ["mps", "xpu"])
@pytest.mark.parametrize("call", CALLS)
def test_an_accelerator_without_an_implementation_is_refused_first(
        call: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rkmate.pipeline.prepare.capture", lambda *_: pytest.fail("began to capture"))
    with pytest.raises(rkmate.ArgumentError, match=f"the device is {kind}:0"):
        CALLS[call](model_on(kind), on(kind, 2, 4))


def test_an_input_on_such_an_accelerator_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rkmate.pipeline.prepare.capture", lambda *_: pytest.fail("began to capture"))
    with pytest.raises(rkmate.ArgumentError, match="the device is xpu:0"):
        rkmate.wrap(nn.Linear(4, 4), (on("xpu", 2, 4),), budget=0.5)


@pytest.mark.parametrize(("name", "message"), [("xpu", "the device is xpu"), ("meta", "meta"),
                                               ("abacus", "should be cpu")])
def test_the_command_refuses(name: str, message: str) -> None:
    with pytest.raises(rkmate.ArgumentError, match=message):
        targets._moved(nn.Linear(4, 4), (torch.zeros(1),), {}, name)


def test_a_dtr_session_refuses_at_the_first_operation() -> None:
    x = on("xpu", 4)
    with rkmate.dtr("1MiB"), pytest.raises(rkmate.ArgumentError, match="the device is xpu:0"):
        x + x


def test_no_test_on_a_kind_elsewhere() -> None:
    """What a device can do is asked of `rkmate.device`; copies are made by `rkmate.offload`."""
    asks = re.compile(r"\bdevice\.type|\.type (==|!=|in|not in|for)\s|torch\.(cuda|mps|xpu)\."
                      r"|get_device_module|\.is_(cuda|cpu|mps|xpu)\b|fork_rng|[gs]et_rng_state")
    found = [f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
             for path in sorted(PACKAGE.rglob("*.py"))
             if path.parent.name not in ("device", "offload", "torch_seam")
             for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
             if asks.search(line)]
    assert not found, "\n".join(found)
