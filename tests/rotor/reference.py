"""rk-Rotor's recurrence written down plainly: Rockmate, appendix C.2, equations (1) to (3)."""

from __future__ import annotations

import math

from rkmate.ir.chain import Chain
from rkmate.rotor.memory_requirements import MemoryRequirements


def reference_table(chain: Chain, slots: int, size: int) -> dict[tuple[int, int, int], float]:
    """Opt(s, t, m) of every sub-problem with m slots of `size` bytes; without partial saves."""
    needs, n = MemoryRequirements(chain), len(chain)

    def up(needed: int) -> int:
        return -(-int(needed) // size)

    opt: dict[tuple[int, int, int], float] = {}
    for length in range(1, n + 1):
        for s, t in ((s, s + length) for s in range(n - length + 1)):
            options, runs = needs.options[s], needs.elapsed - needs.elapsed[s]
            for m in range(slots + 1):
                with_option = [options.seconds[k] + (opt.get((s + 1, t, m - up(options.keep[k])), math.inf)
                                                     if t > s + 1 else 0.0)
                               for k, need in enumerate(needs.option(s, t)) if up(need) <= m]
                with_split = [runs[i] + opt.get((i, t, m - up(needs.between[s, i])), math.inf) + opt[s, i, m]
                              for i, need in zip(range(s + 1, t), needs.split(s, t), strict=True)
                              if up(need) <= m]
                opt[s, t, m] = min([math.inf, *with_option, *with_split])
    return opt
