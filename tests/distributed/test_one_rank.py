"""Models that are sharded over one process, as after a checkpoint is resumed there: buffers of the exchange
are the same in each step, so the smallest budget that an error names is exactly what its steps take."""

from __future__ import annotations

import functools
import itertools
import logging
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import rkmate
from benchmarks.ranks import GPT, sharded
from rkmate import device as devices
from rkmate.parts.sharded import LATER
from rkmate.pipeline.settings import Settings
from tests.distributed.ranks import Found, are_equal, whole

pytestmark = [pytest.mark.skipif(not dist.is_available(), reason="no torch.distributed"),
              pytest.mark.xdist_group("two processes")]

RANKS = {"count": 1}
STEPS, WORDS = 8, 64


def _peaks(budget: int) -> list[int]:
    """Return the peaks of the last steps with a budget."""
    model = sharded(model=GPT(WORDS, 32, 2))
    rkmate.apply(model, budget=budget, progress=False, settings=Settings(costs="analytic"))
    peaks = []
    for k in range(STEPS):
        ids = torch.randint(WORDS, (2, 16), generator=torch.Generator().manual_seed(k))
        if k < STEPS - 2:
            model(ids).backward()
        else:
            peaks.append(devices.of(ids).measure_peak(lambda ids=ids: model(ids).backward()).peak)
        model.zero_grad()
    return peaks


def _least(rank: int) -> dict[str, Any]:
    try:
        _peaks(1)
    except rkmate.InfeasibleBudget as error:
        least = error.minimum_bytes or 0
        return {"least": least, "peaks": _peaks(least)}
    return {}


def _first(rank: int) -> dict[str, Any]:
    """Take the first two steps of shapes of the same size, with a loss that takes nearly all of the budget if
    it is not computed in chunks."""
    def peaks(budget: int, shapes: int = 1, **how: Any) -> list[int]:
        model = sharded(model=GPT(2048, 32, 2))
        rkmate.apply(model, budget=budget, progress=False, settings=Settings(costs="analytic", **how))
        found = []
        for k in range(shapes):
            ids = torch.randint(WORDS, (8 << k, 64 >> k))
            for _ in range(2):
                found.append(devices.of(ids).measure_peak(lambda ids=ids: model(ids).backward()).peak)
                model.zero_grad()
        return found

    whole = max(peaks(1 << 40, chunked_loss="never"))
    return {"whole": whole, "below": peaks(int(0.93 * whole)), "above": peaks(int(1.01 * whole), shapes=3)}


class _Square(torch.nn.Sequential):
    """Differs from its base in its forward alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().forward(x).square()
        return found


def _other_classes(rank: int) -> dict[str, Any]:
    """Layers with equal parameters and attributes, whose classes, or those inside of them, differ."""
    from torch.distributed.fsdp import fully_shard

    def trained(budget: float | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        kinds = (torch.nn.Sequential, torch.nn.Tanh), (torch.nn.Sequential, torch.nn.Sigmoid), (
            _Square, torch.nn.Tanh)
        model = torch.nn.Sequential(*(kind(torch.nn.Linear(8, 8), act(), torch.nn.Linear(8, 8))
                                      for kind, act in kinds * 2))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        if budget is not None:
            rkmate.apply(model, budget=budget, progress=False, settings=Settings(costs="analytic"))
        losses = []
        for _ in range(4):
            loss = model(torch.ones(4, 8)).mean()
            loss.backward()
            losses.append(loss.detach())
        return [*losses, *(whole(p.grad) for p in model.parameters())]

    return {"equal": are_equal(trained(None), trained(1.0))}


class _Growing(GPT):
    """A model that holds further bytes next to its head."""

    more = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        held = torch.zeros(self.more, dtype=torch.uint8) if self.more else None
        loss = super().forward(ids)
        del held
        return loss


def _over_many_steps(kind: str) -> dict[str, Any]:
    """Keep an output of a call without a backward in each step, take more from some step on, train the last
    layer or the embedding only, take two batches that are too large, in training mode or not, or let small
    microbatches exchange the gradients of large ones."""
    model, kept, said, log = _Growing(WORDS, 32, 2), [], [], logging.Handler()
    model.train(kind != "larger in evaluation")
    records: list[str] = []
    log.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rkmate").addHandler(log)
    if kind == "frozen":
        model.words.requires_grad_(False)
        model.layers[0].requires_grad_(False)
    if kind == "all frozen":                # all that has a plan; the embedding before it is trained
        model.layers.requires_grad_(False)
        model.head.requires_grad_(False)
    sharded(model=model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(k: int) -> None:
        if kind == "kept":
            kept.append(model(torch.randint(WORDS, (8, 32))))
        if kind == "uneven":
            for rows in (8, 8, 1):
                model.set_requires_gradient_sync(rows == 1)
                model(torch.randint(WORDS, (rows, 32))).backward()
            return
        large = kind.startswith("larger") and k in (8, 9)
        model(torch.randint(WORDS, (32, 64) if large else (8, 32))).backward()

    def peak(k: int) -> int:
        found = devices.of(torch.zeros(1)).measure_peak(lambda: step(k)).peak
        optimizer.zero_grad()
        return found

    peak(0)
    plain = peak(1)
    rkmate.apply(model, budget=int(0.85 * plain), progress=False, settings=Settings(costs="analytic"))
    for k in range(LATER + 4):
        if kind == "grown" and k == 8:
            model.more = plain // 8
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(k)
            optimizer.step()
        said += [str(w.message) for w in caught if w.category is rkmate.RkmateWarning]
        optimizer.zero_grad()
    logging.getLogger("rkmate").removeHandler(log)
    return {"peak": peak(0), "plain": plain, "budget": int(0.85 * plain), "said": said,
            "shared": sum("from this step on" in text for text in records)}


class _Biased(torch.nn.Module):
    """A layer that hands its bias on, which the first one makes."""

    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 128), torch.nn.Linear(128, 32)
        self.bias = torch.nn.Linear(32, 128) if is_first else None

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result and the bias."""
        bias = self.bias(x) if self.bias is not None else bias
        assert bias is not None
        return x + self.down(torch.tanh(torch.nn.functional.gelu(self.up(x) + bias))), 1.5 * bias


