"""Values in the place of those that an operation has made before."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from rkmate.measure.made_up import as_made, is_empty, layout_of, made_up


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


def test_what_nothing_was_written_to_is_empty() -> None:
    def places(x: torch.Tensor) -> torch.Tensor:
        order = x.argsort()
        back = torch.empty_like(order)
        back[order] = torch.arange(4)
        return back + x.new_empty(4).long() + torch.zeros_like(order)

    graph = make_fx(places)(torch.randn(4)).graph
    assert [n.name for n in graph.nodes if is_empty(n)] == ["empty_like", "new_empty"]
