"""rkmate beside what people use: peak memory and time of a training step, relative to eager.

Each method in a fresh process, its steps interleaved with eager's; peaks by the exact meter, over
the level that stands before a step (gradients allocated beforehand). Prints a Markdown table, and
draws it with ``--picture``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

import rkmate
from rkmate.measure.meter import measure_peak

FRACTIONS = ("1.0", "0.7", "0.5", "0.4", "0.3", "smallest")


def gpt(layers: int = 6, width: int = 256, length: int = 256, batch: int = 4,
        vocabulary: int = 8192) -> tuple[nn.Module, dict[str, Any]]:
    """A GPT-2 of transformers without dropout, its loss inside."""
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=8, n_positions=length, vocab_size=vocabulary, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False)
    ids = torch.randint(0, vocabulary, (batch, length))
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def images(model: nn.Module, batch: int, size: int) -> tuple[nn.Module, dict[str, Any]]:
    """An image classifier of transformers with random images and labels."""
    return model, {"pixel_values": torch.randn(batch, 3, size, size),
                   "labels": torch.randint(0, 2, (batch,))}


def resnet18() -> tuple[nn.Module, dict[str, Any]]:
    """ResNet-18, four images of 224 x 224."""
    config = transformers.ResNetConfig(embedding_size=64, hidden_sizes=[64, 128, 256, 512],
                                       depths=[2, 2, 2, 2], layer_type="basic")
    return images(transformers.ResNetForImageClassification(config), 4, 224)


def resnet50() -> tuple[nn.Module, dict[str, Any]]:
    """ResNet-50, two images of 224 x 224."""
    return images(transformers.ResNetForImageClassification(transformers.ResNetConfig()), 2, 224)


def regnet() -> tuple[nn.Module, dict[str, Any]]:
    """A RegNet, two images of 224 x 224."""
    return images(transformers.RegNetForImageClassification(transformers.RegNetConfig(
        hidden_sizes=[64, 128, 256, 512], depths=[2, 3, 6, 2], groups_width=64)), 2, 224)


def vit() -> tuple[nn.Module, dict[str, Any]]:
    """A small ViT, eight images of 224 x 224."""
    return images(transformers.ViTForImageClassification(transformers.ViTConfig(
        hidden_size=192, num_hidden_layers=8, num_attention_heads=3, intermediate_size=768,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)), 8, 224)


def t5() -> tuple[nn.Module, dict[str, Any]]:
    """A small T5."""
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(
        d_model=256, d_kv=32, d_ff=1024, num_layers=4, num_heads=8, vocab_size=8192, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False))
    return model, {"input_ids": torch.randint(0, 8192, (4, 128)),
                   "labels": torch.randint(0, 8192, (4, 128))}


def llama32() -> tuple[nn.Module, dict[str, Any]]:
    """A stack of 32 Llama layers."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=256, num_hidden_layers=32, num_attention_heads=8, num_key_value_heads=8,
        intermediate_size=688, vocab_size=1024, use_cache=False))
    ids = torch.randint(0, 1024, (2, 256))
    return model, {"input_ids": ids, "labels": ids}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "gpt": gpt, "gpt12": lambda: gpt(12), "resnet18": resnet18, "resnet50": resnet50, "regnet": regnet,
    "vit": vit, "t5": t5, "llama32": llama32}


def stack(model: nn.Module) -> nn.ModuleList:
    """The list of layers that a person would put checkpoints around: the longest."""
    return max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)


def per_block(model: nn.Module, kwargs: dict[str, Any]) -> Callable[[], Any]:
    """`torch.utils.checkpoint` around each layer."""
    for layer in stack(model):
        forward = layer.forward
        layer.forward = lambda *a, f=forward, **k: checkpoint(f, *a, use_reentrant=False, **k)
    return lambda: model(**kwargs).loss


def budgeted(model: nn.Module, kwargs: dict[str, Any], backend: str, fraction: float) -> Callable[[], Any]:
    """torch.compile under `activation_memory_budget`."""
    import torch._functorch.config as config

    config.activation_memory_budget = fraction
    compiled = torch.compile(model, backend=backend)
    return lambda: compiled(**kwargs).loss


