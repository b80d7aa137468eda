"""What a forward observes of the values of its inputs, as a part of the signature.

Most forwards look at no values: nothing is asked then. Where one does, its recipes run before each step; what
they observe belongs to the key of a plan, and what they compute to its inputs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rkmate.graph.capture.recipe import Recipe, Recipes
from rkmate.runtime.guards import Guards
from rkmate.support.warn import warn

MANY = 8
"""Plans of calls that differ in nothing else, until it is said that each takes one."""
_NEW = ("new",)
"""What no recipe has observed yet."""


class Observations:
    """The recipes of the signatures of one module."""

    def __init__(self) -> None:
        self._of: dict[Guards, Recipes] = {}
        self._seen: dict[Guards, set[tuple[str, ...]]] = {}

    def add(self, key: Guards, recipe: Recipe | None) -> Guards:
        """A call of this signature was captured; its key, with what the forward observed."""
        key = key._replace(values=())
        if recipe is None:
            return key
        self._of.setdefault(key, Recipes()).add(recipe)
        seen = self._seen.setdefault(key, set())
        if recipe.observed not in seen:
            seen.add(recipe.observed)
            if len(seen) == MANY:
                warn(f"the forward looks at values of its inputs, and {MANY} calls of the same shapes had "
                     "other ones (how many elements a mask picks, say): each takes a plan of its own. Let "
                     "fewer occur, by padding, or compute without looking ('Values of inputs' in "
                     "docs/limits.md)")
        return key._replace(values=recipe.observed)

    def keep(self, keys: Iterable[Guards]) -> None:
        """Forget signatures other than these: no plan of theirs is kept."""
        kept = {k._replace(values=()) for k in keys}
        self._of = {k: v for k, v in self._of.items() if k in kept}
        self._seen = {k: v for k, v in self._seen.items() if k in kept}

    def of(self, key: Guards, tensors: list[torch.Tensor]) -> tuple[Guards, list[torch.Tensor]]:
        """The key of a call with these tensors, and the inputs of its plan."""
        recipes = self._of.get(key) if self._of else None
        if recipes is None:
            return key, tensors
        found = recipes.run(tensors)
        if found is None:
            return key._replace(values=_NEW), tensors
        observed, computed = found
        return key._replace(values=observed), [*tensors, *computed]
