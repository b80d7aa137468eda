"""Further scenarios of `field.py`: newer models of transformers and diffusers, more adapters, trainers, graph
networks and networks for volumes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from field_architectures import (
    COMMON,
    llama,
    losses_of,
    preferred,
    sentences_task,
    step_of,
    text_of,
    tokenizer,
    training,
    trl_task,
    written,
)
from field_scenarios import (
    BATCHES,
    DECODER,
    ENCODER,
    TARGETS,
    VISION,
    Block,
    Scenario,
    Task,
    adapted,
    adapted_llama,
    calling,
    denoised,
    graph,
    ids,
    made,
    net,
    volume,
)
from torch import nn
from torch.nn import functional as F

# -- transformers ----------------------------------------------------------------------------------

IMAGE = 5
"""The word that stands for a part of an image."""
GRID = {"depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 64, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
PLACES = {"image_token_id": IMAGE, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}


def _words(parts: int) -> torch.Tensor:
    words = ids(batch=2).clamp(min=10)
    words[:, 2:2 + parts] = IMAGE
    return words


def _shown(parts: int) -> dict[str, Any]:
    words = _words(parts)
    return {"input_ids": words, "labels": words.masked_fill(words == IMAGE, -100),
            "pixel_values": torch.randn(2, 3, 32, 32)}


def _patched() -> dict[str, Any]:
    words = _words(16)
    return {"input_ids": words, "labels": words.masked_fill(words == IMAGE, -100),
            "pixel_values": torch.randn(128, 96), "image_grid_thw": torch.tensor([[1, 8, 8], [1, 8, 8]]),
            "mm_token_type_ids": (words == IMAGE).int()}


BATCHES.update({
    "shown 4": lambda: _shown(4), "shown 16": lambda: _shown(16), "patched": _patched,
    "naflex": lambda: {
        "input_ids": ids(8), "pixel_values": torch.randn(4, 16, 192), "return_loss": True,
        "pixel_attention_mask": torch.ones(4, 16).int(), "spatial_shapes": torch.tensor([[4, 4]] * 4)},
    "boxed": lambda: {"pixel_values": torch.randn(2, 3, 64, 64), "labels": [
        {"class_labels": torch.randint(0, 5, (3,)), "boxes": 0.2 + 0.4 * torch.rand(3, 4)} for _ in "ab"]},
    "outlined": lambda: {
        "pixel_values": torch.randn(2, 3, 64, 64),
        "mask_labels": [torch.randint(0, 2, (3, 64, 64)).float() for _ in "ab"],
        "class_labels": [torch.randint(0, 5, (3,)) for _ in "ab"]},
    "filmed": lambda: {"pixel_values": torch.randn(2, 4, 3, 32, 32), "labels": torch.randint(0, 2, (2,))},
})
NEWER: tuple[tuple[str, str, str, dict[str, Any], str, float], ...] = (
    ("gemma3, images", "Gemma3ForConditionalGeneration", "Gemma3", {
        "text_config": {**DECODER, "head_dim": 8}, "vision_config": {**VISION, "vision_use_head": False},
        "mm_tokens_per_image": 4, "image_token_index": IMAGE, "boi_token_index": 7, "eoi_token_index": 8},
     "shown 4", 0.7),
    ("qwen2.5-vl", "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VL", {
        "text_config": {**DECODER, "rope_parameters": ROPE},
        "vision_config": {**GRID, "window_size": 16, "fullatt_block_indexes": [1]}, **PLACES},
     "patched", 0.7),
    ("llava", "LlavaForConditionalGeneration", "Llava", {
        "text_config": {**DECODER, "model_type": "llama"}, "image_token_index": IMAGE,
        "vision_config": {**VISION, "model_type": "clip_vision_model", "projection_dim": 16}},
     "shown 16", 0.7),
    ("siglip2", "Siglip2Model", "Siglip2", {
        "text_config": ENCODER, "vision_config": {**VISION, "num_patches": 16}}, "naflex", 0.7),
    ("dinov3", "DINOv3ViTModel", "DINOv3ViT", {**VISION, "num_register_tokens": 2}, "pixels", 0.7),
    ("videomae", "VideoMAEForVideoClassification", "VideoMAE", {**VISION, "num_frames": 4}, "filmed", 0.7),
    ("lfm2", "Lfm2ForCausalLM", "Lfm2", {
        **DECODER, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
     "labelled", 0.7),
    ("llama4", "Llama4ForCausalLM", "Llama4Text", {
        **DECODER, "head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 64,
        "attention_chunk_size": 8}, "labelled", 0.7),
    ("deepseek v3", "DeepseekV3ForCausalLM", "DeepseekV3", {
        **DECODER, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1},
     "labelled", 0.8),
    ("rt-detr", "RTDetrForObjectDetection", "RTDetr", {
        "backbone_config": {"model_type": "rt_detr_resnet", "embedding_size": 8,
                            "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "layer_type": "basic",
                            "out_features": ["stage2", "stage3", "stage4"]},
        "encoder_hidden_dim": 32, "encoder_in_channels": [16, 16, 32], "encoder_layers": 1,
        "encoder_ffn_dim": 64, "encoder_attention_heads": 2, "d_model": 32, "num_queries": 20,
        "decoder_in_channels": [32, 32, 32], "decoder_ffn_dim": 64, "decoder_layers": 2,
        "decoder_attention_heads": 2, "num_denoising": 10, "num_labels": 5}, "boxed", 0.7),
    ("mask2former", "Mask2FormerForUniversalSegmentation", "Mask2Former", {
        "backbone_config": {"model_type": "swin", "image_size": 64, "embed_dim": 16, "depths": [1, 1, 1, 1],
                            "num_heads": [2, 2, 2, 2], "window_size": 4,
                            "out_features": ["stage1", "stage2", "stage3", "stage4"]},
        "feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "encoder_feedforward_dim": 64,
        "encoder_layers": 2, "decoder_layers": 3, "num_attention_heads": 2, "dim_feedforward": 64,
        "num_queries": 10, "train_num_points": 64, "num_labels": 5}, "outlined", 0.7),
    ("modernbert, sentences", "ModernBertForSequenceClassification", "ModernBert", {
        **ENCODER, "cls_token_id": 1, "sep_token_id": 2}, "sentence", 0.7),
)
"""Name, model, configuration, its options, batch, budget."""


def _newer(name: str, model: str, config: str, options: dict[str, Any], batch: str,
           budget: float) -> Scenario:
    return Scenario("transformers", name, f"{model}(config)", lambda: calling(
        made(model, config, options), BATCHES[batch]()), ("transformers",), budget)


# -- Adapters, diffusion ---------------------------------------------------------------------------

ADAPTERS = (
    adapted("p-tuning", "PromptEncoderConfig", {"num_virtual_tokens": 4, "encoder_hidden_size": 16}),
    adapted("ln tuning", "LNTuningConfig", {"target_modules": ["input_layernorm"]}),
    adapted("fourierft", "FourierFTConfig", {"n_frequency": 8, **TARGETS}),
    adapted("hra", "HRAConfig", {"r": 4, **TARGETS}, budget=0.9),
    adapted("rslora, pissa", "LoraConfig", {
        "r": 4, "use_rslora": True, "init_lora_weights": "pissa", **TARGETS}),
    adapted("vb-lora", "VBLoRAConfig", {"r": 4, "num_vectors": 8, "vector_length": 8, "topk": 2, **TARGETS}),
    adapted("randlora", "RandLoraConfig", {"r": 4, **TARGETS}),
    adapted("trainable tokens", "TrainableTokensConfig", {
        "token_indices": [5, 6, 7], "target_modules": ["embed_tokens"]}),
    adapted("miss", "MissConfig", {"r": 4, **TARGETS}),
    adapted("c3a", "C3AConfig", {"block_size": 8, **TARGETS}),
    adapted("road", "RoadConfig", {"group_size": 8, **TARGETS}),
    adapted("delora", "DeloraConfig", {"r": 4, **TARGETS}),
    adapted("gralora", "GraloraConfig", {"r": 4, "gralora_k": 2, **TARGETS}),
    adapted("shira", "ShiraConfig", {"r": 4, **TARGETS}),
    adapted("waveft", "WaveFTConfig", {"n_frequency": 16, **TARGETS}),
    adapted("osf", "OSFConfig", {"effective_rank": 16, **TARGETS}),
)
DIFFUSION = (
    denoised("flux", "FluxTransformer2DModel", {
        "patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 16,
        "num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 16,
        "axes_dims_rope": (4, 4, 8)}, lambda: {
            "hidden_states": torch.randn(2, 64, 4), "encoder_hidden_states": torch.randn(2, 6, 32),
            "pooled_projections": torch.randn(2, 16), "timestep": torch.tensor([0.3, 0.5]),
            "img_ids": torch.randn(64, 3), "txt_ids": torch.zeros(6, 3)}),
    denoised("wan", "WanTransformer3DModel", {
        "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4,
        "out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2,
        "rope_max_seq_len": 32}, lambda: {
            "hidden_states": torch.randn(1, 4, 2, 16, 16), "timestep": torch.tensor([3]),
            "encoder_hidden_states": torch.randn(1, 6, 16)}),
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
    denoised("ltx", "LTXVideoTransformer3DModel", {
        "in_channels": 8, "out_channels": 8, "num_attention_heads": 2, "attention_head_dim": 16,
        "cross_attention_dim": 32, "num_layers": 2, "caption_channels": 16}, lambda: {
            "hidden_states": torch.randn(2, 32, 8), "encoder_hidden_states": torch.randn(2, 6, 16),
            "timestep": torch.tensor([3, 5]), "encoder_attention_mask": torch.ones(2, 6).bool(),
            "num_frames": 2, "height": 4, "width": 4}),
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
    denoised("dc autoencoder", "AutoencoderDC", {
        "in_channels": 3, "latent_channels": 4, "attention_head_dim": 8,
        "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
        "decoder_block_types": ("ResBlock", "EfficientViTBlock"), "encoder_block_out_channels": (16, 32),
        "decoder_block_out_channels": (16, 32), "encoder_layers_per_block": (1, 1),
        "decoder_layers_per_block": (1, 1), "encoder_qkv_multiscales": ((), (3,)),
        "decoder_qkv_multiscales": ((), (3,)), "downsample_block_type": "conv",
        "upsample_block_type": "interpolate"}, lambda: {"sample": torch.randn(2, 3, 32, 32)}),
)


# -- Trainers --------------------------------------------------------------------------------------


def _answers() -> Task:
    """GRPO: sampled answers, with the reward of a function."""
    import datasets
    import trl

    def train(model: Any) -> list[float]:
        arguments = trl.GRPOConfig(tempfile.mkdtemp(), **{
            **COMMON, "gradient_checkpointing": False, "bf16": False, "num_generations": 2,
            "max_completion_length": 8})
        return losses_of(trl.GRPOTrainer(
            model=model, args=arguments, train_dataset=data, processing_class=tokenizer(),
            reward_funcs=lambda completions, **others: [float(len(c)) for c in completions]))
    data = datasets.Dataset.from_list([{"prompt": text_of(6)} for _ in range(12)])
    task = step_of(llama())
    task.train = train
    return task


def _adversaries() -> Task:
    """Two networks and their optimizers, by hand."""
    import lightning

    class Adversaries(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.makes = nn.Sequential(*(Block() for _ in range(3)))
            self.judges = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(32, 1))
            self.losses: list[float] = []

        def training_step(self, batch: Any, number: int) -> None:
            first, second = self.optimizers()
            fake = self.makes(torch.randn_like(batch[0]))
            for optimizer, loss in (
                    (first, lambda: F.softplus(-self.judges(fake)).mean()),
                    (second, lambda: (F.softplus(-self.judges(batch[0]))
                                      + F.softplus(self.judges(fake.detach()))).mean())):
                optimizer.zero_grad()
                found = loss()
                self.manual_backward(found)
                optimizer.step()
                self.losses.append(found.item())

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(m.parameters(), 0.01) for m in (self.makes, self.judges)]

    x = torch.randn(96, 32)

    def train(model: Any) -> list[float]:
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), 32)
        lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False,
                          enable_model_summary=False, enable_checkpointing=False).fit(model, loader)
        return list(model.losses)
    return Task(Adversaries(), lambda m: F.softplus(-m.judges(m.makes(x[:32]))).mean(), train=train)


TRAINERS = (
    *(training("trl", kind.lower(), "model", lambda kind=kind: trl_task(  # type: ignore[misc]
        kind, preferred, library=f"trl.experimental.{kind.lower()}", max_length=24), "datasets")
      for kind in ("ORPO", "CPO")),
    training("trl", "grpo", "model", _answers, "datasets"),
    training("trl", "sft, adapters and checkpointing", "get_peft_model(model, LoraConfig(...))",
             lambda: trl_task("SFT", written, adapted_llama, max_length=24, gradient_checkpointing=True),
             "datasets", "peft", budget=1.0),
    training("lightning", "two optimizers by hand", "module", _adversaries),
    training("sentence_transformers", "cached negatives", "model", lambda: sentences_task(
        "CachedMultipleNegativesRankingLoss", ("anchor", "positive"), mini_batch_size=2), "datasets",
        budget=0.8),
)


# -- Graphs, volumes -------------------------------------------------------------------------------


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


LAYERS: dict[str, tuple[str, Callable[[Any], nn.Module]]] = {
    "gin": ("GIN", lambda pyg: pyg.GINConv(nn.Sequential(
        nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)))),
    "gatv2": ("GATv2", lambda pyg: pyg.GATv2Conv(16, 8, heads=2)),
    "transformer": ("TransformerConv", lambda pyg: pyg.TransformerConv(16, 8, heads=2)),
}
OTHERS = (
    *(net("torch_geometric", "torch_geometric.nn", name, lines, lambda pyg, make=make: graph(
        lambda: make(pyg)), budget=0.9) for name, (lines, make) in LAYERS.items()),
    net("torch_geometric", "torch_geometric.nn", "rgcn", "RGCN", _related, budget=0.9),
    net("monai", "monai.networks.nets", "dynunet", "DynUNet", lambda nets: volume(nets.DynUNet(
        3, 1, 2, (3, 3, 3), (1, 2, 2), (2, 2), filters=(8, 16, 32))), budget=0.9),
    net("monai", "monai.networks.nets", "attention unet", "AttentionUnet", lambda nets: volume(
        nets.AttentionUnet(3, 1, 2, (8, 16, 32), (2, 2))), budget=0.9),
)

SCENARIOS: tuple[Scenario, ...] = (
    *(_newer(*row) for row in NEWER), *ADAPTERS, *DIFFUSION, *TRAINERS, *OTHERS)
