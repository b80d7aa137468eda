"""Values that depend on inputs only, while a forward is traced.

A trace knows shapes but no values, so that a forward that looks at values stops it. Values are known if they
come only from integers and masks among the arguments (labels, lengths, edges), and not from parameters or
activations. For each such traced tensor, a *twin* is computed from the real arguments. A call that would stop
the trace returns the value of its twin. The computation of the twin becomes a recipe, which runs before each
planned step (`recipe`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import getitem
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from rkmate import device as devices
from rkmate.device.random_state import RandomState
from rkmate.errors import CaptureError
from rkmate.graph.capture.answers import CHECKING, Answer, Questions
from rkmate.graph.capture.recipe import (
    Builder,
    Recipe,
    Recipes,
    Slot,
    Step,
    is_plain,
    mapped,
    observed,
    tensors_of,
)
from rkmate.graph.capture.refusals import is_data_dependent
from rkmate.graph.ops.losses import ctc_loss
from rkmate.torch_seam.containers import pytree
from rkmate.torch_seam.modules import buffers_by_path, buffers_of
from rkmate.torch_seam.schema import OpOverload, schema_of
from rkmate.torch_seam.tensors import base_of, is_unwrapped, outside_trace, storage_id, version_of
from rkmate.torch_seam.trace import seen_inside, values_refused

# -- Calls of which a part is known ----------------------------------------------------------------
#
# Masks, lengths or counts come from the inputs; what they apply to, or get shape or type of, does not. Values
# of the known part are computed before the step; the call is written with them (with indices, not a mask).


_MASKS = (torch.bool, torch.uint8)


class Known(Protocol):
    """Known values of a trace's tensors."""

    def twin(self, t: Any) -> torch.Tensor | None:
        """Return the value; None where it is not known."""

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Handle a call of the forward."""

    def read(self, func: Callable[..., Any], *args: Any) -> Any:
        """Return what a call of known tensors gives Python."""

    def compute(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of a call of known tensors, computed before the step."""


def _index(known: Known, index: Any) -> tuple[Any, ...]:
    """Return an index with the places of what known masks pick."""
    found: list[Any] = []
    for part in index if isinstance(index, tuple) else (index,):
        value = known.twin(part)
        if value is not None and value.dtype in _MASKS and value.dim():
            found += known.compute(torch.nonzero, part, as_tuple=True)
        else:
            found.append(part)
    return tuple(found)


def _given(known: Known, t: Any) -> Any:
    """Return a known tensor, computed before the step: calls that compare it with other values never see
    made-up values, such as those used for measuring costs."""
    return t if known.twin(t) is None else known.compute(torch.clone, t)


def _get(known: Known, func: Callable[..., Any], x: torch.Tensor, index: Any) -> Any:
    return func(x, _index(known, index))


def _set(known: Known, func: Callable[..., Any], x: torch.Tensor, index: Any, value: Any) -> Any:
    # One number for all that a mask picks needs no number of them.
    some = isinstance(value, torch.Tensor) and value.dim()
    return func(x, _index(known, index) if some else index, value)


def _masked_select(known: Known, func: Callable[..., Any], input: torch.Tensor, mask: torch.Tensor) -> Any:
    if known.twin(mask) is None:
        return func(input, mask)
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    if mask.shape != shape:
        mask = known.call(torch.Tensor.expand, (mask, tuple(shape)), {})
    return input.expand(shape)[known.compute(torch.nonzero, mask, as_tuple=True)]


def _repeat_interleave(known: Known, func: Callable[..., Any], input: torch.Tensor, repeats: Any,
                       dim: int | None = None, *, output_size: int | None = None) -> Any:
    if known.twin(repeats) is not None and output_size is None:
        flat = input.numel() if dim is None else input.shape[dim]
        each = known.call(torch.Tensor.expand, (repeats, (flat,)), {}) if repeats.numel() == 1 else repeats
        output_size = known.read(torch.Tensor.__int__, known.call(torch.Tensor.sum, (each,), {}))
    return func(input, _given(known, repeats), dim, output_size=output_size)


