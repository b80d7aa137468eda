"""Losses of wide products, a few rows at a time: torch's values and gradients, for losses as people write
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rkmate.device import cpu
from rkmate.graph.capture.capture import capture
from rkmate.graph.passes.joint import Joint
from rkmate.graph.passes.table import simplify
from rkmate.graph.passes.tiles import rewrite as build
from rkmate.graph.passes.tiles.tiled import Tiled

BATCH, TIME, WIDTH, CLASSES = 3, 10, 6, 120
IN_FORWARD, APART = ["head"], ["head_forward", "head_backward"]
Loss = Callable[["_Model", torch.Tensor, torch.Tensor, torch.Tensor], Any]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts so small that small tensors have several."""
    monkeypatch.setattr(cpu, "PART_BYTES", 2**11)
    monkeypatch.setattr(build, "LEAST_ROWS", 4)


class _Model(nn.Module):
    """Features and a head; `loss` takes the model, the features, the logits and the classes."""

    def __init__(self, loss: Loss, *, biased: bool = False) -> None:
        super().__init__()
        self.loss = loss
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=biased)
        self.other = nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("weights", torch.linspace(0.5, 2, CLASSES))
        self.weights: torch.Tensor

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        h = torch.tanh(self.body(x))
        return self.loss(self, h, self.head(h), labels)


