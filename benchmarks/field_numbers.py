"""Further scenarios of `field.py`: checks and numbers of values in a forward, weights that hooks make,
changes in the middle of training, and models of transformers of further kinds."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import importlib
import itertools
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from field_architectures import architecture, llama, preferred, training, trl_task
from field_scenarios import BATCHES, BOTH, DECODER, ENCODER, T5, TEXT, VISION, Block, Scenario, Task, made
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

Loss = Callable[[Any, int], torch.Tensor]
"""Returns the loss of a model in a step, by its number."""


def _blocks(number: int = 4, *others: nn.Module) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(number)), *others)


def _stepped(model: Any, loss_of: Loss, steps: int, *, rate: float = 0.05) -> list[float]:
    """Train, and return the losses."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], rate)
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, number)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _task(model: nn.Module, loss_of: Loss, train: Callable[[Any], list[float]] | None = None) -> Task:
    return Task(model, lambda m: loss_of(m, 0), train=train or (lambda m: _stepped(m, loss_of, 6)))


def _squared(model: nn.Module, change: Callable[[Any, int], Any] | None = None, *, width: int = 32) -> Task:
    """A squared result. `change`: what a loop does before each step."""
    x = torch.randn(128, width)

    def loss_of(m: Any, number: int) -> torch.Tensor:
        if change is not None:
            change(m, number)
        out: torch.Tensor = m(x)
        return out.square().mean()
    return _task(model, loss_of)


class Computing(nn.Module):
    """Layers, and something that is computed of their result."""

    def __init__(self, then: Callable[[Any, torch.Tensor], Any], **attributes: Any) -> None:
        super().__init__()
        self.layers, self.mean, self.spread = _blocks(), nn.Linear(32, 8), nn.Linear(32, 8)
        self.then = then
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> Any:
        """Return what is computed."""
        return self.then(self, self.layers(x))


def _likely(m: Any, x: torch.Tensor) -> torch.Tensor:
    return F.gaussian_nll_loss(m.mean(x), torch.ones(len(x), 8), F.softplus(m.spread(x)))


def _checked(m: Any, x: torch.Tensor) -> torch.Tensor:
    if torch.any(x.abs() > 1e4):
        raise FloatingPointError(f"diverged: {x.abs().max()}")
    assert x.min() > -1e4
    return x


def _distributed(m: Any, x: torch.Tensor) -> torch.Tensor:
    return -torch.distributions.Normal(m.mean(x), F.softplus(m.spread(x)), validate_args=True).log_prob(
        torch.ones(len(x), 8)).mean()


