"""Further scenarios of `field.py`: several backwards through one forward, losses and adversaries made inside
of a step, video models of diffusers, more networks of monai and models of transformers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from field_architectures import architecture
from field_scenarios import BOTH, DECODER, ENCODER, VISION, Block, Scenario, Task, denoised, net, volume
from torch import nn
from torch.nn import functional as F


def _blocks(number: int = 4, *others: nn.Module) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(number)), *others)


def _rows(number: int = 128) -> torch.Tensor:
    return torch.randn(number, 32)


def _classes(number: int = 128) -> torch.Tensor:
    return torch.randint(0, 32, (number,))


# -- Several backwards -----------------------------------------------------------------------------


class Coder(nn.Module):
    """An encoder, a decoder, and a judge of what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.makes, self.judges = _blocks(3), _blocks(3), _blocks(3, nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is made again."""
        out: torch.Tensor = self.makes(self.reads(x))
        return out


def _adaptive() -> Task:
    """The weight of an adversary's loss, from gradients of the last layer (VQGAN)."""
    x, judge = _rows(), _blocks(1, nn.Linear(32, 1)).requires_grad_(False)
    model = _blocks(6)

    def step(m: Any) -> torch.Tensor:
        made, last = m(x), list(model.parameters())[-1]
        near, fooled = (made - x).abs().mean(), -judge(made).mean()
        one, other = (torch.autograd.grad(k, last, retain_graph=True)[0].norm() for k in (near, fooled))
        loss: torch.Tensor = near + (one / (other + 1e-4)).clamp(0, 1e4).detach() * fooled
        return loss
    return Task(model, step)


def _adaptive_by_parts() -> Task:
    x, model = _rows(), Coder()

    def step(m: Any) -> torch.Tensor:
        made, last = m.makes(m.reads(x)), list(model.makes.parameters())[-1]
        near, fooled = (made - x).abs().mean(), -m.judges(made).mean()
        one, other = (torch.autograd.grad(k, last, retain_graph=True)[0].norm() for k in (near, fooled))
        loss: torch.Tensor = near + (one / (other + 1e-4)).clamp(0, 1e4).detach() * fooled
        return loss
    return Task(model, step)


def _one_by_one() -> Task:
    x = _rows()

    def step(m: Any) -> torch.Tensor:
        made = m(x)
        for k in range(1, 3):
            (k * made).cos().mean().backward(retain_graph=True)
        return made.square().mean()
    return Task(_blocks(6), step)


def _projected() -> Task:
    """Gradients of tasks without what conflicts (PCGrad)."""
    x, model = _rows(), _blocks(6)

    def step(m: Any) -> torch.Tensor:
        made, weights = m(x), [p for p in model.parameters() if p.requires_grad]
        losses = [(k * made).cos().mean() for k in range(1, 4)]
        found = [torch.cat([g.flatten() for g in torch.autograd.grad(k, weights, retain_graph=True)])
                 for k in losses]
        for k, g in enumerate(found):
            for h in found[:k] + found[k + 1:]:
                g = g - min(torch.zeros(()), g @ h) / h.square().sum() * h
        for p, part in zip(weights, g.split([p.numel() for p in weights]), strict=True):
            p.grad = part.view_as(p).clone()
        return (0.0 * losses[0]).detach()
    return Task(model, step)


def _balanced() -> Task:
    """Weights of losses from the sizes of gradients of a shared layer (GradNorm)."""
    x, model = _rows(), _blocks(6)

    def step(m: Any) -> torch.Tensor:
        made, last = m(x), list(model.parameters())[-1]
        losses = [(k * made).cos().mean() for k in range(1, 3)]
        weights = torch.ones(2, requires_grad=True)
        sizes = torch.stack([torch.autograd.grad(
            w * k, last, retain_graph=True, create_graph=True)[0].norm()
            for w, k in zip(weights, losses, strict=True)])
        slope, = torch.autograd.grad((sizes - sizes.mean().detach()).abs().sum(), weights)
        moved = (weights - slope).detach()
        return moved[0] * losses[0] + moved[1] * losses[1]
    return Task(model, step)


# -- Losses and adversaries inside of a step -------------------------------------------------------


def _attacked(trades: bool) -> Task:
    """Inputs that are moved up their slope (PGD); TRADES with a divergence from the clean ones."""
    x, y, model = _rows(), _classes(), _blocks(5)

    def step(m: Any) -> torch.Tensor:
        clean = m(x).detach().softmax(-1)
        moved = x + 0.01 * torch.randn_like(x)
        for _ in range(2):
            moved = moved.detach().requires_grad_()
            found = m(moved)
            loss = F.kl_div(found.log_softmax(-1), clean, reduction="batchmean") if trades else \
                F.cross_entropy(found, y)
            moved = moved + 0.02 * torch.autograd.grad(loss, moved)[0].sign()
        if not trades:
            return F.cross_entropy(m(moved.detach()), y)
        found = m(x)
        return F.cross_entropy(found, y) + F.kl_div(
            m(moved.detach()).log_softmax(-1), found.softmax(-1), reduction="batchmean")
    return Task(model, step)


def _virtual() -> Task:
    """Virtual adversarial training: a direction by power iteration."""
    x, y = _rows(), _classes()

    def step(m: Any) -> torch.Tensor:
        found = m(x)
        target, way = found.detach().softmax(-1), F.normalize(torch.randn_like(x), dim=1).requires_grad_()
        near = F.kl_div(m(x + 0.1 * way).log_softmax(-1), target, reduction="batchmean")
        way = F.normalize(torch.autograd.grad(near, way)[0], dim=1)
        return F.cross_entropy(found, y) + F.kl_div(
            m(x + way).log_softmax(-1), target, reduction="batchmean")
    return Task(_blocks(5), step)


def _through_time() -> Task:
    """A recurrent state that goes from step to step, detached."""
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.LSTM(32, 64, 2, batch_first=True), _blocks(2)
            self.out = nn.Linear(64, 32)

        def forward(self, x: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, Any]:
            x, state = self.layer(x, state)
            return self.head(self.out(x)), state

    x, kept = torch.randn(8, 16, 32), [None]

    def step(m: Any) -> torch.Tensor:
        out, state = m(x, kept[0])
        kept[0] = tuple(s.detach() for s in state)
        return F.mse_loss(out, x.flip(1))
    return Task(Recurrent(), step)


def _scaled() -> Task:
    """float16 under autocast with a scaler, accumulation and clipping."""
    x, y, model = _rows(), _classes(), _blocks(4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)

    def step(m: Any) -> torch.Tensor:
        for k in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(m(x[k::2]), y[k::2]) / 2
            if k == 0:
                scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e3)
        return loss
    return Task(model, step)


