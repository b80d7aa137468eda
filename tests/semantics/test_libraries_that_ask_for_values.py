"""Models of libraries that look at values of their inputs, as they are written."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.equality import assert_same_step, measured_peak
from tests.models.sample import Sample
from tests.semantics.steps import planned

pytestmark = pytest.mark.slow


class Graphs(nn.Module):
    """Three convolutions over one set of edges."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList((layer(8, 16), layer(16, 16), layer(16, 4)))

    def forward(self, x: torch.Tensor, edges: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x, edges, *weights))
        return x.square().mean()


def _edges(loops: int, seed: int, count: int = 80) -> torch.Tensor:
    """Random ones between 30 nodes, the first of them self-loops."""
    drawn = torch.Generator().manual_seed(seed)
    source = torch.randint(30, (count,), generator=drawn)
    target = (source + torch.randint(1, 30, (count,), generator=drawn)) % 30
    target[:loops] = source[:loops]
    return torch.stack([source, target])


@pytest.mark.parametrize(("name", "weighed"), [("GCNConv", False), ("GCNConv", True), ("GATConv", False)])
def test_graph_layers_that_search_for_self_loops(name: str, weighed: bool) -> None:
    layers = pytest.importorskip("torch_geometric.nn")
    model, x = Graphs(getattr(layers, name)), torch.randn(30, 8)
    weights = (torch.rand(80),) if weighed else ()
    module = planned(copy.deepcopy(model), x, _edges(2, 0), *weights)
    for loops, seed in ((2, 1), (5, 2), (2, 3)):
        sample = Sample(model, (x, _edges(loops, seed), *weights), {}, lambda output: output)
        assert_same_step(model, module, sample, steps=1)
    assert len(module._plans) == 2


class Speech(nn.Module):
    """A speech model with its loss, and nothing else of its outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, sound: torch.Tensor, mask: torch.Tensor | None, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_values=sound, attention_mask=mask, labels=labels).loss
        return loss


def _mask(*lengths: int) -> torch.Tensor:
    return (torch.arange(800) < torch.tensor(lengths)[:, None]).long()


def _labels(*lengths: int) -> torch.Tensor:
    return torch.where(torch.arange(8) < torch.tensor(lengths)[:, None], torch.randint(1, 32, (2, 8)), -100)


def test_a_speech_model_with_labels() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Wav2Vec2Config(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, layerdrop=0.0, apply_spec_augment=False,
        ctc_loss_reduction="mean")
    model, sound = Speech(transformers.Wav2Vec2ForCTC(config).train()), torch.randn(2, 800)
    first = (sound, _mask(800, 600), _labels(6, 4))
    module = planned(copy.deepcopy(model), *first, budget=0.8)
    calls = (first, (sound, _mask(800, 500), _labels(4, 6)), (sound, _mask(700, 600), _labels(7, 4)))
    for args in calls:
        assert_same_step(model, module, Sample(model, args, {}, lambda output: output), steps=1)
    assert len(module._plans) == 2
    whole, peak = (measured_peak(m, Sample(m, first, {}, lambda output: output)) for m in (model, module))
    assert peak <= 0.8 * whole * 1.02
    assert_same_step(copy.deepcopy(model), planned(copy.deepcopy(model), sound, None, _labels(6, 4)),
                     Sample(model, (sound, None, _labels(5, 5)), {}, lambda output: output), steps=1)
