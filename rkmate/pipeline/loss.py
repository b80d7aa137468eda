"""A loss inside of the plan, and the outputs whose gradients a step takes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn

from rkmate.errors import ArgumentError
from rkmate.graph.capture.captured import Capture
from rkmate.graph.capture.structure import Structure
from rkmate.pipeline.settings import Trains
from rkmate.stand_in import StandIn
from rkmate.torch_seam.modules import SUBMODULES, apply_to_tensors, submodules_of
from rkmate.torch_seam.nodes import VALUE

# -- A model with its loss -------------------------------------------------------------------------
#
# A loss that is computed outside of a module, as a part of what is planned.


if TYPE_CHECKING:
    from typing_extensions import Self

KEY = "loss_fn"
"""Name of a loss that is a module, among the submodules."""


class LossAndOutputs(NamedTuple):
    """Result of a module made with ``with_loss(..., outputs=True)``."""

    loss: Any
    """Return value of the loss function."""
    outputs: Any
    """Return value of the model."""


def with_loss(model: nn.Module, fn: Callable[..., Any], *, outputs: bool = False) -> WithLoss:
    """Combine a model and its loss in one module, so that a plan includes both.

    Call the module like the model. It returns ``fn(model(...), *loss_args, **loss_kwargs)``::

        lossy = rkmate.with_loss(model, torch.nn.CrossEntropyLoss())
        loss = lossy(x, loss_args=(y,))          # criterion(model(x), y)

    The module replaces the model: it has the model's parameters, state-dict keys, attributes and train flags.
    If `fn` is a module that is not part of the model, it becomes the submodule ``loss_fn`` (``loss_fn_`` if
    the model already has a ``loss_fn``). Its parameters and buffers come after the model's
    (``loss_fn.weight``). If it has none, the state dictionary is the model's.

    Args:
        model: the module to train.
        fn: a function or a module. It receives the model's output, then ``loss_args`` and ``loss_kwargs``,
            and returns the loss: a tensor with one number; or a dictionary or object with this tensor under
            ``loss``; or a tuple or list that begins with this tensor. This tensor is trained.
        outputs: also return the model's outputs: ``(loss, outputs)``. The outputs then stay in memory.

    Raises:
        ArgumentError: an argument is wrong. In a call: the arguments do not fit the model or the loss, or the
            loss function returns something else.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model is {type(model).__name__}; it should be a torch.nn.Module")
    if isinstance(fn, type) or not callable(fn):
        what = f"the class {fn.__name__}" if isinstance(fn, type) else type(fn).__name__
        raise ArgumentError(f"the loss is {what}; it should be a function, or a module such as "
                            "torch.nn.CrossEntropyLoss()")
    return WithLoss(model, fn, outputs)


