"""Adapters around the step of a call: each has `apply` before the step and `invert` after it.

A module is called with any arguments and returns any object. The step of a plan takes tensors in a fixed
order and returns tensors. The adapters stand in between, from the caller to the step:

| adapter | `apply`, before the step | `invert`, after it |
|---|---|---|
| `padding.Padding` | pads the arguments to the next planned length | cuts the outputs back |
| `Key` | reads the key of a plan, and the tensors among the arguments | |
| `Observations` | reads what the forward asks of their values, and computes what it takes from these | |
| (here the plan is found; without one, the original runs) | | |
| `Result` | | puts the output tensors into the object that the forward returns |
| `Changes` | | changes attributes, and objects among the arguments, as the forward does |
| `Repeats` | adds inputs that are counted twice | |

Two things that look alike are none. A loss inside of the plan (`rkmate.with_loss`) belongs to the module: it
has parameters, and its targets are arguments like others. Deferred outputs (`rkmate.runtime.deferred`) belong
to the step: they are computed from what its forward has kept, and stand among its outputs before autograd
connects these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from rkmate.graph.capture.answers import Kinds, kind_of
from rkmate.graph.capture.captured import Capture
from rkmate.graph.capture.effects import Effects
from rkmate.graph.capture.recipe import Recipe, Recipes
from rkmate.graph.capture.structure import Structure
from rkmate.runtime.guards import Guards, ModuleReader, guards_of
from rkmate.support.warn import warn


class Arguments(NamedTuple):
    """The arguments of a call, as one adapter passes them to the next."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: Guards | None = None
    """The key under which the plan of the call is found; None before `Key`."""
    tensors: Sequence[torch.Tensor] = ()
    """The tensors among the arguments."""
    inputs: Sequence[torch.Tensor] = ()
    """The inputs of the step: these tensors, and what adapters add."""


class Adapter:
    """Changes the arguments of a call, its outputs, or both."""

    def apply(self, call: Arguments) -> tuple[Arguments, Any]:
        """Return the arguments to pass on, and a record of this call for `invert`."""
        return call, None

    def invert(self, record: Any, outputs: Any) -> Any:
        """Return the outputs to pass on. `record`: from `apply`."""
        return outputs


def run_around(adapters: Sequence[Adapter], call: Arguments, run: Callable[[Arguments], Any]) -> Any:
    """Run a call inside of adapters, the first one outermost. Returns the outputs."""
    records = []
    for adapter in adapters:
        call, record = adapter.apply(call)
        records.append(record)
    outputs = run(call)
    for adapter, record in zip(reversed(adapters), reversed(records), strict=True):
        outputs = adapter.invert(record, outputs)
    return outputs


def before_a_plan(padding: Sequence[Adapter], reader: ModuleReader, observations: Observations
                  ) -> tuple[Adapter, ...]:
    """Return the adapters of a module, inside of which the plan of a call is found."""
    return *padding, Key(reader), observations


def around_step(capture: Capture) -> tuple[Adapter, ...]:
    """Return the adapters of the steps of a plan."""
    return (Result(capture.result), *((Changes(capture.effects),) if capture.effects else ()),
            *((Repeats(capture.repeats),) if capture.repeats else ()))


# -- Before the plan is known ----------------------------------------------------------------------


class Key(Adapter):
    """Reads the key of a plan: everything about a call that a plan is specialised on."""

    def __init__(self, reader: ModuleReader) -> None:
        self._reader = reader

    def apply(self, call: Arguments) -> tuple[Arguments, None]:
        """Return the arguments with their key and tensors."""
        key, tensors = guards_of(self._reader, call.args, call.kwargs)
        return Arguments(call.args, call.kwargs, key, tensors, tensors), None


MANY = 8
"""Number of plans of calls that differ only in observed values, at which a warning says so."""
_NEW = ("new",)
"""Observations that no recipe has made before."""