def _flat(z: torch.Tensor, y: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return F.cross_entropy(z.reshape(-1, z.shape[-1]), y.reshape(-1), **kwargs)


def _padded(model: _Model, h: torch.Tensor, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As transformers' ForCausalLMLoss does it."""
    shifted = F.pad(y, (0, 1), value=-100)[..., 1:].contiguous()
    return _flat(z.float() if z.dtype != torch.float64 else z, shifted, reduction="sum") / 17


def _sliced(model: _Model, h: torch.Tensor, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _flat(z[..., :-1, :].contiguous(), y[..., 1:].contiguous())


def _capped_and_sliced(model: _Model, h: torch.Tensor, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _flat((torch.tanh(z / 2) * 2)[:, 1:], y[:, 1:])


def _masked(model: _Model, h: torch.Tensor, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mask = (y % 3 != 0).to(z.dtype).view(-1)
    return (_flat(z, y, reduction="none") * mask).sum() / mask.sum()


def _entropy(model: _Model, h: torch.Tensor, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _flat(z, y) + 1e-2 * torch.logsumexp(z, -1).pow(2).mean()


def _by_hand(model: _Model, h: torch.Tensor, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return -torch.log_softmax(z, -1).gather(-1, y.unsqueeze(-1)).squeeze(-1).mean()


def _row_by_row(model: _Model, h: torch.Tensor, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As trl's `selective_log_softmax` does it in single precision."""
    z, y = z[:, :-1] / 0.7, y[:, 1:]
    normalizers = torch.stack([torch.logsumexp(row, -1) for row in z])
    return -(z.gather(-1, y.unsqueeze(-1)).squeeze(-1) - normalizers).mean()


def _rows_of_both(model: _Model, h: torch.Tensor, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As trl's `selective_log_softmax` does it in half precision."""
    return -torch.stack([F.log_softmax(row, -1).gather(-1, of_row)
                         for row, of_row in zip(z, y.unsqueeze(-1), strict=True)]).mean()


def _rows_by_index(model: _Model, h: torch.Tensor, z: torch.Tensor, y: torch.Tensor, *,
                   rows: Sequence[int] = range(BATCH)) -> torch.Tensor:
    entropies = [-((row := z[k, 1:]).softmax(-1) * (row * model.weights).log_softmax(-1)).sum(1)
                 for k in rows]
    return (torch.stack(entropies) * y[:, 1:]).mean()


def _distilled(model: _Model, h: torch.Tensor, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        teacher = torch.softmax(model.other(h.detach()) / 2, -1)
    return F.kl_div(F.log_softmax(z / 2, -1), teacher, reduction="batchmean") + _flat(z, y)


def _contrastive(model: _Model, h: torch.Tensor, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Rows against rows, with a learned temperature."""
    a, b = (F.normalize(v.reshape(-1, WIDTH), dim=-1) for v in (h, model.body(h)))
    return F.cross_entropy(model.scale.exp() * (a @ b.t()), torch.arange(len(a)))


def _both_ways(model: _Model, h: torch.Tensor, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = h.reshape(-1, WIDTH), model.body(h).reshape(-1, WIDTH)
    logits, right = model.scale * (a @ b.t()), torch.arange(len(a))
    return F.cross_entropy(logits, right) + F.cross_entropy(logits.t(), right)


CASES: dict[str, tuple[Loss, list[str]]] = {
    "mean": (lambda m, h, z, y: _flat(z, y), IN_FORWARD),
    "sum": (lambda m, h, z, y: _flat(z, y, reduction="sum"), IN_FORWARD),
    "shift by padding, items in batch": (_padded, IN_FORWARD),
    "shift by a slice": (_sliced, IN_FORWARD),
    "capped, then shift by a slice": (_capped_and_sliced, IN_FORWARD),
    "ignored": (lambda m, h, z, y: _flat(z, y, ignore_index=7), IN_FORWARD),
    "ignored zero": (lambda m, h, z, y: _flat(z, y, ignore_index=0), IN_FORWARD),
    "class weights": (lambda m, h, z, y: _flat(z, y, weight=m.weights, ignore_index=7), IN_FORWARD),
    "smoothing": (lambda m, h, z, y: _flat(z, y, label_smoothing=0.1, ignore_index=7), IN_FORWARD),
    "smoothing and class weights": (
        lambda m, h, z, y: _flat(z, y, label_smoothing=0.1, weight=m.weights), IN_FORWARD),
    "rows masked": (_masked, IN_FORWARD),
    "capped": (lambda m, h, z, y: _flat(torch.tanh(z / 2) * 2, y), IN_FORWARD),
    "scaled by a parameter": (lambda m, h, z, y: _flat(z * m.scale, y), IN_FORWARD),
    "scaled": (lambda m, h, z, y: _flat(z / 0.7, y), IN_FORWARD),
    "z-loss": (_entropy, IN_FORWARD),
    "written by hand": (_by_hand, IN_FORWARD),
    "row by row": (_row_by_row, IN_FORWARD),
    "rows of logits and classes": (_rows_of_both, IN_FORWARD),
    "rows by their index": (_rows_by_index, IN_FORWARD),
    "two heads": (lambda m, h, z, y: _flat(z, y) + 2 * _flat(m.other(h), y), [*IN_FORWARD, *IN_FORWARD]),
    "soft classes": (lambda m, h, z, y: _flat(z, y) + F.cross_entropy(
        z.view(-1, CLASSES), torch.softmax(m.weights.log() * y.view(-1, 1), -1)), IN_FORWARD),
    "distilled": (_distilled, IN_FORWARD),
    "one row per image": (lambda m, h, z, y: F.cross_entropy(m.head(h.reshape(-1, WIDTH)), y.view(-1)),
                          IN_FORWARD),
    "contrastive": (_contrastive, IN_FORWARD),
    "not reduced": (lambda m, h, z, y: _flat(z, y, reduction="none"), APART),
    "two losses": (lambda m, h, z, y: (_flat(z, y), torch.logsumexp(z, -1).mean()), APART),
    "logits returned": (lambda m, h, z, y: (_flat(z, y), z.detach()), IN_FORWARD),
    "capped logits returned": (lambda m, h, z, y: (_flat(c := torch.tanh(z / 2) * 2, y), c.detach()),
                               IN_FORWARD),
    "accuracy": (lambda m, h, z, y: (_flat(z, y), (z.argmax(-1) == y).sum()), IN_FORWARD),
    "a part of the last dimension": (lambda m, h, z, y: _flat(z.view(-1, 60, 2).select(-1, 1), y % 60),
                                     IN_FORWARD),
    "a part of one of two like it": (
        lambda m, h, z, y: _flat(z.view(-1, 30, 2, 2).select(-1, 0).flatten(1), y % 60), IN_FORWARD),
    # What is not tiled.
    "rows in another order": (lambda m, h, z, y: _rows_by_index(m, h, z, y, rows=(1, 0, 2)), []),
    "rows and columns": (_both_ways, []),
    "choices": (lambda m, h, z, y: F.cross_entropy(h @ m.body.weight[0], y[:, 0] % TIME), []),
}


def _inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, CLASSES, (BATCH, TIME), generator=generator)
    labels[0, :3], labels[2, 4] = 7, 0
    return torch.randn(BATCH, TIME, WIDTH, generator=generator, dtype=dtype), labels


def _joint(model: _Model, args: Sequence[torch.Tensor], *, tiled: bool = True) -> tuple[Joint, Any]:
    captured = capture(model, tuple(args), {})
    choices = frozenset(["chunked-loss"] * tiled)
    return simplify(captured, captured.differentiable, choices, verify=True), captured


def _run(joint: Joint, captured: Any, model: nn.Module, args: Sequence[torch.Tensor],
         grads: Sequence[torch.Tensor | None]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Outputs and gradients by name of a joint graph."""
    kinds: dict[str, Any] = {"param": dict(model.named_parameters()), "buffer": dict(model.named_buffers()),
                             "input": args, "tangent": grads, "constant": captured.constants}
    env: dict[torch.fx.Node, Any] = {}
    with torch.no_grad():
        for node in joint.graph.nodes:
            if node in joint.sources:
                source = joint.sources[node]
                env[node] = kinds[source.kind][source.key]
            else:
                a, k = torch.fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
                env[node] = node.target(*a, **k)
    found: dict[str, torch.Tensor] = {}
    for source, node in joint.grads:
        key = str(source.key)
        found[key] = found[key] + env[node] if key in found else env[node]
    return [None if n is None else env[n] for n in joint.outputs], found


def _called(joint: Joint) -> list[str]:
    return [n.target.name for n in joint.graph.nodes if isinstance(n.target, Tiled)]


def _compare(model: _Model, x: torch.Tensor, y: torch.Tensor, calls: list[str], **near: float) -> None:
    joint, captured = _joint(model, (x, y))
    assert sorted(_called(joint)) == sorted(calls)
    expected = model(x, y)
    outputs = expected if isinstance(expected, tuple) else (expected,)
    generator = torch.Generator().manual_seed(9)
    grads = [torch.randn(o.shape, generator=generator).to(o.dtype) if o.requires_grad else None
             for o in outputs]
    torch.autograd.backward([o for o in outputs if o.requires_grad], [g for g in grads if g is not None])
    found, by_name = _run(joint, captured, model, (x, y), grads)
    for mine, theirs in zip(found, outputs, strict=True):
        torch.testing.assert_close(mine, theirs, **near)
    for name, p in model.named_parameters():
        if p.grad is not None and name in by_name:
            assert by_name[name].dtype == p.dtype
            torch.testing.assert_close(by_name[name], p.grad, msg=name, **near)
    assert {n for n, p in model.named_parameters() if p.grad is not None} == set(by_name)


_LIKE_OTHERS = {"sum", "ignored", "ignored zero", "class weights", "smoothing", "capped", "scaled",
                "written by hand", "one row per image", "accuracy", "soft classes", "logits returned",
                "rows masked"}


@pytest.mark.parametrize("name", [
    pytest.param(n, marks=[pytest.mark.slow] * (n in _LIKE_OTHERS)) for n in CASES])
def test_as_torch_does(name: str) -> None:
    loss, calls = CASES[name]
    torch.manual_seed(0)
    _compare(_Model(loss, biased=len(name) % 2 == 0).double(), *_inputs(), calls, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mean", "smoothing", "z-loss", "capped", "not reduced"])
def test_in_single_precision(name: str) -> None:
    torch.manual_seed(0)
    _compare(_Model(CASES[name][0]), *_inputs(torch.float32), CASES[name][1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["capped, then shift by a slice"])
def test_as_finite_differences_do(name: str) -> None:
    torch.manual_seed(0)
    model, (x, y) = _Model(CASES[name][0]).double(), _inputs()
    joint, captured = _joint(model, (x, y))
    _, grads = _run(joint, captured, model, (x, y), [torch.ones((), dtype=x.dtype)])
    step = {n: torch.randn_like(p) for n, p in model.named_parameters() if n in grads}

    def loss(by: float) -> float:
        with torch.no_grad():
            for n, p in model.named_parameters():
                p += by * step[n] if n in step else 0
            found = _run(joint, captured, model, (x, y), [torch.ones((), dtype=x.dtype)])[0][0].item()
            for n, p in model.named_parameters():
                p -= by * step[n] if n in step else 0
        return float(found)

    slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
    assert slope == pytest.approx(sum(float((grads[n] * step[n]).sum()) for n in step), rel=1e-7)


@pytest.mark.parametrize(("dtype", "calls"), [(torch.bfloat16, IN_FORWARD), (torch.float16, APART)], ids=str)
def test_under_autocast(dtype: torch.dtype, calls: list[str]) -> None:
    """In half precision, small gradients need the scaled loss that comes in."""
    def loss(model: _Model, h: torch.Tensor, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype):
            return _flat(model.other(h).float(), y)

    torch.manual_seed(0)
    _compare(_Model(loss), *_inputs(torch.float32), calls, rtol=2e-2, atol=2e-4)


def test_it_is_noted_where_it_is_not_asked_for() -> None:
    for name in ("shift by a slice", "two heads"):
        model = _Model(CASES[name][0])
        noted = _joint(model, _inputs(torch.float32), tiled=False)[0]
        tiled = _joint(model, _inputs(torch.float32))[0]
        assert not _called(noted) and noted.concerned == tiled.concerned
        assert len(noted.concerned["chunked-loss"]) == len(CASES[name][1])


def test_what_cannot_be_tiled_stays_as_it_was_and_is_not_told() -> None:
    """Logits that are scaled by a loss of theirs are not known row by row."""
    def loss(model: _Model, h: torch.Tensor, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = _flat(z, y, weight=model.weights)
        return first + _flat(z * first, y, weight=model.weights)

    model = _Model(loss)
    plain, tiled = (_joint(model, _inputs(torch.float32), tiled=tiled)[0] for tiled in (False, True))
    assert not tiled.concerned["chunked-loss"] and not _called(tiled)
    operations = [sorted(str(n.target) for n in joint.graph.nodes) for joint in (plain, tiled)]
    assert operations[0] == operations[1]