class _HandingOn(torch.nn.Module):
    """Layers that hand a bias on: nothing reads what the last one hands on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(_Biased(k == 0) for k in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        bias = None
        for layer in self.layers:
            x, bias = layer(x, bias)
        return x.square().mean()


def _hooked(rank: int) -> dict[str, Any]:
    """Compare steps of layers, one of which gets a hook that cannot be planned, and loses it again."""
    found: list[list[torch.Tensor]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for planned in (False, True):
            model = sharded(model=GPT(WORDS, 32, 2))
            if planned:
                rkmate.apply(model, budget=1.0, progress=False, settings=Settings(costs="analytic"))
            hook = None
            for k in range(STEPS):
                if k == 4:
                    inner = next(m for m in model.layers[1].modules() if isinstance(m, torch.nn.Linear))
                    hook = inner.register_full_backward_hook(lambda module, into, out: None)
                if k == 6 and hook is not None:
                    hook.remove()
                ids = torch.randint(WORDS, (2, 16), generator=torch.Generator().manual_seed(k))
                model.zero_grad()
                model(ids).backward()
            found.append([whole(p.grad) for p in model.parameters()])
    return {"equal": all(map(torch.equal, *found)),
            "said": [str(w.message) for w in caught if w.category is rkmate.RkmateWarning]}


def _handed_on(rank: int) -> dict[str, Any]:
    """Compare steps of layers, one of whose outputs the loss does not depend on."""
    from torch.distributed.fsdp import fully_shard

    runs: list[tuple[list[torch.Tensor], int]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for planned in (False, True):
            model = _HandingOn()
            for module in (*model.layers, model):
                fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
            if planned:
                rkmate.apply(model, budget=int(0.85 * runs[0][1]), progress=False,
                             settings=Settings(costs="analytic", chunked_loss="never"))
            optimizer, gradients, peak = torch.optim.SGD(model.parameters(), 0.1), [], 0
            for k in range(STEPS):
                x = torch.randn(256, 32, generator=torch.Generator().manual_seed(k))
                if k < STEPS - 1:
                    model(x).backward()
                else:
                    peak = devices.of(x).measure_peak(lambda x=x, model=model: model(x).backward()).peak
                gradients += [whole(p.grad) for p in model.parameters()]
                optimizer.step()
                optimizer.zero_grad()
            runs.append((gradients, peak))
    return {"equal": all(map(torch.equal, *(gradients for gradients, _ in runs))),
            "peaks": [peak for _, peak in runs],
            "said": [str(w.message) for w in caught if w.category is rkmate.RkmateWarning]}


def _looked_at(rank: int) -> dict[str, Any]:
    """Compare gradients of a model whose masks depend on values that a trace knows, and whose layers read
    their parameters in another order than they have them."""
    try:
        import transformers
    except ImportError:
        return {"skipped": True}
    from torch.distributed.fsdp import fully_shard

    found: list[list[torch.Tensor]] = []
    records: list[str] = []
    log = logging.Handler()
    log.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rkmate").addHandler(log)
    for masked, planned in itertools.product((False, True), repeat=2):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=2, use_cache=False)).train()
        if masked:
            for module in (*model.model.layers, model):
                fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        else:
            rkmate.distributed.shard(model, init_device_mesh("cpu", (1,)))
        if planned:
            rkmate.apply(model, budget=1.0, progress=False, settings=Settings(costs="analytic"))
        ids = torch.arange(32).view(2, 16)
        for k in range(7 if masked else 1):
            mask = torch.ones_like(ids)
            mask[0, 16 - k % 2:] = 0            # every other batch is padded
            model(input_ids=ids, labels=ids, **({"attention_mask": mask} if masked else {})).loss.backward()
        found.append([whole(p.grad) for p in model.parameters()])
    logging.getLogger("rkmate").removeHandler(log)
    return {"equal": [all(map(torch.equal, *found[k:k + 2])) for k in (0, 2)],
            "shared": sum("from this step on" in text for text in records)}


class _Scaled(GPT):
    """A model that scales what its layers return by a value of its input."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return (x * ids.max().item()).square().mean()


