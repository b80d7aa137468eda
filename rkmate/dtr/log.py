"""The log of a program's tensor operations, and the program that it describes.

The format is that of the paper's appendix C.6: one JSON object a line, each with an INSTRUCTION.
Lines before the annotation START, if there is one, are skipped. Numbers are decimal strings.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rkmate.dtr.errors import LogError

CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class LoggedOperation:
    """A logged operation: pure, and each result is a separate tensor."""

    name: str
    arguments: tuple[int, ...]
    """Tensors, by number."""
    results: tuple[int, ...]
    sizes: tuple[int, ...]
    """Bytes of each result; 0 for views."""
    aliases: tuple[int, ...]
    """For each result, the position of the argument whose storage it shares, or -1."""
    cost: int
    """Time in the log's unit, nanoseconds in the runtime's logs."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Run an operation for the first time."""

    operation: LoggedOperation


@dataclass(frozen=True, slots=True)
class Retain:
    """Add a reference to a tensor; with ``pin``, the tensor must be in memory from here on."""

    tensor: int
    pin: bool


@dataclass(frozen=True, slots=True)
class Release:
    """Remove a reference to a tensor."""

    tensor: int


@dataclass(frozen=True)
class Program:
    """The content of a log."""

    steps: list[Compute | Retain | Release]
    """Operations, and where the program keeps or releases a tensor, in order."""
    names: list[str]
    """Names of the tensors, by number."""
    storages: list[int]
    """For each tensor, the number of the tensor that owns its storage."""
    memory: int
    """Peak bytes of a run without a limit that frees each storage at its last release."""
    compute: int
    """Time of all operations, each once."""
    constant_memory: int
    """Bytes of all constants."""
    operations: int
    """Number of operations, constants left out."""


def read_log(path: str | Path) -> Program:
    """Return the program in the file at ``path``.

    Raises ``LogError`` with the line when the file breaks the format, and ``OSError`` when it
    cannot be read.
    """
    with open(path, encoding="utf-8") as lines:
        return parse_log(lines)


def parse_log(lines: Iterable[str]) -> Program:
    """Return the program that ``lines`` describe; raises ``LogError``."""
    instructions = _instructions(lines)
    starts = [
        place
        for place, (_, entry) in enumerate(instructions)
        if entry["INSTRUCTION"] == "ANNOTATE" and entry.get("ANNOTATION") == "START"
    ]
    reader = _Reader(instructions[starts[0] + 1 :] if starts else instructions)
    return reader.read()


def _instructions(lines: Iterable[str]) -> list[tuple[int, dict[str, Any]]]:
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise LogError(f"not JSON: {error.msg}", number) from None
        if not isinstance(entry, dict) or not isinstance(entry.get("INSTRUCTION"), str):
            raise LogError("not an object with an INSTRUCTION", number)
        found.append((number, entry))
    return found


