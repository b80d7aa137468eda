"""``rkmate.dtr.wrap``: a module whose forward and backward stay inside a budget."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rkmate import device as devices
from rkmate.dtr.errors import BudgetExceeded, ThrashingError
from rkmate.dtr.runtime.memory import Report
from rkmate.dtr.session import Session, State
from rkmate.errors import ArgumentError, BackwardError
from rkmate.stand_in import StandIn
from rkmate.torch_seam.containers import pytree
from rkmate.torch_seam.tensors import has_accumulation_hooks, has_gradient_hooks, will_accumulate


class DynamicModule(StandIn):
    """A module that trains inside a budget without a plan. Made by ``rkmate.dtr.wrap``.

    The module shares the original's parameters, buffers and submodules, returns what the original
    returns, and forwards other attributes to the original. Each call is one batch: activations are
    kept, evicted and rematerialized from the forward to the end of the backward.
    """

    _FIELDS = frozenset(("_options", "_reports"))
    _options: dict[str, Any]
    _reports: list[Report]

    def __init__(self, model: nn.Module, options: dict[str, Any]) -> None:
        self._stand_in_for(model)
        self._set_up(options)

    def _set_up(self, options: dict[str, Any]) -> None:
        self.__dict__.update(_options=options, _reports=[])

    def _made_with(self) -> tuple[dict[str, Any]]:
        return (self._options,)

    @property
    def reports(self) -> list[Report]:
        """Reports of the batches whose backward has ended, the oldest first."""
        return self._reports

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original's forward, inside the budget if gradients are required."""
        model = self._original
        leaves, structure = pytree.tree_flatten((args, kwargs))
        places = [i for i, v in enumerate(leaves) if isinstance(v, torch.Tensor)]
        tensors = [leaves[i] for i in places]
        names, parameters = [], []
        for name, parameter in model.named_parameters():
            names.append(name)
            parameters.append(parameter)
        wanted = any(t.requires_grad for t in (*tensors, *parameters))
        if not torch.is_grad_enabled() or not wanted:
            return model(*args, **kwargs)
        batch = _Batch(self, leaves, structure, places, names)
        results = _Boundary.apply(batch, len(tensors), *tensors, *parameters)
        return batch.rebuild(results)


