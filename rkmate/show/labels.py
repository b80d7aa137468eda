"""What an operation is called in words, tables and pictures: the module of the user's model, then itself."""

from __future__ import annotations

WHOLE = "the model itself"
"""Where an operation of no submodule stands."""


def label(path: str, operation: str) -> str:
    """``encoder.layer.3.attention: softmax``; an operation of the model itself stands alone."""
    return f"{path}: {operation}" if path and operation else path or operation


def label_lines(path: str, operation: str) -> tuple[str, ...]:
    """`label` in two lines, for the nodes of a graph."""
    return (f"{path}:", operation) if path else (operation,)


def short_path(path: str, within: str) -> str:
    """A module path inside another one's, where the other is named beside it."""
    if path == within:
        return ""
    return path.removeprefix(f"{within}.") if within else path


def shortened(text: str, length: int) -> str:
    """At most `length` characters; the end stays, where module paths differ."""
    return text if len(text) <= length else f"...{text[3 - length:]}"
