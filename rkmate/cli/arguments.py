"""The arguments that several commands take."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, Literal

from rkmate.devices import NAMES, known
from rkmate.errors import ArgumentError


def add_target(parser: argparse.ArgumentParser, *, budget: bool, plan_file: bool = False) -> None:
    """Declare a target and how it is planned; `budget`: for one budget; `plan_file`: a saved plan will
    do."""
    parser.add_argument("target", metavar="TARGET", help="module:factory, or a demo model"
                        + (", or a saved plan" if plan_file else ""))
    if budget:
        parser.add_argument("--budget", metavar="B", required=not plan_file,
                            help="600MiB, 1.5GB, 50%%, 0.5, auto, or bytes")
    parser.add_argument("--planner", default="rockmate", metavar="NAME",
                        help="how the schedule is found (default: rockmate)")
    parser.add_argument("--device", metavar="D", help="move model and inputs there: cpu, cuda; for plan and "
                        f"curve also a GPU that is not here: {', '.join(NAMES)}")
    parser.add_argument("--analytic", action="store_true",
                        help="estimate the operations' times instead of measuring them")
    add_gradients(parser)
    add_compile(parser)
    add_offload(parser)
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def add_gradients(parser: argparse.ArgumentParser) -> None:
    """Declare how parameters get their gradients."""
    parser.add_argument("--gradients", choices=("returned", "in_place"),
                        help="hand gradients of parameters to autograd, or add them to what stands in .grad "
                        "(default: returned)")


def add_compile(parser: argparse.ArgumentParser) -> None:
    """Declare whether groups of operations are compiled."""
    parser.add_argument("--compile", default="no", choices=("yes", "no", "auto"),
                        help="compile groups of operations into kernels of their own; auto: where a compiler "
                        "is installed (default: no)")


def add_offload(parser: argparse.ArgumentParser) -> None:
    """Declare where data may be sent while a step computes."""
    parser.add_argument("--offload", metavar="PLACE", help="a folder on a disk to which a step may send data "
                        "while it computes, or host: the host's memory, for a model on a GPU (default: none)")
    parser.add_argument("--offload-bytes", metavar="B", help="how much may be there at once: 20GiB, or bytes")


def offload_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return where to send data, as keyword arguments of `rkmate.wrap`."""
    most = args.offload_bytes
    return {"offload": args.offload, "offload_bytes": None if most is None else budget_of(most)}


def compile_of(args: argparse.Namespace) -> bool | Literal["auto"]:
    """Return whether to compile, as `rkmate.wrap` takes it."""
    return "auto" if args.compile == "auto" else args.compile == "yes"


def planning_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `rkmate.plan` and its like, without the budget."""
    return {"planner": args.planner, "progress": not args.quiet,
            "costs": "analytic" if args.analytic else "measured", "gradients": args.gradients,
            "compile": compile_of(args), **offload_options(args)}


def elsewhere_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword argument of `rkmate.plan` and `rkmate.tradeoff` for a GPU that is not here, with costs that
    need none; nothing for a device that the model is moved to. Raises `ArgumentError`."""
    if args.device is None or known(args.device) is None:
        return {}
    if getattr(args, "source", None):
        raise ArgumentError(f"device is {args.device!r}, a GPU that is not here: --source is for one that "
                            "the model is on")
    return {"device": args.device, "costs": None}


def budget_of(text: str) -> int | str:
    """``1`` is a byte; ``0.5``, ``50%`` and ``1.5GB`` are text as `rkmate.wrap` takes it."""
    return int(text) if text.isdecimal() else text


def check_files(args: argparse.Namespace) -> None:
    """Planning takes a while: a file that cannot be written is said before."""
    for name in ("file", "save", "source", "plot"):
        folder = Path(getattr(args, name, None) or ".").parent
        if not os.access(folder, os.W_OK):
            raise ArgumentError(f"{name} is {getattr(args, name)!r}; the folder {str(folder)!r} "
                                + ("cannot be written to" if folder.exists() else "does not exist"))
