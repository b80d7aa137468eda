"""The ``plan`` command: make a plan and say what it does."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rkmate.cli.arguments import add_target, budget_of, elsewhere_options, planning_options
from rkmate.cli.targets import load_target
from rkmate.ir.plan import PlanData
from rkmate.show.copies import copies_of
from rkmate.show.replay import replay


def add_arguments(plan: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_target(plan, budget=True)
    plan.add_argument("--save", metavar="FILE", help="write the plan, for rkmate.wrap(plan=...)")
    plan.add_argument("--source", metavar="FILE", help="write the generated Python")
    plan.add_argument("--explain", action="store_true", help="explain it in sentences too")
    plan.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Plan, write and print; returns the exit status 0."""
    import rkmate

    there = elsewhere_options(args)
    target = load_target(args.target, None if there else args.device)
    common = {"budget": budget_of(args.budget), **planning_options(args), **there}
    if args.source:
        wrapped = rkmate.wrap(target.model, target.args, target.kwargs, **common)
        made = wrapped.plan
        Path(args.source).write_text(wrapped.source, encoding="utf-8")
    else:
        made = rkmate.plan(target.model, target.args, target.kwargs, **common)
    if args.save:
        made.save(args.save)
    if args.json:
        print(json.dumps(as_json(made) | ({"explanation": made.explain()} if args.explain else {})))
    else:
        print(made)
        if args.explain:
            print(f"\n{made.explain()}")
    return 0


def as_json(plan: PlanData) -> dict[str, Any]:
    """The figures of a plan, as ``--json`` prints them. Bytes and seconds."""
    copies = copies_of(replay(plan)) if plan.graph.link is not None else None
    sent = {} if copies is None else {"offload": {
        "place": copies.link.place, "tensors": copies.tensors, "away_bytes": copies.away_bytes,
        "busy_seconds": copies.busy_seconds, "stalled_seconds": copies.stalled,
        "out_bytes_per_second": copies.link.out_bytes_per_second,
        "in_bytes_per_second": copies.link.in_bytes_per_second}}
    return {"planner": plan.planner, "budget_bytes": plan.budget_bytes, "peak_bytes": plan.peak_bytes,
            "baseline_peak_bytes": plan.baseline_peak_bytes, "minimum_bytes": plan.minimum_bytes,
            "step_seconds": plan.step_seconds, "baseline_seconds": plan.baseline_seconds,
            "bound_seconds": plan.bound_seconds,
            "overhead": plan.overhead, "blocks": [vars(b) for b in plan.blocks],
            "stage_seconds": dict(plan.stage_seconds), "nodes": dict(plan.nodes), "note": plan.note, **sent}
