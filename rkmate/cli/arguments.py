"""The arguments that several commands take."""

from __future__ import annotations

import argparse
import ast
import os
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rkmate.devices import NAMES, known
from rkmate.errors import ArgumentError
from rkmate.settings import option_docs
from rkmate.support.defaults import DEFAULT_PLANNER

if TYPE_CHECKING:
    from rkmate.pipeline.settings import Settings
    from rkmate.settings import Options


def add_target(parser: argparse.ArgumentParser, *, budget: bool, plan_file: bool = False,
               optional: bool = False) -> None:
    """Declare a target and how it is planned; `budget`: for one budget; `plan_file`: a saved plan will
    do; `optional`: the command works without a target, too."""
    parser.add_argument("target", metavar="TARGET", nargs="?" if optional else None,
                        help="module:factory, file.py:factory, or a demo model" +
                         (", or a saved plan" if plan_file else ""))
    if budget:
        parser.add_argument("--budget", metavar="B", required=not plan_file,
                            help="600MiB, 1.5GB, 50%%, 0.5, auto, or bytes")
    parser.add_argument("--planner", default=DEFAULT_PLANNER, metavar="NAME",
                        help=f"how the schedule is found (default: {DEFAULT_PLANNER})")
    parser.add_argument("--device", metavar="D", help="move model and inputs there: cpu, cuda; for plan and "
                        f"curve also a GPU that is not here: {', '.join(NAMES)}")
    add_options(parser)


_FLAGS: dict[str, dict[str, Any]] = {
    "calls": {"type": int, "metavar": "N"},
    "compile": {"default": "no", "choices": ("yes", "no", "auto"),
                "more": "; auto: where a compiler is installed (default: no)"},
    "offload": {"metavar": "PLACE", "more": ": a folder on a disk, or host: the host's memory, for a model "
                "on a GPU (default: none)"}}
"""Command-line forms of `Options`. Their help begins with the first sentence of the declaration."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare `Options`, and what people set most often in `rkmate.Settings`."""
    for name, how in _FLAGS.items():
        about = option_docs()[name].split(". ")[0].rstrip(".").replace("`", "").replace("%", "%%")
        parser.add_argument(f"--{name}", help=about[0].lower() + about[1:] + how.get("more", ""),
                            **{k: v for k, v in how.items() if k != "more"})
    parser.add_argument("--offload-bytes", metavar="B", help="how much may be there at once: 20GiB, or bytes")
    parser.add_argument("--analytic", action="store_true",
                        help="estimate the operations' times instead of measuring them")
    parser.add_argument("--gradients", choices=("returned", "in_place"), default="returned",
                        help="hand gradients of parameters to autograd, or add them to those in .grad "
                        "(default: returned)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE",
                        help="another field of rkmate.Settings, as often as you like: tiles=never, "
                        "planning_seconds=20, planner.slots=200")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def planning_options(args: argparse.Namespace) -> Options:
    """Return the options of `rkmate.plan` and its like that a command line says. Raises `ArgumentError`."""
    from rkmate.offload.target import offload_of
    from rkmate.pipeline.settings import Settings

    most = None if args.offload_bytes is None else budget_of(args.offload_bytes)
    return {"calls": args.calls, "compile": "auto" if args.compile == "auto" else args.compile == "yes",
            "offload": offload_of(args.offload, most), "progress": not args.quiet,
            "settings": with_fields(
                Settings(costs="analytic" if args.analytic else "measured", gradients=args.gradients,
                         planner=getattr(args, "planner", None)), args.set)}


def with_fields(settings: Settings, given: Sequence[str]) -> Settings:
    """Return settings with fields from text like ``tiles=never`` or ``planner.slots=200``. A value is a
    Python literal, or else text. Raises `ArgumentError`."""
    for text in given:
        path, equals, value = text.partition("=")
        if not equals:
            raise ArgumentError(f"--set is {text!r}; it should be NAME=VALUE, such as tiles=never")
        if path.startswith("planner."):
            settings = replace(settings, planner=replace(settings.of_planner, name=settings.planner_name))
        settings = _with_field(settings, path.split("."), value, path)
    return settings


def _with_field(of: Any, path: Sequence[str], value: str, whole: str) -> Any:
    """Return a copy of a dataclass in which the field at a path has another value."""
    names = [field.name for field in fields(of)] if is_dataclass(of) else []
    if path[0] not in names:
        raise ArgumentError(f"--set is {whole}=...: rkmate.{type(of).__name__} has no field {path[0]!r}, but "
                            f"{', '.join(names)}" if names else
                            f"--set is {whole}=...: what stands before {path[0]!r} has no fields")
    if len(path) > 1:
        return replace(of, **{path[0]: _with_field(getattr(of, path[0]), path[1:], value, whole)})
    try:
        found = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        found = value
    return replace(of, **{path[0]: found})


def elsewhere_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword argument of `rkmate.plan` and `rkmate.tradeoff` for a GPU that is not here; nothing
    for a device that the model is moved to. Raises `ArgumentError`."""
    if args.device is None or known(args.device) is None:
        return {}
    if getattr(args, "source", None):
        raise ArgumentError(f"device is {args.device!r}, a GPU of another machine: --source needs the "
                            "model on the GPU")
    return {"device": args.device}


def mesh_sizes(text: str) -> dict[str, int]:
    """Return the sizes of a mesh's dimensions from text like ``dp=8,tp=2``. Raises `ArgumentError`."""
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, ranks = part.strip().partition("=")
        if not name.isidentifier() or not ranks.isdecimal() or name in found:
            raise ArgumentError(f"mesh is {text!r}; it should be names and numbers of ranks, such as "
                                "dp=8,tp=2 or shard=8")
        found[name] = int(ranks)
    return found


def budget_of(text: str) -> int | str:
    """Return a budget from text: ``1`` is a byte; ``0.5``, ``50%`` and ``1.5GB`` stay text, which
    `rkmate.wrap` takes."""
    return int(text) if text.isdecimal() else text


def check_files(args: argparse.Namespace) -> None:
    """Raise `ArgumentError` for a file that cannot be written, before planning starts."""
    for name in ("file", "save", "source", "plot"):
        folder = Path(getattr(args, name, None) or ".").parent
        if not os.access(folder, os.W_OK):
            raise ArgumentError(f"{name} is {getattr(args, name)!r}; the folder {str(folder)!r} "
                                + ("cannot be written to" if folder.exists() else "does not exist"))
