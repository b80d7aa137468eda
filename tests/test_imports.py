"""Imports go only downwards, never in a circle; torch is loaded only by rows that may."""

from __future__ import annotations

import ast
import importlib
import json
import operator
import pkgutil
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

import rkmate
from tests.conftest import DURATIONS
from tests.house import HOUSE, LOOSE, PACKAGE, PAGES, Room, may_import, room_of, up_to_date

LOG = Path(__file__).parent / "dtr" / "data" / "logs" / "lin_unit_16.log"
NO_TORCH = [r.name for r in HOUSE if not r.torch]


@cache
def sources() -> dict[str, Path]:
    """The package's modules by their full names."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def tree_of(module: str) -> ast.Module:
    """The tree of a module, which nothing keeps: those of the package are a million objects."""
    return ast.parse(sources()[module].read_text(encoding="utf-8"))


@cache
def imports(module: str) -> tuple[str, ...]:
    """What a module imports of the package: anywhere in it, inside functions and for types too."""
    found: list[str] = []
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] == "rkmate"]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} has a relative import"
            home = node.module or ""
            if home.split(".")[0] == "rkmate":
                found += [f"{home}.{a.name}" if f"{home}.{a.name}" in sources() else home for a in node.names]
    return tuple(found)


def test_every_module_has_its_room() -> None:
    names = [r.name for r in HOUSE]
    assert {room_of(m) for m in sources()} - {"graph"} <= set(names)
    assert not imports("rkmate.graph")
    loose = {p.stem for p in PACKAGE.glob("*.py")}
    assert loose == set(LOOSE) <= set(names) and len(loose) <= 9
    for place, room in enumerate(HOUSE):
        assert set(may_import(room)) <= set(names[:place]), f"{room.name} may import what stands below it"


@pytest.mark.parametrize("room", HOUSE, ids=lambda r: r.name)
def test_imports_go_downwards(room: Room) -> None:
    allowed = {room.name, *may_import(room)}
    wrong = [f"{module} imports {target}" for module in sources() if room_of(module) == room.name
             for target in imports(module) if room_of(target) not in allowed]
    assert not wrong


def test_no_circles() -> None:
    graph = nx.DiGraph([(m, target) for m in sources() for target in imports(m)])
    circles = [sorted(c) for c in nx.strongly_connected_components(graph) if len(c) > 1]
    assert not circles
    assert not list(nx.selfloop_edges(graph))


def fresh(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          cwd=PACKAGE.parent, check=False)
    assert done.returncode == 0, done.stderr


def test_planning_on_numbers_loads_no_torch() -> None:
    modules = [m for m in sources() if room_of(m) in NO_TORCH or m == "rkmate"]
    fresh(f"import importlib, sys\nfor name in {modules!r}:\n"
          "    importlib.import_module(name)\n"
          "    assert 'torch' not in sys.modules, f'{name} loads torch'")


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["plan", "--help"],
                                       ["simulate", str(LOG), "--ratio", "0.5"]], ids=lambda a: a[0])
def test_commands_without_a_model_load_no_torch(arguments: list[str]) -> None:
    fresh("import sys\nfrom rkmate.cli.main import main\n"
          f"try:\n    status = main({arguments!r})\nexcept SystemExit as done:\n    status = done.code\n"
          "assert status == 0\nassert 'torch' not in sys.modules")


def test_no_module_takes_a_public_names_place_and_none_loads_dynamo_before_a_capture() -> None:
    modules = [m for m in sources() if not m.endswith(("__main__", ".uncompiled"))
               and not m.startswith("rkmate.integrations.")]      # which load the other libraries
    fresh("import importlib, inspect, sys, rkmate\n"
          "assert 'rkmate.dtr' not in sys.modules\n"
          "assert isinstance(rkmate.dtr(budget=None), rkmate.dtr.Session), 'needs an import of its own'\n"
          f"for name in {modules!r}:\n"
          "    importlib.import_module(name)\n"
          "    assert 'torch._dynamo' not in sys.modules, f'{name} loads torch._dynamo'\n"
          "for name in rkmate.__all__:\n"
          "    assert not inspect.ismodule(getattr(rkmate, name)), name")


def test_no_module_is_called_as_a_public_name() -> None:
    for package, names in (("rkmate", rkmate.__all__), ("rkmate.dtr", rkmate.dtr.__all__)):
        assert not {f"{package}.{name}" for name in names} & set(sources())


@pytest.mark.parametrize("package", ["rkmate", "rkmate.dtr", "rkmate.integrations"])
def test_type_checkers_see_the_names_that_are_loaded_on_first_use(package: str) -> None:
    block = next(n for n in tree_of(package).body if isinstance(n, ast.If))
    seen = {(n.module, a.name) for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names}
    places = getattr(importlib.import_module(package), "_PLACES")  # noqa: B009
    assert seen == {(module, name) for module, names in places.items() for name in names}


def test_what_a_text_tells_to_type_is_there() -> None:
    told = [(module, found) for module in sources() for node in ast.walk(tree_of(module))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            for found in re.findall(r"\brkmate\.[A-Za-z_][\w.]*\w", node.value)
            if found not in sources()]
    assert len(told) > 20
    for module, found in told:
        name, *attributes = found.split(".")[1:]
        if f"rkmate.{name}" in sources() and name != "dtr":      # a name of ours, for those who read the code
            value: object = pkgutil.resolve_name(found)
        else:
            assert name in (*rkmate.__all__, "dtr"), f"{module} names {found}"
            value = operator.attrgetter(".".join([name, *attributes]))(rkmate)
        assert value is not None


@pytest.mark.parametrize("page", list(PAGES), ids=lambda p: p.name)
def test_the_pages_are_up_to_date(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == up_to_date(page), "run `python -m tests.house`"


def test_recorded_durations_are_of_tests_that_are_there() -> None:
    for name in json.loads(DURATIONS.read_text(encoding="utf-8")):
        file, _, function = name.partition("[")[0].partition("::")
        text = (PACKAGE.parent / file).read_text(encoding="utf-8")
        assert f"def {function.rpartition('::')[2]}(" in text, f"no {name}: run `make durations`"
