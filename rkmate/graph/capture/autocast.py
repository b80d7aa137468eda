"""The backward is traced as it runs: after the autocast region that the forward stands in.

Uses private names of torch (a setting of AOTAutograd); tested with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch._functorch import config


@contextmanager
def backward_without_autocast() -> Iterator[None]:
    """While a module is captured: what the forward has in float32 stays so in its gradients."""
    with config.patch(backward_pass_autocast="off"):
        yield
