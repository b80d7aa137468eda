"""The variants of a model's graph: each trades something other than time for memory.

If the whole step fits, nothing is traded for memory. Otherwise every variant that the settings allow, and
that changes this graph, is planned, and the fastest plan counts (`rkmate.pipeline.search`). A variant that
computes more than the plain graph is planned if the others do not meet the budget. A variant that the user
asked for because its kernels may be faster is compared at every budget. The pipeline prepares each variant
when it is needed, from the same capture.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from rkmate.errors import WishError
from rkmate.graph.blocks.wishes import kept_in_words
from rkmate.graph.capture.captured import Capture
from rkmate.graph.capture.collectives import groups_of
from rkmate.ir.cd import CDGraph
from rkmate.ir.kernels import fastest
from rkmate.pipeline.settings import Settings, When

FASTER_BY = 0.01
"""A variant that trades something of the result is taken where its step is faster by more than this part of
the step without: predictions are no better, and bits are worth something."""
LISTED = 4
"""Names that a note lists at most."""
Concerned = Mapping[str, tuple[str, ...]]
"""For each variant's name, the weights that it changes; none if it does not apply to the graph."""


@dataclass(frozen=True)
class Variant:
    """A way to rewrite a captured graph before it is planned, or several ways at once."""

    name: str
    """Name in plans, and in the passes that make the variant (`Joint.choices`); the names of several variants
    are joined by ``+``."""
    trades: str = ""
    """Difference from the original's step; empty: only time and memory."""
    setting: str = ""
    """The field of `Settings` that says when it is tried: ``"auto"``, where the step does not fit whole,
    ``"always"``, at every budget, or ``"never"``. Empty: always there."""
    asked_for: bool = False
    """Whether the user asked for the variant at any budget: it is compared where the step fits whole, too,
    and nobody is warned of it."""
    takes_longer: bool = False
    """Whether the variant computes more than the plain graph: it is tried where nothing else fits."""
    note: str = ""
    """Text for the notes of its plans, with ``{names}`` for the weights that it changes."""
    combines: tuple[str, ...] = ()
    """Names of the variants before it in the table with which it can be combined."""
    within: str = ""
    """The name of the variant before it without which it is nothing."""
    of: tuple[Variant, ...] = ()
    """The rows of the table that it combines; empty for a row itself."""

    @property
    def rows(self) -> tuple[Variant, ...]:
        """The rows of the table that it is made of: none for the plain one."""
        return self.of or ((self,) if self.setting else ())

    @property
    def saves_memory(self) -> bool:
        """Whether a row of it is there for budgets that do not hold the whole step."""
        return any(not row.asked_for for row in self.rows)

    def when(self, settings: Settings) -> When:
        """Return when the settings want this variant."""
        wanted = ["auto" if row.within and said == "always" else said
                  for row in self.rows for said in [_said(settings, row)]]
        return "never" if "never" in wanted else "auto" if "auto" in wanted or not wanted else "always"

    def notes(self, concerned: Concerned) -> str:
        """Return the variant's part of a plan's note."""
        return "; ".join(row.note.format(names=_listed(concerned[row.name]))
                         for row in self.rows if row.note and concerned.get(row.name))

    def warning(self, reason: str, instead: str, concerned: Concerned) -> str:
        """Return the warning for a plan of this variant. `reason`: why it was taken; `instead`: what the
        settings that forbid it would do."""
        rows = [row for row in self.rows if not row.asked_for and row is not UNCOMPILED]
        never = ", ".join(dict.fromkeys(f'{row.setting}="never"' for row in rows))
        part = together(rows)
        return f"{reason}: {part.notes(concerned)}. {part.trades}. rkmate.Settings({never}) {instead}"


PLAIN = Variant("plain")
CHUNKED_LOSS = Variant(
    "chunked-loss",
    trades="That weight's gradient is the original's except for the order of its additions: "
           "its last bits differ",
    setting="chunked_loss",
    note="the products with {names} and their cross entropies are computed a few rows at a time")
GROUPED_LOSS = Variant(
    "grouped-loss",
    setting="chunked_loss",
    note="as many of their rows as there is room for are kept for the backward",
    combines=("chunked-loss",),
    within="chunked-loss")
CHANNELS_LAST = Variant(
    "channels-last",
    trades="Other kernels do the work: last bits differ",
    setting="layouts",
    asked_for=True,
    note="the convolutions with {names} have their channels last",
    combines=("chunked-loss", "grouped-loss"))
TILES = Variant(
    "tiles",
    trades="Results and gradients of these are the original's except for the order of additions: last bits "
           "differ, also of what is computed from them",
    setting="tiles",
    takes_longer=True,
    note="stretches with {names} run in tiles",
    combines=("chunked-loss",))
TILED_NORMS = Variant(
    "tiled-norms",
    setting="tiles",
    takes_longer=True,
    note="norms in them have passes over tiles for their statistics",
    combines=("tiles",),
    within="tiles")
