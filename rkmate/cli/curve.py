"""The ``curve`` command: plans for several budgets."""

from __future__ import annotations

import argparse
import json

from rkmate.cli.arguments import add_target, budget_of, elsewhere_options, planning_options
from rkmate.cli.plan import as_json
from rkmate.cli.targets import load_target


def add_arguments(curve: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_target(curve, budget=False)
    curve.add_argument("--budgets", nargs="+", metavar="B", help="which (default: ten, evenly)")
    curve.add_argument("--plot", metavar="FILE", help="draw it (.svg, .png, .pdf)")
    curve.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Plan, draw and print; returns the exit status 0."""
    import rkmate
    from rkmate.show.plots import check_suffix

    if args.plot:
        check_suffix(args.plot)
    there = elsewhere_options(args)
    target = load_target(args.target, None if there else args.device)
    budgets = None if args.budgets is None else [budget_of(b) for b in args.budgets]
    curve = rkmate.tradeoff(target.model, target.args, target.kwargs, budgets=budgets,
                            **{**planning_options(args), **there})
    if args.plot:
        curve.plot(args.plot)
    print(json.dumps([as_json(p) for p in curve]) if args.json else curve)
    return 0
