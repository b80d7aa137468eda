"""What goes in, what comes out, and which outputs the loss takes."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import rkmate
from rkmate.measure.step import measure_peak
from tests.options import options_of
from tests.semantics.steps import Heads, Tower, assert_same_gradients, planned, tightest

Pair = namedtuple("Pair", "left right")


@dataclass
class Batch:
    x: torch.Tensor
    scale: float = 1.0


class Anything(nn.Module):
    """Takes and returns containers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, batch: Batch, parts: dict[str, Any], *, flag: bool = False) -> dict[str, Any]:
        y = self.layer(batch.x) * batch.scale + parts["add"][0]
        y = y.relu() if flag else y.tanh()
        return {"pair": Pair(y, y.t()), "batch": Batch(y + 1, batch.scale), "none": None, "number": 3,
                "same": [y, y], "input": parts["add"][0], "weight": self.layer.weight}


def test_containers_of_every_kind() -> None:
    model = Anything()
    args = Batch(torch.randn(4, 8), 2.0), {"add": (torch.randn(4, 8),)}

    def loss(run: Any) -> torch.Tensor:
        out = run(*args, flag=True)
        assert type(out["pair"]) is Pair
        assert type(out["batch"]) is Batch
        assert out["none"] is None
        assert out["number"] == 3
        assert out["batch"].scale == 2.0
        return out["pair"].left.sum() + out["pair"].right.pow(2).sum() + out["batch"].x.sum() \
            + out["weight"].pow(2).sum() + out["same"][1].sum()

    module = planned(model, *args, kwargs={"flag": True})
    assert_same_gradients(model, module, loss, close=True)
    assert torch.equal(module(*args, flag=True)["input"], args[1]["add"][0])


class Checked:
    """A class of the user's that takes nothing but a tensor."""

    def __init__(self, value: Any) -> None:
        self.value = value


pytree.register_pytree_node(Checked, lambda v: ([v.value], None), lambda children, _: Checked(*children))


class Names(dict[str, Any]):
    """A dictionary whose keys are attributes, and that has no others."""

    __getattr__ = dict.__getitem__


class Named(nn.Linear):
    def forward(self, batch: Names, scale: Any) -> Names:  # type: ignore[override]
        y = super().forward(batch.x).tanh()
        return Names(y=scale(y), more=Names(z=y.sigmoid(), number=3), later=partial(torch.mul, y))


def test_dictionaries_with_attributes_and_functions_with_arguments() -> None:
    model, args = Named(8, 8), (Names(x=torch.randn(4, 8)), partial(torch.mul, torch.randn(8)))

    def loss(run: Any) -> torch.Tensor:
        out = run(*args)
        assert type(out) is type(out.more) is Names and out.more.number == 3
        return out.y.sum() + out.more.z.sum() + out.later(out.y).sum()

    assert_same_gradients(model, planned(model, *args), loss)


def test_containers_that_the_user_registered() -> None:
    class Returns(nn.Linear):
        def forward(self, batch: Checked) -> OrderedDict[str, Any]:
            return OrderedDict(out=Checked(super().forward(batch.value)))

    model, x = Returns(8, 8), torch.randn(4, 8)
    module = planned(model, Checked(x))
    assert type(module(Checked(x))) is OrderedDict
    assert_same_gradients(model, module, lambda run: run(Checked(x))["out"].value.pow(2).sum())


def test_constants_are_part_of_the_signature() -> None:
    model = Anything()
    x, parts = torch.randn(4, 8), {"add": (torch.randn(4, 8),)}
    module = planned(model, Batch(x, 2.0), parts)
    for batch, flag in ((Batch(x, 2.0), True), (Batch(x, 3.0), False), (Batch(x, 2.0), False)):
        actual = module(batch, parts, flag=flag)["pair"].left
        assert torch.equal(actual, model(batch, parts, flag=flag)["pair"].left)


@dataclass(slots=True)
class Slots:
    x: torch.Tensor
    mode: str


class Switched(nn.Linear):
    def forward(self, batch: Slots, by: Any) -> torch.Tensor:
        y = super().forward(batch.x)
        return (y.tanh() if batch.mode == "a" else y.relu()) * by[0]


def test_objects_with_slots_and_arrays_are_compared_by_what_they_hold() -> None:
    model, x, by = Switched(8, 8), torch.randn(4, 8), np.ones(1)
    batch = Slots(x, "a")
    module = planned(model, batch, by)
    changes = (lambda: None, lambda: setattr(batch, "mode", "b"), lambda: by.fill(2))
    for plans, change in enumerate(changes, 1):
        change()
        for given in (batch, Slots(x, batch.mode)):
            assert torch.equal(module(given, by), model(given, by))
        assert len(module._plans) == plans


