"""Scenarios of `field.py`: models of diffusers, and the steps that train them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from scenarios.base import Scenario, Task, looped
from scenarios.models import ENCODER, ids, made


def denoised(name: str, model: str, options: dict[str, Any], inputs: Callable[[], dict[str, Any]],
             **others: Any) -> Scenario:
    """A model of diffusers, and its squared outputs."""
    def make() -> Task:
        import diffusers

        given = inputs()

        def step(m: Any) -> torch.Tensor:
            out = m(**given, return_dict=False)[0]
            return F.mse_loss(torch.stack(out) if isinstance(out, list) else out, torch.zeros(()))
        return Task(getattr(diffusers, model)(**options).train(), step)
    return Scenario("diffusers", name, f"{model}(...)", make, ("diffusers",), **others)


CHANNELS = {"sample_size": 16, "block_out_channels": (32, 32), "layers_per_block": 1, "norm_num_groups": 8}
CODER = {"block_out_channels": (16, 32), "norm_num_groups": 8, "latent_channels": 4,
         "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
CONDITIONED = {**CHANNELS, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
               "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "cross_attention_dim": 16,
               "attention_head_dim": 8}


def _noise(channels: int = 4, size: int = 16) -> torch.Tensor:
    return torch.randn(2, channels, size, size)


def _video(channels: int = 4, frames: int = 2, size: int = 8) -> torch.Tensor:
    return torch.randn(1, channels, frames, size, size)


def _told(width: int = 32, words: int = 6, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, words, width)


def coded() -> Task:
    """A step of a variational autoencoder by its two methods."""
    import diffusers

    x = _noise(3, 32)

    def step(m: Any) -> torch.Tensor:
        latent = m.encode(x).latent_dist
        return F.mse_loss(m.decode(latent.sample()).sample, x) + 1e-3 * latent.kl().mean()
    return Task(diffusers.AutoencoderKL(**CODER), step)


def _controlled() -> Task:
    import diffusers

    unet = diffusers.UNet2DConditionModel(**CONDITIONED).requires_grad_(False)
    control = diffusers.ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(8, 16)).train()
    x, t, words, image = _noise(), torch.tensor([3, 5]), torch.randn(2, 5, 16), _noise(3, 32)

    def step(m: Any) -> torch.Tensor:
        down, mid = control(x, t, words, image, return_dict=False)
        return F.mse_loss(unet(x, t, words, down_block_additional_residuals=down,
                               mid_block_additional_residual=mid).sample, torch.zeros(()))
    return Task(control, step)


def _diffused(prediction: str) -> Task:
    """The step of text to image, with losses weighted by signal to noise."""
    import diffusers
    from diffusers.training_utils import compute_snr

    schedule = diffusers.DDPMScheduler(100, prediction_type=prediction)
    x, words = torch.randn(4, 4, 16, 16), torch.randn(4, 5, 16)

    def step(m: Any) -> torch.Tensor:
        noise, times = torch.randn_like(x), torch.randint(0, 100, (4,))
        by_speed = prediction == "v_prediction"
        target = schedule.get_velocity(x, noise, times) if by_speed else noise
        found = m(schedule.add_noise(x, noise, times), times, words, return_dict=False)[0]
        ratio = compute_snr(schedule, times)
        losses = F.mse_loss(found.float(), target.float(), reduction="none").flatten(1).mean(1)
        return (losses * ratio.clamp(max=5) / (ratio + by_speed)).mean()
    return Task(diffusers.UNet2DConditionModel(**CONDITIONED).train(), step)


def _with_text() -> Task:
    """DreamBooth with its text encoder."""
    import diffusers

    text = made("CLIPTextModel", "CLIPText", {
        **ENCODER, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2})
    model = nn.ModuleDict({"text": text, "unet": diffusers.UNet2DConditionModel(**CONDITIONED).train()})
    words, x = ids(8), torch.randn(4, 4, 16, 16)
    return Task(model, lambda m: F.mse_loss(
        m["unet"](x, torch.arange(4), m["text"](words)[0]).sample, x))


def _inverted() -> Task:
    """Textual inversion: one word of a frozen text encoder learns, through a frozen U-Net."""
    task = _with_text()
    model: Any = task.model.requires_grad_(False)
    weight = model["text"].get_input_embeddings().weight.requires_grad_()
    words, x, before = ids(8).clamp(min=10), torch.randn(4, 4, 16, 16), weight.detach().clone()
    words[:, 3] = 7

    def loss(m: Any, number: int) -> torch.Tensor:
        with torch.no_grad():               # what the last step has changed of other words
            weight[:7], weight[8:] = before[:7], before[8:]
        noise = torch.randn(x.shape)
        return F.mse_loss(m["unet"](x + noise, torch.arange(4), m["text"](words)[0]).sample, noise)
    return looped(model, loss)


def _consistent() -> Task:
    """Consistency distillation: the teacher's step, and a slow copy as the target."""
    import diffusers

    student = diffusers.UNet2DConditionModel(**CONDITIONED).train()
    teacher, slow = (copy.deepcopy(student).requires_grad_(False) for _ in range(2))
    x, words = torch.randn(2, 4, 16, 16), torch.randn(2, 5, 16)

    def step(m: Any) -> torch.Tensor:
        times = torch.randint(20, 100, (2,))
        found = m(x, times, words).sample
        with torch.no_grad():
            told, untold = teacher(x, times, words).sample, teacher(x, times, 0 * words).sample
            target = slow(x - 0.1 * (told + 3 * (told - untold)), times - 20, words).sample
            for one, other in zip(slow.parameters(), student.parameters(), strict=True):
                one.lerp_(other, 0.05)
        return ((found - target).square() + 1e-6).sqrt().mean() - 1e-3
    return Task(student, step)


