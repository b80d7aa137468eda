"""Further scenarios of `field.py`: more models of transformers for text and for series."""

from __future__ import annotations

from typing import Any

import torch
from field_architectures import EXPERTS, SERIES, architecture
from field_scenarios import BATCHES, BOTH, DECODER, ENCODER, T5, TEXT, WORDS, Scenario, ids

STATES = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1,
          "mamba_chunk_size": 8, "mamba_d_conv": 4, "mamba_expand": 2}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
          "qk_nope_head_dim": 8, "v_head_dim": 8}
WINDOWS = {"head_dim": 8, "sliding_window": 8,
           "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}

BATCHES.update({
    "continued": lambda: {"past_values": [torch.randn(32), torch.randn(24)],
                          "freq": [0, 1], "future_values": torch.randn(2, 8)},
    "continued, of one kind": lambda: {"past_values": [torch.randn(32), torch.randn(32)],
                                       "future_values": torch.randn(2, 8)},
    "long": lambda: {"input_ids": ids(64, 2), "labels": ids(12, 2)},
    "bytes": lambda: {"input_ids": ids(64, 2), "labels": torch.randint(0, 2, (2,))},
})

ROWS: tuple[tuple[str, str, str, dict[str, Any], str, float], ...] = (
    # Decoders.
    ("olmo3", "Olmo3ForCausalLM", "Olmo3", {**DECODER, "sliding_window": 8}, "labelled", 0.6),
    ("glm4", "Glm4ForCausalLM", "Glm4", {**DECODER, "head_dim": 8}, "labelled", 0.6),
    ("glm4 moe", "Glm4MoeForCausalLM", "Glm4Moe", {
        **DECODER, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1}, "labelled", 0.6),
    ("granite moe", "GraniteMoeForCausalLM", "GraniteMoe", {
        **DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}, "labelled", 0.6),
    ("granite hybrid", "GraniteMoeHybridForCausalLM", "GraniteMoeHybrid", {
        **DECODER, **STATES, "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 32, "layer_types": ["mamba", "attention", "mamba"]}, "labelled", 0.6),
    ("deepseek v2", "DeepseekV2ForCausalLM", "DeepseekV2", {
        **DECODER, **LATENT, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "first_k_dense_replace": 1}, "labelled", 0.6),
    ("phimoe", "PhimoeForCausalLM", "Phimoe", {
        **DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}, "labelled", 0.6),
    ("ernie 4.5 moe", "Ernie4_5_MoeForCausalLM", "Ernie4_5_Moe", {
        **DECODER, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32,
        "moe_layer_start_index": 1}, "labelled", 0.6),
    ("minimax", "MiniMaxForCausalLM", "MiniMax", {
        **DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 8, "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"]}, "labelled", 0.6),
    ("qwen3-next", "Qwen3NextForCausalLM", "Qwen3Next", {
        **EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"]}, "labelled", 0.6),
    ("gemma3n", "Gemma3nForCausalLM", "Gemma3nText", {
        **DECODER, "head_dim": 8, "vocab_size_per_layer_input": WORDS, "hidden_size_per_layer_input": 8,
        "laurel_rank": 8, "num_kv_shared_layers": 1, "sliding_window": 8, "intermediate_size": 64,
        "activation_sparsity_pattern": [0.9, 0.0, 0.0],
        "layer_types": ["sliding_attention", "full_attention", "full_attention"]}, "labelled", 0.6),
    ("jetmoe", "JetMoeForCausalLM", "JetMoe", {
        **DECODER, "kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2}, "labelled", 0.6),
    ("diffllama", "DiffLlamaForCausalLM", "DiffLlama", DECODER, "labelled", 0.6),
    ("nemotron", "NemotronForCausalLM", "Nemotron", DECODER, "labelled", 0.6),
    ("gemma4", "Gemma4ForCausalLM", "Gemma4Text", {
        **DECODER, **WINDOWS, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": WORDS},
     "labelled", 0.6),
    ("gemma4 moe", "Gemma4ForCausalLM", "Gemma4Text", {
        **DECODER, **WINDOWS, "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4,
        "top_k_experts": 2, "moe_intermediate_size": 32}, "labelled", 0.6),
    ("lfm2 moe", "Lfm2MoeForCausalLM", "Lfm2Moe", {
        **DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"]}, "labelled", 0.6),
    ("hrm", "HrmTextForCausalLM", "HrmText", {**DECODER, "head_dim": 8, "num_hidden_layers": 2},
     "labelled", 0.6),
    ("modernbert decoder", "ModernBertDecoderForCausalLM", "ModernBertDecoder", {
        **ENCODER, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 8, "use_cache": False},
     "labelled", 0.6),
    ("deepseek v3.2", "DeepseekV32ForCausalLM", "DeepseekV32", {
        **DECODER, **LATENT, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "first_k_dense_replace": 1, "index_topk": 8, "index_n_heads": 2,
        "index_head_dim": 8}, "labelled", 0.6),
    ("nanochat", "NanoChatForCausalLM", "NanoChat", DECODER, "labelled", 0.6),
    # State spaces, recurrences.
    ("qwen3.5", "Qwen3_5ForCausalLM", "Qwen3_5Text", {
        **DECODER, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"]}, "labelled", 0.6),
    ("falcon h1", "FalconH1ForCausalLM", "FalconH1", {**DECODER, **STATES, "mamba_d_ssm": 64},
     "labelled", 0.6),
    ("bamba", "BambaForCausalLM", "Bamba", {**DECODER, **STATES, "attn_layer_indices": [1]},
     "labelled", 0.6),
    ("jamba", "JambaForCausalLM", "Jamba", {
        **DECODER, "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 4, "mamba_dt_rank": 4,
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        }, "labelled", 0.6),
    ("zamba2", "Zamba2ForCausalLM", "Zamba2", {
        **DECODER, "mamba_d_state": 8, "mamba_ngroups": 1, "n_mamba_heads": 8, "mamba_headdim": 8,
        "chunk_size": 8, "num_mem_blocks": 1, "layers_block_type": ["mamba", "hybrid", "mamba"],
        "attention_head_dim": 16}, "labelled", 0.6),
    ("nemotron h", "NemotronHForCausalLM", "NemotronH", {
        **DECODER, "layers_block_type": ["mamba", "attention", "moe"], "mamba_num_heads": 8,
        "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 8, "chunk_size": 8, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8,
        "moe_shared_expert_intermediate_size": 32}, "labelled", 0.6),
    ("rwkv", "RwkvForCausalLM", "Rwkv", {
        **TEXT, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32,
        "context_length": 64, "use_cache": False}, "labelled", 0.6),
    ("xlstm", "xLSTMForCausalLM", "xLSTM", {
        **TEXT, "hidden_size": 32, "num_heads": 4, "num_hidden_layers": 2, "chunk_size": 8,
        "use_cache": False}, "labelled", 0.6),
    # Encoders, and encoders with decoders.
    ("esm", "EsmForMaskedLM", "Esm", {
        **ENCODER, "mask_token_id": 3, "position_embedding_type": "rotary", "token_dropout": True},
     "padded", 0.6),
    ("funnel", "FunnelForSequenceClassification", "Funnel", {
        "vocab_size": WORDS, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64,
        "block_sizes": [1, 1, 1], "num_decoder_layers": 1}, "sentence", 0.6),
    ("canine", "CanineForSequenceClassification", "Canine", {
        **ENCODER, "max_position_embeddings": 128, "num_hash_buckets": 64, "local_transformer_stride": 16},
     "bytes", 0.6),
    ("longt5", "LongT5ForConditionalGeneration", "LongT5", {
        **T5, "local_radius": 4, "global_block_size": 4, "encoder_attention_type": "transient-global"},
     "long", 0.6),
    ("t5gemma", "T5GemmaForConditionalGeneration", "T5Gemma", {
        "encoder": {**DECODER, "head_dim": 8}, "decoder": {**DECODER, "head_dim": 8},
        "vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1}, "translated", 0.6),
    ("led", "LEDForConditionalGeneration", "LED", {
        **{k: v for k, v in BOTH.items() if k != "max_position_embeddings"}, "attention_window": 8,
        "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64}, "translated", 0.6),
    ("prophetnet", "ProphetNetForConditionalGeneration", "ProphetNet", {
        **TEXT, "hidden_size": 32, "num_encoder_layers": 2, "num_decoder_layers": 2,
        "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64, "max_position_embeddings": 64, "decoder_start_token_id": 1,
        "use_cache": False}, "translated", 0.6),
    ("switch", "SwitchTransformersForConditionalGeneration", "SwitchTransformers", {
        **T5, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
     "translated", 0.6),
    ("nllb-moe", "NllbMoeForConditionalGeneration", "NllbMoe", {
        **BOTH, "num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2, "expert_capacity": 16},
     "translated", 0.6),
    # Series.
    ("informer", "InformerForPrediction", "Informer", SERIES, "forecast", 0.6),
    ("autoformer", "AutoformerForPrediction", "Autoformer", {
        **SERIES, "label_length": 4, "moving_average": 3}, "forecast", 0.6),
    ("timesfm", "TimesFmModelForPrediction", "TimesFm", {
        "patch_length": 8, "context_length": 32, "horizon_length": 8, "freq_size": 3, "num_hidden_layers": 2,
        "hidden_size": 32, "intermediate_size": 64, "head_dim": 8, "num_attention_heads": 4},
     "continued", 0.6),
    ("timesfm 2.5", "TimesFm2_5ModelForPrediction", "TimesFm2_5", {
        "patch_length": 8, "context_length": 32, "horizon_length": 8, "num_hidden_layers": 2,
        "hidden_size": 32, "intermediate_size": 64, "head_dim": 8, "num_attention_heads": 4,
        "num_key_value_heads": 4, "output_quantile_len": 16}, "continued, of one kind", 0.6),
)
"""Name, model, configuration, its options, batch, budget."""

SCENARIOS: tuple[Scenario, ...] = tuple(architecture(*row) for row in ROWS)
