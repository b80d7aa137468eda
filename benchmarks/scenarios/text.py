"""Scenarios of `field.py`: models of transformers for text."""

from __future__ import annotations

import torch

from scenarios.base import Scenario
from scenarios.models import BATCHES, BOTH, DECODER, ENCODER, T5, TEXT, WORDS, Architecture, architecture, ids

NEOX = {k: v for k, v in DECODER.items() if k != "num_key_value_heads"}
EXPERTS = {**DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ANY_EXPERTS = {**EXPERTS, "head_dim": 8, "num_local_experts": 4, "n_routed_experts": 4, "n_group": 1,
               "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
"""By the names of several configurations."""
STATES = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1,
          "mamba_chunk_size": 8, "mamba_d_conv": 4, "mamba_expand": 2}
LATENT = {**DECODER, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
          "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
          "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
WINDOWS = {"head_dim": 8, "sliding_window": 8,
           "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}

BATCHES.update({
    "long": lambda: {"input_ids": ids(64, 2), "labels": ids(12, 2)},
    "bytes": lambda: {"input_ids": ids(64, 2), "labels": torch.randint(0, 2, (2,))},
    "read": lambda: {"inputs": ids(), "labels": ids()},
})

ROWS: tuple[Architecture, ...] = (
    # Decoders.
    ("gpt2", "GPT2LMHeadModel", "GPT2", {
        **TEXT, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}, "labelled", 0.7),
    ("gpt-neo", "GPTNeoForCausalLM", "GPTNeo", {
        **TEXT, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64,
        "attention_types": [[["global", "local"], 1]], "window_size": 8, "use_cache": False},
     "labelled", 0.7),
    ("gpt-neox", "GPTNeoXForCausalLM", "GPTNeoX", NEOX, "labelled", 0.7),
    ("gpt-j", "GPTJForCausalLM", "GPTJ", {
        **TEXT, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "rotary_dim": 8,
        "use_cache": False}, "labelled", 0.7),
    ("gpt bigcode", "GPTBigCodeForCausalLM", "GPTBigCode", {
        **TEXT, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "use_cache": False},
     "labelled", 0.6),
    ("llama", "LlamaForCausalLM", "Llama", DECODER, "labelled", 0.7),
    ("llama, padded", "LlamaForCausalLM", "Llama", DECODER, "padded", 0.7),
    ("llama, dynamic rope", "LlamaForCausalLM", "Llama", {**DECODER, "rope_parameters": {
        "rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}, "labelled", 0.7),
    ("llama, for classes", "LlamaForSequenceClassification", "Llama", DECODER, "sentence", 0.7),
    ("mistral", "MistralForCausalLM", "Mistral", {**DECODER, "sliding_window": 8}, "labelled", 0.7),
    ("qwen2", "Qwen2ForCausalLM", "Qwen2", DECODER, "labelled", 0.7),
    ("qwen3", "Qwen3ForCausalLM", "Qwen3", {**DECODER, "head_dim": 8}, "labelled", 0.7),
    ("gemma2", "Gemma2ForCausalLM", "Gemma2", {**DECODER, "head_dim": 8}, "labelled", 0.7),
    ("gemma3", "Gemma3ForCausalLM", "Gemma3Text", {**DECODER, "head_dim": 8}, "labelled", 0.7),
    ("gemma3n", "Gemma3nForCausalLM", "Gemma3nText", {
        **DECODER, "head_dim": 8, "vocab_size_per_layer_input": WORDS, "hidden_size_per_layer_input": 8,
        "laurel_rank": 8, "num_kv_shared_layers": 1, "sliding_window": 8, "intermediate_size": 64,
        "activation_sparsity_pattern": [0.9, 0.0, 0.0],
        "layer_types": ["sliding_attention", "full_attention", "full_attention"]}, "labelled", 0.6),
    ("gemma4", "Gemma4ForCausalLM", "Gemma4Text", {
        **DECODER, **WINDOWS, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": WORDS},
     "labelled", 0.6),
    ("gemma", "GemmaForCausalLM", "Gemma", {**DECODER, "head_dim": 8}, "labelled", 0.6),
    ("phi3", "Phi3ForCausalLM", "Phi3", DECODER, "labelled", 0.7),
    ("phi", "PhiForCausalLM", "Phi", DECODER, "labelled", 0.7),
    ("opt", "OPTForCausalLM", "OPT", {**NEOX, "ffn_dim": 64, "word_embed_proj_dim": 32}, "labelled", 0.7),
    ("opt, layer drop", "OPTForSequenceClassification", "OPT", {
        **DECODER, "ffn_dim": 64, "word_embed_proj_dim": 32, "layerdrop": 0.2}, "sentence", 0.9),
    ("bloom", "BloomForCausalLM", "Bloom", {
        **TEXT, "hidden_size": 32, "n_layer": 3, "n_head": 4, "use_cache": False}, "labelled", 0.7),
    ("falcon", "FalconForCausalLM", "Falcon", NEOX, "labelled", 0.7),
    ("stablelm", "StableLmForCausalLM", "StableLm", DECODER, "labelled", 0.7),
    ("olmo", "OlmoForCausalLM", "Olmo", DECODER, "labelled", 0.6),
    ("olmo hybrid", "OlmoHybridForCausalLM", "OlmoHybrid", DECODER, "labelled", 0.6),
    ("ernie 4.5", "Ernie4_5ForCausalLM", "Ernie4_5", {**DECODER, "head_dim": 8}, "labelled", 0.6),
    ("ministral", "MinistralForCausalLM", "Ministral", {
        **DECODER, "head_dim": 8, "sliding_window": 8}, "labelled", 0.6),
    ("jais 2", "Jais2ForCausalLM", "Jais2", DECODER, "labelled", 0.6),
    ("gpt-neox japanese", "GPTNeoXJapaneseForCausalLM", "GPTNeoXJapanese", {
        **DECODER, "intermediate_multiple_size": 2}, "labelled", 0.6),
    ("granite swa", "GraniteSWAForCausalLM", "GraniteSWA", DECODER, "labelled", 0.6),
    ("youtu", "YoutuForCausalLM", "Youtu", {
        **DECODER, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8}, "labelled", 0.6),
    ("xlm", "XLMWithLMHeadModel", "XLM", {
        **TEXT, "emb_dim": 32, "n_layers": 3, "n_heads": 4, "max_position_embeddings": 64, "n_langs": 1},
     "labelled", 0.6),
    ("deberta, masked words", "DebertaForMaskedLM", "Deberta", {
        **ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"],
        "max_relative_positions": 16}, "labelled", 0.6),
    ("xlm-roberta xl", "XLMRobertaXLForMaskedLM", "XLMRobertaXL", {
        **ENCODER, "max_position_embeddings": 80}, "labelled", 0.6),
    ("nomic bert", "NomicBertForMaskedLM", "NomicBert", ENCODER, "labelled", 0.6),
    ("roc-bert", "RoCBertForMaskedLM", "RoCBert", {
        **ENCODER, "enable_pronunciation": False, "enable_shape": False}, "labelled", 0.6),
    ("luke", "LukeForMaskedLM", "Luke", {
        **ENCODER, "entity_vocab_size": 16, "entity_emb_size": 16, "max_position_embeddings": 80},
     "labelled", 0.6),
    ("markup lm", "MarkupLMForSequenceClassification", "MarkupLM", {
        **ENCODER, "max_position_embeddings": 80}, "sentence", 0.9),
    ("pegasus-x", "PegasusXForConditionalGeneration", "PegasusX", {
        **BOTH, "block_size": 8, "num_global_tokens": 4}, "translated", 0.6),
    ("starcoder2", "Starcoder2ForCausalLM", "Starcoder2", DECODER, "labelled", 0.7),
    ("olmo2", "Olmo2ForCausalLM", "Olmo2", DECODER, "labelled", 0.7),
    ("olmo3", "Olmo3ForCausalLM", "Olmo3", {**DECODER, "sliding_window": 8}, "labelled", 0.6),
    ("cohere", "CohereForCausalLM", "Cohere", DECODER, "labelled", 0.7),
    ("cohere2", "Cohere2ForCausalLM", "Cohere2", {
        **DECODER, "sliding_window": 8, "head_dim": 8}, "labelled", 0.6),
    ("granite", "GraniteForCausalLM", "Granite", DECODER, "labelled", 0.7),
    ("glm", "GlmForCausalLM", "Glm", {**DECODER, "head_dim": 8}, "labelled", 0.7),
    ("glm4", "Glm4ForCausalLM", "Glm4", {**DECODER, "head_dim": 8}, "labelled", 0.6),
    ("smollm3", "SmolLM3ForCausalLM", "SmolLM3", DECODER, "labelled", 0.7),
    ("diffllama", "DiffLlamaForCausalLM", "DiffLlama", DECODER, "labelled", 0.6),
    ("nemotron", "NemotronForCausalLM", "Nemotron", DECODER, "labelled", 0.6),
    ("hrm", "HrmTextForCausalLM", "HrmText", {**DECODER, "head_dim": 8, "num_hidden_layers": 2},
     "labelled", 0.6),
    ("modernbert decoder", "ModernBertDecoderForCausalLM", "ModernBertDecoder", {
        **ENCODER, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 8, "use_cache": False},
     "labelled", 0.6),
    ("nanochat", "NanoChatForCausalLM", "NanoChat", DECODER, "labelled", 0.6),
    ("biogpt", "BioGptForCausalLM", "BioGpt", {**ENCODER, "use_cache": False}, "labelled", 0.7),
    ("biogpt, layer drop", "BioGptForCausalLM", "BioGpt", {
        **ENCODER, "use_cache": False, "layerdrop": 0.3}, "labelled", 0.9),
    ("codegen", "CodeGenForCausalLM", "CodeGen", {
        "vocab_size": WORDS, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "n_ctx": 64,
        "rotary_dim": 4, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2}, "labelled", 0.7),
    ("mpt", "MptForCausalLM", "Mpt", {
        "vocab_size": WORDS, "d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 64,
        "use_cache": False}, "labelled", 0.7),
    ("persimmon", "PersimmonForCausalLM", "Persimmon", {**ENCODER, "use_cache": False}, "labelled", 0.7),
    ("arcee", "ArceeForCausalLM", "Arcee", DECODER, "labelled", 0.6),
    ("helium", "HeliumForCausalLM", "Helium", {**DECODER, "head_dim": 8}, "labelled", 0.6),
    ("exaone 4", "Exaone4ForCausalLM", "Exaone4", {
        **DECODER, "sliding_window": 8, "sliding_window_pattern": 2}, "labelled", 0.6),
    ("xglm", "XGLMForCausalLM", "XGLM", {
        **TEXT, "d_model": 32, "num_layers": 3, "attention_heads": 4, "ffn_dim": 64, "use_cache": False,
        "max_position_embeddings": 64}, "labelled", 0.6),
    ("openai gpt", "OpenAIGPTLMHeadModel", "OpenAIGPT", {
        **TEXT, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}, "labelled", 0.6),
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
    # Mixtures of experts.
    ("mixtral", "MixtralForCausalLM", "Mixtral", {
        **DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}, "labelled", 0.7),
    ("qwen2-moe", "Qwen2MoeForCausalLM", "Qwen2Moe", {
        **EXPERTS, "shared_expert_intermediate_size": 32}, "labelled", 0.7),
    ("qwen3-moe", "Qwen3MoeForCausalLM", "Qwen3Moe", {**EXPERTS, "head_dim": 8}, "labelled", 0.7),
    ("olmoe", "OlmoeForCausalLM", "Olmoe", EXPERTS, "labelled", 0.7),
    ("gpt-oss", "GptOssForCausalLM", "GptOss", {
        **DECODER, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}, "labelled", 0.8),
    ("llama4", "Llama4ForCausalLM", "Llama4Text", {
        **DECODER, "head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 64,
        "attention_chunk_size": 8}, "labelled", 0.7),
    ("deepseek v3", "DeepseekV3ForCausalLM", "DeepseekV3", LATENT, "labelled", 0.8),
    ("deepseek v2", "DeepseekV2ForCausalLM", "DeepseekV2", LATENT, "labelled", 0.6),
    ("deepseek v3.2", "DeepseekV32ForCausalLM", "DeepseekV32", {
        **LATENT, "index_topk": 8, "index_n_heads": 2, "index_head_dim": 8}, "labelled", 0.6),
    ("glm4 moe", "Glm4MoeForCausalLM", "Glm4Moe", {
        **DECODER, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1}, "labelled", 0.6),
    ("granite moe", "GraniteMoeForCausalLM", "GraniteMoe", {
        **DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}, "labelled", 0.6),
    ("granite moe shared", "GraniteMoeSharedForCausalLM", "GraniteMoeShared", {
        **ANY_EXPERTS, "shared_intermediate_size": 32}, "labelled", 0.6),
    ("phimoe", "PhimoeForCausalLM", "Phimoe", {
        **DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}, "labelled", 0.6),
    ("ernie 4.5 moe", "Ernie4_5_MoeForCausalLM", "Ernie4_5_Moe", {
        **DECODER, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32,
        "moe_layer_start_index": 1}, "labelled", 0.6),
    ("jetmoe", "JetMoeForCausalLM", "JetMoe", {
        **DECODER, "kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2}, "labelled", 0.6),
    ("gemma4 moe", "Gemma4ForCausalLM", "Gemma4Text", {
        **DECODER, **WINDOWS, "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4,
        "top_k_experts": 2, "moe_intermediate_size": 32}, "labelled", 0.6),
    ("phi-moe", "PhimoeForCausalLM", "Phimoe", {**DECODER, "num_local_experts": 4}, "labelled", 0.8),
    ("dots1", "Dots1ForCausalLM", "Dots1", {
        **DECODER, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}, "labelled", 0.6),
    ("flex olmo", "FlexOlmoForCausalLM", "FlexOlmo", {
        **DECODER, "num_experts": 4, "num_experts_per_tok": 2}, "labelled", 0.8),
    ("dbrx", "DbrxForCausalLM", "Dbrx", {
        **TEXT, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "use_cache": False,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}},
     "labelled", 0.8),
    ("afmoe", "AfmoeForCausalLM", "Afmoe", {
        **ANY_EXPERTS, "num_shared_experts": 1, "num_dense_layers": 1, "sliding_window": 8}, "labelled", 0.6),
    ("minimax m2", "MiniMaxM2ForCausalLM", "MiniMaxM2", ANY_EXPERTS, "labelled", 0.6),
    # State spaces, recurrences, linear attention.
    ("mamba", "MambaForCausalLM", "Mamba", {
        **TEXT, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "use_cache": False},
     "labelled", 0.8),
    ("mamba2", "Mamba2ForCausalLM", "Mamba2", {
        **TEXT, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8, "head_dim": 8,
        "n_groups": 1, "chunk_size": 8, "use_cache": False}, "labelled", 0.9),
    ("falcon mamba", "FalconMambaForCausalLM", "FalconMamba", {
        **TEXT, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "use_cache": False},
     "labelled", 0.8),
    ("falcon h1", "FalconH1ForCausalLM", "FalconH1", {**DECODER, **STATES, "mamba_d_ssm": 64},
     "labelled", 0.6),
    ("recurrent gemma", "RecurrentGemmaForCausalLM", "RecurrentGemma", {
        **DECODER, "lru_width": 32, "attention_window_size": 16, "head_dim": 8}, "labelled", 0.9),
    ("lfm2", "Lfm2ForCausalLM", "Lfm2", {
        **DECODER, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
     "labelled", 0.7),
    ("lfm2 moe", "Lfm2MoeForCausalLM", "Lfm2Moe", {
        **DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"]}, "labelled", 0.6),
    ("granite hybrid", "GraniteMoeHybridForCausalLM", "GraniteMoeHybrid", {
        **DECODER, **STATES, "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 32, "layer_types": ["mamba", "attention", "mamba"]}, "labelled", 0.6),
    ("minimax", "MiniMaxForCausalLM", "MiniMax", {
        **DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 8, "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"]}, "labelled", 0.6),
    ("qwen3-next", "Qwen3NextForCausalLM", "Qwen3Next", {
        **EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"]}, "labelled", 0.6),
    ("qwen3.5", "Qwen3_5ForCausalLM", "Qwen3_5Text", {
        **DECODER, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"]}, "labelled", 0.6),
    ("bamba", "BambaForCausalLM", "Bamba", {**DECODER, **STATES, "attn_layer_indices": [1]}, "labelled", 0.6),
    ("jamba", "JambaForCausalLM", "Jamba", {
        **DECODER, "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 4, "mamba_dt_rank": 4,
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        }, "labelled", 0.6),
    ("zamba2", "Zamba2ForCausalLM", "Zamba2", {
        **DECODER, "mamba_d_state": 8, "mamba_ngroups": 1, "n_mamba_heads": 8, "mamba_headdim": 8,
        "chunk_size": 8, "num_mem_blocks": 1, "layers_block_type": ["mamba", "hybrid", "mamba"],
        "attention_head_dim": 16}, "labelled", 0.6),
    ("zamba", "ZambaForCausalLM", "Zamba", {
        **DECODER, "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8,
        "mamba_dt_rank": 4, "n_mamba_heads": 2, "use_mamba_kernels": False,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]}, "labelled", 0.6),
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
    # Encoders.
    ("bert, masked", "BertForMaskedLM", "Bert", ENCODER, "padded", 0.7),
    ("roberta, sentences", "RobertaForSequenceClassification", "Roberta", ENCODER, "sentence", 0.7),
    ("roberta, norms first", "RobertaPreLayerNormForMaskedLM", "RobertaPreLayerNorm", ENCODER,
     "labelled", 0.6),
    ("distilbert, tokens", "DistilBertForTokenClassification", "DistilBert", {
        **TEXT, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 64},
     "tokens", 0.7),
    ("deberta, questions", "DebertaV2ForQuestionAnswering", "DebertaV2", {
        **ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False}, "question", 0.7),
    ("deberta v2", "DebertaV2ForTokenClassification", "DebertaV2", {
        **ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8,
        "conv_kernel_size": 3}, "tokens", 0.6),
    ("modernbert", "ModernBertForMaskedLM", "ModernBert", {
        **ENCODER, "cls_token_id": 1, "sep_token_id": 2}, "padded", 0.7),
    ("modernbert, sentences", "ModernBertForSequenceClassification", "ModernBert", {
        **ENCODER, "cls_token_id": 1, "sep_token_id": 2}, "sentence", 0.7),
    ("albert", "AlbertForMaskedLM", "Albert", {**ENCODER, "embedding_size": 16}, "padded", 0.7),
    ("electra", "ElectraForTokenClassification", "Electra", {**ENCODER, "embedding_size": 16}, "tokens", 0.7),
    ("xlm-roberta", "XLMRobertaForMaskedLM", "XLMRoberta", ENCODER, "padded", 0.7),
    ("mpnet", "MPNetForMaskedLM", "MPNet", ENCODER, "labelled", 0.7),
    ("fnet", "FNetForMaskedLM", "FNet", {**ENCODER, "use_tpu_fourier_optimizations": False}, "labelled", 0.7),
    ("convbert", "ConvBertForSequenceClassification", "ConvBert", {**ENCODER, "embedding_size": 16},
     "sentence", 0.8),
    ("squeezebert", "SqueezeBertForSequenceClassification", "SqueezeBert", {
        **ENCODER, "embedding_size": 32}, "sentence", 0.7),
    ("nystromformer", "NystromformerForMaskedLM", "Nystromformer", {
        **ENCODER, "num_landmarks": 8, "segment_means_seq_len": 24}, "labelled", 0.8),
    ("rembert", "RemBertForMaskedLM", "RemBert", {
        **ENCODER, "input_embedding_size": 16, "output_embedding_size": 16}, "labelled", 0.7),
    ("longformer", "LongformerForMaskedLM", "Longformer", {
        **ENCODER, "attention_window": 8, "sep_token_id": 2}, "labelled", 0.9),
    ("big bird", "BigBirdForMaskedLM", "BigBird", {**ENCODER, "attention_type": "original_full"},
     "labelled", 0.7),
    ("xlnet", "XLNetForSequenceClassification", "XLNet", {
        **TEXT, "d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 64}, "sentence", 0.8),
    ("esm", "EsmForMaskedLM", "Esm", {
        **ENCODER, "mask_token_id": 3, "position_embedding_type": "rotary", "token_dropout": True},
     "padded", 0.6),
    ("funnel", "FunnelForSequenceClassification", "Funnel", {
        "vocab_size": WORDS, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64,
        "block_sizes": [1, 1, 1], "num_decoder_layers": 1}, "sentence", 0.6),
    ("canine", "CanineForSequenceClassification", "Canine", {
        **ENCODER, "max_position_embeddings": 128, "num_hash_buckets": 64, "local_transformer_stride": 16},
     "bytes", 0.6),
    ("roformer", "RoFormerForMaskedLM", "RoFormer", {**ENCODER, "embedding_size": 32}, "labelled", 0.7),
    ("ernie", "ErnieForSequenceClassification", "Ernie", ENCODER, "sentence", 0.7),
    ("data2vec, text", "Data2VecTextForMaskedLM", "Data2VecText", ENCODER, "labelled", 0.7),
    ("reformer", "ReformerForSequenceClassification", "Reformer", {
        **TEXT, "attn_layers": ["local", "lsh", "local"], "hidden_size": 32, "attention_head_size": 8,
        "num_attention_heads": 4, "feed_forward_size": 64, "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8, "num_buckets": 4, "num_hashes": 1, "axial_pos_embds": False,
        "max_position_embeddings": 64, "is_decoder": False, "hash_seed": 0, "hidden_dropout_prob": 0.0,
        "local_attention_probs_dropout_prob": 0.0, "lsh_attention_probs_dropout_prob": 0.0}, "sentence", 1.0),
    ("mobilebert", "MobileBertForMaskedLM", "MobileBert", {
        **ENCODER, "embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16,
        "num_feedforward_networks": 2}, "labelled", 0.6),
    ("megatron-bert", "MegatronBertForMaskedLM", "MegatronBert", ENCODER, "labelled", 0.6),
    ("i-bert", "IBertForMaskedLM", "IBert", ENCODER, "labelled", 0.6),
    ("yoso", "YosoForMaskedLM", "Yoso", {**ENCODER, "use_expectation": True}, "labelled", 0.6),
    ("flaubert", "FlaubertForSequenceClassification", "Flaubert", {
        "vocab_size": WORDS, "emb_dim": 32, "n_layers": 3, "n_heads": 4, "max_position_embeddings": 64,
        "pad_index": 0, "layerdrop": 0.0}, "sentence", 0.7),
    ("perceiver", "PerceiverForMaskedLM", "Perceiver", {
        "vocab_size": WORDS, "d_model": 32, "d_latents": 32, "num_latents": 8, "max_position_embeddings": 24,
        "num_self_attends_per_block": 2, "num_self_attention_heads": 4, "num_cross_attention_heads": 4,
        "qk_channels": 32, "v_channels": 32}, "read", 0.6),
    ("eurobert", "EuroBertForMaskedLM", "EuroBert", {**DECODER, "use_cache": False}, "labelled", 0.6),
    ("xmod", "XmodForMaskedLM", "Xmod", {
        **ENCODER, "languages": ["en"], "default_language": "en"}, "labelled", 0.6),
    ("splinter", "SplinterForQuestionAnswering", "Splinter", ENCODER, "question", 0.6),
    ("camembert", "CamembertForMaskedLM", "Camembert", ENCODER, "labelled", 0.6),
    ("mra", "MraForMaskedLM", "Mra", {**ENCODER, "max_position_embeddings": 130, "block_per_row": 1},
     "labelled", 0.6),
    # Encoders with decoders.
    ("t5", "T5ForConditionalGeneration", "T5", T5, "translated", 0.7),
    ("t5gemma", "T5GemmaForConditionalGeneration", "T5Gemma", {
        "encoder": {**DECODER, "head_dim": 8}, "decoder": {**DECODER, "head_dim": 8},
        "vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1}, "translated", 0.6),
    ("bart", "BartForConditionalGeneration", "Bart", BOTH, "translated", 0.7),
    ("bart, layer drop", "BartForConditionalGeneration", "Bart", {
        **BOTH, "encoder_layerdrop": 0.2, "decoder_layerdrop": 0.2}, "translated", 0.9),
    ("mt5", "MT5ForConditionalGeneration", "MT5", T5, "translated", 0.7),
    ("pegasus", "PegasusForConditionalGeneration", "Pegasus", BOTH, "translated", 0.7),
    ("marian", "MarianMTModel", "Marian", {**BOTH, "pad_token_id": 0}, "translated", 0.7),
    ("mbart", "MBartForConditionalGeneration", "MBart", BOTH, "translated", 0.7),
    ("m2m100", "M2M100ForConditionalGeneration", "M2M100", {
        **BOTH, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}, "translated", 0.7),
    ("longt5", "LongT5ForConditionalGeneration", "LongT5", {
        **T5, "local_radius": 4, "global_block_size": 4, "encoder_attention_type": "transient-global"},
     "long", 0.6),
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
    ("blenderbot", "BlenderbotForConditionalGeneration", "Blenderbot", BOTH, "translated", 0.7),
    ("blenderbot small", "BlenderbotSmallForConditionalGeneration", "BlenderbotSmall", BOTH,
     "translated", 0.6),
    ("plbart", "PLBartForConditionalGeneration", "PLBart", BOTH, "translated", 0.7),
    ("bigbird-pegasus", "BigBirdPegasusForConditionalGeneration", "BigBirdPegasus", {
        **BOTH, "attention_type": "original_full"}, "translated", 0.7),
    ("umt5", "UMT5ForConditionalGeneration", "UMT5", T5, "translated", 0.6),
    ("mvp", "MvpForConditionalGeneration", "Mvp", BOTH, "translated", 0.6),
)
SCENARIOS: tuple[Scenario, ...] = tuple(architecture(*row) for row in ROWS)
