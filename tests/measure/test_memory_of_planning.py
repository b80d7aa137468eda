"""Planning itself takes no more than the training of one block."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import torch
from torch import nn

from rkmate.device.cpu import Cpu, EventsMeter
from rkmate.measure.step import measure_peak
from rkmate.pipeline.prepare import Prepared, prepare, trace
from rkmate.pipeline.settings import Settings
from rkmate.support.progress import Progress


class _Classifier(nn.Module):
    """One wide product, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(32, 32), nn.GELU()), nn.Linear(32, 2048)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.body(x)), labels)


def test_values_die_as_in_training() -> None:
    model, inputs = _Classifier(), (torch.randn(512, 32), torch.randint(0, 2048, (512,)))
    found: list[Prepared] = []

    def plan() -> None:
        found.append(prepare(trace(model, inputs, {}, Settings(), Progress(False))))

    # The meter that planning uses and this test's cannot run at once.
    meter = mock.create_autospec(EventsMeter, instance=True)
    meter.running.side_effect, meter.part.side_effect = nullcontext, lambda number: nullcontext()
    meter.peaks.return_value = {}
    with mock.patch.object(Cpu, "parts_meter", return_value=meter):
        peak = measure_peak(plan).peak
    meter.part.assert_called()
    # Logits and log-probabilities, then these and their gradient; and a part of half their size.
    logits = 512 * 2048 * 4
    assert 2 * logits < peak <= 2.6 * logits
