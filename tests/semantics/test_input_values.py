"""Forwards that look at values of their inputs: computed before each planned step, and in its signature."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn import functional as F

import rkmate
from rkmate.graph.capture import values
from rkmate.graph.capture.capture import capture
from rkmate.graph.capture.recipe import Recipe
from rkmate.torch_seam.tensors import storage_id
from tests.equality import assert_same_step, measured_peak
from tests.models.sample import Sample
from tests.semantics.steps import planned

CLASSES = 12


class Masked(nn.Module):
    """A loss of the labelled rows alone, as of masked language models; labels are checked."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Embedding(CLASSES, 32), nn.Linear(32, CLASSES)
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.2),
                                                  nn.Linear(64, 32)) for _ in range(3)))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if labels.max() >= CLASSES:
            raise ValueError("a label is too large")
        hidden = self.body(self.first(tokens))
        labelled = labels != -100
        return F.cross_entropy(self.last(hidden[labelled]), labels[labelled])


def _labels(count: int, seed: int = 0) -> torch.Tensor:
    """With so many of 48 that count."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.full((48,), -100)
    places = torch.randperm(48, generator=generator)[:count]
    labels[places] = torch.randint(CLASSES, (count,), generator=generator)
    return labels.reshape(4, 12)


TOKENS = torch.randint(CLASSES, (4, 12), generator=torch.Generator().manual_seed(1))


def _sample(model: nn.Module, *args: Any) -> Sample:
    return Sample(model, args, {}, lambda output: output)


@functools.cache
def _masked() -> tuple[nn.Module, rkmate.PlannedModule]:
    torch.manual_seed(0)
    model = Masked()
    return model, planned(copy.deepcopy(model), TOKENS, _labels(30), budget=0.8)


@functools.cache
def _plan_of_thirty() -> rkmate.Plan:
    """`plan` of a module is its latest: other tests let it plan for other numbers of labels."""
    module = _masked()[1]
    module(TOKENS, _labels(30))
    return module.plan


def test_several_numbers_of_labels_in_turn() -> None:
    model, module = _masked()
    for count, seed in ((30, 0), (30, 1), (20, 2), (30, 3), (20, 4)):
        assert_same_step(model, module, _sample(model, TOKENS, _labels(count, seed)), steps=1)
    assert len(module._plans) == 2                     # other labels, but as many: one plan


def test_the_peak_is_within_the_budget_with_what_is_computed_before() -> None:
    model, module = _masked()
    whole = measured_peak(copy.deepcopy(model), _sample(model, TOKENS, _labels(30)))
    peak = measured_peak(module, _sample(module, TOKENS, _labels(30, 5)))
    assert 0.98 * module.plan.peak_bytes < peak <= 0.8 * whole * 1.02


def test_the_peak_without_rematerialization_counts_what_is_computed_before() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.layer(x))[torch.nonzero(mask)[:, 0]].square().sum()

    plan = planned(Chosen(), torch.randn(1000, 2), torch.ones(1000, dtype=torch.bool), budget=1.0).plan
    assert plan.baseline_peak_bytes - plan.budget_bytes == 8000 and "next to the step" in plan.note


def test_a_value_that_leads_to_an_error_does_so() -> None:
    with pytest.raises(rkmate.RkmateError, match="a label is too large"):
        _masked()[1](TOKENS, _labels(30) + 200)


def test_what_differs_is_named() -> None:
    model, _ = _masked()
    strict = planned(copy.deepcopy(model), TOKENS, _labels(30), budget=None, plan=_plan_of_thirty(),
                     on_new_shape="error")
    strict(TOKENS, _labels(30, 6))
    with pytest.raises(rkmate.ArgumentError, match="values of its inputs"):
        strict(TOKENS, _labels(29))


def test_a_saved_plan_is_followed_or_refused_and_a_copy_follows_it() -> None:
    model, module = _masked()
    made = _plan_of_thirty()
    plan = rkmate.wrap(copy.deepcopy(model), (TOKENS, _labels(30, 7)), plan=made, progress=False).plan
    assert plan.schedule == made.schedule
    with pytest.raises(rkmate.PlanError):
        rkmate.wrap(copy.deepcopy(model), (TOKENS, _labels(12)), plan=made, progress=False)
    again = pickle.loads(pickle.dumps(module))
    assert_same_step(copy.deepcopy(model), again, _sample(model, TOKENS, _labels(30, 8)), steps=1)


def test_applied_to_the_model_itself() -> None:
    model, _ = _masked()
    applied = copy.deepcopy(model)
    rkmate.apply(applied, (TOKENS, _labels(30)), plan=_plan_of_thirty(), progress=False,
                 settings=rkmate.Settings(costs="analytic"))
    assert_same_step(copy.deepcopy(model), applied, _sample(model, TOKENS, _labels(30, 9)), steps=1)
    assert rkmate.applied(applied) is not None


class Scaled(nn.Module):
    """A layer, then what a function makes of its output and of integers."""

    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.layer, self.fn = nn.Linear(6, 6), fn

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fn(self.layer(x), n).square().sum()
        return out


def _in_place(y: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    m = n.clone()
    view = m[2:]
    sum_before = m.sum()
    m.add_(1)
    view[0] = 5
    picked = n[m > 3]
    picked += 1                            # in the step: what was computed before it stays
    return y[:int(view.max())] * picked.sum() + sum_before.tolist()


def _lengths(y: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.cumsum(0) for part in y.split(n.tolist())])


def _filled(y: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(y[:, 0], dtype=torch.long)
    mask[:n[0]] = 0
    return y[mask.bool()] * mask.sum()


def _set(y: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    base = torch.zeros(9, 6).index_fill(0, torch.tensor([0]), 2.0)
    chosen = torch.arange(9) < n.sum()
    base[chosen] = y
    return base + base.masked_select(chosen[:, None]).mean()


def _shaped(y: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    twice = n.repeat(2)
    mask = (twice > 1).unsqueeze(-1).expand_as(y)
    some = twice.view_as(y[:, 0]).type_as(y).sum() - twice.reshape_as(y[0]).to(y).min()
    return y[mask].cumsum(0)[:int(some)]


FORMS = {
    "in place": (_in_place, (2, 3, 1), (3, 3, 0)),
    "lengths": (_lengths, (2, 3, 1), (1, 2, 3)),
    "filled": (_filled, (2, 3, 1), (4, 3, 1)),
    "repeats": (lambda y, n: y.repeat_interleave(n.repeat(2), 0).cumsum(0), (2, 3, 1), (2, 3, 2)),
    "loop": (lambda y, n: sum(y * k for k in range(1, n.max())), (2, 3, 1), (2, 4, 1)),
    "transposed": (lambda y, n: y * sum(n[None].T.squeeze(1).unique().tolist()), (2, 3, 1), (1, 4, 4)),
    "setting": (_set, (2, 3, 1), (1, 1, 4)),
    "shaped": (_shaped, (2, 3, 1), (3, 1, 1)),
}


@pytest.mark.parametrize("form", [
    "in place", "setting", "shaped", *(pytest.param(f, marks=pytest.mark.slow)
                             for f in ("lengths", "filled", "repeats", "loop", "transposed"))])
def test_forms_of_asking_for_values(form: str) -> None:
    fn, *values = FORMS[form]
    x, (some, others) = torch.randn(6, 6), map(torch.tensor, values)
    model = Scaled(fn)
    module = planned(copy.deepcopy(model), x, some)
    for n in (some, some.flip(0).flip(0), others):
        assert_same_step(model, module, _sample(model, x, n), steps=1)
        assert torch.equal(n, torch.tensor(n.tolist()))


def _writes(y: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    n.add_(1)
    return y[:int(n.max())]


def _draws(y: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    return y[:int(torch.randint_like(n, 3).max())]


def _activations(y: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    return y[(y[:, 0] > 0) & (n[0] > 0)]


def _floats(y: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    return y * n.float().mean().item()


def _overwritten(y: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    m = n.clone()
    m.copy_(y[:3, 0])
    return y[:int(m.max())]


@pytest.mark.parametrize("fn", [_writes, _activations, *(
    pytest.param(f, marks=pytest.mark.slow) for f in (_draws, _floats, _overwritten))])
def test_what_does_not_depend_on_integers_alone_is_refused(fn: Any) -> None:
    with pytest.raises(rkmate.CaptureError, match=r"rkmate\.dtr"):
        planned(Scaled(fn), torch.randn(6, 6), torch.tensor([1, 2, 3]))


class Transcriber(nn.Module):
    """With a CTC loss inside, of labels that are padded with -100."""

    def __init__(self, zero_infinity: bool, reduction: str) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, CLASSES))
        self.options = {"zero_infinity": zero_infinity, "reduction": reduction}

    def forward(self, x: torch.Tensor, frames: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        there = labels >= 0
        scores = self.body(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, labels.masked_select(there), frames, there.sum(-1), **self.options)


def _targets(*lengths: int) -> torch.Tensor:
    return torch.stack([F.pad(torch.randint(1, CLASSES, (n,)), (0, 6 - n), value=-100) for n in lengths])


@pytest.mark.parametrize(("zero_infinity", "reduction"), [
    (False, "mean"), pytest.param(True, "sum", marks=pytest.mark.slow)])
def test_a_ctc_loss_inside(zero_infinity: bool, reduction: str) -> None:
    model, x = Transcriber(zero_infinity, reduction), torch.randn(2, 20, 5)
    module = planned(copy.deepcopy(model), x, torch.tensor([20, 15]), _targets(6, 4))
    for frames, lengths in (([20, 18], (6, 4)), ([20, 11], (4, 6)), ([4, 20], (5, 5))):
        if zero_infinity or frames[0] > 4:
            sample = _sample(model, x, torch.tensor(frames), _targets(*lengths))
            assert_same_step(model, module, sample, steps=1)
    assert len(module._plans) == (2 if zero_infinity else 1)        # as many labels, and as long a target


def test_measuring_takes_lengths_as_they_are() -> None:
    """In a budget without room for more, other values are made up."""
    model, x = Transcriber(False, "mean"), torch.randn(2, 20, 5)
    args = (x, torch.tensor([20, 15]), _targets(6, 4))
    module = rkmate.wrap(copy.deepcopy(model), args, budget=1.0, progress=False)
    assert_same_step(model, module, _sample(model, *args), steps=1)


def _recipe(model: nn.Module, args: Sequence[Any]) -> Recipe | None:
    return capture(model, tuple(args), {}).recipe


def test_a_forward_that_asks_for_nothing_has_no_recipe() -> None:
    model = Scaled(lambda y, n: y * (n > 2).sum())
    assert _recipe(model, (torch.randn(6, 6), torch.tensor([1, 2, 3]))) is None


def test_only_what_leads_to_a_value_runs_before_a_step() -> None:
    def fn(y: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        twice = n * 2
        return (y * twice.sum())[:int(n.max())]

    found = _recipe(Scaled(fn), (torch.randn(6, 6), torch.tensor([1, 2, 3])))
    assert found is not None and [len(s.steps) for s in found.segments] == [2] and found.bytes == 0


class Decides(nn.Module):
    """Asks for values of constants, of an attribute, and of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.times = torch.linspace(0, 1, 3)
        self.ready: torch.Tensor
        self.register_buffer("ready", torch.tensor(False))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert (self.times[1:] > self.times[:-1]).all()
        for a in torch.linspace(0, 1, 3).tolist():
            x = x + a * self.layer(x)
        if not self.ready:
            x = x.tanh()
        self.ready.fill_(True)
        return x * float(self.scale)


