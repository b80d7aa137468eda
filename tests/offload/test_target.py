"""`offload=`: what is refused before any work, how the way there gets into plans, and back out of files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate import device as devices
from rkmate.cli.main import main
from rkmate.device.cpu import Cpu
from rkmate.devices import H100
from rkmate.errors import ArgumentError, PlanError
from rkmate.ir.link import Link
from rkmate.ir.simulate import simulate
from rkmate.offload import target as places
from rkmate.offload.target import Offload, offload_of
from rkmate.show.plan import Plan
from tests.copying import BUFFERS, LateEngine, sending, use
from tests.options import options_of


def model() -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    layers = (m for _ in range(4) for m in (nn.Linear(32, 32), nn.Tanh()))
    return nn.Sequential(*layers), (torch.randn(64, 32),)


def plan(**more: Any) -> Plan:
    named = {"budget": 1.0, "costs": "analytic", "progress": False, **more}
    return rkmate.plan(*model(), **options_of(**named))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> LateEngine:
    return use(monkeypatch, LateEngine())


def test_what_users_write() -> None:
    here = str(Path.cwd() / "away")
    assert offload_of(None, None) is None
    assert offload_of("host", "20GiB") == Offload("host", 20 * 2**30)
    assert offload_of("away", 7000) == Offload(here, 7000) == offload_of(Path("away"), 7000)
    assert offload_of(Offload("host", 5000), None) == Offload("host", 5000)
    assert offload_of(Offload("host", verify=True), 5000) == Offload("host", 5000, True)
    assert offload_of(None, "1MiB", Offload("host", 5000, True)) == Offload("host", 2**20, True)
    assert offload_of("away", None, Offload("host", 5000)) == Offload(here)
    assert offload_of(None, None, Offload("host")) == Offload("host")


def test_a_place_is_a_whole_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert Offload("~/away").place == Offload(Path("away")).place == str(tmp_path / "away")
    assert Offload("away", "1.5GiB").most_bytes == 3 * 2**29 and Offload("host").place == "host"
    assert Offload("away", "1MiB").part(1, 3) == offload_of("away", 2**20 // 3)
    assert Offload("away").part(1, 3) == Offload("away")


@pytest.mark.parametrize(("place", "most", "message"), [
    (None, "1GiB", "offload_bytes is '1GiB', and offload does not say where to"),
    (3, None, "offload is 3; it should be a folder"), ("", None, "offload is ''"),
    ("host", 0.5, 'most_bytes is 0.5; it should be bytes .an int., or text such as "20GiB"'),
    ("host", "50%", "most_bytes is '50%'"), ("host", -1, "most_bytes is -1"),
    ("host", "many", "most_bytes is 'many'"), ("host", 0, "most_bytes is 0"),
    ("host", 20, "most_bytes is 20, 20 bytes, which is less than any tensor worth sending"),
    ("host", "1KiB", "most_bytes is '1KiB', 1,024 bytes, which is less"), (None, 20, "where to"),
])
def test_what_is_no_place(place: Any, most: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        offload_of(place, most)
    if place is not None:
        with pytest.raises(ArgumentError, match=message):
            Offload(place, most)


def test_what_else_is_no_place() -> None:
    with pytest.raises(ArgumentError, match="offload is None; it should be a folder"):
        Offload(None)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="verify is 'yes'"):
        Offload("host", verify="yes")  # type: ignore[arg-type]


@pytest.fixture
def no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("captured")

    monkeypatch.setattr("rkmate.pipeline.prepare.capture", refuse)


@pytest.mark.usefixtures("no_capture")
@pytest.mark.parametrize("call", [rkmate.wrap, rkmate.plan, rkmate.apply])
def test_places_are_checked_before_any_work(call: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for place, message in (("host", "where a model on the CPU is anyway: give a folder"),
                           (tmp_path / "none", "there is no such folder"), (file, "there is no such folder")):
        with pytest.raises(ArgumentError, match=message):
            call(*model(), budget=0.5, offload=place, progress=False)
    with pytest.raises(ArgumentError, match="no such folder"):
        rkmate.tradeoff(*model(), offload=tmp_path / "none", progress=False)
    with pytest.raises(ArgumentError, match="no such folder"):
        rkmate.compare(*model(), offload=tmp_path / "none", progress=False)
    with pytest.raises(ArgumentError, match="no such folder"):
        rkmate.max_batch_size(model()[0], lambda n: (torch.randn(n, 32),), device_memory="1GiB",
                              offload=str(tmp_path / "none"), progress=False)
    with pytest.raises(ArgumentError, match=r"Settings.offload='x'.: give it to the call"):
        rkmate.Settings(offload="x")  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_capture")
@pytest.mark.parametrize("call", [rkmate.wrap, rkmate.plan, rkmate.apply])
def test_planners_that_send_nothing_are_refused(call: Any, tmp_path: Path) -> None:
    for planner in ("rk-rotor", "lower-sets"):
        with pytest.raises(ArgumentError, match=f"planner is '{planner}', which only recomputes.*'save-set'"):
            call(*model(), budget=0.5, settings=rkmate.Settings(planner=planner), offload=str(tmp_path),
                 progress=False)


def test_settings_say_where_to_and_a_call_how_much(engine: LateEngine, tmp_path: Path) -> None:
    settings = rkmate.Settings(costs="analytic", offload=Offload(tmp_path, verify=True))
    with pytest.warns(rkmate.RkmateWarning, match=r"plan\(offload_bytes=...\) is now offload=rkmate.Offload"):
        link = rkmate.plan(*model(), budget=1.0, progress=False,
                           offload_bytes="1MiB", settings=settings).graph.cd.link
    assert link is not None and (link.place, link.most_bytes) == (str(tmp_path), 2**20)


def test_a_part_that_is_too_small_is_none(tmp_path: Path) -> None:
    small = Offload(tmp_path, 5000)
    assert places.link_of(small, devices.of("cpu"), "analytic") is not None
    assert places.link_of(small, devices.of("cpu"), "analytic", 2) is None
    assert places.link_of(small.part(0, 7), devices.of("cpu"), "measured") is None


def test_each_of_several_calls_has_its_part(engine: LateEngine, tmp_path: Path) -> None:
    made = plan(offload=str(tmp_path), offload_bytes="1MiB", calls=3)
    assert made.graph.cd.link is not None and made.graph.cd.link.most_bytes == 2**20 // 3
    sent = sending(made, link=replace(made.graph.cd.link, most_bytes=2**20))
    away = simulate(sent.graph.cd, sent.schedule).away
    with pytest.raises(PlanError, match=f"sends {away:,} bytes away in each of 3 calls, and most_bytes is "
                                        f"{2 * away:,}: give more"):
        rkmate.wrap(*model(), plan=sent, progress=False, offload=rkmate.Offload(str(tmp_path), 2 * away))
    module = rkmate.wrap(*model(), plan=sent, progress=False, offload=rkmate.Offload(str(tmp_path), 3 * away))
    assert module.plan.graph.cd.link is not None and module.plan.graph.cd.link.most_bytes == away


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ArgumentError, match="cannot be written to"):
        Offload(str(tmp_path)).check_folder()


def test_a_folder_is_checked_when_a_budget_is_applied(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no such folder"):
        rkmate.apply(model()[0], budget=0.5, offload=str(tmp_path / "none"))


def test_recorded_steps_send_nothing(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"cuda_graph=True .* leave out offload="):
        rkmate.wrap(*model(), budget=0.5, offload=str(tmp_path),
                    settings=rkmate.Settings(run=rkmate.RunSettings(cuda_graph=True)), progress=False)


def test_a_stated_way_is_in_the_plan(engine: LateEngine, tmp_path: Path) -> None:
    made = plan(offload=str(tmp_path), offload_bytes="1MiB")
    assert made.graph.cd.link == Link(1e9, 1e9, 1e-3, BUFFERS, 2**20, str(tmp_path))
    assert "at 1 GB/s each way is an estimate" in made.note
    assert (without := plan()).graph.cd.link is None and "estimate" not in without.note
    assert made.schedule == without.schedule        # nothing is gained where the step fits whole
    assert rkmate.wrap(*model(), plan=made, progress=False).plan.schedule == made.schedule


def test_a_way_is_measured_where_costs_are(engine: LateEngine, tmp_path: Path,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    link = Link(3e9, 4e9, 1e-4, BUFFERS, None, str(tmp_path))

    def measure(device: Any, used: Any, folder: Any) -> Link:
        calls.append((device, used))
        return link

    monkeypatch.setattr(places, "measure_link", measure)
    made = plan(offload=str(tmp_path), costs="measured")
    assert made.graph.cd.link == link and "estimate" not in made.note
    (device, used), = calls
    assert isinstance(device, Cpu) and used is engine


def test_a_gpu_that_is_not_here() -> None:
    made = plan(device="h100", offload="host", costs=None)
    link = made.graph.cd.link
    assert link is not None and link.place == "host" and link.buffer_bytes == 0
    assert link.out_bytes_per_second == H100.expected.host_bytes_per_second == pytest.approx(0.7 * 63e9)
    assert "data goes to the host's memory and back at 44.1 GB/s each way is an estimate" in made.note
    with pytest.raises(ArgumentError, match=r'a GPU data is sent to the host.s memory: offload="host"'):
        plan(device="h100", offload="/not/here", costs=None)


def test_a_saved_plan_says_where_to(engine: LateEngine, tmp_path: Path) -> None:
    sent = sending(plan(offload=str(tmp_path), offload_bytes=2**30))
    sent = replace(sent, graph=sent.graph.with_link(Link(1.0, 2.0, 0.5, BUFFERS, 2**30, str(tmp_path))))
    sent.save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["graph"]["link"]["place"] == str(tmp_path)
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.graph.cd.link == sent.graph.cd.link and loaded.schedule == sent.schedule
    with pytest.raises(PlanError, match=f"made for {tmp_path}.*say offload= again"):
        rkmate.wrap(*model(), plan=loaded, progress=False)
    with pytest.raises(PlanError, match="bytes away, and most_bytes is 5,000"):
        rkmate.wrap(*model(), plan=loaded, progress=False, offload=rkmate.Offload(str(tmp_path), 5000))
    other = tmp_path / "other"
    other.mkdir()
    module = rkmate.wrap(*model(), plan=loaded, progress=False, offload=rkmate.Offload(str(other), "1MiB"))
    assert module.plan.graph.cd.link == replace(sent.graph.cd.link, place=str(other),  # type: ignore[type-var]
                                                most_bytes=2**20)
    one = replace(loaded.graph.cd.link, buffer_bytes=1)  # type: ignore[type-var]
    before = replace(sent, graph=sent.graph.with_link(one), peak_bytes=sent.peak_bytes - BUFFERS + 1)
    with pytest.raises(PlanError, match="make the plan again"):
        rkmate.wrap(*model(), plan=before, progress=False, offload=str(other))



def test_other_sizes_keep_the_way(engine: LateEngine, tmp_path: Path) -> None:
    """Their plans may be made from a known one's, copies and all."""
    m, args = model()
    link = Link(1e12, 1e12, 0.0, BUFFERS, None, str(tmp_path))
    sent = sending(plan(offload=str(tmp_path)), link=link)
    sent = replace(sent, budget_bytes=sent.peak_bytes)
    module = rkmate.wrap(m, args, plan=sent, settings=rkmate.Settings(costs="analytic"), progress=False,
                         offload=str(tmp_path))
    for n in (32, 48, 40):
        module(torch.randn(n, 32)).sum().backward()
        assert module.plan.graph.cd.link is not None
        assert module.plan.peak_bytes <= sent.peak_bytes


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "mlp", "--budget", "100%", "--analytic", "--quiet", "--offload", str(tmp_path),
                 "--offload-bytes", "1GiB"]) == 0
    assert str(tmp_path) in capsys.readouterr().out
    assert main(["plan", "mlp", "--budget", "100%", "--analytic", "--quiet", "--offload", "host"]) == 2
    assert "give a folder" in capsys.readouterr().err
