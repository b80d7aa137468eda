"""The gradient of an attention whose keys and values have their gradients added up: those of a block of
queries are added where they belong, head by head."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rkmate.torch_seam.own import OwnOperator, own_operator, register

aten = torch.ops.aten


def attention_backward_added(
        grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        out: torch.Tensor, logsumexp: torch.Tensor, dropout_p: float, is_causal: bool, key_sum: torch.Tensor,
        value_sum: torch.Tensor, *, attn_mask: torch.Tensor | None = None,
        scale: float | None = None) -> torch.Tensor:
    """Return the gradient of queries, and add those of keys and values to two sums."""
    made = torch.empty_like(query)
    for h in range(query.shape[1]):
        head = slice(h, h + 1)
        mask = attn_mask if attn_mask is None or attn_mask.dim() < 4 or attn_mask.shape[1] == 1 \
            else attn_mask[:, head]
        queries, keys, values = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            grad_out[:, head], query[:, head], key[:, head], value[:, head], out[:, head],
            logsumexp[:, head], dropout_p, is_causal, attn_mask=mask, scale=scale)
        made[:, head].copy_(queries)
        key_sum[:, head].add_(keys)
        value_sum[:, head].add_(values)
    return made


def _one_head(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
    query, key, value = inputs[1:4]
    # Torch's kernel has buffers for its blocks of queries and keys besides.
    return (query.nbytes + key.nbytes + value.nbytes) // query.shape[1] + 4 * key[0, 0].nbytes


register((
    OwnOperator(
        "attention_backward_added(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
        "Tensor logsumexp, float dropout_p, bool is_causal, Tensor(a!) key_sum, Tensor(b!) value_sum, *, "
        "Tensor? attn_mask=None, float? scale=None) -> Tensor", attention_backward_added, "CPU",
        shape=lambda grad_out, query, *others, **more: torch.empty_like(query), temporaries=_one_head),
))
ATTENTION_BACKWARD_ADDED = own_operator("attention_backward_added")
