"""The variants of a model's graph: each trades something else than time for memory.

A variant is asked where those before it do not meet the budget, if the settings allow it and the graph
has what it rewrites. The pipeline prepares it when it is asked, from the same capture.
"""

from __future__ import annotations

from dataclasses import dataclass

from rkmate.pipeline.settings import Settings, When


@dataclass(frozen=True)
class Variant:
    """One way to rewrite a captured graph before it is planned."""

    name: str
    """As plans carry it."""
    trades: str = ""
    """What differs from the original's step."""
    setting: str = ""
    """The field of `Settings` that says when it is tried: ``"auto"``, where those before do not meet the
    budget, ``"always"``, in place of those before, or ``"never"``. Empty: always there."""
    chunked_loss: bool = False
    """Whether the last products and their cross entropies are computed a few rows at a time."""
    note: str = ""
    """What its plans say, with ``{names}`` of the weights that it concerns."""
    warning: str = ""
    """What the user hears where it was taken because nothing else met the budget."""

    def when(self, settings: Settings) -> When:
        """When the settings want it."""
        return getattr(settings, self.setting) if self.setting else "auto"


PLAIN = Variant("plain")
CHUNKED_LOSS = Variant(
    "chunked-loss",
    trades="the order in which the additions of the last weight's gradient are done: its last bits",
    setting="chunked_loss",
    chunked_loss=True,
    note="the products with {names} and their cross entropies are computed a few rows at a time",
    warning="nothing fits in this budget with the original's operations, so the product with {names} and "
            "its cross entropy are computed a few rows at a time. That weight's gradient is the original's "
            "but for the order of its additions: its last bits differ. "
            'rkmate.Settings(chunked_loss="never") refuses such budgets')
VARIANTS: tuple[Variant, ...] = (PLAIN, CHUNKED_LOSS)
"""All variants, in the order in which they are tried."""


def first(settings: Settings) -> Variant:
    """The variant that is planned unless the budget is too small for it."""
    return [v for v in VARIANTS if v is PLAIN or v.when(settings) == "always"][-1]


def fallbacks(settings: Settings, names: tuple[str, ...]) -> tuple[Variant, ...]:
    """The variants for budgets that the first does not meet. `names`: the weights that a chunked loss
    would concern; none where the model has no such loss."""
    after = VARIANTS[VARIANTS.index(first(settings)) + 1:]
    return tuple(v for v in after if v.when(settings) == "auto" and (names or not v.chunked_loss))


def named(name: str) -> Variant:
    """The variant that a plan names; the plain one where this version has none of that name."""
    return next((v for v in VARIANTS if v.name == name), PLAIN)
