"""Architectures of the transformers library, built from small configurations with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.models.sample import Sample

VOCABULARY = 99


@dataclass(frozen=True)
class Architecture:
    """How to build one architecture and a batch for it."""

    name: str
    subject: str
    model: str
    """Class of the model in transformers."""
    config: str
    options: dict[str, Any] = field(default_factory=dict)
    inputs: str = "labelled"
    fast: bool = False
    """Part of the normal run; the others are marked slow."""

    def build(self) -> Sample:
        """The model, in train mode, and a batch."""
        import transformers as hf  # takes seconds

        torch.manual_seed(0)
        config = getattr(hf, self.config)(**self.options)
        model = getattr(hf, self.model)(config)
        return Sample(model.train(), (), INPUTS[self.inputs](), _loss)


def _loss(output: Any) -> torch.Tensor:
    if getattr(output, "loss", None) is not None:
        return output.loss  # type: ignore[no-any-return]
    first = next(v for v in output.values() if isinstance(v, torch.Tensor) and v.requires_grad)
    return first.float().pow(2).mean()


def _ids(length: int = 16) -> torch.Tensor:
    return torch.randint(5, VOCABULARY, (2, length))


def _image(size: int = 32) -> torch.Tensor:
    return torch.randn(2, 3, size, size)


INPUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "labelled": lambda: {"input_ids": (i := _ids()), "labels": i.clone()},
    "short": lambda: {"input_ids": (i := _ids(6)), "labels": i.clone()},
    "masked": lambda: {"input_ids": (i := _ids()), "labels": i.clone(),
                       "attention_mask": torch.ones_like(i)},
    "translated": lambda: {"input_ids": _ids(), "labels": _ids(12)},
    "classes": lambda: {"pixel_values": _image(), "labels": torch.randint(0, 2, (2,))},
    "classes64": lambda: {"pixel_values": _image(64), "labels": torch.randint(0, 2, (2,))},
    "image": lambda: {"pixel_values": _image()},
    "segmented": lambda: {"pixel_values": _image(64), "labels": torch.randint(0, 2, (2, 64, 64))},
    "boxes": lambda: {"pixel_values": _image(64)},
    "depth": lambda: {"pixel_values": _image(64), "labels": torch.rand(2, 64, 64)},
    "sound": lambda: {"input_values": torch.randn(2, 800), "labels": torch.randint(0, 2, (2,))},
    "spoken": lambda: {"input_values": torch.randn(2, 800), "labels": _ids(8)},
    "spectrum": lambda: {"input_features": torch.randn(2, 16, 40), "labels": _ids(8)},
    "frames": lambda: {"input_features": torch.randn(2, 40, 16), "labels": _ids(8)},
    "patches": lambda: {"input_values": torch.randn(2, 32, 16), "labels": torch.randint(0, 2, (2,))},
    "contrast": lambda: {"input_ids": _ids(8), "pixel_values": _image(), "return_loss": True},
    "caption": lambda: {"input_ids": (i := _ids(8)), "pixel_values": _image(), "labels": i.clone()},
    "series": lambda: {"past_values": torch.randn(2, 32, 2), "future_values": torch.randn(2, 8, 2)},
    "question": lambda: {"input_ids": _ids(), "start_positions": torch.tensor([1, 2]),
                         "end_positions": torch.tensor([3, 5])},
    "sentence": lambda: {"input_ids": _ids(), "labels": torch.randint(0, 2, (2,))},
}

_TEXT = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ENCODER = {**_TEXT, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 64, "max_position_embeddings": 64}
_DECODER = {**_ENCODER, "num_key_value_heads": 2}
_SMALL = {**_TEXT, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
          "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
          "decoder_ffn_dim": 64, "max_position_embeddings": 64, "decoder_start_token_id": 1,
          "forced_eos_token_id": None}
_VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
           "intermediate_size": 64, "image_size": 32, "patch_size": 8}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SPEECH = {**_ENCODER, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3),
           "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8,
           "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "apply_spec_augment": False,
           "classifier_proj_size": 16}
_TOWERS = {"text_config": {**_ENCODER, "projection_dim": 16},
           "vision_config": {**_VISION, "projection_dim": 16}, "projection_dim": 16}


def _a(name: str, subject: str, model: str, config: str, options: dict[str, Any],
       inputs: str = "labelled", fast: bool = False) -> Architecture:
    return Architecture(name, subject, f"{model}", f"{config}Config", options, inputs, fast)


ARCHITECTURES: tuple[Architecture, ...] = (
    _a("gpt2", "text", "GPT2LMHeadModel", "GPT2", {**_TEXT, "n_embd": 32, "n_layer": 2, "n_head": 4,
                                                  "n_positions": 64}),
    _a("gpt_neo", "text", "GPTNeoForCausalLM", "GPTNeo", {
        **_TEXT, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 64,
        "attention_types": [[["global", "local"], 1]], "window_size": 8,
        "max_position_embeddings": 64}),
    _a("gpt_neox", "text", "GPTNeoXForCausalLM", "GPTNeoX", _ENCODER),
    _a("gptj", "text", "GPTJForCausalLM", "GPTJ", {**_TEXT, "n_embd": 32, "n_layer": 2, "n_head": 4,
                                                  "n_positions": 64, "rotary_dim": 4}),
    _a("opt", "text", "OPTForCausalLM", "OPT", {
        **_TEXT, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64,
        "word_embed_proj_dim": 32, "max_position_embeddings": 64}),
    _a("bloom", "text", "BloomForCausalLM", "Bloom", {**_TEXT, "hidden_size": 32, "n_layer": 2,
                                                     "n_head": 4}),
    _a("llama", "text", "LlamaForCausalLM", "Llama", _DECODER),
    _a("mistral", "text", "MistralForCausalLM", "Mistral", {**_DECODER, "sliding_window": 8}),
    _a("qwen2", "text", "Qwen2ForCausalLM", "Qwen2", _DECODER),
    _a("qwen3", "text", "Qwen3ForCausalLM", "Qwen3", {**_DECODER, "head_dim": 8}),
    _a("gemma", "text", "GemmaForCausalLM", "Gemma", {**_DECODER, "head_dim": 8}),
    _a("gemma2", "text", "Gemma2ForCausalLM", "Gemma2", {**_DECODER, "head_dim": 8}),
    _a("phi", "text", "PhiForCausalLM", "Phi", _DECODER),
    _a("phi3", "text", "Phi3ForCausalLM", "Phi3", _DECODER),
    _a("falcon", "text", "FalconForCausalLM", "Falcon", {**_TEXT, "hidden_size": 32,
                                                        "num_hidden_layers": 2,
                                                        "num_attention_heads": 4}),
    _a("stablelm", "text", "StableLmForCausalLM", "StableLm", _DECODER),
    _a("olmo2", "text", "Olmo2ForCausalLM", "Olmo2", _DECODER),
    _a("cohere", "text", "CohereForCausalLM", "Cohere", _DECODER),
    _a("starcoder2", "text", "Starcoder2ForCausalLM", "Starcoder2", _DECODER),
    _a("biogpt", "text", "BioGptForCausalLM", "BioGpt", {**_ENCODER, "layerdrop": 0.0}),
    _a("mixtral", "mixture of experts", "MixtralForCausalLM", "Mixtral", {**_DECODER, **_EXPERTS}),
    _a("qwen2_moe", "mixture of experts", "Qwen2MoeForCausalLM", "Qwen2Moe", {
        **_DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16}),
    _a("olmoe", "mixture of experts", "OlmoeForCausalLM", "Olmoe", {
        **_DECODER, "num_experts": 4, "num_experts_per_tok": 2}),
    _a("mamba", "state space", "MambaForCausalLM", "Mamba", {
        **_TEXT, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, "short"),
    _a("mamba2", "state space", "Mamba2ForCausalLM", "Mamba2", {
        **_TEXT, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8,
        "head_dim": 8, "n_groups": 2, "chunk_size": 8}),
    _a("rwkv", "state space", "RwkvForCausalLM", "Rwkv", {
        **_TEXT, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2}),
    _a("bert", "text", "BertForMaskedLM", "Bert", _ENCODER, "masked"),
    _a("roberta", "text", "RobertaForSequenceClassification", "Roberta", _ENCODER, "sentence"),
    _a("albert", "text", "AlbertForMaskedLM", "Albert", {**_ENCODER, "embedding_size": 16}),
    _a("distilbert", "text", "DistilBertForMaskedLM", "DistilBert", {
        **_TEXT, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64,
        "max_position_embeddings": 64}),
    _a("electra", "text", "ElectraForMaskedLM", "Electra", {**_ENCODER, "embedding_size": 16}),
    _a("deberta_v2", "text", "DebertaV2ForMaskedLM", "DebertaV2", {
        **_ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False}),
    _a("mpnet", "text", "MPNetForMaskedLM", "MPNet", _ENCODER),
    _a("modernbert", "text", "ModernBertForMaskedLM", "ModernBert", {
        **_ENCODER, "cls_token_id": 1, "sep_token_id": 2}),
    _a("fnet", "text", "FNetForMaskedLM", "FNet", _ENCODER),
    _a("funnel", "text", "FunnelForMaskedLM", "Funnel", {
        "vocab_size": VOCABULARY, "block_sizes": [1, 1], "num_decoder_layers": 1, "d_model": 32,
        "n_head": 4, "d_head": 8, "d_inner": 64}),
    _a("convbert", "text", "ConvBertForMaskedLM", "ConvBert", {**_ENCODER, "embedding_size": 16}),
    _a("xlnet", "text", "XLNetForQuestionAnsweringSimple", "XLNet", {
        "vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64},
        "question"),
    _a("longformer", "text", "LongformerForMaskedLM", "Longformer", {
        **_ENCODER, "attention_window": [8, 8]}),
    _a("big_bird", "text", "BigBirdForMaskedLM", "BigBird", {**_ENCODER, "attention_type":
                                                            "original_full"}),
    _a("t5", "encoder-decoder", "T5ForConditionalGeneration", "T5", {
        "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2,
        "num_heads": 4, "decoder_start_token_id": 0}, "translated"),
    _a("longt5", "encoder-decoder", "LongT5ForConditionalGeneration", "LongT5", {
        "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2,
        "num_heads": 4, "decoder_start_token_id": 0, "local_radius": 4}, "translated"),
    _a("bart", "encoder-decoder", "BartForConditionalGeneration", "Bart", _SMALL, "translated"),
    _a("pegasus", "encoder-decoder", "PegasusForConditionalGeneration", "Pegasus", _SMALL,
       "translated"),
    _a("marian", "encoder-decoder", "MarianMTModel", "Marian", {
        **_SMALL, "decoder_vocab_size": VOCABULARY}, "translated"),
    _a("led", "encoder-decoder", "LEDForConditionalGeneration", "LED", {
        **_SMALL, "attention_window": [8, 8], "max_encoder_position_embeddings": 64,
        "max_decoder_position_embeddings": 64}, "translated"),
    _a("m2m_100", "encoder-decoder", "M2M100ForConditionalGeneration", "M2M100", {
        **_SMALL, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}, "translated"),
    _a("vit", "vision", "ViTForImageClassification", "ViT", _VISION, "classes"),
    _a("deit", "vision", "DeiTForImageClassification", "DeiT", _VISION, "classes"),
    _a("beit", "vision", "BeitForImageClassification", "Beit", _VISION, "classes"),
    _a("dinov2", "vision", "Dinov2ForImageClassification", "Dinov2", _VISION, "classes"),
    _a("swin", "vision", "SwinForImageClassification", "Swin", {
        "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4],
        "window_size": 4}, "classes"),
    _a("swinv2", "vision", "Swinv2ForImageClassification", "Swinv2", {
        "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4],
        "window_size": 4}, "classes"),
    _a("convnext", "vision", "ConvNextForImageClassification", "ConvNext", {
        "hidden_sizes": [16, 24, 32, 40], "depths": [1, 1, 2, 1], "drop_path_rate": 0.1}, "classes"),
    _a("resnet", "vision", "ResNetForImageClassification", "ResNet", {
        "embedding_size": 16, "hidden_sizes": [16, 24, 32], "depths": [1, 2, 1],
        "layer_type": "basic"}, "classes"),
    _a("regnet", "vision", "RegNetForImageClassification", "RegNet", {
        "embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 2, 1],
        "groups_width": 8}, "classes"),
    _a("mobilenet_v2", "vision", "MobileNetV2ForImageClassification", "MobileNetV2", {
        "depth_multiplier": 0.25, "image_size": 32}, "classes"),
    _a("mobilevit", "vision", "MobileViTForImageClassification", "MobileViT", {
        "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 24, 32, 40, 48],
        "num_attention_heads": 4, "image_size": 64}, "classes64"),
    _a("efficientnet", "vision", "EfficientNetForImageClassification", "EfficientNet", {
        "width_coefficient": 0.25, "depth_coefficient": 0.3, "image_size": 32,
        "hidden_dim": 320}, "classes"),
    _a("poolformer", "vision", "PoolFormerForImageClassification", "PoolFormer", {
        "hidden_sizes": [16, 16, 24, 24], "depths": [1, 1, 1, 1]}, "classes64"),
    _a("focalnet", "vision", "FocalNetForImageClassification", "FocalNet", {
        "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1],
        "hidden_sizes": [16, 32], "focal_levels": [2, 2], "focal_windows": [3, 3]}, "classes"),
    _a("pvt", "vision", "PvtForImageClassification", "Pvt", {
        "image_size": 64, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 2, 4, 4]}, "classes64"),
    _a("segformer", "segmentation", "SegformerForSemanticSegmentation", "Segformer", {
        "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 4, 4],
        "decoder_hidden_size": 32}, "segmented"),
    _a("dpt", "depth", "DPTForDepthEstimation", "DPT", {
        **_VISION, "image_size": 32, "patch_size": 8, "num_hidden_layers": 4, "backbone_out_indices":
        [0, 1, 2, 3], "neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 16}, "image"),
    _a("yolos", "detection", "YolosForObjectDetection", "Yolos", {
        **_VISION, "image_size": [64, 64], "num_detection_tokens": 5}, "boxes"),
    _a("vit_mae", "vision", "ViTMAEForPreTraining", "ViTMAE", {
        **_VISION, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 2, "decoder_intermediate_size": 32}, "image"),
    _a("wav2vec2", "audio", "Wav2Vec2ForSequenceClassification", "Wav2Vec2", _SPEECH, "sound"),
    _a("wav2vec2_ctc", "audio", "Wav2Vec2ForCTC", "Wav2Vec2", _SPEECH, "spoken"),
    _a("hubert", "audio", "HubertForSequenceClassification", "Hubert", _SPEECH, "sound"),
    _a("wavlm", "audio", "WavLMForSequenceClassification", "WavLM", _SPEECH, "sound"),
    _a("whisper", "audio", "WhisperForConditionalGeneration", "Whisper", {
        **_SMALL, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32},
        "spectrum"),
    _a("speech_to_text", "audio", "Speech2TextForConditionalGeneration", "Speech2Text", {
        **_SMALL, "input_feat_per_channel": 16, "conv_channels": 32, "max_source_positions": 64,
        "max_target_positions": 32, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}, "frames"),
    _a("audio_spectrogram", "audio", "ASTForAudioClassification", "AST", {
        **_VISION, "max_length": 32, "num_mel_bins": 16, "patch_size": 8, "frequency_stride": 4,
        "time_stride": 4}, "patches"),
    _a("clip", "contrastive", "CLIPModel", "CLIP", _TOWERS, "contrast", fast=True),
    _a("siglip", "contrastive", "SiglipModel", "Siglip", {
        k: v for k, v in _TOWERS.items() if k != "projection_dim"}, "contrast"),
    _a("blip", "captioning", "BlipForConditionalGeneration", "Blip", {
        **_TOWERS, "text_config": {**_ENCODER, "encoder_hidden_size": 32}}, "caption"),
    _a("patchtst", "time series", "PatchTSTForPrediction", "PatchTST", {
        "num_input_channels": 2, "context_length": 32, "prediction_length": 8, "patch_length": 4,
        "patch_stride": 4, "d_model": 16, "num_attention_heads": 2, "num_hidden_layers": 2,
        "ffn_dim": 32}, "series"),
    _a("patchtsmixer", "time series", "PatchTSMixerForPrediction", "PatchTSMixer", {
        "num_input_channels": 2, "context_length": 32, "prediction_length": 8, "patch_length": 4,
        "patch_stride": 4, "d_model": 16, "num_layers": 2}, "series"),
)

BY_NAME = {a.name: a for a in ARCHITECTURES}

REFUSED = {
    "longformer": "if is_global_attn",
    "led": "if is_global_attn",
}
"""Architectures that have no static step, with a part of the error that the user gets."""