def test_values_of_constants_and_buffers() -> None:
    """A plan for each value that was found; values of constants take none of their own."""
    torch.manual_seed(0)
    model, x = Decides(), torch.randn(2, 4)
    original = copy.deepcopy(model)
    module = planned(model, x)
    for scale, plans in ((2.0, 1), (2.0, 2), (2.0, 2), (3.0, 3)):
        for holder, run in ((original, original), (model, module)):
            holder.scale.fill_(scale)       # type: ignore[operator,union-attr]
            holder.zero_grad()
            run(x).sum().backward()
        assert len(module._plans) == plans
        assert torch.equal(original.layer.weight.grad, model.layer.weight.grad)     # type: ignore[arg-type]
        assert model.ready


def test_values_of_constants_alone_take_no_recipe() -> None:
    class Sums(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * sum(torch.linspace(0, 1, 5).tolist())

    assert capture(Sums(4, 4), (torch.randn(2, 4),), {}).recipe is None


SIZES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "repeated": lambda x, n: x.repeat(n.max(), 1),
    "in a shape": lambda x, n: x.reshape((n.max(), -1)),
    "split": lambda x, n: torch.cat(torch.split(x, list(n))[::-1]),
    "of a constant": lambda x, n: x.tile((torch.arange(3).max() + 1, 1)),
    "padded": lambda x, n: nn.functional.pad(x, (n.min() - 1, 2, *n[1:]), "constant", 0.5),
    "resized": lambda x, n: nn.functional.interpolate(x[None, None], size=tuple(n[:2]), mode="bilinear"),
    "by a name": lambda x, n: x.narrow(0, start=n.min(), length=n[0]),
    "in a set": lambda x, n: x * len(set(n.tolist())),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_come_as_tensors(name: str) -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            return SIZES[name](self.layer(x), n).tanh()

    torch.manual_seed(0)
    model, x, n = Sized(), torch.randn(6, 4), torch.tensor([3, 2, 1])
    original = copy.deepcopy(model)
    module = planned(model, x, n)
    for number in (n, n.flip(0), torch.tensor([2, 2, 2])):
        for run in (original, module):
            run.zero_grad()
            run(x, number).sum().backward()
        assert torch.equal(original(x, number), module(x, number))
        assert torch.equal(original.layer.weight.grad, model.layer.weight.grad)     # type: ignore[arg-type]


def test_a_number_of_a_buffer_that_the_forward_changes_is_refused() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.calls: torch.Tensor
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            factor = 1 / (1 + int(self.calls))
            self.calls += 1
            out: torch.Tensor = self.layer(x) * factor
            return out

    with pytest.raises(rkmate.CaptureError, match="'calls', which it changes"):
        planned(Counts(), torch.randn(2, 4))


class Packed(nn.Module):
    """Attention inside of each text of a row, by a mask that a function of two positions gives under vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        if text.min() < 0:
            raise ValueError("texts are counted from 0")
        at = torch.arange(len(x))
        with TransformGetItemToIndex():
            inside = torch.vmap(torch.vmap(lambda i, j: text[i] == text[j], (None, 0)), (0, None))(at, at)
        scores = (self.first(x) @ x.T).masked_fill(~inside, -1e9)
        return self.last(scores.softmax(-1) @ x).relu().sum()  # type: ignore[no-any-return]


def test_indices_under_vmap_are_planned_as_others() -> None:
    model, x = Packed(), torch.randn(6, 8)
    own = planned(copy.deepcopy(model), x, torch.tensor([0, 0, 0, 1, 1, 1]))
    for text in ([0, 0, 0, 1, 1, 1], [0, 1, 1, 2, 2, 2]):
        assert_same_step(model, own, _sample(model, x, torch.tensor(text)))


class Normed(nn.Module):
    """A value that is read after many buffers were written to."""

    def __init__(self, repeats: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(repeats)))

    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return self.body(x)[:int(count)].sum()  # type: ignore[no-any-return]


def test_a_write_to_a_buffer_forgets_no_argument() -> None:
    model, x = Normed(2), torch.randn(6, 4, requires_grad=True)
    own = planned(copy.deepcopy(model), x, torch.tensor(5))
    for count in (5, 3):
        assert_same_step(model, own, _sample(model, x, torch.tensor(count)))


@pytest.mark.parametrize("repeats", [4, 8])
def test_what_writes_to_buffers_cost_grows_with_their_number(
        repeats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def counted(of: Any) -> int:
        asked.append(of)
        return storage_id(of)
    monkeypatch.setattr(values, "storage_id", counted)
    capture(Normed(repeats), (torch.randn(6, 4, requires_grad=True), torch.tensor(5)), {})
    assert len(asked) < 10 * repeats
