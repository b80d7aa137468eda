"""Two gloo processes with models that are parallel already: refused in words that say what to do instead, and
what they say works."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rkmate
from rkmate.ilp.settings import OptionSettings
from rkmate.pipeline.settings import Settings
from rkmate.planners.settings import PlannerSettings
from tests.distributed.ranks import Found, are_equal, steps, whole

pytestmark = [pytest.mark.skipif(not dist.is_available(), reason="no torch.distributed"),
              pytest.mark.xdist_group("two processes")]

QUICK = Settings(options=OptionSettings(grid=(6, 6), time_limit=0.5, block_limit=1.0),
                 planner=PlannerSettings(save_set_seconds=0.2, first_seconds=0.2, smallest_seconds=0.0))
CHOSEN = {"budget": 0.8, "progress": False, "settings": QUICK}


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
                                    for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def _data(rank: int) -> torch.Tensor:
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(rank))


def _mesh(kind: str = "cpu") -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(kind, (2,))


def _caught(call: Callable[[], Any]) -> tuple[str, str, int]:
    """The class of an error, its message, and the number of warnings before it."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            call()
        except Exception as error:
            warned = [w for w in said if w.category is rkmate.RkmateWarning]
            return type(error).__name__, str(error), len(warned)
    return "nothing", "", 0


def _steps(call: Callable[..., torch.Tensor], parameters: nn.Module, rank: int) -> list[torch.Tensor]:
    return steps(call, parameters, [_data(rank)] * 2)


def _replicas(rank: int) -> dict[str, Any]:
    ddp = DistributedDataParallel(_Net())
    found = {"apply": _caught(lambda: rkmate.apply(ddp, **CHOSEN)),
             "wrap": _caught(lambda: rkmate.wrap(ddp, (_data(rank),), **CHOSEN))}
    rkmate.apply(ddp.module, **CHOSEN)
    mine = _steps(ddp, ddp, rank)
    plain = DistributedDataParallel(_Net())
    return {**found, "planned": rkmate.applied(ddp.module).has_plan,         # type: ignore[union-attr]
            "equal": are_equal(mine, _steps(plain, plain, rank))}


def _distributed_input(rank: int) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, distribute_tensor

    spread = distribute_tensor(_data(0), _mesh(), [Replicate()])
    net = _Net()
    net.register_buffer("table", distribute_tensor(_data(0), _mesh(), [Replicate()]))
    return {"input": _caught(lambda: rkmate.wrap(_Net(), (spread,), **CHOSEN)),
            "buffer": _caught(lambda: rkmate.wrap(net, (_data(0),), **CHOSEN))}


def _sharded_elsewhere(rank: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    found = {}
    for place in ("cpu", "meta"):
        net = _Net().to(place)
        for layer in net.layers:
            fully_shard(layer, mesh=_mesh())
        fully_shard(net, mesh=_mesh())
        x = _data(rank).to(place)
        found[f"plan, {place}"] = _caught(lambda net=net, x=x: rkmate.plan(net, (x,), **CHOSEN))
        found[f"plan for a GPU, {place}"] = _caught(lambda net=net, x=x: rkmate.plan(
            net, (x,), device="h100", budget=0.8, progress=False))
        found[f"tradeoff for a GPU, {place}"] = _caught(lambda net=net, x=x: rkmate.tradeoff(
            net, (x,), device="h100", progress=False))
    return found


def _nothing_to_compute_again(rank: int) -> dict[str, Any]:
    """A layer with nothing to compute again, sharded by itself: it takes what it needs of the budget of the
    step. A layer of one operation has no plan."""
    from torch.distributed.fsdp import fully_shard

    found = []
    for head in (nn.Sequential(nn.Linear(32, 100)), nn.Linear(32, 100)):
        net = nn.Sequential(*_Net().layers, head)
        for layer in net:
            fully_shard(layer, mesh=_mesh())
        rkmate.apply(fully_shard(net, mesh=_mesh()), **{**CHOSEN, "budget": 0.95})
        for _ in range(3):
            net(_data(rank)).sum().backward()
        found.append([rkmate.applied(layer) is not None for layer in net])
    return {"planned": found}


def _llama(rank: int) -> dict[str, Any]:
    """Layers that write to a key-value cache in training, as transformers' do by default."""
    transformers = pytest.importorskip("transformers")
    from torch.distributed.fsdp import fully_shard

    def made() -> nn.Module:
        torch.manual_seed(0)
        net = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, attn_implementation="eager"))
        assert net.config.use_cache
        for layer in net.model.layers:
            fully_shard(layer, mesh=_mesh())
        return fully_shard(net, mesh=_mesh())

    def loss(net: nn.Module, recorded: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(rank))

        def call(_: torch.Tensor) -> torch.Tensor:
            out = net(input_ids=ids, labels=ids, output_attentions=recorded)
            return out.loss + sum(t.square().mean() for t in out.attentions or ())
        return call

    plain, planned = made(), rkmate.apply(made(), **CHOSEN)
    equal = []
    for recorded in (False, True):
        found = [_steps(loss(net, recorded), net, rank) for net in (plain, planned)]
        equal.append(are_equal(*(list(map(whole, some)) for some in found)))
    return {"equal": all(equal), "planned": [
        rkmate.applied(layer) is not None for layer in planned.model.layers]}