SCENARIOS: tuple[Scenario, ...] = (
    # UNets.
    denoised("unet", "UNet2DModel", {
        **CHANNELS, "in_channels": 4, "out_channels": 4, "attention_head_dim": 8,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
        lambda: {"sample": _noise(), "timestep": torch.tensor([3, 5])}),
    denoised("unet, conditioned", "UNet2DConditionModel", CONDITIONED,
             lambda: {"sample": _noise(), "timestep": torch.tensor([3, 5]),
                      "encoder_hidden_states": torch.randn(2, 5, 16)}),
    denoised("unet, added embeddings", "UNet2DConditionModel", {
        **CONDITIONED, "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 64}, lambda: {
            "sample": torch.randn(2, 4, 16, 16), "timestep": torch.tensor([3, 5]),
            "encoder_hidden_states": torch.randn(2, 5, 16), "added_cond_kwargs": {
                "text_embeds": torch.randn(2, 16), "time_ids": torch.ones(2, 6)}}, budget=0.6),
    denoised("unet, classes", "UNet2DConditionModel", {**CONDITIONED, "num_class_embeds": 4}, lambda: {
        "sample": torch.randn(2, 4, 16, 16), "timestep": torch.tensor([3, 5]),
        "encoder_hidden_states": torch.randn(2, 5, 16), "class_labels": torch.tensor([1, 2])}, budget=0.6),
    denoised("unet of one dimension", "UNet1DModel", {
        "sample_size": 32, "in_channels": 2, "out_channels": 2, "block_out_channels": (16, 32),
        "down_block_types": ("DownBlock1DNoSkip", "DownBlock1D"),
        "up_block_types": ("UpBlock1D", "UpBlock1DNoSkip"),
        "extra_in_channels": 32, "mid_block_type": "UNetMidBlock1D"},
        lambda: {"sample": torch.randn(2, 2, 32), "timestep": torch.tensor([3, 4])}, budget=0.6),
    denoised("unet of three dimensions", "UNet3DConditionModel", {
        "sample_size": 8, "block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8,
        "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
        "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"), "cross_attention_dim": 32,
        "attention_head_dim": 8},
        lambda: {"sample": torch.randn(1, 4, 4, 8, 8), "timestep": torch.tensor([3]),
                 "encoder_hidden_states": torch.randn(1, 6, 32)}, budget=0.6),
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
    # Transformers for images and sound.
    denoised("dit", "DiTTransformer2DModel", {
        "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4,
        "num_layers": 3, "sample_size": 16, "patch_size": 2, "num_embeds_ada_norm": 10, "norm_num_groups": 1},
        lambda: {"hidden_states": _noise(), "timestep": torch.tensor([3, 5]),
                 "class_labels": torch.tensor([1, 2])}),
    denoised("sd3", "SD3Transformer2DModel", {
        "sample_size": 16, "patch_size": 2, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8,
        "num_attention_heads": 4, "joint_attention_dim": 32, "caption_projection_dim": 32,
        "pooled_projection_dim": 16, "out_channels": 4},
        lambda: {"hidden_states": _noise(), "encoder_hidden_states": torch.randn(2, 6, 32),
                 "pooled_projections": torch.randn(2, 16), "timestep": torch.tensor([3, 5])}),
    denoised("flux", "FluxTransformer2DModel", {
        "patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 16,
        "num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 16,
        "axes_dims_rope": (4, 4, 8)}, lambda: {
            "hidden_states": torch.randn(2, 64, 4), "encoder_hidden_states": torch.randn(2, 6, 32),
            "pooled_projections": torch.randn(2, 16), "timestep": torch.tensor([0.3, 0.5]),
            "img_ids": torch.randn(64, 3), "txt_ids": torch.zeros(6, 3)}),
    denoised("chroma", "ChromaTransformer2DModel", {
        "patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
        "num_attention_heads": 2, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8),
        "approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1},
        lambda: {"hidden_states": torch.randn(1, 16, 4), "encoder_hidden_states": torch.randn(1, 6, 32),
                 "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(6, 3),
                 "timestep": torch.tensor([1.0])},
        budget=0.6),
    denoised("auraflow", "AuraFlowTransformer2DModel", {
        "sample_size": 8, "patch_size": 2, "in_channels": 4, "num_mmdit_layers": 1,
        "num_single_dit_layers": 2, "attention_head_dim": 8, "num_attention_heads": 4,
        "joint_attention_dim": 32, "caption_projection_dim": 32, "pos_embed_max_size": 64},
        lambda: {"hidden_states": torch.randn(2, 4, 8, 8), "encoder_hidden_states": _told(batch=2),
                 "timestep": torch.rand(2)}),
    denoised("pixart", "PixArtTransformer2DModel", {
        "sample_size": 8, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 3,
        "in_channels": 4, "cross_attention_dim": 24, "caption_channels": 16,
        "use_additional_conditions": False}, lambda: {
            "hidden_states": torch.randn(2, 4, 8, 8), "encoder_hidden_states": torch.randn(2, 6, 16),
            "timestep": torch.tensor([3, 5])}),
    denoised("sana", "SanaTransformer2DModel", {
        "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16,
        "num_layers": 2, "num_cross_attention_heads": 2, "cross_attention_head_dim": 16,
        "cross_attention_dim": 32, "caption_channels": 16, "sample_size": 16}, lambda: {
            "hidden_states": torch.randn(2, 4, 16, 16), "encoder_hidden_states": torch.randn(2, 6, 16),
            "timestep": torch.tensor([3, 5])}),
    denoised("lumina2", "Lumina2Transformer2DModel", {
        "sample_size": 8, "patch_size": 2, "in_channels": 4, "hidden_size": 24, "num_layers": 2,
        "num_refiner_layers": 1, "num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 2,
        "axes_dim_rope": (4, 2, 2), "axes_lens": (64, 64, 64), "cap_feat_dim": 32},
        lambda: {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.rand(2),
                 "encoder_hidden_states": _told(batch=2), "encoder_attention_mask": torch.ones(2, 6).bool()}),
    denoised("qwen image", "QwenImageTransformer2DModel", {
        "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16,
        "num_attention_heads": 2, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8)}, lambda: {
            "hidden_states": torch.randn(2, 64, 16), "encoder_hidden_states": torch.randn(2, 6, 32),
            "encoder_hidden_states_mask": torch.ones(2, 6).long(), "timestep": torch.tensor([0.3, 0.5]),
            "img_shapes": [[(1, 8, 8)]] * 2}),
    denoised("z-image", "ZImageTransformer2DModel", {
        "all_patch_size": (2,), "all_f_patch_size": (1,), "in_channels": 4, "dim": 32, "n_layers": 2,
        "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 16, "axes_dims": [4, 4, 8],
        "axes_lens": [64, 16, 16]}, lambda: {
            "x": [torch.randn(4, 1, 8, 8)] * 2, "t": torch.tensor([0.3, 0.5]),
            "cap_feats": [torch.randn(6, 16)] * 2}),
    denoised("cogview 4", "CogView4Transformer2DModel", {
        "patch_size": 2, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 4,
        "out_channels": 4, "text_embed_dim": 32, "time_embed_dim": 16, "condition_dim": 8},
        lambda: {"hidden_states": torch.randn(1, 4, 8, 8), "encoder_hidden_states": torch.randn(1, 6, 32),
                 "timestep": torch.tensor([3]), "original_size": torch.tensor([[64.0, 64.0]]),
                 "target_size": torch.tensor([[64.0, 64.0]]), "crop_coords": torch.tensor([[0.0, 0.0]])},
        budget=0.6),
    denoised("prior", "PriorTransformer", {
        "num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2, "embedding_dim": 32,
        "num_embeddings": 7, "additional_embeddings": 4},
        lambda: {"hidden_states": torch.randn(2, 32), "timestep": torch.tensor([3, 4]),
                 "proj_embedding": torch.randn(2, 32), "encoder_hidden_states": torch.randn(2, 7, 32)},
        budget=0.6),
    denoised("stable audio", "StableAudioDiTModel", {
        "sample_size": 8, "in_channels": 4, "num_layers": 3, "attention_head_dim": 8,
        "num_key_value_attention_heads": 2, "num_attention_heads": 4, "out_channels": 4,
        "cross_attention_dim": 32, "time_proj_dim": 16, "global_states_input_dim": 16,
        "cross_attention_input_dim": 32},
        lambda: {"hidden_states": torch.randn(2, 4, 8), "timestep": torch.rand(2),
                 "encoder_hidden_states": _told(batch=2), "global_hidden_states": torch.randn(2, 1, 16)}),
    # Transformers for videos.
    denoised("wan", "WanTransformer3DModel", {
        "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4,
        "out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2,
        "rope_max_seq_len": 32}, lambda: {
            "hidden_states": torch.randn(1, 4, 2, 16, 16), "timestep": torch.tensor([3]),
            "encoder_hidden_states": torch.randn(1, 6, 16)}),
    denoised("ltx", "LTXVideoTransformer3DModel", {
        "in_channels": 8, "out_channels": 8, "num_attention_heads": 2, "attention_head_dim": 16,
        "cross_attention_dim": 32, "num_layers": 2, "caption_channels": 16}, lambda: {
            "hidden_states": torch.randn(2, 32, 8), "encoder_hidden_states": torch.randn(2, 6, 16),
            "timestep": torch.tensor([3, 5]), "encoder_attention_mask": torch.ones(2, 6).bool(),
            "num_frames": 2, "height": 4, "width": 4}),
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
    # Autoencoders.
    denoised("vae", "AutoencoderKL", CODER, lambda: {"sample": _noise(3, 32)}),
    Scenario("diffusers", "vae, by methods", "AutoencoderKL(...)", coded, ("diffusers",)),
    denoised("vq", "VQModel", {**CODER, "latent_channels": 3, "num_vq_embeddings": 16},
              lambda: {"sample": _noise(3, 32)}, budget=0.9),
    denoised("tiny autoencoder", "AutoencoderTiny", {
        "encoder_block_out_channels": (16, 16), "decoder_block_out_channels": (16, 16),
        "num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1)},
        lambda: {"sample": torch.rand(2, 3, 32, 32)}, budget=0.6),
    denoised("dc autoencoder", "AutoencoderDC", {
        "in_channels": 3, "latent_channels": 4, "attention_head_dim": 8,
        "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
        "decoder_block_types": ("ResBlock", "EfficientViTBlock"), "encoder_block_out_channels": (16, 32),
        "decoder_block_out_channels": (16, 32), "encoder_layers_per_block": (1, 1),
        "decoder_layers_per_block": (1, 1), "encoder_qkv_multiscales": ((), (3,)),
        "decoder_qkv_multiscales": ((), (3,)), "downsample_block_type": "conv",
        "upsample_block_type": "interpolate"}, lambda: {"sample": torch.randn(2, 3, 32, 32)}),
    denoised("autoencoder of films", "AutoencoderKLTemporalDecoder", {
        "block_out_channels": (32, 32), "latent_channels": 4, "layers_per_block": 1,
        "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D")},
        lambda: {"sample": torch.randn(2, 3, 16, 16), "num_frames": 2}, budget=0.6),
    denoised("autoencoder of videos", "AutoencoderKLCogVideoX", {
        "block_out_channels": (8, 8, 8, 8), "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2,
        "down_block_types": ("CogVideoXDownBlock3D",) * 4, "up_block_types": ("CogVideoXUpBlock3D",) * 4,
        "temporal_compression_ratio": 4},
        lambda: {"sample": torch.randn(1, 3, 5, 16, 16)}, budget=0.8),
    denoised("autoencoder of wan", "AutoencoderKLWan", {
        "base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1,
        "temperal_downsample": [False, True, True]},
        lambda: {"sample": torch.randn(1, 3, 5, 16, 16)}, budget=0.8),
    # Steps that people write.
    Scenario("diffusers", "controlnet beside a frozen unet", "control", _controlled,
             ("diffusers",), 0.9),
    *(Scenario("diffusers", name, "unet", make, ("diffusers",), 0.6) for name, make in (
        ("text to image, weighted", lambda: _diffused("epsilon")),
        ("text to image, velocities", lambda: _diffused("v_prediction")),
        ("consistency distillation", _consistent))),
    Scenario("diffusers", "unet and text encoder", "model", _with_text, ("diffusers", "transformers"), 0.6),
    Scenario("diffusers", "textual inversion", "model", _inverted, ("diffusers", "transformers"), 0.6),
)
