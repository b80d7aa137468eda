"""Code that torch.compile leaves alone. It is a separate module because `torch.compiler.disable` loads
Dynamo, which takes seconds. When this code is needed, Dynamo is loaded already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable
def run_uncompiled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call, with everything inside run as it stands."""
    return function(*args, **kwargs)