class _Collecting(_Net):
    """Trains what hooks of its layers put into a list that each forward begins anew."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.found: list[torch.Tensor] = []
        for layer in self.layers:
            layer.register_forward_hook(lambda m, args, out: self.found.append(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.found = []
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x).square().mean() + sum((f.exp().mean() for f in self.found), torch.zeros(()))


def _collected(rank: int) -> dict[str, Any]:
    """Hooks of sharded layers hand tensors to the rest of the forward."""
    from torch.distributed.fsdp import fully_shard

    found = []
    for planned in (False, True):
        net = _Collecting()
        for module in (*net.layers, net):
            fully_shard(module, mesh=_mesh())
        if planned:
            rkmate.apply(net, **{**CHOSEN, "budget": 1 << 30})
        found.append(_steps(net, net, rank))
    return {"equal": are_equal(*(list(map(whole, some)) for some in found))}


def _not_waited_for(rank: int) -> dict[str, Any]:
    """Hand a layer the result of a collective that nobody has waited for."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_gather_tensor_autograd
    from torch.distributed.fsdp import fully_shard

    found = []
    for planned in (False, True):
        net = _Net()
        for module in (*net.layers, net):
            fully_shard(module, mesh=_mesh())
        if planned:
            rkmate.apply(net, **{**CHOSEN, "budget": 1 << 30})
        x = _data(rank).requires_grad_()
        every = all_gather_tensor_autograd(x, 0, dist.group.WORLD)
        assert isinstance(every, AsyncCollectiveTensor)
        net.layers[0](every).square().mean().backward()
        found.append(x.grad)
    return {"equal": None not in found and torch.equal(*found)}


TASKS: dict[str, Callable[[int], dict[str, Any]]] = {
    "replicas": _replicas, "distributed input": _distributed_input,
    "sharded elsewhere": _sharded_elsewhere, "nothing to compute again": _nothing_to_compute_again,
    "llama": _llama, "collected": _collected, "not waited for": _not_waited_for}


def _of(found: Found, task: str) -> list[dict[str, Any]]:
    assert all("failed" not in mine for mine in found[task]), found[task]
    return found[task]


def _assert_refused(error: tuple[str, str, int], *words: str) -> None:
    kind, text, warned = error
    assert kind == "ArgumentError", error
    assert all(word in text for word in words), text
    assert not warned


def test_replicas_are_planned_inside(found: Found) -> None:
    for mine in _of(found, "replicas"):
        for way in ("apply", "wrap"):
            _assert_refused(mine[way], "is a DistributedDataParallel", "rkmate.apply(ddp.module, budget=...)",
                            "DistributedDataParallel(rkmate.wrap(module, ...))")
        assert mine["planned"] and mine["equal"]


def test_distributed_inputs_and_buffers_are_refused(found: Found) -> None:
    for mine in _of(found, "distributed input"):
        _assert_refused(mine["input"], "an input tensor is a DTensor", "to_local")
        _assert_refused(mine["buffer"], "table is a buffer that is a DTensor")


def test_plans_of_sharded_models_are_refused_on_each_device(found: Found) -> None:
    for mine in _of(found, "sharded elsewhere"):
        assert len(mine) == 6
        for error in mine.values():
            _assert_refused(error, "0.0.weight is a DTensor that fully_shard has sharded",
                            "rkmate.apply(model, budget=...) without sample inputs")


def test_a_layer_with_nothing_to_compute_again_trains(found: Found) -> None:
    for mine in _of(found, "nothing to compute again"):
        assert mine["planned"] == [[True, True, True, True], [True, True, True, False]]


def test_a_model_on_the_meta_device_can_be_planned_for_a_gpu() -> None:
    with pytest.raises(rkmate.ArgumentError, match=r"to_empty\), or plan .*device=rkmate.devices.H100"):
        rkmate.plan(_Net().to("meta"), (_data(0).to("meta"),), **CHOSEN)


def test_layers_that_write_to_a_cache_are_planned(found: Found) -> None:
    pytest.importorskip("transformers")
    for mine in _of(found, "llama"):
        assert mine["equal"] and mine["planned"] == [True, True]


def test_tensors_that_hooks_of_layers_hand_to_the_rest_are_trained(found: Found) -> None:
    for mine in _of(found, "collected"):
        assert mine["equal"]


def test_gradients_of_results_that_nobody_has_waited_for(found: Found) -> None:
    for mine in found["not waited for"]:
        assert "failed" not in mine, mine["failed"]
        assert mine["equal"]
