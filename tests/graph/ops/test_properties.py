"""What is known of an operation from its name and arguments alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from rkmate.graph.ops.properties import is_random

aten = torch.ops.aten
_FLASH = aten._scaled_dot_product_flash_attention.default
_EFFICIENT = aten._scaled_dot_product_efficient_attention.default
_EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default
_CUDNN = aten._scaled_dot_product_cudnn_attention.default
_CUDNN_BACKWARD = aten._scaled_dot_product_cudnn_attention_backward.default


def _node(target: Any, count: int, *rest: Any, **kwargs: Any) -> fx.Node:
    graph = fx.Graph()
    return graph.call_function(target, (*(graph.placeholder(f"x{k}") for k in range(count)), *rest), kwargs)


@pytest.mark.parametrize(("node", "random"), [
    (_node(_FLASH, 3), False), (_node(_FLASH, 3, 0.0, True), False), (_node(_FLASH, 3, 0.1), True),
    (_node(_FLASH, 3, dropout_p=0.1), True), (_node(_EFFICIENT, 3, None, True), False),
    (_node(_EFFICIENT, 3, None, True, 0.1, True), True), (_node(_CUDNN, 3, None, True), False),
    (_node(_CUDNN, 3, None, True, 0.1), True),
    (_node(aten._scaled_dot_product_flash_attention_for_cpu.default, 3), False),
    (_node(_EFFICIENT_BACKWARD, 4, None, *"olso", 0.1, [True, True, True, False]), False),
    (_node(_CUDNN_BACKWARD, 9, None, None, 8, 8, 0.1, True), False),
    (_node(aten.native_dropout.default, 1, 0.1, True), True), (_node(aten.mm.default, 2), False)])
def test_attention_draws_where_it_has_dropout(node: fx.Node, random: bool) -> None:
    assert is_random(node) is random
