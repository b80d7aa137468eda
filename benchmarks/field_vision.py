"""Further scenarios of `field.py`: more models of transformers for images, and for images with text."""

from __future__ import annotations

from typing import Any

import torch
from field_architectures import architecture
from field_newer import GRID, IMAGE, PLACES, ROPE
from field_scenarios import BATCHES, BOTH, DECODER, ENCODER, RESNET, VISION, WORDS, Scenario, ids

TOWER = {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False}
LLAMA = {**DECODER, "model_type": "llama"}
GEMMA = {**DECODER, "model_type": "gemma", "head_dim": 8}
STAGED = {"model_type": "swin", "image_size": 64, "embed_dim": 16, "depths": [1, 1, 1, 1],
          "num_heads": [2, 2, 2, 2], "window_size": 4,
          "out_features": ["stage1", "stage2", "stage3", "stage4"]}
BACKBONE = {**RESNET, "model_type": "resnet", "out_features": ["stage2", "stage3"]}
DETECTOR = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 10,
            "num_labels": 5, "backbone_config": BACKBONE}
FAST = {"encoder_hidden_dim": 32, "encoder_in_channels": [16, 16, 32], "encoder_layers": 1,
        "encoder_ffn_dim": 64, "encoder_attention_heads": 2, "d_model": 32, "num_queries": 20,
        "decoder_in_channels": [32, 32, 32], "decoder_ffn_dim": 64, "decoder_layers": 2,
        "decoder_attention_heads": 2, "num_denoising": 10, "num_labels": 5}
RT_RESNET = {"model_type": "rt_detr_resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 16, 32],
             "depths": [1, 1, 1, 1], "layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"]}
DINO = {**VISION, "model_type": "dinov2", "image_size": 32, "out_features": ["stage1", "stage2", "stage3"],
        "reshape_hidden_states": False}


def _told(parts: int, **others: Any) -> dict[str, Any]:
    words = ids(batch=2).clamp(min=10)
    words[:, 2:2 + parts] = IMAGE
    return {"input_ids": words, "labels": words.masked_fill(words == IMAGE, -100), **others}


def _asked() -> dict[str, Any]:
    words = ids(8, 2).clamp(min=10)
    return {"input_ids": words, "labels": words.clone(), "pixel_values": torch.randn(2, 3, 32, 32)}




def _sized() -> dict[str, Any]:
    words = ids(batch=2).clamp(min=10)
    words[0, 2:18] = IMAGE
    words[1, 2:10] = IMAGE
    return {"input_ids": words, "labels": words.masked_fill(words == IMAGE, -100),
            "pixel_values": torch.randn(96, 96), "image_grid_thw": torch.tensor([[1, 8, 8], [1, 4, 8]])}


def _anyres() -> dict[str, Any]:
    """Two crops an image: the whole, and one tile of it."""
    words = ids(48, 2).clamp(min=10)
    words[:, 2:2 + 16 + 20] = IMAGE
    return {"input_ids": words, "labels": words.masked_fill(words == IMAGE, -100),
            "pixel_values": torch.randn(2, 2, 3, 32, 32), "image_sizes": torch.tensor([[32, 32]] * 2)}


