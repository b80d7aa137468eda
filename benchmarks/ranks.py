"""Training on gloo ranks, with a budget and without: peak of a rank, collectives of a step, losses.
``python benchmarks/ranks.py --write`` makes the table of docs/tools-distributed.md; names of rows run some,
and ``--ranks 4`` those of four ranks.

Each row trains twice in the same processes, from the same weights. The budget is a share of the largest peak
of a step without rkmate on any rank. A peak is the least of the last steps on a rank, and the largest of all
ranks: gloo's threads let go of exchanged tensors when they come to it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import rkmate
from rkmate import device as devices
from rkmate.pipeline.settings import Settings
from rkmate.show.amounts import size

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "tools-distributed.md"
BEGIN, END = "<!-- python benchmarks/ranks.py --write -->\n", "<!-- end of ranks -->"
STEPS, LAST = 9, 3
"""Training steps of a row, and how many of them are measured."""
WORDS, WIDTH, LENGTH, BATCH = 8192, 256, 128, 4
ANALYTIC = Settings(costs="analytic")
"""Costs that are counted, not measured: tables are the same each time."""


# -- Models ----------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal attention, with its norm and its residual."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the input and the attention."""
        y = self.norm(x)
        q, k, v = (p(y).unflatten(-1, (-1, x.shape[-1] // self.heads)).transpose(1, 2)
                   for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two products, with their norm and their residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the input and the last product."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Block(nn.Sequential):
    """A layer of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__(Attention(width), Mlp(width))


class Head(nn.Module):
    """The end of a language model, with its loss."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.norm, self.product = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return F.cross_entropy(self.product(self.norm(x)).flatten(0, 1).float(), ids.flatten())


class GPT(nn.Module):
    """A language model that returns its loss."""

    def __init__(self, words: int = WORDS, width: int = WIDTH, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = Head(words, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        loss: torch.Tensor = self.head(x, ids)
        return loss


class LowRank(nn.Module):
    """A frozen linear layer, and a trained one of low rank next to it."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both."""
        out: torch.Tensor = self.base(x) + self.b(self.a(x))
        return out


class Reduced(torch.autograd.Function):
    """The sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks."""
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient as it is."""
        return grad.clone()


class Reducing(nn.Module):
    """Layers of which each ends in a sum over ranks, by a custom function."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(
            nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 128))
            for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        for layer in self.layers:
            x = x + Reduced.apply(layer(x))
        return x.square().mean()


class Images(nn.Module):
    """Convolutions with norms over the batch of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        # torch has kernels of SyncBatchNorm for GPUs only: its autograd function, with kernels for the CPU.
        from tests.semantics.batch_norm_kernels import SynchronizedNorm

        torch.manual_seed(0)
        self.layers = nn.Sequential(*(part for k in range(4) for part in (
            nn.Conv2d(16 if k else 3, 16, 3, padding=1), SynchronizedNorm(16), nn.ReLU())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        loss: torch.Tensor = self.layers(x).square().mean()
        return loss


# -- Rows ------------------------------------------------------------------------------------------


def _words(g: torch.Generator) -> torch.Tensor:
    return torch.randint(2000, (BATCH, LENGTH), generator=g)


def _many_words(g: torch.Generator) -> torch.Tensor:
    return torch.randint(WORDS, (2 * BATCH, LENGTH), generator=g)


@dataclass(frozen=True)
class Row:
    """A way to train."""

    label: str
    share: float
    """The budget, as a share of the peak without rkmate."""
    made: Callable[[], nn.Module]
    """Returns the model, sharded or parallel."""
    inputs: Callable[[torch.Generator], torch.Tensor]
    ranks: tuple[int, ...] = (2, 4)
    """Numbers of ranks to train on."""
    per_group: int = 1
    """The number of ranks that share a batch; zero: all."""
    settings: Settings = ANALYTIC


def mesh(*sizes: int, names: tuple[str, ...] | None = None) -> Any:
    """Return a mesh of all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def parallel(model: nn.Module, over: Any, sequence: bool = False) -> nn.Module:
    """Make the layers of a model tensor parallel."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    into, out = ("0.q", "0.k", "0.v", "1.up"), ("0.out", "1.down")
    for layer in model.layers:
        if sequence:
            parallelize_module(layer, over, {
                **{n: SequenceParallel() for n in ("0.norm", "1.norm")},
                **{n: ColwiseParallel(input_layouts=Shard(1)) for n in into},
                **{n: RowwiseParallel(output_layouts=Shard(1)) for n in out}})
        else:
            parallelize_module(layer, over, {
                **{n: ColwiseParallel() for n in into}, **{n: RowwiseParallel() for n in out}})
    if sequence:
        parallelize_module(model, over, {
            "words": RowwiseParallel(input_layouts=_replicate(), output_layouts=Shard(1)),
            "head": PrepareModuleInput(input_layouts=(Shard(1), None),
                                       desired_input_layouts=(_replicate(), None),
                                       use_local_output=True)})
    return model


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


def sharded(kind: str = "", over: Any = None, model: GPT | None = None) -> nn.Module:
    """Shard a model by layers, its embedding, and its head with the loss (`fully_shard`)."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = model or GPT()
    how: dict[str, Any] = {"mesh": over if over is not None else mesh(dist.get_world_size())}
    if kind == "bf16":
        how["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if kind == "lora":
        model.requires_grad_(False)
        for layer in model.layers:
            layer[0].q, layer[1].up = LowRank(layer[0].q), LowRank(layer[1].up)
    for layer in model.layers:
        for part in layer if kind == "nested" else ():
            fully_shard(part, **how)
        fully_shard(layer, **how)
    fully_shard(model.words, **how)
    fully_shard(model.head, **how)
    fully_shard(model, **how)
    return model


def both() -> nn.Module:
    """Make a model tensor parallel over two of four ranks, and shard it over the others."""
    over = mesh(2, 2, names=("shards", "tensors"))
    model = parallel(GPT(), over["tensors"])
    return sharded(over=over["shards"], model=model)


def whole_graph() -> nn.Module:
    """Shard parameters so that they are gathered in the graph."""
    return rkmate.distributed.shard(GPT(2000, 128, 6), mesh(dist.get_world_size()))


ROWS = {
    "norms": Row("`SyncBatchNorm`, 4 convolutions", 0.7, Images,       # kernels with memory of their own
                 lambda g: torch.randn(16, 3, 32, 32, generator=g), settings=Settings()),
    "function": Row("a Function that reduces, 4 layers", 0.7, Reducing,
                    lambda g: torch.randn(1024, 128, generator=g)),
    "tp": Row("tensor parallel", 0.7, lambda: parallel(GPT(2000), mesh(dist.get_world_size())), _words,
              per_group=0),
    "sp": Row("tensor and sequence parallel", 0.7,
              lambda: parallel(GPT(2000), mesh(dist.get_world_size()), True), _words, per_group=0),
    "fsdp": Row("`fully_shard`", 0.4, sharded, _many_words),
    "bf16": Row("`fully_shard`, bfloat16", 0.4, lambda: sharded("bf16"), _many_words),
    "nested": Row("`fully_shard`, also attention and MLP", 0.4, lambda: sharded("nested"), _many_words),
    "lora": Row("`fully_shard`, low-rank adapters", 0.4, lambda: sharded("lora"), _many_words),
    "shard-1.0": Row("`rkmate.distributed.shard`", 1.0, whole_graph, _words),
    "shard-0.6": Row("`rkmate.distributed.shard`", 0.6, whole_graph, _words),
    "shard-0.3": Row("`rkmate.distributed.shard`", 0.3, whole_graph, _words),
    "tp-fsdp": Row("tensor parallel, `fully_shard`", 0.6, both, _many_words, ranks=(4,), per_group=2)}
PIPELINES = {"1f1b": "1F1B, 4 microbatches", "zero-bubble": "zero bubble (ZBV), 4 microbatches"}


# -- Ranks -----------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What steps have shown."""

    losses: list[float]
    weights: list[torch.Tensor]
    peak: int
    exchanges: Counter[str]


def trained(step: Callable[[int], Callable[[], None]], parameters: list[nn.Parameter], losses: list[float],
            several: bool = False) -> Seen:
    """Train, and return what the steps have shown. `step`: returns forward and backward of a step with a
    number, which adds to `losses`. `several`: a step adds up gradients, which are there before it."""
    for p in parameters if several else ():
        p.grad = torch.zeros_like(p)
    optimizer, peaks = torch.optim.SGD(parameters, 0.05), []
    for k in range(STEPS):
        now = step(k)
        if k < STEPS - LAST:
            now()
        else:
            peaks.append(devices.of(parameters[0]).measure_peak(now).peak)
        optimizer.step()
        optimizer.zero_grad(set_to_none=not several)
    now = step(STEPS)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        now()
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone() for p in parameters]
    return Seen(losses, weights, min(peaks), Counter(
        e.name.removeprefix("gloo:") for e in seen.events() if e.name.startswith("gloo:")))


def of_row(row: Row, rank: int, budget: int | None) -> Seen:
    """Train the model of a row."""
    model = row.made()
    if budget is not None:
        rkmate.apply(model, budget=budget, progress=False, settings=row.settings)

    losses: list[float] = []
    per_group = row.per_group or dist.get_world_size()

    def step(k: int) -> Callable[[], None]:
        x = row.inputs(torch.Generator().manual_seed(100 * k + rank // per_group))

        def now() -> None:
            loss = model(x)
            loss.backward()
            losses.append((loss.full_tensor() if hasattr(loss, "full_tensor") else loss).item())

        return now

    return trained(step, [p for p in model.parameters() if p.requires_grad], losses)


def of_pipeline(name: str, rank: int, budget: int | None) -> Seen:
    """Train stages of layers, two layers a rank: in one stage, or in two of a zero bubble schedule. `budget`:
    bytes of all stages of a rank."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble

    zero, ranks = name == "zero-bubble", dist.get_world_size()
    mine, count = ([rank, 2 * ranks - 1 - rank], 2 * ranks) if zero else ([rank], ranks)
    models = []
    for k in mine:
        torch.manual_seed(k)
        models.append(nn.Sequential(*(Block(WIDTH) for _ in range(2 // len(mine)))))
    x = torch.randn(16, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
    if budget is not None:
        rkmate.apply(nn.ModuleList(models), budget=budget, progress=False, settings=ANALYTIC)
    stages = [PipelineStage(model, k, count, torch.device("cpu"), input_args=(x[:4],))
              for k, model in zip(mine, models, strict=True)]
    kind: Any = ScheduleZBVZeroBubble if zero else Schedule1F1B
    schedule = kind(stages if zero else stages[0], n_microbatches=4, loss_fn=F.mse_loss)

    losses: list[float] = []

    def step(k: int) -> Callable[[], None]:
        target = x.flip(0)

        def now() -> None:
            found: list[torch.Tensor] = []
            schedule.step(*((x,) if 0 in mine else ()), **(
                {"target": target, "losses": found} if count - 1 in mine else {}), return_outputs=False)
            losses.extend(loss.item() for loss in found)

        return now

    return trained(step, [p for m in models for p in m.parameters()], losses, several=True)


def largest(value: float) -> float:
    """Return the largest value of all ranks."""
    found = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def beside(name: str, rank: int) -> str:
    """Train with a budget and without, and return a row of the table."""
    if name in PIPELINES:
        label, share = PIPELINES[name], 0.6
        plain = of_pipeline(name, rank, None)
    else:
        label, share = ROWS[name].label, ROWS[name].share
        plain = of_row(ROWS[name], rank, None)
    own, ranks = largest(plain.peak), dist.get_world_size()
    try:
        budget = float(int(share * (plain.peak if name in PIPELINES else own)))
        seen = of_pipeline(name, rank, int(budget)) if name in PIPELINES else \
            of_row(ROWS[name], rank, int(budget))
    except rkmate.InfeasibleBudget as error:
        least = size(error.minimum_bytes or 0)
        return f"| {label} | {ranks} | {size(own)} | {share} | refused: {least} at least | | | |"
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (seen.peak, budget))
    peak, budget = max(every, key=lambda pair: pair[0] / pair[1])    # of the rank that comes closest to it
    kinds = sorted({*plain.exchanges, *seen.exchanges})
    counts = ", ".join(f"{kind} {plain.exchanges[kind]}" + (
        f" → {seen.exchanges[kind]}" if seen.exchanges[kind] != plain.exchanges[kind] else "")
        for kind in kinds)
    off = largest(max((abs(a - b) for a, b in zip(seen.losses, plain.losses, strict=True)), default=0.0))
    other = largest(any(not torch.equal(a, b) for a, b in zip(seen.weights, plain.weights, strict=True)))
    return (f"| {label} | {ranks} | {size(own)} | {share} | {size(budget)} | {size(peak)} | {counts} | "
            f"{'bits' if not off and not other else f'{off:.1e}'} |")


def _rank(rank: int, ranks: int, name: str, folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sys.path.append(str(ROOT))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks,
                            timeout=timedelta(minutes=30))
    with warnings.catch_warnings(action="ignore"):
        text = beside(name, rank)
    dist.barrier()
    if not rank:
        Path(folder, "row").write_text(text)
    os._exit(0)                 # no destructor of the group waits for another rank


def row_of(name: str, ranks: int) -> str:
    """Let ranks train, and return a row of the table. Raises `RuntimeError` if one of them fails."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=_rank, args=(k, ranks, name, folder)) for k in range(ranks)]
        for process in processes:
            process.start()
        waiting = {process.sentinel: process for process in processes}
        while waiting:
            for ended in multiprocessing.connection.wait(waiting):
                process = waiting.pop(ended)                # type: ignore[call-overload]
                process.join()
                if process.exitcode:
                    for other in waiting.values():
                        other.kill()
                    raise RuntimeError(f"{name} failed on a rank of {ranks}")
        return Path(folder, "row").read_text()


def table(names: list[str], counts: list[int]) -> Iterator[str]:
    """Yield the lines of the table: `names` of rows, on each of these `counts` of ranks that a row has."""
    yield "| | ranks | peak without rkmate | share | budget | peak | collectives of a step " \
          "| losses differ by |"
    yield "|---|---|---|---|---|---|---|---|"
    for name in names:
        for ranks in ROWS[name].ranks if name in ROWS else (2, 4):
            if ranks in counts:
                yield row_of(name, ranks)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", nargs="*", choices=[[], *ROWS, *PIPELINES])
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    lines = []
    for line in table(chosen.rows or [*ROWS, *PIPELINES], chosen.ranks):
        print(line, flush=True)
        lines.append(line)
    if chosen.write:
        text = PAGE.read_text(encoding="utf-8")
        start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
        PAGE.write_text(f"{text[:start]}\n" + "\n".join(lines) + f"\n\n{text[end:]}", encoding="utf-8")
