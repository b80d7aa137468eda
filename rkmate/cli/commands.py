"""Commands on a model (doctor, check, plan, curve, draw, report, compare), each of which loads torch when it
runs; and `simulate`, on a log of operations."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rkmate.cli.arguments import (
    add_options,
    add_target,
    budget_of,
    elsewhere_options,
    mesh_sizes,
    planning_options,
)
from rkmate.cli.targets import Target, load_target
from rkmate.dtr.heuristics import HEURISTICS
from rkmate.dtr.log import read_log
from rkmate.dtr.simulator import simulate
from rkmate.errors import ArgumentError, RkmateError
from rkmate.ir.plan import PlanData
from rkmate.show.copies import copies_of
from rkmate.show.replay import replay

if TYPE_CHECKING:
    from rkmate.show.plan import Plan


def add_doctor_arguments(doctor: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``doctor``."""
    add_target(doctor, budget=False, optional=True)
    doctor.add_argument("--json", action="store_true", help="print one JSON object")


def run_doctor(args: argparse.Namespace) -> int:
    """Look at the machine, and at a model if one is named. Returns the exit status: 0 if all is well, 1 if
    something is broken here, 4 if the model cannot be planned as a whole."""
    from rkmate.diagnosis import machine as here

    if args.target is not None and elsewhere_options(args):
        raise ArgumentError(f"device is {args.device!r}: doctor looks at this machine; rkmate plan and "
                            "rkmate curve take a GPU that is not here")
    target = None if args.target is None else load_target(args.target, args.device)
    machine = []
    for finding in here.findings(None if args.offload in (None, "host") else args.offload):
        machine.append(finding)
        if not args.json:
            print(finding, flush=True)
    found: Any = None
    if target is not None:
        from rkmate.diagnosis.model import doctor, of_model
        from rkmate.settings import chosen

        found = of_model(tuple(machine), target.model, target.args, target.kwargs, None, (),
                         chosen(planning_options(args), doctor))
    if args.json:
        content: dict[str, Any] = {"machine": [vars(f) for f in machine]}
        if found is not None:
            content |= {"model": found.model, "error": None if found.error is None else str(found.error),
                        "parts": [vars(p) for p in found.parts], "advice": found.advice,
                        "curve": [as_json(p) for p in found.curve or ()]}
        print(json.dumps(content))
    elif found is not None:
        print(f"\n{found.about_model}")
    return 4 if found is not None and found.error is not None else 1 if here.problems(machine) else 0


