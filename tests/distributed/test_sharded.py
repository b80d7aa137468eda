"""Two gloo processes with models that `fully_shard` has sharded: one budget for the step of a rank, with
gathered parameters, the head and the loss."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rkmate
from rkmate import device as devices
from rkmate.ilp.settings import OptionSettings
from rkmate.pipeline.settings import Settings
from rkmate.planners.settings import PlannerSettings
from rkmate.torch_seam.memory import is_profiling
from tests.distributed.ranks import Found

# Gloo's threads let go of buffers late, by chance: what the measured step shows differs from run to run.
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not dist.is_available(), reason="no torch.distributed"),
              pytest.mark.xdist_group("two processes")]

QUICK = Settings(costs="analytic", options=OptionSettings(grid=(6, 6), time_limit=0.5, block_limit=1.0),
                 planner=PlannerSettings(save_set_seconds=0.2, first_seconds=0.2, smallest_seconds=0.0))
STEPS = 6
WORDS, WIDTH = 4096, 64


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class _LowRank(nn.Module):
    """A frozen linear layer, and a trained one of low rank next to it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


class _Last(nn.Module):
    """A head with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())


class _Net(nn.Module):
    """Words, layers, and the loss of a head: with dropout before the layers, which the rest of the forward
    does not draw again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.dropout = nn.Embedding(WORDS, WIDTH), nn.Dropout(0.1)
        self.layers = nn.ModuleList(_Block() for _ in range(3))
        self.last = _Last()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.words(ids))
        for layer in self.layers:
            x = layer(x)
        loss: torch.Tensor = self.last(x, ids)
        return loss


