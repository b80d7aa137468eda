"""Libraries that take another path when they notice that they are traced, put back on eager's path.

Hugging Face's transformers build explicit attention masks while they are exported, where eager mode
leaves the masks out and tells the attention kernel that it is causal. A plan is for one shape, so
what depends on shapes and constants alone may take eager's path: the arithmetic is then eager's, bit
for bit, and the masks take no memory. What depends on the values of an input keeps the traced path.

Uses private names of torch (the proxies of a trace); tested with torch 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental import proxy_tensor

_MASKS = "transformers.masking_utils"
_OBSERVERS = "transformers.utils.output_capturing"


def is_observer(hook: Any) -> bool:
    """Whether a forward hook is a library's own, which records outputs that its forward asks for.

    A model installs them in its first forward, so they come and go without a change of meaning.
    """
    return getattr(hook, "__module__", None) == _OBSERVERS


def has_other_paths() -> bool:
    """Whether a library is loaded that takes another path while it is exported."""
    return _MASKS in sys.modules


@contextmanager
def as_in_eager_mode() -> Iterator[None]:
    """While a module is exported: libraries that are loaded decide as they would in eager mode."""
    masks = sys.modules.get(_MASKS)
    with ExitStack() as stack:
        if masks is not None and hasattr(masks, "is_torchdynamo_exporting"):
            stack.enter_context(mock.patch.object(masks, "is_torchdynamo_exporting", _no))
        if masks is not None and hasattr(masks, "find_packed_sequence_indices"):
            find = masks.find_packed_sequence_indices

            def packed(position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                known = known_value(position_ids)
                if known is not None and all(b - a == 1 for row in known
                                             for a, b in zip(row, row[1:], strict=False)):
                    return None        # one sequence in each row, whatever the inputs are
                return find(position_ids, *args, **kwargs)

            stack.enter_context(mock.patch.object(masks, "find_packed_sequence_indices", packed))
        yield


def _no() -> bool:
    return False


def known_value(tensor: torch.Tensor) -> Any:
    """The value, as nested lists, of a traced tensor that depends on no input; None when it does."""
    mode = proxy_tensor.get_proxy_mode()
    if mode is None:
        return None
    found = proxy_tensor.get_proxy_slot(tensor, mode.tracer, None)
    proxy = getattr(found, "proxy", None)
    if not isinstance(proxy, fx.Proxy):
        return None
    needed: dict[fx.Node, None] = {}
    todo = [proxy.node]
    while todo:
        node = todo.pop()
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) \
                or torch.Tag.nondeterministic_seeded in node.target.tags:
            return None
        needed[node] = None
        todo += [n for n in node.all_input_nodes if n not in needed]
    values: dict[fx.Node, Any] = {}
    with proxy_tensor.disable_proxy_modes_tracing(), unset_fake_temporarily(), \
            torch._C.DisableTorchFunction(), torch.no_grad():
        for node in proxy.node.graph.nodes:        # in the order of the trace
            if node in needed:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
        result = values[proxy.node]
        return result.tolist() if isinstance(result, torch.Tensor) else None
