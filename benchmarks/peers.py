"""Compare rkmate with other tools: peak memory and time of a training step, relative to eager.

Each method in a fresh process, its steps interleaved with eager's; peaks by the exact meter, over
the level that stands before a step (gradients allocated beforehand), times as ratios of medians.
Prints Markdown tables; ``--write`` puts them, and a picture, into the documentation, ``--add``
adds to the existing rows.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from beside import Forward, beside, peak_of, step
from torch import nn
from torch.utils.checkpoint import checkpoint

import rkmate
from rkmate.cli.demo_models import UNet
from rkmate.pipeline.settings import Settings
from rkmate.planners.registry import PLANNERS
from rkmate.show.styles import look_of

FRACTIONS = ("1.0", "0.7", "0.5", "0.4", "0.3", "as checkpoint", "smallest", "loss alone")
PEERS = ("checkpoint", "sequential", *(f"{b} {f}" for b in ("aot_eager", "inductor")
                                       for f in (1.0, 0.5, 0.1, 0.0)))
OTHERS = tuple(f"{name} 0.5" for name in PLANNERS if name not in ("rockmate", "rk-rotor", "save-all"))
"""The other planners of the package, except the one that recomputes nothing."""
METHODS = ("eager", *PEERS, *(f"rkmate {f}" for f in FRACTIONS), *OTHERS)
SECONDS = 6
"""Steps are repeated for so long, at least."""
SECONDS_TO_PLAN = 30
"""For planners that can stop early."""
DOCS = Path(__file__).parent.parent / "docs"


@dataclass(frozen=True)
class Case:
    """A model with its inputs, and the layers that a person would put checkpoints around."""

    model: nn.Module
    kwargs: dict[str, Any]
    lists: Callable[[Any], list[Any]]
    """The containers of layers: lists or sequentials."""
    sequence: bool = True
    """Whether each layer takes just what the one before it returned."""


def gpt(layers: int = 6, width: int = 256, length: int = 256, batch: int = 4,
        vocabulary: int = 8192) -> Case:
    """A GPT-2 of transformers without dropout, its loss inside."""
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=8, n_positions=length, vocab_size=vocabulary, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False)
    ids = torch.randint(0, vocabulary, (batch, length))
    return Case(transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids},
                lambda m: [m.transformer.h])


def gpt12() -> Case:
    """The GPT-2 of the first table, with twelve layers."""
    return gpt(12)


def images(model: nn.Module, batch: int, size: int, lists: Callable[[Any], list[Any]]) -> Case:
    """An image classifier of transformers with random images and labels."""
    return Case(model, {"pixel_values": torch.randn(batch, 3, size, size),
                        "labels": torch.randint(0, 2, (batch,))}, lists)


def resnet18() -> Case:
    """ResNet-18, four images of 224 x 224."""
    config = transformers.ResNetConfig(embedding_size=64, hidden_sizes=[64, 128, 256, 512],
                                       depths=[2, 2, 2, 2], layer_type="basic")
    return images(transformers.ResNetForImageClassification(config), 4, 224,
                  lambda m: [s.layers for s in m.resnet.encoder.stages])


def resnet50() -> Case:
    """ResNet-50, two images of 224 x 224."""
    return images(transformers.ResNetForImageClassification(transformers.ResNetConfig()), 2, 224,
                  lambda m: [s.layers for s in m.resnet.encoder.stages])


def regnet() -> Case:
    """A RegNet, two images of 224 x 224."""
    return images(transformers.RegNetForImageClassification(transformers.RegNetConfig(
        hidden_sizes=[64, 128, 256, 512], depths=[2, 3, 6, 2], groups_width=64)), 2, 224,
        lambda m: [s.layers for s in m.regnet.encoder.stages])


def vit() -> Case:
    """A small ViT, eight images of 224 x 224."""
    return images(transformers.ViTForImageClassification(transformers.ViTConfig(
        hidden_size=192, num_hidden_layers=8, num_attention_heads=3, intermediate_size=768,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)), 8, 224, longest)


def t5() -> Case:
    """A small T5."""
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(
        d_model=256, d_kv=32, d_ff=1024, num_layers=4, num_heads=8, vocab_size=8192, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False))
    return Case(model, {"input_ids": torch.randint(0, 8192, (4, 128)),
                        "labels": torch.randint(0, 8192, (4, 128))},
                lambda m: [m.encoder.block, m.decoder.block], sequence=False)


def llama32() -> Case:
    """A stack of 32 Llama layers."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=256, num_hidden_layers=32, num_attention_heads=8, num_key_value_heads=8,
        intermediate_size=688, vocab_size=1024, use_cache=False))
    ids = torch.randint(0, 1024, (2, 256))
    return Case(model, {"input_ids": ids, "labels": ids}, lambda m: [m.model.layers])


