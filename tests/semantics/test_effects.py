"""What a forward leaves changed beside its result: attributes, counters, objects among its arguments."""

from __future__ import annotations

import copy
import importlib
import inspect
import weakref
from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate.errors import CaptureError
from rkmate.graph.capture import capture
from rkmate.parts.apply import planned_call_of
from tests.semantics.steps import planned, tightest


class Leaves(nn.Module):
    """Leaves behind what it has computed, counted and been given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.heads: list[torch.Tensor] = []
        self.norm: torch.Tensor | None = None
        self.calls = 3
        self.last = ""
        self.settings = Settings()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x).tanh()
        self.heads = [h, h.detach() + 1]
        self.norm = x.norm()
        self.given = x
        self.calls += 2
        self.last = "forward"
        self.settings.seen = h.detach().sum()
        return h * 2


class Settings:
    """An object that a module holds."""

    seen: torch.Tensor | None = None


def _left(model: Any) -> list[Any]:
    return [*model.heads, model.norm, model.given, model.calls, model.last, model.settings.seen]


@pytest.mark.parametrize("wrap", [planned, tightest])
def test_attributes_are_what_eager_mode_leaves(wrap: Any) -> None:
    torch.manual_seed(0)
    model, x = Leaves(), torch.randn(2, 4)
    original = copy.deepcopy(model)
    module = wrap(model, x)
    assert model.calls == 3 and model.heads == [] and model.norm is None
    for _ in range(3):
        x = torch.randn(2, 4)
        for run in (original, module):
            run(x).sum().backward()
        for a, b in zip(_left(original), _left(model), strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        assert model.given is x
    assert len(module._plans) == 1
    assert torch.equal(original.layer.weight.grad, model.layer.weight.grad)     # type: ignore[arg-type]


class Auxiliary(nn.Module):
    """Leaves a second loss in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.loss: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        self.loss = h.square().mean()
        return h.tanh()


def test_a_loss_in_an_attribute_is_trained() -> None:
    torch.manual_seed(0)
    model, x = Auxiliary(), torch.randn(2, 4)
    original = copy.deepcopy(model)
    module = planned(model, x)
    for step in range(2):
        with pytest.warns(rkmate.RkmateWarning, match="second time") if not step else _nothing():
            for run, holder in ((original, original), (module, model)):
                (run(x).sum() + holder.loss).backward()     # type: ignore[operator]
        found = [m.layer.weight.grad for m in (original, model)]
        if step:
            assert torch.equal(*found)      # type: ignore[arg-type]
        for m in (original, model):         # the first step adds in another order
            m.zero_grad()


class Cache:
    """Keeps what each call has added, and how much that is."""

    def __init__(self, *kept: torch.Tensor) -> None:
        self.kept = list(kept)
        self.lengths = {"all": sum(t.shape[0] for t in kept)}

    def add(self, t: torch.Tensor) -> torch.Tensor:
        """All that was added so far."""
        self.kept.append(t)
        self.lengths["all"] += t.shape[0]
        return torch.cat(self.kept)


class Remembers(nn.Module):
    """Adds to a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        return cache.add(self.layer(x)).square().sum()


def test_an_object_among_the_arguments_is_changed() -> None:
    torch.manual_seed(0)
    model, x, prefix = Remembers(), torch.randn(2, 4), torch.randn(3, 4, requires_grad=True)
    original = copy.deepcopy(model)
    module = planned(model, x, Cache(prefix))
    found = []
    for run in (original, module):
        prefix.grad, cache = None, Cache(prefix)
        inner = cache.kept
        run(x, cache).backward()
        assert cache.kept is inner and cache.kept[0] is prefix and cache.lengths == {"all": 5}
        found.append((cache.kept[1], prefix.grad))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)        # type: ignore[arg-type]


class Batch:
    """Tensors of a batch, which refer back to it, and have no hash."""

    __hash__ = None     # type: ignore[assignment]

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.whole = x, weakref.ref(self)


def test_an_argument_may_refer_back_to_itself() -> None:
    class Replaces(nn.Linear):
        def forward(self, batch: Any) -> torch.Tensor:
            assert batch.whole() is batch
            batch.x = super().forward(batch.x).relu()
            out: torch.Tensor = batch.x.square().sum()
            return out

    torch.manual_seed(0)
    model, x, found = Replaces(4, 4), torch.randn(2, 4), []
    original = copy.deepcopy(model)
    module = planned(model, Batch(x))
    for run, holder in ((original, original), (module, model)):
        batch = Batch(x)
        run(batch).backward()
        found.append((batch.x, holder.weight.grad))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)        # type: ignore[arg-type]


class Decides(nn.Module):
    """Counts its calls, and does something else after some."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.layer(x)
        return y.tanh() if self.calls > 5 else y


