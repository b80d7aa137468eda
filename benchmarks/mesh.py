"""Llama 3 on a mesh of H100s that are not here: plans with gathered parameters in the graph, next to
checkpointing each layer, with and without resharding, at equal bytes. ``python benchmarks/mesh.py --write``.

Nothing runs: bytes and times are the simulator's, by published rates, and the same for all rows.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import rkmate
from rkmate.ir.recompute import checkpointed
from rkmate.ir.schedule import Schedule
from rkmate.pipeline import elsewhere
from rkmate.pipeline.prepare import Prepared, prepare, trace
from rkmate.pipeline.search import planned_within
from rkmate.pipeline.settings import Settings
from rkmate.show.amounts import duration, size
from rkmate.support.progress import Progress
from rkmate.torch_seam.dtensor import bytes_held

PAGE = Path(__file__).parent.parent / "docs" / "tools-distributed.md"
BEGIN, END = "<!-- python benchmarks/mesh.py --write -->\n", "<!-- end of mesh -->"


@dataclass(frozen=True)
class Case:
    """A model on a mesh."""

    name: str
    ranks: int
    batch: int
    config: dict[str, int]


_70B = {"num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8,
        "intermediate_size": 28672}
CASES = {
    "8b": Case("Llama 3 8B", 8, 2, {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
                                    "num_key_value_heads": 8, "intermediate_size": 14336}),
    "70b": Case("Llama 3 70B", 64, 1, _70B),
    "70b-256": Case("Llama 3 70B", 256, 1, _70B)}
LENGTH, WORDS = 8192, 128_256


class Training(nn.Module):
    """A language model that returns its loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


def model_of(case: Case, layers: int | None) -> tuple[nn.Module, torch.Tensor]:
    """Return a model that checkpoints its layers, and tokens, on the meta device."""
    config = case.config | ({} if layers is None else {"num_hidden_layers": layers})
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=WORDS, use_cache=False, max_position_embeddings=LENGTH, **config)).bfloat16().train()
        tokens = torch.zeros(case.batch, LENGTH, dtype=torch.long)
    # The name since transformers 5.23, or the one before.
    own: Any = getattr(model, "activation_checkpointing_enable", None)
    (own or model.gradient_checkpointing_enable)({"use_reentrant": False})
    return Training(model), tokens


def row(name: str, prepared: Prepared, schedule: Schedule) -> str:
    """Return a schedule's row of the table."""
    found, ran = prepared.simulate(schedule), [prepared.graph.c[c] for c in schedule.order]
    seconds = sum(c.time for c in ran if c.exchanges)
    return (f"| {name} | {size(found.peak)} | {duration(found.seconds)} | {duration(seconds)} | "
            f"{duration(seconds - found.exposed)} | {sum('all_gather' in c.name for c in ran)} |")


def rows_of(case: Case, layers: int | None) -> list[str]:
    """Return the rows of a model's table."""
    begin, budgets, rows = time.process_time(), [], []
    with rkmate.distributed.fake_mesh(shard=case.ranks) as mesh:
        model, tokens = model_of(case, layers)
        rkmate.distributed.shard(model, mesh)
        gpu, model, args, _ = elsewhere.sample_for(rkmate.devices.H100, model, (tokens,), {})
        with elsewhere.on_gpu(gpu, model):
            traced = trace(model, args, {}, elsewhere.estimating(Settings(), None), Progress(True))
            prepared = prepare(traced)
            graph = prepared.graph
            for name, reshards in (("with", True), ("without", False)):
                schedule = prepared.with_kernels(checkpointed(graph, [
                    r if reshards or "all_gather" not in c.name else None
                    for r, c in zip(prepared.regions, graph.c, strict=True)]))
                budgets.append(prepared.simulate(schedule).peak)
                rows.append(row(f"each layer checkpointed, {name} resharding", prepared,
                                prepared.overlapped(schedule, budgets[-1])))
            left = rkmate.auto_budget(model)
            for budget in (*(b for b in budgets if b <= left), left):
                planned = planned_within(prepared, budget)
                rows.append(row(f"rkmate, {size(budget)}", planned.prepared, planned.plan.schedule))
                print(rows[-1], f"{time.process_time() - begin:.0f} s", flush=True)
            held = sum(map(bytes_held, model.parameters()))
    seconds = time.process_time() - begin
    about = (f"{case.name} on {case.ranks} H100s, {case.batch} x {LENGTH:,} tokens a rank, bfloat16: "
             f"parameters, gradients and AdamW's states take {size(4 * held)} of {size(gpu.memory_bytes)}; "
             f"{size(left)} are left for a step. Planned in {seconds:.0f} seconds of processor time.")
    head = ["| | step | time | collectives | hidden | gathers |", "|---|---|---|---|---|---|"]
    return [about, "", *head, *rows, ""]


def main() -> None:
    """Print the tables, or write them into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--layers", type=int, help="fewer layers, to try the script")
    parser.add_argument("--write", action="store_true", help=f"write the tables into {PAGE.name}")
    args = parser.parse_args()
    text = "\n".join(line for name in args.models.split(",") for line in rows_of(CASES[name], args.layers))
    print(text)
    if args.write:
        before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
