"""Scenarios of `field.py`: models of transformers for images with text."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from scenarios.base import Scenario, Task, looped
from scenarios.models import (
    BATCHES,
    BOTH,
    DECODER,
    ENCODER,
    MARK,
    TEXT,
    VISION,
    WORDS,
    Architecture,
    architecture,
    calling,
    ids,
    made,
    marked,
)

TOWERS = {"text_config": {**ENCODER, "projection_dim": 16}, "vision_config": {**VISION, "projection_dim": 16},
          "projection_dim": 16}
GRID = {"depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 64, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
PLACES = {"image_token_id": MARK, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
TOWER = {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False}
LLAMA = {**DECODER, "model_type": "llama"}
GEMMA = {**DECODER, "model_type": "gemma", "head_dim": 8}


def _shown(parts: int | list[int], *shape: int, length: int = 24, **others: Any) -> dict[str, Any]:
    return {**marked(parts, length), "pixel_values": torch.randn(*(shape or (2, 3, 32, 32))), **others}


def _in_grids(parts: list[int], *heights: int) -> dict[str, Any]:
    """Patches of images of these heights, as Qwen's models get them."""
    given = _shown(parts, 8 * sum(heights), 96, image_grid_thw=torch.tensor([[1, h, 8] for h in heights]))
    return {**given, "mm_token_type_ids": (given["input_ids"] == MARK).int()}


