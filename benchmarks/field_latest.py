"""Further scenarios of `field.py`: trainers of trl, models of transformers and diffusers of other kinds."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from field_architectures import (
    COMMON,
    architecture,
    llama,
    losses_of,
    preferred,
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
    TEXT,
    VISION,
    Scenario,
    Task,
    adapted_llama,
    denoised,
    ids,
)

BATCHES.update({
    "page": lambda: {
        "input_ids": ids(), "bbox": torch.tensor([1, 2, 30, 40]).expand(4, 24, 4),
        "pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, 2, (4, 24))},
    "seen regions": lambda: {
        "input_ids": ids(), "visual_embeds": torch.randn(4, 6, 16), "labels": torch.randint(0, 2, (4,))},
    "regions": lambda: {
        "input_ids": ids(), "visual_feats": torch.randn(4, 6, 16), "visual_pos": torch.rand(4, 6, 4),
        "labels": ids()},
    "stretches": lambda: {"flattened_patches": torch.cat([
        torch.ones(2, 12, 2), torch.randn(2, 12, 48)], 2), "labels": ids(8, 2)},
    "queries": lambda: {"input_ids": ids(8, 4), "pixel_values": torch.randn(2, 3, 32, 32)},
})

MODELS: tuple[tuple[str, str, str, dict[str, Any], str, float], ...] = (
    ("gemma", "GemmaForCausalLM", "Gemma", {**DECODER, "head_dim": 8}, "labelled", 0.6),
    ("cohere2", "Cohere2ForCausalLM", "Cohere2", {
        **DECODER, "sliding_window": 8, "head_dim": 8}, "labelled", 0.6),
    ("dbrx", "DbrxForCausalLM", "Dbrx", {
        **TEXT, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "use_cache": False,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}},
     "labelled", 0.8),
    ("deberta v2", "DebertaV2ForTokenClassification", "DebertaV2", {
        **ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8,
        "conv_kernel_size": 3}, "tokens", 0.6),
    ("xmod", "XmodForMaskedLM", "Xmod", {
        **ENCODER, "languages": ["en"], "default_language": "en"}, "labelled", 0.6),
    ("splinter", "SplinterForQuestionAnswering", "Splinter", ENCODER, "question", 0.6),
    ("layoutlm v3", "LayoutLMv3ForTokenClassification", "LayoutLMv3", {
        **ENCODER, "max_2d_position_embeddings": 128, "coordinate_size": 4, "shape_size": 8, "input_size": 32,
        "patch_size": 8, "max_position_embeddings": 66}, "page", 0.6),
    ("visual bert", "VisualBertForVisualReasoning", "VisualBert", {
        **ENCODER, "visual_embedding_dim": 16}, "seen regions", 0.6),
    ("lxmert", "LxmertForPreTraining", "Lxmert", {
        **ENCODER, "visual_feat_dim": 16, "l_layers": 2, "x_layers": 1, "r_layers": 1,
        "task_matched": False, "task_obj_predict": False, "task_qa": False}, "regions", 0.6),
    ("owl-vit, boxes", "OwlViTForObjectDetection", "OwlViT", {
        "text_config": {**ENCODER, "max_position_embeddings": 16},
        "vision_config": VISION, "projection_dim": 32}, "queries", 0.6),
    ("pix2struct", "Pix2StructForConditionalGeneration", "Pix2Struct", {
        "text_config": {**TEXT, "hidden_size": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
                        "use_cache": False},
        "vision_config": {"hidden_size": 32, "patch_embed_hidden_size": 48, "d_ff": 64, "d_kv": 8,
                          "num_hidden_layers": 2, "num_attention_heads": 4, "seq_len": 64}},
     "stretches", 0.6),
    ("swiftformer", "SwiftFormerForImageClassification", "SwiftFormer", {
        "image_size": 64, "depths": [1, 1, 1, 1], "embed_dims": [16, 24, 32, 48], "drop_path_rate": 0.1},
     "large image", 0.7),
    ("data2vec, images", "Data2VecVisionForImageClassification", "Data2VecVision", VISION, "image", 0.6),
    ("ijepa", "IJepaForImageClassification", "IJepa", VISION, "image", 0.6),
)


def _answers(kind: str, make: Callable[[], Any] = llama, library: str = "trl", **options: Any) -> Task:
    """Sampled answers, with the reward of a function."""
    import datasets

    def train(model: Any) -> list[float]:
        trl = importlib.import_module(library)
        arguments = getattr(trl, f"{kind}Config")(tempfile.mkdtemp(), **{
            **COMMON, "gradient_checkpointing": False, "bf16": False, "num_generations": 2,
            "max_completion_length": 8, **options})
        return losses_of(getattr(trl, f"{kind}Trainer")(
            model=model, args=arguments, train_dataset=data, processing_class=tokenizer(),
            reward_funcs=lambda completions, **others: [float(len(c)) for c in completions]))
    data = datasets.Dataset.from_list([{"prompt": text_of(6)} for _ in range(12)])
    task = step_of(make())
    task.train = train
    return task


def _taught() -> Task:
    """A student that a teacher teaches, on the data and on its own answers (GKD)."""
    import datasets

    def train(model: Any) -> list[float]:
        trl = importlib.import_module("trl.experimental.gkd")
        arguments = trl.GKDConfig(tempfile.mkdtemp(), **{
            **COMMON, "gradient_checkpointing": False, "bf16": False, "max_new_tokens": 8, "lmbda": 0.5})
        return losses_of(trl.GKDTrainer(model=model, teacher_model=teacher, args=arguments,
                                        train_dataset=data, processing_class=words))
    words = tokenizer()
    words.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    data = datasets.Dataset.from_list([{"messages": [
        {"role": "user", "content": text_of(6)}, {"role": "assistant", "content": text_of(6)}]}
        for _ in range(12)])
    task, teacher = step_of(llama()), llama()
    task.train = train
    return task


TRAINERS = (
    training("trl", "rloo", "model", lambda: _answers("RLOO", beta=0.0), "datasets", budget=0.6),
    training("trl", "grpo, adapters, kept close", "get_peft_model(model, LoraConfig(...))", lambda: _answers(
        "GRPO", adapted_llama, beta=0.1, num_iterations=2, loss_type="dr_grpo"), "datasets", "peft",
        budget=0.6),
    training("trl", "gkd", "model", _taught, "datasets", budget=0.6),
    training("trl", "sft, packed without padding", "model", lambda: trl_task(
        "SFT", written, max_length=24, packing=True, padding_free=True), "datasets", budget=0.6),
    training("trl", "dpo, hinge, other reference", "get_peft_model(model, LoraConfig(...))", lambda: trl_task(
        "DPO", preferred, adapted_llama, max_length=24, loss_type=["hinge"], beta=0.3,
        precompute_ref_log_probs=True, gradient_accumulation_steps=2, per_device_train_batch_size=2),
        "datasets", "peft", budget=0.6),
    training("trl", "orpo, adapters", "get_peft_model(model, LoraConfig(...))", lambda: trl_task(
        "ORPO", preferred, adapted_llama, library="trl.experimental.orpo", max_length=24), "datasets", "peft",
        budget=0.6),
    training("trl", "cpo, simpo", "model", lambda: trl_task(
        "CPO", preferred, library="trl.experimental.cpo", max_length=24, loss_type="simpo", cpo_alpha=0.0),
        "datasets", budget=0.6),
)

DIFFUSION = (
    denoised("unet of one dimension", "UNet1DModel", {
        "sample_size": 32, "in_channels": 2, "out_channels": 2, "block_out_channels": (16, 32),
        "down_block_types": ("DownBlock1DNoSkip", "DownBlock1D"),
        "up_block_types": ("UpBlock1D", "UpBlock1DNoSkip"),
        "extra_in_channels": 32, "mid_block_type": "UNetMidBlock1D"},
        lambda: {"sample": torch.randn(2, 2, 32), "timestep": torch.tensor([3, 4])}, budget=0.6),
    denoised("chroma", "ChromaTransformer2DModel", {
        "patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
        "num_attention_heads": 2, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8),
        "approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1},
        lambda: {"hidden_states": torch.randn(1, 16, 4), "encoder_hidden_states": torch.randn(1, 6, 32),
                 "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(6, 3),
                 "timestep": torch.tensor([1.0])},
        budget=0.6),
    denoised("autoencoder of films", "AutoencoderKLTemporalDecoder", {
        "block_out_channels": (32, 32), "latent_channels": 4, "layers_per_block": 1,
        "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D")},
        lambda: {"sample": torch.randn(2, 3, 16, 16), "num_frames": 2}, budget=0.6),
)

SCENARIOS: tuple[Scenario, ...] = (*TRAINERS, *DIFFUSION, *(architecture(*row) for row in MODELS))