def test_an_object_that_the_forward_fills_is_filled() -> None:
    class Fills(nn.Linear):
        def forward(self, batch: Batch) -> torch.Tensor:
            batch.x = super().forward(batch.x)
            return batch.x.relu()

    model, x = Fills(8, 8), torch.randn(2, 8)
    module = planned(model, Batch(x))
    for run in (model, module):
        batch = Batch(x)
        out = run(batch)
        assert batch.x is not x and torch.equal(batch.x, nn.functional.linear(x, model.weight, model.bias))
        assert torch.equal(out, batch.x.relu())


def test_inputs_that_require_gradients() -> None:
    model = Tower()
    x = torch.randn(8, 16, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).pow(2).sum(), x)
    h = nn.Linear(16, 16)                         # before the planned part, and after it
    for wrapper in (planned, tightest):
        x.grad = None
        module = wrapper(model, x)
        module(x).pow(2).sum().backward()
        assert torch.equal(x.grad, expected)
        both = [torch.autograd.grad(h(m(h(x))).sum(), [x, h.weight]) for m in (model, module)]
        for a, b in zip(*both, strict=True):
            assert torch.equal(a, b)


def test_outputs_that_share_memory_with_an_input() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = self.layer(x)
            return x, x.t(), y, y[:2], y.view(-1)

    model, x = Views(), torch.randn(4, 8)
    module = planned(model, x)
    for a, b in zip(module(x), model(x), strict=True):
        assert torch.equal(a, b)
        assert a.requires_grad == b.requires_grad
    del a, b                                 # a graph that is held is a call before the next backward
    assert_same_gradients(
        model, module, lambda run: sum(t.pow(2).sum() for t in run(x)[2:]), close=True)
    x.requires_grad_()
    module = planned(model, x)
    both = [torch.autograd.grad(sum(t.pow(2).sum() for t in m(x)), [x, model.layer.weight])
            for m in (model, module)]
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b)


