"""Which outputs of a model the loss leads to: as the user says, or as the output's form tells."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from rkmate.errors import ArgumentError
from rkmate.graph.capture.capture import Capture
from rkmate.graph.capture.structure import Structure
from rkmate.pipeline.settings import Trains
from rkmate.torch_seam.nodes import VALUE

_BY_PRODUCTS = ("past_key_values", "hidden_states", "attentions", "cross_attentions", "mems",
                "encoder_last_hidden_state", "encoder_hidden_states", "encoder_attentions",
                "decoder_hidden_states", "decoder_attentions", "cache_params", "router_logits")
"""Fields of Hugging Face outputs that stand beside what the model is trained by."""
_LISTED = 12
"""Outputs that an error lists at most."""
_INDEX = re.compile(r"""\[(['"]?)([^\]'"]*)\1\]""")


def trained_outputs(captured: Capture, trains: Trains) -> tuple[bool, ...]:
    """Per output tensor, whether the loss leads to it. `trains`: None for what the output's form tells,
    else as of `chosen_outputs`, with its errors."""
    if trains is None:
        return _by_form(captured)
    return chosen_outputs(captured.result, captured.differentiable, trains)


def chosen_outputs(result: Structure, able: Sequence[bool],
                   trains: Literal["all"] | tuple[str | int, ...]) -> tuple[bool, ...]:
    """Per output tensor, whether `trains` chooses it.

    `able`: which can take a gradient. `trains`: all of those, or names and numbers; a name stands for
    all of those under it.

    Raises:
        ArgumentError: there is no such output, or no gradient comes to it.
    """
    if trains == "all":
        return tuple(able)
    named = result.names()
    chosen: set[int] = set()
    for output in trains:
        found: Collection[int]
        if isinstance(output, int):
            found = (output,) if 0 <= output < len(able) else ()
        else:
            found = named.get(_INDEX.sub(r".\2", output).lstrip("."), ())
        if not found:
            raise ArgumentError(f"trains names {output!r}, and the model returns no such output: "
                                f"there {_listed(named, able)}")
        if not any(able[i] for i in found):
            raise ArgumentError(f"trains names {output!r}, which depends on no parameter or input that "
                                f"requires a gradient: there {_listed(named, able)}")
        chosen.update(found)
    return tuple(ok and i in chosen for i, ok in enumerate(able))


def _listed(named: Mapping[str, frozenset[int]], able: Sequence[bool]) -> str:
    """The output tensors in words, after "there"."""
    words = []
    for i, ok in enumerate(able):
        name = next((n for n, found in named.items() if found == {i}), None)
        words.append((f"{name!r} (number {i})" if name else f"number {i}")
                     + ("" if ok else ", which takes no gradient"))
    more = f"; and {len(words) - _LISTED} more" if len(words) > _LISTED else ""
    return f"{'is' if len(words) == 1 else 'are'} {'; '.join(words[:_LISTED])}{more}"


def _by_form(captured: Capture) -> tuple[bool, ...]:
    """The output named ``loss``, else scalars, else all but by-products.

    A model that returns its loss beside other tensors (logits, a cache) is trained by the loss; but where
    it returns ``log_probs``, by these: trl's trainers compute their losses from them (1.16). Where this
    guess is wrong, the first backward says so, and the plan follows.
    """
    meta: list[Any] = [n.meta[VALUE] if n is not None else None for n in captured.outputs]
    able = captured.differentiable
    scored = captured.result.index_of("log_probs")
    if scored is not None and able[scored]:
        taken = captured.result.under(("log_probs", "aux_loss"))
        return tuple(ok and i in taken for i, ok in enumerate(able))
    named = captured.result.index_of("loss")
    if named is not None and able[named] and meta[named].dim() == 0:
        return tuple(i == named for i in range(len(able)))
    scalars = [ok and m is not None and m.dim() == 0 for ok, m in zip(able, meta, strict=True)]
    if any(scalars):
        return tuple(scalars)
    aside = captured.result.under(_BY_PRODUCTS)
    main = tuple(ok and i not in aside for i, ok in enumerate(able))
    return main if any(main) else able
