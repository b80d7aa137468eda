"""TARGET of the command line: a demo model, or the result of a user's function."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rkmate.errors import ArgumentError, MissingExtra, RkmateError

if TYPE_CHECKING:
    from rkmate.cli.demo_models import Sample


@dataclass(frozen=True)
class Demo:
    """A built-in model."""

    make: str
    """Name of the factory in demo_models.py."""
    about: str
    needs: str | None = None
    """Package that brings the model."""

    @property
    def installed(self) -> bool:
        """Whether the model can be made on this machine."""
        return self.needs is None or importlib.util.find_spec(self.needs) is not None


DEMOS: dict[str, Demo] = {
    "mlp": Demo("mlp", "eight GELU layers, batch of 256"),
    "gpt2": Demo("gpt2", "GPT-2 of four layers, batch of 4, 128 tokens", "transformers"),
    "resnet": Demo("resnet", "ResNet-18, batch of 4, 96 pixels", "transformers"),
    "unet": Demo("unet", "U-Net of three scales, batch of 2, 96 pixels"),
}


def make_demo(name: str) -> Sample:
    """Return a built-in model with sample arguments. Raises `MissingExtra`."""
    demo = DEMOS[name]
    if not demo.installed:
        raise MissingExtra(f"the demo model {name!r} needs {demo.needs}: "
                           'pip install "rkmate[examples]"')
    import torch

    from rkmate.cli import demo_models

    torch.manual_seed(0)
    made: Sample = getattr(demo_models, demo.make)()
    return made


_OURS = (str(Path(__file__)), str(Path(importlib.__file__).parent) + os.sep, "<frozen importlib")
"""Beginnings of the names of files through which the user's code is reached. They are not part of the user's
error."""


class TargetError(ArgumentError):
    """The user's module or factory raised."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(f"target {name}: {type(error).__name__}: {error}")
        here = error.__traceback__
        while here is not None and here.tb_frame.f_code.co_filename.startswith(_OURS):
            here = here.tb_next
        self.trace = "".join(traceback.format_exception(type(error), error, here))
        """Python's traceback, from the first line of the user's code."""


@dataclass(frozen=True)
class Target:
    """A model with sample arguments."""

    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def load_target(name: str, device: str | None = None, mesh: Any = None) -> Target:
    """Return a demo model, or what a factory returns; a factory that takes an argument gets the mesh. Raises
    `ArgumentError`."""
    if name in DEMOS:
        made: Any = make_demo(name)
    else:
        try:
            factory: Callable[..., Any] = _factory(name)
            if mesh is None:
                _check_arguments(name, factory)
            made = factory(mesh) if mesh is not None and inspect.signature(factory).parameters else factory()
        except RkmateError:
            raise
        except Exception as error:
            raise TargetError(name, error) from error
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        what = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        raise ArgumentError(f"{name} returned {what}; it should return (model, args) or "
                            "(model, args, kwargs), such as (model, (x,))")
    model, args = made[:2]
    kwargs = made[2] if len(made) == 3 else {}
    if isinstance(args, Mapping) and not kwargs:
        raise ArgumentError(f"{name} returned args of type {type(args).__name__}; arguments with names come "
                            "third: (model, (), {'x': x})")
    if callable(kwargs):
        raise ArgumentError(f"{name} returned a function in the place of kwargs; for a loss outside of the "
                            "model, return (rkmate.with_loss(model, loss), args, {'loss_args': (y,)})")
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
        raise ArgumentError(f"{name} returned args of type {type(args).__name__} and kwargs of type "
                            f"{type(kwargs).__name__}; they should be a tuple and a dict: the arguments of "
                            "one call of the model, such as (x,) for one tensor, or the first batch of a "
                            "loader")
    if device is not None:
        model, args, kwargs = _moved(model, tuple(args), kwargs, device)
    return Target(model, tuple(args), kwargs)


def _check_arguments(name: str, factory: Callable[..., Any]) -> None:
    """Raise `ArgumentError` for a function that needs arguments."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):         # of an extension module
        return
    needed = [p.name for p in parameters if p.default is p.empty
              and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if needed:
        raise ArgumentError(f"target is {name!r}: the function takes {', '.join(needed)}; give the name of "
                            "one without arguments, which returns (model, args)"
                            f"{'' if len(needed) > 1 else '; if the argument is a mesh, give --mesh'}")


def _factory(name: str) -> Callable[[], Any]:
    module, colon, function = name.partition(":")
    if not colon or not module or not function:
        raise ArgumentError(f"target is {name!r}; it should be module:factory, file.py:factory, or one of "
                            f"the demo models {', '.join(DEMOS)}")
    folder, file = os.getcwd(), None
    if module.endswith(".py"):
        if not Path(module).is_file():
            raise ArgumentError(f"target is {name!r}: no file {module!r}; give an existing one, or "
                                "module:factory")
        file = Path(module).resolve()
        folder, module = str(file.parent), file.stem
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ArgumentError(f"target is {name!r}: no module {module!r} in the current folder or "
                            "installed; give the path of its file, such as "
                            "folder/models.py:factory, or start in its folder") from error
    if file is not None and Path(found.__file__ or "").resolve() != file:
        raise ArgumentError(f"target is {name!r}: Python has another module {module!r} ({found.__file__}); "
                            "rename the file")
    for part in function.split("."):
        if not hasattr(found, part):
            raise ArgumentError(f"target is {name!r}: {module} has no {function!r}; give the name of a "
                                "function that returns (model, args)")
        found = getattr(found, part)
    if not callable(found) or (hasattr(found, "named_parameters") and not inspect.isclass(found)):
        raise ArgumentError(f"target is {name!r}: {function} is not a function; write one that returns "
                            "(model, args)")
    return found  # type: ignore[no-any-return]


def _moved(model: Any, args: Any, kwargs: Any, device: str) -> tuple[Any, Any, Any]:
    import torch

    from rkmate import device as devices
    from rkmate.torch_seam.containers import pytree

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
