"""The command ``rkmate``: plans, pictures and reports from a terminal or a script."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rkmate import __version__
from rkmate.cli import commands
from rkmate.cli.arguments import check_files
from rkmate.cli.targets import DEMOS, TargetError
from rkmate.errors import ArgumentError, CaptureError, InfeasibleBudget, PlanError, RkmateError

_EXIT: tuple[tuple[type[BaseException], int], ...] = (
    (ArgumentError, 2), (InfeasibleBudget, 3), (CaptureError, 4), (PlanError, 5), (RkmateError, 1),
    (OSError, 1), (KeyboardInterrupt, 130))

_ABOUT = """\
Train a PyTorch model inside a memory budget: see what a plan costs before you train.

  rkmate doctor                                what is installed here, and what of it works
  rkmate doctor train:sample                   can your model be planned, and down to which budget?
  rkmate check train:sample --budget 50%       is it the same training? losses, gradients, peaks, times
  rkmate plan gpt2 --budget 50%                what the plan keeps, forgets and recomputes
  rkmate plan train:sample --budget 6GiB       the same for your model: sample() in train.py
  rkmate plan train:sample --budget auto --device h100
                                               will it fit there, and at what cost? (estimated)
  rkmate curve gpt2 --plot curve.svg           time against memory
  rkmate report gpt2 report.html --budget 50%  one page with everything
  rkmate draw gpt2 chain.svg --budget 50%      the model as a chain of blocks
  rkmate compare gpt2 --planners rockmate dtr  ways to find a plan, side by side

Each command has a --help of its own.
"""
_TARGET = """\
A TARGET is one of
  - module:factory   a function, importable from the current folder (or file.py:factory, anywhere),
                     that takes nothing and returns (model, args) or (model, args, kwargs): the model
                     in train mode, and sample inputs of the size that you train with
  - a built-in demo model:
{demos}
  - for draw and report also the file of a plan: rkmate plan TARGET --budget B --save plan.json

A budget is bytes (1500000000), text (600MiB, 1.5GB), a share of the model's own peak (50% or 0.5),
or "auto": what is free on the CUDA device, or left on a GPU that is planned for and not here. It
bounds what a training step allocates on top of what is in memory before it, without gradients of
parameters.

"""
_STATUS = """\
exit status: 0 done, 1 failed, 2 wrong arguments, 3 no plan fits in the budget, 4 the model cannot be
captured, 5 the plan file is unusable, 130 interrupted. With --json, an error is a JSON object too.
"""


@dataclass(frozen=True)
class _Command:
    name: str
    about: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Returns the exit status."""
    target: bool = True
    """Whether the command takes a model; then its help says what a target is."""


_COMMANDS = (
    _Command("doctor", "say what works here, and whether a model can be planned",
             commands.add_doctor_arguments, commands.run_doctor),
    _Command("check", "train a copy plain and a copy planned, and compare them", commands.add_check_arguments,
             commands.run_check),
    _Command("plan", "make a plan and say what it does", commands.add_plan_arguments,
             commands.run_plan),
    _Command("curve", "plans for several budgets: time against memory", commands.add_curve_arguments,
             commands.run_curve),
    _Command("draw", "draw a plan's graphs, or its memory over time", commands.add_draw_arguments,
             commands.run_draw),
    _Command("report", "write one HTML page about a plan", commands.add_report_arguments,
             commands.run_report),
    _Command("compare", "every planner at equal budgets", commands.add_compare_arguments,
             commands.run_compare),
    _Command("simulate", "replay a log of operations under dynamic rematerialization",
             commands.add_simulate_arguments, commands.run_simulate, target=False),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    args = _parser().parse_args(arguments)
    try:
        check_files(args)
        status: int = args.run(args)
        return status
    except BrokenPipeError:
        # The reader (head, less) has seen enough; nothing can be flushed to it any more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (RkmateError, OSError, KeyboardInterrupt) as error:
        status = next(code for kind, code in _EXIT if isinstance(error, kind))
        message = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
        if isinstance(error, TargetError) and not getattr(args, "json", False):
            print(error.trace, file=sys.stderr, end="")
        if getattr(args, "json", False):
            content: dict[str, Any] = {"error": type(error).__name__, "message": message}
            if isinstance(error, InfeasibleBudget):
                content["minimum_bytes"] = error.minimum_bytes
            print(json.dumps(content))
        else:
            print(f"rkmate {args.command}: {message}", file=sys.stderr)
        return status


def _parser() -> argparse.ArgumentParser:
    demos = "\n".join(f"      {name:8}{demo.about}{'' if demo.installed else ' (not installed)'}"
                      for name, demo in DEMOS.items())
    epilog = _TARGET.format(demos=demos) + _STATUS
    parser = argparse.ArgumentParser(prog="rkmate", description=_ABOUT, epilog=epilog,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"rkmate {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        about = f"{command.about[0].upper()}{command.about[1:]}."
        made = subparsers.add_parser(command.name, help=command.about, description=about,
                                   epilog=epilog if command.target else _STATUS,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
        made.set_defaults(run=command.run)
        command.add_arguments(made)
    return parser


if __name__ == "__main__":
    sys.exit(main())
