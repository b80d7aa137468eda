"""Wishes of the user, to keep something or to compute it again: by names of modules (`Settings.pins`), and
by hints in a forward (`rkmate.keep`, `rkmate.recompute`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from rkmate.errors import WishError
from rkmate.graph.blocks.identity import Modules
from rkmate.graph.capture.hints import Hint, Wish, hints_in
from rkmate.graph.ops.collectives import is_collective
from rkmate.graph.passes.once import gathers_parameters
from rkmate.ir.cd import CDGraph

if TYPE_CHECKING:
    from rkmate.graph.blocks.partition import Partition
    from rkmate.graph.capture.captured import Capture

_JOINED = "collectives, which run once in a step"


def check_names(model: nn.Module, pins: Mapping[str, Wish], prefix: str) -> None:
    """Raise `WishError` for a pattern that no module's name matches. `prefix`: what names in the captured
    model begin with."""
    names = [n.removeprefix(prefix) for n, _ in model.named_modules() if n]
    for pattern in pins:
        if not any(fnmatchcase(n, pattern) for n in names):
            listed = ", ".join(map(repr, names[:6])) + (", ..." if len(names) > 6 else "")
            raise WishError(f"pins names {pattern!r}, and {type(model).__name__} has no such module"
                            f"{f'; its modules are {listed}' if names else ''}")


def kept_in_words(captured: Capture, pins: Mapping[str, Wish]) -> list[str]:
    """Return the wishes to keep something, as the user wrote them."""
    return [*(_words_of(pattern, wish) for pattern, wish in pins.items() if wish == "keep"),
            *(_words_of(hint) for hint in hints_in(captured.graph).values() if hint.wish == "keep")]


def _words_of(what: str | Hint, wish: str = "") -> str:
    """Return a wish as the user wrote it."""
    return f"pins[{what!r}] = {wish!r}" if isinstance(what, str) else f"rkmate.{what.wish} at {what.place}"


@dataclass(frozen=True)
class Wishes:
    """The demands on a schedule."""

    once: frozenset[int] = frozenset()
    """Forward C nodes that never run again."""
    forgotten: frozenset[int] = frozenset()
    """Forward D nodes that are not in memory at the loss."""
    words: tuple[str, ...] = field(default=(), compare=False)
    """The wishes as the user wrote them."""

    def __bool__(self) -> bool:
        return bool(self.once or self.forgotten)


def wishes_of(parts: Partition, captured: Capture, pins: Mapping[str, Wish], prefix: str) -> Wishes:
    """Return the wishes that concern a graph, and that its collectives never run again unless they gather
    parameters. Raises `WishError` if two contradict each other, or if one cannot be followed at all."""
    program, hints = parts.program, hints_in(captured.graph)
    joined = frozenset(i for i in program.cd.forward if is_collective(program.operation[i].target)
                       and not gathers_parameters(program.joint, program.operation[i]))
    if not pins and not hints:
        return Wishes(joined, words=(_JOINED,) * bool(joined))
    graph = program.cd
    held = {*program.pinned, *graph.outputs, *graph.decided, *(j for i in joined for j in graph.c[i].outputs)}
    saved = {j for c in graph.c[graph.loss:] for j in c.inputs
             if (made := graph.producer[j]) is not None and made < graph.loss}
    wanted: dict[int, tuple[Wish, str]] = {}

    def wish(wish: Wish, data: Iterable[int], words: str) -> None:
        for j in data:
            before = wanted.setdefault(j, (wish, words))
            if before[0] != wish:
                raise WishError(f"{before[1]} and {words} contradict each other: {graph.d[j].name} cannot be "
                                "kept and computed again; leave one of them out")

    path_of = Modules()
    paths = [path_of(program.operation[i]).removeprefix(prefix) for i in range(graph.loss)]
    for pattern, what in pins.items():
        regions: dict[str, set[int]] = {}
        for i, path in enumerate(paths):
            if module := _module_of(path, pattern):
                regions.setdefault(module, set()).add(i)
        for inside in regions.values():
            data = {j for i in inside for j in graph.c[i].outputs}
            if what == "recompute":
                # As under torch.utils.checkpoint, results are left to the planner, if there is anything else.
                inner = {j for j in data - held if inside.issuperset(
                    r for r in graph.readers[j] if r < graph.loss)}
                data = inner if inner & saved else (data & saved) - held
                if len(inside) == 1:
                    data = _with_unsaved(graph, data, saved | held)
            else:
                data &= saved
            wish(what, data, _words_of(pattern, what))
    found = hints_in(program.joint.graph)
    for number, hint in hints.items():
        words = _words_of(hint)
        if number not in found:
            if hint.wish == "keep":
                raise WishError(f"{words}: the planned graph does not have this value: leave the hint out")
            continue                # it is made inside of a larger operation, and never kept
        where = program.storage[found[number].node]
        if not isinstance(where, int):
            if hint.wish == "recompute":
                raise WishError(f"{words}: this value is an input or a parameter, which no step computes: "
                                "leave the hint out")
            continue
        if hint.wish == "recompute" and where in held:
            raise WishError(f"{words}: this value is an output of the model or a decision, which stays in "
                            "memory: leave the hint out")
        data = {where} & saved
        wish(hint.wish, _with_unsaved(graph, data, saved | held) if hint.wish == "recompute" else data, words)
    return Wishes(joined | frozenset(made for j, (what, _) in wanted.items() if what == "keep"
                            and (made := graph.producer[j]) is not None),
                  frozenset(j for j, (what, _) in wanted.items() if what == "recompute"),
                  tuple(dict.fromkeys((*(words for _, words in wanted.values()),
                                       *(_JOINED,) * bool(joined)))))


def _with_unsaved(graph: CDGraph, data: set[int], saved: Collection[int]) -> set[int]:
    """Return forward data, with what it is made from, as far as no backward node reads that: to keep it
    instead would save nothing."""
    found, todo = set(data), list(data)
    while todo:
        i = graph.producer[todo.pop()]
        for j in () if i is None else graph.c[i].inputs:
            if j not in saved and j not in found and graph.producer[j] is not None:
                found.add(j)
                todo.append(j)
    return found


def _module_of(path: str, pattern: str) -> str | None:
    """Return the outermost module around an operation whose name matches. `path`: its innermost module."""
    parts = path.split(".")
    names = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
    return next((name for name in names if fnmatchcase(name, pattern)), None)