def method(name: str, model: nn.Module, kwargs: dict[str, Any], eager_peak: int) -> Callable[[], Any]:
    """A function that runs a forward by some method and returns the loss."""
    kind, _, value = name.partition(" ")
    if kind == "eager":
        return lambda: model(**kwargs).loss
    if kind == "checkpoint":
        return per_block(model, kwargs)
    if kind == "sequential":
        raise SystemExit("this model is not an nn.Sequential")
    if kind in ("aot_eager", "inductor"):
        return budgeted(model, kwargs, kind, float(value))
    if value == "smallest":
        try:
            wrapped = rkmate.wrap(model, (), kwargs, budget=1, progress=False)
        except rkmate.InfeasibleBudget as error:
            wrapped = rkmate.wrap(model, (), kwargs, budget=error.minimum_bytes, progress=False)
    else:
        wrapped = rkmate.wrap(model, (), kwargs, budget=int(float(value) * eager_peak), progress=False)
    return lambda: wrapped(**kwargs).loss


def one(model_name: str, method_name: str, repeats: int) -> None:
    """Measure one method on one model; prints one line of JSON."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    reference, kwargs = MODELS[model_name]()
    torch.manual_seed(0)
    model, _ = MODELS[model_name]()
    reference.train()
    model.train()

    def step(forward: Callable[[], Any], module: nn.Module) -> float:
        for p in module.parameters():
            if p.grad is not None:
                p.grad.zero_()
        start = time.perf_counter()
        forward().backward()
        return time.perf_counter() - start

    def plain() -> Any:
        return reference(**kwargs).loss

    step(plain, reference)
    eager_peak = measure_peak(lambda: step(plain, reference)).peak
    start = time.perf_counter()
    forward = method(method_name, model, kwargs, eager_peak)
    step(forward, model)
    ready = time.perf_counter() - start
    step(forward, model)
    peak = measure_peak(lambda: step(forward, model)).peak
    own, theirs = [], []
    for _ in range(repeats):
        theirs.append(step(plain, reference))
        own.append(step(forward, model))
    ratio = statistics.median(own) / statistics.median(theirs)
    print(json.dumps({"peak": peak / eager_peak, "time": ratio, "ready": ready}))


def main() -> None:
    """Measure every method on the models asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="gpt,resnet18")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--methods", help="comma separated; all by default")
    parser.add_argument("--picture", help="file to draw the table into")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(*options.one, options.repeats)
        return
    methods = options.methods.split(",") if options.methods else [
        "eager", "checkpoint", *(f"{b} {f}" for b in ("aot_eager", "inductor")
                                 for f in (1.0, 0.5, 0.1, 0.0)), *(f"rkmate {f}" for f in FRACTIONS)]
    points: dict[str, list[tuple[str, float, float]]] = {}
    print("| model | method | peak | time | until the first step is done |\n|---|---|---|---|---|")
    for model in options.models.split(","):
        for name in methods:
            done = subprocess.run([sys.executable, __file__, "--one", model, name, "--repeats",
                                   str(options.repeats)], capture_output=True, text=True, check=False)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["no message"])[-1][:120]
                print(f"| {model} | {name} | {reason} | | |", flush=True)
                continue
            r = json.loads(done.stdout.strip().splitlines()[-1])
            points.setdefault(model, []).append((name, r["peak"], r["time"]))
            print(f"| {model} | {name} | {r['peak']:.1%} | {r['time']:.2f} | {r['ready']:.1f} s |",
                  flush=True)
    if options.picture:
        draw(points, options.picture)


def draw(points: dict[str, list[tuple[str, float, float]]], path: str) -> None:
    """Time against memory, one panel a model, one line a kind of method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(points), 4.5), layout="constrained")
    for k, (model, found) in enumerate(points.items()):
        axes = figure.add_subplot(1, len(points), k + 1)
        for kind in dict.fromkeys(n.partition(" ")[0] for n, _, _ in found):
            mine = sorted((p, t) for n, p, t in found if n.partition(" ")[0] == kind)
            axes.plot([p * 100 for p, _ in mine], [t for _, t in mine], marker="o", label=kind)
        axes.set(title=model, xlabel="peak memory, % of eager", ylabel="time of a step, eager = 1")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
