"""GPT-2, byte by byte, on Python's own source files, inside a memory budget.

python examples/gpt2.py --budget 0.5 --compare
"""

from __future__ import annotations

import torch
import transformers
from text import Windows, library_bytes
from training import arguments, train

LENGTH = 256


def gpt2(layers: int = 6, width: int = 192) -> transformers.GPT2LMHeadModel:
    """Random weights; without dropout, so that runs can be compared number by number."""
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=width // 64, n_positions=LENGTH, vocab_size=256,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    options = arguments(__doc__, budget="0.5", steps=20)
    torch.manual_seed(0)
    train(gpt2(), Windows(library_bytes(), batch=4, length=LENGTH), options)
