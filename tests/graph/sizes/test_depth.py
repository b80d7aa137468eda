"""A capture of a few layers, extended, is the capture of the whole model, field by field; where it would not
be, the whole model is captured."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rkmate
from rkmate.graph.capture.capture import capture as capture_whole
from rkmate.graph.capture.captured import Capture
from rkmate.graph.capture.hints import hints_in
from rkmate.graph.capture.structure import form_of
from rkmate.graph.sizes import depth
from rkmate.graph.sizes.layers import Layers, Run, layers_of, shorter
from rkmate.torch_seam.containers import pytree
from rkmate.torch_seam.nodes import VALUE, is_backward, module_stack, sequence_number
from rkmate.torch_seam.patches.autograd import region_of
from rkmate.torch_seam.tensors import storage_id
from tests.equality import assert_same_step
from tests.models import Sample

DEEP = 7


class Block(nn.Module):
    """A transformer's layer by hand, with dropout; its number is only a name."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_idx = number
        self.norm, self.qkv = nn.LayerNorm(8), nn.Linear(8, 24)
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8),
                                 nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v)
        return x + self.mlp(x)


class Gate(nn.Module):
    """A layer of few operations, with a flag that decides what it computes."""

    def __init__(self, number: int, squared: bool = False) -> None:
        super().__init__()
        self.layer_idx, self.squared, self.linear = number, squared, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return x + (y.square() if self.squared else y.tanh())


class Stack(nn.Module):
    """Layers, an embedding that is also the head, and what is read by all layers."""

    def __init__(self, layers: list[nn.Module], shared: bool = False) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(11, 8), nn.ModuleList(layers)
        self.bias = nn.Parameter(torch.randn(8)) if shared else None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x) if self.bias is None else layer(x) + self.bias.tanh()
        return F.cross_entropy(F.linear(x, self.embed.weight).flatten(0, 1), ids.flatten())


class Crossed(nn.Module):
    """An encoder, and a decoder all of whose layers read the encoder's result."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(Block(k) for k in range(DEEP)))
        self.decoder = nn.ModuleList(nn.Bilinear(8, 8, 8) for _ in range(DEEP))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        known = self.encoder(x)
        for layer in self.decoder:
            x = x + torch.tanh(layer(x, known))
        return x.square().mean()


class Towers(nn.Module):
    """Two lists; the one that is registered last is called first."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.ModuleList(Gate(k) for k in range(DEEP))
        self.first = nn.ModuleList(nn.Linear(8, 8) for _ in range(DEEP))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = b = x
        for layer in self.first:
            a = torch.tanh(layer(a))
        for layer in self.second:
            b = layer(b)
        return (a * b).mean()


class Stages(nn.Module):
    """Convolutions in stages of different depths, with statistics, written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(nn.Conv2d(a, b, 1), *(nn.Sequential(
            nn.Conv2d(b, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True)) for _ in range(n)))
            for a, b, n in ((3, 4, 7), (4, 2, 2), (2, 2, 8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = F.avg_pool2d(stage(x), 2)
        return x.square().mean()


class Caching(nn.Module):
    """Returns a value of each layer beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(DEEP))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        kept = []
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
            kept.append((x.mean(-1), x[0]))
        return {"loss": x.sum(), "kept": kept}


class Marked(nn.Module):
    """Layers with a hint, each in a checkpointed region."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(DEEP))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + checkpoint(lambda y, of: torch.tanh(rkmate.keep(of(y))), x, layer, use_reentrant=False)
        return x.sum()


class Constants(nn.Module):
    """Makes constants in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(DEEP))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x) * torch.tensor(0.5) + torch.tensor([0.1] * 8)
        return x.sum()


def ids() -> torch.Tensor:
    return torch.randint(0, 11, (2, 6))


def frozen() -> nn.Module:
    """The first layers and the embedding take no gradient, so that there are two runs' worth of layers in
    one list."""
    model = Stack([Gate(k) for k in range(2 * DEEP)])
    model.embed.requires_grad_(False)
    for layer in model.layers[:DEEP]:
        layer.requires_grad_(False)
    return model


Made = Callable[[], tuple[nn.Module, torch.Tensor]]
ALIKE: dict[str, Made] = {
    "layers": lambda: (Stack([Block(k) for k in range(DEEP)]), ids()),
    "two kinds that take turns": lambda: (Stack([Gate(k, bool(k % 2)) for k in range(2 * DEEP + 1)]), ids()),
    "a parameter that all read": lambda: (Stack([Gate(k) for k in range(DEEP)], shared=True), ids()),
    "another first layer": lambda: (Stack([nn.Linear(8, 8), *(Gate(k) for k in range(DEEP))]), ids()),
    "frozen layers": lambda: (frozen(), ids()),
    "encoder and decoder": lambda: (Crossed(), torch.randn(2, 6, 8)),
    "two towers": lambda: (Towers(), torch.randn(2, 6, 8)),
    "stages": lambda: (Stages(), torch.randn(2, 3, 16, 16)),
    "a value of each layer is returned": lambda: (Caching(), torch.randn(2, 8, requires_grad=True)),
    "hints and regions": lambda: (Marked(), torch.randn(2, 8)),
    "constants": lambda: (Constants(), torch.randn(2, 8)),
}