BATCHES.update({
    "contrast": lambda: {"input_ids": ids(8), "pixel_values": torch.randn(4, 3, 32, 32),
                         "return_loss": True},
    "naflex": lambda: {
        "input_ids": ids(8), "pixel_values": torch.randn(4, 16, 192), "return_loss": True,
        "pixel_attention_mask": torch.ones(4, 16).int(), "spatial_shapes": torch.tensor([[4, 4]] * 4)},
    "shown 4": lambda: _shown(4),
    "shown 16": lambda: _shown(16),
    "shown 17": lambda: _shown(17),
    "patched": lambda: _in_grids([16, 16], 8, 8),
    "patches of two sizes": lambda: _in_grids([16, 8], 8, 4),
    "tiles": lambda: _shown(4, 2, 1, 3, 32, 32),
    "a whole and a tile": lambda: _shown(
        36, 2, 2, 3, 32, 32, length=48, image_sizes=torch.tensor([[32, 32]] * 2)),
    "prefix": lambda: {**(g := _shown(16)), "token_type_ids": (g["input_ids"] != MARK).int()},
    "sized": lambda: _shown(4, image_sizes=torch.tensor([[32, 32]] * 2)),
    "grounded": lambda: {**(g := _shown(4)), "image_embeds_position_mask": g["input_ids"] == MARK},
    "captioned": lambda: _shown(0, length=8),
    "stretches": lambda: {"flattened_patches": torch.cat([
        torch.ones(2, 12, 2), torch.randn(2, 12, 48)], 2), "labels": ids(8, 2)},
    "queries": lambda: {"input_ids": ids(8, 4), "pixel_values": torch.randn(2, 3, 32, 32)},
    "asked of an image": lambda: {"input_ids": ids(8), "pixel_values": torch.randn(4, 3, 32, 32),
                                  "labels": torch.rand(4, 3)},
    "seen regions": lambda: {
        "input_ids": ids(), "visual_embeds": torch.randn(4, 6, 16), "labels": torch.randint(0, 2, (4,))},
    "regions": lambda: {
        "input_ids": ids(), "visual_feats": torch.randn(4, 6, 16), "visual_pos": torch.rand(4, 6, 4),
        "labels": ids()},
    "words of a page": lambda: {
        "input_ids": ids(), "bbox": torch.tensor([1, 2, 30, 40]).expand(4, 24, 4),
        "labels": torch.randint(0, 2, (4, 24))},
    "page": lambda: {
        "input_ids": ids(), "bbox": torch.tensor([1, 2, 30, 40]).expand(4, 24, 4),
        "pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, 2, (4, 24))},
})


def by_features(model: Any, batch: dict[str, Any]) -> Task:
    """A step of contrast by the methods of the two towers."""
    def features(output: Any) -> torch.Tensor:
        return output if isinstance(output, torch.Tensor) else output.pooler_output

    def step(m: Any) -> torch.Tensor:
        text = features(m.get_text_features(batch["input_ids"]))
        image = features(m.get_image_features(batch["pixel_values"]))
        return F.cross_entropy(text @ image.T, torch.arange(4))
    return Task(model, step)


def _other_grids() -> Task:
    """The vision tower of Qwen2-VL, whose images have other sizes in each batch."""
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    model = Qwen2VisionTransformerPretrainedModel(Qwen2VLVisionConfig(
        depth=3, embed_dim=32, hidden_size=32, num_heads=4, patch_size=4, mlp_ratio=2)).train()
    grids = [torch.tensor(grid) for grid in ([[1, 8, 8], [1, 4, 8]], [[1, 4, 4], [1, 16, 4]], [[1, 8, 12]])]
    pictures = [torch.randn(int(grid.prod(-1).sum()), 96) for grid in grids]

    def loss(m: Any, number: int) -> torch.Tensor:
        found = m(pictures[number % 3], grid_thw=grids[number % 3])
        return (found if isinstance(found, torch.Tensor) else found[0]).square().mean()
    return looped(model, loss)


def _llama4() -> Task:
    """A Llama 4 that sees. Its forward in transformers 5.24 reads `image_outputs` of what its language model
    returns, which has no such field."""
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast

    if not hasattr(MoeCausalLMOutputWithPast, "image_outputs"):
        MoeCausalLMOutputWithPast.image_outputs = None
    return calling(made("Llama4ForConditionalGeneration", "Llama4", {
        "text_config": {**DECODER, "head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 64,
                        "attention_chunk_size": 8}, "image_token_index": MARK,
        "vision_config": {**VISION, "vision_output_dim": 32, "projector_input_dim": 32,
                          "projector_output_dim": 32, "intermediate_size": 128}}), BATCHES["shown 4"]())


ROWS: tuple[Architecture, ...] = (
    # Contrast.
    ("clip", "CLIPModel", "CLIP", TOWERS, "contrast", 0.7),
    ("siglip", "SiglipModel", "Siglip", {"text_config": ENCODER, "vision_config": VISION}, "contrast", 0.7),
    ("siglip2", "Siglip2Model", "Siglip2", {
        "text_config": ENCODER, "vision_config": {**VISION, "num_patches": 16}}, "naflex", 0.7),
    ("altclip", "AltCLIPModel", "AltCLIP", {
        "text_config": {**ENCODER, "project_dim": 16}, "vision_config": VISION, "projection_dim": 16},
     "contrast", 0.7),
    ("clipseg", "CLIPSegModel", "CLIPSeg", {
        "text_config": ENCODER, "vision_config": VISION, "projection_dim": 16}, "contrast", 0.6),
    ("owl-vit", "OwlViTModel", "OwlViT", {
        "text_config": {**ENCODER, "max_position_embeddings": 16},
        "vision_config": {**VISION, "hidden_size": 32}, "projection_dim": 16}, "contrast", 0.7),
    ("owl-vit, boxes", "OwlViTForObjectDetection", "OwlViT", {
        "text_config": {**ENCODER, "max_position_embeddings": 16},
        "vision_config": VISION, "projection_dim": 32}, "queries", 0.6),
    ("owlv2", "Owlv2Model", "Owlv2", {
        "text_config": ENCODER, "vision_config": VISION, "projection_dim": 16}, "contrast", 0.6),
    # Decoders that see.
    ("gemma3, images", "Gemma3ForConditionalGeneration", "Gemma3", {
        "text_config": {**DECODER, "head_dim": 8}, "vision_config": {**VISION, "vision_use_head": False},
        "mm_tokens_per_image": 4, "image_token_index": MARK, "boi_token_index": 7, "eoi_token_index": 8},
     "shown 4", 0.7),
    ("llava", "LlavaForConditionalGeneration", "Llava", {
        "text_config": LLAMA, "image_token_index": MARK,
        "vision_config": {**VISION, "model_type": "clip_vision_model", "projection_dim": 16}},
     "shown 16", 0.7),
    ("llava-next", "LlavaNextForConditionalGeneration", "LlavaNext", {
        "text_config": LLAMA, "image_token_index": MARK, "image_grid_pinpoints": [[32, 32]],
        "vision_config": {**VISION, "model_type": "clip_vision_model", "projection_dim": 16}},
     "a whole and a tile", 0.6),
    ("llava-onevision", "LlavaOnevisionForConditionalGeneration", "LlavaOnevision", {
        "text_config": {**DECODER, "model_type": "qwen2"}, "image_token_index": MARK, "video_token_index": 6,
        "vision_config": TOWER, "image_grid_pinpoints": [[32, 32]]}, "a whole and a tile", 0.6),
    ("internvl", "InternVLForConditionalGeneration", "InternVL", {
        "text_config": {**DECODER, "model_type": "qwen2"}, "image_token_id": MARK,
        "vision_config": {**VISION, "image_size": [32, 32], "patch_size": [8, 8]}}, "shown 4", 0.6),
    ("smolvlm", "SmolVLMForConditionalGeneration", "SmolVLM", {
        "text_config": LLAMA, "vision_config": VISION, "image_token_id": MARK, "scale_factor": 2},
     "tiles", 0.6),
    ("idefics3", "Idefics3ForConditionalGeneration", "Idefics3", {
        "text_config": LLAMA, "vision_config": VISION, "image_token_id": MARK, "scale_factor": 2},
     "tiles", 0.6),
    ("paligemma", "PaliGemmaForConditionalGeneration", "PaliGemma", {
        "text_config": GEMMA, "vision_config": TOWER, "image_token_index": MARK, "projection_dim": 32,
        "hidden_size": 32}, "prefix", 0.6),
    ("mistral3", "Mistral3ForConditionalGeneration", "Mistral3", {
        "text_config": {**DECODER, "model_type": "mistral", "head_dim": 8}, "image_token_index": MARK,
        "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 8}}, "sized", 0.6),
    ("qwen2-vl", "Qwen2VLForConditionalGeneration", "Qwen2VL", {
        "text_config": {**DECODER, "rope_parameters": ROPE},
        "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4,
                          "mlp_ratio": 2}, **PLACES}, "patches of two sizes", 0.6),
    ("qwen2.5-vl", "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VL", {
        "text_config": {**DECODER, "rope_parameters": ROPE},
        "vision_config": {**GRID, "window_size": 16, "fullatt_block_indexes": [1]}, **PLACES},
     "patched", 0.7),
    ("qwen3-vl", "Qwen3VLForConditionalGeneration", "Qwen3VL", {
        "text_config": {**DECODER, "head_dim": 8, "rope_parameters": ROPE},
        "vision_config": {**GRID, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}, **PLACES},
     "patched", 0.6),
    ("qwen3-vl, two sizes", "Qwen3VLForConditionalGeneration", "Qwen3VL", {
        "text_config": {**DECODER, "head_dim": 8, "rope_parameters": ROPE},
        "vision_config": {**GRID, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}, **PLACES},
     "patches of two sizes", 0.6),
    ("kosmos2", "Kosmos2ForConditionalGeneration", "Kosmos2", {
        "text_config": {"vocab_size": WORDS, "max_position_embeddings": 64, "embed_dim": 32, "layers": 2,
                        "ffn_dim": 64, "attention_heads": 4, "use_cache": False},
        "vision_config": VISION, "latent_query_num": 4}, "grounded", 0.6),
    ("blip", "BlipForConditionalGeneration", "Blip", {
        "text_config": {**ENCODER, "encoder_hidden_size": 32, "projection_dim": 16},
        "vision_config": {**VISION, "projection_dim": 16}, "projection_dim": 16}, "captioned", 0.6),
    ("blip-2", "Blip2ForConditionalGeneration", "Blip2", {
        "text_config": {**{k: v for k, v in ENCODER.items() if k != "intermediate_size"},
                        "model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 32},
        "vision_config": VISION, "num_query_tokens": 4, "image_token_index": MARK,
        "qformer_config": {**ENCODER, "encoder_hidden_size": 32}}, "shown 4", 0.6),
    ("git", "GitForCausalLM", "Git", {**ENCODER, "vision_config": VISION, "use_cache": False},
     "captioned", 0.6),
    ("florence2", "Florence2ForConditionalGeneration", "Florence2", {
        "text_config": {**BOTH, "model_type": "bart"}, "image_token_id": MARK,
        "vision_config": {"depths": [1, 1], "patch_size": [7, 3], "patch_stride": [4, 2],
                          "patch_padding": [3, 1], "patch_prenorm": [False, True], "embed_dim": [16, 32],
                          "num_heads": [2, 4], "num_groups": [2, 4], "window_size": 4, "projection_dim": 32,
                          "max_temporal_embeddings": 4, "max_position_embeddings": 16}}, "shown 17", 0.6),
    ("pix2struct", "Pix2StructForConditionalGeneration", "Pix2Struct", {
        "text_config": {**TEXT, "hidden_size": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
                        "use_cache": False},
        "vision_config": {"hidden_size": 32, "patch_embed_hidden_size": 48, "d_ff": 64, "d_kv": 8,
                          "num_hidden_layers": 2, "num_attention_heads": 4, "seq_len": 64}},
     "stretches", 0.6),
    # Questions, regions, pages.
    ("vilt", "ViltForQuestionAnswering", "Vilt", {
        **ENCODER, **VISION, "num_labels": 3, "max_image_length": -1}, "asked of an image", 0.9),
    ("visual bert", "VisualBertForVisualReasoning", "VisualBert", {
        **ENCODER, "visual_embedding_dim": 16}, "seen regions", 0.6),
    ("lxmert", "LxmertForPreTraining", "Lxmert", {
        **ENCODER, "visual_feat_dim": 16, "l_layers": 2, "x_layers": 1, "r_layers": 1,
        "task_matched": False, "task_obj_predict": False, "task_qa": False}, "regions", 0.6),
    ("layoutlm", "LayoutLMForTokenClassification", "LayoutLM", ENCODER, "words of a page", 0.6),
    ("layoutlm v3", "LayoutLMv3ForTokenClassification", "LayoutLMv3", {
        **ENCODER, "max_2d_position_embeddings": 128, "coordinate_size": 4, "shape_size": 8, "input_size": 32,
        "patch_size": 8, "max_position_embeddings": 66}, "page", 0.6),
    ("lilt", "LiltForTokenClassification", "Lilt", {
        **ENCODER, "hidden_size": 48, "channel_shrink_ratio": 2}, "words of a page", 0.6),
)
SCENARIOS: tuple[Scenario, ...] = (
    *(architecture(*row) for row in ROWS),
    Scenario("transformers", "llama4, images", "Llama4ForConditionalGeneration(config)", _llama4,
             ("transformers",), 0.6),
    Scenario("transformers", "clip, by methods", "CLIPModel(config)",
             lambda: by_features(made("CLIPModel", "CLIP", TOWERS), BATCHES["contrast"]()),
             ("transformers",)),
    Scenario("transformers", "qwen2-vl's tower, other grids", "model.visual", _other_grids,
             ("transformers",), 0.8),
)