def test_a_counter_that_decides_is_refused() -> None:
    line = inspect.getsourcelines(Decides.forward)[1] + 1
    with pytest.raises(rkmate.CaptureError, match=rf"assigns calls at .*test_effects\.py:{line};"):
        planned(Decides(), torch.randn(2, 4))


class Counts(nn.Module):
    """Counts its calls in a list, in a dictionary of its class, or keeps a list of numbers."""

    of_class = {"calls": 0}         # noqa: RUF012

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.seen, self.way = nn.Linear(4, 4), [0], way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "in place":
            self.seen[0] += 1
        elif self.way == "class":
            self.of_class["calls"] += 1
        else:
            self.seen.append(len(self.seen))
        y: torch.Tensor = self.layer(x)
        return y


@pytest.mark.parametrize("way", ["in place", "class", "list"])
def test_numbers_that_a_forward_counts_in_a_container_are_refused(way: str) -> None:
    model = Counts(way)
    before = copy.copy(model.seen), copy.copy(model.of_class)
    importlib.import_module("transformers")         # an export is tried in a second way then
    with pytest.raises(rkmate.CaptureError, match=r"the numbers in (seen|Counts)|s seen"):
        planned(model, torch.randn(2, 4))
    assert (model.seen, model.of_class) == before


def test_a_flag_that_a_first_call_makes_is_no_number() -> None:
    class Begins(nn.Linear):
        state: dict[str, bool]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.state["again"] = "again" in self.state
            return super().forward(x)

    model = Begins(4, 4)
    model.state = {}
    module = planned(model, torch.randn(2, 4))
    for _ in range(2):
        module(torch.randn(2, 4)).sum().backward()
    assert model.state == {"again": True}


class Flags(nn.Module):
    """Sets flags, and leaves what its layer has made, next to a number that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.done = nn.Linear(4, 4), False
        self.state: dict[str, Any] = {"done": False, "inside": {"done": False}, "by": 2.0, "feature": None}
        self.row: list[Any] = [3.0, False, None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.done = self.state["done"] = self.state["inside"]["done"] = self.row[1] = True
        self.state["feature"], self.state["width"], self.state["name"] = y.tanh(), x.shape[1], "tanh"
        self.row[2] = y.sin()
        found: torch.Tensor = y * self.state["by"] + self.row[0]
        return found


def test_flags_and_tensors_beside_numbers_that_are_read() -> None:
    model = Flags()
    original, x = copy.deepcopy(model), torch.randn(2, 4)
    module = planned(model, x)
    for step in range(6):
        for run in (original, model):
            if step % 2:
                run.state["by"], run.row[0] = float(step // 3), float(step)
            run.done = run.state["done"] = run.state["inside"]["done"] = run.row[1] = False
        given = original(x), module(x)
        for y in given:
            y.square().sum().backward()
        assert torch.equal(*given)
        left = [(m.done, *m.state.values(), *m.row) for m in (original, model)]
        assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
                   for a, b in zip(*left, strict=True))
        assert len(module._plans) == 1 + (step + 1) // 2
    assert torch.equal(original.layer.weight.grad, model.layer.weight.grad)     # type: ignore[arg-type]


COUNTED: list[Any] = []
"""The model whose calls `CountedGradient` reads."""


class CountedGradient(torch.autograd.Function):
    """Its backward multiplies by a number that the forward leaves in an attribute."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * COUNTED[0].calls


