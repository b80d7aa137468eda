"""Layers that are alike: runs of them in a model's lists, and the model with fewer of each.

A *unit* is the shortest group of layers that a run repeats: one layer, or several that take turns (a layer
with a sliding window, a layer without). Of each run, the shorter model has `UNITS` units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn

from rkmate.torch_seam.modules import HOOKS, REGISTRIES, SUBMODULES, buffers_of, parameters_of, submodules_of

UNITS = 4
"""Units of a run in the shorter model: the first, two that a run consists of, and the last."""
FEWEST = 7
"""Units that a run has at least: of fewer, the captures that are spared take no longer than the checks."""
_LONGEST = 6
"""Layers of a unit."""
_INDEX = ("idx", "index", "layer", "number", "depth", "block", "_id")
"""Parts of the names of attributes that may number the layers: their values may differ."""


@dataclass(frozen=True)
class Run:
    """Alike layers of a list."""

    path: str
    """The list."""
    names: tuple[str, ...]
    """All layers of the list, by their names in it."""
    start: int
    """The first layer of the run."""
    period: int
    """Layers of a unit."""
    units: int

    @property
    def extra(self) -> int:
        """Units that the shorter model does not have."""
        return self.units - UNITS

    @property
    def kept(self) -> tuple[int, ...]:
        """The layers of the list that the shorter model has."""
        middle = self.start + UNITS // 2 * self.period
        return (*range(middle), *range(middle + self.extra * self.period, len(self.names)))


class Layers:
    """Runs of a model, and the names of what is in them in the shorter model and in the whole one.

    Units of the shorter model are numbered through all runs: those of the first run are 0 to ``UNITS - 1``.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = tuple(runs)
        self._layers = [{name: k for k, name in enumerate(short_names(run))} for run in runs]

    def unit(self, name: str) -> int:
        """Return the unit in which the shorter model has what is called so; -1 outside of the runs."""
        found = self._place(name)
        if found is None:
            return -1
        number, layer, _ = found
        run = self.runs[number]
        unit = (layer - run.start) // run.period
        return number * UNITS + unit if 0 <= unit < UNITS else -1

    def whole(self, name: str, shift: int = 0) -> str:
        """Return the whole model's name of what is called so in the shorter one. `shift`: how many units
        further, from the second unit of a run."""
        found = self._place(name)
        if found is None:
            return name
        number, layer, rest = found
        run = self.runs[number]
        return f"{run.path}.{run.names[run.kept[layer] + shift * run.period]}{rest}"

    def moved(self, name: str, unit: int, shift: int) -> str:
        """Return the whole model's name of what an item of a unit refers to, in the copy of the item that
        stands `shift` units further."""
        own = self.unit(name)
        if own < 0 or unit < 0 or own // UNITS != unit // UNITS:
            return self.whole(name)
        extra = self.runs[own // UNITS].extra
        by = {(1, 0): shift, (1, 1): shift, (1, 2): shift - extra, (2, 1): extra}
        return self.whole(name, by.get((unit % UNITS, own % UNITS), 0))

    def within(self, name: str) -> str:
        """Return the name without the number of its unit."""
        found = self._place(name)
        if found is None or self.unit(name) < 0:
            return name
        number, layer, rest = found
        return f"{number}.{(layer - self.runs[number].start) % self.runs[number].period}{rest}"

    def _place(self, name: str) -> tuple[int, int, str] | None:
        """Return the run, the layer of the shorter list and the rest of a name."""
        for number, run in enumerate(self.runs):
            if name.startswith(run.path + "."):
                child = name[len(run.path) + 1:].split(".", 1)[0]
                layer = self._layers[number].get(child)
                return None if layer is None else (number, layer, name[len(run.path) + 1 + len(child):])
        return None


def short_names(run: Run) -> list[str]:
    """Return the names of the layers in the shorter list, which numbers its layers if the whole one does."""
    names = [run.names[k] for k in run.kept]
    return [*run.names[:len(names)]] if run.names == tuple(map(str, range(len(run.names)))) else names


# -- Finding ---------------------------------------------------------------------------------------

def layers_of(model: nn.Module) -> Layers | None:
    """Return the runs of a model, outermost lists first; None if there are none."""
    runs: list[Run] = []
    for path, module in model.named_modules():
        if path and isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)) \
                and len(module) >= FEWEST and not any(path.startswith(r.path + ".") for r in runs):
            found = _run(path, submodules_of(module))
            if found is not None and _can_be_copied(model, path):
                runs.append(found)
    return Layers(runs) if runs else None


