"""What a new sequence length costs: planning time for each, and training runs over many of them; resident
memory and planning time as their number grows.

    python benchmarks/lengths.py [--lengths 24] [--layers 12] [--budget 0.6] [--random 200]

Times are processor time of one thread, in seconds; run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import random
import resource
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import rkmate


class Toy(nn.Module):
    """A small transformer: embedding, layers, head."""

    def __init__(self, layers: int = 3, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, width)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
                                    for _ in range(layers))
        self.head = nn.Linear(width, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), x.flatten())


def tokens(length: int) -> torch.Tensor:
    """Four sequences."""
    return torch.randint(0, 128, (4, length))


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Processor time of a call, and its result."""
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


def toy(count: int, budget: float) -> None:
    """Train over `count` lengths, four steps each, next to the plain model."""
    torch.manual_seed(0)
    plain = Toy()
    model = copy.deepcopy(plain)
    lengths = [32 + 8 * k for k in range(count)] * 4
    random.Random(0).shuffle(lengths)

    def train(module: nn.Module) -> None:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        for n in lengths:
            module(tokens(n)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    without, _ = timed(lambda: train(plain))
    first, wrapped = timed(lambda: rkmate.wrap(model, (tokens(lengths[0]),), budget=budget, progress=False))
    total, _ = timed(lambda: train(wrapped))
    new = wrapped._plans.new_sizes
    print(f"toy, {count} lengths, {len(lengths)} steps: plain {without:.1f} s; wrap {first:.1f} s, steps "
          f"{total:.1f} s, of which {new.captured} captured and {new.derived} derived lengths took "
          f"{new.seconds:.1f} s")


def padded(words: int, rows: int, length: int) -> dict[str, torch.Tensor]:
    """A batch of texts that are padded to the longest one on the right, as collators make it."""
    ids = torch.randint(1, words, (rows, length))
    ends = torch.tensor([length, *torch.randint(length // 2, length, (rows - 1,)).tolist()])
    mask = (torch.arange(length) < ends[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.where(mask > 0, -100)}


def gpt2(layers: int, budget: float, *, masked: bool) -> None:
    """Planning alone, of a model of transformers. `masked`: with attention masks."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, n_embd=64, n_head=4, vocab_size=512, n_positions=512,
                        use_cache=False, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).train()

    def sample(n: int) -> dict[str, torch.Tensor]:
        if masked:
            return padded(512, 2, n)
        x = torch.randint(0, 512, (2, n))
        return {"input_ids": x, "labels": x}

    seconds, wrapped = timed(lambda: rkmate.wrap(model, (), sample(64), budget=budget, progress=False))
    print(f"GPT-2, {layers} layers{', masks' if masked else ''}: first length {seconds:.2f} s")
    for n in (96, 80, 128, 48, 100):
        inputs = sample(n)
        new, _ = timed(lambda inputs=inputs: wrapped(**inputs))        # type: ignore[misc]
        step, _ = timed(lambda inputs=inputs: wrapped(**inputs))       # type: ignore[misc]
        print(f"  length {n}: {new - step:.2f} s ({wrapped.plan.note or 'searched'})")


def resident() -> int:
    """MiB of the process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() >> 20


def many(count: int, budget: float) -> None:
    """Train a Llama of one layer in `count` random lengths with masks, two steps each; prints how memory and
    seconds develop."""
    from transformers import LlamaConfig, LlamaForCausalLM

    random.seed(0)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=2048, use_cache=False)).train()
    lengths = random.sample(range(32, 1024), count)
    wrapped = rkmate.wrap(model, (), padded(512, 2, lengths[0]), budget=budget, progress=False,
                          settings=rkmate.Settings(kept_plans_bytes=8 << 20))
    spent: list[float] = []
    for k, length in enumerate(lengths):
        inputs = padded(512, 2, length)
        both = [timed(lambda inputs=inputs: wrapped(**inputs).loss.backward())[0]  # type: ignore[misc]
                for _ in range(2)]
        model.zero_grad(set_to_none=True)
        spent.append(both[0] - both[1])
        if (k + 1) % (count // 5) == 0:
            before = resident()
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            print(f"  {k + 1} lengths: {before} MiB resident, {resident()} without what the allocator holds, "
                  f"{statistics.median(spent):.2f} s for a new one", flush=True)
            spent.clear()


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, default=24)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--budget", type=float, default=0.6)
    parser.add_argument("--random", type=int, default=200, help="random lengths; 0: none")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    toy(arguments.lengths, arguments.budget)
    for masked in (False, True):
        gpt2(arguments.layers, arguments.budget, masked=masked)
    if arguments.random:
        many(arguments.random, arguments.budget)


if __name__ == "__main__":
    main()