def _logged(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    loss = m.mean(x).square().mean()
    m.last = loss.item()
    return loss, {"loss": m.last, "largest": x.abs().max().item()}


def _logs() -> Task:
    x = torch.randn(128, 32)
    model = Computing(_logged, last=0.0)

    def train(m: Any) -> list[float]:
        optimizer, left = torch.optim.SGD(m.parameters(), 0.05), []
        for _ in range(4):
            optimizer.zero_grad()
            loss, logs = m(x)
            loss.backward()
            optimizer.step()
            left += [loss.item(), m.last, *logs.values()]
        return left
    return Task(model, lambda m: m(x)[0], train=train)


def _endless() -> Iterator[float]:
    value = 1.0
    while True:
        yield value
        value *= 0.9


def _counted(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.counter["calls"] += 1
    return x / m.counter["calls"]


def _pruned() -> Task:
    x = torch.randn(128, 32)

    def square(m: Any, number: int) -> torch.Tensor:
        out: torch.Tensor = m(x)
        return out.square().mean()

    def train(m: Any) -> list[float]:
        losses = []
        for _ in range(3):
            for block in m:
                prune.l1_unstructured(block.up, "weight", amount=0.2)
            losses += _stepped(m, square, 2)
        for block in m:
            prune.remove(block.up, "weight")
        return losses + _stepped(m, square, 2)
    return _task(_blocks(), square, train)


def _penalised(change: Callable[[nn.Module], Any]) -> Task:
    """A penalty on weights that a hook makes."""
    model, x = _blocks(), torch.randn(128, 32)
    for block in model:
        change(block.up)
    return _task(model, lambda m, _: m(x).square().mean() + 0.1 * sum(b.up.weight.abs().mean() for b in m))


def _sharpness_aware() -> Task:
    x, labels = torch.randn(128, 32), torch.randint(0, 32, (128,))

    def train(m: Any) -> list[float]:
        optimizer, losses = torch.optim.SGD(m.parameters(), 0.05, momentum=0.9), []
        for _ in range(4):
            F.cross_entropy(m(x), labels).backward()
            moves = [p.grad * 0.05 for p in m.parameters()]
            with torch.no_grad():
                for p, move in zip(m.parameters(), moves, strict=True):
                    p.add_(move)
            optimizer.zero_grad()
            loss = F.cross_entropy(m(x), labels)
            loss.backward()
            with torch.no_grad():
                for p, move in zip(m.parameters(), moves, strict=True):
                    p.sub_(move)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses
    return _task(_blocks(), lambda m, _: F.cross_entropy(m(x), labels), train)


def _averaged() -> Task:
    x = torch.randn(128, 32)

    def train(m: Any) -> list[float]:
        average = AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        losses = []
        for _ in range(3):
            losses += _stepped(m, lambda m, _: m(x).square().mean(), 2)
            average.update_parameters(m)
            with torch.no_grad():
                losses.append(average(x).sum().item())
        return losses
    return _task(_blocks(4, nn.BatchNorm1d(32)), lambda m, _: m(x).square().mean(), train)


class Grows(nn.Module):
    """Gets another layer now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.share = nn.ModuleList([Block(), Block()]), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a mix of what the last layer gets and gives."""
        for layer in self.layers[:-1]:
            x = layer(x)
        return torch.lerp(x, self.layers[-1](x), self.share)


def _grow(m: Any, number: int) -> None:
    if number in (2, 4):
        m.layers.append(Block())
    m.share = 0.5 if number in (2, 4) else 1.0


def _thaw(m: Any, number: int) -> None:
    for k, block in enumerate(m):
        block.requires_grad_(k >= 3 - number)


def _replace(m: Any, number: int) -> None:
    """Give the model other numbers in another type, or weights that are views of one vector."""
    if number == 2:
        vector = torch.nn.utils.parameters_to_vector(m.parameters()).detach() * 0.99
        torch.nn.utils.vector_to_parameters(vector, m.parameters())
    if number == 4:
        m.load_state_dict({k: v * 0.99 for k, v in copy.deepcopy(m.state_dict()).items()}, assign=True)


class Fails(nn.Module):
    """Raises an error on request."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.fails = _blocks(2), _blocks(2), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result of all layers."""
        x = self.first(x)
        if self.fails:
            raise RuntimeError("no more")
        out: torch.Tensor = self.second(x)
        return out


def _interrupted() -> Task:
    x = torch.randn(128, 32)

    def train(m: Any) -> list[float]:
        losses = []
        for number in range(6):
            with contextlib.suppress(RuntimeError):
                m.fails = number == 2
                loss = m(x).square().mean()
                if number == 4:
                    raise RuntimeError("before the backward")
                m.zero_grad()
                loss.backward()
                losses.append(loss.item())
        return losses
    return _task(Fails(), lambda m, _: m(x).square().mean(), train)


def _generated() -> Task:
    model = made("T5ForConditionalGeneration", "T5", {**T5, "use_cache": True})
    batch = BATCHES["translated"]()

    def train(m: Any) -> list[float]:
        losses = _stepped(m, lambda m, _: m(**batch).loss, 2)
        m.eval()
        losses.append(float(m.generate(batch["input_ids"], max_new_tokens=5).sum()))
        m.train()
        m.resize_token_embeddings(107, mean_resizing=False)
        return losses + _stepped(m, lambda m, _: m(**batch).loss, 3)
    return _task(model, lambda m, _: m(**batch).loss, train)


def _adapted_later() -> Task:
    model, batch = llama(), BATCHES["labelled"]()

    def train(m: Any) -> list[float]:
        peft = importlib.import_module("peft")
        losses = _stepped(m, lambda m, _: m(**batch).loss, 2)
        adapted = peft.get_peft_model(m, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        losses += _stepped(adapted, lambda m, _: m(**batch).loss, 3)
        merged = adapted.merge_and_unload().requires_grad_(True)
        return losses + _stepped(merged, lambda m, _: m(**batch).loss, 2)
    return _task(model, lambda m, _: m(**batch).loss, train)


def _from_folder() -> Any:
    folder = tempfile.mkdtemp()
    llama().save_pretrained(folder)
    return importlib.import_module("transformers").AutoModelForCausalLM.from_pretrained(folder)


def _row(name: str, make: Callable[[], Task], budget: float = 0.6) -> Scenario:
    return Scenario("torch", name, "model", make, budget=budget)


def _computing(name: str, then: Callable[[Any, torch.Tensor], Any],
               make: Callable[[], dict[str, Any]] = dict) -> Scenario:
    return _row(name, lambda: _squared(Computing(then, **make())))


EXPERTS = {**DECODER, "head_dim": 8, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
           "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
           "first_k_dense_replace": 1, "n_shared_experts": 1}
MODELS: tuple[tuple[str, str, str, dict[str, Any], str, float], ...] = (
    ("camembert", "CamembertForMaskedLM", "Camembert", ENCODER, "labelled", 0.6),
    ("mra", "MraForMaskedLM", "Mra", {**ENCODER, "max_position_embeddings": 130, "block_per_row": 1},
     "labelled", 0.6),
    ("imagegpt", "ImageGPTForImageClassification", "ImageGPT", {
        "vocab_size": TEXT["vocab_size"], "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
     "sentence", 0.6),
    ("blenderbot small", "BlenderbotSmallForConditionalGeneration", "BlenderbotSmall", BOTH, "translated",
     0.6),
    ("afmoe", "AfmoeForCausalLM", "Afmoe", {
        **EXPERTS, "num_shared_experts": 1, "num_dense_layers": 1, "sliding_window": 8}, "labelled", 0.6),
    ("minimax m2", "MiniMaxM2ForCausalLM", "MiniMaxM2", EXPERTS, "labelled", 0.6),
    ("granite moe shared", "GraniteMoeSharedForCausalLM", "GraniteMoeShared", {
        **EXPERTS, "shared_intermediate_size": 32}, "labelled", 0.6),
    ("vit msn", "ViTMSNForImageClassification", "ViTMSN", VISION, "image", 0.6),
    ("clipseg", "CLIPSegModel", "CLIPSeg", {
        "text_config": ENCODER, "vision_config": VISION, "projection_dim": 16}, "contrast", 0.6),
    ("owlv2", "Owlv2Model", "Owlv2", {
        "text_config": ENCODER, "vision_config": VISION, "projection_dim": 16}, "contrast", 0.6),
)
"""Name, model, configuration, its options, batch, budget."""

SCENARIOS: tuple[Scenario, ...] = (
    *(architecture(*row) for row in MODELS),
    training("transformers", "t5, generation, then another vocabulary", "model", _generated),
    training("peft", "lora on a model with a budget, merged", "model", _adapted_later, "transformers"),
    training("trl", "dpo, a whole reference model", "model", lambda: trl_task(
        "DPO", preferred, _from_folder, max_length=24), "datasets"),
    _computing("a gaussian likelihood", _likely),
    _computing("checks that raise", _checked),
    _computing("a distribution that validates", _distributed),
    _row("numbers of a loss, returned and kept", _logs),
    _computing("a count that advances", lambda m, x: x / next(m.numbers), lambda: {
        "numbers": itertools.count(1)}),
    _computing("a generator that advances", lambda m, x: x * next(m.numbers), lambda: {
        "numbers": _endless()}),
    _computing("a counter", _counted, lambda: {"counter": collections.Counter()}),
    _row("pruned again and again", _pruned),
    _row("a penalty on pruned weights", lambda: _penalised(
        functools.partial(prune.l1_unstructured, name="weight", amount=0.3))),
    _row("a penalty on normed weights, by hooks", lambda: _penalised(nn.utils.weight_norm)),
    _row("a penalty on weights of spectral norm, by hooks", lambda: _penalised(nn.utils.spectral_norm)),
    _row("sharpness-aware steps", _sharpness_aware),
    _row("an averaged model with buffers", _averaged),
    _row("layers that are added", lambda: _squared(Grows(), _grow)),
    _row("blocks thawed in every step", lambda: _squared(_blocks(), _thaw)),
    _row("weights from a vector, and assigned", lambda: _squared(_blocks(), _replace)),
    _row("errors in the middle", _interrupted),
)
