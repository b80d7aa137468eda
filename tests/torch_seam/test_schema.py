"""What the seam knows of operators."""

from __future__ import annotations

from typing import Any

import torch

from rkmate.torch_seam.schema import flop_formula

aten = torch.ops.aten


def _shaped(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def _flops(function: Any, *tensors: torch.Tensor) -> int:
    count = flop_formula(function)
    assert count is not None
    return count(*tensors, out_val=tensors[0])


def test_keys_and_values_of_fewer_heads_count_as_many_as_the_queries() -> None:
    query, few, many = _shaped(2, 8, 16, 4), _shaped(2, 2, 16, 4), _shaped(2, 8, 16, 4)
    for attention in (aten._scaled_dot_product_flash_attention.default,
                      aten._scaled_dot_product_cudnn_attention.default):
        expected = _flops(attention, query, many, many)
        assert expected > 0
        assert _flops(attention, query, few, few) == expected
    backward = aten._scaled_dot_product_flash_attention_backward.default
    assert _flops(backward, query, query, few, few, query) == \
        _flops(backward, query, query, many, many, query)


def test_an_operator_without_a_formula_has_no_count() -> None:
    assert flop_formula(aten.relu.default) is None