def _reading(rank: int) -> dict[str, Any]:
    """Return why the rest of a forward that reads a value runs as it is: of the first model, and a second."""
    from torch.distributed.fsdp import fully_shard

    records: list[str] = []
    log = logging.Handler()
    log.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("rkmate")
    level = logger.level
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    for _ in range(2):
        model = _Scaled(WORDS, 32, 2)
        for module in (*model.layers, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        rkmate.apply(model, budget=0.9, progress=False, settings=Settings(costs="analytic"))
        model(torch.arange(32).view(2, 16)).backward()
    logger.removeHandler(log)
    logger.setLevel(level)
    return {"said": [text.partition("runs as it is: ")[2] for text in records if "the rest of" in text]}


def _never(graph: Any, examples: Any) -> Any:
    raise AssertionError("a planned layer was compiled")


def _compiled(first: bool) -> dict[str, Any]:
    """Compare steps of a model with those of one whose layers `torch.compile` has returned. `first`: before
    they were sharded."""
    def trained(model: Any) -> list[torch.Tensor]:
        optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []
        for k in range(5):
            loss = model(torch.randint(WORDS, (8, 32), generator=torch.Generator().manual_seed(k)))
            loss.backward()
            found.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return [*found, *map(whole, model.parameters())]

    plain = trained(sharded(model=GPT(WORDS, 32, 2)))
    model, compile = GPT(WORDS, 32, 2), functools.partial(torch.compile, backend=_never)
    own = [*model.layers]
    if first:
        model.layers = torch.nn.ModuleList(map(compile, own))
    sharded(model=model)
    if not first:
        model.layers = torch.nn.ModuleList(map(compile, own))
    forwards = [vars(layer)["forward"] for layer in model.layers]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rkmate.apply(model, budget=0.8, progress=False, settings=Settings(costs="analytic"))
        mine = trained(model)
    planned = [(call := rkmate.applied(layer)) is not None and call.has_plan for layer in own]
    rkmate.remove(model)
    return {"equal": all(map(torch.equal, mine, plain)) and len(mine) == len(plain), "planned": planned,
            "said": [str(w.message) for w in caught if w.category is rkmate.RkmateWarning],
            "removed": all(rkmate.applied(m) is None for m in own)
            and [vars(layer)["forward"] for layer in model.layers] == forwards}


class _Normed(torch.nn.Module):
    """A layer that keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)
        self.norm = torch.nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.norm(self.up(x)).relu())


def _statistics(rank: int) -> dict[str, Any]:
    """Plan a model whose sharded layers write to buffers."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(_Normed(), _Normed(), torch.nn.Linear(16, 4), torch.nn.GELU(),
                                torch.nn.Linear(4, 4))
    for module in (model[0], model[1], model):
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    rkmate.apply(model, budget=1.0, progress=False, settings=Settings(costs="analytic"))
    model(torch.randn(8, 16)).square().mean().backward()
    return {"planned": [(shown := rkmate.applied(m)) is not None and shown.has_plan
                        for m in (model[0], model[1], model)]}


TASKS: dict[str, Callable[[int], dict[str, Any]]] = {
    "statistics": _statistics,
    "reading": _reading, "looked at": _looked_at, "handed on": _handed_on, "hooked": _hooked,
    "least": _least, "first": _first, "other classes": _other_classes,
    "compiled first": lambda _: _compiled(True), "compiled later": lambda _: _compiled(False),
    **{kind: functools.partial(lambda rank, kind: _over_many_steps(kind), kind=kind)
       for kind in ("kept", "larger", "larger in evaluation", "uneven", "grown", "frozen", "all frozen")}}


def test_the_rest_is_planned_after_layers_that_keep_statistics(found: Found) -> None:
    mine, = found["statistics"]
    assert "failed" not in mine, mine["failed"]
    assert mine["planned"] == [True] * 3


