"""The ``simulate`` command: replay a log of tensor operations under a heuristic and a budget."""

from __future__ import annotations

import argparse
import json
import math
import sys

from rkmate.dtr.heuristics import HEURISTICS
from rkmate.dtr.log import read_log
from rkmate.dtr.simulator import simulate
from rkmate.errors import ArgumentError, RkmateError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments on ``parser``."""
    parser.add_argument("log", metavar="LOG", help="file of operations, one JSON object a line")
    parser.add_argument(
        "--heuristic",
        default="dtr-eq",
        metavar="NAME",
        help=f"one of {', '.join(HEURISTICS)} (default: dtr-eq)",
    )
    limit = parser.add_mutually_exclusive_group(required=True)
    limit.add_argument("--ratio", type=float, help="budget as a fraction of the log's own peak")
    limit.add_argument("--budget", type=int, metavar="BYTES", help="budget in bytes")
    parser.add_argument("--seed", type=int, default=0, help="for the random heuristic (default: 0)")
    parser.add_argument(
        "--overhead-limit",
        type=float,
        default=10.0,
        metavar="X",
        help="stop as thrash when total time would exceed X times the program's (default: 10)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for errors too")


def run(args: argparse.Namespace) -> int:
    """Replay and print; returns the exit status: 0, or 2 for bad input.

    Running out of memory and thrashing are results, not failures.
    """
    try:
        program = read_log(args.log)
        if args.ratio is not None and not 0 <= args.ratio < math.inf:
            raise ArgumentError(f"--ratio must be a number from 0 up, and is {args.ratio}")
        budget = args.budget if args.ratio is None else int(program.memory * args.ratio)
        result = simulate(
            program,
            args.heuristic,
            budget,
            overhead_limit=args.overhead_limit,
            seed=args.seed,
        )
    except (RkmateError, OSError, ValueError) as error:
        message = f"{args.log}: {error}"
        if args.json:
            print(json.dumps({"error": type(error).__name__, "message": message}))
        else:
            print(f"rkmate simulate: {message}", file=sys.stderr)
        return 2
    answer = {
        **result.as_dict(),
        "overhead": result.clock / program.compute if program.compute else None,
        "baseline_memory": program.memory,
        "baseline_compute": program.compute,
    }
    if args.json:
        print(json.dumps(answer))
    else:
        width = max(map(len, answer))
        for name, value in answer.items():
            print(f"{name:<{width}}  {value}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run ``python -m rkmate.cli.simulate LOG ...``."""
    parser = argparse.ArgumentParser(prog="rkmate simulate", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
