"""One decision of all ranks, where a model that is planned by parts communicates in its forward.

Such a model is called equally often on all ranks. A rank that refuses its budget alone would leave the others
in a collective, and one that plans its parts again alone may communicate while it does so. So the ranks meet
at calls that decide something (`rkmate.runtime.agreement`), and each takes the decision of all. A model that
does not communicate decides alone.

Inside of a DistributedDataParallel, ranks do not meet either, as their calls may differ. But they reduce
gradients equally often. A rank that refuses its budget leaves a note for the others, and runs its model as it
is until the gradients are reduced: then all of them find the note, and raise the refusal together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rkmate.errors import RankError, RkmateError
from rkmate.runtime.agreement import BY_PARTS, Ranks, as_refusal, as_text, ranks_in
from rkmate.torch_seam.modules import is_called_equally_often, running_data_parallel
from rkmate.torch_seam.trace import collectives_run, meeting_place

LOOKS = 16
"""Reductions of gradients after which no rank looks for notes of others any more."""


class OneDecision:
    """The decisions of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._reductions = 0
        """Calls inside of a DistributedDataParallel whose backward reduces gradients."""
        shapes = f"{type(model).__name__} {[(n, p.shape) for n, p in model.named_parameters()]}"
        self._name = f"rkmate/note/{hashlib.sha256(shapes.encode()).hexdigest()}"
        self._ranks: Ranks | None = None
        # Ranks that join early answer the collectives of DDP, and call nothing.
        self._may_meet = not any(isinstance(m, DistributedDataParallel) for m in model.modules())

    @property
    def is_of_ranks(self) -> bool:
        """Whether several ranks decide together."""
        return self._ranks is not None

    @contextmanager
    def looks(self) -> Iterator[None]:
        """Find out, around a forward, whether it communicates. All of its ranks find the same."""
        if self._ranks is not None or not self._may_meet:
            yield
            return
        before = collectives_run()
        yield
        groups = [name for name, count in collectives_run().items() if count != before.get(name, 0)]
        self._ranks = ranks_in(groups, BY_PARTS)

    def raise_noted(self) -> None:
        """Raise the refusal of a rank that has left a note, before a call."""
        if self._reductions >= LOOKS or not is_called_equally_often():
            return
        store, key = meeting_place(None)[0], f"{self._name}/{dist.get_rank()}"
        if store is not None and store.check([key]):
            after, rank, text = json.loads(store.get(key))
            if self._reductions >= after:
                store.delete_key(key)
                raise as_refusal(rank, text)
        self._reductions += running_data_parallel().require_backward_grad_sync

    def leaves_note(self, refusal: RkmateError) -> bool:
        """Leave a note for all ranks, which they find after the next reduction of gradients. Return whether
        that was possible: if not, raise the refusal now."""
        store = meeting_place(None)[0] if is_called_equally_often() else None
        if store is None or self._ranks is not None or self._reductions >= LOOKS:
            return False
        around = running_data_parallel()
        after = self._reductions + (not around.require_backward_grad_sync)
        text = json.dumps([after, dist.get_rank(), as_text(refusal)])
        for rank in dist.get_process_group_ranks(around.process_group):
            store.set(f"{self._name}/{rank}", text)
        return True

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