BATCHES.update({
    "patches of two sizes": lambda: {
        **(g := _sized()), "mm_token_type_ids": (g["input_ids"] == IMAGE).int()},
    "tiles": lambda: _told(4, pixel_values=torch.randn(2, 1, 3, 32, 32)),
    "prefix": lambda: {**(g := _told(16, pixel_values=torch.randn(2, 3, 32, 32))),
                       "token_type_ids": (g["input_ids"] != IMAGE).int()},
    "sized": lambda: _told(4, pixel_values=torch.randn(2, 3, 32, 32),
                           image_sizes=torch.tensor([[32, 32]] * 2)),
    "anyres": _anyres,
    "grounded": lambda: {**_told(4, pixel_values=torch.randn(2, 3, 32, 32)), "image_embeds_position_mask": (
        _told(4)["input_ids"] == IMAGE)},
    "captioned": _asked,
    "shown 17": lambda: _told(17, pixel_values=torch.randn(2, 3, 32, 32)),
    "large image": lambda: {"pixel_values": torch.randn(4, 3, 64, 64), "labels": torch.randint(0, 2, (4,))},
    "clips": lambda: {"pixel_values_videos": torch.randn(2, 4, 3, 32, 32)},
    "clicks": lambda: {"pixel_values": torch.randn(1, 3, 64, 64),
                       "input_points": torch.tensor([[[[10.0, 20.0]]]]),
                       "input_labels": torch.tensor([[[1]]])},
    "depths": lambda: {"pixel_values": torch.randn(2, 3, 32, 32)},
    "painted": lambda: {"pixel_values": torch.randn(2, 3, 64, 64)},
    "prompted": lambda: {name: torch.randn(2, 3, 32, 32) for name in (
        "pixel_values", "prompt_pixel_values", "prompt_masks", "labels")},
})
ROWS: tuple[tuple[str, str, str, dict[str, Any], str, float], ...] = (
    # Images with text.
    ("qwen3-vl", "Qwen3VLForConditionalGeneration", "Qwen3VL", {
        "text_config": {**DECODER, "head_dim": 8, "rope_parameters": ROPE},
        "vision_config": {**GRID, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}, **PLACES},
     "patched", 0.6),
    ("qwen3-vl, two sizes", "Qwen3VLForConditionalGeneration", "Qwen3VL", {
        "text_config": {**DECODER, "head_dim": 8, "rope_parameters": ROPE},
        "vision_config": {**GRID, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}, **PLACES},
     "patches of two sizes", 0.6),
    ("qwen2-vl", "Qwen2VLForConditionalGeneration", "Qwen2VL", {
        "text_config": {**DECODER, "rope_parameters": ROPE},
        "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4,
                          "mlp_ratio": 2}, **PLACES}, "patches of two sizes", 0.6),
    ("smolvlm", "SmolVLMForConditionalGeneration", "SmolVLM", {
        "text_config": LLAMA, "vision_config": VISION, "image_token_id": IMAGE, "scale_factor": 2},
     "tiles", 0.6),
    ("idefics3", "Idefics3ForConditionalGeneration", "Idefics3", {
        "text_config": LLAMA, "vision_config": VISION, "image_token_id": IMAGE, "scale_factor": 2},
     "tiles", 0.6),
    ("internvl", "InternVLForConditionalGeneration", "InternVL", {
        "text_config": {**DECODER, "model_type": "qwen2"}, "image_token_id": IMAGE,
        "vision_config": {**VISION, "image_size": [32, 32], "patch_size": [8, 8]}}, "shown 4", 0.6),
    ("paligemma", "PaliGemmaForConditionalGeneration", "PaliGemma", {
        "text_config": GEMMA, "vision_config": TOWER, "image_token_index": IMAGE, "projection_dim": 32,
        "hidden_size": 32}, "prefix", 0.6),
    ("llama4, images", "Llama4ForConditionalGeneration", "Llama4", {
        "text_config": {**DECODER, "head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 64,
                        "attention_chunk_size": 8}, "image_token_index": IMAGE,
        "vision_config": {**VISION, "vision_output_dim": 32, "projector_input_dim": 32,
                          "projector_output_dim": 32, "intermediate_size": 128}}, "shown 4", 0.6),
    ("mistral3", "Mistral3ForConditionalGeneration", "Mistral3", {
        "text_config": {**DECODER, "model_type": "mistral", "head_dim": 8}, "image_token_index": IMAGE,
        "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 8}}, "sized", 0.6),
    ("kosmos2", "Kosmos2ForConditionalGeneration", "Kosmos2", {
        "text_config": {"vocab_size": WORDS, "max_position_embeddings": 64, "embed_dim": 32, "layers": 2,
                        "ffn_dim": 64, "attention_heads": 4, "use_cache": False},
        "vision_config": VISION, "latent_query_num": 4}, "grounded", 0.6),
    ("llava-next", "LlavaNextForConditionalGeneration", "LlavaNext", {
        "text_config": LLAMA, "image_token_index": IMAGE, "image_grid_pinpoints": [[32, 32]],
        "vision_config": {**VISION, "model_type": "clip_vision_model", "projection_dim": 16}}, "anyres", 0.6),
    ("llava-onevision", "LlavaOnevisionForConditionalGeneration", "LlavaOnevision", {
        "text_config": {**DECODER, "model_type": "qwen2"}, "image_token_index": IMAGE, "video_token_index": 6,
        "vision_config": TOWER, "image_grid_pinpoints": [[32, 32]]}, "anyres", 0.6),
    ("blip-2", "Blip2ForConditionalGeneration", "Blip2", {
        "text_config": {**{k: v for k, v in ENCODER.items() if k != "intermediate_size"},
                        "model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 32},
        "vision_config": VISION, "num_query_tokens": 4, "image_token_index": IMAGE,
        "qformer_config": {**ENCODER, "encoder_hidden_size": 32}}, "shown 4", 0.6),
    ("blip", "BlipForConditionalGeneration", "Blip", {
        "text_config": {**ENCODER, "encoder_hidden_size": 32, "projection_dim": 16},
        "vision_config": {**VISION, "projection_dim": 16}, "projection_dim": 16}, "captioned", 0.6),
    ("git", "GitForCausalLM", "Git", {**ENCODER, "vision_config": VISION, "use_cache": False},
     "captioned", 0.6),
    ("florence2", "Florence2ForConditionalGeneration", "Florence2", {
        "text_config": {**BOTH, "model_type": "bart"}, "image_token_id": IMAGE,
        "vision_config": {"depths": [1, 1], "patch_size": [7, 3], "patch_stride": [4, 2],
                          "patch_padding": [3, 1], "patch_prenorm": [False, True], "embed_dim": [16, 32],
                          "num_heads": [2, 4], "num_groups": [2, 4], "window_size": 4, "projection_dim": 32,
                          "max_temporal_embeddings": 4, "max_position_embeddings": 16}}, "shown 17", 0.6),
    # Detection.
    ("deformable detr", "DeformableDetrForObjectDetection", "DeformableDetr", {
        **DETECTOR, "num_feature_levels": 3, "encoder_n_points": 2, "decoder_n_points": 2,
        "auxiliary_loss": True}, "boxed", 0.6),
    ("conditional detr", "ConditionalDetrForObjectDetection", "ConditionalDetr", DETECTOR, "boxed", 0.6),
    ("rt-detr v2", "RTDetrV2ForObjectDetection", "RTDetrV2", {**FAST, "backbone_config": RT_RESNET},
     "boxed", 0.6),
    ("d-fine", "DFineForObjectDetection", "DFine", {
        **FAST, "backbone_config": {**RT_RESNET}, "lqe_hidden_dim": 8, "max_num_bins": 8}, "boxed", 0.6),
    ("rt-detr, without denoising", "RTDetrForObjectDetection", "RTDetr", {
        **FAST, "backbone_config": RT_RESNET, "num_denoising": 0}, "boxed", 0.6),
    ("rf-detr", "RfDetrForObjectDetection", "RfDetr", {
        "backbone_config": {"model_type": "rf_detr_dinov2", "hidden_size": 32, "num_hidden_layers": 2,
                            "num_attention_heads": 2, "image_size": 64, "patch_size": 8, "num_windows": 2,
                            "out_features": ["stage1", "stage2"]},
        "d_model": 32, "decoder_ffn_dim": 64, "decoder_layers": 2, "decoder_self_attention_heads": 2,
        "decoder_cross_attention_heads": 2, "decoder_n_points": 2, "num_queries": 10, "group_detr": 2,
        "num_labels": 5, "c2f_num_blocks": 1}, "boxed", 0.6),
    # Segmentation, depth, poses.
    ("eomt", "EomtForUniversalSegmentation", "Eomt", {
        **VISION, "image_size": 64, "patch_size": 16, "num_blocks": 1, "num_queries": 8, "mlp_ratio": 2,
        "train_num_points": 64, "num_upscale_blocks": 1, "num_labels": 5}, "outlined", 0.6),
    ("maskformer", "MaskFormerForInstanceSegmentation", "MaskFormer", {
        "backbone_config": STAGED, "fpn_feature_size": 32, "mask_feature_size": 32, "num_labels": 5,
        "decoder_config": {"model_type": "detr", **{k: v for k, v in DETECTOR.items() if k not in (
            "backbone_config", "num_labels")}}}, "outlined", 0.6),
    ("sam2", "Sam2Model", "Sam2", {
        "vision_config": {"backbone_config": {
            "model_type": "sam2_hiera_det_model", "hidden_size": 8, "image_size": [64, 64],
            "window_positional_embedding_background_size": [2, 2],
            "blocks_per_stage": [1, 1, 2, 1], "embed_dim_per_stage": [8, 16, 32, 64],
            "num_attention_heads_per_stage": [1, 1, 2, 2], "window_size_per_stage": [8, 4, 4, 2],
            "global_attention_blocks": [3], "num_query_pool_stages": 3},
            "backbone_channel_list": [64, 32, 16, 8], "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
            "fpn_hidden_size": 32},
        "prompt_encoder_config": {"hidden_size": 32, "image_size": 64},
        "mask_decoder_config": {"hidden_size": 32, "mlp_dim": 32, "num_hidden_layers": 1,
                                "num_attention_heads": 2, "iou_head_hidden_dim": 16}}, "clicks", 0.6),
    ("depth anything", "DepthAnythingForDepthEstimation", "DepthAnything", {
        "backbone_config": DINO, "patch_size": 8, "reassemble_hidden_size": 32,
        "reassemble_factors": [2, 1, 0.5], "neck_hidden_sizes": [8, 16, 32], "fusion_hidden_size": 16,
        "head_hidden_size": 8}, "depths", 0.6),
    ("dpt", "DPTForSemanticSegmentation", "DPT", {
        **VISION, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3],
        "neck_hidden_sizes": [8, 16, 16, 32],
        "fusion_hidden_size": 16, "num_labels": 2}, "depths", 0.6),
    ("upernet", "UperNetForSemanticSegmentation", "UperNet", {
        "backbone_config": STAGED, "hidden_size": 16, "auxiliary_in_channels": 64, "auxiliary_channels": 16,
        "num_labels": 2}, "segmented", 0.6),
    ("vitpose", "VitPoseForPoseEstimation", "VitPose", {
        "backbone_config": {**VISION, "model_type": "vitpose_backbone", "image_size": [32, 32],
                            "patch_size": [8, 8], "out_indices": [3]}, "num_labels": 5}, "depths", 0.6),
    ("seggpt", "SegGptForImageSegmentation", "SegGpt", {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": [64, 32],
        "patch_size": 8, "mlp_dim": 64, "pretrain_image_size": 32, "decoder_hidden_size": 8, "merge_index": 0,
        "intermediate_hidden_state_indices": [1, 2]}, "prompted", 0.6),
    # Backbones.
    ("swin v2", "Swinv2ForImageClassification", "Swinv2", {
        "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
        "window_size": 4}, "image", 0.6),
    ("hiera, pre-training", "HieraForPreTraining", "Hiera", {
        "embed_dim": 8, "image_size": [64, 64], "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2],
        "decoder_hidden_size": 16, "decoder_depth": 1, "decoder_num_heads": 2}, "painted", 0.6),
    ("mobilevit", "MobileViTForImageClassification", "MobileViT", {
        "image_size": 32, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 32],
        "num_attention_heads": 2}, "image", 0.6),
    ("levit", "LevitForImageClassification", "Levit", {
        "image_size": 64, "hidden_sizes": [16, 32, 48], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1],
        "key_dim": [8, 8, 8]}, "large image", 0.7),
    ("timesformer", "TimesformerForVideoClassification", "Timesformer", {**VISION, "num_frames": 4},
     "filmed", 0.6),
    ("vjepa2", "VJEPA2Model", "VJEPA2", {
        "patch_size": 8, "crop_size": 32, "frames_per_clip": 4, "hidden_size": 32, "num_attention_heads": 4,
        "num_hidden_layers": 2, "pred_hidden_size": 24, "pred_num_attention_heads": 2,
        "pred_num_hidden_layers": 2, "pred_num_mask_tokens": 2, "mlp_ratio": 2}, "clips", 0.6),
)
"""Name, model, configuration, its options, batch, budget."""
SCENARIOS: tuple[Scenario, ...] = tuple(architecture(*row) for row in ROWS)