UNCOMPILED = Variant(
    "uncompiled",
    setting="compile",
    takes_longer=True,
    note="nothing is compiled, because no schedule with compiled groups fits",
    combines=("chunked-loss", "grouped-loss", "tiles", "tiled-norms"))
_WHEN: dict[object, When] = {"keep": "never", "with_compile": "never", "channels_last": "always",
                             True: "auto", False: "never"}
"""Meaning of the values of `Settings.layouts` and `Settings.compile` for a variant. If groups are compiled,
``"with_compile"`` has been replaced by then (`rkmate.pipeline.prepare.with_compiler`)."""
VARIANTS: tuple[Variant, ...] = (PLAIN, CHUNKED_LOSS, GROUPED_LOSS, CHANNELS_LAST, TILES,
                                 TILED_NORMS, UNCOMPILED)
"""The rows of the table. Those that can be combined are tried alone, and together."""


def _said(settings: Settings, row: Variant) -> When:
    """Return what the setting of a row says about it."""
    said = getattr(settings, row.setting)
    found: When = _WHEN.get(said, said)
    return found


def together(rows: Sequence[Variant]) -> Variant:
    """Return several rows of the table at once; the plain one for none."""
    if len(rows) < 2:
        return rows[0] if rows else PLAIN
    ways: dict[str, Any] = {f.name: any(getattr(v, f.name) for v in rows)
                            for f in fields(Variant) if isinstance(f.default, bool)}
    return Variant("+".join(v.name for v in rows), of=tuple(rows), **ways,
                   trades=". ".join(v.trades for v in rows if v.trades))


def first(settings: Settings) -> Variant:
    """Return the variant that is taken where its step fits whole: all that the settings always want."""
    return together([v for v in VARIANTS if v.setting and v.when(settings) == "always"])


def others(settings: Settings, concerned: Concerned) -> tuple[Variant, ...]:
    """Return the variants that are compared with the first where that does not fit whole: those with fewest
    rows first, and tiles last."""
    always = first(settings).rows
    more = [v for v in VARIANTS if v.setting and v.when(settings) == "auto" and concerned.get(v.name)]
    found = [together([v for v in VARIANTS if v in always or v in chosen])
             for n in range(1, len(more) + 1) for chosen in itertools.combinations(more, n)
             if all(_combine(a, b) for a, b in itertools.combinations([*always, *chosen], 2))
             and {v.within for v in chosen if v.within} <= {v.name for v in (*always, *chosen)}]
    return tuple(sorted(found, key=lambda variant: TILES in variant.rows and TILES not in always))


def possible(settings: Settings) -> tuple[Variant, ...]:
    """Return every variant that a plan made under these settings may have."""
    rows = {v.name: (v.name,) for v in VARIANTS}
    return (first(settings), *others(settings, rows))


def named(name: str) -> Variant:
    """Return the variant that a plan names; the plain one where this version has none of that name."""
    known = {v.name: v for v in VARIANTS if v.setting}
    parts = name.split("+")
    return together([known[p] for p in parts]) if all(p in known for p in parts) else PLAIN


def settings_that_keep(settings: Settings, captured: Capture) -> Settings:
    """Return the settings; where something is to be kept, without the larger operations that compute parts of
    themselves again, and where a forward communicates, without outputs that one rank alone may read. Raises
    `WishError` if these are requested."""
    if groups_of(captured.graph):
        settings = replace(settings, deferred_outputs="never")
    keeps = kept_in_words(captured, settings.pins)
    if not keeps:
        return settings
    against = {"compile": settings.compile is True, "chunked_loss": settings.chunked_loss == "always",
               "tiles": settings.tiles == "always"}
    if requested := [name for name, on in against.items() if on]:
        raise WishError(f"{keeps[0]} cannot be met with {requested[0]}={getattr(settings, requested[0])!r}, "
                        "which computes values again inside of larger operations: leave one of them out")
    return replace(settings, chunked_loss="never", tiles="never")


def seconds_once(graph: CDGraph) -> float:
    """Return the seconds of running each computation once, by its fastest kernel. No schedule takes less."""
    return sum(fastest(node) for node in graph.c)


def may_be_faster(seconds: float, graph: CDGraph, variant: Variant) -> bool:
    """Return whether schedules of a graph can take so much less than `seconds` that a variant is worth
    taking. Asked with the first variant's own graph, before another is prepared: that has the same products
    to compute, and spares at most what is computed again."""
    return is_faster(seconds_once(graph), seconds, variant)


def is_faster(seconds: float, than: float, variant: Variant) -> bool:
    """Return whether a variant's step is faster by enough for it to be taken."""
    return seconds < seconds_of_faster(than, variant)


def seconds_of_faster(than: float, variant: Variant) -> float:
    """Return the seconds of a step below which a variant is faster by enough for it to be taken."""
    return than * (1 - FASTER_BY if variant.trades else 1)


def _listed(names: tuple[str, ...]) -> str:
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")


def _combine(a: Variant, b: Variant) -> bool:
    return a.name in b.combines or b.name in a.combines
