"""Scenarios of `field.py`: networks of torch's layers, and what people write between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from scenarios.base import Block, Scenario, Task, batch, blocks, classified, plain, to_zero


class Written(nn.Module):
    """Blocks between which a function of the scenario runs."""

    def __init__(self, between: Callable[[nn.Module, torch.Tensor], torch.Tensor], drop: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(drop=drop) for _ in range(4))
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks."""
        for layer in self.layers:
            x = self.between(layer, x)
        return x


def _dropped(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x if torch.rand([]) < 0.2 else layer(x)


def _finite(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = layer(x)
    return x if torch.isfinite(x).all() else x.clamp(-1, 1)


def _checkpointed(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = checkpoint(layer, x, use_reentrant=False)
    return out


def _in_bfloat16(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return layer(x).float()  # type: ignore[no-any-return]


class Straight(torch.autograd.Function):
    """Rounds, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Round."""
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """Pass the gradient on."""
        return grads[0]


def _rounded(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = Straight.apply(layer(x))
    return out


def _forces(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def energy(y: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = layer(y).square().sum()
        return out
    out: torch.Tensor = x - 0.1 * torch.func.grad(energy)(x)
    return out


class Experts(nn.Module):
    """Picks the rows of each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router = Block(), nn.Linear(32, 3)
        self.experts = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Route the rows."""
        x = self.first(x)
        chosen, out = self.router(x).argmax(-1), torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            rows = torch.where(chosen == k)[0]
            out = out.index_add(0, rows, expert(x[rows]))
        return out + x


class Recurrent(nn.Module):
    """An LSTM or GRU over text."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.layers = kind(32, 32, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        out: torch.Tensor = self.head(self.layers(self.words(x))[0])
        return out


def _over_words(kind: type[nn.RNNBase]) -> Task:
    x = torch.randint(0, 50, (8, 20))
    return Task(Recurrent(kind), lambda m: F.cross_entropy(m(x).flatten(0, 1), x.flatten()))


class Packed(nn.Module):
    """A recurrent network over packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(50, 32), nn.LSTM(32, 32, 2, bidirectional=True)
        self.head = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 50))

    def forward(self, packed: PackedSequence) -> torch.Tensor:
        """Return logits."""
        found, _ = self.layers(packed._replace(data=self.words(packed.data)))
        out: torch.Tensor = self.head(pad_packed_sequence(found)[0])
        return out


def _packed() -> Task:
    given = pack_sequence([torch.randint(0, 50, (n,)) for n in (20, 17, 12, 9, 9, 5)])
    labels = torch.randint(0, 50, (120,))
    return Task(Packed(), lambda m: F.cross_entropy(m(given).flatten(0, 1), labels))


def _images(channels_last: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    net: Any = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return net.to(memory_format=torch.channels_last) if channels_last else net  # type: ignore[no-any-return]


def _translated() -> Task:
    x, y = torch.randn(4, 12, 32), torch.randn(4, 8, 32)
    return Task(nn.Transformer(32, 4, 2, 2, 64, batch_first=True), lambda m: F.mse_loss(m(x, y), y))


def _every_other(change: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(*(change(nn.Linear(32, 32)) if k % 2 else Block() for k in range(6)))


def _part_of_a_step() -> Task:
    model, x = nn.ModuleDict({"trunk": blocks(), "head": nn.Linear(32, 4)}), batch()
    return Task(model, lambda m: m["head"](m["trunk"](x)).square().mean(), model["trunk"])


def _flow() -> Task:
    """Coupling layers with the logarithm of their determinant (RealNVP)."""
    class Coupling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nets = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32))
                                      for _ in range(6))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            log = x.new_zeros(len(x))
            for layer in self.nets:
                kept, moved = x.chunk(2, 1)
                scale, shift = layer(kept).chunk(2, 1)
                scale = scale.tanh()
                x, log = torch.cat([moved * scale.exp() + shift, kept], 1), log + scale.sum(1)
            return x, log

    x = batch(256)

    def step(m: Any) -> torch.Tensor:
        z, log = m(x)
        return (0.5 * z.square().sum(1) - log).mean()
    return Task(Coupling(), step)


class Atoms(nn.Module):
    """An energy of pairs of atoms within molecules, and the forces on the atoms."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.head = nn.Embedding(5, 16), nn.Linear(32, 1)
        self.pairs = nn.Sequential(nn.Linear(33, 64), nn.SiLU(), nn.Linear(64, 32), nn.SiLU())

    def forward(self, kinds: torch.Tensor, places: torch.Tensor, of: torch.Tensor
                ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the energies of the molecules, and the forces. `of`: the molecule of each atom."""
        places = places.requires_grad_()
        i, j = torch.where((of[:, None] == of) & ~torch.eye(len(of), dtype=torch.bool))
        far = (places[i] - places[j]).square().sum(-1, keepdim=True)
        found = self.pairs(torch.cat([self.kinds(kinds[i]), self.kinds(kinds[j]), far], -1))
        energy = torch.zeros(int(of.max()) + 1, 1).index_add(0, of[i], self.head(found))
        slope, = torch.autograd.grad(energy.sum(), places, create_graph=True)
        return energy, -slope


def _atoms() -> Task:
    kinds, places, of = torch.randint(0, 5, (24,)), torch.randn(24, 3), torch.arange(24) // 8

    def step(m: Any) -> torch.Tensor:
        energy, forces = m(kinds, places.clone(), of)
        return (energy - 1).square().mean() + forces.square().mean()
    return Task(Atoms(), step)


def _sums_between(x: torch.Tensor) -> torch.Tensor:
    """Sums from each place to each later one; minus infinity for earlier ones."""
    n = x.shape[-1]
    later = torch.ones(n, n, dtype=torch.bool).tril(-1)
    sums = x[..., None].expand(*x.shape, n).masked_fill(~later, 0).cumsum(-2)
    return sums.masked_fill(~(later | torch.eye(n, dtype=torch.bool)), -torch.inf)


def _scanned(x: torch.Tensor, decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor, size: int
             ) -> torch.Tensor:
    """A linear state in chunks (the dual form of Mamba 2)."""
    batch, length, heads, width = x.shape
    x, b, c = (t.view(batch, length // size, size, *t.shape[2:]) for t in (x, b, c))
    decay = decay.view(batch, -1, size, heads).permute(0, 3, 1, 2)
    total = decay.cumsum(-1)
    within = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", c, b, _sums_between(decay).exp(), x)
    states = torch.einsum("bclhn,bhcl,bclhp->bchpn", b, (total[..., -1:] - total).exp(), x)
    states = torch.cat([torch.zeros_like(states[:, :1]), states], 1)
    between = _sums_between(F.pad(total[..., -1], (1, 0))).exp()
    states = torch.einsum("bhzc,bchpn->bzhpn", between, states)[:, :-1]
    return (within + torch.einsum("bclhn,bchpn,bhcl->bclhp", c, states, total.exp())).reshape(
        batch, length, heads, width)


class Scan(nn.Module):
    """A layer of Mamba 2, written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.RMSNorm(32), nn.Linear(32, 64 + 64 + 16 + 4), nn.Linear(64, 32)
        self.rate = nn.Parameter(torch.rand(4).log())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input and what the layer adds."""
        gate, value, b, c, step = self.into(self.norm(x)).split([64, 64, 8, 8, 4], -1)
        step = F.softplus(step)
        value = value.unflatten(-1, (4, 16)) * step[..., None]
        b, c = (t[:, :, None].expand(-1, -1, 4, -1) for t in (b, c))
        scanned = _scanned(value, -self.rate.exp() * step, b, c, 8).flatten(2)
        out: torch.Tensor = x + self.out(scanned * F.silu(gate))
        return out


class Splines(nn.Module):
    """A layer of learned functions: splines of each input (a Kolmogorov-Arnold network)."""

    grid: torch.Tensor

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.register_buffer("grid", (torch.arange(-3, 9) * 0.4 - 1).repeat(width, 1))
        self.base, self.weight = nn.Linear(width, out), nn.Linear(8 * width, out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return sums of functions of the inputs."""
        at, grid = x[..., None], self.grid
        basis = ((at >= grid[:, :-1]) & (at < grid[:, 1:])).to(x.dtype)
        for k in range(1, 4):
            left = (at - grid[:, :-k - 1]) / (grid[:, k:-1] - grid[:, :-k - 1])
            right = (grid[:, k + 1:] - at) / (grid[:, k + 1:] - grid[:, 1:-k])
            basis = left * basis[..., :-1] + right * basis[..., 1:]
        out: torch.Tensor = self.base(F.silu(x)) + self.weight(basis.flatten(1))
        return out


class Splats(nn.Module):
    """Gaussians in a plane, drawn from front to back."""

    def __init__(self, number: int = 48) -> None:
        super().__init__()
        self.places, self.sizes = nn.Parameter(torch.rand(number, 2)), nn.Parameter(torch.rand(number, 2) - 3)
        self.angles, self.opacities = nn.Parameter(torch.rand(number)), nn.Parameter(torch.zeros(number))
        self.colours, self.depths = nn.Parameter(torch.rand(number, 3)), nn.Parameter(torch.rand(number))

    def forward(self, side: int) -> torch.Tensor:
        """Return a picture."""
        cos, sin = self.angles.cos(), self.angles.sin()
        axes = torch.stack([cos, -sin, sin, cos], -1).view(-1, 2, 2) @ torch.diag_embed(self.sizes.exp())
        inverse, order = torch.linalg.inv(axes @ axes.mT), self.depths.argsort()
        line = torch.linspace(0, 1, side)
        off = torch.cartesian_prod(line, line) - self.places[order, None]
        far = torch.einsum("nki,nij,nkj->nk", off, inverse[order], off)
        cover = (self.opacities[order, None].sigmoid() * (-far / 2).exp()).clamp(max=0.99)
        shine = torch.cat([torch.ones(1, side * side), 1 - cover[:-1]]).cumprod(0)
        return ((shine * cover)[..., None] * self.colours[order, None].sigmoid()).sum(0)


class Tagger(nn.Module):
    """Tags of words, with a conditional random field: its forward algorithm is a loop."""

    def __init__(self, tags: int = 6) -> None:
        super().__init__()
        self.words, self.scores = nn.Embedding(50, 32), nn.Linear(32, tags)
        self.reads = nn.LSTM(32, 16, bidirectional=True, batch_first=True)
        self.steps = nn.Parameter(torch.randn(tags, tags))

    def forward(self, words: torch.Tensor, tags: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the negative log-likelihood of the tags."""
        scores = self.scores(self.reads(self.words(words))[0])
        every, own = scores[:, 0], scores[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for t in range(1, words.shape[1]):
            here = scores[:, t].gather(1, tags[:, t:t + 1]).squeeze(1)
            own = own + (here + self.steps[tags[:, t - 1], tags[:, t]]) * mask[:, t]
            following = torch.logsumexp(every[:, :, None] + self.steps + scores[:, t, None], 1)
            every = torch.where(mask[:, t, None], following, every)
        return (torch.logsumexp(every, 1) - own).mean()


def _tagged() -> Task:
    words, tags = torch.randint(0, 50, (16, 12)), torch.randint(0, 6, (16, 12))
    mask = torch.arange(12) < torch.randint(5, 12, (16, 1))
    return Task(Tagger(), lambda m: m(words, tags, mask))


SCENARIOS: tuple[Scenario, ...] = (
    plain("mlp", lambda: to_zero(blocks()), 0.7),
    plain("a loss of several operations", lambda: Task(
        blocks(), lambda m, x=batch(): m(x).square().mean()), 0.7),
    plain("dropout", lambda: to_zero(blocks(drop=0.1)), 0.7),
    plain("convolutions", lambda: classified(_images(), torch.randn(4, 3, 24, 24)), 0.9),
    plain("channels last", lambda: classified(
        _images(True), torch.randn(4, 3, 24, 24).to(memory_format=torch.channels_last)), 0.9),
    plain("transformer encoder", lambda: to_zero(nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 3, enable_nested_tensor=False),
        torch.randn(4, 16, 32)), 0.7),
    plain("transformer", _translated, 0.7),
    plain("lstm", lambda: _over_words(nn.LSTM), 0.9),
    plain("gru", lambda: _over_words(nn.GRU), 0.9),
    plain("packed sequences", _packed),
    plain("checkpoint", lambda: to_zero(Written(_checkpointed)), 1.0),
    plain("autocast inside", lambda: to_zero(Written(_in_bfloat16)), 0.7),
    plain("custom function", lambda: to_zero(Written(_rounded)), 0.7),
    plain("torch.func.grad inside", lambda: to_zero(Written(_forces)), 0.8),
    plain("layer drop", lambda: to_zero(Written(_dropped)), 0.8),
    plain("a check of values", lambda: to_zero(Written(_finite)), 0.8),
    plain("experts that pick rows", lambda: to_zero(Experts()), 0.9),
    plain("experts, opaque", lambda: to_zero(Experts()), 0.9, settings={"opaque": "auto"}),
    plain("spectral norm", lambda: to_zero(_every_other(nn.utils.parametrizations.spectral_norm)), 0.7),
    plain("weight norm", lambda: to_zero(_every_other(nn.utils.parametrizations.weight_norm)), 0.7),
    plain("a part of a step", _part_of_a_step, 0.8, "model.trunk"),
    plain("a flow", _flow, 0.7),
    plain("forces on atoms of molecules", _atoms, 0.8),
    plain("scans in chunks", lambda: to_zero(nn.Sequential(*(Scan() for _ in range(3))),
                                             torch.randn(4, 32, 32))),
    plain("splines of each input", lambda: to_zero(nn.Sequential(
        Splines(8, 32), Splines(32, 32), Splines(32, 8)), torch.rand(64, 8) * 2 - 1)),
    plain("splats, front to back", lambda: Task(Splats(), lambda m: (m(24) - 0.5).abs().mean()), 0.7),
    plain("tags with a random field", _tagged),
)
