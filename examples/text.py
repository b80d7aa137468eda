"""Text that every machine with Python has: the source files of the standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch


def library_bytes(limit: int = 2_000_000) -> torch.Tensor:
    """The first `limit` bytes of the top-level modules, in order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8).long()


class Windows:
    """Batches of random windows of a text; the model predicts each next byte."""

    def __init__(self, text: torch.Tensor, batch: int, length: int, seed: int = 0) -> None:
        self.text = text
        self.batch, self.length = batch, length
        self.random = torch.Generator().manual_seed(seed)

    def __call__(self) -> dict[str, torch.Tensor]:
        starts = torch.randint(len(self.text) - self.length, (self.batch,), generator=self.random)
        x = torch.stack([self.text[i:i + self.length] for i in starts.tolist()])
        return {"input_ids": x, "labels": x}
