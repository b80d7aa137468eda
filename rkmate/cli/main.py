"""The command ``rkmate``: plans, pictures and reports from a terminal or a script."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rkmate.cli.demos import DEMOS, make_demo
from rkmate.errors import (
    ArgumentError,
    CaptureError,
    InfeasibleBudget,
    PlanError,
    RkmateError,
)
from rkmate.show.plan import Plan

_EXIT: tuple[tuple[type[BaseException], int], ...] = (
    (ArgumentError, 2), (InfeasibleBudget, 3), (CaptureError, 4), (PlanError, 5), (RkmateError, 1),
    (OSError, 1), (KeyboardInterrupt, 130))

_ABOUT = """\
Train a PyTorch model inside a memory budget: see what a plan costs before you train.

  rkmate plan gpt2 --budget 50%                what the plan keeps, forgets and recomputes
  rkmate plan train:sample --budget 6GiB       the same for your model: sample() in train.py
  rkmate curve gpt2 --plot curve.svg           time against memory
  rkmate report gpt2 report.html --budget 50%  one page with everything
  rkmate draw gpt2 chain.svg --budget 50%      the model as a chain of blocks
  rkmate compare gpt2 --planners rockmate dtr  ways to find a plan, side by side

Each command has a --help of its own.
"""
_TARGET = """\
A TARGET is one of
  - module:factory   a function, importable from the current folder, that takes nothing and returns
                     (model, args) or (model, args, kwargs): the model in train mode, and sample
                     inputs of the size that you train with
  - a built-in demo model:
{demos}
  - for draw and report also the file of a plan: rkmate plan TARGET --budget B --save plan.json

A budget is bytes (1500000000), text (600MiB, 1.5GB), a share of the model's own peak (50% or 0.5),
or "auto": what is free on the CUDA device. It bounds what a training step allocates above what
stands before it, parameter gradients left out.

"""
_STATUS = """\
exit status: 0 done, 1 failed, 2 wrong arguments, 3 no plan fits in the budget, 4 the model cannot be
captured, 5 the plan file is unusable, 130 interrupted. With --json, an error is a JSON object too.
"""


class TargetError(ArgumentError):
    """The user's module or factory raised."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(f"target {name}: {type(error).__name__}: {error}")
        here = error.__traceback__
        while here is not None and _OURS.search(here.tb_frame.f_code.co_filename):
            here = here.tb_next
        self.trace = "".join(traceback.format_exception(type(error), error, here))
        """What Python says, from the first line of the user's code."""


_OURS = re.compile(r"importlib|rkmate.cli\.py$")


@dataclass(frozen=True)
class Target:
    """A model with sample arguments."""

    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    args = _parser().parse_args(arguments)
    try:
        _check_files(args)
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
    from rkmate import __version__

    demos = "\n".join(f"      {name:8}{demo.about}{'' if demo.installed else ' (not installed)'}"
                      for name, demo in DEMOS.items())
    epilog = _TARGET.format(demos=demos) + _STATUS
    parser = argparse.ArgumentParser(prog="rkmate", description=_ABOUT, epilog=epilog,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"rkmate {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, about: str, run: Callable[[argparse.Namespace], int],
                epilog: str = epilog) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.",
                                   epilog=epilog,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
        made.set_defaults(run=run)
        return made

    plan = command("plan", "make a plan and say what it does", _plan)
    _target(plan, budget=True)
    plan.add_argument("--save", metavar="FILE", help="write the plan, for rkmate.wrap(plan=...)")
    plan.add_argument("--source", metavar="FILE", help="write the generated Python")
    plan.add_argument("--explain", action="store_true", help="explain it in sentences too")
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    curve = command("curve", "plans for several budgets: time against memory", _curve)
    _target(curve, budget=False)
    curve.add_argument("--budgets", nargs="+", metavar="B", help="which (default: ten, evenly)")
    curve.add_argument("--plot", metavar="FILE", help="draw it (.svg, .png, .pdf)")
    curve.add_argument("--json", action="store_true", help="print one JSON object")
    draw = command("draw", "draw a plan's graphs, or its memory over time", _draw)
    _target(draw, budget=True, plan_file=True)
    draw.add_argument("file", metavar="FILE", help="picture to write (.svg, .png, .pdf, .dot)")
    draw.add_argument("--what", default="chain", help="chain, forward, simplified, block, schedule, "
                      "or memory (default: chain)")
    draw.add_argument("--block", metavar="N", help="number or class of the block")
    report = command("report", "write one HTML page about a plan", _report)
    _target(report, budget=True, plan_file=True)
    report.add_argument("file", metavar="FILE", help="page to write (.html)")
    report.add_argument("--no-curve", action="store_true", help="leave the other budgets out")
    from rkmate.cli import compare as compare_command

    compare_command.add_arguments(command("compare", "every planner at equal budgets", _compare))
    from rkmate.cli.simulate import add_arguments

    simulate = command("simulate", "replay a log of operations under dynamic rematerialization",
                       _simulate, _STATUS)
    add_arguments(simulate)
    return parser