class WithLoss(StandIn):
    """A model and its loss as one module. Made by `rkmate.with_loss`."""

    _whole: ModelAndLoss

    def __init__(self, model: nn.Module, fn: Callable[..., Any], outputs: bool) -> None:
        self._stand_in_for(model)
        self._set_up()
        self.__dict__["_whole"] = ModelAndLoss(model, fn, outputs)

    def _set_up(self) -> None:
        self.__dict__[SUBMODULES] = _Submodules(self)

    def _made_with(self) -> tuple[Any, ...]:
        return ()

    def forward(self, *args: Any, loss_args: Sequence[Any] = (), loss_kwargs: Mapping[str, Any] | None = None,
                **kwargs: Any) -> Any:
        """Return the loss of the original's output, and with ``outputs=True`` also the outputs.

        args, kwargs: arguments of the original. loss_args, loss_kwargs: further arguments of the loss.
        """
        return self._whole(*args, loss_args=loss_args, loss_kwargs=loss_kwargs, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """Set the train flags of the original and of the loss."""
        self._whole.train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        apply_to_tensors(self._whole, fn, recurse)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name == self._whole.key and KEY in submodules_of(self._whole):
            setattr(self._whole, KEY, value)
        else:
            super().__setattr__(name, value)

    def extra_repr(self) -> str:
        """Return the class of the original, and the loss."""
        return f"{type(self._original).__name__}, {_name(self._whole.loss_fn)}"


class ModelAndLoss(nn.Module):
    """Model and loss as submodules of one module, which is captured, and compared at every call. A stand-in's
    own attributes and hooks are not part of the original."""

    def __init__(self, model: nn.Module, fn: Callable[..., Any], outputs: bool) -> None:
        super().__init__()
        self.model = model
        self.key = KEY
        while hasattr(model, self.key):
            self.key += "_"
        if isinstance(fn, nn.Module) and all(fn is not m for m in model.modules()):
            self.loss_fn = fn
        else:
            self.__dict__[KEY] = fn
        self.outputs = outputs

    @property
    def training(self) -> bool:
        """The model's train flag."""
        return bool(self.model.training) if "model" in self._modules else True

    @training.setter
    def training(self, value: bool) -> None:
        """Do nothing: the parts have train flags of their own."""

    def forward(self, *args: Any, loss_args: Sequence[Any] = (), loss_kwargs: Mapping[str, Any] | None = None,
                **kwargs: Any) -> Any:
        """Run the model, and the loss on its outputs; see `WithLoss.forward`."""
        loss_kwargs = {} if loss_kwargs is None else loss_kwargs
        if not torch.compiler.is_dynamo_compiling():
            self._check(args, kwargs, loss_args, loss_kwargs)
        out = self.model(*args, **kwargs)
        found = self.loss_fn(out, *loss_args, **loss_kwargs)
        loss = _total(found)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else \
                f"no loss ({type(found).__name__})"
            raise ArgumentError(f"the loss {_name(self.loss_fn)} returned {what}; it should return a tensor "
                                "with one number, or a dictionary or object that has it under 'loss', or a "
                                "tuple that begins with it")
        return LossAndOutputs(found, out) if self.outputs else found

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any], loss_args: Any, loss_kwargs: Any) -> None:
        check_loss_arguments(loss_args, loss_kwargs)
        misfit = _misfit(self.model.forward, args, kwargs)
        if misfit:
            raise ArgumentError(f"the arguments do not fit {type(self.model).__name__}.forward: {misfit}. "
                                "The loss gets its own as loss_args=(y,)")
        fn = self.loss_fn
        misfit = _misfit(fn.forward if isinstance(fn, nn.Module) else fn, (None, *loss_args), loss_kwargs)
        if misfit:
            raise ArgumentError(f"loss_args and loss_kwargs do not fit {_name(fn)}, which gets the model's "
                                f"output before them: {misfit}. One target y is loss_args=(y,)")


def check_loss_arguments(loss_args: Any, loss_kwargs: Any) -> None:
    """Raise `ArgumentError` for what cannot be the further arguments of a loss."""
    if not isinstance(loss_args, (tuple, list)):
        raise ArgumentError(f"loss_args is {type(loss_args).__name__}; it should be a tuple with what the "
                            "loss gets after the output: (y,) for one tensor")
    if not isinstance(loss_kwargs, (Mapping, type(None))):
        raise ArgumentError(f"loss_kwargs is {type(loss_kwargs).__name__}; it should be a mapping of the "
                            "loss's argument names to values")


def loss_inside(model: Any, kwargs: Any, loss: Callable[..., Any] | None, loss_args: Sequence[Any],
                loss_kwargs: Mapping[str, Any] | None) -> tuple[Any, Any]:
    """Return the model, and its sample keyword arguments, with the loss of a public call."""
    check_loss_arguments(loss_args, loss_kwargs)
    more = {k: v for k, v in (("loss_args", tuple(loss_args)), ("loss_kwargs", loss_kwargs)) if v}
    if loss is None:
        if more:
            raise ArgumentError(f"{' and '.join(more)} without a loss: give loss=fn, too")
        return model, kwargs
    if not isinstance(kwargs, (Mapping, type(None))):
        return model, kwargs                    # which is refused with the other arguments
    return with_loss(model, loss), {**(kwargs or {}), **more}


def traceable(model: nn.Module) -> nn.Module:
    """Return the module to capture: the model itself, or the model together with its loss."""
    whole: nn.Module = model._whole if isinstance(model, WithLoss) else model
    return whole


def without_loss(model: nn.Module) -> nn.Module:
    """Return the user's model alone, where it is together with its loss."""
    whole = traceable(model)
    alone: nn.Module = whole.model if isinstance(whole, ModelAndLoss) else whole
    return alone


