"""Further scenarios of `field.py`: decoders and encoders of transformers, networks of monai and diffusers."""

from __future__ import annotations

from typing import Any

import torch
from field_architectures import PATCHES, architecture
from field_further import of_monai
from field_scenarios import (
    BATCHES,
    BOTH,
    DECODER,
    ENCODER,
    TEXT,
    VISION,
    Scenario,
    Task,
    calling,
    denoised,
    ids,
    made,
)

BATCHES.update({
    "words of a page": lambda: {
        "input_ids": ids(), "bbox": torch.tensor([1, 2, 30, 40]).expand(4, 24, 4),
        "labels": torch.randint(0, 2, (4, 24))},
    "masked patches": lambda: {"pixel_values": torch.randn(2, 3, 32, 32),
                               "bool_masked_pos": torch.arange(16).expand(2, 16) % 2 == 0},
    "read": lambda: {"inputs": ids(), "labels": ids()},
    "seen patches": lambda: {"past_values": torch.randn(4, 32, 3)},
})

MORE: tuple[tuple[str, str, str, dict[str, Any], str, float], ...] = (
    # State spaces with attention, experts.
    ("zamba", "ZambaForCausalLM", "Zamba", {
        **DECODER, "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8,
        "mamba_dt_rank": 4, "n_mamba_heads": 2, "use_mamba_kernels": False,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]}, "labelled", 0.6),
    ("dots1", "Dots1ForCausalLM", "Dots1", {
        **DECODER, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}, "labelled", 0.6),
    # Decoders.
    ("arcee", "ArceeForCausalLM", "Arcee", DECODER, "labelled", 0.6),
    ("helium", "HeliumForCausalLM", "Helium", {**DECODER, "head_dim": 8}, "labelled", 0.6),
    ("exaone 4", "Exaone4ForCausalLM", "Exaone4", {
        **DECODER, "sliding_window": 8, "sliding_window_pattern": 2}, "labelled", 0.6),
    ("gpt bigcode", "GPTBigCodeForCausalLM", "GPTBigCode", {
        **TEXT, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "use_cache": False},
     "labelled", 0.6),
    ("xglm", "XGLMForCausalLM", "XGLM", {
        **TEXT, "d_model": 32, "num_layers": 3, "attention_heads": 4, "ffn_dim": 64, "use_cache": False,
        "max_position_embeddings": 64}, "labelled", 0.6),
    ("openai gpt", "OpenAIGPTLMHeadModel", "OpenAIGPT", {
        **TEXT, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}, "labelled", 0.6),
    ("reformer", "ReformerForSequenceClassification", "Reformer", {
        **TEXT, "attn_layers": ["local", "lsh", "local"], "hidden_size": 32, "attention_head_size": 8,
        "num_attention_heads": 4, "feed_forward_size": 64, "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8, "num_buckets": 4, "num_hashes": 1, "axial_pos_embds": False,
        "max_position_embeddings": 64, "is_decoder": False, "hash_seed": 0, "hidden_dropout_prob": 0.0,
        "local_attention_probs_dropout_prob": 0.0, "lsh_attention_probs_dropout_prob": 0.0}, "sentence",
        1.0),
    # Encoders.
    ("mobilebert", "MobileBertForMaskedLM", "MobileBert", {
        **ENCODER, "embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16,
        "num_feedforward_networks": 2}, "labelled", 0.6),
    ("megatron-bert", "MegatronBertForMaskedLM", "MegatronBert", ENCODER, "labelled", 0.6),
    ("i-bert", "IBertForMaskedLM", "IBert", ENCODER, "labelled", 0.6),
    ("layoutlm", "LayoutLMForTokenClassification", "LayoutLM", ENCODER, "words of a page", 0.6),
    ("lilt", "LiltForTokenClassification", "Lilt", {
        **ENCODER, "hidden_size": 48, "channel_shrink_ratio": 2}, "words of a page", 0.6),
    ("yoso", "YosoForMaskedLM", "Yoso", {**ENCODER, "use_expectation": True}, "labelled", 0.6),
    ("flaubert", "FlaubertForSequenceClassification", "Flaubert", {
        "vocab_size": 99, "emb_dim": 32, "n_layers": 3, "n_heads": 4, "max_position_embeddings": 64,
        "pad_index": 0, "layerdrop": 0.0}, "sentence", 0.7),
    ("umt5", "UMT5ForConditionalGeneration", "UMT5", {
        "vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 0, "use_cache": False}, "translated", 0.6),
    ("mvp", "MvpForConditionalGeneration", "Mvp", BOTH, "translated", 0.6),
    ("perceiver", "PerceiverForMaskedLM", "Perceiver", {
        "vocab_size": 99, "d_model": 32, "d_latents": 32, "num_latents": 8, "max_position_embeddings": 24,
        "num_self_attends_per_block": 2, "num_self_attention_heads": 4, "num_cross_attention_heads": 4,
        "qk_channels": 32, "v_channels": 32}, "read", 0.6),
    # Images, films, series.
    ("mobilevit v2", "MobileViTV2ForImageClassification", "MobileViTV2", {
        "image_size": 64, "width_multiplier": 0.25, "base_attn_unit_dims": [32, 48, 64],
        "n_attn_blocks": [1, 1, 1]}, "large image", 0.7),
    ("efficientnet", "EfficientNetForImageClassification", "EfficientNet", {
        "image_size": 64, "width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
     "large image", 0.7),
    ("bit", "BitForImageClassification", "Bit", {
        "embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1], "num_groups": 8},
     "large image", 0.7),
    ("vit, masked", "ViTForMaskedImageModeling", "ViT", {
        **VISION, "encoder_stride": 8}, "masked patches", 0.6),
    ("patchtst, pre-training", "PatchTSTForPretraining", "PatchTST", {
        **{k: v for k, v in PATCHES.items() if k != "prediction_length"}, "do_mask_input": True,
        "random_mask_ratio": 0.4}, "seen patches", 0.7),
)

LATEST: tuple[tuple[str, str, str, dict[str, Any], str, float], ...] = (
    ("seed-oss", "SeedOssForCausalLM", "SeedOss", DECODER, "labelled", 0.6),
    ("apertus", "ApertusForCausalLM", "Apertus", DECODER, "labelled", 0.6),
    ("hunyuan", "HunYuanDenseV1ForCausalLM", "HunYuanDenseV1", {**DECODER, "head_dim": 8}, "labelled", 0.6),
    ("vaultgemma", "VaultGemmaForCausalLM", "VaultGemma", {
        **DECODER, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}, "labelled", 0.6),
    ("doge", "DogeForCausalLM", "Doge", DECODER, "labelled", 0.6),
    ("bitnet", "BitNetForCausalLM", "BitNet", DECODER, "labelled", 0.6),
    ("ctrl", "CTRLLMHeadModel", "CTRL", {
        **TEXT, "n_embd": 32, "n_layer": 3, "n_head": 4, "dff": 64, "n_positions": 64, "use_cache": False},
     "labelled", 0.6),
    ("roberta, norms first", "RobertaPreLayerNormForMaskedLM", "RobertaPreLayerNorm", ENCODER, "labelled",
     0.6),
    ("eurobert", "EuroBertForMaskedLM", "EuroBert", {**DECODER, "use_cache": False}, "labelled", 0.6),
    ("flex olmo", "FlexOlmoForCausalLM", "FlexOlmo", {
        **DECODER, "num_experts": 4, "num_experts_per_tok": 2}, "labelled", 0.8),
    ("convnext v2", "ConvNextV2ForImageClassification", "ConvNextV2", {
        "image_size": 64, "hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 1, 1]}, "large image", 0.6),
    ("cvt", "CvtForImageClassification", "Cvt", {
        "embed_dim": [16, 24, 32], "num_heads": [1, 2, 4], "depth": [1, 2, 3]}, "large image", 0.7),
)


def _adapted(name: str, config: str, options: dict[str, Any], model: tuple[str, str, dict[str, Any]],
             task: str, batch: str, budget: float = 0.6) -> Scenario:
    """Adapters of peft in a model other than a decoder."""
    def make() -> Task:
        import peft

        chosen = getattr(peft, config)(task_type=task, **options)
        return calling(peft.get_peft_model(made(*model), chosen).train(), BATCHES[batch]())
    return Scenario("peft", name, f"get_peft_model(model, {config}(...))", make, ("transformers", "peft"),
                    budget=budget)


_T5 = "T5ForConditionalGeneration", "T5", {
    "vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0, "use_cache": False}
_BERT = "BertForSequenceClassification", "Bert", ENCODER

ADAPTED = (
    _adapted("t5, lora", "LoraConfig", {"r": 4, "lora_dropout": 0.1}, _T5, "SEQ_2_SEQ_LM", "translated"),
    _adapted("t5, ia3", "IA3Config", {}, _T5, "SEQ_2_SEQ_LM", "translated"),
    _adapted("t5, prefix tuning", "PrefixTuningConfig", {
        "num_virtual_tokens": 4, "prefix_projection": True, "encoder_hidden_size": 32}, _T5, "SEQ_2_SEQ_LM",
        "translated"),
    _adapted("bert, dora", "LoraConfig", {"r": 4, "use_dora": True}, _BERT, "SEQ_CLS", "sentence"),
    _adapted("bert, prompt tuning", "PromptTuningConfig", {"num_virtual_tokens": 4}, _BERT, "SEQ_CLS",
             "sentence"),
    _adapted("bert, vera", "VeraConfig", {"r": 4}, _BERT, "SEQ_CLS", "sentence"),
)

VOLUMES = (
    of_monai("dints", "DiNTS", lambda nets: nets.DiNTS(
        dints_space=nets.TopologySearch(num_blocks=2, num_depths=2, channel_mul=0.25, device="cpu"),
        in_channels=1, num_classes=2, use_downsample=True), 0.6, 32),
    of_monai("hovernet", "HoVerNet", lambda nets: nets.HoVerNet(
        mode="fast", in_channels=3, out_classes=2, np_out_channels=2), 0.6, 256),
    of_monai("unet, residual", "UNet(num_res_units=2)", lambda nets: nets.UNet(
        3, 1, 2, channels=(8, 16, 32), strides=(2, 2), num_res_units=2), 0.8),
)

DIFFUSION = (
    denoised("unet of three dimensions", "UNet3DConditionModel", {
        "sample_size": 8, "block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8,
        "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
        "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"), "cross_attention_dim": 32,
        "attention_head_dim": 8},
        lambda: {"sample": torch.randn(1, 4, 4, 8, 8), "timestep": torch.tensor([3]),
                 "encoder_hidden_states": torch.randn(1, 6, 32)}, budget=0.6),
    denoised("tiny autoencoder", "AutoencoderTiny", {
        "encoder_block_out_channels": (16, 16), "decoder_block_out_channels": (16, 16),
        "num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1)},
        lambda: {"sample": torch.rand(2, 3, 32, 32)}, budget=0.6),
    denoised("prior", "PriorTransformer", {
        "num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2, "embedding_dim": 32,
        "num_embeddings": 7, "additional_embeddings": 4},
        lambda: {"hidden_states": torch.randn(2, 32), "timestep": torch.tensor([3, 4]),
                 "proj_embedding": torch.randn(2, 32), "encoder_hidden_states": torch.randn(2, 7, 32)},
        budget=0.6),
    denoised("cogview 4", "CogView4Transformer2DModel", {
        "patch_size": 2, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 4,
        "out_channels": 4, "text_embed_dim": 32, "time_embed_dim": 16, "condition_dim": 8},
        lambda: {"hidden_states": torch.randn(1, 4, 8, 8), "encoder_hidden_states": torch.randn(1, 6, 32),
                 "timestep": torch.tensor([3]), "original_size": torch.tensor([[64.0, 64.0]]),
                 "target_size": torch.tensor([[64.0, 64.0]]), "crop_coords": torch.tensor([[0.0, 0.0]])},
        budget=0.6),
)

SCENARIOS: tuple[Scenario, ...] = (
    *VOLUMES, *DIFFUSION, *ADAPTED, *(architecture(*row) for row in (*MORE, *LATEST)))
