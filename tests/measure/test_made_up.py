"""Values in the place of those that an operation has made before."""

from __future__ import annotations

import torch

from rkmate.measure.made_up import as_made, layout_of, made_up


def test_they_have_the_type_and_the_strides_of_what_was_made() -> None:
    """One pixel of many channels is contiguous in either layout, and a trace may say the other one."""
    traced = torch.empty_strided((2, 64, 1, 1), (64, 1, 64, 64))
    made = torch.randn(2, 64, 1, 1).bfloat16()
    found = as_made(made_up(traced, "data"), layout_of(made))
    assert (found.shape, found.stride(), found.dtype) == (made.shape, made.stride(), made.dtype)
    assert found.untyped_storage().nbytes() == made.untyped_storage().nbytes()
    assert 0.2 < float(found.min()) <= float(found.max()) < 0.8


def test_what_is_as_it_was_made_is_not_copied() -> None:
    value = made_up(torch.empty(3, 4), "data")
    assert as_made(value, layout_of(torch.empty(3, 4))) is value