def trains_of(model: nn.Module, captured: Capture, trains: Trains) -> Trains:
    """Return which outputs train: as the settings say; for a model with its loss, that loss unless the
    settings name others.

    Raises:
        ArgumentError: that loss takes no gradient.
    """
    whole = traceable(model)
    if trains is not None or not isinstance(whole, ModelAndLoss):
        return trains
    names = captured.result.names()
    named = names.get("loss.loss") or names.get("loss") or ()
    number = next(iter(named)) if len(named) == 1 else 0
    if not captured.differentiable[number]:
        raise ArgumentError(f"the loss {_name(whole.loss_fn)} depends on no output of "
                            f"{type(whole.model).__name__} that takes a gradient, so there is nothing to "
                            "train: it should be computed from the output, without detach() and no_grad()")
    return (number,)


def how_to_train(model: nn.Module) -> str:
    """Return what to do about a model of which no output takes a gradient, as a sentence."""
    model = without_loss(model)
    known = [*model.named_parameters()]
    trained = [name for name, p in known if p.requires_grad]
    adapted = any(hasattr(m, "merged_adapters") for m in model.modules())       # PEFT's layers
    if not known:
        return "It has no parameters: give it an input that requires a gradient"
    if adapted:
        return (f"{len(trained)} of its {len(known)} parameters require a gradient: adapters that are "
                "frozen, merged or switched off train nothing. Load them with is_trainable=True, or call "
                "set_adapter(name), unmerge_adapter() or enable_adapter_layers(); to evaluate, call the "
                "model under torch.no_grad()")
    if not trained:
        return (f"None of its {len(known)} parameters requires a gradient (a method such as freeze_encoder() "
                "does that): call requires_grad_() on those to train; to evaluate, call the model under "
                "torch.no_grad()")
    return (f"{len(trained)} of its {len(known)} parameters require one (the first is {trained[0]!r}): the "
            "forward should return a tensor that is computed from them, without detach(), item() and "
            "no_grad()")


def _total(found: Any) -> Any:
    """Return the loss in what a loss function returned."""
    if isinstance(found, torch.Tensor):
        return found
    named = found.get("loss") if isinstance(found, Mapping) else getattr(found, "loss", None)
    if named is None and isinstance(found, (tuple, list)) and found:
        return found[0]
    return named