def _sobolev() -> Task:
    """A field and its slope with respect to places, outside of the network (physics-informed)."""
    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(),
                                        nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layers(x)
            return out

    x = torch.rand(256, 2)

    def step(m: Any) -> torch.Tensor:
        at = x.clone().requires_grad_()
        u = m(at)
        slope, = torch.autograd.grad(u.sum(), at, create_graph=True)
        second, = torch.autograd.grad(slope[:, 0].sum(), at, create_graph=True)
        return (slope[:, 1] - second[:, 0]).square().mean() + u.square().mean()
    return Task(Field(), step)


def _clipped_policy() -> Task:
    """PPO: an old policy's probabilities, a value, an entropy."""
    class ActorCritic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.policy, self.value = _blocks(4), nn.Linear(32, 6), nn.Linear(32, 1)

        def forward(self, x: torch.Tensor) -> Any:
            x = self.trunk(x)
            return torch.distributions.Categorical(logits=self.policy(x), validate_args=False), self.value(x)

    x, acts, gains = _rows(), torch.randint(0, 6, (128,)), torch.randn(128)

    def step(m: Any) -> torch.Tensor:
        with torch.no_grad():
            old = m(x)[0].log_prob(acts)
        chosen, value = m(x)
        ratio = (chosen.log_prob(acts) - old).exp()
        return -torch.min(ratio * gains, ratio.clamp(0.8, 1.2) * gains).mean() + 0.5 * F.mse_loss(
            value[:, 0], gains) - 0.01 * chosen.entropy().mean()
    return Task(ActorCritic(), step)


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

    x = _rows(256)

    def step(m: Any) -> torch.Tensor:
        z, log = m(x)
        return (0.5 * z.square().sum(1) - log).mean()
    return Task(Coupling(), step)


