"""Inductor and Dynamo: groups of operations compiled into kernels, and guards on dictionaries and on the
forms of tensors."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
TensorGuards: Any = getattr(_guards, "TensorGuards", None)
"""Compares types, devices, sizes and strides of many tensors in one call; None where torch lacks it."""
dict_version: Any = getattr(_guards, "dict_version", None)
"""Return how often a dictionary has changed; None where torch lacks it."""

Form = tuple[torch.dtype, str, Sequence[int], Sequence[int]]
"""Type, device, shape and strides of a tensor."""


def load() -> None:
    """Import the compiler: seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("torch._inductor.compile_fx", "torch._inductor.decomposition"):
            importlib.import_module(name)


def compile_function(function: Callable[..., Any], forms: Sequence[Form],
                     around: Callable[[], AbstractContextManager[Any]]
                     ) -> Callable[[list[torch.Tensor]], Any]:
    """Compile a function of tensors into one that takes a list of tensors and has no guards.

    The results have the layouts that eager mode gives them. What was compiled before, also in
    another process, is loaded from the compiler's own cache (its setting `fx_graph_cache`, on by default).

    Args:
        function: calls operators on its arguments, and returns a list or tuple of tensors.
        forms: of the arguments.
        around: makes a context to trace and compile in.
    """
    load()
    import torch._inductor.config as settings
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch.no_grad(), around(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mode = FakeTensorMode(shape_env=ShapeEnv())
        with mode:
            inputs = [torch.empty_strided(shape, strides, dtype=dtype, device=device)
                      for dtype, device, shape, strides in forms]
        with mode:                             # scalars of decompositions, too, are fake
            plain = function(*inputs)
            module = make_fx(function, decomposition_table=select_decomp_table())(*inputs)
        end = module.graph.output_node()
        end.meta["user_visible_output_idxs"] = list(range(len(plain)))
        end.meta["original_output_strides"] = [tuple(v.stride()) for v in plain]
        # Kernels are for a number of threads, which the keys of older releases' caches know by this setting.
        with tracing(TracingContext(mode)), settings.patch({"cpp.threads": torch.get_num_threads()}):
            made: Any = compile_fx_inner(module, inputs, is_inference=True)
    return getattr(made, "current_callable", None) or made  # type: ignore[no-any-return]


def has_triton() -> bool:
    """Return whether Triton is there, which compiles for GPUs."""
    from torch.utils._triton import has_triton as found
    return bool(found())
