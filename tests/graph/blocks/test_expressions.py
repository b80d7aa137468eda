"""Names are given once each."""

from __future__ import annotations

import pytest

from rkmate.graph.blocks.expressions import NameTable, letters


def test_names_are_numbered() -> None:
    table = NameTable()
    assert [table.fresh("x") for _ in range(3)] == ["x", "x_2", "x_3"]


@pytest.mark.parametrize("order", [["tanh", "tanh", "tanh_2"], ["tanh_2", "tanh", "tanh"],
                                   ["tanh", "tanh_2", "tanh"]])
def test_a_name_that_looks_like_a_number_of_another(order: list[str]) -> None:
    table = NameTable()
    assert len({table.fresh(name) for name in order}) == 3


def test_reserved_words_are_not_given() -> None:
    table = NameTable({"give", "give_", "x_2"})
    assert [table.fresh(n) for n in ("give", "give", "give__", "x", "x")] == [
        "give__", "give___2", "give___3", "x", "x_3"]


def test_letters_do_not_end() -> None:
    assert [letters(n) for n in (0, 15, 16, 25, 26, 27, 51, 52, 701, 702)] == [
        "a", "p", "q", "z", "aa", "ab", "az", "ba", "zz", "aaa"]
