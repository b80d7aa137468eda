"""Further scenarios of `field.py`: more models of transformers for sound."""

from __future__ import annotations

from typing import Any

import torch
from field_architectures import architecture
from field_scenarios import BATCHES, BOTH, DECODER, ENCODER, SPEECH, TEXT, WORDS, Scenario, ids

SOUND = 5
"""The word that stands for a part of a recording."""
CONFORMER = {**ENCODER, "feature_projection_input_dim": 16, "classifier_proj_size": 16,
             "conv_depthwise_kernel_size": 7, "mask_time_length": 2,
             "position_embeddings_type": "relative_key"}


def _heard(parts: int, **others: Any) -> dict[str, Any]:
    words = ids(batch=2).clamp(min=10)
    words[:, 2:2 + parts] = SOUND
    return {"input_ids": words, "labels": words.masked_fill(words == SOUND, -100), **others}


BATCHES.update({
    "frames": lambda: {"input_features": torch.randn(2, 40, 16), "labels": ids(6, 2),
                       "attention_mask": torch.ones(2, 40).long()},
    "frames of a class": lambda: {"input_features": torch.randn(2, 40, 16),
                                  "labels": torch.randint(0, 2, (2,))},
    "waves": lambda: {"input_values": torch.randn(2, 1600), "labels": ids(8, 2)},
    "tones": lambda: {"input_values": torch.randn(2, 1, 640)},
    "spectra of 8": lambda: _heard(10, input_features=torch.randn(2, 16, 40)),
    "audio of qwen": lambda: _heard(10, input_features=torch.randn(2, 16, 40),
                                    feature_attention_mask=torch.ones(2, 40).long()),
    "read aloud": lambda: {"input_ids": ids(8, 2), "attention_mask": torch.ones(2, 8).long(),
                           "labels": torch.randn(2, 12, 16),
                           "speaker_embeddings": torch.randn(2, 16)},
    "sound and text": lambda: {"input_ids": ids(8), "input_features": torch.randn(4, 1, 64, 16),
                               "is_longer": torch.zeros(4, 1).bool(), "return_loss": True},
})


ROWS: tuple[tuple[str, str, str, dict[str, Any], str, float], ...] = (
    ("moonshine", "MoonshineForConditionalGeneration", "Moonshine", {
        **TEXT, "hidden_size": 32, "intermediate_size": 64, "encoder_num_hidden_layers": 2,
        "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4,
        "max_position_embeddings": 64, "use_cache": False}, "waves", 0.6),
    ("parakeet, ctc", "ParakeetForCTC", "ParakeetCTC", {
        "vocab_size": WORDS, "pad_token_id": 0, "encoder_config": {
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
            "num_mel_bins": 16, "subsampling_conv_channels": 8, "subsampling_factor": 2}}, "frames", 0.6),
    ("wav2vec2-bert, ctc", "Wav2Vec2BertForCTC", "Wav2Vec2Bert", {
        **CONFORMER, "left_max_position_embeddings": 8}, "frames", 0.6),
    ("wav2vec2-bert, classes", "Wav2Vec2BertForSequenceClassification", "Wav2Vec2Bert", {
        **CONFORMER, "layerdrop": 0.0, "apply_spec_augment": False}, "frames of a class", 0.6),
    ("wav2vec2-conformer", "Wav2Vec2ConformerForCTC", "Wav2Vec2Conformer", {
        **SPEECH, "conv_depthwise_kernel_size": 7, "layerdrop": 0.0}, "waves", 0.6),
    ("unispeech-sat", "UniSpeechSatForSequenceClassification", "UniSpeechSat", SPEECH, "sound", 0.6),
    ("speech to text", "Speech2TextForConditionalGeneration", "Speech2Text", {
        **BOTH, "input_feat_per_channel": 16, "conv_channels": 32, "max_source_positions": 64,
        "max_target_positions": 64}, "frames", 0.6),
    ("seamless, speech to text", "SeamlessM4TForSpeechToText", "SeamlessM4T", {
        **{k: v for k, v in BOTH.items() if k != "d_model"}, "hidden_size": 32, "speech_encoder_layers": 2,
        "speech_encoder_attention_heads": 4, "speech_encoder_intermediate_size": 64,
        "feature_projection_input_dim": 16, "conv_depthwise_kernel_size": 7, "adaptor_kernel_size": 4,
        "adaptor_stride": 4, "t2u_encoder_layers": 1, "t2u_decoder_layers": 1, "t2u_vocab_size": WORDS,
        "max_source_positions": 64}, "frames", 0.6),
    ("speecht5, speech", "SpeechT5ForTextToSpeech", "SpeechT5", {
        **TEXT, "hidden_size": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64,
        "decoder_layers": 2, "decoder_ffn_dim": 64, "decoder_attention_heads": 4, "num_mel_bins": 16,
        "speech_decoder_prenet_units": 16, "speaker_embedding_dim": 16, "speech_decoder_postnet_units": 16,
        "max_speech_positions": 64, "max_text_positions": 64, "use_cache": False}, "read aloud", 0.6),
    ("encodec", "EncodecModel", "Encodec", {
        "hidden_size": 16, "num_filters": 4, "upsampling_ratios": [4, 2], "codebook_size": 32,
        "target_bandwidths": [30.0], "num_lstm_layers": 1}, "tones", 0.6),
    ("mimi", "MimiModel", "Mimi", {
        "hidden_size": 32, "num_filters": 4, "upsampling_ratios": [4, 2], "codebook_size": 32,
        "codebook_dim": 16, "num_quantizers": 4, "vector_quantization_hidden_dimension": 16,
        "upsample_groups": 32, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 4, "sliding_window": 16, "frame_rate": 1500}, "tones", 0.6),
    ("dac", "DacModel", "Dac", {
        "encoder_hidden_size": 8, "downsampling_ratios": [2, 4], "decoder_hidden_size": 32, "n_codebooks": 3,
        "codebook_size": 32, "codebook_dim": 4}, "tones", 0.6),
    ("voxtral", "VoxtralForConditionalGeneration", "Voxtral", {
        "text_config": {**DECODER, "model_type": "llama"}, "audio_token_id": SOUND, "audio_config": {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_mel_bins": 16, "max_source_positions": 20}}, "spectra of 8", 0.6),
    ("qwen2-audio", "Qwen2AudioForConditionalGeneration", "Qwen2Audio", {
        "text_config": {**DECODER, "model_type": "qwen2"}, "audio_token_index": SOUND, "audio_config": {
            "d_model": 32, "encoder_ffn_dim": 64, "encoder_layers": 2, "encoder_attention_heads": 4,
            "num_mel_bins": 16, "max_source_positions": 20}}, "audio of qwen", 0.6),
    ("clap", "ClapModel", "Clap", {
        "text_config": {**ENCODER, "projection_dim": 16}, "projection_dim": 16, "audio_config": {
            "window_size": 4, "num_mel_bins": 16, "spec_size": 32, "patch_size": 4, "patch_stride": [4, 4],
            "hidden_size": 32, "projection_dim": 16, "depths": [1, 1], "num_attention_heads": [2, 2],
            "patch_embeds_hidden_size": 16, "num_hidden_layers": 2}}, "sound and text", 0.6),
)
"""Name, model, configuration, its options, batch, budget."""

SCENARIOS: tuple[Scenario, ...] = tuple(architecture(*row) for row in ROWS)
