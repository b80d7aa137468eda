"""Heads of models in bfloat16 run in tiles on a GPU, too: conversions and views stand around their losses."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rkmate
from rkmate.device import cuda
from rkmate.pipeline.settings import Settings

ROWS, WIDTH, CLASSES = 16, 16, 500


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a few kibibytes, so that small tensors have many."""
    monkeypatch.setattr(cuda, "PART_BYTES", 2**12)


class _Language(nn.Module):
    """Tokens to logits, as libraries compute their loss: shifted, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, ids: torch.Tensor) -> dict[str, Any]:
        logits = self.head(torch.tanh(self.body(self.table(ids))))
        labels = F.pad(ids, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
        return {"loss": F.cross_entropy(logits.float().view(-1, CLASSES), labels), "logits": logits}


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_heads_in_bfloat16_run_in_tiles(autocast: bool) -> None:
    model = _Language().cuda()
    if not autocast:
        model = model.bfloat16()
    ids = torch.zeros(4, ROWS, dtype=torch.int64, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16) if autocast else nullcontext():
        smallest = []
        for tiles in ("never", "always"):
            with pytest.raises(rkmate.InfeasibleBudget) as caught:
                rkmate.plan(model, (ids,), budget=1, settings=Settings(chunked_loss=tiles, costs="analytic"),
                            progress=False)
            smallest.append(caught.value.minimum_bytes)
        wrapped = rkmate.wrap(model, (ids,), budget=1.0,
                              settings=Settings(chunked_loss="always", costs="analytic",
                                                run=rkmate.RunSettings(verify=False)),
                              progress=False)
        found = wrapped(ids)
    assert smallest[1] < 0.7 * smallest[0]
    assert "def tiled_head" in wrapped.source
    found["loss"].backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None]
    assert found["logits"].dtype is torch.bfloat16
    assert found["logits"].clone().shape == (4, ROWS, CLASSES)         # computed here