class Loss:
    """An output with nothing but a loss."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


torch.utils._pytree.register_pytree_node(Loss, lambda o: ([o.loss], None), lambda x, _: Loss(*x),
                                         serialized_type_name="benchmarks.Loss")


class Segmenter(nn.Module):
    """A U-Net with its loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.net = UNet((24, 48, 96, 192))

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> Loss:
        """Images and a class for each pixel."""
        return Loss(nn.functional.cross_entropy(self.net(pixels), labels))


def unet() -> Case:
    """A U-Net of four scales, two images of 128 x 128."""
    return Case(Segmenter(), {"pixels": torch.randn(2, 3, 128, 128),
                              "labels": torch.randint(0, 2, (2, 128, 128))},
                lambda m: [m.net.down, m.net.join], sequence=False)


class Alone(nn.Module):
    """A model of which only the loss is returned."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **kwargs: Any) -> Loss:
        """Return only the loss: nobody holds the model's other outputs."""
        return Loss(self.model(**kwargs).loss)


def longest(model: nn.Module) -> list[Any]:
    """The longest list of layers."""
    return [max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)]


MODELS: dict[str, Callable[[], Case]] = {
    "gpt": gpt, "gpt12": gpt12, "resnet18": resnet18, "resnet50": resnet50, "regnet": regnet,
    "unet": unet, "t5": t5, "vit": vit, "llama32": llama32}
LANGUAGE = ("gpt", "gpt12", "t5")
"""Those whose logits are among the largest tensors, and are returned."""
TABLES = [name for name in MODELS if name != "llama32"]
"""Those that `--models all` means; the other one is for the curve of twenty budgets."""


class Group(nn.Module):
    """Layers called one after the other, under one checkpoint."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.plain = False
        """The last one of `checkpoint_sequential` is not checkpointed."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As `torch.utils.checkpoint.checkpoint_sequential` does it."""
        def run(first: Any, *rest: Any, **named: Any) -> Any:
            for layer in self.layers:
                first = layer(first, *rest, **named)
            return first

        return run(*args, **kwargs) if self.plain else checkpoint(run, *args, use_reentrant=False, **kwargs)


def checkpointed(case: Case, *, grouped: bool) -> None:
    """`torch.utils.checkpoint` around each layer, or around all but the last of √n groups."""
    if grouped and not case.sequence:
        raise SystemExit("its layers are not called one after the other")
    for layers in case.lists(case.model):
        n = len(layers)
        size = math.ceil(n / round(math.sqrt(n))) if grouped else 1
        children = list(layers)
        groups = [Group(children[k:k + size]) for k in range(0, n, size)]
        groups[-1].plain = grouped
        for name in list(layers._modules):
            del layers._modules[name]
        for k, group in enumerate(groups):
            layers.add_module(str(k), group)


def budgeted(case: Case, backend: str, fraction: float) -> Forward:
    """torch.compile under `activation_memory_budget`."""
    import torch._functorch.config as config
    from torch._dynamo.backends.registry import lookup_backend

    compile_graph = lookup_backend(backend)

    def under_budget(graph: Any, examples: Any) -> Any:
        # A function of its own: torch finds compiled code by its backend, and would run another budget's.
        with config.patch(activation_memory_budget=fraction):
            return compile_graph(graph, examples)

    compiled = torch.compile(case.model, backend=under_budget)
    return lambda: compiled(**case.kwargs).loss


def method(name: str, case: Case, eager_peak: int) -> Forward:
    """A forward by some method."""
    kind, _, value = name.partition(" ")
    model, kwargs = case.model, case.kwargs
    if name in ("checkpoint", "sequential"):
        checkpointed(case, grouped=name == "sequential")
    if name in ("eager", "checkpoint", "sequential"):
        return lambda: model(**kwargs).loss
    if kind in ("aot_eager", "inductor"):
        return budgeted(case, kind, float(value))
    if value == "loss alone":
        model = Alone(model)
    budget = 1 if value in ("smallest", "loss alone") else round(float(value) * eager_peak)
    settings = Settings() if kind == "rkmate" else Settings(
        planner=kind, planning_seconds=SECONDS_TO_PLAN, chunked_loss="never")
    try:
        wrapped = rkmate.wrap(model, (), kwargs, budget=budget, progress=False,
                              settings=settings)
    except rkmate.InfeasibleBudget as error:
        if budget > 1:
            raise SystemExit(f"infeasible: at least {error.minimum_bytes / eager_peak:.0%}") from error
        wrapped = rkmate.wrap(model, (), kwargs, budget=error.minimum_bytes, progress=False,
                              settings=settings)
    except rkmate.PlanningTimeout as error:
        raise SystemExit(f"nothing found in {SECONDS_TO_PLAN} s") from error
    except rkmate.ArgumentError as error:
        if kind == "rkmate":
            raise
        raise SystemExit("cannot plan this model") from error
    return lambda: wrapped(**kwargs).loss