def add_check_arguments(check: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``check``."""
    add_target(check, budget=True)
    check.add_argument("--steps", type=int, metavar="N", help="how many steps to train (default: 20)")
    check.add_argument("--json", action="store_true", help="print one JSON object")


def run_check(args: argparse.Namespace) -> int:
    """Train plain and planned, and print. Returns the exit status: 1 if the planned run is over budget."""
    import rkmate
    from rkmate.comparison.parity import STEPS

    if elsewhere_options(args):
        raise ArgumentError(f"device is {args.device!r}: check trains the model on this machine")
    target = load_target(args.target, args.device)
    found = rkmate.check(target.model, target.args, target.kwargs, budget=budget_of(args.budget),
                         steps=STEPS if args.steps is None else args.steps, **planning_options(args))
    if args.json:
        values = {k: vars(v) for k, v in vars(found).items() if hasattr(v, "__dict__") and k != "plan"}
        print(json.dumps(vars(found) | values | {"plan": as_json(found.plan), "same_bits": found.same_bits,
                                                 "within_budget": found.within_budget}))
    else:
        print(found)
    return 0 if found.within_budget else 1


def add_plan_arguments(plan: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``plan``."""
    add_target(plan, budget=True)
    plan.add_argument("--save", metavar="FILE", help="write the plan, for rkmate.wrap(plan=...)")
    plan.add_argument("--source", metavar="FILE", help="write the generated Python")
    plan.add_argument("--mesh", metavar="DIMS", help="plan for one of several GPUs that are not here: "
                      "shard=8 shards the model, dp=4,shard=8 has replicas of shards; the target makes use "
                      "of other dimensions (dp=8,tp=2): it is a function of the mesh")
    plan.add_argument("--explain", action="store_true", help="explain it in sentences too")
    plan.add_argument("--json", action="store_true", help="print one JSON object")


def run_plan(args: argparse.Namespace) -> int:
    """Plan, write and print; returns the exit status 0."""
    there = elsewhere_options(args)
    if args.mesh is None:
        return _print_plan(args, load_target(args.target, None if there else args.device), None)
    if not there:
        raise ArgumentError(f"mesh is {args.mesh!r}, and device is {args.device!r}; it should be a GPU that "
                            "is not here, such as h100")
    from rkmate.distributed.meshes import fake_mesh, sharded_over

    with fake_mesh(**mesh_sizes(args.mesh)) as mesh:
        target = load_target(args.target, None, mesh)
        sharded_over(target.model, mesh)
        return _print_plan(args, target, mesh)


def _print_plan(args: argparse.Namespace, target: Target, mesh: Any) -> int:
    import rkmate

    there = elsewhere_options(args)
    budget, options = budget_of(args.budget), planning_options(args)
    if args.source:
        wrapped = rkmate.wrap(target.model, target.args, target.kwargs, budget=budget, **options)
        made = wrapped.plan
        Path(args.source).write_text(wrapped.source, encoding="utf-8")
    else:
        made = rkmate.plan(target.model, target.args, target.kwargs, budget=budget, **options, **there)
    if args.save:
        made.save(args.save)
    rank = None if mesh is None else rkmate.distributed.estimate(made, target.model, mesh, args.device)
    if args.json:
        explained = {"explanation": made.explain()} if args.explain else {}
        of_rank = {} if rank is None else {"rank": vars(rank) | {"total_bytes": rank.total_bytes}}
        print(json.dumps(as_json(made) | explained | of_rank))
    else:
        print(made if rank is None else f"{made}\n\n{rank}")
        if args.explain:
            print(f"\n{made.explain()}")
    return 0


def as_json(plan: PlanData) -> dict[str, Any]:
    """Return the figures of a plan, as ``--json`` prints them. Bytes and seconds."""
    copies = copies_of(replay(plan)) if plan.graph.cd.link is not None else None
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


def add_curve_arguments(curve: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``curve``."""
    add_target(curve, budget=False)
    curve.add_argument("--budgets", nargs="+", metavar="B", help="which (default: ten, evenly)")
    curve.add_argument("--plot", metavar="FILE", help="draw it (.svg, .png, .pdf)")
    curve.add_argument("--json", action="store_true", help="print one JSON object")


def run_curve(args: argparse.Namespace) -> int:
    """Plan, draw and print; returns the exit status 0."""
    import rkmate
    from rkmate.show.plots import check_suffix

    if args.plot:
        check_suffix(args.plot)
    there = elsewhere_options(args)
    target = load_target(args.target, None if there else args.device)
    budgets = None if args.budgets is None else [budget_of(b) for b in args.budgets]
    curve = rkmate.tradeoff(target.model, target.args, target.kwargs, budgets=budgets,
                            **planning_options(args), **there)
    if args.plot:
        curve.plot(args.plot)
    print(json.dumps([as_json(p) for p in curve]) if args.json else curve)
    return 0


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
    """Return the plan of a file, or a plan for a model."""
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


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``compare``."""
    parser.add_argument("target", metavar="TARGET", help="module:factory, file.py:factory, or a demo model")
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


def run_compare(args: argparse.Namespace) -> int:
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


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``simulate``."""
    parser.add_argument("log", metavar="LOG", help="file of operations, one JSON object a line")
    parser.add_argument("--heuristic", default="dtr-eq", metavar="NAME",
                        help=f"one of {', '.join(HEURISTICS)} (default: dtr-eq)")
    limit = parser.add_mutually_exclusive_group(required=True)
    limit.add_argument("--ratio", type=float, help="budget as a fraction of the log's own peak")
    limit.add_argument("--budget", type=int, metavar="BYTES", help="budget in bytes")
    parser.add_argument("--seed", type=int, default=0, help="for the random heuristic (default: 0)")
    parser.add_argument("--overhead-limit", type=float, default=10.0, metavar="X",
                        help="stop as thrash when total time would exceed X times the program's "
                        "(default: 10)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for errors too")


def run_simulate(args: argparse.Namespace) -> int:
    """Replay a log of tensor operations under a heuristic and a budget. Returns the exit status: 0, or 2 for
    bad input.

    Running out of memory and thrashing are results, not failures.
    """
    try:
        program = read_log(args.log)
        if args.ratio is not None and not 0 <= args.ratio < math.inf:
            raise ArgumentError(f"--ratio must be a number from 0 up, and is {args.ratio}")
        budget = args.budget if args.ratio is None else int(program.memory * args.ratio)
        result = simulate(program, args.heuristic, budget, overhead_limit=args.overhead_limit, seed=args.seed)
    except (RkmateError, OSError, ValueError) as error:
        message = f"{args.log}: {error}"
        if args.json:
            print(json.dumps({"error": type(error).__name__, "message": message}))
        else:
            print(f"rkmate simulate: {message}", file=sys.stderr)
        return 2
    answer = {**result.as_dict(), "overhead": result.clock / program.compute if program.compute else None,
              "baseline_memory": program.memory, "baseline_compute": program.compute}
    if args.json:
        print(json.dumps(answer))
    else:
        width = max(map(len, answer))
        for name, value in answer.items():
            print(f"{name:<{width}}  {value}")
    return 0