def _target(parser: argparse.ArgumentParser, *, budget: bool, plan_file: bool = False) -> None:
    parser.add_argument("target", metavar="TARGET", help="module:factory, or a demo model"
                        + (", or a saved plan" if plan_file else ""))
    if budget:
        parser.add_argument("--budget", metavar="B", required=not plan_file,
                            help="600MiB, 1.5GB, 50%%, 0.5, auto, or bytes")
    parser.add_argument("--planner", default="rockmate", metavar="NAME",
                        help="how the schedule is found (default: rockmate)")
    parser.add_argument("--device", metavar="D", help="move model and inputs there: cpu, cuda")
    parser.add_argument("--analytic", action="store_true",
                        help="estimate the operations' times instead of measuring them")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def load_target(name: str, device: str | None = None) -> Target:
    """A demo model, or what a factory returns. Raises `ArgumentError`."""
    if name in DEMOS:
        made: Any = make_demo(name)
    else:
        try:
            made = _factory(name)()
        except RkmateError:
            raise
        except Exception as error:
            raise TargetError(name, error) from error
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ArgumentError(f"{name} returned {type(made).__name__}; it should return (model, args) or "
                            "(model, args, kwargs)")
    model, args = made[:2]
    kwargs = made[2] if len(made) == 3 else {}
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
        raise ArgumentError(f"{name} returned args of type {type(args).__name__} and kwargs of type "
                            f"{type(kwargs).__name__}; they should be a tuple and a dict")
    if device is not None:
        model, args, kwargs = _moved(model, tuple(args), kwargs, device)
    return Target(model, tuple(args), kwargs)


