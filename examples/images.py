"""Images without a download: scikit-learn's handwritten digits, enlarged."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F


class Digits:
    """Batches of random digits as colour images with labels."""

    def __init__(self, batch: int, side: int, seed: int = 0) -> None:
        digits = load_digits()
        images = torch.from_numpy(digits.images).float().unsqueeze(1) / 8 - 1
        self.images = images.expand(-1, 3, -1, -1)
        self.labels = torch.from_numpy(digits.target)
        self.batch, self.side = batch, side
        self.random = torch.Generator().manual_seed(seed)

    def __call__(self) -> dict[str, torch.Tensor]:
        chosen = torch.randint(len(self.labels), (self.batch,), generator=self.random)
        enlarged = F.interpolate(self.images[chosen], size=(self.side, self.side), mode="bilinear",
                                 align_corners=False)
        return {"pixel_values": enlarged, "labels": self.labels[chosen]}
