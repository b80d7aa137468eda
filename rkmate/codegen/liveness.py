"""Find the values that a stretch of steps takes, reads, keeps, frees and gives. No torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rkmate.ir.cd import CDGraph
from rkmate.ir.schedule import Compute, Free, Start, freed_after, in_place_donor


@dataclass(frozen=True)
class Computed:
    """A computation of the stretch."""

    step: Compute | Start
    keeps: tuple[int, ...]
    """Outputs that become values: not what is freed right after the step, and not a second copy of what is
    in memory."""
    donor: int | None
    """The input whose storage the output takes."""
    waits: bool = False
    """Whether the step only waits for what an earlier step has started."""


@dataclass(frozen=True)
class Freed:
    """D nodes that are freed at one place; a donor's storage is not."""

    d: tuple[int, ...]
    donor: int | None


@dataclass(frozen=True)
class Flow:
    """How D nodes go through a stretch of steps."""

    take: tuple[int, ...]
    """Read here, and freed here."""
    read: tuple[int, ...]
    """Read here, and needed later."""
    body: tuple[Computed | Freed, ...]
    give: frozenset[int]
    """Made here, and needed later."""
    drop: tuple[int, ...]
    """Freed here without having been read."""

    def after(self, stored: Collection[int]) -> set[int]:
        """Return the nodes that are stored after the stretch, if `stored` were before."""
        return {*stored} - {*self.take} - {*self.drop} | self.give


def flow(graph: CDGraph, steps: Sequence[Compute | Free | Start], stored: Collection[int],
         handed: Collection[int] = (), started: Collection[int] = ()) -> Flow:
    """Return the flow of a stretch. `stored`: D nodes that earlier steps left. `handed`: nodes that are
    handed to somebody else, who frees them. `started`: C nodes that earlier steps have started."""
    running = {*started}
    entering: dict[int, bool] = {}              # read here -> freed here
    made: set[int] = set()
    drop: dict[int, None] = {}
    body: list[Computed | Freed] = []
    gone: list[int] = []
    donor: int | None = None

    def there(j: int) -> bool:
        return j in made or (j in stored and j not in drop and not entering.get(j, False))

    def close() -> None:
        if gone:
            body.append(Freed(tuple(gone), donor))
            gone.clear()

    for k, step in enumerate(steps):
        if isinstance(step, Start) or (isinstance(step, Compute) and step.c in running):
            close()
            node, waits = graph.c[step.c], isinstance(step, Compute)
            for j in (*node.inputs, *(node.outputs if waits else ())):
                if j not in made:
                    entering.setdefault(j, False)
            made.update(() if waits else node.outputs)
            body.append(Computed(step, () if waits else node.outputs, None, waits))
            running.symmetric_difference_update((step.c,))
        elif isinstance(step, Compute):
            close()
            for j in graph.c[step.c].inputs:
                if j not in made:
                    entering.setdefault(j, False)
            freed, donor = freed_after(steps, k), in_place_donor(graph, steps, k)
            keeps = tuple(j for j in graph.c[step.c].outputs
                          if j in handed or (j not in freed and not there(j)))
            made.update(keeps)
            body.append(Computed(step, keeps, donor))
        elif step.d in handed:
            continue
        elif step.d in made:
            made.discard(step.d)
            gone.append(step.d)
        elif entering.get(step.d) is False:
            entering[step.d] = True
            gone.append(step.d)
        elif step.d in stored and step.d not in entering:
            drop[step.d] = None
    close()
    return Flow(tuple(j for j, freed in entering.items() if freed),
                tuple(j for j, freed in entering.items() if not freed), tuple(body), frozenset(made),
                tuple(j for j in drop if j not in made))
