"""`rkmate.doctor`: whether rkmate works here, whether a model can be captured, and what its budgets cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from rkmate.api import checked_sample, tradeoff
from rkmate.diagnosis.machine import Finding, examine, problems
from rkmate.errors import CaptureError, RkmateError
from rkmate.graph.capture.state import BuffersAndDraws
from rkmate.offload.target import HOST
from rkmate.parts.kinds import is_worth_looking_at, kind_key
from rkmate.pipeline.model import as_before, flags_to_plan
from rkmate.pipeline.prepare import check_model, trace
from rkmate.pipeline.settings import Settings
from rkmate.settings import Chosen, Options, chosen
from rkmate.show.amounts import duration, share, size
from rkmate.show.curve import Curve
from rkmate.show.plan import Plan
from rkmate.support.progress import Progress

if TYPE_CHECKING:
    from typing_extensions import Unpack

FREE = 0.01
"""Overhead up to which a budget counts as free."""


@dataclass(frozen=True)
class Part:
    """Submodules of one kind: of one class, with parameters of the same shapes."""

    names: tuple[str, ...]
    """Names of the submodules in the model."""
    kind: str
    """Name of the class."""
    why: str
    """Why a call cannot be captured, with what to do; empty if it can be."""

    def __str__(self) -> str:
        several = f" to {self.names[-1]}, {len(self.names)} in all" if len(self.names) > 1 else ""
        return f"{self.names[0]}{several} ({self.kind}){f': {self.why}' if self.why else ''}"


@dataclass(frozen=True)
class Diagnosis:
    """The result of `rkmate.doctor`. Prints as a few lines."""

    machine: tuple[Finding, ...]
    """Findings about the machine."""
    model: str = ""
    """Name of the model's class; empty if no model was given."""
    curve: Curve | None = None
    """Plans from the model's own peak to the smallest budget; None without a model, or if it cannot be
    planned."""
    error: RkmateError | None = None
    """Why the model cannot be planned as a whole with the options that were given; None if it can."""
    parts: tuple[Part, ...] = ()
    """If the model cannot be captured: its outermost submodules that can be, and the innermost ones that
    cannot."""
    advice: tuple[str, ...] = ()
    """Advice on the next step."""

    @property
    def ok(self) -> bool:
        """Whether nothing is broken here, and the model, if one was given, can be planned as a whole."""
        return not problems(self.machine) and self.error is None

    @property
    def smallest(self) -> Plan | None:
        """The plan for the smallest budget."""
        return None if self.curve is None else self.curve[-1]

    def __str__(self) -> str:
        return "\n".join([*map(str, self.machine), *(["", self.about_model] if self.model else [])])

    @property
    def about_model(self) -> str:
        """The printed lines about the model; empty if no model was given."""
        lines = [f"{self.model}: " + ("can be planned" if self.error is None else
                                      "cannot be planned as a whole")] if self.model else []
        if self.error is not None and not any(part.why for part in self.parts):
            lines += [f"  {self.error}"]
        for can, title in ((True, "can be captured"), (False, "cannot be captured")):
            lines += [f"  {title}: {part}" for part in self.parts if (not part.why) is can]
        if self.curve is not None:
            lines += [f"  {line}" for line in _of_curve(self.curve)]
        return "\n".join([*lines, *(f"  -> {text}" for text in self.advice)])


def doctor(model: nn.Module | None = None, args: Sequence[Any] = (),
           kwargs: Mapping[str, Any] | None = None, *, loss: Callable[..., Any] | None = None,
           loss_args: Sequence[Any] = (), **options: Unpack[Options]) -> Diagnosis:
    """Report what works on this machine, and what a model's budgets cost. Run this first.

    This tries everything that rkmate uses (torch, devices, a compiler, the solver, the disk, Graphviz),
    captures the model, and plans it from its own peak to the smallest budget, as `tradeoff` does. If the
    model cannot be captured, its forward runs once, and each submodule is tried with the inputs that it got.

    Args:
        model: the module to train. Its buffers, attributes, train flags and all generators are left as they
            were. Without it, only the machine is examined.
        args, kwargs, loss, loss_args: as for `wrap`.
        options: `rkmate.Options`, as for `wrap`. With ``offload``, that folder's disk is tried.
            ``Settings(costs="analytic")`` estimates times instead of measuring them, which is faster.

    Returns:
        A `Diagnosis`, to print. A model that cannot be planned is a diagnosis, too, and not an error.

    Raises:
        ArgumentError: the model is no module, or an argument has a wrong type.
        UnknownOption: a keyword is unknown; the message names the nearest option.
    """
    call = chosen(options, doctor)
    place = call.settings.offload
    if model is not None:
        check_model(model)
    machine = examine(None if place is None or place.place == HOST else place.place)
    if model is None:
        return Diagnosis(machine)
    return of_model(machine, model, args, kwargs, loss, loss_args, call)


