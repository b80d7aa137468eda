"""One decision of all ranks, where a model that is planned by parts communicates in its forward.

Such a model is called equally often on all ranks. A rank that refuses its budget alone would leave the others
in a collective, and one that plans its parts again alone may communicate while it does so. So the ranks meet
at calls that decide something (`rkmate.runtime.agreement`), and each takes the decision of all. A model that
does not communicate meets nobody: what it hears is what it says.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rkmate.errors import RankError, RkmateError
from rkmate.runtime.agreement import BY_PARTS, Ranks, ranks_in
from rkmate.torch_seam.trace import collectives_run


class OneDecision:
    """The decisions of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._ranks: Ranks | None = None
        # Ranks that join early answer the collectives of DDP, and call nothing.
        self._may_meet = not any(isinstance(m, DistributedDataParallel) for m in model.modules())

    @property
    def is_of_ranks(self) -> bool:
        """Whether several ranks decide together."""
        return self._ranks is not None

    @contextmanager
    def looks(self) -> Iterator[None]:
        """Look, around a forward, whether it communicates. All of its ranks see the same."""
        if self._ranks is not None or not self._may_meet:
            yield
            return
        before = collectives_run()
        yield
        groups = [name for name, count in collectives_run().items() if count != before.get(name, 0)]
        self._ranks = ranks_in(groups, BY_PARTS)

    def told(self, *own: int) -> list[Sequence[int]]:
        """Return the numbers that each rank tells. Raises `RankError` if a rank does not come."""
        return [own] if self._ranks is None else [*map(json.loads, self._ranks.told(json.dumps(own)))]

    def all_say(self, own: bool) -> bool:
        """Return whether all ranks say yes."""
        return all(yes for yes, in self.told(own))

    def common(self, own: Iterable[str]) -> set[str]:
        """Return the texts that all ranks tell."""
        if self._ranks is None:
            return {*own}
        return set.intersection(*(set(json.loads(text)) for text in self._ranks.told(json.dumps([*own]))))

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Let all ranks raise the refusal of one of them, at the end of the context. If several refuse a
        budget, it is that of the rank that needs most."""
        refused: RkmateError | None = None
        try:
            yield
        except RkmateError as error:
            if self._ranks is None or isinstance(error, RankError):     # which every rank has
                raise
            refused = error
        if self._ranks is not None:
            self._ranks.refuse_as_one(refused)
