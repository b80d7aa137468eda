"""Each of the package's own operators has a record, which says what is known about it."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest
import torch

import rkmate
from rkmate.graph.ops.temporaries import TABLE
from rkmate.graph.passes.tiles.rules import RULES
from rkmate.torch_seam.own import OwnOperator, own_operator, record_of
from rkmate.torch_seam.schema import OpOverload, schema_of

DEFINING = ("graph", "torch_seam")
"""Folders that define operators."""


def operators() -> dict[str, OpOverload]:
    """Return all operators that torch knows in the package's namespace, by name and overload."""
    for folder in DEFINING:
        package = importlib.import_module(f"rkmate.{folder}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    names = [n.removeprefix("rkmate::") for n in torch._C._dispatch_get_all_op_names()
             if n.startswith("rkmate::")]
    return {name: own_operator(name) for name in sorted(names)}


def records() -> dict[str, OwnOperator]:
    """Return the records by name and overload; fail where an operator has none."""
    found = {name: record_of(operator) for name, operator in operators().items()}
    assert not [name for name, record in found.items() if record is None]
    return {name: record for name, record in found.items() if record is not None}


def test_every_operator_has_its_record() -> None:
    found = records()
    assert {"scale", "opaque", "add_convolution_gradient"} <= set(found)
    assert all(record.name == name for name, record in found.items())
    assert record_of(torch.ops.aten.mm.default) is None and record_of(torch.mm) is None


def test_one_place_defines_operators() -> None:
    package = Path(rkmate.__file__).parent
    assert {f.relative_to(package).as_posix() for f in package.rglob("*.py")
            if "torch.library." in f.read_text(encoding="utf-8")} == {"torch_seam/own.py"}


COLLECTIVES = {"all_reduce_and_wait", "all_reduce_and_wait_", "all_gather_into_tensor_and_wait",
               "reduce_scatter_tensor_and_wait", "all_to_all_single_and_wait", "broadcast_and_wait"}
STEPS = {"recurrent_steps", "recurrent_steps_backward"}


@pytest.mark.parametrize(("question", "names"), [
    ("reads_host", {"opaque", "opaque_backward", "ctc_loss", "ctc_loss_backward", "written"}),
    ("uses_autograd", {"opaque", "opaque_backward", "recurrent_layer", "product_backward",
                       "cumulative_product_backward", "written"}),
    ("direct", {"cross_entropy_backward.out", "cudnn_batch_norm", "cudnn_rnn", "cudnn_rnn_backward",
                "select_scatter_", "slice_scatter_", "diagonal_scatter_", "write_part_", *STEPS, "exchanged",
                *(name.replace("_and_wait", "_started") for name in COLLECTIVES
                  if name != "all_reduce_and_wait_")}),
    ("linear", {"cross_entropy_backward", "cross_entropy_backward.out"}),
    ("rows_like", {"cross_entropy_backward"}),
    ("in_place", {"scale", "cross_entropy_backward", "batch_norm_backward", "add_embedding_rows",
                  "bernoulli", "all_reduce_and_wait", "write_part"}),
    ("communicates", COLLECTIVES),
    ("stands_for", {"col2im", "mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss"}),
    ("temporaries", {"cross_entropy_backward", "cross_entropy_backward.out", "batch_norm_backward",
                     "batch_norm_backward.over", "add_embedding_rows", "add_embedding_rows.out",
                     "add_embedding_gradient", "add_convolution_gradient",
                     "convolution", "dropout", "bernoulli", "bernoulli_", *STEPS, *COLLECTIVES}),
    ("flops", {"convolution", "add_convolution_gradient", "add_embedding_gradient", *STEPS}),
    ("gradient", {"product", "cumulative_product", "ctc_loss", "cudnn_rnn", "dropout", "recurrent_steps",
                  "trilinear"}),
])
def test_of_which_operators_something_is_known(question: str, names: set[str]) -> None:
    assert {name for name, record in records().items() if getattr(record, question)} == names


def test_what_writes_over_an_argument_says_so() -> None:
    for record in records().values():
        if record.in_place is None:
            continue
        arguments = schema_of(own_operator(record.in_place.name)).arguments
        written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        assert written == [record.in_place.keyword or arguments[record.in_place.argument].name]


def test_rules_of_torchs_that_hold_for_an_operator_exist() -> None:
    for record in records().values():
        assert record.rows_like is None or record.rows_like in RULES
        assert record.stands_for is None or record.stands_for.overloadpacket in TABLE


def test_operators_that_draw_are_tagged() -> None:
    seeded = torch.Tag.nondeterministic_seeded
    assert {n for n, o in operators().items() if seeded in o.tags} == {
        "opaque", "dropout", "bernoulli", "bernoulli_"}
