"""Who reads a value, through views."""

from __future__ import annotations

from torch import fx

from rkmate.graph.passes.joint import is_view


class Reads:
    """Readers of values of one graph, which does not change meanwhile. Views are none: who reads a view reads
    what it looks at."""

    def __init__(self) -> None:
        self._found: dict[fx.Node, tuple[fx.Node, ...]] = {}

    def readers(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The operations that read a value."""
        if node not in self._found:
            found: dict[fx.Node, None] = {}
            for user in node.users:
                found.update(dict.fromkeys(self.readers(user) if is_view(user) else (user,)))
            self._found[node] = tuple(found)
        return self._found[node]

    def seen_as(self, node: fx.Node) -> list[fx.Node]:
        """A value, and the views of it."""
        return [node, *(v for user in node.users if is_view(user) for v in self.seen_as(user))]