def test_the_smallest_budget_is_what_its_steps_take(found: Found) -> None:
    mine, = found["least"]
    assert "failed" not in mine, mine["failed"]
    assert mine["least"] > 0 and mine["peaks"] == [mine["least"]] * 2


def test_layers_that_differ_in_their_classes_have_plans_of_their_own(found: Found) -> None:
    mine, = found["other classes"]
    assert "failed" not in mine, mine["failed"]
    assert mine["equal"]


def test_the_loss_is_computed_in_chunks_from_the_first_step_on_where_nothing_else_fits(found: Found) -> None:
    mine, = found["first"]
    assert "failed" not in mine, mine["failed"]
    assert max(mine["below"]) <= 0.93 * mine["whole"], mine


def test_the_loss_is_whole_in_the_first_step_of_a_shape_that_fits(found: Found) -> None:
    """Calls of other shapes hold nothing now."""
    mine, = found["first"]
    assert "failed" not in mine, mine["failed"]
    assert min(mine["above"]) > 0.95 * mine["whole"], mine


@pytest.mark.parametrize("kind", ["kept", "frozen", "all frozen"])
def test_a_step_shares_the_budget_with_calls_that_have_no_backward(found: Found, kind: str) -> None:
    mine, = found[kind]
    assert "failed" not in mine, mine["failed"]
    assert mine["peak"] <= mine["budget"], mine
    assert mine["said"] == [] and mine["shared"] == 1


def test_a_call_whose_loss_leaves_an_output_out_is_shared_out_as_it_is_trained(found: Found) -> None:
    """Its first backward alone runs the forward again."""
    mine, = found["handed on"]
    assert "failed" not in mine, mine["failed"]
    plain, peak = mine["peaks"]
    assert mine["equal"] and 0.75 * plain < peak <= 0.85 * plain, mine
    assert ["depends on output 0 (counted from 0) alone" in text for text in mine["said"]] == [True], mine


@pytest.mark.parametrize("kind", ["larger", "larger in evaluation"])
def test_the_first_two_steps_of_a_shape_tell_what_they_take(found: Found, kind: str) -> None:
    mine, = found[kind]
    assert "failed" not in mine, mine["failed"]
    both = rf".* has taken ([0-9,]+) bytes of the budget of {mine['budget']:,}[.,] .*"
    first, second = (re.fullmatch(both, text) for text in mine["said"])
    assert first is not None and second is not None, mine
    assert "the first step of a new shape" in first[0] and first[1] == second[1], mine
    assert mine["peak"] <= mine["budget"], mine


def test_microbatches_that_exchange_nothing_have_plans_for_the_budget(found: Found) -> None:
    mine, = found["uneven"]
    assert "failed" not in mine, mine["failed"]
    assert 0.75 * mine["budget"] < mine["peak"] <= mine["budget"], mine
    assert mine["shared"] == 2 and mine["said"] == []


def test_a_layer_that_cannot_be_planned_any_more_runs_as_it_is(found: Found) -> None:
    mine, = found["hooked"]
    assert "failed" not in mine, mine["failed"]
    assert mine["equal"]
    assert ["has module backward hooks" in text for text in mine["said"]] == [True], mine


@pytest.mark.parametrize("kind", ["compiled first", "compiled later"])
def test_layers_that_were_compiled_follow_plans_instead(found: Found, kind: str) -> None:
    mine, = found[kind]
    assert "failed" not in mine, mine["failed"]
    assert mine["equal"] and all(mine["planned"]) and mine["removed"], mine
    assert ["(Module.compile or torch.compile): planned steps run" in t for t in mine["said"]] == [True], mine


def test_what_a_library_looks_at_is_known_where_parameters_are_sharded(found: Found) -> None:
    """Attention with fewer keys than queries takes eager mode's path, bit for bit. Steps with a mask of ones,
    and with another one, share the budget out, each for itself."""
    mine, = found["looked at"]
    assert "failed" not in mine, mine["failed"]
    assert mine.get("skipped") or mine == {"equal": [True, True], "shared": 2}


def test_why_the_rest_of_a_forward_runs_as_it_is(found: Found) -> None:
    mine, = found["reading"]
    assert "failed" not in mine, mine["failed"]
    assert mine["said"] == ["it changes buffers or attributes, or reads values of inputs"] * 2


def test_later_steps_that_take_more_are_seen(found: Found) -> None:
    mine, = found["grown"]
    assert "failed" not in mine, mine["failed"]
    assert ["has taken" in text and f"{mine['budget']:,}" in text for text in mine["said"]] == [True], mine
    assert mine["shared"] == 2
    assert mine["peak"] <= mine["budget"], mine
