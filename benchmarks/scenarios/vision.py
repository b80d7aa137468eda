"""Scenarios of `field.py`: models of transformers and timm for images and films."""

from __future__ import annotations

import functools
from typing import Any

import torch

from scenarios.base import Scenario, Task, classified, net
from scenarios.models import BATCHES, DETR, RESNET, VISION, WORDS, Architecture, architecture

STAGES = {"embedding_size": 16, "hidden_sizes": [16, 24, 32], "depths": [1, 1, 1]}
STAGED = {"model_type": "swin", "image_size": 64, "embed_dim": 16, "depths": [1, 1, 1, 1],
          "num_heads": [2, 2, 2, 2], "window_size": 4,
          "out_features": ["stage1", "stage2", "stage3", "stage4"]}
DETECTOR = {**DETR, "backbone_config": {
    **RESNET, "model_type": "resnet", "out_features": ["stage2", "stage3"]}}
FAST = {"encoder_hidden_dim": 32, "encoder_in_channels": [16, 16, 32], "encoder_layers": 1,
        "encoder_ffn_dim": 64, "encoder_attention_heads": 2, "d_model": 32, "num_queries": 20,
        "decoder_in_channels": [32, 32, 32], "decoder_ffn_dim": 64, "decoder_layers": 2,
        "decoder_attention_heads": 2, "num_denoising": 10, "num_labels": 5}
RT_RESNET = {"model_type": "rt_detr_resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 16, 32],
             "depths": [1, 1, 1, 1], "layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"]}
DINO = {**VISION, "model_type": "dinov2", "image_size": 32, "out_features": ["stage1", "stage2", "stage3"],
        "reshape_hidden_states": False}

BATCHES.update({
    "large image": lambda: {"pixel_values": torch.randn(4, 3, 64, 64), "labels": torch.randint(0, 2, (4,))},
    "pixels": lambda: {"pixel_values": torch.randn(4, 3, 32, 32)},
    "masked patches": lambda: {"pixel_values": torch.randn(2, 3, 32, 32),
                               "bool_masked_pos": torch.arange(16).expand(2, 16) % 2 == 0},
    "painted": lambda: {"pixel_values": torch.randn(2, 3, 64, 64)},
    "filmed": lambda: {"pixel_values": torch.randn(2, 4, 3, 32, 32), "labels": torch.randint(0, 2, (2,))},
    "clips": lambda: {"pixel_values_videos": torch.randn(2, 4, 3, 32, 32)},
    "boxes": lambda: {"pixel_values": torch.randn(2, 3, 64, 64), "labels": [
        {"class_labels": torch.randint(0, 5, (n,)), "boxes": 0.3 + 0.2 * torch.rand(n, 4)} for n in (2, 3)]},
    "boxed": lambda: {"pixel_values": torch.randn(2, 3, 64, 64), "labels": [
        {"class_labels": torch.randint(0, 5, (3,)), "boxes": 0.2 + 0.4 * torch.rand(3, 4)} for _ in "ab"]},
    "segmented": lambda: {"pixel_values": torch.randn(2, 3, 64, 64),
                          "labels": torch.randint(0, 2, (2, 64, 64))},
    "outlined": lambda: {
        "pixel_values": torch.randn(2, 3, 64, 64),
        "mask_labels": [torch.randint(0, 2, (3, 64, 64)).float() for _ in "ab"],
        "class_labels": [torch.randint(0, 5, (3,)) for _ in "ab"]},
    "clicks": lambda: {"pixel_values": torch.randn(1, 3, 64, 64),
                       "input_points": torch.tensor([[[[10.0, 20.0]]]]),
                       "input_labels": torch.tensor([[[1]]])},
    "prompted": lambda: {name: torch.randn(2, 3, 32, 32) for name in (
        "pixel_values", "prompt_pixel_values", "prompt_masks", "labels")},
    "depth": lambda: {"pixel_values": torch.randn(2, 3, 32, 32)},
})

