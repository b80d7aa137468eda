"""What the seam knows of operators."""

from __future__ import annotations

import torch

from rkmate.torch_seam.schema import flops_of

aten = torch.ops.aten


def _shaped(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def test_keys_and_values_of_fewer_heads_count_as_many_as_the_queries() -> None:
    query, few, many = _shaped(2, 8, 16, 4), _shaped(2, 2, 16, 4), _shaped(2, 8, 16, 4)
    for attention in (aten._scaled_dot_product_flash_attention.default,
                      aten._scaled_dot_product_cudnn_attention.default):
        expected = flops_of(attention, (query, many, many), {}, query)
        assert expected is not None and expected > 0
        assert flops_of(attention, (query, few, few), {}, query) == expected
    backward = aten._scaled_dot_product_flash_attention_backward.default
    assert flops_of(backward, (query, query, few, few, query), {}, query) == \
        flops_of(backward, (query, query, many, many, query), {}, query)


def test_an_operator_without_a_formula_has_no_count() -> None:
    assert flops_of(aten.relu.default, (_shaped(2),), {}, _shaped(2)) is None