def _scheduled() -> Task:
    """A number of the class, and one around the forward, that a schedule changes."""
    factor = 1.0

    class Heated(nn.Module):
        warmth = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.layers = _blocks(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layers(x) * type(self).warmth * factor
            return out

    x, numbers = _rows(), count()

    def step(m: Any) -> torch.Tensor:
        nonlocal factor
        Heated.warmth = 1.5 if next(numbers) > 1 else 1.0
        factor = 2.0 - Heated.warmth / 2
        return m(x).square().mean()
    return Task(Heated(), step)


def _row(name: str, make: Callable[[], Task], budget: float = 0.7, model: str = "model") -> Scenario:
    return Scenario("torch", name, model, make, budget=budget)


LOOPS = (
    _row("the weight of an adversary", _adaptive),
    _row("the weight of an adversary, by parts", _adaptive_by_parts),
    _row("losses one by one", _one_by_one),
    _row("projected gradients", _projected),
    _row("balanced gradients", _balanced, 1.0),
    _row("attacked inputs", lambda: _attacked(False)),
    _row("attacked inputs, a divergence", lambda: _attacked(True)),
    _row("virtual adversaries", _virtual),
    _row("a state through time", _through_time),
    _row("a scaler, accumulation, clipping", _scaled),
    _row("slopes of a field", _sobolev, 1.0),
    _row("a clipped policy", _clipped_policy),
    _row("a flow", _flow),
    _row("numbers of a class and around it", _scheduled),
)


# -- diffusers -------------------------------------------------------------------------------------


def _video(channels: int = 4, frames: int = 2, size: int = 8) -> torch.Tensor:
    return torch.randn(1, channels, frames, size, size)


def _told(width: int = 32, words: int = 6, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, words, width)


DIFFUSION = (
    denoised("cogvideox", "CogVideoXTransformer3DModel", {
        "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4,
        "time_embed_dim": 16, "text_embed_dim": 32, "num_layers": 3, "sample_width": 8, "sample_height": 8,
        "sample_frames": 5, "patch_size": 2, "temporal_compression_ratio": 4, "max_text_seq_length": 6},
        lambda: {"hidden_states": torch.randn(1, 2, 4, 8, 8), "encoder_hidden_states": _told(),
                 "timestep": torch.tensor([3])}),
    denoised("hunyuan video", "HunyuanVideoTransformer3DModel", {
        "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16,
        "num_layers": 2, "num_single_layers": 2, "num_refiner_layers": 1, "patch_size": 2, "patch_size_t": 1,
        "guidance_embeds": True, "text_embed_dim": 32, "pooled_projection_dim": 16,
        "rope_axes_dim": (4, 6, 6)},
        lambda: {"hidden_states": _video(), "timestep": torch.tensor([3]), "encoder_hidden_states": _told(),
                 "encoder_attention_mask": torch.ones(1, 6), "pooled_projections": torch.randn(1, 16),
                 "guidance": torch.tensor([6016.0])}),
    denoised("mochi", "MochiTransformer3DModel", {
        "patch_size": 2, "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 3,
        "pooled_projection_dim": 16, "in_channels": 4, "text_embed_dim": 32, "time_embed_dim": 16,
        "max_sequence_length": 6},
        lambda: {"hidden_states": _video(), "timestep": torch.tensor([3]), "encoder_hidden_states": _told(),
                 "encoder_attention_mask": torch.ones(1, 6).bool()}),
    denoised("allegro", "AllegroTransformer3DModel", {
        "num_attention_heads": 2, "attention_head_dim": 24, "in_channels": 4, "out_channels": 4,
        "num_layers": 2, "cross_attention_dim": 48, "caption_channels": 32, "sample_width": 8,
        "sample_height": 8, "sample_frames": 4},
        lambda: {"hidden_states": _video(), "timestep": torch.tensor([3]), "encoder_hidden_states": _told(),
                 "encoder_attention_mask": torch.ones(1, 6)}),
    denoised("latte", "LatteTransformer3DModel", {
        "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 8,
        "num_layers": 2, "cross_attention_dim": 32, "caption_channels": 32, "sample_size": 8, "patch_size": 2,
        "norm_elementwise_affine": False, "norm_type": "ada_norm_single", "attention_bias": True,
        "video_length": 2},
        lambda: {"hidden_states": _video(), "timestep": torch.tensor([3]), "encoder_hidden_states": _told()}),
    denoised("auraflow", "AuraFlowTransformer2DModel", {
        "sample_size": 8, "patch_size": 2, "in_channels": 4, "num_mmdit_layers": 1,
        "num_single_dit_layers": 2, "attention_head_dim": 8, "num_attention_heads": 4,
        "joint_attention_dim": 32, "caption_projection_dim": 32, "pos_embed_max_size": 64},
        lambda: {"hidden_states": torch.randn(2, 4, 8, 8), "encoder_hidden_states": _told(batch=2),
                 "timestep": torch.rand(2)}),
    denoised("lumina2", "Lumina2Transformer2DModel", {
        "sample_size": 8, "patch_size": 2, "in_channels": 4, "hidden_size": 24, "num_layers": 2,
        "num_refiner_layers": 1, "num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 2,
        "axes_dim_rope": (4, 2, 2), "axes_lens": (64, 64, 64), "cap_feat_dim": 32},
        lambda: {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.rand(2),
                 "encoder_hidden_states": _told(batch=2), "encoder_attention_mask": torch.ones(2, 6).bool()}),
    denoised("stable audio", "StableAudioDiTModel", {
        "sample_size": 8, "in_channels": 4, "num_layers": 3, "attention_head_dim": 8,
        "num_key_value_attention_heads": 2, "num_attention_heads": 4, "out_channels": 4,
        "cross_attention_dim": 32, "time_proj_dim": 16, "global_states_input_dim": 16,
        "cross_attention_input_dim": 32},
        lambda: {"hidden_states": torch.randn(2, 4, 8), "timestep": torch.rand(2),
                 "encoder_hidden_states": _told(batch=2), "global_hidden_states": torch.randn(2, 1, 16)}),
    denoised("unet of videos", "UNet3DConditionModel", {
        "block_out_channels": (16, 32), "norm_num_groups": 8, "cross_attention_dim": 32,
        "attention_head_dim": 4, "layers_per_block": 1, "sample_size": 8,
        "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
        "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D")},
        lambda: {"sample": _video(), "timestep": torch.tensor(3), "encoder_hidden_states": _told()}),
    denoised("unet in space and time", "UNetSpatioTemporalConditionModel", {
        "block_out_channels": (32, 64), "layers_per_block": 1, "sample_size": 8, "in_channels": 8,
        "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        "cross_attention_dim": 32, "num_attention_heads": 4, "projection_class_embeddings_input_dim": 48,
        "addition_time_embed_dim": 16},
        lambda: {"sample": torch.randn(1, 2, 8, 8, 8), "timestep": torch.tensor(3),
                 "encoder_hidden_states": _told(words=1),
                 "added_time_ids": torch.tensor([[6.0, 127, 0.02]])}),
    denoised("autoencoder of videos", "AutoencoderKLCogVideoX", {
        "block_out_channels": (8, 8, 8, 8), "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2,
        "down_block_types": ("CogVideoXDownBlock3D",) * 4, "up_block_types": ("CogVideoXUpBlock3D",) * 4,
        "temporal_compression_ratio": 4},
        lambda: {"sample": torch.randn(1, 3, 5, 16, 16)}, budget=0.8),
    denoised("autoencoder of wan", "AutoencoderKLWan", {
        "base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1,
        "temperal_downsample": [False, True, True]},
        lambda: {"sample": torch.randn(1, 3, 5, 16, 16)}, budget=0.8),
)


