"""A capture derived from captures at other sizes is the capture of that size, field by field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F

from rkmate.graph.capture.capture import capture
from rkmate.graph.capture.captured import Capture
from rkmate.graph.capture.structure import form_of, take_apart
from rkmate.graph.sizes.dry_run import Recording, dry_run
from rkmate.graph.sizes.resized import Known, resized, side_by_side
from rkmate.torch_seam.tensors import fake_like

Call = Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]


class Attention(nn.Module):
    """A transformer's layer by hand: positions and a causal mask out of buffers, dropout, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(11, 8), nn.Embedding(64, 8)
        self.qkv, self.norm = nn.Linear(8, 24), nn.LayerNorm(8)
        self.register_buffer("mask", torch.ones(64, 64).tril())
        self.register_buffer("ids", torch.arange(64)[None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, n = x.shape
        h = self.embed(x) + self.place(self.ids[:, :n])
        q, k, v = (t.view(batch, n, 2, 4).transpose(1, 2) for t in self.qkv(self.norm(h)).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / n ** 0.5
        weights = scores.masked_fill(self.mask[:n, :n] == 0, -1e9).softmax(-1)
        h = h + (F.dropout(weights, 0.1) @ v).transpose(1, 2).reshape(batch, n, 8)
        h = h + scores.mean() + h[:, 1:].sum(1, keepdim=True) / (n * n)
        return F.cross_entropy(F.linear(h, self.embed.weight).flatten(0, 1), x.flatten())


def tokens(n: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Two sequences."""
    return (torch.randint(0, 11, (2, n)),), {}


def convolutions() -> nn.Module:
    """With statistics, a pooling and a dropout."""
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
                         nn.Conv2d(4, 4, 3), nn.Dropout(0.1), nn.Flatten(), nn.Linear(16, 3))


def images(n: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch of them."""
    return (torch.randn(n, 3, 8, 8, requires_grad=True),), {}


def recorded(model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Recording | None:
    """The dry run of a call."""
    tensors, structure = take_apart(call, result=False)
    return dry_run(model, structure, [form_of(t) for t in tensors])


def known(model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Known:
    """A capture and a dry run."""
    recording = recorded(model, call)
    assert recording is not None
    return Known(capture(model, *call), recording)


def form(value: Any) -> Any:
    """What is comparable of a node's value."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device,
                value.requires_grad, value.untyped_storage().nbytes())
    return [form(v) for v in value] if isinstance(value, (tuple, list)) else value


def shared(graph: torch.fx.Graph) -> list[tuple[str, str]]:
    """Which nodes share storage with the first that has it."""
    owner: dict[int, str] = {}
    return [(n.name, owner.setdefault(v.untyped_storage()._cdata, n.name)) for n in graph.nodes
            if isinstance(v := n.meta.get("val"), torch.Tensor)]


def assert_same_capture(a: Capture, b: Capture) -> None:
    """Field by field."""
    for n, m in zip(a.graph.nodes, b.graph.nodes, strict=True):
        assert (n.op, n.name, n.target, repr(n.args), repr(n.kwargs)) == \
            (m.op, m.name, m.target, repr(m.args), repr(m.kwargs))
        assert form(n.meta.get("val")) == form(m.meta.get("val"))
        assert n.meta.get("partitioner_tag") == m.meta.get("partitioner_tag")
    assert shared(a.graph) == shared(b.graph)
    for field in ("outputs", "mutations", "grads"):
        assert repr(getattr(a, field)) == repr(getattr(b, field))
    assert [(n.name, s) for n, s in a.sources.items()] == [(n.name, s) for n, s in b.sources.items()]
    assert a.differentiable == b.differentiable
    assert a.constants.keys() == b.constants.keys()
    assert repr(a.result) == repr(b.result)


def hold(model: nn.Module, call: Call, known_sizes: tuple[int, int], sizes: tuple[int, ...]) -> None:
    """The derived captures against real ones."""
    captures = [known(model, call(n)) for n in known_sizes]
    for n in sizes:
        new = recorded(model, call(n))
        assert new is not None
        derived = resized(captures, new)
        assert derived is not None
        assert_same_capture(derived, capture(model, *call(n)))


class InOrder(nn.Linear):
    """Asks for a value that depends on no input: whether positions are in order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place = torch.arange(x.shape[0])
        return super().forward(x * 2 if bool((place[1:] - place[:-1] == 1).all()) else x)


def rows(n: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Rows of four numbers."""
    return (torch.randn(n, 4),), {}


@pytest.mark.parametrize(("model", "call", "sizes"), [(Attention(), tokens, (7, 12)),
                                                      (convolutions(), images, (4, 6)),
                                                      (InOrder(4, 2), rows, (3, 5))])
def test_a_derived_capture_is_the_capture(model: nn.Module, call: Call, sizes: tuple[int, int]) -> None:
    hold(model, call, sizes, (17,))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_models_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 101, "use_cache": False}
    model = {
        "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(
            n_layer=2, n_embd=16, n_head=4, vocab_size=101, n_positions=64, use_cache=False)),
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(
            hidden_size=16, intermediate_size=24, num_key_value_heads=2, **small)),
        "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(
            d_model=16, d_ff=24, num_layers=2, num_heads=4, d_kv=4, vocab_size=101, use_cache=False,
            decoder_start_token_id=0))}[name]().train()

    def call(n: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        ids = torch.randint(0, 101, (2, n))
        return (), {"input_ids": ids, "labels": ids}

    hold(model, call, (24, 32), (17, 40))


def test_what_captures_have_in_common_is_taken_again() -> None:
    model = nn.Sequential(nn.Linear(8, 5), nn.Tanh())

    def call(n: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(n, 8),), {}

    captures = [known(model, call(n)) for n in (3, 4)]
    common = side_by_side(captures)
    for n in (6, 7, 6):
        new = recorded(model, call(n))
        assert new is not None and common is not None
        derived = resized(captures, new, common)
        assert derived is not None
        assert_same_capture(derived, capture(model, *call(n)))


def test_fake_tensors_are_as_torch_makes_them() -> None:
    mode, plain = FakeTensorMode(), torch.empty_strided((3, 2), (1, 3), device="meta")
    other = FakeTensor(mode, torch.empty(0, device="meta"), torch.device("cpu"))
    for gradient in (False, True):
        made = fake_like(other, plain, gradient)
        usual = FakeTensor(mode, plain.detach().requires_grad_(gradient), torch.device("cpu"))
        assert vars(made) == vars(usual)
        assert (made.device, made.requires_grad) == (usual.device, usual.requires_grad)
        assert form_of(made) == form_of(usual)
        assert torch._C._dispatch_keys(made) == torch._C._dispatch_keys(usual)


class Branching(nn.Module):
    """Does something else with long sequences."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, h = x.shape[1], self.linear(x)
        if self.kind == "branch" and n > 8:
            h = h.tanh()
        if self.kind == "literal":
            h = h[:, :min(n, 8)] * (2.0 if n > 8 else 3.0)
        if self.kind == "constant":
            h = h * torch.tensor([1.0 / n] * 4)
        if self.kind == "quadratic":
            h = h * float(n * n)
        return h


@pytest.mark.parametrize(("kind", "certain"), [("branch", False), ("literal", False), ("constant", False),
                                               ("quadratic", True)])
def test_what_depends_on_a_size_otherwise_is_seen(kind: str, certain: bool) -> None:
    model = Branching(kind)

    def call(n: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(2, n, 4),), {}

    captures = [known(model, call(n)) for n in (5, 7)]
    new = recorded(model, call(11))
    assert new is not None
    derived = resized(captures, new)
    assert (derived is not None) == certain
    if derived is not None:
        assert_same_capture(derived, capture(model, *call(11)))


def test_a_dry_run_leaves_the_model_as_it_was() -> None:
    model, call = Attention(), tokens(9)
    state = torch.get_rng_state()
    before = {k: (id(t), t.clone()) for k, t in (*model.named_parameters(), *model.named_buffers())}
    assert recorded(model, call) is not None
    for k, t in (*model.named_parameters(), *model.named_buffers()):
        assert id(t) == before[k][0]
        assert torch.equal(t, before[k][1])
    assert torch.equal(torch.get_rng_state(), state)


def test_what_asks_for_values_has_no_dry_run() -> None:
    class Asking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (2 if x.sum() > 0 else 1)

    assert recorded(Asking(4, 4), ((torch.ones(3, 4),), {})) is None


COUNTS = torch.zeros(2)


class Counting(nn.Linear):
    """Above a length it counts, outside of the module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 8:
            COUNTS.add_(1)
        return super().forward(x)


def test_a_dry_run_writes_to_nothing_outside() -> None:
    model = Counting(4, 4)
    assert recorded(model, ((torch.zeros(8, 4),), {})) is not None
    assert recorded(model, ((torch.zeros(9, 4),), {})) is None
    assert not COUNTS.any()
