"""Scenarios of `field.py`: models of transformers for sound, and for series of numbers."""

from __future__ import annotations

import torch

from scenarios.base import Scenario
from scenarios.models import (
    BATCHES,
    BOTH,
    DECODER,
    ENCODER,
    MARK,
    SPEECH,
    TEXT,
    VISION,
    WHISPER,
    WORDS,
    Architecture,
    architecture,
    ids,
    marked,
)

CONFORMER = {**ENCODER, "feature_projection_input_dim": 16, "classifier_proj_size": 16,
             "conv_depthwise_kernel_size": 7, "mask_time_length": 2,
             "position_embeddings_type": "relative_key"}
SERIES = {"prediction_length": 4, "context_length": 12, "lags_sequence": [1, 2], "d_model": 32,
          "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
          "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
          "num_time_features": 2}
PATCHES = {"num_input_channels": 3, "context_length": 32, "patch_length": 8, "patch_stride": 8,
           "prediction_length": 8, "d_model": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
           "ffn_dim": 64, "num_layers": 2}

BATCHES.update({
    "sound": lambda: {"input_values": torch.randn(2, 1600), "labels": torch.randint(0, 2, (2,))},
    "spectrogram": lambda: {"input_values": torch.randn(4, 64, 16), "labels": torch.randint(0, 2, (4,))},
    "frames": lambda: {"input_features": torch.randn(2, 40, 16), "labels": ids(6, 2),
                       "attention_mask": torch.ones(2, 40).long()},
    "frames of a class": lambda: {"input_features": torch.randn(2, 40, 16),
                                  "labels": torch.randint(0, 2, (2,))},
    "tones": lambda: {"input_values": torch.randn(2, 1, 640)},
    "spectra of 8": lambda: {**marked(10), "input_features": torch.randn(2, 16, 40)},
    "audio of qwen": lambda: {**marked(10), "input_features": torch.randn(2, 16, 40),
                              "feature_attention_mask": torch.ones(2, 40).long()},
    "read aloud": lambda: {"input_ids": ids(8, 2), "attention_mask": torch.ones(2, 8).long(),
                           "labels": torch.randn(2, 12, 16),
                           "speaker_embeddings": torch.randn(2, 16)},
    "sound and text": lambda: {"input_ids": ids(8), "input_features": torch.randn(4, 1, 64, 16),
                               "is_longer": torch.zeros(4, 1).bool(), "return_loss": True},
    "forecast": lambda: {"past_values": torch.randn(4, 14), "past_time_features": torch.randn(4, 14, 2),
                         "past_observed_mask": torch.ones(4, 14), "future_values": torch.randn(4, 4),
                         "future_time_features": torch.randn(4, 4, 2)},
    "patches": lambda: {"past_values": torch.randn(4, 32, 3), "future_values": torch.randn(4, 8, 3)},
    "seen patches": lambda: {"past_values": torch.randn(4, 32, 3)},
    "continued": lambda: {"past_values": [torch.randn(32), torch.randn(24)],
                          "freq": [0, 1], "future_values": torch.randn(2, 8)},
    "continued, of one kind": lambda: {"past_values": [torch.randn(32), torch.randn(32)],
                                       "future_values": torch.randn(2, 8)},
    "trajectory": lambda: {
        "states": torch.randn(4, 8, 6), "actions": torch.randn(4, 8, 3), "rewards": torch.randn(4, 8, 1),
        "returns_to_go": torch.randn(4, 8, 1), "timesteps": torch.arange(8).expand(4, 8),
        "attention_mask": torch.ones(4, 8), "return_dict": True},
})