ROWS: tuple[Architecture, ...] = (
    # Backbones for classes.
    ("vit", "ViTForImageClassification", "ViT", VISION, "image", 0.7),
    ("deit", "DeiTForImageClassification", "DeiT", VISION, "image", 0.7),
    ("beit", "BeitForImageClassification", "Beit", VISION, "image", 0.7),
    ("dinov2", "Dinov2ForImageClassification", "Dinov2", VISION, "image", 0.7),
    ("dinov3", "DINOv3ViTModel", "DINOv3ViT", {**VISION, "num_register_tokens": 2}, "pixels", 0.7),
    ("vit msn", "ViTMSNForImageClassification", "ViTMSN", VISION, "image", 0.6),
    ("ijepa", "IJepaForImageClassification", "IJepa", VISION, "image", 0.6),
    ("data2vec, images", "Data2VecVisionForImageClassification", "Data2VecVision", VISION, "image", 0.6),
    ("swin", "SwinForImageClassification", "Swin", {
        "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4],
        "window_size": 4}, "image", 0.7),
    ("swin v2", "Swinv2ForImageClassification", "Swinv2", {
        "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
        "window_size": 4}, "image", 0.6),
    ("cvt", "CvtForImageClassification", "Cvt", {
        "embed_dim": [16, 24, 32], "num_heads": [1, 2, 4], "depth": [1, 2, 3]}, "large image", 0.7),
    ("pvt v2", "PvtV2ForImageClassification", "PvtV2", {
        "image_size": 64, "hidden_sizes": [16, 24, 32, 32], "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 2, 4, 4]}, "large image", 0.7),
    ("levit", "LevitForImageClassification", "Levit", {
        "image_size": 64, "hidden_sizes": [16, 32, 48], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1],
        "key_dim": [8, 8, 8]}, "large image", 0.7),
    ("mobilevit", "MobileViTForImageClassification", "MobileViT", {
        "image_size": 32, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 32],
        "num_attention_heads": 2}, "image", 0.6),
    ("mobilevit v2", "MobileViTV2ForImageClassification", "MobileViTV2", {
        "image_size": 64, "width_multiplier": 0.25, "base_attn_unit_dims": [32, 48, 64],
        "n_attn_blocks": [1, 1, 1]}, "large image", 0.7),
    ("swiftformer", "SwiftFormerForImageClassification", "SwiftFormer", {
        "image_size": 64, "depths": [1, 1, 1, 1], "embed_dims": [16, 24, 32, 48], "drop_path_rate": 0.1},
     "large image", 0.7),
    ("poolformer", "PoolFormerForImageClassification", "PoolFormer", {
        "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}, "image", 0.8),
    ("focalnet", "FocalNetForImageClassification", "FocalNet", {
        "image_size": 32, "embed_dim": 16, "depths": [1, 1], "focal_levels": [2, 2], "focal_windows": [3, 3],
        "hidden_sizes": [16, 32]}, "image", 0.8),
    ("resnet", "ResNetForImageClassification", "ResNet", RESNET, "image", 0.7),
    ("regnet", "RegNetForImageClassification", "RegNet", {**STAGES, "groups_width": 8}, "image", 0.8),
    ("bit", "BitForImageClassification", "Bit", {
        "embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1], "num_groups": 8},
     "large image", 0.7),
    ("convnext", "ConvNextForImageClassification", "ConvNext", {
        "hidden_sizes": [16, 24, 32, 40], "depths": [1, 1, 2, 1], "drop_path_rate": 0.1}, "image", 0.7),
    ("convnext v2", "ConvNextV2ForImageClassification", "ConvNextV2", {
        "image_size": 64, "hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 1, 1]}, "large image", 0.6),
    ("efficientnet", "EfficientNetForImageClassification", "EfficientNet", {
        "image_size": 64, "width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
     "large image", 0.7),
    ("mobilenet v2", "MobileNetV2ForImageClassification", "MobileNetV2", {
        "image_size": 32, "depth_multiplier": 0.25}, "image", 0.9),
    ("imagegpt", "ImageGPTForImageClassification", "ImageGPT", {
        "vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, "sentence", 0.6),
    # Pre-training.
    ("vit_mae", "ViTMAEForPreTraining", "ViTMAE", {
        **VISION, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 2, "decoder_intermediate_size": 32}, "pixels", 0.7),
    ("vit, masked", "ViTForMaskedImageModeling", "ViT", {
        **VISION, "encoder_stride": 8}, "masked patches", 0.6),
    ("hiera, pre-training", "HieraForPreTraining", "Hiera", {
        "embed_dim": 8, "image_size": [64, 64], "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2],
        "decoder_hidden_size": 16, "decoder_depth": 1, "decoder_num_heads": 2}, "painted", 0.6),
    # Films.
    ("videomae", "VideoMAEForVideoClassification", "VideoMAE", {**VISION, "num_frames": 4}, "filmed", 0.7),
    ("vivit", "VivitForVideoClassification", "Vivit", {
        **VISION, "num_frames": 4, "tubelet_size": [2, 8, 8]}, "filmed", 0.7),
    ("timesformer", "TimesformerForVideoClassification", "Timesformer", {**VISION, "num_frames": 4},
     "filmed", 0.6),
    ("vjepa2", "VJEPA2Model", "VJEPA2", {
        "patch_size": 8, "crop_size": 32, "frames_per_clip": 4, "hidden_size": 32, "num_attention_heads": 4,
        "num_hidden_layers": 2, "pred_hidden_size": 24, "pred_num_attention_heads": 2,
        "pred_num_hidden_layers": 2, "pred_num_mask_tokens": 2, "mlp_ratio": 2}, "clips", 0.6),
    # Detection.
    ("yolos", "YolosForObjectDetection", "Yolos", {
        **VISION, "image_size": [64, 64], "num_detection_tokens": 6, "num_labels": 5}, "boxes", 0.8),
    ("deformable detr", "DeformableDetrForObjectDetection", "DeformableDetr", {
        **DETECTOR, "num_feature_levels": 3, "encoder_n_points": 2, "decoder_n_points": 2,
        "auxiliary_loss": True}, "boxed", 0.6),
    ("conditional detr", "ConditionalDetrForObjectDetection", "ConditionalDetr", DETECTOR, "boxed", 0.6),
    ("rt-detr", "RTDetrForObjectDetection", "RTDetr", {**FAST, "backbone_config": RT_RESNET}, "boxed", 0.7),
    ("rt-detr, without denoising", "RTDetrForObjectDetection", "RTDetr", {
        **FAST, "backbone_config": RT_RESNET, "num_denoising": 0}, "boxed", 0.6),
    ("rt-detr v2", "RTDetrV2ForObjectDetection", "RTDetrV2", {**FAST, "backbone_config": RT_RESNET},
     "boxed", 0.6),
    ("d-fine", "DFineForObjectDetection", "DFine", {
        **FAST, "backbone_config": {**RT_RESNET}, "lqe_hidden_dim": 8, "max_num_bins": 8}, "boxed", 0.6),
    ("rf-detr", "RfDetrForObjectDetection", "RfDetr", {
        "backbone_config": {"model_type": "rf_detr_dinov2", "hidden_size": 32, "num_hidden_layers": 2,
                            "num_attention_heads": 2, "image_size": 64, "patch_size": 8, "num_windows": 2,
                            "out_features": ["stage1", "stage2"]},
        "d_model": 32, "decoder_ffn_dim": 64, "decoder_layers": 2, "decoder_self_attention_heads": 2,
        "decoder_cross_attention_heads": 2, "decoder_n_points": 2, "num_queries": 10, "group_detr": 2,
        "num_labels": 5, "c2f_num_blocks": 1}, "boxed", 0.6),
    # Segmentation, depth, poses.
    ("segformer", "SegformerForSemanticSegmentation", "Segformer", {
        "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 4, 4],
        "decoder_hidden_size": 32, "num_labels": 2}, "segmented", 0.7),
    ("upernet", "UperNetForSemanticSegmentation", "UperNet", {
        "backbone_config": STAGED, "hidden_size": 16, "auxiliary_in_channels": 64, "auxiliary_channels": 16,
        "num_labels": 2}, "segmented", 0.6),
    ("dpt", "DPTForSemanticSegmentation", "DPT", {
        **VISION, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3],
        "neck_hidden_sizes": [8, 16, 16, 32], "fusion_hidden_size": 16, "num_labels": 2}, "depth", 0.6),
    ("maskformer", "MaskFormerForInstanceSegmentation", "MaskFormer", {
        "backbone_config": STAGED, "fpn_feature_size": 32, "mask_feature_size": 32, "num_labels": 5,
        "decoder_config": {"model_type": "detr", **{k: v for k, v in DETECTOR.items() if k not in (
            "backbone_config", "num_labels")}}}, "outlined", 0.6),
    ("mask2former", "Mask2FormerForUniversalSegmentation", "Mask2Former", {
        "backbone_config": STAGED, "feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32,
        "encoder_feedforward_dim": 64, "encoder_layers": 2, "decoder_layers": 3, "num_attention_heads": 2,
        "dim_feedforward": 64, "num_queries": 10, "train_num_points": 64, "num_labels": 5}, "outlined", 0.7),
    ("eomt", "EomtForUniversalSegmentation", "Eomt", {
        **VISION, "image_size": 64, "patch_size": 16, "num_blocks": 1, "num_queries": 8, "mlp_ratio": 2,
        "train_num_points": 64, "num_upscale_blocks": 1, "num_labels": 5}, "outlined", 0.6),
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
    ("seggpt", "SegGptForImageSegmentation", "SegGpt", {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": [64, 32],
        "patch_size": 8, "mlp_dim": 64, "pretrain_image_size": 32, "decoder_hidden_size": 8, "merge_index": 0,
        "intermediate_hidden_state_indices": [1, 2]}, "prompted", 0.6),
    ("glpn", "GLPNForDepthEstimation", "GLPN", {
        "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 4, 4],
        "decoder_hidden_size": 16}, "depth", 0.8),
    ("depth anything", "DepthAnythingForDepthEstimation", "DepthAnything", {
        "backbone_config": DINO, "patch_size": 8, "reassemble_hidden_size": 32,
        "reassemble_factors": [2, 1, 0.5], "neck_hidden_sizes": [8, 16, 32], "fusion_hidden_size": 16,
        "head_hidden_size": 8}, "depth", 0.6),
    ("vitpose", "VitPoseForPoseEstimation", "VitPose", {
        "backbone_config": {**VISION, "model_type": "vitpose_backbone", "image_size": [32, 32],
                            "patch_size": [8, 8], "out_indices": [3]}, "num_labels": 5}, "depth", 0.6),
)


def _pictured(timm: Any, name: str, size: int, options: dict[str, Any]) -> Task:
    model = timm.create_model(name, num_classes=10, **options).train()
    return classified(model, torch.randn(2, 3, size, size))


TIMM: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("resnet10t", 64, {}), ("mobilenetv3_small_050", 64, {}), ("convnext_atto", 64, {}),
    ("vit_tiny_patch16_224", 224, {"depth": 2}))

SCENARIOS: tuple[Scenario, ...] = (
    *(architecture(*row) for row in ROWS),
    architecture("detr", "DetrForObjectDetection", "Detr", DETR, "boxes", 0.8, "scipy"),
    *(net("timm", "timm", name, f'timm.create_model("{name}")', functools.partial(
        _pictured, name=name, size=size, options=options), budget=0.8) for name, size, options in TIMM),
)