class Observations(Adapter):
    """Computes what a forward reads from the values of its inputs. Most forwards read nothing.

    Otherwise the recipes of the signature run before each step: what they observe belongs to the key of the
    plan, and what they compute to the inputs of the step.
    """

    def __init__(self) -> None:
        self._of: dict[Guards, Recipes] = {}
        self._seen: dict[Guards, set[tuple[str, ...]]] = {}
        self._looked: dict[Any, set[int]] = {}
        """Numbers of the arguments that a library looks at, by the structure of the arguments."""

    def look(self, key: Guards, kinds: Kinds) -> Guards:
        """Record that a library looks at arguments of such calls. Returns the key of one, with its kinds."""
        if kinds:
            self._looked.setdefault(key.structure, set()).update(k for k, _ in kinds)
        return key._replace(kinds=tuple(sorted({**dict(key.kinds), **dict(kinds)}.items())))

    def with_kinds(self, key: Guards, tensors: Sequence[torch.Tensor]) -> Guards:
        """Return the key of a call, with the kinds of the arguments that a library looks at."""
        numbers = sorted(self._looked.get(key.structure, ())) if self._looked else ()
        return key._replace(kinds=tuple((k, kind_of(tensors[k])) for k in numbers)) if numbers else key

    def kinds_in(self, tensors: Sequence[torch.Tensor]) -> Kinds:
        """Return the kinds of the arguments that a library looks at in some calls, of which these are one."""
        numbers = sorted(set().union(*self._looked.values()))
        return tuple((k, kind_of(tensors[k])) for k in numbers if k < len(tensors))

    def add(self, key: Guards, recipe: Recipe | None) -> Guards:
        """Record that a call of this signature was captured. Returns its key, with the forward's
        observations."""
        key = key._replace(values=())
        if recipe is None:
            return key
        self._of.setdefault(key, Recipes()).add(recipe)
        seen = self._seen.setdefault(key, set())
        if recipe.observed not in seen:
            seen.add(recipe.observed)
            if len(seen) == MANY:
                warn(f"the forward reads values of its inputs, and {MANY} calls of the same shapes had "
                     "different ones (for example, the number of elements that a mask selects): each takes a "
                     "plan of its own. Pad so that fewer occur, or compute without reading values ('Values "
                     "of inputs' in docs/limits.md)")
        return key._replace(values=recipe.observed)

    def keep(self, keys: Iterable[Guards]) -> None:
        """Forget signatures other than these: no plan of theirs is kept."""
        kept = {k._replace(values=()) for k in keys}
        self._of = {k: v for k, v in self._of.items() if k in kept}
        self._seen = {k: v for k, v in self._seen.items() if k in kept}

    def apply(self, call: Arguments) -> tuple[Arguments, None]:
        """Return the arguments with the observations in their key, and with what is computed of them."""
        key = None if call.key is None else self.with_kinds(call.key, call.tensors)
        call = call._replace(key=key)
        recipes = self._of.get(key) if self._of and key is not None else None
        if recipes is None or key is None:
            return call, None
        found = recipes.run(call.tensors)
        if found is None:
            return call._replace(key=key._replace(values=_NEW)), None
        observed, computed = found
        return call._replace(key=key._replace(values=observed), inputs=[*call.tensors, *computed]), None


# -- Around the step of a plan ---------------------------------------------------------------------


class Result(Adapter):
    """Puts the tensors that a step returns into the object that the forward returns."""

    def __init__(self, structure: Structure) -> None:
        self._structure = structure

    def invert(self, record: None, outputs: list[Any]) -> Any:
        """Return the object."""
        return self._structure.fill(outputs)


class Changes(Adapter):
    """Leaves attributes, collected tensors, and objects among the arguments, changed as the forward does."""

    def __init__(self, effects: Effects) -> None:
        self._effects = effects

    def apply(self, call: Arguments) -> tuple[Arguments, Arguments]:
        """Return the arguments, and remember them."""
        return call, call

    def invert(self, record: Arguments, outputs: list[Any]) -> list[Any]:
        """Return the outputs, after the changes."""
        self._effects.repeat(record.args, record.kwargs, [*record.tensors, *outputs])
        return outputs


class Repeats(Adapter):
    """Gives some inputs a second time: other modules use them too, and contribute to their gradients."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers

    def apply(self, call: Arguments) -> tuple[Arguments, None]:
        """Return the arguments with these inputs at the end."""
        return call._replace(inputs=[*call.inputs, *(call.inputs[i] for i in self._numbers)]), None
