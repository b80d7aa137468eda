"""Two gloo processes with FullyShardedDataParallel (FSDP1), with the original parameters or flat ones: its
layers are planned where each has an FSDP of its own, and else the whole; a plan from sample inputs is refused
in words that say what to do instead."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rkmate
from rkmate import device as devices
from rkmate.ilp.settings import OptionSettings
from rkmate.pipeline.settings import Settings
from rkmate.planners.settings import PlannerSettings
from rkmate.torch_seam.modules import gathered_bytes
from tests.distributed.ranks import Block, Found, are_equal, caught, steps

pytestmark = [pytest.mark.skipif(not dist.is_available(), reason="no torch.distributed"),
              pytest.mark.xdist_group("two processes")]

QUICK = Settings(costs="analytic", chunked_loss="never",
                 options=OptionSettings(grid=(6, 6), time_limit=0.5, block_limit=1.0),
                 planner=PlannerSettings(save_set_seconds=0.2, first_seconds=0.2, smallest_seconds=0.0))
CHOSEN: dict[str, Any] = {"progress": False, "settings": QUICK}
WORDS, WIDTH, STEPS = 512, 64, 6


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def _flat(net: nn.Module, root: bool = True, layers: bool = True, **options: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    options = {"device_id": torch.device("cpu"), "use_orig_params": True, **options}
    if not root:
        for k, layer in enumerate(net.layers):                          # type: ignore[arg-type]
            net.layers[k] = FullyShardedDataParallel(layer, **options)  # type: ignore[index, operator]
        return net
    policy = ModuleWrapPolicy({Block}) if layers else None
    return FullyShardedDataParallel(net, auto_wrap_policy=policy, **options)


def _ids(number: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (8, 32), generator=torch.Generator().manual_seed(number))


def _trained(net: nn.Module, rank: int, microbatches: int) -> tuple[list[torch.Tensor], int]:
    """Return the losses of some steps and the gradients of the last one, and the peak of a forward with its
    backward, the largest of the last step."""
    found, peak = [], 0
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for k in range(STEPS):
        optimizer.zero_grad()
        for j in range(microbatches):
            ids, last = _ids(100 * k + 10 * j + rank), j == microbatches - 1

            def step(ids: torch.Tensor = ids, last: bool = last) -> None:
                with contextlib.nullcontext() if last else net.no_sync():   # type: ignore[operator]
                    loss = net(ids)
                    loss.backward()
                found.append(loss.detach())
            if k < STEPS - 1:
                step()
            else:
                peak = max(peak, devices.of(ids).measure_peak(step).peak)
        optimizer.step()
    return [*found, *(p.grad.clone() for p in net.parameters() if p.grad is not None)], peak


def _planned(before: bool, microbatches: int = 1, **options: Any) -> Callable[[int], dict[str, Any]]:
    def task(rank: int) -> dict[str, Any]:
        plain, peak = _trained(_flat(_Net(), **options), rank, microbatches)
        net, budget = _Net(), int(0.8 * peak)
        if before:
            rkmate.apply(net, budget=budget, **CHOSEN)
        flat = _flat(net, **options)
        if not before:
            assert rkmate.apply(flat, budget=budget, **CHOSEN) is flat
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            mine, taken = _trained(flat, rank, microbatches)
        planned = [(call := rkmate.applied(m)) is not None and call.has_plan for m in (
            flat, *(net.layers if options.get("layers", True) else ()))]
        rkmate.remove(flat)
        return {"equal": are_equal(mine, plain), "budget": budget, "taken": taken, "planned": planned,
                "said": [str(w.message) for w in said if w.category is rkmate.RkmateWarning],
                "removed": all(rkmate.applied(m) is None for m in flat.modules())}
    return task


def _in_bfloat16(rank: int) -> dict[str, Any]:
    from torch.distributed.fsdp import MixedPrecision

    return _planned(True, mixed_precision=MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32))(rank)


def _kept(rank: int) -> dict[str, Any]:
    from torch.distributed.fsdp import ShardingStrategy

    return _planned(False, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)(rank)


def _whole(rank: int) -> dict[str, Any]:
    from torch.distributed.fsdp import ShardingStrategy

    return _planned(False, sharding_strategy=ShardingStrategy.NO_SHARD)(rank)


def _refused(rank: int) -> dict[str, Any]:
    ids = _ids(rank)

    one = {"layers": False}
    found = {
        "around wrap": caught(lambda: _flat(rkmate.wrap(
            _Net(), (ids,), budget=0.8, **CHOSEN), use_orig_params=False, **one)(ids)),
        "inside of wrap": caught(lambda: rkmate.wrap(_flat(_Net()), (ids,), budget=0.8, **CHOSEN)),
        "plan": caught(lambda: rkmate.plan(_flat(_Net()), (ids,), budget=0.8, **CHOSEN)),
        "shared_plan": caught(lambda: rkmate.shared_plan(_flat(_Net()), (ids,), budget=0.8, **CHOSEN)),
        "without the original parameters": caught(lambda: rkmate.plan(
            _flat(_Net(), use_orig_params=False), (ids,), budget=0.8, **CHOSEN))}
    ways = {"use_orig_params": False}, one
    refused = [_flat(_Net(), **options) for options in ways]
    samples = [caught(lambda flat=flat: rkmate.apply(flat, (ids,), budget=0.8, **CHOSEN)) for flat in refused]
    unchanged = [rkmate.applied(flat) is None and all(map(
        torch.equal, *(_trained(net, rank, 1)[0] for net in (flat, _flat(_Net(), **options)))))
        for flat, options in zip(refused, ways, strict=True)]
    in_place = caught(lambda: rkmate.apply(_flat(_Net()), budget=0.8, progress=False,
                                            settings=Settings(gradients="in_place")))
    return {"errors": found, "samples": samples, "in place": in_place, "unchanged": unchanged}


def _gathered(rank: int) -> dict[str, Any]:
    """The bytes that are gathered when a forward begins: with whole parameters on each rank, none."""
    from torch.distributed.fsdp import ShardingStrategy

    found = []
    for kind in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        flat = _flat(_Net(), sharding_strategy=kind)
        flat.module.words.register_forward_pre_hook(lambda *_: found.append(gathered_bytes(flat.module)))
        flat(_ids(rank)).backward()
    return {"bytes": found}


def _like_the_original(rank: int) -> dict[str, Any]:
    """A plan under flat parameters that look as the original ones do."""
    planned, plain = _flat(rkmate.wrap(_Net(), (_ids(rank),), budget=0.8, **CHOSEN), layers=False), _flat(
        _Net(), layers=False)
    return {"equal": are_equal(*(steps(net, net, [_ids(rank)] * 2) for net in (planned, plain)))}


PLANNED: dict[str, Callable[[int], dict[str, Any]]] = {
    "before": _planned(True), "after": _planned(False), "no root": _planned(False, root=False),
    "bfloat16": _in_bfloat16, "gathered until the backward": _kept,
    "whole gradients": _planned(False, microbatches=2), "whole parameters": _whole,
    "flat": _planned(False, use_orig_params=False), "flat, before": _planned(True, use_orig_params=False),
    "flat, whole gradients": _planned(False, microbatches=2, use_orig_params=False),
    "one unit": _planned(False, layers=False), "one unit, before": _planned(True, layers=False),
    "one flat unit": _planned(True, layers=False, use_orig_params=False)}
TASKS: dict[str, Callable[[int], dict[str, Any]]] = {
    **PLANNED, "refused": _refused, "gathered": _gathered, "like the original": _like_the_original}


def _of(found: Found, task: str) -> list[dict[str, Any]]:
    assert all("failed" not in mine for mine in found[task]), found[task]
    return found[task]


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLANNED)
def test_layers_are_planned(found: Found, kind: str) -> None:
    for mine in _of(found, kind):
        assert mine["equal"] and mine["removed"]
        assert mine["taken"] <= mine["budget"]
        assert all(mine["planned"])
        assert not mine["said"]


@pytest.mark.slow
def test_what_cannot_be_planned_is_refused_and_left_as_it_is(found: Found) -> None:
    for mine in _of(found, "refused"):
        assert len(mine["errors"]) == 5
        for kind, text in mine["errors"].values():
            assert kind == "ArgumentError", text
            assert "FullyShardedDataParallel (FSDP1)" in text
            assert "rkmate.apply(model, budget=...)" in text
            assert "fully_shard (FSDP2)" in text
        assert all(kind == "ArgumentError" and "leave out the sample inputs" in text
                   for kind, text in mine["samples"]), mine["samples"]
        assert mine["unchanged"] == [True, True]
        assert mine["in place"][0] == "ArgumentError" and "exchanges gradients" in mine["in place"][1]


@pytest.mark.slow
def test_whole_parameters_are_not_gathered(found: Found) -> None:
    root = 4 * (2 * WORDS * WIDTH + WORDS)
    assert all(mine["bytes"] == [root, 0] for mine in _of(found, "gathered"))


@pytest.mark.slow
def test_a_plan_under_flat_parameters_is_right_if_it_fits(found: Found) -> None:
    assert all(mine["equal"] for mine in _of(found, "like the original"))
