"""Repeated blocks of a chain as one: of twelve equal layers, the first is drawn, "12 times"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Blocks in a row that come several times."""

    first: int
    """The first of them."""
    length: int
    """Blocks of one turn."""
    times: int

    @property
    def blocks(self) -> range:
        """The blocks of the first turn, which stand for the others."""
        return range(self.first, self.first + self.length)

    @property
    def last(self) -> int:
        """The last block of the last turn."""
        return self.first + self.length * self.times - 1


def folded(labels: Sequence[str]) -> tuple[Group, ...]:
    """A chain of blocks, by their classes, as groups: at each place the repetition that covers most blocks,
    of those the shortest. ``A BC BC BC D`` are three groups, the second one of two blocks, three times."""
    groups: list[Group] = []
    at = 0
    while at < len(labels):
        found = Group(at, 1, 1)
        for length in range(1, (len(labels) - at) // 2 + 1):
            same = at
            while same + length < len(labels) and labels[same] == labels[same + length]:
                same += 1
            times = (same - at) // length + 1
            if times > 1 and times * length > found.times * found.length:
                found = Group(at, length, times)
        groups.append(found)
        at = found.last + 1
    return tuple(groups)


def stands_for(groups: Sequence[Group]) -> dict[int, int]:
    """Per block, the block of the first turn that is drawn for it."""
    return {group.first + k: group.first + k % group.length
            for group in groups for k in range(group.length * group.times)}
