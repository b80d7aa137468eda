"""A module that replaces another one: it has the same parameters, state and attributes."""

from __future__ import annotations

import copy
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import nn

from rkmate.torch_seam.modules import SHARED, apply_to_tensors

if TYPE_CHECKING:
    from typing_extensions import Self



class StandIn(nn.Module):
    """Shares the original's parameters, buffers, submodules and state-dict hooks, and passes other attributes
    on to it. Its forward hooks, its backward hooks and methods that a library has replaced on it are its own;
    copies and pickles have them, too."""

    _FIELDS: ClassVar[frozenset[str]] = frozenset()
    """Attributes of a subclass that `_set_up` makes: no part of a copy."""
    _original: nn.Module

    def _stand_in_for(self, model: nn.Module) -> None:
        """Set up the module; called instead of `nn.Module.__init__`."""
        self.__dict__["_original"] = model
        training = model.training
        nn.Module.__init__(self)                # sets the train flag, which is the original's
        model.training = training
        self.__dict__.update({k: v for k, v in model.__dict__.items() if k in SHARED})

    def _set_up(self, *made_with: Any) -> None:
        """Make the subclass's own fields from what `_made_with` returned."""
        raise NotImplementedError

    def _made_with(self) -> tuple[Any, ...]:
        """Return values that a copy shares, to set it up with."""
        raise NotImplementedError

    def _added(self) -> dict[str, Any]:
        """Return the attributes of this module alone: its hooks, and the attributes that libraries have
        set."""
        return {k: v for k, v in self.__dict__.items()
                if k != "_original" and k not in SHARED and k not in self._FIELDS}

    @property
    def original(self) -> nn.Module:
        """The module that was wrapped."""
        return self._original

    @property
    def training(self) -> bool:
        """The original's train flag."""
        return bool(self._original.training)

    @training.setter
    def training(self, value: bool) -> None:
        self._original.training = value

    def train(self, mode: bool = True) -> Self:
        """Call the original's `train`, which may leave some submodules in eval mode."""
        self._original.train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        apply_to_tensors(self._original, fn, recurse)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_original" not in self.__dict__:        # a copy that is being made
                raise
            return getattr(self._original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "training":
            self._original.training = value
        elif name in self.__dict__ or hasattr(type(self), name) or (
                isinstance(value, MethodType) and value.__self__ is self):
            # Attributes of the wrapper itself: a `forward` that a library sets, the previous one, which the
            # library keeps, `__class__`, hooks.
            object.__setattr__(self, name, value)
        else:
            setattr(self._original, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            object.__delattr__(self, name)
        else:
            delattr(self._original, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy with parameters and hooks of its own."""
        module = _blank(type(self))
        memo[id(self)] = module                 # what it refers to may refer to it
        original, added = copy.deepcopy((self._original, self._added()), memo)
        module.__setstate__((original, added, self._made_with()))
        return module

    def __reduce__(self) -> Any:
        kind = next(k for k in type(self).__mro__ if "_made_for" not in vars(k))    # one that can be imported
        return _blank, (kind,), (self._original, self._added(), self._made_with())

    def __setstate__(self, state: tuple[nn.Module, dict[str, Any], tuple[Any, ...]]) -> None:
        original, added, made_with = state
        self._stand_in_for(original)
        self._set_up(*made_with)
        self.__dict__.update(added)


_M = TypeVar("_M", bound=StandIn)


def _blank(kind: type[_M]) -> _M:
    """Make an instance for `__setstate__` to complete."""
    return kind.__new__(kind)
