"""Releases of torch: which were tested, and a self test for each feature that is not torch's documented API.

A process whose torch was not tested runs the self tests once: those of the features that everything needs
when `rkmate.torch_seam` is first imported, the others (`patches.features`) before the first capture. A
feature that fails is turned off with a warning, or, if nothing works without it, torch is refused with an
error that names the releases to install.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from rkmate.errors import TorchVersionError
from rkmate.support.warn import warn

SEEN = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
"""Releases that the tests run with, oldest first."""


GROUPS = "compiled groups"
"""A feature that `rkmate.device` asks for by name."""


@dataclass(frozen=True)
class Feature:
    """Something that rkmate does with undocumented names of torch."""

    name: str
    """The feature in a few words; names are unique."""
    check: Callable[[], None]
    """Self test of a few milliseconds: raises if this torch does not have what the feature needs."""
    without: str | None
    """The loss for a user if the feature is off; None if nothing works without it."""


_off: dict[str, str] = {}
"""Features that failed their self test, and what it said."""


def release() -> str:
    """Return the release of the torch that is installed, without the name of its build."""
    return str(torch.__version__).partition("+")[0]


def was_seen() -> bool:
    """Return whether the tests run with this release."""
    return release() in SEEN


def is_off(feature: str) -> bool:
    """Return whether a feature failed its self test in this process."""
    return feature in _off


def why_off(feature: str) -> str:
    """Return what the self test of a feature said; empty if the feature is on."""
    return _off.get(feature, "")


def all_off() -> dict[str, str]:
    """Return the features that failed their self test in this process, and what each test said."""
    return dict(_off)


def failure(feature: Feature) -> str:
    """Run a feature's self test. Returns what is missing; empty if it passes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")         # of modules that a check is the first to import
            feature.check()
    except Exception as error:          # whatever another torch raises, the feature cannot be used
        return f"{type(error).__name__}: {error}".rstrip(": ")
    return ""


def check(features: Iterable[Feature]) -> None:
    """Run the self tests of features, and turn those off that fail, with one warning for each.

    Raises:
        TorchVersionError: a feature fails that nothing works without.
    """
    for feature in features:
        why = failure(feature)
        if why and feature.without is None:
            raise refusal(f"{feature.name}: {why}")
        if why:
            _off[feature.name] = why
            warn(f"this version of rkmate was not tested with torch {release()}, where {feature.name} cannot "
                 f"be used ({why}): {feature.without}. {_REMEDY}")


def refusal(why: str) -> TorchVersionError:
    """Return the error for a torch that cannot be used."""
    return TorchVersionError(f"this version of rkmate cannot work with torch {release()} ({why}). {_REMEDY}")


_REMEDY = f"Install a release that it was tested with: pip install 'torch>={SEEN[0]},<={SEEN[-1]}'"


# -- what everything needs ---------------------------------------------------------------------

def _operators() -> None:
    from rkmate.torch_seam import schema

    aten = torch.ops.aten
    add, add_ = aten.add.Tensor, aten.add_.Tensor
    one = torch.ones(2, requires_grad=True)
    assert isinstance(add, schema.OpOverload) and isinstance(schema.HigherOrderOperator, type)
    assert (schema.operator_name(add), schema.overload_name(add)) == ("add", "Tensor")
    assert schema.schema_of(add_).is_mutable and schema.schema_of(add_).returns[0].alias_info.is_write
    assert [a.name for a in schema.schema_of(add).arguments][:2] == ["self", "other"]
    assert schema.native_call(add)(one, one).tolist() == [2.0, 2.0]
    for context in (schema.below_autograd, schema.below_views):
        with context():
            assert not (one + one).requires_grad
    before = dict(aten.prod.default.py_kernels)
    with schema.python_kernels_replaced({aten.prod.default: torch.prod}):
        assert torch.prod in aten.prod.default.py_kernels.values()
    assert aten.prod.default.py_kernels == before


