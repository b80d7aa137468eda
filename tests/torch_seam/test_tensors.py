"""Copies of several tensors at once."""

from __future__ import annotations

import torch

from rkmate.torch_seam.tensors import copy_all


def test_all_are_copied_whatever_their_types() -> None:
    values = [torch.tensor([1.0, 2.0]), torch.tensor(3), torch.tensor([4.0]), torch.tensor([5.5])]
    targets = [torch.zeros(2), torch.tensor(0), torch.zeros(1, dtype=torch.float64), torch.zeros(1)]
    before = [t._version for t in targets]
    copy_all(targets, values)
    assert [t.tolist() for t in targets] == [v.tolist() for v in values]
    assert all(t._version > v for t, v in zip(targets, before, strict=True))
    copy_all((), ())
