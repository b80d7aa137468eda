"""What torch.compile leaves alone. A module of its own: `torch.compiler.disable` loads Dynamo, which takes
seconds, and is there already where this is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable
def run_uncompiled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call, with everything inside run as it stands."""
    return function(*args, **kwargs)