@dataclass
class _Reader:
    """Reads instructions one after the other and counts references as a run would."""

    instructions: list[tuple[int, dict[str, Any]]]
    place: int = 0
    line: int = 0
    steps: list[Compute | Retain | Release] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    storages: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    references: list[int] = field(default_factory=list)
    storage_references: list[int] = field(default_factory=list)
    bound: dict[str, int] = field(default_factory=dict)
    live: int = 0
    peak: int = 0
    compute: int = 0
    constants: int = 0
    operations: int = 0

    def read(self) -> Program:
        handlers = {
            "CONSTANT": self._constant,
            "CALL": self._call,
            "MUTATE": self._mutate,
            "COPY": self._copy,
            "COPY_FROM": self._copy_from,
            "RELEASE": self._release,
        }
        while self.place < len(self.instructions):
            entry = self._next()
            kind = entry["INSTRUCTION"]
            if kind == "ANNOTATE":
                continue
            if kind not in handlers:
                raise self._error(f"instruction {kind!r} is unknown or out of place")
            handlers[kind](entry)
        if not self.steps:
            raise LogError("the log ends, and has no operation", max(1, self.line))
        # The output condition: what the program still holds at the end must be in memory.
        for tensor in self.bound.values():
            if self.references[tensor] > 0:
                self.steps.append(Retain(tensor, pin=True))
        return Program(
            steps=self.steps,
            names=self.names,
            storages=self.storages,
            memory=self.peak,
            compute=self.compute,
            constant_memory=self.constants,
            operations=self.operations,
        )

    def _constant(self, entry: dict[str, Any]) -> None:
        name = self._text(entry, "NAME")
        size = self._memory_of(name)
        self._new_name(name)
        (tensor,) = self._operation(CONSTANT, (), (name,), (size,), (-1,), 0)
        self.bound[name] = tensor
        self.constants += size
        self.steps.append(Retain(tensor, pin=True))

    def _call(self, entry: dict[str, Any]) -> None:
        operation = self._text(entry, "NAME")
        arguments = tuple(self._tensor(name) for name in self._texts(entry, "ARGS"))
        results = self._texts(entry, "RESULT")
        cost = self._number(entry, "TIME")
        if not results:
            raise self._error(f"{operation} has no result")
        sizes, aliases = [], []
        for name in results:
            self._new_name(name)
            size = self._memory_of(name)
            alias = self._alias_of(name)
            if not -1 <= alias < len(arguments):
                raise self._error(f"{name} is an alias of argument {alias} of {operation}")
            sizes.append(0 if alias >= 0 else size)
            aliases.append(alias)
        if len(set(results)) < len(results):
            raise self._error(f"{operation} has two results of one name")
        made = self._operation(
            operation, arguments, results, tuple(sizes), tuple(aliases), cost
        )
        self.bound.update(zip(results, made, strict=True))

    def _mutate(self, entry: dict[str, Any]) -> None:
        operation = self._text(entry, "NAME")
        texts = self._texts(entry, "ARGS")
        arguments = tuple(self._tensor(name) for name in texts)
        cost = self._number(entry, "TIME")
        changed = entry.get("MUTATE")
        if not isinstance(changed, list) or not changed:
            raise self._error("MUTATE must be a list of argument positions")
        places = [self._integer(value, "MUTATE") for value in changed]
        if any(not 0 <= place < len(arguments) for place in places):
            raise self._error(f"{operation} mutates an argument that it does not have")
        # The mutated arguments become fresh tensors, as if the operation had worked on copies.
        names = tuple(self.names[arguments[place]] + "$" for place in places)
        sizes = tuple(self.sizes[self.storages[arguments[place]]] for place in places)
        made = self._operation(operation, arguments, names, sizes, (-1,) * len(places), cost)
        for place, tensor in zip(places, made, strict=True):
            old = self.bound[texts[place]]
            self.bound[texts[place]] = tensor
            self._drop(old)

    def _copy(self, entry: dict[str, Any]) -> None:
        target, source = self._text(entry, "DST"), self._tensor(self._text(entry, "SRC"))
        self._new_name(target)
        self.bound[target] = source
        self._keep(source)

    def _copy_from(self, entry: dict[str, Any]) -> None:
        target, source = self._text(entry, "DST"), self._tensor(self._text(entry, "SRC"))
        old = self._tensor(target)
        self.bound[target] = source
        self._drop(old)
        self._keep(source)

    def _release(self, entry: dict[str, Any]) -> None:
        name = self._text(entry, "NAME")
        if name in self.bound:
            self._drop(self.bound[name])

    def _operation(
        self,
        name: str,
        arguments: tuple[int, ...],
        results: tuple[str, ...],
        sizes: tuple[int, ...],
        aliases: tuple[int, ...],
        cost: int,
    ) -> tuple[int, ...]:
        first = len(self.names)
        made = tuple(range(first, first + len(results)))
        for tensor, result, size, alias in zip(made, results, sizes, aliases, strict=True):
            self.names.append(result)
            self.sizes.append(size)
            self.storages.append(self.storages[arguments[alias]] if alias >= 0 else tensor)
            self.references.append(1)
            self.storage_references.append(0)
            self.storage_references[self.storages[tensor]] += 1
        self.live += sum(sizes)
        self.peak = max(self.peak, self.live)
        self.compute += cost
        self.operations += name != CONSTANT
        self.steps.append(Compute(LoggedOperation(name, arguments, made, sizes, aliases, cost)))
        return made

    def _keep(self, tensor: int) -> None:
        storage = self.storages[tensor]
        if self.storage_references[storage] <= 0:
            raise self._error(f"{self.names[tensor]} is copied after its last release")
        self.references[tensor] += 1
        self.storage_references[storage] += 1
        self.steps.append(Retain(tensor, pin=False))

    def _drop(self, tensor: int) -> None:
        storage = self.storages[tensor]
        if self.storage_references[storage] <= 0:
            raise self._error(f"{self.names[tensor]} is released more often than it was made")
        self.references[tensor] -= 1
        self.storage_references[storage] -= 1
        if self.storage_references[storage] == 0:
            self.live -= self.sizes[storage]
        self.steps.append(Release(tensor))

    def _next(self) -> dict[str, Any]:
        self.line, entry = self.instructions[self.place]
        self.place += 1
        return entry

    def _follow(self, kind: str, name: str) -> dict[str, Any]:
        if self.place == len(self.instructions):
            raise self._error(f"the log ends where {kind} of {name} should follow")
        entry = self._next()
        if entry["INSTRUCTION"] != kind or entry.get("NAME") != name:
            raise self._error(f"{kind} of {name} should stand here")
        return entry

    def _memory_of(self, name: str) -> int:
        size = self._number(self._follow("MEMORY", name), "MEMORY")
        return size

    def _alias_of(self, name: str) -> int:
        return self._integer(self._follow("ALIAS", name).get("ALIAS"), "ALIAS")

    def _new_name(self, name: str) -> None:
        if name in self.bound:
            raise self._error(f"{name} is named a second time")

    def _tensor(self, name: str) -> int:
        if name not in self.bound:
            raise self._error(f"tensor {name} is unknown")
        return self.bound[name]

    def _text(self, entry: dict[str, Any], key: str) -> str:
        value = entry.get(key)
        if not isinstance(value, str):
            raise self._error(f"{key} must be a string")
        return value

    def _texts(self, entry: dict[str, Any], key: str) -> tuple[str, ...]:
        value = entry.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._error(f"{key} must be a list of strings")
        return tuple(value)

    def _number(self, entry: dict[str, Any], key: str) -> int:
        value = self._integer(entry.get(key), key)
        if value < 0:
            raise self._error(f"{key} must not be negative, and is {value}")
        return value

    def _integer(self, value: Any, key: str) -> int:
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise self._error(f"{key} must be an integer in decimal digits")
        try:
            return int(value)
        except ValueError:
            raise self._error(f"{key} must be an integer in decimal digits") from None

    def _error(self, message: str) -> LogError:
        return LogError(message, self.line)