# -- monai -----------------------------------------------------------------------------------------


def of_monai(name: str, lines: str, make: Callable[[Any], nn.Module], budget: float = 0.8,
             size: int = 16) -> Scenario:
    """A network of monai over a volume of one channel, or over a picture. `make`: gets its networks."""
    def task(nets: Any) -> Task:
        return volume(make(nets)) if size == 16 else _pictures(make(nets), size)
    return net("monai", "monai.networks.nets", name, lines, task, budget=budget)


def _pictures(model: nn.Module, size: int) -> Task:
    x = torch.randn(1, 1, size, size, size) if size <= 64 else torch.randn(1, 3, size, size)

    def step(m: Any) -> torch.Tensor:
        out = m(x)
        outs = out.values() if isinstance(out, dict) else out if isinstance(out, (list, tuple)) else [out]
        return sum((o.square().mean() for o in outs if isinstance(o, torch.Tensor)), torch.zeros(()))
    return Task(model, step)


VOLUMES = (
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
)


# -- transformers ----------------------------------------------------------------------------------

MORE: tuple[tuple[str, str, str, dict[str, Any], str, float], ...] = (
    ("roformer", "RoFormerForMaskedLM", "RoFormer", {**ENCODER, "embedding_size": 32}, "labelled", 0.7),
    ("ernie", "ErnieForSequenceClassification", "Ernie", ENCODER, "sentence", 0.7),
    ("data2vec, text", "Data2VecTextForMaskedLM", "Data2VecText", ENCODER, "labelled", 0.7),
    ("biogpt", "BioGptForCausalLM", "BioGpt", {**ENCODER, "use_cache": False}, "labelled", 0.7),
    ("biogpt, layer drop", "BioGptForCausalLM", "BioGpt", {
        **ENCODER, "use_cache": False, "layerdrop": 0.3}, "labelled", 0.9),
    ("codegen", "CodeGenForCausalLM", "CodeGen", {
        "vocab_size": 99, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "n_ctx": 64,
        "rotary_dim": 4, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2}, "labelled", 0.7),
    ("mpt", "MptForCausalLM", "Mpt", {
        "vocab_size": 99, "d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 64, "use_cache": False},
     "labelled", 0.7),
    ("persimmon", "PersimmonForCausalLM", "Persimmon", {**ENCODER, "use_cache": False}, "labelled", 0.7),
    ("phi-moe", "PhimoeForCausalLM", "Phimoe", {**DECODER, "num_local_experts": 4}, "labelled", 0.8),
    ("pvt v2", "PvtV2ForImageClassification", "PvtV2", {
        "image_size": 64, "hidden_sizes": [16, 24, 32, 32], "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 2, 4, 4]}, "large image", 0.7),
    ("owl-vit", "OwlViTModel", "OwlViT", {
        "text_config": {**ENCODER, "max_position_embeddings": 16},
        "vision_config": {**VISION, "hidden_size": 32}, "projection_dim": 16}, "contrast", 0.7),
    ("altclip", "AltCLIPModel", "AltCLIP", {
        "text_config": {**ENCODER, "project_dim": 16}, "vision_config": VISION, "projection_dim": 16},
     "contrast", 0.7),
    ("blenderbot", "BlenderbotForConditionalGeneration", "Blenderbot", BOTH, "translated", 0.7),
    ("plbart", "PLBartForConditionalGeneration", "PLBart", BOTH, "translated", 0.7),
    ("bigbird-pegasus", "BigBirdPegasusForConditionalGeneration", "BigBirdPegasus", {
        **BOTH, "attention_type": "original_full"}, "translated", 0.7),
    ("vivit", "VivitForVideoClassification", "Vivit", {
        **VISION, "num_frames": 4, "tubelet_size": [2, 8, 8]}, "filmed", 0.7),
    ("opt, layer drop", "OPTForSequenceClassification", "OPT", {
        **DECODER, "ffn_dim": 64, "word_embed_proj_dim": 32, "layerdrop": 0.2}, "sentence", 0.9),
)

SCENARIOS: tuple[Scenario, ...] = (*LOOPS, *DIFFUSION, *VOLUMES, *(architecture(*row) for row in MORE))
