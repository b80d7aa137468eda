"""An LSTM language model on sequences of varying length."""

from __future__ import annotations

import torch
from dtr_compare import Task, compare, show
from torch import nn
from torch.nn import functional as F


class LanguageModel(nn.Module):
    """One cell, stepped; the loss is added up word by word."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.cell = nn.LSTMCell(width, width)
        self.head = nn.Linear(width, words)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Mean loss of predicting each word of ``text`` (length by batch) from those before."""
        h = c = torch.zeros(text.shape[1], self.cell.hidden_size)
        total = torch.zeros(())
        for now, following in zip(text[:-1], text[1:], strict=True):
            h, c = self.cell(self.embedding(now), (h, c))
            total = total + F.cross_entropy(self.head(h), following)
        return total / (len(text) - 1)


def task(words: int = 200, width: int = 128, batch: int = 256, length: int = 24) -> Task:
    """A training step per text."""

    def loss(model: nn.Module, number: int) -> torch.Tensor:
        return model(torch.randint(0, words, (length + 5 * number, batch)))

    return Task("LSTM language model", lambda: LanguageModel(words, width), loss)


if __name__ == "__main__":
    show(compare(task()))
