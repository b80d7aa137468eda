"""Make the comparison of planners in docs/planners.md: tables, pictures, and where the default loses.

    python docs/make_comparison.py [--seconds 10] [--no-measure]

Predictions rest on analytic costs, which are the same on every machine. The integer programs on the
whole graph, of which the default contains one, stop at a limit in seconds, and can find more on a
faster machine. What is measured depends on the machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rkmate
from rkmate.cli.targets import make_demo
from rkmate.comparison.table import Row
from rkmate.show.amounts import size

DOCS = Path(__file__).parent
PAGE = DOCS / "planners.md"
BEGIN, END = "<!-- comparison: begin -->", "<!-- comparison: end -->"
BUDGETS = (0.8, 0.6, 0.5, 0.4, 0.3)
DRAWN = ("rockmate", "rotor", "revolve", "sequential", "chen", "checkmate", "checkmate-lp",
         "lower-sets", "lower-sets-memory", "dtr", "save-set")
Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def gpt2(layers: int) -> Made:
    """GPT-2 without dropout, four sequences of 128 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, n_embd=128, n_head=4, vocab_size=1024, n_positions=128,
                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0,
                        eos_token_id=0, loss_type="ForCausalLM")
    ids = torch.randint(0, 1024, (4, 128))
    model: nn.Module = GPT2LMHeadModel(config)
    return model.train(), (), {"input_ids": ids, "labels": ids, "use_cache": False}


MODELS: dict[str, tuple[str, Callable[[], Made]]] = {
    "gpt2-4": ("GPT-2, 4 layers", lambda: gpt2(4)),
    "gpt2-12": ("GPT-2, 12 layers", lambda: gpt2(12)),
    "resnet": ("ResNet-18", lambda: make_demo("resnet")),
    "unet": ("U-Net", lambda: make_demo("unet")),
}
MEASURED: dict[str, tuple[str, Callable[[], Made]]] = {
    "gpt2-4": MODELS["gpt2-4"], "mlp": ("MLP, an nn.Sequential", lambda: make_demo("mlp"))}


def main() -> None:
    """Write tables and pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0,
                        help="limit of a planner for one budget (default: 10)")
    parser.add_argument("--no-measure", action="store_true", help="predictions only")
    args = parser.parse_args()
    (DOCS / "images").mkdir(exist_ok=True)
    parts: list[str] = []
    for key, (title, make) in MODELS.items():
        model, inputs, named = make()
        limit = 60.0 if key == "gpt2-12" else args.seconds
        found = rkmate.compare(model, inputs, named, budgets=BUDGETS,
                               settings=rkmate.Settings(costs="analytic"), time_limit=limit)
        print(found, flush=True)
        found.plot(DOCS / "images" / f"planners-{key}.svg", title=f"{title}, predicted",
                   methods=DRAWN)
        parts += [f"### {title}", predicted(found), f"![{title}](images/planners-{key}.svg)",
                  losses(found)]
    if not args.no_measure:
        parts.append("### Measured")
        for title, make in MEASURED.values():
            model, inputs, named = make()
            found = rkmate.compare(model, inputs, named, budgets=[0.5], measure=True,
                                   planners=["rockmate", "save-set", "rotor", "chen", "lower-sets",
                                             "dtr"])
            print(found, flush=True)
            parts += [f"{title}, budget {size(found.budgets[0])}:", measured(found), losses(found)]
    text = PAGE.read_text(encoding="utf-8")
    before, after = text[:text.index(BEGIN)], text[text.index(END):]
    PAGE.write_text(f"{before}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{after}", encoding="utf-8")


def predicted(found: rkmate.Comparison) -> str:
    """A Markdown table: a line a method, a column a budget."""
    shares = [b / found.baseline_peak_bytes for b in found.budgets]
    lines = [f"Without rematerialization: {size(found.baseline_peak_bytes)}.", "",
             "| method | planning | " + " | ".join(f"{s:.0%}" for s in shares) + " |",
             "|---|--:|" + "--:|" * len(shares)]
    for name in found.methods:
        rows = found.of(name)
        seconds = sum(r.planning_seconds or 0.0 for r in rows)
        cells = [_cell(r, found.best(r.budget_bytes or 0)) for r in rows]
        lines.append(f"| {name} | {seconds:.1f} s | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(row: Row, winner: Row | None) -> str:
    if row.time_ratio is None:
        return {"timeout": "timed out", "infeasible": "no"}.get(row.status, row.status)
    text = f"{row.time_ratio:.3f}"
    best = winner is not None and winner.time_ratio is not None \
        and row.time_ratio <= winner.time_ratio + 5e-4
    return f"**{text}**" if best else text


def losses(found: rkmate.Comparison) -> str:
    """Where the default planner is not the best, and by how much."""
    beaten = found.beaten()
    if not beaten:
        return "The default, rockmate, is the best or as good as the best at each of these budgets."
    parts = []
    for own, other in beaten:
        assert own.budget_bytes is not None and other.time_ratio is not None
        share = own.budget_bytes / found.baseline_peak_bytes
        mine = "does not fit" if own.time_ratio is None else \
            f"{own.time_ratio:.3f} (+{own.time_ratio - other.time_ratio:.3f})"
        parts.append(f"at {share:.0%} {other.method} takes {other.time_ratio:.3f}, rockmate {mine}")
    return f"The default is not the best here: {'; '.join(parts)}."


def measured(found: rkmate.Comparison) -> str:
    """A Markdown table of what was measured."""
    lines = ["| method | predicted peak | measured peak | predicted time | measured time |",
             "|---|--:|--:|--:|--:|"]
    for row in found:
        cells = [size(row.peak_bytes) if row.peak_bytes is not None else "",
                 size(row.measured_peak_bytes) if row.measured_peak_bytes is not None else row.status,
                 f"{row.time_ratio:.3f}" if row.time_ratio is not None else "",
                 f"{row.measured_ratio:.3f}" if row.measured_ratio is not None else ""]
        lines.append(f"| {row.method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
