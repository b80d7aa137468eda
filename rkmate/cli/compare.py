"""The ``compare`` command: every planner on one model."""

from __future__ import annotations

import argparse
from pathlib import Path

from rkmate.cli.arguments import add_options, budget_of, planning_options
from rkmate.cli.targets import load_target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments on `parser`."""
    parser.add_argument("target", metavar="TARGET", help="module:factory, or a demo model")
    parser.add_argument("--budgets", nargs="+", metavar="B",
                        help="600MiB, 1.5GB, 50%%, 0.5, auto or bytes "
                        "(default: 100%% 80%% 60%% 50%% 40%% 30%%)")
    parser.add_argument("--planners", nargs="+", metavar="NAME",
                        help="which (default: all but auto)")
    parser.add_argument("--measure", action="store_true",
                        help="also train under each schedule, in processes of their own")
    parser.add_argument("--time-limit", type=float, metavar="S",
                        help="seconds that a planner has for one budget (default: 20)")
    parser.add_argument("--plot", metavar="FILE", help="draw it (.svg, .png, .pdf)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--device", metavar="D", help="move model and inputs there: cpu, cuda")
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Compare and print; returns the exit status 0. Raises what `rkmate.compare` raises."""
    from rkmate.comparison.run import BUDGETS, TIME_LIMIT, compare

    target = load_target(args.target, args.device)
    budgets = BUDGETS if args.budgets is None else [budget_of(b) for b in args.budgets]
    result = compare(target.model, target.args, target.kwargs, budgets=budgets,
                     planners=args.planners, measure=args.measure,
                     time_limit=TIME_LIMIT if args.time_limit is None else args.time_limit,
                     **planning_options(args))
    if args.plot:
        Path(args.plot).parent.mkdir(parents=True, exist_ok=True)
        result.plot(args.plot)
    print(result.to_json() if args.json else result)
    return 0
