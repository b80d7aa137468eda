"""Rotor against known answers: ten chains at every memory limit."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rkmate.errors import GraphError
from rkmate.ir.chain import Backward, Forward, ForwardPlain, Op
from rkmate.rotor.replay import deaths, replay
from tests.rotor.paper import RotorChain, large_chain, rotor

CASES = json.loads((Path(__file__).parent / "data" / "rotor_chains.json").read_text())["chains"]


def read(case: dict[str, Any]) -> RotorChain:
    return RotorChain(**{k: v for k, v in case["chain"].items() if k != "L"})


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['id']}-{c['style']}")
def test_known_answers_at_every_limit(case: dict[str, Any]) -> None:
    rotor_chain = read(case)
    table = rotor(rotor_chain, slot_bytes=1)
    chain = table.chain
    for limit, known in zip(case["M"], case["makespan_table1_dp"], strict=True):
        ops = table.sequence(limit)
        if known is None:
            assert ops is None and table.seconds(limit) == math.inf
            continue
        assert table.seconds(limit) == known
        assert ops is not None
        cost = replay(chain, ops)
        assert cost.seconds == known
        assert cost.peak_bytes <= limit


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['id']}-{c['style']}")
def test_known_sequences_replay_to_their_time(case: dict[str, Any]) -> None:
    """The replay agrees with the reference's own time and peak of its sequences."""
    chain = read(case).chain()
    kinds = {"Fall": lambda b: Forward(b, 0), "Fck": ForwardPlain, "F0_": ForwardPlain,
             "B": lambda b: Backward(b, 0)}
    for example in case["example_sequences"]:
        ops = []
        for word in example["sequence"]:
            name = word.rstrip("0123456789") if word[:3] != "F0_" else "F0_"
            ops.append(kinds[name](int(word[len(name):]) - 1))
        cost = replay(chain, ops)
        assert paper_names(ops) == example["sequence"]
        assert (cost.seconds, cost.peak_bytes) == (example["time"], example["peak"])


def paper_names(ops: Sequence[Op]) -> list[str]:
    """Return a sequence in the paper's words: ``Fall3``, ``B3``, ``Fck1`` (the input stays), ``F0_2``."""
    gone = deaths(ops)
    result = []
    for k, op in enumerate(ops):
        if isinstance(op, Forward):
            word = "Fall"
        elif isinstance(op, ForwardPlain):
            word = "F0_" if op.block in gone[k] else "Fck"
        else:
            word = "B"
        result.append(f"{word}{op.block + 1}")
    return result


def test_large_chain() -> None:
    chain = large_chain(120)
    table = rotor(chain)
    top = table.slots * table.slot_bytes
    times = []
    for part in (1.0, 0.5, 0.25, 0.1):
        ops = table.sequence(int(top * part))
        assert ops is not None
        cost = replay(table.chain, ops)
        assert cost.peak_bytes <= top * part
        times.append(cost.seconds)
    assert all(a < b for a, b in pairwise(times))


def test_lists_that_do_not_fit() -> None:
    with pytest.raises(GraphError, match="same length"):
        RotorChain([0], [0], [1, 2], [1, 2], [1, 2], [0, 0], [0, 0]).chain()
    with pytest.raises(GraphError, match="wab"):
        RotorChain([0, 1], [0, 1], [1, 2], [0, 1], [1, 2], [0, 0], [0, 0]).chain()
