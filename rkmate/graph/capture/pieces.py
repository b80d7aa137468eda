"""Parameters and buffers that are made of plain tensors: quantized weights.

A tensor subclass with ``__tensor_flatten__`` (torchao's quantized weights) is captured as the plain tensors
that it is made of, its pieces: these are what a step reads. A piece is named by the tensor's name and the
attributes that lead to it: ``layers.0.weight@qdata``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

_AT = "@"


def is_made_of_pieces(tensor: torch.Tensor) -> bool:
    """Whether a trace sees the tensors inside of one, and not itself."""
    return hasattr(type(tensor), "__tensor_flatten__")


def piece_name(name: str, attribute: str) -> str:
    """The name of a piece of a tensor, or of a piece."""
    return f"{name}{_AT}{attribute}"


def owner_name(name: str) -> str:
    """The name of the tensor that a piece belongs to; of a whole tensor its own."""
    return name.partition(_AT)[0]


def piece_of(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The piece of a tensor that a name stands for; the tensor itself where it stands for all of it."""
    for attribute in name.split(_AT)[1:]:
        tensor = getattr(tensor, attribute)
    return tensor


def tensor_called(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """The tensor, or the piece of one, of this name. Raises `KeyError`."""
    return piece_of(tensors[owner_name(name)], name)