class CountedInBackward(Decides):
    """Counts its calls; the forward alone is the same each time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        found: torch.Tensor = CountedGradient.apply(self.layer(x))              # type: ignore[no-untyped-call]
        return found


def test_a_counter_that_the_backward_reads_is_refused() -> None:
    model = CountedInBackward()
    COUNTED[:] = [model]
    with pytest.raises(rkmate.CaptureError, match="calls"):
        planned(model, torch.randn(2, 4))


def test_the_backward_of_a_forward_that_assigns_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[Any] = []
    trace = capture.export_joint
    monkeypatch.setattr(capture, "export_joint", lambda *given: traces.append(given) or trace(*given))
    planned(Leaves(), torch.randn(2, 4))
    assert len(traces) == 1


class Scaled(nn.Module):
    """Reads what the call before has left."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.before = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x) + self.before
        self.before = y.detach().mean(0)
        return y


def test_an_attribute_that_is_read_and_written_is_state() -> None:
    torch.manual_seed(0)
    model, x = Scaled(), torch.randn(2, 4)
    original = copy.deepcopy(model)
    module = planned(model, x)
    for _ in range(3):
        for run in (original, module):
            run(x).sum().backward()
        assert torch.equal(original.before, model.before)
    assert len(module._plans) == 1
    assert torch.equal(original.layer.weight.grad, model.layer.weight.grad)     # type: ignore[arg-type]


class Completes(nn.Module):
    """Makes a table, or freezes a parameter, in its first call, and reads it in later ones."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 4), kind
        if kind == "buffer of None":
            self.register_buffer("table", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if getattr(self, "table", None) is None:
            if self.kind == "buffer":
                self.register_buffer("table", torch.arange(4.0).cos())
            else:
                self.table = self.layer.bias if self.kind == "parameter" else torch.arange(4.0).cos()
        if self.kind == "submodule":
            self.part = self.layer
        if self.kind == "flag":
            self.layer.bias.requires_grad = False
        return self.layer(x) * self.table


@pytest.mark.parametrize("kind", ["attribute", "buffer", "buffer of None", "flag", "parameter", "submodule"])
def test_what_a_first_call_completes_is_completed(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Completes(kind), torch.randn(2, 4)
    original = copy.deepcopy(model)
    module = planned(model, x)
    for run in (original, module):
        run(x).sum().backward()
    assert torch.equal(original.table, model.table)
    assert list(original.state_dict()) == list(model.state_dict())
    assert (model.layer.bias.grad is None) == (original.layer.bias.grad is None) == (kind == "flag")
    assert torch.equal(original.layer.weight.grad, model.layer.weight.grad)     # type: ignore[arg-type]


def test_an_export_that_has_failed_leaves_nothing() -> None:
    """Eager mode's way looks at a value, which no trace has; the way of compiled code does not."""
    class Looks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if not hasattr(self, "table"):
                self.register_buffer("table", torch.arange(4.0))
            if not torch.compiler.is_compiling() and float(self.weight.detach().max()) > 9:
                return x
            return super().forward(x) * self.table

    model, x = nn.Sequential(Looks(4, 4), nn.Tanh()), torch.randn(2, 4)
    model[0].calls = 0
    module = planned(model, x)
    for _ in range(3):
        module(x).sum().backward()
    assert model[0].calls == 3 and list(model[0].state_dict()) == ["weight", "bias", "table"]


def test_a_buffer_that_each_call_writes_has_to_be_there() -> None:
    class Counts(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "calls"):
                self.register_buffer("calls", torch.zeros(()))
            self.calls += 1
            return super().forward(x)

    model = Counts(4, 4)
    with pytest.raises(rkmate.CaptureError, match="makes the buffer 'calls'"):
        planned(model, torch.randn(2, 4))
    assert not hasattr(model, "calls")