class Snapshots(nn.Module):
    """Returns copies, which the caller may write to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("state", torch.ones(8))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.layer(x)
        return {"h": h, "copy": h.clone(), "view": h.clone()[1:], "state": self.state.clone(),
                "input": x.clone(), "weight": self.layer.weight.clone(), "zeros": torch.zeros(3),
                "other zeros": torch.zeros(3), "constant": torch.tensor([1.0, 2.0])}


def test_copies_that_leave_are_copies() -> None:
    model, x = Snapshots(), torch.randn(4, 8)
    module = planned(model, x)
    before = [t.clone() for t in (x, *model.parameters(), *model.buffers())]
    expected = {name: t.detach().clone() for name, t in model(x).items()}
    for name in expected:
        out = module(x)
        with torch.no_grad():
            out[name].detach().fill_(7)
        for other, t in out.items():
            assert other == name or torch.equal(t, expected[other]), f"{name} and {other} share memory"
        for a, b in zip(before, (x, *model.parameters(), *model.buffers()), strict=True):
            assert torch.equal(a, b), f"{name} shares memory with the model or its input"
        del out, t                           # a graph that is held is a call before the next backward
    assert_same_gradients(model, module, lambda run: sum(t.pow(2).sum() for t in run(x).values()))


def test_an_input_that_the_forward_writes() -> None:
    class Writes(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return super().forward(x)

    model, x = Writes(8, 8), torch.randn(4, 8)
    module = planned(model, x.clone())
    mine, theirs = x.clone(), x.clone()
    module(mine).sum().backward()
    model(theirs)
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("loss", [
    lambda o: o.sum(),                                   # an expanded gradient
    lambda o: o.t().flip(0).pow(2).sum(),                # a transposed one
    lambda o: o[::2].sum() + o.mean(),
    lambda o: (o * torch.arange(16.0)).sum(),
])
def test_gradients_of_every_layout(loss: Any) -> None:
    model, x = Tower(), torch.randn(8, 16)
    module = planned(model, x)
    assert_same_gradients(model, module, lambda run: loss(run(x)))


def test_channels_last() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    model.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    module = planned(model, x)
    assert module(x).stride() == model(x).stride()
    weight = torch.randn(2, 4, 4, 4)
    assert_same_gradients(model, module, lambda run: (run(x) * weight).sum())


def test_a_loss_on_some_outputs_leaves_the_other_parameters_alone() -> None:
    model, x = Heads(dropout=0.2), torch.randn(4, 8)
    module = planned(model, x)
    with pytest.warns(rkmate.RkmateWarning, match="output 0 .* alone"):
        assert_same_gradients(model, module, lambda run: run(x)["left"].pow(2).sum())
    # From the second step on it is planned: a warning would be an error here.
    assert_same_gradients(model, module, lambda run: run(x)["left"].pow(2).sum())
    assert "'right.weight'" not in str(module.plan)


def test_a_loss_on_an_output_that_was_not_expected() -> None:
    model, x = Heads(dropout=0.2, loss=True), torch.randn(4, 8)
    module = planned(model, x)

    def both(run: Any) -> torch.Tensor:
        out = run(x)
        return out["loss"] + out["right"].pow(2).sum()

    assert_same_gradients(model, module, lambda run: run(x)["loss"])
    with pytest.warns(rkmate.RkmateWarning, match=r"output 2 .* a second time, with up to [\d,]+ bytes"):
        assert_same_gradients(model, module, both, close=True)
    assert_same_gradients(model, module, both)
    with pytest.warns(rkmate.RkmateWarning, match="alone"):
        assert_same_gradients(model, module, lambda run: run(x)["right"].sum())
    assert_same_gradients(model, module, lambda run: run(x)["right"].sum())


def test_a_counter_does_not_hinder_a_second_run() -> None:
    """Of a batch norm: nothing but its own next value depends on it."""
    class Normed(Heads):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return super().forward(self.norm(x))

    model, x = Normed(), torch.randn(4, 8)
    module = planned(model, x)
    with pytest.warns(rkmate.RkmateWarning, match="a second time"):
        module(x)["left"].sum().backward()
    assert int(model.norm.num_batches_tracked) == 1
    assert_same_gradients(model, module, lambda run: run(x)["left"].pow(2).sum())


def test_what_a_forward_overwrites_is_kept_until_the_loss_is_known() -> None:
    class Average(Heads):
        def __init__(self) -> None:
            super().__init__(loss=True)
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            out = super().forward(x - self.mean)
            self.mean.add_(x.mean(0))
            return out

    model, x = Average(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    module = planned(model, x)

    def step(name: str) -> None:
        for run in (plain, module):
            out = run(x)
            (out[name].sum() + (out["loss"] if name == "right" else 0)).backward()
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)    # two backwards added up
        assert torch.equal(plain.mean, model.mean)
        plain.zero_grad()
        model.zero_grad()

    with pytest.warns(rkmate.RkmateWarning, match="a second time"):
        step("right")
    step("right")                                       # as planned: nothing is kept from now on
    with pytest.raises(rkmate.BackwardError, match="overwritten 'mean'"), pytest.warns(rkmate.RkmateWarning):
        module(x)["left"].sum().backward()
    plain(x)
    model.zero_grad()
    for name in ("left", "right"):                      # each with what it has overwritten
        with pytest.warns(rkmate.RkmateWarning, match="a second time"):
            step(name)


@pytest.mark.filterwarnings("ignore::rkmate.RkmateWarning")
def test_what_is_kept_of_overwritten_values_is_in_the_budget() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
            self.register_buffer("mean", torch.zeros(512, 64))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = x - self.mean
            self.mean.lerp_(x, 0.1)
            for layer in self.layers:
                y = y + torch.tanh(layer(y))
            return y, y.mean()

    x = torch.randn(512, 64)

    def step(module: nn.Module) -> None:
        each, loss = module(x)
        (each.sum() + loss).backward()      # another loss than planned: later steps keep what they overwrite

    budget = int(0.7 * measure_peak(lambda: step(Average())).peak)
    module = rkmate.wrap(Average(), (x,), budget=budget, progress=False,
                         settings=rkmate.Settings(costs="analytic"))
    step(module)
    assert measure_peak(lambda: step(module)).peak <= budget


def test_outputs_stay_after_the_backward() -> None:
    model, x = Tower(), torch.randn(8, 16)
    out = planned(model, x)(x)
    out.sum().backward()
    assert torch.equal(out, model(x))


class WithLoss(nn.Linear):
    """The backward of the loss reads, and may write over, what it returns beside it."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        p = super().forward(x).log_softmax(-1)
        return {"loss": nn.functional.nll_loss(p, y), "p": p}


@pytest.mark.parametrize("wrapper", [planned, tightest])
def test_an_output_that_the_backward_reads_stays(wrapper: Any) -> None:
    x, y = torch.randn(4, 8), torch.randint(0, 8, (4,))
    out = wrapper(WithLoss(8, 8), x, y)(x, y)
    before = out["p"].detach().clone()
    out["loss"].backward()
    assert torch.equal(out["p"], before)
    p = wrapper(nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()), x)(x)
    before = p.detach().clone()
    p.sum().backward()
    assert torch.equal(p, before)


