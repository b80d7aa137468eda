"""Stretches of a model in tiles: the smallest budget, and what it trades."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rkmate
from rkmate.measure.step import measure_peak
from rkmate.pipeline.settings import Settings
from tests.capturing import captured_once

NEVER, AUTO = Settings(tiles="never"), Settings(tiles="auto")


class Net(nn.Module):
    """Convolutions, a residual sum, and a loss."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 32, 3, padding=1)
        self.third = nn.Conv2d(32, 32, 3, padding=1)
        self.norm = nn.BatchNorm2d(32) if norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(F.relu(self.second(F.relu(self.first(x)))))
        return (x + F.max_pool2d(F.silu(self.third(x)), 3, 1, 1)).square().mean()


def _smallest(model: nn.Module, x: torch.Tensor, settings: Settings) -> int:
    with pytest.raises(rkmate.InfeasibleBudget) as error:
        rkmate.wrap(model, (x,), budget=1, settings=settings, progress=False)
    return error.value.minimum_bytes


@pytest.mark.parametrize("shape", [(8, 3, 16, 16), (1, 3, 64, 16)], ids=["images", "bands"])
def test_the_smallest_budget_is_met_with_the_originals_gradients(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(*shape)
    exact = copy.deepcopy(model).double()
    with captured_once():
        least = _smallest(model, x, AUTO)
        assert least < 0.6 * _smallest(model, x, NEVER)
        with pytest.warns(rkmate.RkmateWarning,
                          match=r'first.weight.*run in tiles.*last bits.*tiles="never"'):
            wrapped = rkmate.wrap(model, (x,), budget=least, settings=AUTO, progress=False)
    assert wrapped.plan.variant == "tiles" and "def tiled_stretch_backward" in wrapped.source
    loss, expected = wrapped(x), exact(x.double())
    torch.testing.assert_close(loss.double(), expected)
    loss.backward()
    expected.backward()
    for (name, p), q in zip(model.named_parameters(), exact.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad.double(), q[1].grad, rtol=1e-4, atol=1e-7, msg=name)
    wrapped(x).backward()
    assert measure_peak(lambda: wrapped(x).backward()).peak <= least


def test_weights_larger_than_their_images_run_whole() -> None:
    """A tile would hold a weight's gradient, the sum of all tiles, and the weight in its kernel's layout."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(16),
                          nn.Conv2d(16, 192, 3, padding=1), nn.ReLU(), nn.Conv2d(192, 192, 3, padding=1))
    plan = rkmate.plan(model, (torch.randn(4, 3, 96, 96),), budget=1.0, progress=False,
                       settings=Settings(tiles="always", costs="analytic"))
    assert "0.weight" in plan.note and "5.weight" not in plan.note


class Patches(nn.Module):
    """A convolution of large images into few tokens, and two MLPs."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, stride=8)
        self.mlps = nn.Sequential(*(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 256), nn.GELU(),
                                                  nn.Linear(256, 16)) for _ in range(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.mlps(self.patches(x).flatten(2).transpose(1, 2)).square().mean()
        return found


def test_a_models_images_are_the_callers() -> None:
    """They do not make the first convolution the operation that takes most."""
    settings = replace(AUTO, costs="analytic")
    model, x = Patches(), torch.randn(8, 3, 112, 112)
    with captured_once():
        least, whole = (_smallest(model, x, s) for s in (settings, replace(settings, tiles="never")))
    assert least < 0.33 * whole


class Frozen(nn.Module):
    """A frozen convolution of images with a frozen norm, a pool, and a trained layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 7, stride=2, padding=3, bias=False).requires_grad_(False)
        self.last = nn.Conv2d(16, 16, 3, stride=2)
        self.register_buffer("scale", torch.ones(16, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x) * self.scale + self.scale)
        out: torch.Tensor = self.last(nn.functional.max_pool2d(x, 3, 2, 1)).square().mean()
        return out


def test_images_take_nothing_of_a_stretch_either() -> None:
    settings, x = replace(AUTO, costs="analytic"), torch.randn(2, 3, 64, 64)
    least, whole = (_smallest(Frozen(), x, s) for s in (settings, replace(settings, tiles="never")))
    assert least < 0.7 * whole


def test_what_fits_without_tiles_runs_without() -> None:
    model, x = Net(), torch.randn(8, 3, 16, 16)
    with captured_once():
        least = _smallest(model, x, replace(NEVER, costs="analytic"))
        with_, without = (rkmate.plan(model, (x,), budget=least, settings=replace(s, costs="analytic"),
                                      progress=False) for s in (AUTO, NEVER))
    assert with_.variant == without.variant == "plain" and with_.schedule == without.schedule


@pytest.mark.parametrize(("norm", "shape"), [
    pytest.param(nn.BatchNorm2d(16), (8, 3, 16, 16), id="images"),
    pytest.param(nn.GroupNorm(2, 16), (1, 3, 64, 16), id="bands", marks=pytest.mark.slow)])
def test_statistics_of_norms_are_whole_inputs(norm: nn.Module, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), norm, nn.ReLU(), nn.Conv2d(16, 4, 3, padding=1))
    model, x = nn.Sequential(model, nn.Sigmoid(), nn.AvgPool2d(2)), torch.randn(*shape)
    exact = copy.deepcopy(model).double()
    with captured_once():
        least = _smallest(model, x, AUTO)
        assert least < 0.6 * _smallest(model, x, NEVER)
        with pytest.warns(rkmate.RkmateWarning, match="passes over tiles for their statistics"):
            wrapped = rkmate.wrap(model, (x,), budget=least, settings=AUTO, progress=False)
    assert wrapped.plan.variant == "tiles+tiled-norms"
    weight = torch.randn(exact(x.double()).shape)
    exact.load_state_dict(copy.deepcopy(model.state_dict()))
    for _ in range(2):
        (wrapped(x) * weight).sum().backward()
        (exact(x.double()) * weight).sum().backward()
    for (name, p), q in zip(model.named_parameters(), exact.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad.double(), q[1].grad, rtol=1e-4, atol=1e-4, msg=name)
    for p, q in zip(model.buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6, check_dtype=False)
    assert measure_peak(lambda: (wrapped(x) * weight).sum().backward()).peak <= least + 3 * weight.nbytes


class Attention(nn.Module):
    """Causal attention of eight heads over embedded tokens, and a loss over a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(600, 128), nn.Linear(128, 600, bias=False)
        self.q, self.k, self.v, self.out = (nn.Linear(128, 128) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.table(x)
        y = F.layer_norm(z, (128,))
        q, k, v = (p(y).unflatten(-1, (8, 16)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = z + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(y).flatten(0, 1), x.flatten())


@pytest.mark.slow
def test_heads_of_an_attention_run_in_tiles_next_to_a_head() -> None:
    torch.manual_seed(0)
    model, x = Attention(), torch.randint(0, 600, (1, 2000))
    exact = copy.deepcopy(model).double()
    auto, never = (replace(s, costs="analytic") for s in (AUTO, NEVER))
    with captured_once():
        least, before = (_smallest(model, x, settings) for settings in (auto, never))
        assert least < 0.65 * before
        with pytest.warns(rkmate.RkmateWarning, match=r"q.weight.*run in tiles.*last bits"):
            wrapped = rkmate.wrap(model, (x,), budget=least, settings=auto, progress=False)
    assert wrapped.plan.variant == "chunked-loss+tiles" and "columns of weights" in wrapped.source
    exact(x).backward()
    wrapped(x).backward()
    for (name, p), q in zip(model.named_parameters(), exact.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad.double(), q[1].grad, rtol=1e-4, atol=1e-6, msg=name)
    # What attention's kernels take besides is not estimated.
    assert measure_peak(lambda: wrapped(x).backward()).peak < 0.75 * before


class Volumes(nn.Module):
    """Classes of the points of a volume, and their loss, which looks at a volume as a row of points."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv3d(1, 8, 3, padding=1), nn.Conv3d(8, 4, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.last(F.relu(self.first(x))), y)


def test_a_loss_runs_in_tiles_that_reads_a_view_in_parts_and_whole() -> None:
    given = torch.randn(1, 1, 16, 16, 16), torch.randint(0, 4, (1, 16, 16, 16))
    plan = rkmate.plan(Volumes(), given, budget=1.0, settings=Settings(costs="analytic", tiles="always"),
                       progress=False)
    assert plan.variant == "tiles" and "first.weight" in plan.note and "last.bias" in plan.note


class Sums(nn.Module):
    """Convolutions between sums over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.third = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).cumsum(2)
        return (x + self.third(F.silu(self.second(x)))).cumsum(2).square().mean()


def test_a_gradient_that_leaves_takes_the_memory_of_one_that_enters() -> None:
    torch.manual_seed(0)
    model, x = Sums(), torch.randn(1, 3, 64, 32)
    exact = copy.deepcopy(model).double()
    with captured_once():
        least = _smallest(model, x, AUTO)
        with pytest.warns(rkmate.RkmateWarning, match="run in tiles"):
            wrapped = rkmate.wrap(model, (x,), budget=least, settings=AUTO, progress=False)
    assert ", over=" in wrapped.source.replace("over=None", "")
    exact(x.double()).backward()
    wrapped(x).backward()
    for (name, p), q in zip(model.named_parameters(), exact.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad.double(), q[1].grad, rtol=1e-4, atol=1e-4, msg=name)
    assert measure_peak(lambda: wrapped(x).backward()).peak <= least


def test_a_batch_norm_ends_a_stretch() -> None:
    model, x = Net(norm=True), torch.randn(8, 3, 16, 16)
    plan = rkmate.plan(model, (x,), budget=1.0, settings=Settings(costs="analytic", tiles="always"),
                       progress=False)
    assert plan.variant == "tiles" and "first.weight" in plan.note and "and 2 more run in tiles" in plan.note


@pytest.mark.parametrize("activation", [nn.LeakyReLU(0.1, inplace=True), nn.ReLU6(inplace=True)])
def test_activations_in_place_run_in_tiles(activation: nn.Module) -> None:
    """Also those that overwrite a view, as after an instance norm."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True), activation,
                          nn.Conv2d(8, 4, 3, padding=1), nn.Sigmoid())
    exact, x = copy.deepcopy(model).double(), torch.randn(1, 3, 32, 16)
    wrapped = rkmate.wrap(model, (x,), budget=1.0, progress=False,
                          settings=Settings(costs="analytic", tiles="always"))
    assert "3.weight" in wrapped.plan.note
    wrapped(x).square().mean().backward()
    exact(x.double()).square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), exact.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad.double(), q[1].grad, rtol=1e-4, atol=1e-6, msg=name)


class States(nn.Module):
    """States that add up a sequence from zeros on, some for each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 32), nn.Linear(32, 8)
        self.share = nn.Parameter(torch.rand(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u = self.enter(x)
        states = u.new_zeros(1, 1, 32, 1) + torch.cumsum(u.unsqueeze(-1) * self.share, 1)
        return self.leave(torch.cat([states.tanh().sum(-1)], 1)).square().mean()


def test_states_run_some_features_at_a_time() -> None:
    torch.manual_seed(0)
    model, x = States(), torch.randn(1, 64, 8)
    exact = copy.deepcopy(model).double()
    wrapped = rkmate.wrap(model, (x,), budget=1.0, progress=False,
                          settings=Settings(costs="analytic", tiles="always"))
    assert "leave.weight" in wrapped.plan.note
    wrapped(x).backward()
    exact(x.double()).backward()
    for (name, p), q in zip(model.named_parameters(), exact.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad.double(), q[1].grad, rtol=1e-4, atol=1e-6, msg=name)


def test_what_is_to_be_kept_is_not_computed_in_tiles() -> None:
    with pytest.raises(rkmate.WishError, match="tiles"):
        rkmate.plan(Net(), (torch.randn(8, 3, 16, 16),), budget=0.9, progress=False,
                    settings=Settings(tiles="always", pins={"first": "keep"}))