def _tensors() -> None:
    from rkmate.torch_seam import tensors

    class Seeing(tensors.TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.seen += 1
            return func(*args, **(kwargs or {}))

    x = torch.zeros(4)
    part, before = x[1:], tensors.version_of(x)
    part.add_(1)
    assert tensors.base_of(part) is x and tensors.base_of(x) is None
    assert tensors.version_of(x) > before
    assert tensors.storage_id(part) == tensors.storage_id(x) == tensors.storage_id(x.untyped_storage())
    assert tensors.storage_users(x) >= 1
    lives = tensors.storage_lives(y := torch.zeros(4))
    assert lives()
    del y
    assert not lives()
    with Seeing() as mode:
        with tensors.outside_trace(), tensors.without_torch_function(), tensors.read_directly():
            x.neg()
        assert mode.seen == 0
        x.neg()
        assert mode.seen == 1
    tensors.copy_all([x], [torch.ones(4)])
    tensors.add_to_all([x], 1)
    assert x.tolist() == [2.0] * 4
    images = torch.empty(1, 2, 3, 3).to(memory_format=torch.channels_last)
    assert tensors.suggest_memory_format(images) is torch.channels_last


class _Blank(torch.Tensor):
    """A subclass for tensors without memory."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        raise AssertionError(func)


def _fake_tensors() -> None:
    from rkmate.torch_seam import tensors

    blank = tensors.wrapper_tensor(_Blank, (2, 3), (1, 2), 4, dtype=torch.float16, device=torch.device("cpu"))
    assert (tuple(blank.shape), blank.stride(), blank.storage_offset()) == ((2, 3), (1, 2), 4)
    assert callable(tensors.no_torch_function)
    mode = tensors.FakeTensorMode()
    with mode:
        assert isinstance(torch.empty(2) + 1, tensors.FakeTensor)
    cpu = torch.device("cpu")
    other = tensors.FakeTensor(mode, torch.empty(0, device="meta"), cpu)
    made = tensors.fake_like(other, torch.empty(2, 3, device="meta"), True)
    assert (made.device, tuple(made.shape), made.requires_grad) == (cpu, (2, 3), True)
    assert isinstance(made + 1, tensors.FakeTensor)


def _modules() -> None:
    from rkmate.torch_seam import modules

    layer = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    assert modules.parameters_of(layer[0])["weight"] is layer[0].weight
    assert modules.buffers_of(layer[0])["running_mean"] is layer[0].running_mean
    assert modules.submodules_of(layer)["0"] is layer[0]
    assert all(isinstance(layer.__dict__[name], dict) for name in modules.REGISTRIES)
    assert layer.__dict__.keys() >= modules.SHARED
    layer.register_forward_hook(lambda *_: None)
    layer.register_forward_pre_hook(lambda *_: None)
    assert len(modules.forward_hooks_of(layer)) == len(modules.forward_pre_hooks_of(layer)) == 1
    assert not modules.has_backward_hooks(layer)
    assert modules.compiled_call(layer) is None and modules.running_data_parallel() is None
    modules.replace_call(layer, lambda x: "replaced")
    assert layer(None) == "replaced"
    modules.replace_call(layer, None)
    assert modules.own_call(layer)(torch.ones(2, 2)).shape == (2, 2)
    modules.apply_to_tensors(layer, lambda t: t.double() if t.is_floating_point() else t)
    assert layer[0].weight.dtype is torch.float64


def _autograd() -> None:
    from rkmate.torch_seam import tensors

    seen = []
    asked: list[list[bool]] = []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):  # type: ignore[no-untyped-def]
            return x + y

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            seen.append((tensors.will_accumulate(leaf), tensors.keeps_graph()))
            asked.append([tensors.is_asked_for(node) for node, _ in ctx.next_functions])
            assert tensors.inside_backward()
            return grad, grad

    leaf, other = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    loss = Asks.apply(leaf, other).sum()
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, leaf)
    assert seen == [(True, True), (False, False)]
    assert asked == [[True, True], [True, False]]
    assert not tensors.inside_backward()
    packed: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        packed.append(t)
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        with tensors.without_saved_tensor_hooks():
            leaf.exp()
        assert not packed
        leaf.exp()
        assert packed
    assert not tensors.has_gradient_hooks(leaf) and not tensors.has_accumulation_hooks(leaf)
    leaf.register_hook(lambda g: None)
    leaf.register_post_accumulate_grad_hook(lambda t: None)
    assert tensors.has_gradient_hooks(leaf) and tensors.has_accumulation_hooks(leaf)


def _graphs() -> None:
    from torch import fx

    from rkmate.torch_seam import nodes, trace

    with trace.said_to_export():
        assert torch.compiler.is_exporting() and torch.compiler.is_compiling()
    assert not torch.compiler.is_exporting()
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = nodes.add_like(graph, graph.call_function(torch.neg, (x,)), (x,), {})
    assert made.args == (x,) and made in x.users
    made.meta.update(nodes.phase_tag(backward=True))
    assert nodes.is_backward(nodes.copied(graph, made, {x: x}))


def _containers() -> None:
    from rkmate.torch_seam.containers import pytree

    leaves, spec = pytree.tree_flatten({"a": (1, [2])})
    assert leaves == [1, 2] and pytree.tree_unflatten(leaves, spec) == {"a": (1, [2])}
    assert pytree.tree_map_only(int, str, leaves) == ["1", "2"] == pytree.tree_leaves(["1", ("2",)])


def _cpu_memory() -> None:
    from rkmate.torch_seam import memory

    if memory.is_profiling() or memory.with_schedules():        # the user's: the first measurement says so
        return
    with memory.memory_events() as session:
        kept = torch.empty(1000, dtype=torch.uint8)
    found = memory.allocations(session.kineto_results, "cpu", None)
    assert kept.numel() in [event.bytes for event in found]
    memory.uses_onednn()
    with torch.profiler.profile(schedule=lambda step: torch.profiler.ProfilerAction.NONE) as waits:
        assert memory.with_schedules() == [waits]
    assert not memory.with_schedules()


NEEDED = (
    Feature("operators", _operators, None),
    Feature("tensors", _tensors, None),
    Feature("fake tensors", _fake_tensors, None),
    Feature("modules", _modules, None),
    Feature("autograd", _autograd, None),
    Feature("graphs", _graphs, None),
    Feature("containers", _containers, None),
    Feature("events of memory", _cpu_memory, None),
)
"""Features that nothing works without, in the order of their checks."""
