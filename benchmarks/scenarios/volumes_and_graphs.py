"""Scenarios of `field.py`: networks of torch_geometric for graphs, and of monai and
segmentation_models_pytorch for volumes and pictures."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from scenarios.base import Scenario, Task, net, to_zero


def graph(layer: Callable[[], Any]) -> Task:
    """Three layers over a random graph."""
    x, edges = torch.randn(60, 16), torch.randint(0, 60, (2, 240))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layers = nn.Linear(16, 16), nn.ModuleList(layer() for _ in range(3))

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = F.relu(layer(x, edges))
            return x
    return Task(Net(), lambda m: F.mse_loss(m(x, edges), torch.zeros(60, 16)))


def _related(pyg: Any) -> Task:
    x, edges, kinds = torch.randn(60, 16), torch.randint(0, 60, (2, 240)), torch.randint(0, 3, (240,))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(pyg.RGCNConv(16, 16, 3) for _ in range(2))

        def forward(self, x: torch.Tensor, edges: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = F.relu(layer(x, edges, kinds))
            return x
    return Task(Net(), lambda m: F.mse_loss(m(x, edges, kinds), torch.zeros(60, 16)))


def _pooled(pyg: Any, kind: str) -> Task:
    """Classes of graphs, whose vertices are scored, and the best of them kept."""
    x, edges = torch.randn(60, 16), torch.randint(0, 20, (2, 80)) + torch.arange(80) % 3 * 20
    graphs, labels = torch.arange(60) // 20, torch.tensor([0, 1, 2])

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(pyg.GCNConv(16, 16) for _ in range(3))
            self.pools = nn.ModuleList(getattr(pyg, kind)(16, ratio=0.8) for _ in range(2))
            self.head = nn.Linear(32, 3)

        def forward(self, x: torch.Tensor, edges: torch.Tensor, graphs: torch.Tensor) -> torch.Tensor:
            found = torch.zeros(3, 32)
            for layer, pool in zip(self.layers, self.pools, strict=False):
                x = F.relu(layer(x, edges))
                x, edges, _, graphs, *_ = pool(x, edges, batch=graphs)
                found = found + torch.cat([
                    pyg.global_max_pool(x, graphs), pyg.global_mean_pool(x, graphs)], 1)
            return self.head(found)     # type: ignore[no-any-return]
    return Task(Net(), lambda m: F.cross_entropy(m(x, edges, graphs), labels))


def _by_encoder(smp: Any, model: str, loss: str, **options: Any) -> Task:
    """A network of segmentation_models_pytorch, and a loss of theirs."""
    x, y = torch.randn(2, 3, 64, 64), torch.randint(0, 2, (2, 1, 64, 64))
    criterion = getattr(smp.losses, loss)("binary")
    return Task(getattr(smp, model)("resnet18", encoder_weights=None, **options).train(),
                lambda m: criterion(m(x), y))


_graphs = functools.partial(net, "torch_geometric", "torch_geometric.nn", budget=0.9)
_monai = functools.partial(net, "monai", "monai.networks.nets")


def volume(model: nn.Module) -> Task:
    """A network over a volume."""
    x = torch.randn(1, 1, 16, 16, 16)

    def step(m: Any) -> torch.Tensor:
        out = m(x)
        out = out[0] if isinstance(out, (list, tuple)) else out
        return F.mse_loss(out, torch.zeros_like(out))
    return Task(model, step)


def of_monai(name: str, lines: str, make: Callable[[Any], nn.Module], budget: float = 0.8,
             size: int = 16) -> Scenario:
    """A network of monai over a volume of one channel, or over a picture. `make`: gets its networks."""
    def task(nets: Any) -> Task:
        return volume(make(nets)) if size == 16 else _pictures(make(nets), size)
    return _monai(name, lines, task, budget=budget)


def _pictures(model: nn.Module, size: int) -> Task:
    x = torch.randn(1, 1, size, size, size) if size <= 64 else torch.randn(1, 3, size, size)

    def step(m: Any) -> torch.Tensor:
        out = m(x)
        outs = out.values() if isinstance(out, dict) else out if isinstance(out, (list, tuple)) else [out]
        return sum((o.square().mean() for o in outs if isinstance(o, torch.Tensor)), torch.zeros(()))
    return Task(model, step)


def _segmented(model: nn.Module, size: tuple[int, ...], **options: Any) -> Task:
    """A network with a loss of monai. `options`: the loss, and what it is given."""
    import monai.losses

    name = options.pop("loss", "DiceCELoss")
    loss = getattr(monai.losses, name)(to_onehot_y=True, softmax=True, **options)
    x, y = torch.randn(2, 1, *size), torch.randint(0, 2, (2, 1, *size))
    return Task(model.train(), lambda m: loss(m(x), y))


def _masked(model: nn.Module) -> Task:
    x = torch.randn(2, 1, 16, 16, 16)

    def step(m: Any) -> torch.Tensor:
        found, mask = m(x)
        return (found.square().mean(-1) * mask).sum() / mask.sum()
    return Task(model.train(), step)


def _variational(model: nn.Module) -> Task:
    x = torch.rand(4, 1, 32, 32)

    def step(m: Any) -> torch.Tensor:
        found, mean, spread, _ = m(x)
        return F.mse_loss(found, x) - (1 + spread - mean.square() - spread.exp()).mean() / 2
    return Task(model.train(), step)


VIT: dict[str, Any] = {"hidden_size": 48, "mlp_dim": 64, "num_layers": 2, "num_heads": 4}


SCENARIOS: tuple[Scenario, ...] = (
    # Graphs.
    _graphs("gcn", "GCN", lambda pyg: graph(lambda: pyg.GCNConv(16, 16))),
    _graphs("gat", "GAT", lambda pyg: graph(lambda: pyg.GATConv(16, 8, heads=2))),
    _graphs("sage", "GraphSAGE", lambda pyg: graph(lambda: pyg.SAGEConv(16, 16))),
    _graphs("gin", "GIN", lambda pyg: graph(lambda: pyg.GINConv(nn.Sequential(
        nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))))),
    _graphs("gatv2", "GATv2", lambda pyg: graph(lambda: pyg.GATv2Conv(16, 8, heads=2))),
    _graphs("transformer", "TransformerConv", lambda pyg: graph(
        lambda: pyg.TransformerConv(16, 8, heads=2))),
    _graphs("rgcn", "RGCN", _related),
    _graphs("the best vertices", "model", lambda pyg: _pooled(pyg, "TopKPooling"), skips_layers=True),
    _graphs("the best vertices, by attention", "model", lambda pyg: _pooled(pyg, "SAGPooling"),
            skips_layers=True),
    # Volumes and pictures.
    of_monai("unet", "UNet", lambda nets: nets.UNet(3, 1, 2, (8, 16, 32), (2, 2), num_res_units=1), 0.9),
    of_monai("segresnet", "SegResNet", lambda nets: nets.SegResNet(
        3, 8, 1, 2, blocks_down=(1, 1), blocks_up=(1,)), 0.9),
    of_monai("dynunet", "DynUNet", lambda nets: nets.DynUNet(
        3, 1, 2, (3, 3, 3), (1, 2, 2), (2, 2), filters=(8, 16, 32)), 0.9),
    of_monai("attention unet", "AttentionUnet", lambda nets: nets.AttentionUnet(
        3, 1, 2, (8, 16, 32), (2, 2)), 0.9),
    of_monai("swin unetr", "SwinUNETR", lambda nets: nets.SwinUNETR(
        1, 2, feature_size=12, depths=(1, 1, 1, 1)), size=64),
    of_monai("unetr", "UNETR", lambda nets: nets.UNETR(
        1, 2, (16, 16, 16), feature_size=8, hidden_size=48, mlp_dim=64, num_heads=4), 0.9),
    of_monai("mednext", "MedNeXt", lambda nets: nets.MedNeXt(
        3, 8, 1, 2, encoder_expansion_ratio=2, decoder_expansion_ratio=2, bottleneck_expansion_ratio=2,
        blocks_down=(1, 1, 1, 1), blocks_bottleneck=1, blocks_up=(1, 1, 1, 1)), size=32),
    of_monai("v-net", "VNet", lambda nets: nets.VNet(3, 1, 2), size=32),
    of_monai("segresnet, deep supervision", "SegResNetDS", lambda nets: nets.SegResNetDS(
        3, init_filters=8, in_channels=1, out_channels=2, blocks_down=(1, 1, 1), dsdepth=2)),
    of_monai("segresnet, vae", "SegResNetVAE", lambda nets: nets.SegResNetVAE(
        (16, 16, 16), init_filters=8, in_channels=1, out_channels=2, blocks_down=(1, 1, 1),
        blocks_up=(1, 1))),
    of_monai("unet++", "BasicUNetPlusPlus", lambda nets: nets.BasicUNetPlusPlus(
        3, 1, 2, features=(8, 8, 16, 16, 16, 8)), 0.85, 32),
    of_monai("densenet", "DenseNet121", lambda nets: nets.DenseNet(
        3, 1, 2, init_features=8, growth_rate=4, block_config=(2, 2, 2)), size=32),
    of_monai("vq-vae", "VQVAE", lambda nets: nets.VQVAE(
        3, 1, 1, channels=(8, 8), num_res_channels=(8, 8), num_res_layers=1, num_embeddings=16,
        embedding_dim=8, downsample_parameters=((2, 4, 1, 1),) * 2,
        upsample_parameters=((2, 4, 1, 1, 0),) * 2)),
    of_monai("autoencoder of volumes", "AutoencoderKL", lambda nets: nets.AutoencoderKL(
        3, 1, 1, num_res_blocks=(1, 1), channels=(8, 16), attention_levels=(False, True), latent_channels=4,
        norm_num_groups=4)),
    of_monai("vit autoencoder", "ViTAutoEnc", lambda nets: nets.ViTAutoEnc(
        1, (16, 16, 16), (4, 4, 4), hidden_size=48, mlp_dim=64, num_layers=3, num_heads=4)),
    _monai("unet, distances of surfaces", "UNet", lambda nets: _segmented(
        nets.UNet(2, 1, 2, (8, 16, 32), (2, 2), num_res_units=1), (32, 32), loss="HausdorffDTLoss"),
        budget=0.7),
    _monai("flexible unet", "FlexibleUNet", lambda nets: _segmented(
        nets.FlexibleUNet(1, 2, "resnet10", decoder_channels=(32, 16, 8, 8, 8), spatial_dims=2), (64, 64)),
        budget=0.9),
    _monai("highresnet", "HighResNet", lambda nets: _segmented(
        nets.HighResNet(3, 1, 2, dropout_prob=0.1), (8, 8, 8)), budget=0.7),
    _monai("variational autoencoder", "VarAutoEncoder",
        lambda nets: _variational(nets.VarAutoEncoder(2, (1, 32, 32), 1, 8, (8, 16), (2, 2))), budget=0.7),
    _monai("masked autoencoder", "MaskedAutoEncoderViT", lambda nets: _masked(
        nets.MaskedAutoEncoderViT(1, (16,) * 3, (4,) * 3, **VIT, **{
            f"decoder_{k}": v for k, v in VIT.items()})), budget=0.7),
    of_monai("dints", "DiNTS", lambda nets: nets.DiNTS(
        dints_space=nets.TopologySearch(num_blocks=2, num_depths=2, channel_mul=0.25, device="cpu"),
        in_channels=1, num_classes=2, use_downsample=True), 0.6, 32),
    of_monai("hovernet", "HoVerNet", lambda nets: nets.HoVerNet(
        mode="fast", in_channels=3, out_classes=2, np_out_channels=2), 0.6, 256),
    of_monai("unet, residual", "UNet(num_res_units=2)", lambda nets: nets.UNet(
        3, 1, 2, channels=(8, 16, 32), strides=(2, 2), num_res_units=2), 0.8),
    net("segmentation_models_pytorch", "segmentation_models_pytorch", "unet", "smp.Unet",
        lambda smp: to_zero(smp.Unet("resnet18", encoder_weights=None), torch.randn(1, 3, 64, 64)),
        budget=0.9),
    *(net("segmentation_models_pytorch", "segmentation_models_pytorch", name, f"smp.{model}",
          functools.partial(_by_encoder, model=model, loss=loss, **options), budget=0.9)
      for name, model, loss, options in (
          ("unet++, dice", "UnetPlusPlus", "DiceLoss", {}), ("fpn, focal", "FPN", "FocalLoss", {}),
          ("deeplab v3+, tversky", "DeepLabV3Plus", "TverskyLoss", {}),
          ("linknet, lovasz", "Linknet", "LovaszLoss", {}),
          ("unet, scse, jaccard", "Unet", "JaccardLoss", {"decoder_attention_type": "scse"}))),
)
