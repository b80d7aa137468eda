"""Autocast regions around, inside of, nested in and next to one another, by operation and layout: the bits of
eager mode, whose regions cast each weight once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rkmate.graph.capture.capture import capture
from tests.capturing import captured_once
from tests.semantics.steps import assert_same_gradients, planned, tightest


def _inside(run: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return run(x).float()


def _disabled(run: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return run(x)


def _island(run: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """A region that is left and entered again before the outermost one ends, which keeps its casts."""
    with torch.autocast("cpu", torch.bfloat16):
        first = run(x).float()
        with torch.autocast("cpu", enabled=False):
            second = run(x)
            with torch.autocast("cpu", torch.bfloat16):
                third = run(x).float()
        return first + second + third


def _one_after_another(run: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        first = run(x).float()
    with torch.autocast("cpu", torch.bfloat16):
        return first + run(x).float()


def _without_cache(run: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return run(x).float() + run(x).float()


def _around(run: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return run(x).float()


REGIONS = {f.__name__.lstrip("_"): f for f in (_inside, _disabled, _island, _one_after_another,
                                               _without_cache, _around)}


class Reused(nn.Module):
    """One weight, several times, the last time tied."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for _ in range(2):
            h = torch.tanh(self.cell(h) + x)
        return h @ self.cell.weight


class Of(nn.Module):
    """A layer in a formula: `run(layer, x)`."""

    def __init__(self, layer: nn.Module, run: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.run = layer, run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.layer, x)


