"""The house in one table: each folder of the package (and each module that stands loose in it), what it
is, and what it may import. Rows stand in the order of imports: none imports a row below it.

``python -m tests.house`` writes it into CONTRIBUTING.md and docs/house.md; the tests hold the package and
both pages against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "rkmate"
ALL = ("all above",)


@dataclass(frozen=True)
class Room:
    """A folder, or a loose module."""

    name: str
    """Its path in the package, without ``.py``."""
    about: str
    imports: tuple[str, ...] = ALL
    """The rows that it may import, itself left out."""
    torch: bool = True
    """Whether it may import torch."""


_BASE = ("errors", "support", "ir")
_SEAM = ("torch_seam", "torch_seam/patches")
_GRAPH = ("graph/capture", "graph/ops", "graph/passes", "graph/blocks")

HOUSE: tuple[Room, ...] = (
    Room("errors", "every error and warning that is raised on purpose", (), torch=False),
    Room("budget", "budgets as people write them", ("errors",), torch=False),
    Room("support", "progress, warnings, locks, names that load on first use", ("errors",), torch=False),
    Room("ir", "the values between stages: graph, schedule and simulator, options and chain, plan data",
         ("errors", "support"), torch=False),
    Room("devices", "published figures of GPUs, to plan for one that is not here", ("errors",), torch=False),
    Room("torch_seam", "everything that is not torch's documented API, by subject", ("errors", "support")),
    Room("device", "what differs from device to device, as a type", (*_BASE, "devices", "torch_seam")),
    Room("stand_in", "a module that stands in the place of another", ("errors", "torch_seam")),
    Room("torch_seam/patches", "replacements of torch's and libraries' functions while a model is captured",
         (*_BASE, "devices", "torch_seam", "device")),
    Room("graph/capture", "a module as one graph of forward and backward; what is refused",
         (*_BASE, "devices", "device", *_SEAM)),
    Room("graph/sizes", "a captured graph at other sizes of its call",
         (*_BASE, "device", *_SEAM, "graph/capture")),
    Room("graph/ops", "the package's own operators, each with a record of what is known about it",
         (*_BASE, "device", *_SEAM)),
    Room("graph/passes", "rewritings of the captured graph, in one ordered table",
         (*_BASE, "device", *_SEAM, *_GRAPH[:2])),
    Room("graph/blocks", "the graph of computations and data, cut into blocks, equal ones found",
         (*_BASE, "device", *_SEAM, *_GRAPH[:3])),
    Room("measure", "time and memory of each operation, of a call, of a step",
         (*_BASE, "devices", "device", *_SEAM, *_GRAPH)),
    Room("ilp", "options of one block: integer programs and a heuristic", _BASE, torch=False),
    Room("rotor", "dynamic programs over the chain of blocks", _BASE, torch=False),
    Room("planners", "every way to find a schedule, behind one protocol", (*_BASE, "ilp", "rotor"),
         torch=False),
    Room("show", "a plan in words, pictures and pages", _BASE, torch=False),
    Room("pipeline", "the order of the stages, from a module to a plan"),
    Room("codegen", "a schedule as Python source", (*_BASE, "device", *_SEAM, *_GRAPH)),
    Room("runtime", "a wrapped module at work: guards, cache of plans, autograd segments"),
    Room("settings", "the options of all public calls, declared once, and what a call makes of them",
         ("errors", "support", "pipeline")),
    Room("api", "the public calls `wrap`, `apply`, `plan`, `tradeoff`, `max_batch_size`, `shared_plan`"),
    Room("integrations", "budgets inside of the libraries that people train with"),
    Room("comparison", "every planner on one model at equal budgets"),
    Room("compile", 'the backend of `torch.compile(backend="rkmate")`',
         ("errors", "runtime", "settings", "api")),
    Room("dtr", "dynamic rematerialization, without a plan: a path of its own",
         ("errors", "budget", "support", "devices", "torch_seam", "device", "stand_in", "measure")),
    Room("__init__", "the public names, loaded on first use"),
    Room("cli", "the command `rkmate`"),
)


def may_import(room: Room) -> tuple[str, ...]:
    """The names of the rows that a room may import."""
    if room.imports != ALL:
        return room.imports
    names = [r.name for r in HOUSE]
    return tuple(names[:names.index(room.name)])


def room_of(module: str) -> str:
    """The row of a module by its full name: ``graph/blocks`` of ``rkmate.graph.blocks.cut``."""
    parts = module.split(".")[1:]
    for n in (2, 1):
        if "/".join(parts[:n]) in (r.name for r in HOUSE):
            return "/".join(parts[:n])
    return "/".join(parts) or "__init__"


def imports_table() -> str:
    """What may import what, as a table of Markdown."""
    rows = ["| in `rkmate/` | may import | torch |", "|---|---|---|"]
    for r in HOUSE:
        imports = "all above" if r.imports == ALL else ", ".join(f"`{i}`" for i in r.imports) or "nothing"
        rows.append(f"| {_shown(r)} | {imports} | {'yes' if r.torch else 'no'} |")
    return "\n".join(rows)


def rooms() -> str:
    """What is where, as a list of Markdown."""
    return "\n".join(f"- {_shown(r)}: {r.about}" for r in HOUSE)


def _shown(room: Room) -> str:
    return f"`{room.name}.py`" if room.name in LOOSE else f"`{room.name}/`"


LOOSE = ("errors", "budget", "devices", "stand_in", "settings", "api", "compile", "__init__")
"""Modules that stand loose in the package; all else is in folders."""
PAGES = {ROOT / "CONTRIBUTING.md": imports_table, ROOT / "docs" / "house.md": rooms}
"""Each page, and what of the house it shows."""
_BEGIN, _END = "<!-- the house: python -m tests.house -->\n", "\n<!-- end of the house -->"


def up_to_date(page: Path) -> str:
    """A page's text with the house as it is now."""
    head, rest = page.read_text(encoding="utf-8").split(_BEGIN)
    return f"{head}{_BEGIN}{PAGES[page]()}{_END}{rest.split(_END)[1]}"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(up_to_date(page), encoding="utf-8")
