"""The package layout as one table: each folder of the package and each loose module, what it is, and what it
may import. Rows are in the order of imports: no row imports a row below it.

``python -m tests.house`` writes the table into CONTRIBUTING.md and docs/package-layout.md. Tests compare the
package and both pages with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "rkmate"
ALL = ("all above",)


@dataclass(frozen=True)
class Room:
    """A folder of the package, or a module directly in it."""

    name: str
    """Its path in the package, without ``.py``."""
    about: str
    imports: tuple[str, ...] = ALL
    """The rows that it may import, without itself."""
    torch: bool = True
    """Whether it may import torch."""


_BASE = ("errors", "support", "ir")
_SEAM = ("torch_seam", "torch_seam/patches")
_GRAPH = ("graph/ops", "graph/capture", "graph/passes", "graph/blocks")

HOUSE: tuple[Room, ...] = (
    Room("errors", "all errors and warnings that rkmate raises", (), torch=False),
    Room("budget", "budgets as people write them", ("errors",), torch=False),
    Room("support", "progress, warnings, locks, names that load on first use", ("errors",), torch=False),
    Room("ir", "the values between stages: graph, schedule and simulator, options and chain, plan data",
         ("errors", "support"), torch=False),
    Room("devices", "published figures of GPUs, to plan for another machine's GPU", ("errors",), torch=False),
    Room("torch_seam", "everything outside of torch's documented API, by subject", ("errors", "support")),
    Room("offload", "copies data out of a device's memory while it computes, to the host or a disk, and back",
         (*_BASE, "torch_seam")),
    Room("device", "the differences between devices, behind one protocol",
         (*_BASE, "devices", "torch_seam", "offload")),
    Room("stand_in", "the base class of modules that replace another module", ("errors", "torch_seam")),
    Room("torch_seam/patches", "replacements for functions of torch and other libraries during a capture",
         (*_BASE, "devices", "torch_seam", "device")),
    Room("graph/ops", "the package's own operators, one record for each, and properties of all operators",
         (*_BASE, "device", *_SEAM)),
    Room("graph/capture", "captures a module as one graph of forward and backward, or refuses it",
         (*_BASE, "devices", "device", *_SEAM, "graph/ops")),
    Room("graph/sizes",
         "finds the graph of an equal call again, derives that of another size or depth",
         (*_BASE, "device", *_SEAM, *_GRAPH[:2])),
    Room("graph/passes", "rewrites of the captured graph, in one ordered table",
         (*_BASE, "device", *_SEAM, *_GRAPH[:2])),
    Room("graph/blocks", "cuts the graph of computations and data into blocks, and finds equal blocks",
         (*_BASE, "device", *_SEAM, *_GRAPH[:3])),
    Room("measure", "time and memory of an operation, a call, a step",
         (*_BASE, "devices", "device", *_SEAM, *_GRAPH)),
    Room("ilp", "options of a block: integer programs and a heuristic", _BASE, torch=False),
    Room("offload/target", "where data may be sent: the user's choice, and how fast copies to it are",
         (*_BASE, "budget", "devices", "offload", "device", "ilp")),
    Room("rotor", "dynamic programs over the chain of blocks", _BASE, torch=False),
    Room("planners", "all planners, behind one protocol", (*_BASE, "ilp", "rotor"),
         torch=False),
    Room("show", "a plan in words, pictures and pages", _BASE, torch=False),
    Room("pipeline", "calls the stages in order, from a module to a plan"),
    Room("codegen", "writes a schedule as Python source", (*_BASE, "device", *_SEAM, *_GRAPH)),
    Room("runtime", "runs a wrapped module: guards, cache of plans, autograd segments"),
    Room("parts", "several plans within one budget: parts of a model, sharded layers"),
    Room("settings", "the options of all public calls, declared once, and how a call reads them",
         ("errors", "support", "offload/target", "pipeline")),
    Room("api", "the public calls `wrap`, `apply`, `plan`, `tradeoff`, `max_batch_size`, `shared_plan`"),
    Room("distributed",
         "shards a model's parameters over ranks, and plans for a rank of a mesh that is not here",
         (*_BASE, "devices", "torch_seam", "show", "pipeline")),
    Room("integrations", "callbacks for training libraries"),
    Room("comparison", "compares all planners on one model at equal budgets"),
    Room("diagnosis", "`doctor`: what works on a machine, and what a model's budgets cost"),
    Room("compile", 'the backend of `torch.compile(backend="rkmate")`: one budget for the graphs of a step'),
    Room("dtr", "dynamic rematerialization, without a plan: a separate path",
         ("errors", "budget", "support", "devices", "torch_seam", "device", "graph/ops", "stand_in",
          "measure")),
    Room("__init__", "the public names, loaded on first use"),
    Room("cli", "the command `rkmate`"),
    Room("__main__", "the same command as `python -m rkmate`", ("cli",)),
)


def may_import(room: Room) -> tuple[str, ...]:
    """Return the names of the rows that a row may import."""
    if room.imports != ALL:
        return room.imports
    names = [r.name for r in HOUSE]
    return tuple(names[:names.index(room.name)])


def room_of(module: str) -> str:
    """Return the name of a module's row: ``graph/blocks`` for ``rkmate.graph.blocks.cut``."""
    parts = module.split(".")[1:]
    for n in (2, 1):
        if "/".join(parts[:n]) in (r.name for r in HOUSE):
            return "/".join(parts[:n])
    return "/".join(parts) or "__init__"


def imports_table() -> str:
    """Return the table of imports in Markdown."""
    rows = ["| in `rkmate/` | may import | torch |", "|---|---|---|"]
    for r in HOUSE:
        imports = "all above" if r.imports == ALL else ", ".join(f"`{i}`" for i in r.imports) or "nothing"
        rows.append(f"| {_shown(r)} | {imports} | {'yes' if r.torch else 'no'} |")
    return "\n".join(rows)


def rooms() -> str:
    """Return the list of rows in Markdown."""
    return "\n".join(f"- {_shown(r)}: {r.about}" for r in HOUSE)


def _shown(room: Room) -> str:
    return f"`{room.name}.py`" if (PACKAGE / f"{room.name}.py").exists() else f"`{room.name}/`"


LOOSE = ("errors", "budget", "devices", "stand_in", "settings", "api", "compile", "__init__", "__main__")
"""Modules directly in the package; everything else is in folders."""
PAGES = {ROOT / "CONTRIBUTING.md": imports_table, ROOT / "docs" / "package-layout.md": rooms}
"""Each page, and the function that writes its part."""
_BEGIN, _END = "<!-- packages: python -m tests.house -->\n", "\n<!-- end of packages -->"


def up_to_date(page: Path) -> str:
    """Return the text of a page with its current part of the table."""
    head, rest = page.read_text(encoding="utf-8").split(_BEGIN)
    return f"{head}{_BEGIN}{PAGES[page]()}{_END}{rest.split(_END)[1]}"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(up_to_date(page), encoding="utf-8")