def _made(kind: str, cls: type[_Net] = _Net) -> _Net:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    net, how = cls(), {"mesh": init_device_mesh("cpu", (2,))}
    if kind == "bfloat16":
        how["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if kind == "gradients in bfloat16":
        how["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    if kind == "low rank":
        net.requires_grad_(False)
        for layer in net.layers:
            layer.up = _LowRank(layer.up)
    for layer in net.layers:
        if kind == "nested":
            fully_shard(layer.up, **how)
        fully_shard(layer, **how)
    if kind in ("head by itself", "gradients in bfloat16"):
        fully_shard(net.words, **how)
        fully_shard(net.last, **how)
    return fully_shard(net, **how)


def _trained(net: _Net, rank: int, ahead: bool = False
             ) -> tuple[list[torch.Tensor], list[int], dict[str, int]]:
    """Return the losses and the gradients of some steps, the peaks of all but the second to fourth (in
    which the model is measured by itself) and the last, and the collectives of the last. `ahead`: gather all
    parameters before the forward."""
    found: list[torch.Tensor] = []
    peaks: list[int] = []
    seen = None
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    for k in range(STEPS):
        torch.manual_seed(10 * k + rank)
        ids = torch.randint(0, WORDS, (8, 32))

        def step(ids: torch.Tensor = ids) -> None:
            for module in (net, *net.layers) if ahead else ():
                module.unshard()
            loss = net(ids)
            loss.backward()
            found.append(loss.detach())
            found.append(torch.get_rng_state())

        if k == STEPS - 1:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
                step()
        elif 1 <= k <= 3:
            step()
        else:
            peaks.append(devices.of(ids).measure_peak(step).peak)
        found += [p.grad.full_tensor().clone() for p in net.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    assert seen is not None
    return found, peaks, dict(Counter(e.name for e in seen.events() if e.name.startswith("gloo:")))


@functools.cache
def _plain(kind: str, rank: int) -> tuple[list[torch.Tensor], list[int], dict[str, int]]:
    return _trained(_made(kind), rank, kind == "gathered ahead")


def _never(graph: Any, examples: Any) -> Any:
    raise AssertionError("a planned layer was compiled")


def _planned(rank: int, kind: str, share: float) -> dict[str, Any]:
    """Train with a budget that is a share of the original step's peak."""
    plain, peaks, count = _plain(kind, rank)
    budget = int(share * min(peaks))            # gloo's threads let go of buffers late in some steps
    net = _made(kind)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if kind == "low rank":                  # plans replace the compiled calls
            for layer in net.layers:
                layer.compile(backend=_never)
        rkmate.apply(net, budget=budget, progress=False, settings=QUICK)
        mine, after, own = _trained(net, rank, kind == "gathered ahead")
    rest = rkmate.applied(net.last if kind == "head by itself" else net)
    return {"equal": all(map(torch.equal, mine, plain)) and len(mine) == len(plain),
            "close": all(torch.allclose(a.float(), b.float(), rtol=1e-4, atol=1e-5)
                         for a, b in zip(mine, plain, strict=True)),
            "exchanges": [count, own], "peaks": after, "budget": budget, "plain": peaks,
            "said": [str(w.message) for w in said if w.category is rkmate.RkmateWarning],
            "rest": None if rest is None else rest.plan.variant,
            "layers": [_shown(layer) for layer in net.layers]}


def _shown(layer: _Block) -> bool:
    return any((found := rkmate.applied(m)) is not None and found.has_plan for m in layer.modules())


def _refused(rank: int) -> dict[str, Any]:
    """Ask for a budget that cannot be met, for one below the smallest, and for the smallest."""
    errors, said = [], []
    budget: float = 0.05
    for _ in range(2):
        net = _made("plain")
        rkmate.apply(net, budget=budget, progress=False, settings=QUICK)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                _trained(net, rank)
            except rkmate.InfeasibleBudget as error:
                errors.append(str(error))
                least = error.minimum_bytes or 0
                budget = int(0.8 * least)
        said += [str(w.message) for w in caught if "has taken" in str(w.message)]
    net = _made("plain")
    rkmate.apply(net, budget=least, progress=False, settings=QUICK)
    return {"errors": errors, "least": least, "said": said, "below": int(0.8 * least),
            "peaks": _trained(net, rank)[1]}


def _accumulated(rank: int, kind: str) -> dict[str, Any]:
    """Exchange the gradients in each backward of three steps, and only in each second one from then on."""

    def trained(net: _Net) -> tuple[list[torch.Tensor], list[int]]:
        found, peaks = [], []
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for k in range(7):
            batches = torch.randint(0, WORDS, (2 if k >= 3 else 1, 8, 32),
                                    generator=torch.Generator().manual_seed(10 * k + rank))

            def step(batches: torch.Tensor = batches) -> None:
                for j, ids in enumerate(batches):
                    torch.manual_seed(j)
                    net.set_requires_gradient_sync(j == len(batches) - 1)
                    loss = net(ids)
                    loss.backward()
                    found.append(loss.detach())

            if k < 5:                                       # the model is measured by itself
                step()
            else:
                peaks.append(devices.of(batches).measure_peak(step).peak)
            found += [p.grad.full_tensor().clone() for p in net.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        return found, peaks

    plain, peaks = trained(_made(kind))
    net = _made(kind)
    budget = int(0.8 * max(peaks))
    rkmate.apply(net, budget=budget, progress=False, settings=replace(QUICK, chunked_loss="never"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        mine, after = trained(net)
    return {"equal": all(map(torch.equal, mine, plain)), "peaks": after, "budget": budget,
            "whole": sum(p.numel() for p in net.parameters()) * (2 if "bfloat16" in kind else 4),
            "said": [str(w.message) for w in said]}


def _larger(rank: int) -> dict[str, Any]:
    """Keep more outside of all plans once the budget is shared out, so that a step exceeds it."""
    net, more, kept = _made("head by itself"), 0, []
    budget = int(0.65 * max(_plain("head by itself", rank)[1]))
    rkmate.apply(net, budget=budget, progress=False, settings=QUICK)
    peaks: dict[int, int] = {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for k in range(9):
            def step() -> None:
                loss = net(torch.zeros(8, 32, dtype=torch.long))
                kept.append(torch.zeros(more, dtype=torch.uint8))
                loss.backward()
                kept.clear()
            if k in (2, 3, 7, 8):
                peaks[k] = devices.of(torch.zeros(1)).measure_peak(step).peak
            else:                                           # the model is measured by itself
                step()
            if k == 3:
                more = max(0, budget - min(peaks.values())) + 3 * 2**18
            net.zero_grad()
    return {"peaks": [peaks[7], peaks[8]], "budget": budget, "said": [str(w.message) for w in said]}


def _measured(rank: int) -> dict[str, Any]:
    """Plan with measured costs, on a processor that seems to have small caches: no buffer empties them."""
    net = _made("plain")
    rkmate.apply(net, budget=0.95, progress=False, settings=replace(QUICK, costs="measured"))
    with mock.patch.object(type(devices.of(torch.zeros(1))), "cache_bytes", 1), \
            mock.patch("rkmate.measure.costs.Caches", side_effect=AssertionError):
        net(torch.zeros(8, 32, dtype=torch.long)).backward()
    return {"planned": all(map(_shown, net.layers))}


def _by_methods(rank: int) -> dict[str, Any]:
    """Call the forward of a model by another method, and a layer by itself."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    class ByMethod(_Net):
        def loss(self, ids: torch.Tensor) -> torch.Tensor:
            return self.forward(ids)

    net = _made("plain", ByMethod)
    register_fsdp_forward_method(net, "loss")
    rkmate.apply(net, budget=1000, progress=False, settings=QUICK)
    ids, refused, said = torch.zeros(8, 32, dtype=torch.long), "", []
    try:
        for _ in range(STEPS):
            net.loss(ids).backward()
    except rkmate.InfeasibleBudget as error:
        refused = str(error)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net.layers[0](torch.randn(2, WIDTH, requires_grad=True)).sum().backward()
        said += [str(w.message) for w in caught]
    return {"refused": refused, "said": said}


def _two_models(rank: int, kind: str) -> dict[str, Any]:
    """Train a model and another one that judges what it makes: both hold data in one step. `kind`: whether
    the other one has steps of its own, too, and an optimizer that steps while the first one waits."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def trained(budget: int | None) -> tuple[list[torch.Tensor], list[int]]:
        torch.manual_seed(0)
        found, peaks, both = [], [], nn.ModuleList(nn.Sequential(*(_Block() for _ in range(3))) for _ in "ab")
        for net in both:
            for module in (*net, net):
                fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
            if budget is not None:                          # the smaller budget of two bounds steps of both
                rkmate.apply(net, budget=budget if net is both[0] else 2 * budget, progress=False,
                             settings=QUICK)
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in both]
        for k in range(12):
            def step(x: torch.Tensor, k: int = k) -> None:
                torch.manual_seed(10 * k + rank)
                if kind == "judged":
                    with torch.set_grad_enabled(k % 2 > 0):
                        made = both[0](x)
                    loss = (both[1](x) - both[1](made.detach())).square().mean()
                    loss.backward()
                    found.append(loss.detach())
                    optimizers[1].step()
                    both[1].zero_grad()
                    x = made if k % 2 else both[0](x)
                else:
                    x = both[0](x)
                loss = both[1](x).square().mean()
                loss.backward()
                found.append(loss.detach())

            made = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(10 * k + rank))
            if k >= 7 and k % 2:
                peaks.append(devices.of(made).measure_peak(functools.partial(step, made)).peak)
            else:                                           # the models are measured by themselves
                step(made)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [*found, *(p.full_tensor() for p in both.parameters())], peaks

    plain, peaks = trained(None)
    budget = int(0.6 * min(peaks))
    mine, after = trained(budget)
    return {"equal": all(map(torch.equal, mine, plain)), "peaks": after, "budget": budget, "plain": peaks}


def _evaluated(rank: int) -> dict[str, Any]:
    """Evaluate between training steps, with gradients recorded and outputs kept."""
    profiled = []

    def trained(budget: int | None) -> tuple[list[torch.Tensor], list[int]]:
        net, found, peaks, kept = _made("plain"), [], [], []
        if budget is not None:
            rkmate.apply(net, budget=budget, progress=False, settings=QUICK)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for k in range(9):
            ids = torch.randint(0, WORDS, (8, 32), generator=torch.Generator().manual_seed(10 * k + rank))
            if k % 2 == 0:
                kept = [net.eval()(ids) for _ in range(3)]
                profiled.append(is_profiling())
                net.train()

            def step(ids: torch.Tensor = ids, k: int = k) -> None:
                torch.manual_seed(k)
                loss = net(ids)
                loss.backward()
                found.append(loss.detach())

            if k >= 7:
                peaks.append(devices.of(ids).measure_peak(step).peak)
            else:
                step()
            optimizer.step()
            optimizer.zero_grad()
        return [*found, *kept, *(p.full_tensor() for p in net.parameters())], peaks

    plain, peaks = trained(None)
    budget = int(0.8 * min(peaks))
    mine, after = trained(budget)
    return {"equal": all(map(torch.equal, mine, plain)), "peaks": after, "budget": budget,
            "profiled": profiled, "plain": peaks}


def _two_calls(rank: int) -> dict[str, Any]:
    """Train with one call before the backward in the first steps, and with two in the others."""
    def trained(budget: int | None) -> tuple[list[torch.Tensor], int]:
        net, found, peak = _made("plain"), [], 0
        if budget is not None:
            rkmate.apply(net, budget=budget, progress=False, settings=QUICK)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for k in range(12):
            def step(k: int = k) -> None:
                torch.manual_seed(10 * k + rank)
                loss = sum(net(torch.randint(0, WORDS, (4, 32))) for _ in range(1 if k < 5 else 2))
                loss.backward()
                found.append(loss.detach())

            if k == 11:
                peak = devices.of(torch.zeros(1)).measure_peak(step).peak
            else:
                step()
            optimizer.step()
            optimizer.zero_grad()
        return [*found, *(p.full_tensor() for p in net.parameters())], peak

    plain, most = trained(None)
    peaks: list[Any] = [None, None]
    dist.all_gather_object(peaks, most)
    budget = int(0.85 * max(peaks))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mine, after = trained(budget)
    close = [torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(mine, plain, strict=True)]
    return {"equal": all(close), "peak": after, "budget": budget,
            "said": [str(w.message) for w in caught if w.category is rkmate.RkmateWarning]}


def _longer(rank: int) -> dict[str, Any]:
    """Train with two calls before the backward, the second of which is longer in some later steps."""
    net = _made("head by itself")
    budget = int(0.48 * min(_plain("head by itself", rank)[1]))
    rkmate.apply(net, budget=budget, progress=False, settings=replace(QUICK, chunked_loss="never"))
    said: list[list[str]] = []
    for k in range(10):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            lengths = 8, 32 if k in (4, 6, 8) else 8
            torch.stack([net(torch.zeros(8, n, dtype=torch.long)) for n in lengths]).sum().backward()
        said.append([str(w.message) for w in caught if w.category is rkmate.RkmateWarning])
        net.zero_grad()
    return {"budget": budget, "said": said}


def _smaller(rank: int) -> dict[str, Any]:
    """Train with a share of each step's peak, at last with shapes of which no schedule keeps to that."""
    net, said = _made("head by itself"), []
    rkmate.apply(net, budget=0.87, progress=False, settings=replace(QUICK, chunked_loss="never"))
    for k in range(10):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            net(torch.zeros(8, 32 if k < 5 else 1, dtype=torch.long)).backward()
        said.append([str(w.message) for w in caught if w.category is rkmate.RkmateWarning])
        net.zero_grad()
    return {"said": said}


def _in_the_backward(rank: int) -> dict[str, Any]:
    """Train with an optimizer for each parameter, which steps when its gradient is there."""
    def trained(budget: int | None) -> tuple[list[torch.Tensor], list[int]]:
        net, peaks = _made("head by itself"), []
        if budget is not None:
            rkmate.apply(net, budget=budget, progress=False, settings=QUICK)
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()}

        def steps(p: torch.Tensor) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in net.parameters():
            p.register_post_accumulate_grad_hook(steps)
        for k in range(7):
            def step(k: int = k) -> None:
                torch.manual_seed(10 * k + rank)
                net(torch.randint(0, WORDS, (8, 32))).backward()

            if k < 5:                                       # the model is measured by itself
                step()
            else:
                peaks.append(devices.of(torch.zeros(1)).measure_peak(step).peak)
        return [p.full_tensor() for p in net.parameters()], peaks

    plain, peaks = trained(None)
    budget = int(0.8 * min(peaks))
    mine, after = trained(budget)
    return {"equal": all(map(torch.equal, mine, plain)), "peaks": after, "budget": budget}


KINDS = {"bfloat16": 0.8, "nested": 0.9, "low rank": 0.8, "gathered ahead": 0.6}
TIGHT = {"plain": 0.5, "head by itself": 0.5}
"""Shares for which the loss has to be computed in chunks."""
MODELS = ("chained", "judged")
"""Kinds of steps of two models."""
KEPT = ("head by itself", "gradients in bfloat16")
"""Kinds whose whole gradients wait for an exchange."""
TASKS: dict[str, Callable[[int], dict[str, Any]]] = {
    **{kind: functools.partial(_planned, kind=kind, share=share) for kind, share in KINDS.items()},
    **{kind: functools.partial(_planned, kind=kind, share=share) for kind, share in TIGHT.items()},
    **{f"accumulated, {kind}": functools.partial(_accumulated, kind=kind) for kind in KEPT},
    **{kind: functools.partial(_two_models, kind=kind) for kind in MODELS},
    "refused": _refused, "larger": _larger, "measured": _measured,
    "by methods": _by_methods, "longer": _longer, "smaller": _smaller, "in the backward": _in_the_backward,
    "two calls": _two_calls, "evaluated": _evaluated}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_keeps_to_the_budget_with_the_bits_of_the_original(found: Found, kind: str) -> None:
    for mine in found[kind]:
        assert "failed" not in mine, mine["failed"]
        assert mine["equal"]
        assert all(mine["layers"])
        told = "layers.1, layers.2 were compiled (Module.compile or torch.compile): planned steps run"
        assert any(told in text for text in mine["said"]) == (kind == "low rank"), mine["said"]
        assert mine["exchanges"][0] == mine["exchanges"][1] != {}
        later = mine["peaks"][kind == "gathered ahead":]        # its first step takes least
        assert min(later) <= mine["budget"], mine               # gloo's threads let go of buffers late


@pytest.mark.parametrize("kind", TIGHT)
def test_the_loss_is_computed_in_chunks_where_nothing_else_fits(found: Found, kind: str) -> None:
    for mine in found[kind]:
        assert "failed" not in mine, mine["failed"]
        assert "chunked-loss" in mine["rest"]
        assert mine["close"]
        assert mine["exchanges"][0] == mine["exchanges"][1] != {}
        assert min(mine["peaks"]) <= mine["budget"], mine       # gloo's threads let go of buffers late
        assert any("a few rows at a time" in text for text in mine["said"])


def test_a_budget_that_cannot_be_met_is_refused_on_all_ranks(found: Found) -> None:
    for mine in found["refused"]:
        assert "failed" not in mine, mine["failed"]
        assert f"{mine['least']:,} bytes" in mine["errors"][-1]
        for error in mine["errors"]:
            assert "outside of all plans" in error and "Most is taken while" in error
            assert "are parameters of FSDP_Net itself (words, last.head)" in error


def test_the_smallest_budget_is_met_and_each_step_above_a_budget_has_a_warning(found: Found) -> None:
    for mine in found["refused"]:
        assert "failed" not in mine, mine["failed"]
        assert min(mine["peaks"]) <= mine["least"], mine        # gloo's threads let go of buffers late
        if len(mine["errors"]) == 2:                            # the smallest budget of two measurements
            assert any("is measured, too" in text for text in mine["said"]), mine


@pytest.mark.parametrize("kind", KEPT)
def test_whole_gradients_that_wait_for_an_exchange_count(found: Found, kind: str) -> None:
    for mine in found[f"accumulated, {kind}"]:
        assert "failed" not in mine, mine["failed"]
        assert mine["equal"]
        assert min(mine["peaks"]) <= mine["budget"], mine       # gloo's threads let go of buffers late
        assert any(f"{mine['whole']:,} bytes" in text and f"{mine['budget']:,} bytes" in text
                   for text in mine["said"]), mine["said"]


def test_a_step_that_takes_more_than_its_plans_is_seen(found: Found) -> None:
    for mine in found["larger"]:
        assert "failed" not in mine, mine["failed"]
        assert any("has taken" in text and f"{mine['budget']:,}" in text for text in mine["said"]), mine
        assert min(mine["peaks"]) <= mine["budget"], mine       # gloo's threads let go of buffers late


def test_the_first_step_takes_no_buffer_to_empty_caches(found: Found) -> None:
    for mine in found["measured"]:
        assert "failed" not in mine, mine["failed"]
        assert mine["planned"]


def test_a_forward_that_another_method_calls_shares_the_budget(found: Found) -> None:
    for mine in found["by methods"]:
        assert "failed" not in mine, mine["failed"]
        assert "outside of all plans" in mine["refused"]
        assert any("from elsewhere than the model's forward" in text for text in mine["said"]), mine["said"]


@pytest.mark.parametrize("kind", MODELS)
def test_models_of_one_step_share_a_budget(found: Found, kind: str) -> None:
    for mine in found[kind]:
        assert "failed" not in mine, mine["failed"]
        assert mine["equal"]
        assert min(mine["peaks"]) <= mine["budget"], mine       # gloo's threads let go of buffers late


def test_outputs_that_an_evaluation_keeps_are_no_part_of_a_step(found: Found) -> None:
    for mine in found["evaluated"]:
        assert "failed" not in mine, mine["failed"]
        assert mine["equal"]
        assert min(mine["peaks"]) <= mine["budget"], mine       # gloo's threads let go of buffers late
        assert not any(mine["profiled"])


def test_several_calls_before_a_backward_are_one_step(found: Found) -> None:
    for mine in found["two calls"]:
        assert "failed" not in mine, mine["failed"]
        assert mine["equal"]
        assert mine["peak"] <= mine["budget"]
        assert not any("calls of this module" in text for text in mine["said"])


def test_optimizers_that_step_in_the_backward_do_not_end_its_measurement(found: Found) -> None:
    for mine in found["in the backward"]:
        assert "failed" not in mine, mine["failed"]
        assert mine["equal"]
        assert min(mine["peaks"]) <= mine["budget"], mine       # gloo's threads let go of buffers late


def test_the_first_step_of_a_shape_is_judged_once_its_budget_is_known(found: Found) -> None:
    for mine in found["smaller"]:
        assert "failed" not in mine, mine["failed"]
        shown = [any("the first step of a new shape" in text for text in said) for said in mine["said"]]
        assert sum(shown) == 1 and any(shown[6:]), mine         # one step more or less may be measured


def test_a_step_whose_later_calls_are_longer_is_measured(found: Found) -> None:
    for mine in found["longer"]:
        assert "failed" not in mine, mine["failed"]
        shown = [any("no plans of its layers" in text and f"{mine['budget']:,}" in text for text in said)
                 for said in mine["said"]]
        assert any(shown[7:]) and not any(shown[:7]), mine