def _dropped(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Dropout of a tensor that is not contiguous, or whose channels are last."""
    out = layer(x)
    return F.dropout(out.transpose(0, 1) if out.dim() == 3 else out, 0.3)


def _stepped(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the last state of a cell of a recurrent layer, over a sequence."""
    state = None
    for step in x:
        state = layer(step, state)
    return state[0] if isinstance(state, tuple) else state      # type: ignore[return-value]


def _multiplied(layer: Any, x: torch.Tensor) -> torch.Tensor:
    out = layer(x)
    return torch.baddbmm(x @ x.transpose(1, 2), out, x.transpose(1, 2)) @ out


def _attended(layer: Any, x: torch.Tensor) -> torch.Tensor:
    q, k, v = layer(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _classified(layer: Any, x: torch.Tensor) -> torch.Tensor:
    out = layer(x).flatten(0, 1)
    labels = torch.arange(len(out)) % 5
    return F.cross_entropy(out, labels, label_smoothing=0.1, reduction="none") + out.softmax(-1)[:, 0]


def _embedded(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Words, and the head that shares their weight."""
    words = torch.arange(x.shape[0] * x.shape[1]).view(x.shape[:2]) % 7
    return (layer(words) + x) @ layer.weight.T


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    layer.dropout1.p = 0.3
    return layer


OPERATIONS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 8),
    "a weight used several times": Reused,
    "matmul": lambda: Of(nn.Linear(8, 8), _multiplied),
    "bilinear": lambda: Of(nn.Bilinear(8, 8, 4), lambda layer, x: layer(x, x)),
    "attention": lambda: Of(nn.Linear(8, 24), _attended),
    "an encoder layer": _encoder,
    "dropout of a transposed tensor": lambda: Of(nn.Linear(8, 8), _dropped),
    "dropout of images": lambda: Of(nn.Conv2d(3, 4, 3), _dropped),
    "layer norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()),
    "batch norm": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
    "convolution": lambda: nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ConvTranspose2d(4, 2, 3)),
    "convolution of a sequence": lambda: nn.Conv1d(3, 4, 3),
    "softmax and cross entropy": lambda: Of(nn.Linear(8, 5), _classified),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
    "embedding": lambda: Of(nn.Embedding(7, 8), _embedded),
    "gru cell": lambda: Of(nn.GRUCell(8, 8), _stepped),
    "lstm cell": lambda: Of(nn.LSTMCell(8, 8), _stepped),
    "gru": lambda: Of(nn.GRU(8, 8), lambda layer, x: layer(x)[0]),
    "lstm": lambda: Of(nn.LSTM(8, 8), lambda layer, x: layer(x)[0]),
}
OF_IMAGES = ("dropout of images", "batch norm", "convolution")


class Column(nn.Module):
    """Operations, each of its own input in a region."""

    def __init__(self, region: str, operations: Iterable[str]) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({name: OPERATIONS[name]() for name in operations})
        self.region = region

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: REGIONS[self.region](layer, inputs[name]) for name, layer in self.inner.items()}


def _runs(operation: str, region: str) -> bool:
    """Return whether this processor, with this torch, has the kernels, and the bits of each other."""
    if operation == "lstm" and torch.__version__.startswith(("2.11.", "2.12.")):
        return False        # gradients differ in the last bits of half precision
    try:
        Column(region, [operation])({operation: _input(operation, "contiguous")})
    except RuntimeError as error:
        if "primitive descriptor" not in str(error):
            raise
        return False        # no such kernel in half precision
    return True


def _input(operation: str, layout: str) -> torch.Tensor:
    x = torch.randn((2, 3, 6, 6) if operation in OF_IMAGES else (2, 3, 8))
    if layout == "other":
        x = x.to(memory_format=torch.channels_last) if operation in OF_IMAGES else \
            x.transpose(0, 1).contiguous().transpose(0, 1)
    return x.requires_grad_()


def _weights(out: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a result, with its strides."""
    return torch.empty_like(out, dtype=torch.float32).copy_(torch.arange(out.numel()).view_as(out))


def _step(model: nn.Module, run: Callable[..., Any], inputs: dict[str, torch.Tensor], region: str
          ) -> dict[str, torch.Tensor]:
    """Return the outputs of one step, the gradients and the buffers, by the operation's name."""
    given = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16, enabled=region == "around"):
        found = run(given)
    sum((out.float() * _weights(out)).sum() for out in found.values()).backward()
    return {**{f"{name}, output": out.detach() for name, out in found.items()},
            **{f"{name}, input": x.grad for name, x in given.items()},        # type: ignore[dict-item]
            **{name: p.grad for name, p in model.named_parameters()},         # type: ignore[dict-item]
            **dict(model.named_buffers()), "random state": torch.get_rng_state()}


GROUPS = [tuple(OPERATIONS)[:8], tuple(OPERATIONS)[8:15], tuple(OPERATIONS)[15:]]
CELLS = [pytest.param(region, layout, group, marks=(
    () if region in ("inside", "around") and layout == "contiguous" else pytest.mark.long))
    for region in REGIONS for layout in ("contiguous", "other") for group in range(len(GROUPS))]


@pytest.mark.parametrize(("region", "layout", "group"), CELLS)
def test_bits(region: str, layout: str, group: int) -> None:
    """A group of operations is planned as a whole, and at the smallest budget in one column."""
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16, enabled=region == "around"):
        model = Column(region, [name for name in GROUPS[group] if _runs(name, region)])
        inputs = {name: _input(name, layout) for name in model.inner}
        with captured_once():
            wrapped = [planned(model, inputs)]
            if (region, layout) == ("inside", "other"):
                wrapped.append(tightest(model, inputs))
        original = copy.deepcopy(model)
    for module in wrapped:
        tested = copy.deepcopy(original)
        expected = _step(tested, tested, inputs, region)
        model.load_state_dict(original.state_dict())
        actual = _step(model, module, inputs, region)
        assert module.has_plan and expected.keys() == actual.keys()
        wrong = [name for name, t in expected.items() if t.dtype != actual[name].dtype or
                 not torch.equal(t, actual[name])]
        assert not wrong


def test_a_weight_is_cast_once_in_a_region() -> None:
    """As in eager mode, so that the step's peak without a plan is eager's."""
    for region, casts in (("inside", 1), ("island", 1), ("one_after_another", 2), ("without_cache", 6)):
        captured = capture(Column(region, ["a weight used several times"]),
                           ({"a weight used several times": torch.randn(4, 8)},), {})
        weight = next(n for n, s in captured.sources.items() if s.key.endswith("cell.weight"))
        found = sum(n.target is torch.ops.aten._to_copy.default for n in weight.users)
        assert found == casts, region


def test_casts_of_weights_are_kept_by_small_budgets_or_made_again() -> None:
    torch.manual_seed(0)
    name = "a weight used several times"
    model, inputs = Column("inside", [name]), {name: torch.randn(16, 8)}
    assert_same_gradients(model, tightest(model, inputs), lambda run: run(inputs)[name].square().sum())


def test_a_capture_leaves_no_casts_behind() -> None:
    """Neither in torch's cache, nor for the next capture."""
    torch.manual_seed(0)
    model, x = Reused(), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        capture(model, (x,), {})
        with torch.no_grad():
            model.cell.weight.zero_()
        assert not (x @ model.cell.weight).any()


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dropout_by_type_and_layout(p: float, dtype: torch.dtype) -> None:
    """Without autocast: the draws, and the rounding of the factor, are eager mode's."""

    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 6, dtype=dtype)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.layer(x)
            noise = torch.empty_like(h.transpose(0, 2)).bernoulli_(p)
            dropped = F.dropout(h.transpose(0, 2), p) * noise
            return dropped + F.alpha_dropout(h.transpose(0, 2), p, training=True)

    torch.manual_seed(0)
    model, x = Drops(), torch.randn(3, 4, 8, dtype=dtype)
    assert_same_gradients(model, planned(model, x), lambda run: run(x).float().square().sum())
