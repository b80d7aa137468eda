"""Recipes: which calls run before a step, in which order, and what decides between them."""

from __future__ import annotations

import torch

from rkmate.graph.capture.recipe import Builder, Recipe, Recipes, Slot, Step

COPIED: dict[int, bool] = {}


def _read(builder: Builder, of: int, value: str) -> None:
    builder.observe(builder.add(Step(torch.Tensor.item, (Slot(of),), {}, ()), frozenset((of,)), frozenset()),
                    value)


def test_what_nothing_is_observed_of_is_left_out() -> None:
    builder = Builder(1)
    unread, largest = builder.new_slot(), builder.new_slot()
    builder.add(Step(torch.sub, (Slot(0), 1), {}, (unread,)), frozenset((0,)), frozenset())
    builder.add(Step(torch.max, (Slot(0),), {}, (largest,)), frozenset((0,)), frozenset())
    _read(builder, largest, "3")
    recipe = builder.recipe(COPIED, 0)
    assert [s.function for s in recipe.segments[0].steps] == [torch.max, torch.Tensor.item]


def test_what_is_read_before_a_write_is_computed_before_it() -> None:
    """It is needed after the write only; computed then, it would have another value."""
    builder = Builder(1)
    mine, before, after, sum_before = (builder.new_slot() for _ in range(4))
    own, other = frozenset((9,)), frozenset((8,))
    builder.add(Step(torch.clone, (Slot(0),), {}, (mine,)), frozenset((0,)), frozenset())
    builder.add(Step(torch.sum, (Slot(mine),), {}, (before,)), own, frozenset())
    builder.add(Step(torch.Tensor.add_, (Slot(mine), 5), {}, (mine,)), own, own)
    builder.add(Step(torch.max, (Slot(mine),), {}, (after,)), own, frozenset())
    _read(builder, after, "8")
    builder.add(Step(torch.clone, (Slot(before),), {}, (sum_before,)), other, frozenset())
    _read(builder, sum_before, "6")
    recipes = Recipes()
    recipe = builder.recipe(COPIED, 0)
    recipes.add(recipe)
    x = torch.tensor([1, 2, 3])
    assert recipes.run([x]) == (("8", "6"), [])
    assert x.tolist() == [1, 2, 3]


def _branching(value: int) -> Recipe:
    """Reads the largest; where it is not 0, picks what is larger than 1, too."""
    builder = Builder(1)
    largest, mask, picked = (builder.new_slot() for _ in range(3))
    builder.add(Step(torch.max, (Slot(0),), {}, (largest,)), frozenset((0,)), frozenset())
    _read(builder, largest, str(value))
    if value:
        builder.add(Step(torch.gt, (Slot(0), 1), {}, (mask,)), frozenset((0,)), frozenset())
        last = builder.add(Step(torch.masked_select, (Slot(0), Slot(mask)), {}, (picked,)),
                           frozenset((0, 1)), frozenset())
        builder.observe(last, "[((1,), (1,), 'torch.int64', 'cpu')]", (picked,))
    return builder.recipe({picked: False}, 8)


def test_what_is_observed_decides_how_it_goes_on() -> None:
    recipes = Recipes()
    recipes.add(_branching(2))
    assert recipes.run([torch.tensor([0, 0])]) is None               # no recipe has observed that
    recipes.add(_branching(0))
    assert recipes.run([torch.tensor([0, 0])]) == (("0",), [])
    found = recipes.run([torch.tensor([1, 2])])
    assert found is not None and torch.equal(found[1][0], torch.tensor([2]))
    assert recipes.run([torch.tensor([2, 2])]) is None               # two are picked, not one