class Told(nn.Module):
    """Layers in a list, with what a test lets the forward do to each layer's result."""

    def __init__(self, after: Callable[[int, list[torch.Tensor]], torch.Tensor],
                 layers: list[nn.Module] | None = None) -> None:
        super().__init__()
        self.after = after
        self.layers = nn.ModuleList(layers or [nn.Linear(8, 8) for _ in range(DEEP)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        done = [x]
        for k, layer in enumerate(self.layers):
            done.append(torch.tanh(layer(done[-1])))
            done[-1] = self.after(k, done)
        return done[-1].sum()


def _tied() -> list[nn.Module]:
    one = nn.Linear(8, 8)
    return [nn.Sequential(nn.Linear(8, 8), one) for _ in range(DEEP)]


DIFFERENT: dict[str, Callable[[], nn.Module]] = {
    "a layer in the middle does something else": lambda: Told(
        lambda k, done: done[-1].sin() if k == 5 else done[-1]),
    "a number grows from layer to layer": lambda: Told(lambda k, done: done[-1] * (k + 1)),
    "each layer reads the first one's result": lambda: Told(lambda k, done: done[-1] + done[1]),
    "each layer reads all results before it": lambda: Told(lambda k, done: sum(done)),  # type: ignore[arg-type,return-value]
    "the last layer reads the third one's result": lambda: Told(
        lambda k, done: done[-1] + done[3] if k == DEEP - 1 else done[-1]),
    "layers share a parameter": lambda: Told(lambda k, done: done[-1], _tied()),
    "the layer of a number": lambda: Told(lambda k, done: done[-1] / 3 if k == DEEP - 1 else done[-1]),
}


def text(captured: Capture) -> list[Any]:
    """Everything of a capture except the names of nodes, and the sharing of constants."""
    nodes = [n for n in captured.graph.nodes if n.op != "output"]
    place = {n: k for k, n in enumerate(nodes)}
    storages: dict[int, int] = {}
    numbers: dict[int, int] = {}
    regions: dict[int, int] = {}

    def value(t: Any) -> Any:
        return (form_of(t), storages.setdefault(storage_id(t), len(storages))) \
            if isinstance(t, torch.Tensor) else t

    found: list[Any] = []
    for n in nodes:
        source, region = captured.sources.get(n), region_of(n)
        number = None if n in captured.outputs else sequence_number(n)      # nothing is derived from a copy
        read = pytree.tree_map(lambda v: f"%{place[v]}" if isinstance(v, fx.Node) else v, (n.args, n.kwargs),
                               is_leaf=lambda v: isinstance(v, fx.Node))
        found.append((
            n.op, n.target if source is None else source, repr(read), is_backward(n),
            [value(t) for t in pytree.tree_leaves(n.meta.get(VALUE))], module_stack(n),
            None if number is None else numbers.setdefault(number, len(numbers)),
            None if region is None or is_backward(n) else regions.setdefault(region, len(regions))))
    return [found, [None if n is None else place[n] for n in captured.outputs],
            [(s, place[n]) for s, n in captured.mutations], [(s, place[n]) for s, n in captured.grads],
            captured.differentiable, captured.inputs, captured.result, [a.path for a in captured.assigned]]


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that are captured."""
    seen: list[nn.Module] = []

    def watched(model: nn.Module, *more: Any) -> Capture:
        seen.append(model)
        return capture_whole(model, *more)

    monkeypatch.setattr(depth, "capture_whole", watched)
    return seen


@pytest.mark.parametrize("made", ALIKE.values(), ids=ALIKE.keys())
def test_few_layers_give_the_capture_of_the_whole(made: Made, whole: list[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = made()
    modules, parameters = list(model.modules()), list(model.named_parameters())
    found, _ = depth.captured(model, (x,), {})
    assert len(whole) == 1 and whole[0] is not model
    assert len(list(whole[0].modules())) < len(modules) == len(list(model.modules()))
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))
    assert [(n, id(p)) for n, p in parameters] == [(n, id(p)) for n, p in model.named_parameters()]
    expected = capture_whole(model, (x,), {})
    if isinstance(model, Constants):        # equal constants are one
        assert {s for s in found.sources.values() if s.kind != "constant"} == \
            {s for s in expected.sources.values() if s.kind != "constant"}
        return
    assert text(found) == text(expected)
    assert len({n.name for n in found.graph.nodes}) == len(found.graph.nodes)
    assert len(hints_in(found.graph)) == len(hints_in(expected.graph)) == \
        (DEEP if isinstance(model, Marked) else 0)


@pytest.mark.parametrize("made", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_layers_that_differ_are_captured_one_by_one(made: Callable[[], nn.Module],
                                                    whole: list[nn.Module]) -> None:
    model, x = made(), torch.randn(2, 8)
    found, _ = depth.captured(model, (x,), {})
    assert whole[-1] is model
    assert text(found) == text(capture_whole(model, (x,), {}))


def test_an_error_is_that_of_the_whole_model() -> None:
    model = Told(lambda k, done: done[-1] if done[-1].sum() > 0 else -done[-1])
    with pytest.raises(rkmate.CaptureError) as whole:
        capture_whole(model, (torch.randn(2, 8),), {})
    with pytest.raises(rkmate.CaptureError) as found:
        depth.captured(model, (torch.randn(2, 8),), {})
    assert str(found.value) == str(whole.value)
    assert len(model.layers) == DEEP


@pytest.mark.parametrize(("name", "budget"), [
    ("layers", 1.0), ("encoder and decoder", 0.8), ("stages", 0.8), ("constants", 0.8)])
def test_steps_equal_the_originals(name: str, budget: float) -> None:
    torch.manual_seed(0)
    model, x = ALIKE[name]()
    wrapped = rkmate.wrap(copy.deepcopy(model), (x,), budget=budget,
                          settings=rkmate.Settings(costs="analytic"))
    assert_same_step(model, wrapped, Sample(model, (x,), {}, lambda loss: loss))


@pytest.mark.parametrize("parts", ["never", "auto"])
def test_a_model_that_has_its_plan_in_itself(parts: Any, whole: list[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = ALIKE["a parameter that all read"]()
    plain = copy.deepcopy(model)
    settings = rkmate.Settings(costs="analytic", parts=parts, deferred_outputs="never")
    rkmate.apply(model, budget=1.0, progress=False, settings=settings)
    torch.manual_seed(1)
    loss = model(x)
    loss.backward()
    torch.manual_seed(1)
    expected = plain(x)
    expected.backward()
    assert torch.equal(loss, expected)
    assert all(torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
               for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert len(whole) == 1 and len(whole[0].layers) == 4  # type: ignore[arg-type]
    assert not any("forward" in m.__dict__ for m in whole[0].modules())


def test_a_forward_of_ones_own_is_captured_with_all_layers(whole: list[nn.Module]) -> None:
    model, x = ALIKE["a parameter that all read"]()
    model.forward = model.forward
    depth.captured(model, (x,), {})
    assert whole == [model]
    rkmate.apply(model, budget=1.0, progress=False, settings=rkmate.Settings(costs="analytic"))
    model(x).backward()
    assert whole == [model, model]


def test_runs_of_layers() -> None:
    turns = [nn.Linear(8, 8), *(m for _ in range(8) for m in (nn.LayerNorm(8), nn.Linear(8, 8, bias=False)))]
    model = nn.ModuleDict({"body": nn.Sequential(*turns, nn.Linear(8, 8)), "few": nn.Sequential(*turns[:5])})
    layers = layers_of(model)
    assert layers is not None
    assert layers.runs == (Run("body", tuple(map(str, range(18))), 1, 2, 8),)
    few = shorter(model, layers)
    assert [len(m) for m in few.values()] == [1 + 4 * 2 + 1, 5]  # type: ignore[arg-type]
    assert [type(m) for m in few["body"]] == [type(m) for m in [*turns[:9], turns[0]]]  # type: ignore[index]
    assert len(model["body"]) == 18  # type: ignore[arg-type]


def test_names_in_the_whole_model() -> None:
    layers = Layers([Run("a.list", tuple(map(str, range(10))), 1, 1, 8)])
    names = [f"a.list.{k}.w" for k in range(6)]
    assert [layers.unit(n) for n in names] == [-1, 0, 1, 2, 3, -1]
    assert [layers.whole(n) for n in names] == [f"a.list.{k}.w" for k in (0, 1, 2, 7, 8, 9)]
    assert layers.whole("a.list.2.w", 3) == "a.list.5.w"
    assert layers.unit("b") == -1 and layers.whole("b") == "b"
    # Seen from the copy of the second unit that stands 3 units further: what was one before, and one after.
    assert [layers.moved(names[k], 1, 3) for k in (1, 2, 3)] == [f"a.list.{k}.w" for k in (4, 5, 6)]


@pytest.mark.parametrize(("units", "extra", "expected"), [
    ([-1, 0, 1, 1, 2, 3, -1], [2], [0, 1, 2, 3, 2, 3, 2, 3, 4, 5, 6]),
    ([3, 2, 1, 0], [2], [0, 1, 2, 2, 2, 3]),
    ([0, 1, 2, 3, 4, 5, 6, 7], [1, 0], [0, 1, 1, 2, 3, 4, 5, 6, 7]),
])
def test_copies(units: list[int], extra: list[int], expected: list[int]) -> None:
    found = depth.copies_of(units, extra)
    assert [k for k, _ in found] == expected
    shifts = [s for k, s in found if units[k] == 1]
    assert shifts == sorted(shifts, reverse=units[0] == 3)
