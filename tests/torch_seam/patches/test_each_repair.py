"""What single repairs do: the trace of an operation, or a program made by hand."""

from __future__ import annotations

import copy
import operator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from rkmate.errors import CaptureError
from rkmate.torch_seam.patches.libraries import sources_as_in_eager_mode, without_value_checks
from rkmate.torch_seam.patches.modules import cumulative_averages_as_tensors
from rkmate.torch_seam.patches.numerics import as_eager_computes
from rkmate.torch_seam.patches.recurrent import as_eager_runs_them, make_recurrent_layers_whole

aten = torch.ops.aten


def test_a_cumulative_average_is_the_kernels() -> None:
    torch.manual_seed(0)
    eager = nn.BatchNorm1d(3, momentum=None)
    changed = copy.deepcopy(eager)
    for _ in range(3):
        x = torch.randn(5, 3)
        expected = eager(x)
        with cumulative_averages_as_tensors(changed):
            assert torch.equal(changed(x), expected)
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(changed.state_dict()[name], value, msg=name)


@pytest.mark.parametrize("model", [nn.BatchNorm1d(3), nn.BatchNorm1d(3, momentum=None).eval()])
def test_other_batch_norms_keep_their_forward(model: nn.Module) -> None:
    with cumulative_averages_as_tensors(model):
        assert "forward" not in model.__dict__


@pytest.mark.parametrize(("operation", "own"), [
    (lambda x: x.prod(), "rkmate.product.default"), (lambda x: x.prod(0), "rkmate.product.default"),
    (lambda x: x.cumprod(0), "rkmate.cumulative_product.default")])
def test_products_ask_eager_autograd_for_their_gradient(operation: Any, own: str) -> None:
    x = torch.tensor([2.0, 0.0, 3.0], requires_grad=True)
    with as_eager_computes(), enable_python_dispatcher():
        program = make_fx(operation)(x)
        changed = operation(x)
    assert own in [str(n.target) for n in program.graph.nodes]
    found, = torch.autograd.grad(changed.sum(), x)
    expected, = torch.autograd.grad(operation(x).sum(), x)
    assert torch.equal(found, expected)


def test_distributions_do_not_check_values(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's compiler switches it off for good when it is loaded.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    with without_value_checks():
        torch.distributions.Normal(torch.zeros(1), torch.tensor([-1.0]))
    with pytest.raises(ValueError, match="Expected parameter scale"):
        torch.distributions.Normal(torch.zeros(1), torch.tensor([-1.0]))


def _stack(op: Any, dropout: float, *, packed: bool = False) -> tuple[fx.GraphModule, fx.Node]:
    """A program that calls a recurrent stack of two layers."""
    graph = fx.Graph()
    x, hidden = graph.placeholder("x"), graph.placeholder("hidden")
    before = (x, hidden, hidden) if packed else (x, hidden)
    after = () if packed else (False,)
    node = graph.call_function(op, (*before, [], True, 2, dropout, True, False, *after))
    graph.output(node)
    return fx.GraphModule(nn.Module(), graph), node


@pytest.mark.parametrize("op", [aten.gru.input, aten.rnn_tanh.input, aten.lstm.input])
def test_stacks_run_layer_by_layer(op: Any) -> None:
    program, node = _stack(op, 0.5)
    as_eager_runs_them(program)
    assert node.target is not op
    assert node.args[0] is op


def test_packed_stacks_with_dropout_are_refused() -> None:
    with pytest.raises(CaptureError, match="packed sequence"):
        as_eager_runs_them(_stack(aten.gru.data, 0.5, packed=True)[0])
    program, node = _stack(aten.gru.data, 0.0, packed=True)
    as_eager_runs_them(program)
    assert node.target is aten.gru.data


def test_a_fused_layer_knows_its_workspace() -> None:
    shapes = [(3, 2, 4), (20, 4), (20, 5), (20,), (20,), (2, 5), (2, 5)]
    graph = fx.Graph()
    given = [graph.placeholder(f"x{k}") for k in range(len(shapes))]
    with FakeTensorMode():
        for node, shape in zip(given, shapes, strict=True):
            node.meta["val"] = torch.empty(shape)
        empty = torch.empty(0, dtype=torch.uint8)
        results = (torch.empty(3, 2, 5), torch.empty(2, 5), torch.empty(2, 5), empty)
    layer = graph.call_function(aten.mkldnn_rnn_layer.default, (
        *given, False, [], 2, 5, 1, True, False, False, True))
    layer.meta["val"] = results
    workspace = graph.call_function(operator.getitem, (layer, 3))
    workspace.meta["val"] = empty
    make_recurrent_layers_whole(graph)
    assert layer.target is torch.ops.rkmate.recurrent_layer.default
    assert workspace.meta["val"].numel() > 0
    assert layer.meta["val"][3] is workspace.meta["val"]


def test_sources_that_ask_whether_they_are_exported_take_eager_modes_path() -> None:
    """The gated delta rule of Qwen3-Next solves a triangular system in eager mode, and copies in exports."""
    source = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    part = source.Qwen3NextRMSNorm(4)
    with mock.patch.object(source, "is_torchdynamo_exporting", return_value=True):
        context = sources_as_in_eager_mode(part)
        assert context is not None
        with context:
            assert not source.is_torchdynamo_exporting()
