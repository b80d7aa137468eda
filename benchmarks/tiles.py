"""Smallest budgets without tiles and with them, as a share of eager mode's peak, next to checkpointing each
block and to gradients that are added up over single images: ``python benchmarks/tiles.py --models all
--write``.

Times need a quiet machine: ``--repeats 3``. Without repeats, memory alone is measured. Searches take most
of the time: with ``--plans FOLDER``, models that have a row keep its budgets, and plans are saved there; a
later run with times follows them. Models of transformers and monai are left out where these are not
installed.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from beside import add_row, beside, options_of, peak_of, read_rows, write_between
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rkmate

PAGE = Path(__file__).parent.parent / "docs" / "tiles.md"
ROWS = Path(__file__).with_name("tiles.jsonl")
_BEGIN, _END = "<!-- rows: python benchmarks/tiles.py --write -->\n", "\n<!-- end of rows -->"


# -- Models ----------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """Blocks one after the other, each of which can be checkpointed, and a loss."""

    def __init__(self, blocks: Sequence[nn.Module], loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.blocks, self.loss, self.checkpointed = nn.ModuleList(blocks), loss, False

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Run one block."""
        found: torch.Tensor = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return found

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return self.loss(x, y)


class Classifier(nn.Module):
    """The mean of an image's pixels, and a product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.product = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.product(x.mean((2, 3)))
        return found


class Residual(nn.Module):
    """A block of a super-resolution network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
                                   nn.Conv2d(width, width, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + 0.1 * self.inner(x)
        return found


class Bottle(nn.Module):
    """A block of a residual network: convolutions of given kernels with batch norms, and what goes around
    them."""

    def __init__(self, widths: Sequence[int], kernels: Sequence[int], stride: int) -> None:
        super().__init__()
        inner: list[nn.Module] = []
        for k, (a, b, size) in enumerate(zip(widths[:-1], widths[1:], kernels, strict=True)):
            step = stride if k == kernels.index(3) else 1
            inner += [nn.Conv2d(a, b, size, step, size // 2, bias=False), nn.BatchNorm2d(b)]
            inner += [nn.ReLU()] if k < len(kernels) - 1 else []
        self.inner, self.around = nn.Sequential(*inner), nn.Identity()
        if stride > 1 or widths[0] != widths[-1]:
            self.around = nn.Sequential(nn.Conv2d(widths[0], widths[-1], 1, stride, bias=False),
                                        nn.BatchNorm2d(widths[-1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.inner(x) + self.around(x))


class Llama(nn.Module):
    """A block of a language model: causal attention and an MLP with gates."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        q, k, v = (p(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        found: torch.Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return found


class Recurrent(nn.Module):
    """A recurrent layer, and what goes around it."""

    def __init__(self, layer: Callable[..., nn.Module], width: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), layer(width, width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.inner(self.norm(x))[0]
        return found


class Scan(nn.Module):
    """A block of a state-space model (Mamba): a causal convolution, and states of which each depends on the
    one before. Within a segment, states come from cumulative sums; the last one enters the next segment."""

    def __init__(self, width: int, state: int, segment: int) -> None:
        super().__init__()
        inner, self.segment = 2 * width, segment
        self.norm, self.enter = nn.RMSNorm(width), nn.Linear(width, 2 * inner, bias=False)
        self.convolution = nn.Conv1d(inner, inner, 4, padding=3, groups=inner)
        self.step, self.both = nn.Linear(inner, inner), nn.Linear(inner, 2 * state, bias=False)
        self.decay = nn.Parameter(torch.arange(1.0, state + 1).log().expand(inner, -1).clone())
        self.leave = nn.Linear(inner, width, bias=False)
        nn.init.constant_(self.step.bias, -8)       # short steps: the powers below stay within float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u, gate = self.enter(self.norm(x)).chunk(2, -1)
        u = F.silu(self.convolution(u.transpose(1, 2))[..., :x.shape[1]].transpose(1, 2))
        states, parts = u.new_zeros(len(u), 1, u.shape[2], 1), []
        for part in u.split(self.segment, 1):
            step = F.softplus(self.step(part))
            into, out = self.both(part).unsqueeze(2).chunk(2, -1)
            power = torch.cumsum(step.unsqueeze(-1) * -self.decay.exp(), 1)
            added = torch.cumsum((step * part).unsqueeze(-1) * into * torch.exp(-power), 1)
            every = torch.exp(power) * (states + added)
            states = every[:, -1:]
            parts.append((every * out).sum(-1))
        found: torch.Tensor = x + self.leave(torch.cat(parts, 1) * F.silu(gate))
        return found


class Dense(nn.Module):
    """A layer of a densely connected network: an image and what is computed of it, side by side."""

    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth), nn.ReLU(), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.inner(x)], 1)


class Exchange(nn.Module):
    """A module of a high-resolution network: an image in two sizes, side by side in one value, and what they
    tell each other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fine, self.coarse = (Bottle([c, c, c], (3, 3), 1) for c in (width, 2 * width))
        self.up, self.down = nn.Conv2d(2 * width, width, 1), nn.Conv2d(width, 2 * width, 3, 2, 1)

    def forward(self, both: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        fine, coarse = self.fine(both[0]), self.coarse(both[1])
        up = F.interpolate(self.up(coarse), scale_factor=2, mode="bilinear")
        return F.relu(fine + up), F.relu(coarse + self.down(fine))


class HighResolution(Blocks):
    """Modules that keep the full size, and classes of pixels."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__([Exchange(width) for _ in range(depth)], F.cross_entropy)
        self.first, self.second = nn.Conv2d(3, width, 3, 2, 1), nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.last = nn.Conv2d(width, 4, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        fine: Any = F.relu(self.first(x))
        both: Any = fine, F.relu(self.second(fine))
        for block in self.blocks:
            both = self.run(block, both)
        return self.loss(F.interpolate(self.last(both[0]), scale_factor=2, mode="bilinear"), y)


class Whole(nn.Module):
    """A model of another library, and the loss of what it makes."""

    def __init__(self, model: nn.Module, made: Callable[[Any], torch.Tensor] = lambda made: made) -> None:
        super().__init__()
        self.model, self.made = model, made

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.made(self.model(x)), y)


class UNet(Blocks):
    """Convolutions on smaller and smaller images, and back, in two or three dimensions."""

    def __init__(self, dim: int, width: int, norm: Callable[[int], nn.Module], depth: int = 4) -> None:
        convolution = nn.Conv2d if dim == 2 else nn.Conv3d
        turned = nn.ConvTranspose2d if dim == 2 else nn.ConvTranspose3d
        sizes = [3 if dim == 2 else 1, *(width * 2**k for k in range(depth))]

        def block(a: int, b: int) -> nn.Module:
            return nn.Sequential(*(m for i in (a, b) for m in (
                convolution(i, b, 3, padding=1), norm(b), nn.ReLU())))

        super().__init__([block(a, b) for a, b in zip(sizes, sizes[1:], strict=False)], F.cross_entropy)
        self.pool = (nn.MaxPool2d if dim == 2 else nn.MaxPool3d)(2)
        backs = list(zip(sizes[:1:-1], sizes[-2:0:-1], strict=True))
        self.ups = nn.ModuleList(turned(a, b, 2, 2) for a, b in backs)
        self.backs = nn.ModuleList(block(2 * b, b) for _, b in backs)
        self.last = convolution(width, 4, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        across: list[torch.Tensor] = []
        for k, block in enumerate(self.blocks):
            x = self.run(block, self.pool(x) if k else x)
            across.append(x)
        across.pop()
        for up, block in zip(self.ups, self.backs, strict=True):
            x = self.run(block, torch.cat([across.pop(), up(x)], 1))
        return self.loss(self.last(x), y)


def _labelled(*shape: int, classes: int = 10, dense: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(*shape), torch.randint(0, classes, (shape[0], *(shape[2:] if dense else ())))


def _chain(widths: Sequence[int], pooled: Sequence[int] = ()) -> Blocks:
    blocks: list[nn.Module] = []
    for k, (a, b) in enumerate(zip(widths, widths[1:], strict=False)):
        pool = [nn.MaxPool2d(2)] if k in pooled else []
        blocks.append(nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), *pool))
    return Blocks([*blocks, Classifier(widths[-1])], F.cross_entropy)


def _larger(width: int = 64) -> Blocks:
    up = nn.Sequential(nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2),
                       nn.Conv2d(width, 3, 3, padding=1))
    return Blocks([nn.Conv2d(3, width, 3, padding=1), *(Residual(width) for _ in range(8)), up], F.l1_loss)


def _resnet(depths: Sequence[int], *, wide: int = 1) -> Blocks:
    blocks: list[nn.Module] = [nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64),
                                             nn.ReLU(), nn.MaxPool2d(3, 2, 1))]
    before = 64
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        for k in range(depth):
            widths = [before, width, width] if wide == 1 else [before, width, width, wide * width]
            blocks.append(Bottle(widths, (3, 3) if wide == 1 else (1, 3, 1), 2 if stage and not k else 1))
            before = widths[-1]
    return Blocks([*blocks, Classifier(before)], F.cross_entropy)


def _densenet(depths: Sequence[int], growth: int) -> Blocks:
    width = 2 * growth
    blocks: list[nn.Module] = [nn.Sequential(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width),
                                             nn.ReLU(), nn.MaxPool2d(3, 2, 1))]
    for stage, depth in enumerate(depths):
        if stage:
            blocks.append(nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(),
                                        nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2)))
            width //= 2
        blocks += [Dense(width + k * growth, growth) for k in range(depth)]
        width += depth * growth
    return Blocks([*blocks, nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), Classifier(width))],
                  F.cross_entropy)


def _segformer() -> nn.Module:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(num_labels=4, classifier_dropout_prob=0.0, drop_path_rate=0.0)
    return Whole(SegformerForSemanticSegmentation(config),
                 lambda made: F.interpolate(made.logits, scale_factor=4, mode="bilinear"))


def _of_monai(name: str, *args: Any, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        from monai.networks import nets

        volume = _labelled(1, 1, 64, 64, 64, classes=4, dense=True)
        return Whole(getattr(nets, name)(*args, **options)), volume
    return make


Made = tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]
MODELS: dict[str, tuple[str, Callable[[], Made]]] = {
    "convolutions": ("three convolutions, 16 x 3 x 32 x 32", lambda: (
        _chain([3, 16, 64, 256]), _labelled(16, 3, 32, 32))),
    "vgg11": ("VGG-11, 4 x 3 x 96 x 96", lambda: (
        _chain([3, 64, 128, 256, 256, 512, 512, 512, 512], (0, 1, 3, 5, 7)), _labelled(4, 3, 96, 96))),
    "edsr": ("EDSR, 8 blocks, 4 x 3 x 48 x 48", lambda: (
        _larger(), (torch.randn(4, 3, 48, 48), torch.randn(4, 3, 96, 96)))),
    "edsr-1": ("EDSR, 8 blocks, 1 x 3 x 96 x 96", lambda: (
        _larger(), (torch.randn(1, 3, 96, 96), torch.randn(1, 3, 192, 192)))),
    "unet": ("U-Net without norms, 1 x 3 x 256 x 256", lambda: (
        UNet(2, 32, lambda c: nn.Identity()), _labelled(1, 3, 256, 256, classes=4, dense=True))),
    "unet-batch-norm": ("U-Net with batch norms, 1 x 3 x 256 x 256", lambda: (
        UNet(2, 32, nn.BatchNorm2d), _labelled(1, 3, 256, 256, classes=4, dense=True))),
    "unet-batch-norm-8": ("U-Net with batch norms, 8 x 3 x 256 x 256", lambda: (
        UNet(2, 32, nn.BatchNorm2d), _labelled(8, 3, 256, 256, classes=4, dense=True))),
    "resnet18": ("ResNet-18, 8 x 3 x 224 x 224", lambda: (
        _resnet([2, 2, 2, 2]), _labelled(8, 3, 224, 224))),
    "resnet50": ("ResNet-50, 8 x 3 x 224 x 224", lambda: (
        _resnet([3, 4, 6, 3], wide=4), _labelled(8, 3, 224, 224))),
    "unet-3d": ("3D U-Net with instance norms, 1 x 1 x 48^3", lambda: (
        UNet(3, 16, lambda c: nn.InstanceNorm3d(c, affine=True)),
        _labelled(1, 1, 48, 48, 48, classes=4, dense=True))),
    "llama": ("two Llama blocks, 1 x 8192 x 256", lambda: (
        Blocks([Llama(256, 8, 1024) for _ in range(2)], F.mse_loss),
        (torch.randn(1, 8192, 256), torch.randn(1, 8192, 256)))),
    "scan": ("two blocks of a state-space model (Mamba), 1 x 4096 x 64", lambda: (
        Blocks([Scan(64, 16, 4096) for _ in range(2)], F.mse_loss),
        (torch.randn(1, 4096, 64), torch.randn(1, 4096, 64)))),
    "lstm": ("two LSTM layers, 4 x 2048 x 128", lambda: (
        Blocks([Recurrent(nn.LSTM, 128) for _ in range(2)], F.mse_loss),
        (torch.randn(4, 2048, 128), torch.randn(4, 2048, 128)))),
    "gru": ("two GRU layers, 4 x 2048 x 128", lambda: (
        Blocks([Recurrent(nn.GRU, 128) for _ in range(2)], F.mse_loss),
        (torch.randn(4, 2048, 128), torch.randn(4, 2048, 128)))),
    "unet-3d-64": ("3D U-Net with group norms, 1 x 1 x 64^3", lambda: (
        UNet(3, 16, lambda c: nn.GroupNorm(4, c)), _labelled(1, 1, 64, 64, 64, classes=4, dense=True))),
    "densenet121": ("DenseNet-121, 4 x 3 x 128 x 128", lambda: (
        _densenet([6, 12, 24, 16], 32), _labelled(4, 3, 128, 128))),
    "hrnet": ("two sizes of an image side by side (HRNet), 2 x 3 x 256 x 256", lambda: (
        HighResolution(32, 4), _labelled(2, 3, 256, 256, classes=4, dense=True))),
    "segformer": ("SegFormer-B0 of transformers, 1 x 3 x 256 x 256", lambda: (
        _segformer(), _labelled(1, 3, 256, 256, classes=4, dense=True))),
    "segresnet": ("SegResNet of monai, 1 x 1 x 64^3", _of_monai(
        "SegResNet", init_filters=8, in_channels=1, out_channels=4)),
    "dynunet": ("DynUNet of monai, 1 x 1 x 64^3", _of_monai(
        "DynUNet", 3, 1, 4, [3] * 4, [1, 2, 2, 2], [2] * 3, filters=[16, 32, 64, 128])),
    "unetr": ("UNETR of monai, 1 x 1 x 64^3", _of_monai(
        "UNETR", 1, 4, (64, 64, 64), feature_size=16, hidden_size=192, mlp_dim=768, num_heads=6)),
}


# -- Rows ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One model. Memory as a share of eager mode's peak, time as a multiple of eager mode's; None: not
    taken."""

    model: str
    without: float
    """Smallest budget with ``tiles="never"``."""
    budget: float
    """Smallest budget with tiles."""
    peak: float
    """Measured at that budget."""
    error: float
    """Largest error of a gradient against float64, as a share of the parameter's largest gradient."""
    eager_error: float
    time: float | None
    """At the smallest budget."""
    time_twice: float | None
    """At twice that budget."""
    checkpointed: float | None
    """Measured peak with each block checkpointed; None for other libraries' models."""
    checkpointed_time: float | None
    by_images: float | None
    """Measured peak with gradients added up over single images; None where that is not equal."""
    by_images_time: float | None


_NOT_TAKEN: tuple[int | None, float | None] = None, None


class Bench:
    """One model and its copies."""

    def __init__(self, name: str, repeats: int, plans: Path | None = None, before: Row | None = None) -> None:
        """`plans`: a folder of saved plans; `before`: a row whose budgets count then."""
        torch.manual_seed(0)
        self.name, self.repeats, self.plans, self.before = name, repeats, plans, before
        self.model, self.inputs = MODELS[name][1]()
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)
        self.reference = copy.deepcopy(self.model)
        self.eager = peak_of(lambda: self.reference(*self.inputs), self.reference)

    def row(self) -> Row:
        """Measure everything."""
        known = None if self.plans is None else self.before
        if known is None:
            without, budget = self._smallest("never"), self._smallest("auto")
        else:
            without, budget = (math.ceil(s * self.eager) for s in (known.without, known.budget))
        try:
            peak, time = self._planned(budget, "least")
        except rkmate.InfeasibleBudget as error:            # the row is of another version, or of a search
            budget = error.minimum_bytes                    # that had more time
            peak, time = self._planned(budget, "least")
        budget = self.wrapped.plan.budget_bytes
        error, eager_error = self._errors()
        time_twice = None
        if self.repeats or self.plans is not None:
            _, time_twice = self._planned(2 * budget, "twice")
        blocks, checkpointed, by_images = copy.deepcopy(self.reference), _NOT_TAKEN, _NOT_TAKEN
        if isinstance(blocks, Blocks):
            blocks.checkpointed = True
            checkpointed = self._beside(lambda: blocks(*self.inputs), blocks)
        images = self.inputs[0].shape[0]
        if images > 1 and not any(isinstance(m, nn.BatchNorm2d) for m in blocks.modules()):
            by_images = self._beside(_OneByOne(self.reference, self.inputs), self.reference)
        share = [None if p is None else p / self.eager for p in (checkpointed[0], by_images[0])]
        return Row(self.name, without / self.eager, budget / self.eager, peak / self.eager, error,
                   eager_error, time, time_twice, share[0], checkpointed[1], share[1], by_images[1])

    def _smallest(self, tiles: Any) -> int:
        try:
            rkmate.plan(self.model, self.inputs, budget=1, settings=rkmate.Settings(tiles=tiles),
                        progress=False)
        except rkmate.InfeasibleBudget as error:
            return error.minimum_bytes
        raise AssertionError("a byte is enough")

    def _saved(self, which: str) -> rkmate.Plan | None:
        file = None if self.plans is None else self.plans / f"{self.name}-{which}.json"
        return rkmate.Plan.load(file) if file is not None and file.exists() else None

    def _planned(self, budget: int, which: str) -> tuple[int, float | None]:
        saved = self._saved(which)
        wrap = partial(rkmate.wrap, self.model, self.inputs, progress=False,
                       settings=rkmate.Settings(tiles="auto"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", rkmate.RkmateWarning)
            try:
                self.wrapped = wrap(budget=budget) if saved is None else wrap(plan=saved)
            except rkmate.PlanError:                            # of a version that has another graph
                self.wrapped = wrap(budget=budget)
        if self.plans is not None and self.wrapped.plan != saved:
            self.plans.mkdir(parents=True, exist_ok=True)
            self.wrapped.plan.save(self.plans / f"{self.name}-{which}.json")
        return self._beside(lambda: self.wrapped(*self.inputs), self.model)

    def _beside(self, forward: Callable[[], Any], module: nn.Module) -> tuple[int, float | None]:
        if not self.repeats:
            return peak_of(forward, module), None
        found = beside(lambda: self.reference(*self.inputs), self.reference, forward, module, self.repeats)
        return found.peak, found.ratio

    def _errors(self) -> tuple[float, float]:
        exact = copy.deepcopy(self.reference).double()
        x, y = self.inputs
        gradients = []
        for module, forward, given in ((self.model, self.wrapped, x), (self.reference, self.reference, x),
                                       (exact, exact, x.double())):
            for p in module.parameters():
                p.grad = torch.zeros_like(p)
            forward(given, y.to(given.dtype) if y.is_floating_point() else y).backward()
            gradients.append([p.grad.double() for p in module.parameters()])
        # A bias before a norm has no gradient but what rounding leaves.
        least = 1e-5 * max(g.abs().max().item() for g in gradients[2])
        return tuple(max(((a - b).abs().max() / b.abs().max().clamp_min(least)).item()
                         for a, b in zip(mine, gradients[2], strict=True)) for mine in gradients[:2])


class _OneByOne:
    """A loss whose backward runs image by image."""

    def __init__(self, model: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        self.model, self.inputs = model, inputs

    def __call__(self) -> _OneByOne:
        return self

    def backward(self) -> None:
        """Add up the gradients of all images."""
        images = self.inputs[0].shape[0]
        for k in range(images):
            (self.model(*(x[k:k + 1] for x in self.inputs)) / images).backward()


def table(rows: Sequence[Row]) -> str:
    """Return the rows in Markdown."""
    lines = ["| model | without tiles | with tiles | measured | time at it, at twice it | "
             "each block checkpointed | image by image | error of gradients (eager's) |",
             "|---|---|---|---|---|---|---|---|"]
    for r in rows:
        blocks = f"{r.checkpointed:.0%} {_time(r.checkpointed_time)}" if r.checkpointed else "-"
        images = f"{r.by_images:.0%} {_time(r.by_images_time)}" if r.by_images else "not equal, or one image"
        lines.append(
            f"| {MODELS[r.model][0]} | {r.without:.0%} | {r.budget:.1%} | {r.peak:.1%} | {_time(r.time)}, "
            f"{_time(r.time_twice)} | {blocks} | {images} | "
            f"{_size(r.error)} ({_size(r.eager_error)}) |")
    return "\n".join(lines)


def _time(ratio: float | None) -> str:
    return "-" if ratio is None else f"x {ratio:.2f}"


def _size(error: float) -> str:
    return f"1e{math.ceil(math.log10(max(error, 1e-16)))}"


def main() -> None:
    """Measure models, or write the page."""
    options, asked = options_of(__doc__, MODELS, ROWS, PAGE, ("--plans",))
    before = {row.model: row for row in read_rows(Row, options.rows)}
    for name in asked:
        try:
            bench = Bench(name, options.repeats, options.plans, before.get(name))
        except ImportError as error:
            print(f"{MODELS[name][0]}: left out, {error}")
            continue
        row = bench.row()
        add_row(row, options.rows)
        print(table([row]), flush=True)
    if options.write:
        latest = {row.model: row for row in read_rows(Row, options.rows)}
        write_between(PAGE, _BEGIN, _END, table([latest[name] for name in MODELS if name in latest]))


if __name__ == "__main__":
    main()