class _Batch:
    """A forward and the backward that belongs to it."""

    def __init__(
        self,
        module: DynamicModule,
        leaves: list[Any],
        structure: Any,
        places: list[int],
        names: list[str],
    ) -> None:
        self.module = module
        self.session = Session(**module.__dict__["_options"])
        self.leaves = leaves
        self.structure = structure
        self.places = places
        self.names = names
        self.inner: list[torch.Tensor] = []
        self.parameters: tuple[torch.Tensor, ...] = ()
        self.results: list[torch.Tensor] = []
        self.shape: Any = None
        self.plain: list[Any] = []
        self.spent = False

    def run(self, inputs: tuple[torch.Tensor, ...], parameters: tuple[torch.Tensor, ...]) -> list[Any]:
        """Run the forward on copies of the leaves that share their memory."""
        model = self.module._original
        fresh = [t.detach().requires_grad_(t.requires_grad) for t in (*inputs, *parameters)]
        self.inner, self.parameters = fresh, parameters
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, fresh, strict=False):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        state = dict(zip(self.names, fresh[len(inputs) :], strict=True))
        kept = State(model)
        self.session.__enter__()
        try:
            with torch.enable_grad():
                result = torch.func.functional_call(model, state, args, kwargs)
            values, self.shape = pytree.tree_flatten(result)
            engine = self.session.engine
            for value in values:
                if isinstance(value, torch.Tensor):
                    engine.keep(value)
        except BaseException as error:
            self.session.__exit__(type(error), error, error.__traceback__)
            if isinstance(error, (BudgetExceeded, ThrashingError, KeyboardInterrupt)):
                kept.restore()
            raise
        self.session.pause()
        self.leaves = []
        self.plain = values
        self.results = [v for v in values if isinstance(v, torch.Tensor)]
        return [v.detach() for v in self.results]

    def rebuild(self, results: tuple[torch.Tensor, ...]) -> Any:
        """Return the original's result, with the boundary's tensors in it."""
        given = iter(results)
        values = [next(given) if isinstance(v, torch.Tensor) else v for v in self.plain]
        self.plain = []
        return pytree.tree_unflatten(values, self.shape)

    def back(self, gradients: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
        """Run the backward. Returns gradients of the inputs and the parameters."""
        if self.spent:
            raise BackwardError(
                "a second backward through one forward: its activations are gone after the first. Add the "
                "losses and call one backward, or use the context manager (rkmate.dtr(budget=...))"
            )
        self.spent = True
        wanted = [t for t in self.inner if t.requires_grad]
        pairs = [
            (r, g)
            for r, g in zip(self.results, gradients, strict=True)
            if g is not None and r.requires_grad
        ]
        self.results = []
        # An existing gradient is added to, as without the wrapper: a second one would come on top of the
        # budget.
        places = range(len(self.inner) - len(self.parameters), len(self.inner))
        standing = {i for i, p in zip(places, self.parameters, strict=True) if _may_add_to_gradient(p)}
        for i in standing:
            self.inner[i].grad = self.parameters[i - places.start].grad
        session = self.session
        session.resume()
        try:
            with torch.enable_grad():
                torch.autograd.backward(
                    [r for r, _ in pairs], [g for _, g in pairs], inputs=wanted
                )
            pairs.clear()
        except BaseException as error:
            session.__exit__(type(error), error, error.__traceback__)
            raise
        session.__exit__(None, None, None)
        self.module.reports.append(session.report)
        found = [None if i in standing else t.grad for i, t in enumerate(self.inner)]
        self.inner, self.parameters = [], ()
        return found


def _may_add_to_gradient(parameter: torch.Tensor) -> bool:
    """Return whether the end of the running backward should add to the gradient that a parameter has, and no
    hook needs to see the added gradient."""
    if not (parameter.is_leaf and parameter.requires_grad) or parameter.grad is None:
        return False
    return not has_gradient_hooks(parameter) and not has_accumulation_hooks(parameter) \
        and will_accumulate(parameter)


class _Boundary(torch.autograd.Function):
    """Autograd node for a whole call; the session handles everything inside."""

    @staticmethod
    def forward(ctx: Any, batch: _Batch, inputs: int, *tensors: torch.Tensor) -> Any:
        results = batch.run(tensors[:inputs], tensors[inputs:])
        ctx.batch = batch
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(r for r, inner in zip(results, batch.results, strict=True) if not inner.requires_grad)
        )
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return (None, None, *ctx.batch.back(gradients))


def wrap(model: nn.Module, budget: int | str | None, **options: Any) -> DynamicModule:
    """Return a module that computes what ``model`` computes, within ``budget`` bytes for each step.

    ``options`` are the options of ``Session``. Each call allows one backward and no double backward;
    use the context manager if you need more.

    Raises ``ArgumentError`` if ``model`` is not a module or an option is wrong. A call raises
    ``BudgetExceeded`` or ``ThrashingError``; parameters, buffers and generators are then as before
    the call. If the backward raises one of these errors, buffers stay as the forward left them.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, DynamicModule):
        raise ArgumentError("model is wrapped already")
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:          # it may get its memory later
            devices.of(tensor)
    if options.get("restore") is not None:
        raise ArgumentError("restore is for the context manager: a module restores itself")
    if options.get("log") is not None:
        raise ArgumentError("log is for the context manager: each call of a module is a run")
    given = {"budget": budget, **options}
    try:
        Session(**given)
    except TypeError as error:
        raise ArgumentError(f"wrap: {error}") from None
    return DynamicModule(model, given)
