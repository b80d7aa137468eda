"""Writes what the program does in the log format of the paper's appendix C.6."""

from __future__ import annotations

import json
from typing import Any, TextIO

import torch

from rkmate.dtr.runtime.buffer import Buffer, Operation


class LogWriter:
    """Writer of a log. Views are left out: they are part of the storage that they look at."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._constants: dict[int, tuple[str, torch.UntypedStorage]] = {}
        self._arguments: list[str] = []
        self._next = 0
        self._write(INSTRUCTION="ANNOTATE", ANNOTATION="START")

    def begin(self, operation: Operation, constants: dict[int, torch.Tensor]) -> None:
        """Name an operation's arguments, before its results are known."""
        names = [buffer.name for buffer in operation.inputs]
        for address, tensor in constants.items():
            if address not in self._constants:
                name = self._name()
                storage = tensor.untyped_storage()
                # Held, so that its address keeps meaning this constant.
                self._constants[address] = (name, storage)
                self._write(INSTRUCTION="CONSTANT", NAME=name)
                self._write(INSTRUCTION="MEMORY", NAME=name, MEMORY=str(storage.nbytes()))
            names.append(self._constants[address][0])
        self._arguments = names

    def end(self, operation: Operation) -> None:
        """Write the operation."""
        name, time = operation.name.removeprefix("aten."), str(operation.cost)
        if operation.written:
            for before, after in operation.written:
                after.name, before.name = before.name, ""
            places = [operation.inputs.index(before) for before, _ in operation.written]
            self._write(
                INSTRUCTION="MUTATE", NAME=name, ARGS=self._arguments, MUTATE=places, TIME=time
            )
            time = "0"
        made = [spot.owner for _, spot in operation.outputs if isinstance(spot.owner, Buffer)]
        if not made:
            return
        for buffer in made:
            buffer.name = self._name()
        self._write(
            INSTRUCTION="CALL",
            NAME=name,
            ARGS=self._arguments,
            RESULT=[buffer.name for buffer in made],
            TIME=time,
        )
        for buffer in made:
            self._write(INSTRUCTION="MEMORY", NAME=buffer.name, MEMORY=str(buffer.size))
            self._write(INSTRUCTION="ALIAS", NAME=buffer.name, ALIAS="-1")

    def release(self, buffer: Buffer) -> None:
        """Log that the program dropped a storage."""
        if buffer.name:
            self._write(INSTRUCTION="RELEASE", NAME=buffer.name)

    def _name(self) -> str:
        self._next += 1
        return f"x{self._next}"

    def _write(self, **entry: Any) -> None:
        self._stream.write(json.dumps(entry) + "\n")