def _ctc_loss(known: Known, func: Callable[..., Any], log_probs: torch.Tensor, targets: torch.Tensor,
              input_lengths: Any, target_lengths: Any, blank: int = 0, reduction: str | int = "mean",
              zero_infinity: bool = False) -> Any:
    if isinstance(target_lengths, torch.Tensor):
        if known.twin(target_lengths) is None:
            return func(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
        longest = known.read(torch.Tensor.__int__, known.call(torch.Tensor.max, (target_lengths,), {}))
    else:
        longest = max(target_lengths)
    lengths = _lengths(known, input_lengths), _lengths(known, target_lengths)
    return ctc_loss(log_probs, targets, *lengths, blank, reduction, zero_infinity, longest)


def _shaped(change: Any, known: Known, func: Any, x: torch.Tensor, other: torch.Tensor) -> Any:
    return known.call(change, (x, tuple(other.shape)), {})


def _typed(known: Known, func: Any, x: torch.Tensor, other: torch.Tensor, *more: Any, **named: Any) -> Any:
    return known.call(torch.Tensor.to, (x, other.device, other.dtype, *more), named)


def _lengths(known: Known, lengths: torch.Tensor | Sequence[int]) -> torch.Tensor:
    return _given(known, lengths) if isinstance(lengths, torch.Tensor) else torch.tensor(lengths)


PARTS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.Tensor.__getitem__: _get,
    torch.Tensor.__setitem__: _set,
    torch.masked_select: _masked_select,
    torch.Tensor.masked_select: _masked_select,
    torch.repeat_interleave: _repeat_interleave,
    torch.Tensor.repeat_interleave: _repeat_interleave,
    F.ctc_loss: _ctc_loss,
    torch.ctc_loss: _ctc_loss,
    torch.Tensor.expand_as: partial(_shaped, torch.Tensor.expand),
    torch.Tensor.reshape_as: partial(_shaped, torch.Tensor.reshape),
    torch.Tensor.view_as: partial(_shaped, torch.Tensor.view),
    torch.Tensor.type_as: _typed,
    torch.Tensor.to: _typed,
}
"""Replacements by function: the function to call instead, with the arguments that come before its own."""


FILLED: dict[str, Callable[..., Any]] = {
    "zeros_like": lambda *_, **__: 0,
    "ones_like": lambda *_, **__: 1,
    "new_zeros": lambda *_, **__: 0,
    "new_ones": lambda *_, **__: 1,
    "full_like": lambda input, fill_value, **_: fill_value,
    "new_full": lambda self, size, fill_value, **_: fill_value,
}
"""Calls that read of a tensor only its shape, type and device: by name, the number that they fill with."""


# -- Twins -----------------------------------------------------------------------------------------


_READS = frozenset(("item", "tolist", "__bool__", "__int__", "__index__", "__float__", "__contains__",
                    "equal", "is_nonzero", "allclose"))
"""Calls that give Python a value."""
_UNSET = frozenset(("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided",
                    "empty_permuted", "resize_", "resize_as_", "set_", "requires_grad_", "retain_grad",
                    "backward"))
_VIEWS = frozenset(("T", "mT", "H", "mH"))
"""Attributes that are tensors, views of another one."""
_ARGUMENT, _CLOSED_OVER = "(argument)", "(closed over)"
_LARGEST = 1 << 24
"""Bytes of a floating-point tensor that a twin is made of."""
_KEPT = frozenset(("_assert", "sym_", "_guard"))
_here, _aten = threading.local(), torch.ops.aten


def is_stopped_by_values(error: Exception) -> bool:
    """Return whether a trace may have failed because it has no values."""
    text = str(error)
    return is_data_dependent(error) or isinstance(error, NotImplementedError) or "data pointer" in text \
        or "UnsupportedOperator" in type(error).__name__ or "unhashable type: non-nested Sym" in text


def may_be_asked(t: torch.Tensor) -> bool:
    """Return whether the values of an argument may decide how a forward goes on: those of other types are
    other ones in each step."""
    return not t.is_floating_point() and not t.is_complex() and t.layout is torch.strided


@contextmanager
def from_inputs(model: nn.Module, tensors: Sequence[torch.Tensor]) -> Iterator[Values]:
    """Answer a forward's questions about the values of these tensors, of buffers and of constants, while a
    model is captured for a call with them."""
    _here.values = values = Values(model, tensors)
    try:
        # What depends on other values stops the trace where it is asked for.
        with values_refused():
            yield values
    finally:
        _here.values = None


