"""A training step without arithmetic: every operation of a model's forward and backward, and all numbers.

The model's own Python runs, and autograd's backward, on tensors that have shapes and strides alone. Nothing
is made a graph of, and what an operation returns is asked of torch once for equal shapes: a fraction of
a capture's time. Two recordings whose `text` is equal did the same operations on the same values, in one
order, and differ in `numbers` at most; so `graph.sizes.resized` knows what each number of a captured graph
is at another size.
"""

from __future__ import annotations

import hashlib
import logging
import marshal
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeGuard

import torch
from torch import nn

from rkmate import device as devices
from rkmate.device.random_state import unchanged_random_state
from rkmate.graph.capture.answers import Kinds, Looked
from rkmate.graph.capture.capture import FlatModule
from rkmate.graph.capture.collectives import communicates
from rkmate.graph.capture.repairs import repaired, ways_to_export
from rkmate.graph.capture.state import HostDraws, PythonState
from rkmate.graph.capture.structure import Structure, TensorForm, form_of, like
from rkmate.torch_seam.containers import pytree, tensors_in
from rkmate.torch_seam.modules import buffers_of, parameters_of
from rkmate.torch_seam.patches.libraries import values_told
from rkmate.torch_seam.schema import schema_of
from rkmate.torch_seam.tensors import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    no_torch_function,
    outside_trace,
    without_modes,
    wrapper_tensor,
)
from rkmate.torch_seam.trace import quiet, said_to_export

logger = logging.getLogger("rkmate")

_SMALL = 1 << 16
"""Elements of a closed-over tensor that are compared; a larger one is not taken."""


@dataclass(frozen=True)
class Recording:
    """A dry run."""

    text: bytes
    """Digest of the operations, of what each reads, and of all arguments that are no numbers."""
    numbers: tuple[int | float, ...]
    """Numbers among arguments, and of the shapes, strides and offsets of all results, in order."""
    result: Structure
    """Around the output tensors."""
    steps: Steps | None = field(default=None, compare=False)
    """The operations one by one, if requested."""


Reference = tuple[int, int]
"""A tensor: the step that has made it, and its number among that step's tensors."""


@dataclass(frozen=True)
class Steps:
    """The steps of a dry run: tensors that enter it, and then operations."""

    tokens: tuple[bytes, ...]
    """For each step its operation, all arguments that are no tensors, and the forms of its results."""
    references: tuple[tuple[Reference, ...], ...]
    """For each step the tensors that it reads, in order."""
    entered: tuple[str, ...]
    """Names of the parameters and buffers, which enter after the `inputs` arguments."""
    inputs: int
    backward: int
    """Number of steps before the backward; the last ones copy the `outputs`."""
    tangents: int
    """Number of steps with which the backward begins, that make the gradients of outputs."""
    gradients: tuple[tuple[str, Reference | None], ...]
    """Gradients of arguments, by number, and of parameters, by name."""
    outputs: tuple[Reference, ...]
    assigned: tuple[tuple[str, str], ...]
    """Attributes of objects that the forward assigns, and their values as text."""


Answer = tuple[list[TensorForm | None], Any]
"""Forms of an operation's results, and how they stand in what it returns."""


class _Refused(Exception):
    """The step does something that a dry run has no answer to."""


def dry_run(model: nn.Module, inputs: Structure, forms: Sequence[TensorForm], *,
            looked: Kinds = (), steps: bool = False) -> Recording | None:
    """Record the training step of a call with these tensors; None where that is not possible. `looked`: kinds
    of tensors whose values libraries look at. `steps`: keep the operations, too.

    The model is left as it was. What the step asks of values, or draws on the host, is not possible.
    """
    before, draws = PythonState(model), HostDraws()
    try:
        for way in ways_to_export(model):
            try:
                recorded = _record(model, inputs, forms, Looked(dict(looked)), way, before, steps)
                draws.refuse_change(model)
                return recorded
            except KeyboardInterrupt:
                raise
            except Exception:       # of the model, of torch, or a refusal: the next way, or a capture
                logger.debug("%s cannot be recorded in this way", type(model).__name__, exc_info=True)
                draws.restore()
                before.restore()
        return None
    finally:
        draws.restore()
        before.restore()