class _nothing:
    def __enter__(self) -> None:
        """Expect nothing."""

    def __exit__(self, *of: object) -> None:
        """Nothing was expected."""


class Heads(nn.Module):
    """Keeps results in a list attribute, as networks with deep supervision do; reads those of this call."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.heads, self.reads = [torch.ones(1)] * 3, reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = sum(h.sum() for h in self.heads) if self.reads else 0.0
        for k, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            self.heads[k] = x
        return x + sum(self.heads) + before


@pytest.mark.parametrize("shared", [False, True])
def test_a_list_that_each_forward_fills_takes_one_plan(shared: bool) -> None:
    torch.manual_seed(0)
    model, x = Heads(False), torch.randn(4, 8)
    if shared:
        model.layers[1].heads = model.heads             # type: ignore[assignment]
    plain = copy.deepcopy(model)
    rkmate.apply(model, budget=1.0, progress=False, settings=rkmate.Settings(costs="analytic"))
    for _ in range(3):
        plain(x).sum().backward()
        model(x).sum().backward()
    call = planned_call_of(model)
    assert call is not None and len(call.plans()) == 1
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(  # type: ignore[arg-type]
        plain.parameters(), model.parameters(), strict=True))


def test_a_list_that_is_read_before_it_is_filled_is_refused() -> None:
    with pytest.raises(CaptureError, match="from the list heads"):
        rkmate.wrap(Heads(True), (torch.randn(4, 8),), budget=1.0, progress=False,
                    settings=rkmate.Settings(costs="analytic"))


GLOBAL: dict[str, torch.Tensor] = {}


class Extractor:
    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []
        self.last: torch.Tensor | None = None

    def keep(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.found.append(output)
        self.last = output


class Collects(nn.Module):
    """Collects what its layers compute, in a list that it or its caller empties, and in a dictionary."""

    def __init__(self, empties: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.found: list[torch.Tensor] = []
        self.by_layer: dict[int, list[torch.Tensor]] = {k: [] for k in range(3)}
        self.empties = empties

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.empties:
            self.found.clear()
        for k, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            self.found.append(x)
            self.by_layer[k][:] = [x.detach(), x * 2]
        return x


def _by_closure(model: Collects) -> Any:
    found: dict[str, torch.Tensor] = {}
    model.layers[0].register_forward_hook(lambda m, i, o: found.__setitem__("first", o))
    model.layers[1].register_forward_hook(lambda m, i, o, name="second": GLOBAL.__setitem__(name, o))
    return lambda: found["first"].sum() + GLOBAL["second"].sum()


def _by_an_object(model: Collects) -> Any:
    extractor = Extractor()
    for layer in model.layers:
        layer.register_forward_hook(extractor.keep)

    def read() -> Any:
        assert len(extractor.found) == 3 and extractor.last is extractor.found[2]
        total = sum(f.sum() for f in extractor.found)
        extractor.found.clear()
        return total
    return read


def _by_itself(model: Collects) -> Any:
    def read() -> Any:
        assert len(model.found) == 3
        total = sum(f.pow(2).sum() for f in model.found) + sum(o.sum() for _, o in model.by_layer.values())
        if not model.empties:
            model.found.clear()
        return total
    return read


def _assert_same_steps(losses: dict[nn.Module, Any]) -> None:
    """Take three steps with two modules, each with its loss. The first step does not know of this loss."""
    for step in range(3):
        found = []
        for m, loss_of in losses.items():
            m.zero_grad()
            loss = loss_of()
            loss.backward()
            found.append((loss.detach(), *(p.grad for p in m.parameters())))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5 if not step else 0, atol=1e-6 if not step else 0)


@pytest.mark.filterwarnings("ignore:.* (has|have) forward hooks", "ignore:the loss depends on output")
@pytest.mark.parametrize(("way", "empties"), [
    (_by_closure, True), (_by_an_object, True), (_by_itself, True), (_by_itself, False)])
def test_tensors_that_a_forward_or_its_hooks_collect(way: Any, empties: bool) -> None:
    torch.manual_seed(0)
    model, x = Collects(empties), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    read, expected = way(model), way(plain)
    rkmate.apply(model, budget=1.0, progress=False, settings=rkmate.Settings(costs="analytic"))
    _assert_same_steps({plain: lambda: plain(x).pow(2).sum() + expected(),
                        model: lambda: model(x).pow(2).sum() + read()})
    call = planned_call_of(model)
    assert call is not None and call.whole.has_plan


@pytest.mark.filterwarnings("ignore:.* (has|have) forward hooks")
def test_what_a_trace_collects_is_gone_when_it_fails() -> None:
    model = Collects()
    model.layers[2].register_forward_hook(lambda m, i, o: bool(o.sum() > 0))
    with pytest.raises(CaptureError):
        planned(model, torch.randn(4, 8))
    assert model.found == [] and model.by_layer == {0: [], 1: [], 2: []}


class GivenPlaces(nn.Module):
    """Puts what it computes into a list and a dictionary that its caller gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor, losses: list[torch.Tensor], *, out: dict[str, Any]) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            losses.append(x.pow(2).mean())
        out["parts"][0] = x * out["scale"]
        out["last"] = x
        return x