def _factory(name: str) -> Callable[[], Any]:
    module, colon, function = name.partition(":")
    if not colon or not module or not function:
        raise ArgumentError(f"target is {name!r}; it should be module:factory, or one of the demo "
                            f"models {', '.join(DEMOS)}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ArgumentError(f"target is {name!r}: no module {module!r} in the current folder or "
                            "installed") from error
    for part in function.split("."):
        if not hasattr(found, part):
            raise ArgumentError(f"target is {name!r}: {module} has no {function!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ArgumentError(f"target is {name!r}: {function} is no function")
    return found  # type: ignore[no-any-return]


def _moved(model: Any, args: Any, kwargs: Any, device: str) -> tuple[Any, Any, Any]:
    import torch
    from torch.utils import _pytree as pytree

    from rkmate import device as devices

    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise ArgumentError(f"device is {device!r}; it should be cpu, cuda or cuda:0") from error
    if not devices.of(where).available():
        raise ArgumentError(f"device is {device!r}, and torch sees no CUDA device here")

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().to(where).requires_grad_(leaf.requires_grad)
        return leaf
    return (model.to(where), *pytree.tree_map(move, (args, kwargs)))


def _options(args: argparse.Namespace) -> dict[str, Any]:
    return {"planner": args.planner, "progress": not args.quiet,
            "costs": "analytic" if args.analytic else "measured"}


def _budget(text: str) -> int | float | str:
    """``1`` is a byte; ``0.5`` and ``1.0`` are fractions."""
    if text.isdigit():
        return int(text)
    return float(text) if _FRACTION.fullmatch(text) else text


_FRACTION = re.compile(r"0?\.\d+|1\.0*")


def _check_files(args: argparse.Namespace) -> None:
    """Planning takes a while: a file that cannot be written is said before."""
    for name in ("file", "save", "source", "plot"):
        folder = Path(getattr(args, name, None) or ".").parent
        if not os.access(folder, os.W_OK):
            raise ArgumentError(f"{name} is {getattr(args, name)!r}; the folder {str(folder)!r} "
                                + ("cannot be written to" if folder.exists() else "does not exist"))


def _plan(args: argparse.Namespace) -> int:
    import rkmate

    target = load_target(args.target, args.device)
    common = {"budget": _budget(args.budget), **_options(args)}
    if args.source:
        wrapped = rkmate.wrap(target.model, target.args, target.kwargs, **common)
        made = wrapped.plan
        Path(args.source).write_text(wrapped.source, encoding="utf-8")
    else:
        made = rkmate.plan(target.model, target.args, target.kwargs, **common)
    if args.save:
        made.save(args.save)
    if args.json:
        print(json.dumps(_as_json(made) | ({"explanation": made.explain()} if args.explain else {})))
    else:
        print(made)
        if args.explain:
            print(f"\n{made.explain()}")
    return 0


def _as_json(plan: Plan) -> dict[str, Any]:
    return {"planner": plan.planner, "budget_bytes": plan.budget_bytes, "peak_bytes": plan.peak_bytes,
            "baseline_peak_bytes": plan.baseline_peak_bytes, "minimum_bytes": plan.minimum_bytes,
            "step_seconds": plan.step_seconds, "baseline_seconds": plan.baseline_seconds,
            "bound_seconds": plan.bound_seconds,
            "overhead": plan.overhead, "blocks": [vars(b) for b in plan.blocks],
            "stage_seconds": dict(plan.stage_seconds), "nodes": dict(plan.nodes), "note": plan.note}


def _curve(args: argparse.Namespace) -> int:
    import rkmate
    from rkmate.show.plots import check_suffix

    if args.plot:
        check_suffix(args.plot)
    target = load_target(args.target, args.device)
    budgets = None if args.budgets is None else [_budget(b) for b in args.budgets]
    curve = rkmate.tradeoff(target.model, target.args, target.kwargs, budgets=budgets,
                            **_options(args))
    if args.plot:
        curve.plot(args.plot)
    print(json.dumps([_as_json(p) for p in curve]) if args.json else curve)
    return 0


def _read_or_make(args: argparse.Namespace, source: bool) -> tuple[Plan, Target | None]:
    """The plan of a file, or a plan for a model."""
    import rkmate

    if args.target.endswith(".json"):
        if args.budget is not None:
            raise ArgumentError("a saved plan has its budget: leave --budget out")
        return Plan.load(args.target), None
    if args.budget is None:
        raise ArgumentError("give a --budget, or the file of a saved plan as TARGET")
    target = load_target(args.target, args.device)
    common = {"budget": _budget(args.budget), **_options(args)}
    if source:
        return rkmate.wrap(target.model, target.args, target.kwargs, **common).plan, target
    return rkmate.plan(target.model, target.args, target.kwargs, **common), target


def _draw(args: argparse.Namespace) -> int:
    from rkmate.show.draw import check
    from rkmate.show.plots import check_suffix

    if args.what == "memory":
        check_suffix(args.file)
    else:
        check(args.file, args.what, args.block)
    plan, _ = _read_or_make(args, source=False)
    if args.what == "memory":
        plan.plot(args.file)
        print(args.file)
    else:
        print(plan.draw(args.file, args.what, args.block))
    return 0


def _report(args: argparse.Namespace) -> int:
    import rkmate

    plan, target = _read_or_make(args, source=True)
    curve: Sequence[Plan] = ()
    if target is not None and not args.no_curve:
        curve = rkmate.tradeoff(target.model, target.args, target.kwargs, **_options(args))
    print(plan.report(args.file, curve=curve))
    return 0


def _compare(args: argparse.Namespace) -> int:
    from rkmate.cli.compare import run

    if args.budgets is not None:
        args.budgets = [f"{100 * b}%" if isinstance(b := _budget(text), float) else text
                        for text in args.budgets]
    return run(args, load_target)


def _simulate(args: argparse.Namespace) -> int:
    from rkmate.cli.simulate import run

    return run(args)


if __name__ == "__main__":
    sys.exit(main())