def of_model(machine: tuple[Finding, ...], model: nn.Module, args: Any, kwargs: Any, loss: Any,
             loss_args: Any, call: Chosen) -> Diagnosis:
    """Return the diagnosis of a model on a machine that was looked at."""
    name = type(model).__name__
    try:
        whole = replace(call, settings=replace(call.settings, parts="never"))
        curve = tradeoff(model, args, kwargs, loss=loss, loss_args=loss_args, **whole.options())
    except CaptureError as error:
        parts, advice = _looked_into(model, tuple(args), dict(kwargs or {}), call.settings, loss is not None)
        found = None if advice else _with_opaque(model, args, kwargs, loss, loss_args, call)
        if found is not None:
            advice = (f"{OPAQUE} plans the model as a whole: what cannot be captured runs as it is, inside "
                      "of the plan", f'rkmate.wrap(model, args, budget="{_typed(knee(found))}", {OPAQUE})')
        return Diagnosis(machine, name, found, error, parts, advice or _without_a_plan(parts))
    except RkmateError as error:
        return Diagnosis(machine, name, None, error)
    return Diagnosis(machine, name, curve, None, (),
                     (f'rkmate.wrap(model, args, budget="{_typed(knee(curve))}")',))


OPAQUE = 'settings=rkmate.Settings(opaque="auto")'


def _with_opaque(model: nn.Module, args: Any, kwargs: Any, loss: Any, loss_args: Any,
                 call: Chosen) -> Curve | None:
    """Return the curve of a model whose submodules run as they are where they cannot be captured; None where
    that does not help."""
    if call.settings.opaque:
        return None
    try:
        return tradeoff(model, args, kwargs, loss=loss, loss_args=loss_args, progress=call.progress,
                        settings=replace(call.settings, opaque="auto"))
    except RkmateError:
        return None


def _without_a_plan(parts: Sequence[Part]) -> tuple[str, ...]:
    """Return what to do about a model that cannot be planned as a whole."""
    if any(not part.why for part in parts):
        return ("rkmate.apply(model, budget=...) plans the parts that can be captured, and the rest runs as "
                "it is",)
    return ("rkmate.dtr(budget=...) trains models whose graph changes from step to step",)


# -- parts of a model ------------------------------------------------------------------------------

def _looked_into(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings,
                 with_loss: bool) -> tuple[tuple[Part, ...], tuple[str, ...]]:
    """Return the parts of a model that can and cannot be captured, and what to do, if that is known."""
    training = settings.run.training
    alone = replace(settings, calls=1, trains="all", loss_bytes=0, deferred_outputs="never", parts="never",
                    compile=False, offload=None, gradients="returned")
    with flags_to_plan(model, True if training is None and not model.training else training):
        if with_loss and not _why_not(model, args, kwargs, alone):
            return (), ("the model can be captured without its loss: leave out loss=, and compute the loss "
                        "from the outputs",)
        try:
            calls = _calls(model, args, kwargs)
        except Exception as error:      # whatever the user's code raises
            return (), (f"the model's own forward fails on these inputs ({type(error).__name__}: {error}): "
                        "check args and kwargs",)
        return _Search(calls, alone).parts(model), ()


def _calls(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Calls:
    """Run a forward, and return the arguments of the first call of each submodule."""
    calls: Calls = {}

    def seen(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        calls.setdefault(module, (given, named))

    with _left_as_it_is(model), ExitStack() as stack:
        for module in model.modules():
            handle = module.register_forward_pre_hook(seen, with_kwargs=True)
            stack.callback(handle.remove)
        model(*args, **kwargs)
    return calls


Calls = dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]]
"""Arguments by submodule."""


