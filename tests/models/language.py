"""Language models of transformers, small, with random weights.

Each is imported when it is made: an import takes seconds, and few tests want them.
"""

from __future__ import annotations

import torch

from tests.models.sample import Sample, own_loss

VOCABULARY = 128
BATCH, LENGTH = 4, 64


def tokens(length: int = LENGTH) -> torch.Tensor:
    """Random token numbers; 0 and 1 are left to padding and the end of text."""
    return torch.randint(2, VOCABULARY, (BATCH, length))


def gpt2(dropout: float = 0.0, seed: int = 0) -> Sample:
    """GPT-2: tied embeddings, a causal mask that all layers share."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(n_layer=4, n_embd=64, n_head=4, n_positions=LENGTH, vocab_size=VOCABULARY,
                        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
                        bos_token_id=1, eos_token_id=1)
    x = tokens()
    return Sample(GPT2LMHeadModel(config).train(), (), {"input_ids": x, "labels": x}, own_loss)


def bert(dropout: float = 0.0, seed: int = 0) -> Sample:
    """BERT with a padding mask."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(seed)
    config = BertConfig(num_hidden_layers=3, hidden_size=64, num_attention_heads=4,
                        intermediate_size=256, vocab_size=VOCABULARY,
                        max_position_embeddings=LENGTH, hidden_dropout_prob=dropout,
                        attention_probs_dropout_prob=dropout)
    x = tokens()
    mask = torch.ones_like(x)
    mask[:, -5:] = 0
    return Sample(BertForMaskedLM(config).train(), (),
                  {"input_ids": x, "attention_mask": mask, "labels": x}, own_loss)


def llama(dropout: float = 0.0, seed: int = 0) -> Sample:
    """Llama: rotary positions, grouped key and value heads; dropout in attention only."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(num_hidden_layers=3, hidden_size=64, num_attention_heads=4,
                         num_key_value_heads=2, intermediate_size=160, vocab_size=VOCABULARY,
                         max_position_embeddings=LENGTH, attention_dropout=dropout,
                         bos_token_id=1, eos_token_id=1)
    x = tokens()
    return Sample(LlamaForCausalLM(config).train(), (), {"input_ids": x, "labels": x}, own_loss)


def t5(dropout: float = 0.0, seed: int = 0) -> Sample:
    """T5: a position bias with a gradient that all layers share, a decoder on encoder memory."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(seed)
    config = T5Config(num_layers=2, num_decoder_layers=2, d_model=64, d_kv=16, num_heads=4,
                      d_ff=128, vocab_size=VOCABULARY, dropout_rate=dropout,
                      decoder_start_token_id=0)
    return Sample(T5ForConditionalGeneration(config).train(), (),
                  {"input_ids": tokens(), "labels": tokens(48)}, own_loss)
