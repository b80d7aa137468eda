"""What a plan was made for, and by which versions: for people to read, not for planning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Origin:
    """The model, the sample inputs, the device and the versions that a plan was made with."""

    model: str
    """Name of the model's class."""
    parameters: int
    """How many numbers its parameters have; one that two modules share counts once."""
    trained: int
    """How many of them are trained."""
    inputs: tuple[tuple[str, str], ...]
    """(name, ``float32[8, 128]``) of each tensor among the sample inputs."""
    device: str
    """``cpu``, ``cuda:0``."""
    versions: tuple[tuple[str, str], ...]
    """(name, version): rkmate, torch, python."""

    def content(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {**vars(self), "inputs": [list(i) for i in self.inputs],
                "versions": [list(v) for v in self.versions]}


def read_origin(content: Mapping[str, Any] | None) -> Origin | None:
    """The opposite of `Origin.content`; None of None. Raises `KeyError`, `TypeError` or `ValueError`."""
    if content is None:
        return None
    return Origin(str(content["model"]), int(content["parameters"]), int(content["trained"]),
                  tuple((str(n), str(s)) for n, s in content["inputs"]), str(content["device"]),
                  tuple((str(n), str(v)) for n, v in content["versions"]))