@contextmanager
def _left_as_it_is(model: nn.Module) -> Iterator[None]:
    """Put buffers, attributes and generators back after the context."""
    before = BuffersAndDraws(model)
    try:
        with as_before(model):
            yield
    finally:
        before.restore()


def _why_not(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings) -> str:
    """Return why a call cannot be captured; empty if it can be."""
    try:
        checked_sample(module, args, kwargs)
        trace(module, args, kwargs, settings, Progress(False))
    except RkmateError as error:
        return str(error)
    return ""


class _Search:
    """Tries submodules, from the outermost ones inwards; of several that are alike, the first."""

    def __init__(self, calls: Calls, settings: Settings) -> None:
        self._calls, self._settings = calls, settings
        self._kinds: dict[object, tuple[str, str, list[str]]] = {}
        """Common properties of submodules -> name of their class, why they cannot be captured, names."""
        self._around: set[object] = set()
        """Kinds that have a part inside that cannot be captured either."""

    def parts(self, model: nn.Module) -> tuple[Part, ...]:
        """Return the outermost submodules that can be captured, and the innermost ones that cannot."""
        self._visit(model, "")
        return tuple(Part(tuple(names), kind, why) for key, (kind, why, names) in self._kinds.items()
                     if key not in self._around)

    def _visit(self, module: nn.Module, path: str) -> bool:
        """Look into the children of a module; returns whether one cannot be captured."""
        fails = False
        for name, child in module.named_children():
            inner = f"{path}.{name}" if path else name
            if child not in self._calls:                # a list of modules, or one that was not called
                fails |= self._visit(child, inner)
            elif is_worth_looking_at(child) and any(p.requires_grad for p in child.parameters()):
                fails |= self._fails(child, inner)
        return fails

    def _fails(self, module: nn.Module, name: str) -> bool:
        key = kind_key(module)
        if key not in self._kinds:
            why = _why_not(module, *self._calls[module], self._settings)
            self._kinds[key] = type(module).__name__, why, []
        _, why, names = self._kinds[key]
        names.append(name)
        if why and self._visit(module, name):
            self._around.add(key)
        return bool(why)


# -- budgets ---------------------------------------------------------------------------------------

def free(curve: Sequence[Plan]) -> Plan:
    """Return the plan for the smallest budget that costs at most 1% more time than the fastest plan."""
    fastest = min(p.step_seconds for p in curve)
    return min((p for p in curve if p.step_seconds <= (1 + FREE) * fastest), key=lambda p: p.peak_bytes)


def knee(curve: Sequence[Plan]) -> Plan:
    """Return the plan at the curve's knee: it saves most memory for its time, both as shares of what lies
    between the free budget (`free`) and the smallest one."""
    begin, end = free(curve), min(curve, key=lambda p: p.peak_bytes)
    memory, time = begin.peak_bytes - end.peak_bytes, end.step_seconds - begin.step_seconds
    if memory <= 0 or time <= 0:
        return end

    def gain(plan: Plan) -> float:
        return (begin.peak_bytes - plan.peak_bytes) / memory - (plan.step_seconds - begin.step_seconds) / time
    return max((p for p in curve if end.peak_bytes <= p.peak_bytes <= begin.peak_bytes), key=gain)


def _typed(plan: Plan) -> str:
    """Return a budget as one types it, rounded up: ``"13MiB"``."""
    mebi, unit = 2 ** 20, 2 ** 10
    small = plan.budget_bytes < 10 * mebi
    return f"{-(-plan.budget_bytes // (unit if small else mebi))}{'KiB' if small else 'MiB'}"


def _of_curve(curve: Curve) -> Iterator[str]:
    """Write a curve's own peak and the budgets worth knowing."""
    whole = curve[0]
    yield (f"its own peak: {size(whole.baseline_peak_bytes)}, {duration(whole.baseline_seconds)} for a step "
           "(forward, loss and backward)")
    told: dict[int, list[str]] = {}
    for plan, what in ((free(curve), "free"), (knee(curve), "the knee"), (curve[-1], "the smallest")):
        told.setdefault(curve.index(plan), []).append(what)
    for index, names in told.items():
        plan = curve[index]
        yield (f"{' and '.join(names):<13} budget: {size(plan.budget_bytes)} "
               f"({share(plan.budget_bytes, plan.baseline_peak_bytes)} of that), time {plan.overhead:+.0%}")