def _run(path: str, children: dict[str, nn.Module | None]) -> Run | None:
    """Return the run that spares the most layers of a list; None if there is none."""
    signatures = [None if child is None else _signature(child) for child in children.values()]
    best: Run | None = None
    for period in range(1, min(_LONGEST, len(signatures) // FEWEST) + 1):
        equal = [a == b and a is not None for a, b in zip(signatures, signatures[period:], strict=False)]
        start = 0
        for end in [k for k, same in enumerate(equal) if not same] + [len(equal)]:
            units = (end - start + period) // period
            if units >= FEWEST and (best is None or units * period > best.units * best.period):
                best = Run(path, tuple(children), start, period, units)
            start = end + 1
    if best is None:
        return None
    last = best.start + best.units * best.period
    return best if _are_apart(list(children.values())[best.start:last]) else None


def _signature(layer: nn.Module) -> Any:
    """Return what alike layers have in common; None for a layer that is like no other. It need not tell all
    differences: the operations of the whole model are compared later."""
    found: list[Any] = []
    for path, m in layer.named_modules():
        if any(m.__dict__.get(name) for name in HOOKS):
            return None
        found.append((path, type(m), m.training, *(
            (name, type(t), t.shape, t.stride(), t.dtype, t.device, t.requires_grad)
            for registry in (parameters_of(m), buffers_of(m)) for name, t in registry.items()
            if t is not None), *(
            (name, type(value), value if isinstance(value, (bool, int, float, str)) else None)
            for name, value in m.__dict__.items() if not any(part in name for part in _INDEX))))
    return found


def _are_apart(layers: Sequence[nn.Module | None]) -> bool:
    """Return whether no two layers have a module, parameter or buffer in common."""
    seen: set[int] = set()
    for layer in layers:
        assert layer is not None
        own = {*map(id, layer.modules()), *map(id, layer.parameters()), *map(id, layer.buffers())}
        if own & seen:
            return False
        seen |= own
    return True


# -- The shorter model -----------------------------------------------------------------------------

def _above(model: nn.Module, path: str) -> list[nn.Module]:
    """Return the modules on the way to one, itself included."""
    found = [model]
    for name in path.split("."):
        child = submodules_of(found[-1])[name]
        assert child is not None
        found.append(child)
    return found


def _can_be_copied(model: nn.Module, path: str) -> bool:
    """Return whether copies of the modules on the way to a list call the copied list: none has a method of
    the original as an attribute, except those of its plan, which copies do without."""
    return not any(
        name == "forward" or (isinstance(v, MethodType) and isinstance(v.__self__, nn.Module))
        for m in _above(model, path) for name, v in m.__dict__.items() if not _of_a_plan(v))


def _of_a_plan(value: Any) -> bool:
    """Return whether an attribute of a module comes from its plan, and replaces no attribute of the model."""
    maker = value.__func__ if isinstance(value, MethodType) else type(value)
    return getattr(maker, "is_planned", False) is True and getattr(maker, "replaces", None) is None


def shorter(model: nn.Module, layers: Layers) -> nn.Module:
    """Return a model with `UNITS` units of each run. It shares everything with the original except the lists
    and the modules around them."""
    copies: dict[int, nn.Module] = {}

    def copied(module: nn.Module) -> nn.Module:
        if id(module) not in copies:
            made = copies[id(module)] = object.__new__(type(module))
            made.__dict__.update({name: v for name, v in module.__dict__.items() if not _of_a_plan(v)})
            for name in REGISTRIES:
                if name in made.__dict__:
                    made.__dict__[name] = made.__dict__[name].copy()
        return copies[id(module)]

    for run in layers.runs:
        way = _above(model, run.path)
        for module, name, below in zip(way[:-1], run.path.split("."), way[1:], strict=True):
            submodules_of(copied(module))[name] = copied(below)
        children = list(submodules_of(way[-1]).values())
        copied(way[-1]).__dict__[SUBMODULES] = {
            name: children[k] for name, k in zip(short_names(run), run.kept, strict=True)}
    return copied(model)