def _misfit(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return why arguments do not fit a function. Empty if they fit, or if the function has no signature."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as mismatch:
        return str(mismatch)
    return ""


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", None) or type(fn).__name__


class _Submodules(MutableMapping[str, nn.Module | None],    # type: ignore[misc, metaclass]
                  dict[str, nn.Module | None]):
    """The original's submodules, as they are now, and the loss. Torch wants a dictionary; what it asks one
    for is answered by the methods of a mapping, which go through those below."""

    def __init__(self, module: WithLoss) -> None:
        super().__init__()
        self._module = module

    def _with_loss(self) -> ModelAndLoss | None:
        """Return the module that has the loss as a submodule; None where the loss is a function, or a
        submodule of the original."""
        whole: ModelAndLoss | None = self._module.__dict__.get("_whole")    # none yet in an unfinished copy
        return whole if whole is not None and KEY in submodules_of(whole) else None

    def _all(self) -> dict[str, nn.Module | None]:
        found: dict[str, nn.Module | None] = dict(submodules_of(self._module.original))
        whole = self._with_loss()
        if whole is not None:
            found[whole.key] = submodules_of(whole)[KEY]
        return found

    def _place(self, name: str) -> tuple[dict[str, nn.Module | None], str]:
        """Return the dictionary in which a submodule stands, and its name there."""
        whole = self._with_loss()
        if whole is not None and name == whole.key:
            return submodules_of(whole), KEY
        return submodules_of(self._module.original), name

    def __getitem__(self, name: str) -> nn.Module | None:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __setitem__(self, name: str, module: nn.Module | None) -> None:
        held, key = self._place(name)
        held[key] = module

    def __delitem__(self, name: str) -> None:
        held, key = self._place(name)
        del held[key]

    def copy(self) -> dict[str, nn.Module | None]:
        """Return a plain dictionary."""
        return self._all()


# -- Outputs that are trained ----------------------------------------------------------------------
#
# Which outputs of a model the loss depends on: as the user says, or as the output's form tells.


_BY_PRODUCTS = ("cache", "past_key_values", "hidden_states", "attentions", "cross_attentions", "mems",
                "encoder_last_hidden_state", "encoder_hidden_states", "encoder_attentions",
                "decoder_hidden_states", "decoder_attentions", "cache_params", "router_logits")
"""Fields of Hugging Face outputs that are by-products of the value that the model is trained by."""
_LISTED = 12
"""Outputs that an error lists at most."""
_INDEX = re.compile(r"""\[(['"]?)([^\]'"]*)\1\]""")


def trained_outputs(captured: Capture, trains: Trains) -> tuple[bool, ...]:
    """Return, for each output tensor, whether the loss depends on it. `trains`: None to guess from the form
    of the output; otherwise as for `chosen_outputs`, which may raise."""
    able = captured.differentiable
    # What a forward leaves in attributes comes after its result: a loss leads there where it says so.
    count = captured.result.count
    returned = able[:count]
    if not any(returned):
        return able
    chosen = _by_form(captured, returned) if trains is None else \
        chosen_outputs(captured.result, returned, trains)
    return (*chosen, *(False for _ in able[count:]))


def chosen_outputs(result: Structure, able: Sequence[bool],
                   trains: Literal["all"] | tuple[str | int, ...]) -> tuple[bool, ...]:
    """Return, for each output tensor, whether `trains` chooses it.

    `able`: which can take a gradient. `trains`: all of those, or names and numbers; a name stands for
    all of those under it.

    Raises:
        ArgumentError: there is no such output, or no gradient comes to it.
    """
    if trains == "all":
        return tuple(able)
    named = result.names()
    chosen: set[int] = set()
    for output in trains:
        found: Collection[int]
        if isinstance(output, int):
            found = (output,) if 0 <= output < len(able) else ()
        else:
            found = named.get(_INDEX.sub(r".\2", output).lstrip("."), ())
        if not found:
            raise ArgumentError(f"trains names {output!r}, and the model returns no such output: "
                                f"there {_listed(named, able)}")
        if not any(able[i] for i in found):
            raise ArgumentError(f"trains names {output!r}, which depends on no parameter or input that "
                                f"requires a gradient: there {_listed(named, able)}")
        chosen.update(found)
    return tuple(ok and i in chosen for i, ok in enumerate(able))


def _listed(named: Mapping[str, frozenset[int]], able: Sequence[bool]) -> str:
    """Return the output tensors in words, after "there"."""
    words = []
    for i, ok in enumerate(able):
        name = next((n for n, found in named.items() if found == {i}), None)
        words.append((f"{name!r} (number {i})" if name else f"number {i}")
                     + ("" if ok else ", which takes no gradient"))
    more = f"; and {len(words) - _LISTED} more" if len(words) > _LISTED else ""
    return f"{'is' if len(words) == 1 else 'are'} {'; '.join(words[:_LISTED])}{more}"


def _by_form(captured: Capture, able: Sequence[bool]) -> tuple[bool, ...]:
    """Return which outputs train: the output named ``loss``, else scalars, else all except by-products.

    A model that returns its loss together with other tensors (logits, a cache) is trained by the loss. If it
    returns ``log_probs``, it is trained by these: trl's trainers compute their losses from them (1.16). If
    this guess is wrong, the first backward warns, and the next plan is made for the outputs that train.
    """
    meta: list[Any] = [n.meta[VALUE] if n is not None else None for n in captured.outputs[:len(able)]]
    scored = captured.result.index_of("log_probs")
    if scored is not None and able[scored]:
        taken = captured.result.under(("log_probs", "aux_loss"))
        return tuple(ok and i in taken for i, ok in enumerate(able))
    named = captured.result.index_of("loss")
    if named is not None and able[named] and meta[named].dim() == 0:
        return tuple(i == named for i in range(len(able)))
    scalars = [ok and m is not None and m.dim() == 0 for ok, m in zip(able, meta, strict=True)]
    if any(scalars):
        return tuple(scalars)
    aside = captured.result.under(_BY_PRODUCTS)
    main = tuple(ok and i not in aside for i, ok in enumerate(able))
    return main if any(main) else tuple(able)

