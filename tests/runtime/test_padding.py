"""Lengths planned ahead, and inputs padded to them."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rkmate
from rkmate.errors import ArgumentError


class Tagger(nn.Module):
    """Attends to what a mask lets it; loss of the labels that count."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor,
                labels: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.embed(input_ids)
        scores = (h @ h.transpose(1, 2)).masked_fill(attention_mask[:, None] == 0, -1e9)
        logits = self.head(scores.softmax(-1) @ h)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


PAD = {"input_ids": 0, "attention_mask": 0, "labels": -100}


def batch(n: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 11, (2, n))
    return {"input_ids": ids, "attention_mask": torch.ones(2, n, dtype=torch.int64), "labels": ids}


def wrapped(pad: dict[str, int] | None) -> rkmate.PlannedModule:
    return rkmate.wrap(Tagger(), (), batch(6), budget=1.0, progress=False,
                       settings=rkmate.Settings(costs="analytic",
                                                run=rkmate.RunSettings(lengths=(8, 12), pad=pad)))


def test_calls_are_padded_to_the_next_length_and_cut_back() -> None:
    module = wrapped(PAD)
    planned = len(module._plans)
    assert planned == 3
    for n in (7, 8, 11):
        inputs = batch(n)
        found, expected = module(**inputs), module.original(**inputs)
        assert found["logits"].shape == (2, n, 11)
        torch.testing.assert_close(found["loss"], expected["loss"])
        torch.testing.assert_close(found["logits"], expected["logits"])
        names = [k for k, _ in module.named_parameters()]
        grads = torch.autograd.grad(found["loss"], list(module.parameters()))
        for name, a, b in zip(names, grads, torch.autograd.grad(
                expected["loss"], list(module.parameters())), strict=True):
            torch.testing.assert_close(a, b, msg=name)
    assert len(module._plans) == planned


def test_without_pad_lengths_are_planned_ahead_only() -> None:
    module = wrapped(None)
    planned = len(module._plans)
    module(**batch(12))
    assert len(module._plans) == planned
    assert module(**batch(7))["logits"].shape == (2, 7, 11)
    assert len(module._plans) == planned + 1


def test_a_call_above_all_lengths_is_planned_as_it_is() -> None:
    assert wrapped(PAD)(**batch(15))["logits"].shape == (2, 15, 11)


def test_an_argument_of_that_length_without_a_padding_is_refused() -> None:
    module = wrapped({"input_ids": 0, "attention_mask": 0})
    with pytest.raises(ArgumentError, match="'labels'"):
        module(**batch(7))


def test_copies_have_the_same_lengths() -> None:
    module = wrapped(PAD)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        for n in (7, 6):
            assert copied(**batch(n))["logits"].shape == (2, n, 11)
        assert len(copied._plans) == 1


@dataclass
class Tagged:
    logits: torch.Tensor
    mask: torch.Tensor | None = None


class Objects(Tagger):
    """Gets its mask, and returns its logits, inside of objects."""

    def forward(self, input_ids: torch.Tensor, tagged: Tagged | None = None, *more: torch.Tensor) -> Tagged:
        h = self.embed(input_ids)
        return Tagged(self.head(h if tagged is None or tagged.mask is None else h * tagged.mask[..., None]))


def test_outputs_in_objects_are_cut_back_and_such_arguments_refused() -> None:
    ids = torch.randint(0, 11, (2, 8))
    module = rkmate.wrap(Objects(), (ids,), budget=1.0, progress=False,
                         settings=rkmate.Settings(costs="analytic", run=rkmate.RunSettings(
                             lengths=(8,), pad={"input_ids": 0, "tagged": 0})))
    found = module(ids[:, :7])
    assert type(found) is Tagged
    torch.testing.assert_close(found.logits, module.original(ids[:, :7]).logits)
    for more in ((Tagged(torch.ones(1), torch.ones(2, 7)),), (None, torch.ones(2, 7))):
        with pytest.raises(ArgumentError, match=r"'tagged' holds a tensor of the length 7|'argument 2'"):
            module(ids[:, :7], *more)


@pytest.mark.parametrize(("lengths", "pad", "says"), [
    (None, PAD, "give lengths"), ((8, 0), None, "numbers of elements"),
    ((8,), {"labels": "x"}, "padding value")])
def test_wrong_lengths_and_paddings_are_refused(lengths: object, pad: object, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        rkmate.wrap(Tagger(), (), batch(6), budget=1.0, progress=False,
                    settings=rkmate.Settings(run=rkmate.RunSettings(lengths=lengths, pad=pad)))  # type: ignore