@contextmanager
def values_of_inputs(model: nn.Module) -> Iterator[None]:
    """Compute twins as needed while a forward is traced."""
    values = getattr(_here, "values", None)
    if values is None:
        yield
    else:
        with values.recording():
            yield


def begin(traced: Sequence[torch.Tensor], model: nn.Module) -> None:
    """Note the tensors that replace the arguments in the trace, and the model, which has stand-ins for its
    buffers."""
    values = getattr(_here, "values", None)
    if values is not None:
        values.begin(traced, model)


def taken_for_granted(outputs: int) -> tuple[list[torch.Tensor], tuple[Answer, ...]]:
    """Return what the traced forward has asked, and what was answered without knowing: tensors that become
    outputs of the step, behind `outputs` others, and the answers."""
    values: Values | None = getattr(_here, "values", None)
    found = [] if values is None else values.questions.answered
    return [a.tensor for a in found], tuple(
        Answer(outputs + k, a.value, a.what, a.raises) for k, a in enumerate(found))


@dataclass
class _Known:
    """A traced tensor with a twin."""

    traced: torch.Tensor
    twin: torch.Tensor
    slot: int
    version: int
    """Version of the traced tensor when both were equal."""
    storage: int
    """The twin's storage."""

    @classmethod
    def of(cls, traced: torch.Tensor, twin: torch.Tensor, slot: int) -> _Known:
        """Note two tensors that are equal now."""
        return cls(traced, twin, slot, version_of(traced), storage_id(twin))


@dataclass
class _Given:
    """A tensor that the trace takes as it is: the plan gets another one at each call."""

    slot: int
    step: int
    twin: torch.Tensor
    value: torch.Tensor
    """The tensor in the trace."""


