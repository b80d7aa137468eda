"""Measure host time: the cost of a planned step before a device does anything, compared with eager's.

Models of everyday depths and tiny widths, where operations take no time to speak of: a step's processor time
is Python, the dispatcher, and autograd. On CUDA this is what a launch costs, whatever the sizes; a step whose
host time is below its device's costs nothing more. Eager's steps, the plan's, and those of gradient
checkpointing take turns, and the fastest of each counts.

Usage: OMP_NUM_THREADS=1 python benchmarks/host.py [gpt2 vit resnet50 ...] [--budget 1.0]
           [--device cuda [--cuda-graph]]
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from gpu_models import UNet
from torch import nn
from transformers.utils import ModelOutput

import rkmate
from rkmate.runtime.guards import ModuleReader, guards_of

Arguments = dict[str, torch.Tensor]
Case = tuple[nn.Module, Arguments]


def gpt2(layers: int, **more: Any) -> Case:
    """GPT-2 without dropout."""
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=layers, n_embd=16, n_head=2, vocab_size=32, n_positions=8, use_cache=False,
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **more}))
    ids = torch.randint(0, 32, (1, 8))
    return model, {"input_ids": ids, "labels": ids}


def gpt2_dropout(layers: int) -> Case:
    """GPT-2 with dropout."""
    return gpt2(layers, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)


def vit(layers: int) -> Case:
    """A vision transformer."""
    model = transformers.ViTForImageClassification(transformers.ViTConfig(
        num_hidden_layers=layers, hidden_size=16, num_attention_heads=2, intermediate_size=32, image_size=8,
        patch_size=4, num_labels=8))
    return model, {"pixel_values": torch.randn(1, 3, 8, 8), "labels": torch.randint(0, 8, (1,))}


def resnet(layers: int) -> Case:
    """ResNet-50 where `layers` is 12: as many bottlenecks in proportion."""
    depths = [max(1, round(d * layers / 12)) for d in (3, 4, 6, 3)]
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(
        depths=depths, embedding_size=4, hidden_sizes=[8, 8, 8, 8], num_labels=8))
    return model, {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.randint(0, 8, (2,))}


class _UNet(nn.Module):
    """The U-Net of `gpu_models`, with what the others return."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = UNet(width)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> ModelOutput:
        """The loss."""
        return ModelOutput(loss=self.net(x, y))


def unet(layers: int) -> Case:
    """Three scales, whatever `layers` is."""
    return _UNet(2), {"x": torch.randn(1, 3, 64, 64), "y": torch.randint(0, 2, (1, 64, 64))}


MODELS: dict[str, Callable[[int], Case]] = {"gpt2": gpt2, "gpt2-dropout": gpt2_dropout, "gpt2-autocast": gpt2,
                                            "vit": vit, "resnet50": resnet, "unet": unet}


def step_of(model: nn.Module, arguments: Arguments, autocast: str = "") -> Callable[[], tuple[float, float]]:
    """A step that returns the processor seconds of its forward and its backward. `autocast`: the type of
    device that the forward is cast on, to bfloat16; none where it is empty."""
    def step() -> tuple[float, float]:
        model.zero_grad()
        start = time.process_time()
        with torch.autocast(autocast or "cpu", torch.bfloat16, enabled=bool(autocast)):
            loss = model(**arguments).loss
        middle = time.process_time()
        loss.backward()
        return middle - start, time.process_time() - middle
    return step


def best(methods: dict[str, Callable[[], tuple[float, float]]], steps: int) -> dict[str, tuple[float, float]]:
    """The least of each half's seconds."""
    found = {name: [(step(), step())[1]] for name, step in methods.items()}
    gc.collect()
    gc.disable()
    for _ in range(steps):
        for name, step in methods.items():
            found[name].append(step())
    gc.enable()
    return {name: (min(f for f, _ in times), min(b for _, b in times)) for name, times in found.items()}


def guards_seconds(model: nn.Module, arguments: Arguments, repeats: int = 20) -> float:
    """What it takes to tell whether a call is like the planned ones."""
    reader = ModuleReader(model)
    times = []
    for _ in range(repeats):
        start = time.process_time()
        guards_of(reader, (), arguments)
        times.append(time.process_time() - start)
    return min(times)


def measure(name: str, layers: int, budgets: list[float], steps: int, device: str, recorded: bool = False
            ) -> list[list[str]]:
    """The rows of one model. `recorded`: as CUDA graphs, too."""
    torch.manual_seed(0)
    model, arguments = MODELS[name](layers)
    model = model.to(device).train()
    arguments = {key: value.to(device) for key, value in arguments.items()}
    autocast = torch.device(device).type if name.endswith("autocast") else ""
    methods = {"eager": step_of(model, arguments, autocast)}
    if getattr(model, "supports_gradient_checkpointing", False):
        checkpointed = copy.deepcopy(model)
        checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        methods["checkpoint"] = step_of(checkpointed, arguments, autocast)
    for budget in budgets:
        with torch.autocast(autocast or "cpu", torch.bfloat16, enabled=bool(autocast)):
            wrapped = rkmate.wrap(model, (), arguments, budget=budget,
                                  settings=rkmate.Settings(costs="analytic"), progress=False)
        methods[f"plan {budget:g}"] = step_of(wrapped, arguments, autocast)
        if recorded:
            again = rkmate.wrap(model, (), arguments, plan=wrapped.plan, progress=False,
                                settings=rkmate.Settings(
                                    run=rkmate.RunSettings(verify=False, cuda_graph=True)))
            methods[f"plan {budget:g}, recorded"] = step_of(again, arguments, autocast)
    found = best(methods, steps)
    eager = sum(found["eager"])
    rows = [[name, method, *(f"{seconds * 1e3:.2f}" for seconds in (f, b, f + b)), f"{(f + b) / eager:.2f}"]
            for method, (f, b) in found.items()]
    return [*rows, [name, "guards", f"{guards_seconds(model, arguments) * 1e3:.2f}", "", "", ""]]


def main() -> None:
    """Measure, and print a table of Markdown."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="model", help=", ".join(MODELS))
    parser.add_argument("--budget", type=float, nargs="+", default=[1.0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cuda-graph", action="store_true", help="steps that are recorded, too")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    print("| model | method | forward, ms | backward, ms | step, ms | of eager's |")
    print("|---|---|---|---|---|---|")
    for name in options.models or list(MODELS):
        for row in measure(name, options.layers, options.budget, options.steps, options.device,
                           options.cuda_graph):
            print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