@pytest.mark.filterwarnings("ignore:the loss depends on output")
def test_tensors_that_are_put_into_arguments() -> None:
    torch.manual_seed(0)
    model, x = GivenPlaces(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    rkmate.apply(model, budget=1.0, progress=False, settings=rkmate.Settings(costs="analytic"))
    first = torch.ones(())

    def loss(m: nn.Module) -> torch.Tensor:
        losses: list[torch.Tensor] = [first]
        out: dict[str, Any] = {"scale": 2.0, "parts": [None, 1]}
        y = m(x, losses, out=out)
        assert len(losses) == 3 and losses[0] is first and out["parts"][1] == 1
        total: torch.Tensor = y.sum() + sum(losses) + out["parts"][0].pow(2).sum() + out["last"].sum()
        return total

    _assert_same_steps({m: lambda m=m: loss(m) for m in (plain, model)})
    call = planned_call_of(model)
    assert call is not None and call.whole.has_plan


LAST: Any = None


class LeavesElsewhere(nn.Linear):
    last: Any = None

    def __init__(self, way: str) -> None:
        super().__init__(8, 8)
        self.way, self.settings, self.recent = way, Settings(), deque([1], maxlen=2)
        self.settings.seen = Settings()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global LAST
        x = super().forward(x).tanh()
        if self.way == "class":
            type(self).last = x
        elif self.way == "global":
            LAST = x
        elif self.way == "object":
            self.settings.seen.seen = x
        elif self.way == "deque":
            self.recent.append(x)
        elif self.way == "function":
            self.settings.seen = [lambda: x.mean()]
        elif self.way == "method":
            self.settings = x.mean
        elif self.way == "weak reference":
            x = x * 2
            self.settings = weakref.ref(x)
            return x
        elif self.way == "generator":
            self.settings = (y for y in (x,))
        else:
            x.retain_grad()
        return x * 2


@pytest.mark.parametrize(("way", "place"), [
    ("class", "LeavesElsewhere.last"), ("global", "LAST"), ("object", "settings"),
    ("deque", "recent"), ("gradient", r"test_effects\.py:\d+: x.retain_grad"),
    ("function", "keeps a function"), ("method", "return the tensors"),
    ("weak reference", "a weak reference"), ("generator", "type generator")])
def test_tensors_that_are_left_elsewhere_are_refused(way: str, place: str) -> None:
    model = LeavesElsewhere(way)
    try:
        with pytest.raises(CaptureError, match=place):
            planned(model, torch.randn(4, 8))
        assert [*model.recent] == [1]
    finally:
        LeavesElsewhere.last = globals()["LAST"] = None