ROWS: tuple[Architecture, ...] = (
    # Speech to text.
    ("whisper", "WhisperForConditionalGeneration", "Whisper", WHISPER, "spectrum", 0.7),
    ("whisper, layer drop", "WhisperForConditionalGeneration", "Whisper", {
        **WHISPER, "encoder_layerdrop": 0.2, "decoder_layerdrop": 0.2, "apply_spec_augment": True,
        "mask_time_length": 2}, "spectrum", 0.9),
    ("wav2vec2, ctc", "Wav2Vec2ForCTC", "Wav2Vec2", {
        **SPEECH, "layerdrop": 0.0, "apply_spec_augment": False}, "spoken", 0.7),
    ("wav2vec2, default", "Wav2Vec2ForCTC", "Wav2Vec2", SPEECH, "spoken", 0.9),
    ("wav2vec2-bert, ctc", "Wav2Vec2BertForCTC", "Wav2Vec2Bert", {
        **CONFORMER, "left_max_position_embeddings": 8}, "frames", 0.6),
    ("wav2vec2-conformer", "Wav2Vec2ConformerForCTC", "Wav2Vec2Conformer", {
        **SPEECH, "conv_depthwise_kernel_size": 7, "layerdrop": 0.0}, "spoken", 0.6),
    ("moonshine", "MoonshineForConditionalGeneration", "Moonshine", {
        **TEXT, "hidden_size": 32, "intermediate_size": 64, "encoder_num_hidden_layers": 2,
        "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4,
        "max_position_embeddings": 64, "use_cache": False}, "spoken", 0.6),
    ("parakeet, ctc", "ParakeetForCTC", "ParakeetCTC", {
        "vocab_size": WORDS, "pad_token_id": 0, "encoder_config": {
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
            "num_mel_bins": 16, "subsampling_conv_channels": 8, "subsampling_factor": 2}}, "frames", 0.6),
    ("speech to text", "Speech2TextForConditionalGeneration", "Speech2Text", {
        **BOTH, "input_feat_per_channel": 16, "conv_channels": 32, "max_source_positions": 64,
        "max_target_positions": 64}, "frames", 0.6),
    ("seamless, speech to text", "SeamlessM4TForSpeechToText", "SeamlessM4T", {
        **{k: v for k, v in BOTH.items() if k != "d_model"}, "hidden_size": 32, "speech_encoder_layers": 2,
        "speech_encoder_attention_heads": 4, "speech_encoder_intermediate_size": 64,
        "feature_projection_input_dim": 16, "conv_depthwise_kernel_size": 7, "adaptor_kernel_size": 4,
        "adaptor_stride": 4, "t2u_encoder_layers": 1, "t2u_decoder_layers": 1, "t2u_vocab_size": WORDS,
        "max_source_positions": 64}, "frames", 0.6),
    # Classes.
    ("hubert, default", "HubertForSequenceClassification", "Hubert", SPEECH, "sound", 0.9),
    ("wavlm", "WavLMForSequenceClassification", "WavLM", {
        **SPEECH, "layerdrop": 0.0, "apply_spec_augment": False}, "sound", 0.8),
    ("sew", "SEWForSequenceClassification", "SEW", {
        **SPEECH, "layerdrop": 0.0, "apply_spec_augment": False, "squeeze_factor": 2}, "sound", 0.8),
    ("unispeech-sat", "UniSpeechSatForSequenceClassification", "UniSpeechSat", SPEECH, "sound", 0.6),
    ("wav2vec2-bert, classes", "Wav2Vec2BertForSequenceClassification", "Wav2Vec2Bert", {
        **CONFORMER, "layerdrop": 0.0, "apply_spec_augment": False}, "frames of a class", 0.6),
    ("spectrogram transformer", "ASTForAudioClassification", "AST", {
        **VISION, "patch_size": 4, "frequency_stride": 4, "time_stride": 4, "max_length": 64,
        "num_mel_bins": 16}, "spectrogram", 0.7),
    # Sound with text, sound made again.
    ("voxtral", "VoxtralForConditionalGeneration", "Voxtral", {
        "text_config": {**DECODER, "model_type": "llama"}, "audio_token_id": MARK, "audio_config": {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_mel_bins": 16, "max_source_positions": 20}}, "spectra of 8", 0.6),
    ("qwen2-audio", "Qwen2AudioForConditionalGeneration", "Qwen2Audio", {
        "text_config": {**DECODER, "model_type": "qwen2"}, "audio_token_index": MARK, "audio_config": {
            "d_model": 32, "encoder_ffn_dim": 64, "encoder_layers": 2, "encoder_attention_heads": 4,
            "num_mel_bins": 16, "max_source_positions": 20}}, "audio of qwen", 0.6),
    ("clap", "ClapModel", "Clap", {
        "text_config": {**ENCODER, "projection_dim": 16}, "projection_dim": 16, "audio_config": {
            "window_size": 4, "num_mel_bins": 16, "spec_size": 32, "patch_size": 4, "patch_stride": [4, 4],
            "hidden_size": 32, "projection_dim": 16, "depths": [1, 1], "num_attention_heads": [2, 2],
            "patch_embeds_hidden_size": 16, "num_hidden_layers": 2}}, "sound and text", 0.6),
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
    # Series.
    ("time series", "TimeSeriesTransformerForPrediction", "TimeSeriesTransformer", SERIES, "forecast", 0.8),
    ("patchtst", "PatchTSTForPrediction", "PatchTST", PATCHES, "patches", 0.7),
    ("patchtst, pre-training", "PatchTSTForPretraining", "PatchTST", {
        **{k: v for k, v in PATCHES.items() if k != "prediction_length"}, "do_mask_input": True,
        "random_mask_ratio": 0.4}, "seen patches", 0.7),
    ("patchtsmixer", "PatchTSMixerForPrediction", "PatchTSMixer", PATCHES, "patches", 0.7),
    ("decision transformer", "DecisionTransformerModel", "DecisionTransformer", {
        "state_dim": 6, "act_dim": 3, "hidden_size": 32, "max_ep_len": 16, "n_layer": 2, "n_head": 4,
        "vocab_size": 1}, "trajectory", 0.8),
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
SKIP_LAYERS = ("autoformer",)
"""Models in which layers drop out at random."""
SCENARIOS: tuple[Scenario, ...] = tuple(
    architecture(*row, skips_layers=row[0] in SKIP_LAYERS) for row in ROWS)