def test_an_output_changed_before_the_backward_is_an_error() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()), torch.randn(4, 8)
    out = planned(model, x)(x)
    with pytest.raises(rkmate.BackwardError, match="changed in place"):
        out.mul_(2).sum().backward()


def test_hugging_face_outputs() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=16,
                                     bos_token_id=0, eos_token_id=0)
    model, i = transformers.GPT2LMHeadModel(config), torch.randint(0, 50, (2, 8))
    module = planned(model, kwargs={"input_ids": i})
    out = module(input_ids=i)
    assert type(out) is type(model(input_ids=i))
    del out
    # A loss of the caller's own on the logits is what the plan expects of a model without labels.
    assert_same_gradients(model, module, lambda run: run(input_ids=i).logits.pow(2).mean())


@pytest.mark.parametrize("name", ["cache", "past_key_values", "cache_params"])
def test_caches_are_by_products_of_the_outputs_that_train(name: str) -> None:
    """Under the names that releases of transformers give them."""
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.keys, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            keys = self.keys(x).tanh()
            return {"logits": self.head(keys), name: [(keys, 2 * keys)]}

    model, x = Cached(), torch.randn(4, 8)
    assert_same_gradients(model, planned(model, x), lambda run: run(x)["logits"].pow(2).mean())


class Reading(nn.Module):
    """Layers that all read one input."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        for layer in self.layers[1:]:
            y = torch.tanh(layer(y) + x)
        return self.layers[0](y) + x


@pytest.mark.filterwarnings("ignore:autograd keeps 512 bytes or more of layers that run before Reading")
@pytest.mark.parametrize("depth", [2, 6])
@pytest.mark.parametrize("around", ["nothing", "before", "after", "both"])
def test_an_input_that_others_use_too(depth: int, around: str) -> None:
    """Few terms of its gradient are added up in the order of eager mode; of more, a warning tells."""
    first, model = nn.Linear(16, 16), Reading(depth)
    module = planned(model, torch.randn(8, 16, requires_grad=True))
    x, found = torch.randn(8, 16), []

    def step(run: Any) -> None:
        h = torch.tanh(first(x))
        early = h.sigmoid() if around in ("before", "both") else 0.0
        out = run(h) + early + (h if around in ("after", "both") else 0.0)
        out.square().sum().backward()

    for run in (model, module):
        first.zero_grad()
        with pytest.warns(rkmate.RkmateWarning, match="is a sum, to which others contribute") if (
                run is module and depth > 2 and around != "nothing") else contextlib.nullcontext():
            step(run)
        found.append(first.weight.grad.clone())  # type: ignore[union-attr]
    torch.testing.assert_close(*found)
    assert (depth > 2 and around != "nothing") or torch.equal(*found)


class Attending(nn.Module):
    """Asks whether arguments are one tensor, as `nn.MultiheadAttention` does, and uses one several times."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.own = nn.MultiheadAttention(16, 4, batch_first=True), nn.Linear(16, 16)

    def forward(self, query: torch.Tensor, key: torch.Tensor, *more: torch.Tensor, other: torch.Tensor
                ) -> torch.Tensor:
        found: torch.Tensor = self.attend(query, key, more[0], need_weights=False)[0] + query + other
        return self.own(query) * found if other is query else found


@pytest.mark.parametrize("learns", [False, True])
def test_arguments_that_are_one_tensor(learns: bool) -> None:
    """A plan is for calls whose arguments are one tensor in the same places."""
    torch.manual_seed(0)
    model = Attending()
    twin = copy.deepcopy(model)
    x, y = (torch.randn(2, 5, 16).requires_grad_(learns) for _ in range(2))
    module = rkmate.wrap(model, (x, x, x), {"other": x}, budget=1.0, **options_of(
        costs="analytic", trains="all", progress=False))
    for args, other in (((x, x, x), x), ((x, y, y), y), ((x, y, y), x), ((x, x, x), x)):
        found = []
        for m, run in ((twin, twin), (model, module)):
            for t in (x, y, *m.parameters()):
                t.grad = None
            out = run(*args, other=other)
            out.square().sum().backward()
            found.append([out, x.grad, y.grad, *(p.grad for p in m.parameters())])
        assert all(one is two is None or torch.equal(one, two) for one, two in zip(*found, strict=True))
    assert len(module._plans) == 3


def test_indices_that_are_one_tensor_are_planned_as_any_others() -> None:
    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 16)

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.table(ids) @ self.table.weight.T, labels)

    ids, others = torch.arange(8), torch.arange(8).flip(0)
    module = planned(Embedding(), ids, ids)
    module(ids, others).backward()
    assert len(module._plans) == 1
