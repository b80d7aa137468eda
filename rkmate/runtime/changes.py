"""What a call has that is not as it was planned, in words."""

from __future__ import annotations

from collections.abc import Iterable

from rkmate.runtime.guards import FlagGuards, Guards

_MANY = 4
"""Values of one attribute that say that it will go on to change."""
_NAMED = 5
"""Attributes that a message names at most."""
_WORDS = {
    "inputs": "the shapes, dtypes, devices or strides of its tensors, or which of them require gradients",
    "structure": "how its arguments are put together",
    "constants": "an argument that is no tensor",
    "autocast": "the autocast state",
    "kernels": "which kernels torch may choose (sdpa_kernel, torch.backends.cudnn.enabled)",
    "places": "the shapes, dtypes, devices or strides of parameters or buffers, or which of them are tied",
    "default_dtype": "the default dtype",
    "values": "what its forward reads from the values of its inputs, or how many elements they pick",
}


def differing(key: Guards, others: Iterable[Guards]) -> str:
    """In what a call differs from the nearest of those that were planned."""
    nearest = min((_differences(key, k) for k in others), key=len)
    return "; ".join(nearest)


def _differences(key: Guards, other: Guards) -> list[str]:
    found = []
    if key.flags != other.flags:
        found.append(_flags(key.flags, other.flags))
    names = _attributes(key, other)
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        found.append(f"the values of {', '.join(names[:_NAMED])}{more}")
    return found + [text for field, text in _WORDS.items()
                    if getattr(key, field) != getattr(other, field)]


def _flags(flags: FlagGuards, other: FlagGuards) -> str:
    if flags.parts != other.parts:
        return "its submodules (which there are, their classes or forwards)"
    return "a submodule's train flag, number of hooks, or a parameter's requires_grad"


def _attributes(key: Guards, other: Guards) -> list[str]:
    now, before = dict(key.attributes.content), dict(other.attributes.content)
    return [name for name in (*now, *(n for n in before if n not in now))
            if now.get(name) != before.get(name)]


def changing(key: Guards, others: Iterable[Guards]) -> list[str]:
    """Attributes that have had another value in each of the latest keys that are alike otherwise.

    `others`: the latest last. Empty while the values are few.
    """
    alike = [k.attributes for k in others
             if k.attributes != key.attributes and k._replace(attributes=key.attributes) == key]
    if len(alike) < _MANY - 1:
        return []
    *before, now = [dict(p.content) for p in (*alike[1 - _MANY:], key.attributes)]
    return [name for name in now if len({p.get(name) for p in (*before, now)}) == _MANY]