class Values:
    """The twins of one trace, and the recipe of what was asked of them."""

    def __init__(self, model: nn.Module, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._buffers = {name: (buffers_of(m), leaf, t) for path, m in model.named_modules()
                         for leaf, t in buffers_of(m).items() if t is not None
                         for name in (f"{path}.{leaf}" if path else leaf,)}
        self._start()

    def _start(self) -> None:
        self._builder = Builder(len(self._tensors))
        self._known: dict[int, _Known] = {}
        self._given: list[_Given] = []
        self._computed: dict[Any, Any] = {}
        """Known parts of calls that were computed already."""
        self._inputs: dict[int, int] = {}
        """Storages of the twins of arguments, buffers and closed-over tensors, with the storages of these."""
        self._held: dict[int, tuple[torch.Tensor, str, int]] = {}
        """Stand-ins for buffers, with their names and versions."""
        self._origins: dict[int, frozenset[str]] = {}
        """Slot -> what its value depends on: names of buffers, `_ARGUMENT`; nothing for a constant."""
        self.numbers: set[str] = set()
        """The buffers that the forward reads numbers from."""
        self._autocast: list[Any] = []
        self.questions = Questions(lambda t: self._of(t) is not None)
        self.asked = False
        """Whether what a call looks at may decide."""
        self.answered = False

    def begin(self, traced: Sequence[torch.Tensor], model: nn.Module) -> None:
        """Begin a forward on these tensors."""
        self._start()
        self._held = {id(t): (t, name, version_of(t))
                      for name, t in buffers_by_path(model)
                      if name in self._buffers and t is not self._buffers[name][2]}
        self._autocast = _autocast()
        with outside_trace():
            for k, (t, real) in enumerate(zip(traced, self._tensors, strict=True)):
                if may_be_asked(real):
                    known = self._known[id(t)] = _Known.of(t, real.detach().clone(), k)
                    self._inputs[known.storage] = storage_id(real)
                    self._origins[k] = frozenset((_ARGUMENT,))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Watch calls inside the context."""
        with _Watching(self):
            yield

    def twin(self, t: Any) -> torch.Tensor | None:
        """Return the real value of a traced tensor; None where it depends on others than inputs."""
        known = self._of(t)
        return None if known is None else known.twin

    def _of(self, t: Any) -> _Known | None:
        known = self._known.get(id(t)) or self._looked_up(t)
        if known is not None and known.version != version_of(t):
            self._forget(frozenset((known.storage,)))     # it was written to, who knows what
            return None
        return known

    def _looked_up(self, t: Any) -> _Known | None:
        """A buffer as it is before the forward, or a tensor that the forward closes over."""
        held, name, real = self._held.get(id(t)), "", None
        get: Callable[[], Any] | None = None
        if held is not None and held[2] == version_of(t):
            registry, leaf, real = self._buffers[held[1]]
            name, get = held[1], partial(getitem, registry, leaf)
        elif is_unwrapped(t) and not t.requires_grad and not t.is_inference():
            name, get, real = _CLOSED_OVER, t.detach, t
        if get is None or real is None or real.layout is not torch.strided or _is_large(real):
            return None
        with outside_trace():
            twin = real.detach().clone()
        slot = self._builder.hold(get)
        self._origins[slot] = frozenset((name,))
        known = self._known[id(t)] = _Known.of(t, twin, slot)
        with outside_trace():
            self._inputs[known.storage] = storage_id(real)
        return known

    def _origin(self, tensors: Sequence[torch.Tensor]) -> frozenset[str]:
        return frozenset().union(*(self._origins.get(self._known[id(t)].slot, frozenset()) for t in tensors))

    def _forget(self, storages: frozenset[int]) -> None:
        self._known = {i: k for i, k in self._known.items() if k.storage not in storages}

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Handle a call of the forward."""
        tensors = tensors_of((args, kwargs))
        if func.__name__ in ("__getitem__", "__setitem__") and len(args) > 1:
            args = (args[0], self._with_ints(args[1]), *args[2:])
        getter = func.__name__ == "__get__" and _attribute(func) not in _VIEWS
        if getter or not is_plain((args, kwargs)) or _autocast() != self._autocast:
            return func(*args, **kwargs)
        if all(self._of(t) is not None for t in tensors):
            return self._of_known(func, args, kwargs, tensors)
        if func.__name__ in FILLED:
            return self._filled(func, args, kwargs)
        part = PARTS.get(func)
        if part is not None and any(self._of(t) is not None for t in tensors):
            return part(self, func, *args, **kwargs)
        try:
            return func(*args, **kwargs)
        except Exception as error:
            # Sizes may come as tensors: the call looks at them, where no mode sees it.
            if not is_data_dependent(error) or not any(map(self._is_number, tensors)):
                raise
        args, kwargs = mapped(lambda t: self.read(torch.Tensor.__index__, t) if self._is_number(t) else t,
                              (args, kwargs))
        return func(*args, **kwargs)

    def _filled(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return a tensor of one number, in the shape of one of which nothing else is known."""
        out = func(*args, **kwargs)
        fill = FILLED[func.__name__](*args, **kwargs)
        if isinstance(out, torch.Tensor) and isinstance(fill, (int, float)):
            self._follow(torch.full, (tuple(out.shape), fill), {"dtype": out.dtype, "device": out.device}, (),
                         [out])
        return out

    def _with_ints(self, index: Any) -> Any:
        """Return an index whose slices have numbers, not tensors."""
        if isinstance(index, tuple):
            return tuple(map(self._with_ints, index))
        if isinstance(index, slice):
            return slice(*(self.read(torch.Tensor.__index__, n) if self._of(n) is not None else n
                           for n in (index.start, index.stop, index.step)))
        return index

    def _is_number(self, t: torch.Tensor) -> bool:
        return t.numel() == 1 and may_be_asked(t) and self._of(t) is not None

    def read(self, func: Callable[..., Any], *args: Any) -> Any:
        """Return what a call of known tensors gives Python."""
        return self._of_known(func, args, {}, tensors_of(args))

    def compute(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of a call of known tensors, as tensors that the plan gets."""
        tensors = tensors_of((args, kwargs))
        at = (func, *((self._known[id(t)].slot, version_of(t)) for t in tensors))
        if at not in self._computed:
            self._computed[at] = self._answer(func, args, kwargs, tensors, None)
        return self._computed[at]

    def _of_known(self, func: Callable[..., Any], args: Any, kwargs: Any,
                  tensors: Sequence[torch.Tensor]) -> Any:
        name = func.__name__
        if name in _UNSET:
            return func(*args, **kwargs)
        if name in _READS and tensors:
            return self._answer(func, args, kwargs, tensors, None)
        try:
            out = func(*args, **kwargs)
        except (CaptureError, KeyboardInterrupt):
            raise
        except Exception as error:
            if not tensors:
                raise
            return self._answer(func, args, kwargs, tensors, error)
        found = tensors_of(out)
        if found or out is None:
            self._follow(func, args, kwargs, tensors, found)
        return out

    def _follow(self, func: Callable[..., Any], args: Any, kwargs: Any, tensors: Sequence[torch.Tensor],
                found: Sequence[torch.Tensor]) -> None:
        """Compute the twins of what the trace returned."""
        ran = None if any(map(_is_large, found)) else self._run(func, args, kwargs, tensors)
        if ran is None:
            return
        real, writes = ran
        twins = tensors_of(real)
        # What a transform has wrapped means nothing outside of it.
        if len(twins) != len(found) or not all(map(is_unwrapped, twins)) or any(
                t.shape != r.shape or t.dtype != r.dtype for t, r in zip(found, twins, strict=True)):
            return
        for known in self._known.values():
            if known.storage in writes:
                known.version = version_of(known.traced)
        slots = []
        for t, r in zip(found, twins, strict=True):
            if id(t) not in self._known:
                self._known[id(t)] = _Known.of(t, r, self._builder.new_slot())
                self._origins[self._known[id(t)].slot] = self._origin(tensors)
            slots.append(self._known[id(t)].slot)
        self._record(func, args, kwargs, tuple(slots), tensors, writes)

    def _answer(self, func: Callable[..., Any], args: Any, kwargs: Any, tensors: Sequence[torch.Tensor],
                error: Exception | None) -> Any:
        """Return the twin of a call in its place. `error`: what the trace said."""
        ran = self._run(func, args, kwargs, tensors)
        failed = error or CaptureError(f"{func.__name__} of values of the inputs cannot be repeated: "
                                       "compute it outside of the forward. rkmate.dtr runs such models")
        if ran is None:
            raise failed
        real, writes = ran
        leaves, spec = pytree.tree_flatten(real)
        twins = [t for t in leaves if isinstance(t, torch.Tensor)]
        origin = self._origin(tensors)
        read = (torch.Tensor, int, bool, str, type(None), *(() if _ARGUMENT in origin else (float, complex)))
        if writes or (twins and len(twins) != len(leaves)) or not all(isinstance(x, read) for x in leaves):
            # A floating-point number is another one in each step: each would take a plan of its own.
            raise failed if error is not None else CaptureError(
                f"the forward reads a floating-point number from its inputs ({func.__name__}), which is "
                "another one in each step: compute with the tensor. rkmate.dtr runs such models")
        self.answered = True
        if not origin and not twins:            # of a constant, which no call changes
            return real
        self.asked = True
        if any(isinstance(x, (int, float)) and not isinstance(x, bool) for x in leaves):
            self.numbers |= origin
        slots = tuple(self._builder.new_slot() for _ in twins)
        self._origins.update(dict.fromkeys(slots, origin))
        step = self._record(func, args, kwargs, slots, tensors, frozenset())
        self._builder.observe(step, observed(real, twins), slots)
        if not twins:
            return real
        made = []
        for slot, twin in zip(slots, twins, strict=True):
            with outside_trace():
                value = twin.detach().clone()
            # A copy, which may be written to. Outside of an export, a trace takes constants that are fresh.
            traced = (_aten.clone if torch.compiler.is_exporting() else _aten.lift_fresh_copy).default(value)
            self._given.append(_Given(slot, step, twin, value))
            self._known[id(traced)] = _Known.of(traced, twin, slot)
            made.append(traced)
        return pytree.tree_unflatten(made, spec)

    def _run(self, func: Callable[..., Any], args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]
             ) -> tuple[Any, frozenset[int]] | None:
        """Run the call on twins. Returns its result and the storages that it has written to; None if it
        draws, fails, writes to an argument, or if its result is too large."""
        by_id = {id(t): self._known[id(t)].twin for t in tensors}
        twins = list(by_id.values())
        with outside_trace():
            taken, given = pytree.tree_map_only(torch.Tensor, lambda t: by_id[id(t)], (args, kwargs))
            before, versions = RandomState.of(*devices.in_use()), [version_of(t) for t in twins]
            failed, real = False, None
            try:
                real = func(*taken, **given)
            except Exception:
                failed = True
            drew = RandomState.of(*devices.in_use()).states != before.states
            if drew:
                before.restore()
        writes = frozenset(storage_id(t) for t, v in zip(twins, versions, strict=True) if version_of(t) != v)
        written = {self._inputs[storage] for storage in writes if storage in self._inputs}
        if drew or failed or written or any(map(_is_large, tensors_of(real))):
            # Arguments may share memory.
            self._forget(writes | {twin for twin, own in self._inputs.items() if own in written})
            return None
        return real, writes

    def _record(self, func: Callable[..., Any], args: Any, kwargs: Any, slots: tuple[int, ...],
                tensors: Sequence[torch.Tensor], writes: frozenset[int]) -> int:
        numbers = {id(t): Slot(self._known[id(t)].slot) for t in tensors}
        reads = frozenset(self._known[id(t)].storage for t in tensors)
        taken, given = mapped(lambda t: numbers[id(t)], (args, kwargs))
        return self._builder.add(Step(func, taken, given, slots), reads, writes)

    def found_in(self, tensors: Iterable[torch.Tensor]) -> tuple[dict[int, int], Recipe | None]:
        """Return which of a trace's tensors are given at each call: for each storage, the number among the
        recipe's results. The recipe is None if no value was needed. Raises `CaptureError`."""
        if not self.asked:
            return {}, None
        held = set(map(storage_id, tensors))
        used = [g for g in self._given if storage_id(g.value) in held]
        storages = [storage_id(g.twin) for g in self._given]
        copied = {g.slot: g.twin.stride() != g.value.stride() or base_of(g.twin) is not None
                  or storages.count(storage_id(g.twin)) > 1 or storage_id(g.twin) in self._inputs
                  or self._builder.is_written_after(g.step, storage_id(g.twin)) for g in used}
        recipe = self._builder.recipe(copied, sum(g.value.nbytes for g in used))
        self._try(recipe, used)
        return {storage_id(g.value): k for k, g in enumerate(used)}, recipe

    def _try(self, recipe: Recipe, used: Sequence[_Given]) -> None:
        """Raise `CaptureError` where the recipe does not lead from the arguments to what the trace has."""
        recipes = Recipes()
        recipes.add(recipe)
        found = recipes.run(self._tensors)
        if found is None or observed(None, found[1]) != observed(None, [g.value for g in used]):
            raise CaptureError("the forward's computations from values of its inputs give other results a "
                               "second time, so they cannot run before each step. rkmate.dtr runs such "
                               "models")


def drop_unused(program: fx.GraphModule) -> None:
    """Take away the calls that stopped the trace, and were answered: nobody reads them."""
    for node in reversed(list(program.graph.nodes)):
        if node.op == "call_function" and not node.users and isinstance(node.target, OpOverload) \
                and node.target.namespace == "aten" and not schema_of(node.target).is_mutable \
                and torch.Tag.nondeterministic_seeded not in node.target.tags \
                and not any(word in node.target.name() for word in _KEPT):
            program.graph.erase_node(node)
    program.recompile()


class _Watching(TorchFunctionMode):
    def __init__(self, values: Values) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:
        if func in CHECKING:
            with self:
                return seen_inside(func)(*args, **(kwargs or {}))
        return self._values.questions.call(func, args, kwargs or {}, self._values.call)


def _autocast() -> list[Any]:
    kinds = sorted({"cpu", *(d.autocast_kind for d in devices.in_use())})
    return [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]


def _attribute(func: Any) -> str:
    """Return the name of the attribute whose getter a function is."""
    return str(getattr(func.__self__, "__name__", ""))


def _is_large(t: torch.Tensor) -> bool:
    return t.is_floating_point() and t.numel() * t.element_size() > _LARGEST

