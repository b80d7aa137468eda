"""The commands ``draw`` and ``report``: pictures of a plan, made now or saved before."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rkmate.cli.arguments import add_target, budget_of, planning_options
from rkmate.cli.targets import Target, load_target
from rkmate.errors import ArgumentError

if TYPE_CHECKING:
    from rkmate.show.plan import Plan


def add_draw_arguments(draw: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``draw``."""
    add_target(draw, budget=True, plan_file=True)
    draw.add_argument("file", metavar="FILE", help="picture to write (.svg, .png, .pdf, .dot)")
    draw.add_argument("--what", default="chain", help="chain, forward, simplified, block, schedule, "
                      "copies, or memory (default: chain)")
    draw.add_argument("--block", metavar="N", help="number or class of the block")
    draw.add_argument("--whole", action="store_true",
                      help="every operation of a large forward, which else is folded into its blocks")


def add_report_arguments(report: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``report``."""
    add_target(report, budget=True, plan_file=True)
    report.add_argument("file", metavar="FILE", help="page to write (.html)")
    report.add_argument("--no-curve", action="store_true", help="leave the other budgets out")


def run_draw(args: argparse.Namespace) -> int:
    """Draw one picture; returns the exit status 0."""
    from rkmate.show.draw import check
    from rkmate.show.plots import check_suffix

    if args.what == "memory":
        if args.whole:
            raise ArgumentError("--whole goes with --what forward and --what simplified")
        check_suffix(args.file)
    else:
        check(args.file, args.what, args.block, args.whole)
    plan, _ = _read_or_make(args, source=False)
    if args.what == "memory":
        plan.plot(args.file)
        print(args.file)
    else:
        print(plan.draw(args.file, args.what, args.block, whole=args.whole))
    return 0


def run_report(args: argparse.Namespace) -> int:
    """Write the page; returns the exit status 0."""
    import rkmate

    plan, target = _read_or_make(args, source=True)
    curve: Sequence[Plan] = ()
    if target is not None and not args.no_curve:
        curve = rkmate.tradeoff(target.model, target.args, target.kwargs, **planning_options(args))
    print(plan.report(args.file, curve=curve))
    return 0


def _read_or_make(args: argparse.Namespace, source: bool) -> tuple[Plan, Target | None]:
    """The plan of a file, or a plan for a model."""
    import rkmate

    if args.target.endswith(".json"):
        if args.budget is not None:
            raise ArgumentError("a saved plan has its budget: leave --budget out")
        return rkmate.Plan.load(args.target), None
    if args.budget is None:
        raise ArgumentError("give a --budget, or the file of a saved plan as TARGET")
    target = load_target(args.target, args.device)
    budget, options = budget_of(args.budget), planning_options(args)
    if source:
        return rkmate.wrap(target.model, target.args, target.kwargs, budget=budget, **options).plan, target
    return rkmate.plan(target.model, target.args, target.kwargs, budget=budget, **options), target
