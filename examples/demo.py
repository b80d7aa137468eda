"""A small GPT-2 on Python's own source files: plain, and under half of its own memory.

Both start from the same weights and see the same text, a step of one after a step of the other.
"""

from __future__ import annotations

import argparse
import time

import torch
import transformers
from gpt2 import LENGTH, gpt2
from text import Windows, library_bytes
from training import train


def main() -> None:
    """Run the demonstration."""
    begin = time.perf_counter()
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    text = library_bytes()
    print(f"reading: {len(text):,} bytes of the standard library's source files", flush=True)
    options = argparse.Namespace(budget=0.5, device="cpu", steps=20, compare=True)
    train(gpt2(layers=6), Windows(text, batch=4, length=LENGTH), options)
    print(f"all of it took {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