def one(model_name: str, method_name: str, repeats: int) -> None:
    """Measure one method on one model; prints one line of JSON."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    reference = MODELS[model_name]()
    torch.manual_seed(0)
    case = MODELS[model_name]()
    reference.model.train()
    case.model.train()

    def plain() -> Any:
        return reference.model(**reference.kwargs).loss

    eager_peak = peak_of(plain, reference.model)
    start = time.perf_counter()
    forward = method(method_name, case, eager_peak)
    step(forward, case.model)
    ready = time.perf_counter() - start
    found = beside(plain, reference.model, forward, case.model, repeats, SECONDS)
    print(json.dumps({"peak": found.peak / eager_peak, "time": found.ratio, "ready": ready}))


def main() -> None:
    """Measure every method on the models asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="gpt,resnet18", help=f"of {', '.join(MODELS)}, or all")
    parser.add_argument("--repeats", type=int, default=7, help=f"at least, and for {SECONDS} s")
    parser.add_argument("--methods", help="comma separated; all by default")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md, with a picture")
    parser.add_argument("--add", action="store_true", help="the same, and keep rows of other methods")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(*options.one, options.repeats)
        return
    methods = options.methods.split(",") if options.methods else list(METHODS)
    for model in TABLES if options.models == "all" else options.models.split(","):
        rows: dict[str, Row] = {}
        for name in methods:
            if name == "rkmate loss alone" and model not in LANGUAGE:
                continue
            if name == "rkmate as checkpoint" and rows.get("checkpoint", Row("")).peak is None:
                parser.error("as checkpoint needs the peak of checkpoint, measured before it")
            asked = f"rkmate {rows['checkpoint'].peak}" if name == "rkmate as checkpoint" else name
            done = subprocess.run([sys.executable, __file__, "--one", model, asked, "--repeats",
                                   str(options.repeats)], capture_output=True, text=True, check=False)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["no message"])[-1][:120]
                rows[name] = Row(f"| {name} | {reason} | | |")
            else:
                r = json.loads(done.stdout.strip().splitlines()[-1])
                rows[name] = Row(f"| {name} | {r['peak']:.1%} | {r['time']:.2f} | {r['ready']:.1f} s |",
                                 r["peak"], r["time"])
            print(model, rows[name].text, flush=True)
        if options.write or options.add:
            write(model, rows, add=options.add)


@dataclass(frozen=True)
class Row:
    """A line of a table; without figures where a method does not apply."""

    text: str
    peak: float | None = None
    time: float | None = None

    @classmethod
    def read(cls, text: str) -> Row:
        """A line that `main` has written."""
        peak, time = (cell.strip() for cell in text.split("|")[2:4])
        return cls(text, float(peak.rstrip("%")) / 100, float(time)) if time else cls(text)


def write(model: str, rows: dict[str, Row], *, add: bool) -> None:
    """Put a model's table and picture where the documentation has its section."""
    page = DOCS / "benchmarks.md"
    text = page.read_text(encoding="utf-8")
    begin, end = f"<!-- {model}: begin -->", f"<!-- {model}: end -->"
    there = text[text.index(begin):text.index(end)] if begin in text else ""
    if add:
        lines = [line for line in there.splitlines() if line.startswith("|")][2:]
        rows = {line.split("|")[1].strip(): Row.read(line) for line in lines} | rows
    rows = dict(sorted(rows.items(), key=lambda r: METHODS.index(r[0]) if r[0] in METHODS else len(METHODS)))
    draw(model, rows, DOCS / "images" / f"benchmark-{model}.svg")
    table = "\n".join(["| method | peak | time | until the first step is done |", "|---|--:|--:|--:|",
                       *(row.text for row in rows.values())])
    threads = torch.get_num_threads()
    note = (f"Measured on a CPU ({platform.machine()}, {os.cpu_count()} cores, {threads} threads), torch "
            f"{torch.__version__.partition('+')[0]}, transformers {transformers.__version__}.")
    section = f"{begin}\n\n![{model}](images/benchmark-{model}.svg)\n\n{table}\n\n{note}\n\n{end}"
    if there:
        text = text.replace(there + end, section)
    else:
        text = f"{text.rstrip()}\n\n## {model}\n\n{MODELS[model].__doc__ or ''}\n\n{section}\n"
    page.write_text(text, encoding="utf-8")


def draw(model: str, rows: dict[str, Row], path: Path) -> None:
    """Time against memory, one line a kind of method; what recomputes all would leave the others a strip."""
    from matplotlib.figure import Figure

    points = [(name, r.peak, r.time) for name, r in rows.items()
              if r.peak is not None and r.time is not None and name != "recompute-all 0.5"]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for kind in dict.fromkeys(n.partition(" ")[0] for n, _, _ in points):
        mine = sorted((p, t) for n, p, t in points if n.partition(" ")[0] == kind)
        axes.plot([p * 100 for p, _ in mine], [t for _, t in mine], label=kind,
                  linewidth=2.5 if kind == "rkmate" else 1, **look_of(kind).of_plot)
    axes.set(title=model, xlabel="peak memory, % of eager", ylabel="time of a step, eager = 1")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper")
    figure.savefig(path)


if __name__ == "__main__":
    main()