def _record(model: nn.Module, inputs: Structure, forms: Sequence[TensorForm], looked: Looked,
            way: Callable[[], AbstractContextManager[None]], state: PythonState,
            steps: bool) -> Recording:
    """Record a dry run. `state`: of the model; it is restored afterwards."""
    with ExitStack() as stack:
        stack.enter_context(unchanged_random_state(*devices.in_use()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for context in (torch.inference_mode(False), torch.enable_grad(), quiet(), repaired("trace", model),
                        said_to_export(),
                        torch.autograd.set_multithreading_enabled(False), way()):
            stack.enter_context(context)
        recorder = _Recorder(looked)
        given = [recorder.enter(f) for f in forms]
        leaves = [t for t in given if t.requires_grad]
        learning = [str(k) for k, t in enumerate(given) if t.requires_grad]
        names: list[str] = []
        stack.callback(state.restore)
        registered: dict[int, torch.Tensor] = {}
        for path, m in model.named_modules():
            if isinstance(m, nn.RNNBase):
                raise _Refused("keeps lists of its weights")
            for registry in (parameters_of(m), buffers_of(m)):
                for name, t in registry.items():
                    if t is None:
                        continue
                    if id(t) not in registered:
                        registered[id(t)] = recorder.enter(form_of(t))
                        names.append(f"{path}.{name}" if path else name)
                        if t.requires_grad:
                            leaves.append(registered[id(t)])
                            learning.append(names[-1])
                    registry[name] = registered[id(t)]
        recorder.real = frozenset(registered)
        flat = FlatModule(model, inputs, state, lambda _: values_told(recorder.known))
        with recorder:
            outputs = flat(*given)
            found = [o for o in outputs if o.requires_grad]
            turn = recorder.count
            tangents = [torch.empty_like(o) for o in found]
            begun = recorder.count - turn
            gradients: Sequence[torch.Tensor | None] = ()
            if found:
                gradients = torch.autograd.grad(found, leaves, tangents, allow_unused=True)
            recorder.mark()
            if found:
                recorder.note(tuple(None if g is None else recorder.number_of(g) for g in gradients))
        recorder.note(tuple(recorder.number_of(o) for o in outputs))
        assigned = state.assigned()
        for a in assigned:
            if isinstance(a.holder, nn.Module) or tensors_in(a.new):
                raise _Refused("assigns an attribute")
            recorder.note((a.path, repr(a.new)))
        if flat.found.effects.objects or flat.found.effects.collected:
            raise _Refused("changes an object among its arguments")
        structure = flat.found.structure
        assert structure is not None
        kept = None if not steps else recorder.steps(
            names, len(given), turn, begun, list(zip(learning, gradients, strict=bool(found))), outputs,
            [(a.path, repr(a.new)) for a in assigned])
    return Recording(recorder.digest(), tuple(recorder.numbers), structure, kept)


class _Sized(torch.Tensor):
    """A tensor without memory, on the device that it says."""

    # It overrides nothing: see `direct`.
    __torch_function__ = no_torch_function  # type: ignore[assignment]

    form: TensorForm
    kind: int
    """Number of the tensor's form in the recording."""
    number: int = -1
    """Number of the tensor in the recording, in the order of creation; -1 if the recording has not made
    it."""

    @staticmethod
    def __new__(cls, form: TensorForm) -> _Sized:
        made: _Sized = wrapper_tensor(
            cls, form.shape, form.stride, form.offset, dtype=form.dtype, device=form.device,
            requires_grad=form.requires_grad)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any,  # type: ignore[override]
                           args: Any = (), kwargs: Any = None) -> Any:
        raise _Refused(f"{func} outside of the recording")


_Origin = tuple[Any, Any, Any, int]
"""An operation with its arguments and keywords, and which of its results."""


class _Recorder(TorchDispatchMode):
    """Takes down every operation, and answers with tensors of the form that its result has."""

    def __init__(self, looked: Looked) -> None:
        super().__init__()
        self._looked = looked
        self.numbers: list[int | float] = []
        self._notes: list[Any] = []
        self._marks: list[tuple[int, int, int]] = []
        """For each step the notes, numbers and tensors before it."""
        self._made: list[tuple[_Sized, _Origin | None]] = []
        """All tensors, each with the call that returned it and its position among the results."""
        self.real: frozenset[int] = frozenset()
        """Ids of the tensors that were replaced by stand-ins."""
        self._kept: list[Any] = []       # as long as they live, no other object has their ids
        self._kinds: dict[TensorForm, int] = {}
        self._names: dict[int, tuple[Any, tuple[str, bool]]] = {}
        """Answers about an operation by its id, together with the operation, which stays alive."""
        self._answers: dict[Any, Any] = {}
        self._wrote = False
        """Whether something was written in place: values from before may be other ones."""
        self._fake = FakeTensorMode()
        self._fake.cache_enabled = False        # equal calls are asked once

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False            # nothing is compiled in here, and to say so at every call takes long

    def note(self, what: Any) -> None:
        """Note a value that two recordings must have in common: plain values, and lists of them."""
        self._notes.append(what)

    @property
    def count(self) -> int:
        """The number of steps so far."""
        return len(self._marks)

    def mark(self) -> None:
        """Begin a step."""
        self._marks.append((len(self._notes), len(self.numbers), len(self._made)))

    def steps(self, entered: Sequence[str], inputs: int, backward: int, tangents: int,
              gradients: Sequence[tuple[str, torch.Tensor | None]],
              outputs: Sequence[torch.Tensor], assigned: Sequence[tuple[str, str]]) -> Steps:
        """Return the steps up to the last mark, which begins none."""
        tokens, references, of = list[bytes](), list[tuple[Reference, ...]](), list[Reference]()
        for step, (start, end) in enumerate(pairwise(self._marks)):
            words = [w for note in self._notes[start[0]:end[0]] for w in note]
            read = [w for w in words if type(w) is int] if step >= inputs + len(entered) else []
            references.append(tuple([of[w] for w in read]))
            count = end[2] - start[2]
            of += [(step, k) for k in range(count)]
            tokens.append(marshal.dumps((count, [None if read and type(w) is int else w for w in words],
                                         self.numbers[start[1]:end[1]]), 2))

        def place(t: torch.Tensor) -> Reference:
            return of[self.number_of(t)]

        return Steps(tuple(tokens), tuple(references), tuple(entered), inputs, backward, tangents,
                     tuple((name, None if t is None else place(t)) for name, t in gradients),
                     tuple(map(place, outputs)), tuple(assigned))

    def digest(self) -> bytes:
        """Return the digest of everything that was noted."""
        return hashlib.sha256(marshal.dumps(self._notes, 2)).digest()       # as of 3, equal values may differ

    def enter(self, form: TensorForm) -> torch.Tensor:
        """Return a new tensor of a form."""
        self.mark()
        made = self._new(form, None)
        self.note((str(form.dtype), str(form.device), form.requires_grad, len(form.shape)))
        return made

    def _new(self, form: TensorForm, origin: _Origin | None) -> _Sized:
        made = _Sized(form)
        made.form, made.kind = form, self._kinds.setdefault(form, len(self._kinds))
        made.number = len(self._made)
        self._made.append((made, origin))
        self.numbers += form.shape
        self.numbers += form.stride
        self.numbers.append(form.offset)
        return made

    def _owns(self, t: torch.Tensor) -> TypeGuard[_Sized]:
        return isinstance(t, _Sized) and t.number >= 0 and self._made[t.number][0] is t

    def _form(self, t: torch.Tensor) -> TensorForm:
        return t.form if self._owns(t) else form_of(t)

    def number_of(self, t: torch.Tensor) -> int:
        """Return the number of a tensor that was made here."""
        if not self._owns(t):
            raise _Refused("a tensor of its own")
        return t.number

    def _known(self, func: Any) -> tuple[str, bool]:
        """Return an operation's name, and whether it returns what it has written to."""
        found = self._names.get(id(func))
        if found is None:
            writes = schema_of(func).is_mutable and any(
                r.alias_info is not None and r.alias_info.is_write for r in schema_of(func).returns)
            found = self._names[id(func)] = (
                func, (func.name() if hasattr(func, "name") else repr(func), writes))
        return found[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if communicates(func, args, kwargs):
            raise _Refused(f"{func} communicates")
        self.mark()
        name, writes = self._known(func)
        words: list[Any] = [name]
        key: list[Any] = [id(func)]
        tensors: list[torch.Tensor] = []
        self._read((args, kwargs), words, key, tensors)
        if tensors and not any(map(self._owns, tensors)):
            return self._of_real(func, args, kwargs, words)
        self.note(words)
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._value(args[0]).item()
        if writes and len(tensors) == 1:
            return self._written(func, args, kwargs)        # nothing has to fit to it
        at = tuple(key)
        answer = self._answers.get(at)
        if answer is None:
            answer = self._answers[at] = self._ask(func, args, kwargs)
        if writes:
            return self._written(func, args, kwargs)
        leaves, spec = answer
        results = [None if x is None else self._new(x, (func, args, kwargs, k)) for k, x in enumerate(leaves)]
        return results[0] if spec.is_leaf() else pytree.tree_unflatten(results, spec)

    def known(self, t: torch.Tensor) -> torch.Tensor | None:
        """Return the value of a tensor; None where it depends on an input of no kind."""
        try:
            return self._value(t)
        except _Refused:
            return None

    def _value(self, of: torch.Tensor) -> torch.Tensor:
        """Return the value of a tensor that depends on no input (position ids), or on those of a kind (masks
        of ones), which libraries ask for."""
        values: dict[torch.Tensor, Any] = {}                # by identity, as tensors are hashed
        todo = [of]
        if self._wrote:
            raise _Refused("asks for a value")
        while todo:
            t = todo[-1]
            if t in values:
                todo.pop()
                continue
            if not self._owns(t):
                values[t] = t
                continue
            origin = self._made[t.number][1]
            given = self._looked.value(t.number, t.form) if origin is None else None
            if given is not None:
                values[t] = given
                continue
            if origin is None:
                raise _Refused("asks for a value")
            func, args, kwargs, k = origin
            if torch.Tag.nondeterministic_seeded in func.tags:
                raise _Refused("asks for a value")
            needs = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
            missing = [a for a in needs if a not in values]
            if missing:
                todo += missing
                continue
            with outside_trace():
                taken, given = pytree.tree_map_only(torch.Tensor, values.__getitem__, (args, kwargs))
                values[t] = pytree.tree_leaves(func(*taken, **given))[k]
            todo.pop()
        found: torch.Tensor = values[of]
        return found

    def _read(self, value: Any, words: list[Any], key: list[Any], tensors: list[torch.Tensor]) -> None:
        kind = type(value)
        if kind is _Sized and self._owns(value):
            tensors.append(value)
            words.append(value.number)
            key.append(-1 - value.kind)
        elif kind is bool or value is None:
            words.append(repr(value))
            key.append(value)
        elif isinstance(value, (int, float)):
            words.append(kind.__name__)
            key.append((kind, value))
            self.numbers.append(value)
        elif isinstance(value, torch.Tensor):
            tensors.append(value)
            words.append(self._constant(value))
            key.append(form_of(value))
        elif isinstance(value, (list, tuple)):
            words.append(f"({len(value)}")
            key.append(len(value))
            for v in value:
                self._read(v, words, key, tensors)
        elif isinstance(value, dict):
            words.append(f"{{{len(value)}")
            for k, v in value.items():
                words.append(k)
                key.append(k)
                self._read(v, words, key, tensors)
        else:
            words.append(repr(value))
            key.append(value if isinstance(value, str) else repr(value))

    def _constant(self, t: torch.Tensor) -> Any:
        """Return a closed-over tensor, identified by its content."""
        if isinstance(t, _Sized) or id(t) in self.real or t.requires_grad or t.numel() > _SMALL \
                or t.layout is not torch.strided:
            raise _Refused("computes with a tensor that is not its own")
        with without_modes():
            content = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() \
                if t.dim() or t.numel() else b""
        return tuple(t.shape), str(t.dtype), hashlib.sha256(content).hexdigest()

    def _of_real(self, func: Any, args: Any, kwargs: Any, words: list[Any]) -> Any:
        """Run an operation on closed-over tensors alone: their values are known."""
        self.note(words)
        if schema_of(func).is_mutable:
            raise _Refused(f"{func} writes to a closed-over tensor")
        with without_modes():
            found = func(*args, **kwargs)
        self._kept.append((args, found))
        return found

    def _written(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the tensors that an operation in place has written to."""
        names = {a.name: (args[k] if k < len(args) else kwargs.get(a.name))
                 for k, a in enumerate(schema_of(func).arguments)
                 if a.alias_info is not None and a.alias_info.is_write}
        found = list(names.values())
        self._wrote = True
        if len(found) != len(schema_of(func).returns) or any(not isinstance(t, torch.Tensor) for t in found):
            raise _Refused(f"{func} writes")
        return found[0] if len(found) == 1 else tuple(found)

    def _ask(self, func: Any, args: Any, kwargs: Any) -> Answer:
        """Return the forms of an operation's results, by torch's own rules."""
        def fake(t: Any) -> Any:
            if not isinstance(t, torch.Tensor):
                return t
            f = self._form(t)
            return FakeTensor(self._fake, like(f), f.device)

        with without_modes(), torch.no_grad():
            taken, given = pytree.tree_map(fake, (args, kwargs))
            with self._fake:
                out = func(*taken, **given)
        leaves, spec = pytree.tree_flatten(out)
        for x in leaves:
            if x is not None and not isinstance(x, torch.Tensor):
                raise _Refused(f"{func} returns a value")
        return [None if x is None else form_of(x)._replace(requires_grad=False) for x in leaves], spec
