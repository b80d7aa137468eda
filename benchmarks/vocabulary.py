"""A small model with a large vocabulary: what stands in memory is logits, and gradients of the embedding.

GPT-2 of four layers (width 256, batch 2 x 128, 50,257 words, tied) at several parts of eager's peak, with
default settings and, where this version knows it, with ``gradients="in_place"``: peak by the exact meter,
time as ratio of medians of interleaved steps. Then a training run next to eager's: the greatest relative
difference of losses. ``--heads``: instead, a product with the vocabulary and its cross entropy alone, plain
and a few rows at a time.
Prints Markdown tables. ``--small`` is the same with a tiny model.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from dataclasses import replace
from typing import Any

import torch
import transformers
from beside import beside, peak_of
from peers import Case, gpt
from torch import nn

import rkmate

HEADS = ((1024, 1280, 50257), (2048, 1024, 50257), (256, 256, 50257), (1024, 512, 128256))
"""Rows, width, words."""
FRACTIONS = (1.0, 0.7, 0.45, 0.3, 0.2)


def ways() -> dict[str, dict[str, Any]]:
    """How modules are wrapped: by name, more of `rkmate.Settings`."""
    return {"default": {}, "in place": {"gradients": "in_place"}}


def row(case: Case, fraction: float, more: dict[str, Any], repeats: int) -> str:
    """Budget, measured and predicted peak, measured and predicted time: cells of a line."""
    def eager() -> Any:
        return case.model(**case.kwargs).loss

    level = peak_of(eager, case.model)
    try:
        wrapped = rkmate.wrap(case.model, (), case.kwargs, budget=int(fraction * level), progress=False,
                              settings=rkmate.Settings(run=rkmate.RunSettings(verify=False), **more))
    except rkmate.InfeasibleBudget as error:
        return f"infeasible: at least {error.minimum_bytes / level:.1%} | | | "

    def forward() -> Any:
        return wrapped(**case.kwargs).loss

    found = beside(eager, case.model, forward, case.model, repeats)
    plan = wrapped.plan
    return (f"{found.peak / level:.1%} | {plan.peak_bytes / level:.1%} | {found.ratio:.3f} | "
            f"{1 + plan.overhead:.3f}")


def losses(model: nn.Module, kwargs: dict[str, Any], words: int, steps: int) -> list[float]:
    """Of a training run, new tokens at each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    draws = torch.Generator().manual_seed(1)
    result = []
    for _ in range(steps):
        tokens = torch.randint(words, kwargs["input_ids"].shape, generator=draws)
        optimizer.zero_grad(set_to_none=False)
        loss = model(**{**kwargs, "input_ids": tokens, "labels": tokens}).loss
        loss.backward()
        optimizer.step()
        result.append(loss.item())
    return result


def difference(case: Case, fraction: float | None, more: dict[str, Any], steps: int) -> float:
    """The greatest relative difference between the losses of two runs from the same parameters; without a
    fraction, of two plain ones, after the last bit of one weight was another."""
    plain, other = copy.deepcopy(case.model), copy.deepcopy(case.model)
    words = case.model.config.vocab_size
    expected = losses(plain, case.kwargs, words, steps)
    del plain
    for p in other.parameters():
        p.grad = torch.zeros_like(p)
    if fraction is None:
        weight = other.transformer.h[0].mlp.c_fc.weight.detach()
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(torch.inf))
    else:
        other = rkmate.wrap(other, (), case.kwargs, budget=fraction, progress=False,
                            settings=rkmate.Settings(**more))
    found = losses(other, case.kwargs, words, steps)
    return max(abs(a - b) / abs(a) for a, b in zip(expected, found, strict=True))


class Head(nn.Module):
    """The last product of a language model, and its loss."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.product = nn.Linear(width, words, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.product(x), labels)


def head(rows: int, width: int, words: int, repeats: int) -> str:
    """The same cells of a head alone that works on a few rows at a time, and how many bytes less it takes."""
    torch.manual_seed(0)
    model = Head(width, words)
    x, labels = torch.randn(rows, width, requires_grad=True), torch.randint(words, (rows,))
    settings = rkmate.Settings(chunked_loss="always")

    def eager() -> torch.Tensor:
        loss: torch.Tensor = model(x, labels)
        return loss

    level = peak_of(eager, model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rkmate.RkmateWarning)       # the loss's variant: it is asked for
        wrapped = rkmate.wrap(model, (x, labels), budget=level, progress=False,
                              settings=replace(settings, run=rkmate.RunSettings(verify=False)))
    found = beside(eager, model, lambda: wrapped(x, labels), model, repeats)
    return f"{found.peak / level:.1%} | {found.ratio:.3f} | {wrapped.plan.variant}"


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fractions", default=",".join(map(str, FRACTIONS)))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--steps", type=int, default=100, help="of the training runs")
    parser.add_argument("--heads", action="store_true", help="heads alone, instead of a model")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if options.heads:
        print("| rows | width | words | peak | time | variant |\n|--:|--:|--:|--:|--:|---|")
        for sizes in [(64, 32, 512)] if options.small else HEADS:
            print(f"| {' | '.join(map(str, sizes))} | {head(*sizes, options.repeats)} |", flush=True)
        return
    torch.manual_seed(0)
    case = gpt(2, 32, 16, 2, 512) if options.small else gpt(4, 256, 128, 2, 50257)
    case.model.train()
    print("| gradients | budget | peak | predicted | time | predicted |\n|---|--:|--:|--:|--:|--:|")
    feasible: dict[str, float] = {}
    for name, more in ways().items():
        for fraction in map(float, options.fractions.split(",")):
            cells = row(case, fraction, more, options.repeats)
            if not cells.startswith("infeasible"):
                feasible[name] = fraction
            print(f"| {name} | {fraction:.0%} | {cells} |", flush=True)
    print(f"\n| words | gradients | budget | greatest relative difference of {options.steps} losses |\n"
          "|--:|---|--:|--:|")
    small = gpt(2, 32, 16, 2, 256) if options.small else gpt(4, 256, 128, 2, 256)
    small.model.train()
    for name, fraction in feasible.items():
        for one, budget in ((small, 0.5), (case, fraction)):
            found = difference(one, budget, ways()[name], options.steps)
            print(f"| {one.model.config.vocab_size} | {name} | {budget:.0%} | {found:.1e} |", flush=True)
    print(f"| {case.model.config.vocab_size} | plain, one bit of one weight | | "
          f"{difference(case, None, {}, options.steps):.1e} |", flush=True)


if __name__ == "__main__":
    main()
