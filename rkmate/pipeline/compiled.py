"""Groups of operations that are compiled: whether they can be, and what a plan tells about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import fx

from rkmate.device.inductor import check_compiler, form_of, fused, version
from rkmate.errors import CompilerError
from rkmate.graph.passes.clusters.cluster import Cluster
from rkmate.pipeline.settings import Settings
from rkmate.support.progress import Progress
from rkmate.support.warn import warn


def with_compiler(settings: Settings, device: torch.device) -> Settings:
    """Return the settings with a decision whether to compile, for "auto" by compiling something. Where groups
    are compiled, images are laid out as is faster, unless the settings say otherwise. Raises `CompilerError`
    where compiling is requested, and there is no compiler for the device."""
    if settings.compile is False:
        return settings
    try:
        check_compiler(device)
        if settings.compile == "auto":          # there may be no headers
            fused(form_of(torch.empty(2, device=device)))(_smallest).compile()
    except CompilerError as error:
        if settings.compile is True:
            raise
        warn(f'compile is "auto", and nothing is compiled: {error}')
        return replace(settings, compile=False)
    return replace(settings, compile=True,
                   layouts="auto" if settings.layouts == "with_compile" else settings.layouts)


def _smallest(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x + 1,)


def clusters_of(operations: Iterable[fx.Node]) -> list[Cluster]:
    """The groups among some operations, in their order; equal ones are one."""
    return list(dict.fromkeys(n.target for n in operations if isinstance(n.target, Cluster)))


def compile_all(operations: Iterable[fx.Node], progress: Progress) -> None:
    """Compile the groups among some operations. Raises `CompilerError`."""
    found = clusters_of(operations)
    if found:
        with progress.stage("compiling", len(found)) as tick:
            for k, cluster in enumerate(found):
                tick(k)
                cluster.compile()


def compiled_by(settings: Settings) -> str:
    """What a plan was compiled by; empty where nothing is."""
    return version() if settings.compile else ""


def check_version(plan_compiled: str) -> None:
    """Warn where a plan was compiled by something else than what compiles now."""
    if plan_compiled and plan_compiled != version():
        warn(f"the plan was compiled by {plan_compiled}, and its kernels are compiled anew by {version()}: "
             "they may take other time and temporary memory than the plan says. Make it again to be sure of "
             "its peak")


def fused_in(operations: Iterable[fx.Node]) -> tuple[tuple[str, int], ...]:
    """Per group of the graph, the names of its operations, and how many times it is there."""
    counts = Counter(n.target for n in operations if isinstance(n.target, Cluster))
    return tuple((", ".join(cluster.operations), times) for cluster, times in counts.items())
