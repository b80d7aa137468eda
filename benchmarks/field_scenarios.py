"""The scenarios of `field.py`: one row each."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rkmate

Step = Callable[[Any], torch.Tensor]
"""Runs a module's forward on a batch, and returns the loss."""


@dataclass
class Task:
    """A model, and a step of its training."""

    model: nn.Module
    step: Step
    planned: nn.Module | None = None
    """The part that gets the budget; None: the model itself."""
    train: Callable[[Any], list[float]] | None = None
    """Trains the model as a library does, and returns the losses; None: a loop of steps does."""


@dataclass(frozen=True)
class Scenario:
    """A model that people train, and what they write."""

    library: str
    name: str
    model: str
    """The model, as a user writes it."""
    make: Callable[[], Task]
    needs: tuple[str, ...] = ()
    """Modules without which it is skipped."""
    budget: float = 0.7
    """The budget, as a share of the plain peak."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of `rkmate.Settings`."""

    @property
    def lines(self) -> str:
        """What a user writes, apart from the training loop."""
        given = "".join(f", settings=rkmate.Settings({k}={v!r})" for k, v in self.settings.items())
        return f"rkmate.apply({self.model}, budget={self.budget:g}{given})"

    def put(self, model: nn.Module, budget: int, costs: Any) -> nn.Module:
        """Give a module the budget."""
        settings: dict[str, Any] = {"costs": costs, **self.settings}
        return rkmate.apply(model, budget=budget, settings=rkmate.Settings(**settings), progress=False)


# -- transformers ----------------------------------------------------------------------------------

WORDS = 99
TEXT = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODER = {**TEXT, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
           "intermediate_size": 64, "max_position_embeddings": 64}
DECODER = {**ENCODER, "num_key_value_heads": 2, "use_cache": False}
BOTH = {**TEXT, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        "max_position_embeddings": 64, "decoder_start_token_id": 1, "forced_eos_token_id": None,
        "use_cache": False}
T5 = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
      "decoder_start_token_id": 0, "use_cache": False}
VISION = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64,
          "image_size": 32, "patch_size": 8}
SPEECH = {**ENCODER, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3),
          "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
          "classifier_proj_size": 16, "mask_time_length": 2}
WHISPER = {**BOTH, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32}
TOWERS = {"text_config": {**ENCODER, "projection_dim": 16}, "vision_config": {**VISION, "projection_dim": 16},
          "projection_dim": 16}
RESNET = {"embedding_size": 16, "hidden_sizes": [16, 24, 32], "depths": [1, 2, 1], "layer_type": "basic"}
DETR = {"use_timm_backbone": False, "use_pretrained_backbone": False, "d_model": 32, "encoder_layers": 2,
        "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 10, "num_labels": 5}


def ids(length: int = 24, batch: int = 4) -> torch.Tensor:
    """Words of sentences."""
    return torch.randint(5, WORDS, (batch, length))


def _labelled() -> dict[str, Any]:
    words = ids()
    return {"input_ids": words, "labels": words.clone()}


def _padded() -> dict[str, Any]:
    given = _labelled()
    mask = torch.ones_like(given["input_ids"])
    mask[0, 16:] = 0
    return {**given, "attention_mask": mask}


BATCHES: dict[str, Callable[[], dict[str, Any]]] = {
    "labelled": _labelled,
    "padded": _padded,
    "translated": lambda: {"input_ids": ids(), "labels": ids(12)},
    "sentence": lambda: {"input_ids": ids(), "labels": torch.randint(0, 2, (4,))},
    "tokens": lambda: {"input_ids": ids(), "labels": torch.randint(0, 2, (4, 24))},
    "question": lambda: {"input_ids": ids(), "start_positions": torch.randint(0, 24, (4,)),
                         "end_positions": torch.randint(0, 24, (4,))},
    "image": lambda: {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, 2, (4,))},
    "pixels": lambda: {"pixel_values": torch.randn(4, 3, 32, 32)},
    "segmented": lambda: {"pixel_values": torch.randn(2, 3, 64, 64),
                          "labels": torch.randint(0, 2, (2, 64, 64))},
    "boxes": lambda: {"pixel_values": torch.randn(2, 3, 64, 64), "labels": [
        {"class_labels": torch.randint(0, 5, (n,)), "boxes": 0.3 + 0.2 * torch.rand(n, 4)} for n in (2, 3)]},
    "sound": lambda: {"input_values": torch.randn(2, 1600), "labels": torch.randint(0, 2, (2,))},
    "spoken": lambda: {"input_values": torch.randn(2, 1600), "labels": ids(8, 2)},
    "spectrum": lambda: {"input_features": torch.randn(2, 16, 40), "labels": ids(8, 2)},
    "contrast": lambda: {"input_ids": ids(8), "pixel_values": torch.randn(4, 3, 32, 32),
                         "return_loss": True},
}


def loss_of(output: Any) -> torch.Tensor:
    """The loss of a model's output, or a number made of its first tensor."""
    if getattr(output, "loss", None) is not None:
        return output.loss if not output.loss.dim() else output.loss.mean()  # type: ignore[no-any-return]
    first = next(v for v in output.values() if isinstance(v, torch.Tensor) and v.requires_grad)
    return first.float().pow(2).mean()


def made(model: str, config: str, options: dict[str, Any]) -> Any:
    """A model of transformers with random weights."""
    import transformers

    return getattr(transformers, model)(getattr(transformers, f"{config}Config")(**options)).train()


def calling(model: Any, batch: dict[str, Any]) -> Task:
    """A step that calls the model on a batch."""
    return Task(model, lambda m: loss_of(m(**batch)))


def _checkpointing(reentrant: bool) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model
    return change


def _half(model: Any) -> Any:
    return model.to(torch.bfloat16)


def _frozen_encoder(model: Any) -> Any:
    model.freeze_encoder()
    return _checkpointing(True)(model)


def _hf(name: str, model: str, config: str, options: dict[str, Any], batch: str = "labelled",
        change: Callable[[Any], Any] | None = None, lines: str = "", step: Callable[..., Task] = calling,
        **others: Any) -> Scenario:
    def make() -> Task:
        found = made(model, config, options)
        return step(found if change is None else change(found), BATCHES[batch]())
    return Scenario("transformers", name, f"{model}(config){lines}", make,
                    ("transformers",), **others)


def _autocast(model: Any, batch: dict[str, Any]) -> Task:
    def step(m: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(m(**batch))
    return Task(model, step)


def _accumulating(model: Any, batch: dict[str, Any]) -> Task:
    def step(m: Any) -> torch.Tensor:
        loss_of(m(**batch)).backward()
        return loss_of(m(**batch))
    return Task(model, step)


def _two_losses(model: Any, batch: dict[str, Any]) -> Task:
    return Task(model, lambda m: loss_of(m(**batch)) + loss_of(m(**batch)))


def _loss_outside(model: Any, batch: dict[str, Any]) -> Task:
    labels = batch["labels"]
    given = {k: v for k, v in batch.items() if k != "labels"}
    return Task(model, lambda m: F.cross_entropy(m(**given).logits.flatten(0, 1), labels.flatten()))


def by_features(model: Any, batch: dict[str, Any]) -> Task:
    """A step of contrast by the methods of the two towers."""
    def features(output: Any) -> torch.Tensor:
        return output if isinstance(output, torch.Tensor) else output.pooler_output

    def step(m: Any) -> torch.Tensor:
        text = features(m.get_text_features(batch["input_ids"]))
        image = features(m.get_image_features(batch["pixel_values"]))
        return F.cross_entropy(text @ image.T, torch.arange(4))
    return Task(model, step)


def _lengths(model: Any, batch: dict[str, Any]) -> Task:
    count = iter(range(10**6))

    def step(m: Any) -> torch.Tensor:
        length = (24, 20, 16)[next(count) % 3]
        return loss_of(m(**{k: v[:, :length] for k, v in batch.items()}))
    return Task(model, step)


TRANSFORMERS = (
    _hf("gpt2", "GPT2LMHeadModel", "GPT2", {
        **TEXT, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}),
    _hf("llama", "LlamaForCausalLM", "Llama", DECODER),
    _hf("llama, padded", "LlamaForCausalLM", "Llama", DECODER, "padded"),
    _hf("llama, other lengths", "LlamaForCausalLM", "Llama", DECODER, step=_lengths, budget=0.8),
    _hf("llama, bf16", "LlamaForCausalLM", "Llama", DECODER, change=_half, lines=".bfloat16()"),
    _hf("llama, autocast", "LlamaForCausalLM", "Llama", DECODER, step=_autocast),
    _hf("llama, loss outside", "LlamaForCausalLM", "Llama", DECODER, step=_loss_outside, budget=0.8),
    _hf("llama, accumulation", "LlamaForCausalLM", "Llama", DECODER, step=_accumulating),
    _hf("llama, two calls", "LlamaForCausalLM", "Llama", DECODER, step=_two_losses),
    _hf("llama, checkpointing", "LlamaForCausalLM", "Llama", DECODER, change=_checkpointing(False),
        lines=".gradient_checkpointing_enable()", budget=1.0),
    _hf("llama, reentrant checkpointing", "LlamaForCausalLM", "Llama", DECODER, change=_checkpointing(True),
        lines='.gradient_checkpointing_enable({"use_reentrant": True})', budget=1.0),
    _hf("llama, dynamic rope", "LlamaForCausalLM", "Llama", {**DECODER, "rope_parameters": {
        "rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}),
    _hf("mistral", "MistralForCausalLM", "Mistral", {**DECODER, "sliding_window": 8}),
    _hf("qwen2", "Qwen2ForCausalLM", "Qwen2", DECODER),
    _hf("qwen3", "Qwen3ForCausalLM", "Qwen3", {**DECODER, "head_dim": 8}),
    _hf("gemma2", "Gemma2ForCausalLM", "Gemma2", {**DECODER, "head_dim": 8}),
    _hf("gemma3", "Gemma3ForCausalLM", "Gemma3Text", {**DECODER, "head_dim": 8}),
    _hf("phi3", "Phi3ForCausalLM", "Phi3", DECODER),
    _hf("mixtral", "MixtralForCausalLM", "Mixtral", {
        **DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}),
    _hf("mamba", "MambaForCausalLM", "Mamba", {
        **TEXT, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "use_cache": False}, budget=0.8),
    _hf("bert, masked", "BertForMaskedLM", "Bert", ENCODER, "padded"),
    _hf("roberta, sentences", "RobertaForSequenceClassification", "Roberta", ENCODER, "sentence"),
    _hf("distilbert, tokens", "DistilBertForTokenClassification", "DistilBert", {
        **TEXT, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 64},
        "tokens"),
    _hf("deberta, questions", "DebertaV2ForQuestionAnswering", "DebertaV2", {
        **ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False}, "question"),
    _hf("modernbert", "ModernBertForMaskedLM", "ModernBert", {
        **ENCODER, "cls_token_id": 1, "sep_token_id": 2}, "padded"),
    _hf("t5", "T5ForConditionalGeneration", "T5", T5, "translated"),
    _hf("bart", "BartForConditionalGeneration", "Bart", BOTH, "translated"),
    _hf("bart, layer drop", "BartForConditionalGeneration", "Bart", {
        **BOTH, "encoder_layerdrop": 0.2, "decoder_layerdrop": 0.2}, "translated", budget=0.9),
    _hf("vit", "ViTForImageClassification", "ViT", VISION, "image"),
    _hf("dinov2", "Dinov2ForImageClassification", "Dinov2", VISION, "image"),
    _hf("swin", "SwinForImageClassification", "Swin", {
        "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4],
        "window_size": 4}, "image"),
    _hf("convnext", "ConvNextForImageClassification", "ConvNext", {
        "hidden_sizes": [16, 24, 32, 40], "depths": [1, 1, 2, 1], "drop_path_rate": 0.1}, "image"),
    _hf("resnet", "ResNetForImageClassification", "ResNet", RESNET, "image"),
    _hf("segformer", "SegformerForSemanticSegmentation", "Segformer", {
        "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 4, 4],
        "decoder_hidden_size": 32, "num_labels": 2}, "segmented"),
    _hf("vit_mae", "ViTMAEForPreTraining", "ViTMAE", {
        **VISION, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 2, "decoder_intermediate_size": 32}, "pixels"),
    Scenario("transformers", "detr", "DetrForObjectDetection(config)",
             lambda: calling(made("DetrForObjectDetection", "Detr", {
                 **DETR, "backbone_config": _backbone()}), BATCHES["boxes"]()),
             ("transformers", "scipy"), 0.8),
    _hf("clip", "CLIPModel", "CLIP", TOWERS, "contrast"),
    _hf("clip, by methods", "CLIPModel", "CLIP", TOWERS, "contrast", step=by_features),
    _hf("whisper", "WhisperForConditionalGeneration", "Whisper", WHISPER, "spectrum"),
    _hf("whisper, layer drop", "WhisperForConditionalGeneration", "Whisper", {
        **WHISPER, "encoder_layerdrop": 0.2, "decoder_layerdrop": 0.2, "apply_spec_augment": True,
        "mask_time_length": 2}, "spectrum", budget=0.9),
    _hf("whisper, frozen encoder", "WhisperForConditionalGeneration", "Whisper", WHISPER, "spectrum",
        change=_frozen_encoder, lines=".freeze_encoder(), reentrant checkpointing", budget=1.0),
    _hf("wav2vec2, ctc", "Wav2Vec2ForCTC", "Wav2Vec2", {
        **SPEECH, "layerdrop": 0.0, "apply_spec_augment": False}, "spoken"),
    _hf("wav2vec2, default", "Wav2Vec2ForCTC", "Wav2Vec2", SPEECH, "spoken", budget=0.9),
    _hf("wav2vec2, default, checkpointing", "Wav2Vec2ForCTC", "Wav2Vec2", SPEECH, "spoken",
        change=_checkpointing(False), lines=".gradient_checkpointing_enable()", budget=0.9),
    _hf("hubert, default", "HubertForSequenceClassification", "Hubert", SPEECH, "sound", budget=0.9),
)


def _backbone() -> Any:
    import transformers

    return transformers.ResNetConfig(**{**RESNET, "out_features": ["stage3"]})


# -- peft ------------------------------------------------------------------------------------------


def adapted_llama() -> Any:
    """Return a Llama with adapters (LoRA)."""
    import peft

    return peft.get_peft_model(made("LlamaForCausalLM", "Llama", DECODER), peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, **TARGETS)).train()


def adapted(name: str, config: str, options: dict[str, Any], change: Callable[[Any], Any] | None = None,
             **others: Any) -> Scenario:
    """A Llama with adapters."""
    def make() -> Task:
        import peft

        model = peft.get_peft_model(made("LlamaForCausalLM", "Llama", DECODER), getattr(peft, config)(
            task_type="CAUSAL_LM", **options)).train()
        if change is not None:
            change(model)
        words = ids()
        words[:, 10:12] = torch.tensor([5, 6])
        return calling(model, {"input_ids": words, "labels": words.clone()})
    return Scenario("peft", name, f"get_peft_model(model, {config}(...))", make,
                    ("transformers", "peft"), **others)


def _for_adapters(model: Any) -> None:
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()


TARGETS = {"target_modules": ["q_proj", "v_proj"]}
PEFT = (
    adapted("lora", "LoraConfig", {"r": 4, **TARGETS}),
    adapted("lora, dropout", "LoraConfig", {"r": 4, "lora_dropout": 0.1, **TARGETS}),
    adapted("lora, checkpointing", "LoraConfig", {"r": 4, **TARGETS}, _for_adapters, budget=1.0),
    adapted("dora", "LoraConfig", {"r": 4, "use_dora": True, **TARGETS}),
    adapted("alora", "LoraConfig", {"r": 4, "alora_invocation_tokens": [5, 6], **TARGETS}),
    adapted("alora, checkpointing", "LoraConfig", {"r": 4, "alora_invocation_tokens": [5, 6], **TARGETS},
             _for_adapters, budget=1.0),
    adapted("lora, modules to save", "LoraConfig", {"r": 4, "modules_to_save": ["lm_head"], **TARGETS}),
    adapted("adalora", "AdaLoraConfig", {"total_step": 10, "tinit": 1, "tfinal": 2, **TARGETS}),
    adapted("loha", "LoHaConfig", {"r": 4, **TARGETS}, budget=0.9),
    adapted("lokr", "LoKrConfig", {"r": 4, **TARGETS}, budget=0.9),
    adapted("ia3", "IA3Config", {**TARGETS, "feedforward_modules": []}),
    adapted("vera", "VeraConfig", {"r": 4, **TARGETS}),
    adapted("oft", "OFTConfig", {"oft_block_size": 8, **TARGETS}, budget=0.9),
    adapted("boft", "BOFTConfig", {"boft_block_size": 8, **TARGETS}, budget=0.9),
    adapted("prefix tuning", "PrefixTuningConfig", {"num_virtual_tokens": 4}),
    adapted("prompt tuning", "PromptTuningConfig", {"num_virtual_tokens": 4}),
)


# -- diffusers -------------------------------------------------------------------------------------


def denoised(name: str, model: str, options: dict[str, Any], inputs: Callable[[], dict[str, Any]],
              **others: Any) -> Scenario:
    """A model of diffusers, and its squared outputs."""
    def make() -> Task:
        import diffusers

        given = inputs()

        def step(m: Any) -> torch.Tensor:
            out = m(**given, return_dict=False)[0]
            return F.mse_loss(torch.stack(out) if isinstance(out, list) else out, torch.zeros(()))
        return Task(getattr(diffusers, model)(**options).train(), step)
    return Scenario("diffusers", name, f"{model}(...)", make, ("diffusers",), **others)


CHANNELS = {"sample_size": 16, "block_out_channels": (32, 32), "layers_per_block": 1, "norm_num_groups": 8}
CODER = {"block_out_channels": (16, 32), "norm_num_groups": 8, "latent_channels": 4,
         "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
CONDITIONED = {**CHANNELS, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
               "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "cross_attention_dim": 16,
               "attention_head_dim": 8}


def _noise(channels: int = 4, size: int = 16) -> torch.Tensor:
    return torch.randn(2, channels, size, size)


def coded() -> Task:
    """A step of a variational autoencoder by its two methods."""
    import diffusers

    x = _noise(3, 32)

    def step(m: Any) -> torch.Tensor:
        latent = m.encode(x).latent_dist
        return F.mse_loss(m.decode(latent.sample()).sample, x) + 1e-3 * latent.kl().mean()
    return Task(diffusers.AutoencoderKL(**CODER), step)


def _controlled() -> Task:
    import diffusers

    unet = diffusers.UNet2DConditionModel(**CONDITIONED).requires_grad_(False)
    control = diffusers.ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(8, 16)).train()
    x, t, words, image = _noise(), torch.tensor([3, 5]), torch.randn(2, 5, 16), _noise(3, 32)

    def step(m: Any) -> torch.Tensor:
        down, mid = control(x, t, words, image, return_dict=False)
        return F.mse_loss(unet(x, t, words, down_block_additional_residuals=down,
                               mid_block_additional_residual=mid).sample, torch.zeros(()))
    return Task(control, step)


DIFFUSERS = (
    denoised("unet", "UNet2DModel", {
        **CHANNELS, "in_channels": 4, "out_channels": 4, "attention_head_dim": 8,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
        lambda: {"sample": _noise(), "timestep": torch.tensor([3, 5])}),
    denoised("unet, conditioned", "UNet2DConditionModel", CONDITIONED,
              lambda: {"sample": _noise(), "timestep": torch.tensor([3, 5]),
                       "encoder_hidden_states": torch.randn(2, 5, 16)}),
    denoised("dit", "DiTTransformer2DModel", {
        "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4,
        "num_layers": 3, "sample_size": 16, "patch_size": 2, "num_embeds_ada_norm": 10, "norm_num_groups": 1},
        lambda: {"hidden_states": _noise(), "timestep": torch.tensor([3, 5]),
                 "class_labels": torch.tensor([1, 2])}),
    denoised("sd3", "SD3Transformer2DModel", {
        "sample_size": 16, "patch_size": 2, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8,
        "num_attention_heads": 4, "joint_attention_dim": 32, "caption_projection_dim": 32,
        "pooled_projection_dim": 16, "out_channels": 4},
        lambda: {"hidden_states": _noise(), "encoder_hidden_states": torch.randn(2, 6, 32),
                 "pooled_projections": torch.randn(2, 16), "timestep": torch.tensor([3, 5])}),
    denoised("vae", "AutoencoderKL", CODER, lambda: {"sample": _noise(3, 32)}),
    Scenario("diffusers", "vae, by methods", "AutoencoderKL(...)", coded, ("diffusers",)),
    denoised("vq", "VQModel", {**CODER, "latent_channels": 3, "num_vq_embeddings": 16},
              lambda: {"sample": _noise(3, 32)}, budget=0.9),
    Scenario("diffusers", "controlnet beside a frozen unet", "control", _controlled,
             ("diffusers",), 0.9),
)


# -- torch -----------------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer of an MLP with a residual."""

    def __init__(self, width: int = 32, drop: float = 0.0) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(drop)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input and what the layer adds."""
        out: torch.Tensor = x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))
        return out


class Written(nn.Module):
    """Blocks between which a function of the scenario runs."""

    def __init__(self, between: Callable[[nn.Module, torch.Tensor], torch.Tensor], drop: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(drop=drop) for _ in range(4))
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks."""
        for layer in self.layers:
            x = self.between(layer, x)
        return x


def _dropped(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x if torch.rand([]) < 0.2 else layer(x)


def _finite(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = layer(x)
    return x if torch.isfinite(x).all() else x.clamp(-1, 1)


def _checkpointed(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = checkpoint(layer, x, use_reentrant=False)
    return out


def _in_bfloat16(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return layer(x).float()  # type: ignore[no-any-return]


class Straight(torch.autograd.Function):
    """Rounds, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Round."""
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """Pass the gradient on."""
        return grads[0]


def _rounded(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = Straight.apply(layer(x))
    return out


def _forces(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def energy(y: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = layer(y).square().sum()
        return out
    out: torch.Tensor = x - 0.1 * torch.func.grad(energy)(x)
    return out


class Experts(nn.Module):
    """Picks the rows of each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router = Block(), nn.Linear(32, 3)
        self.experts = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Route the rows."""
        x = self.first(x)
        chosen, out = self.router(x).argmax(-1), torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            rows = torch.where(chosen == k)[0]
            out = out.index_add(0, rows, expert(x[rows]))
        return out + x


class Recurrent(nn.Module):
    """An LSTM or GRU over text."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.layers = kind(32, 32, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        out: torch.Tensor = self.head(self.layers(self.words(x))[0])
        return out


def _images(channels_last: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    net: Any = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return net.to(memory_format=torch.channels_last) if channels_last else net  # type: ignore[no-any-return]


def _rows() -> torch.Tensor:
    return torch.randn(128, 32)


def _squared(model: nn.Module, x: torch.Tensor | None = None) -> Task:
    given = _rows() if x is None else x
    return Task(model, lambda m: F.mse_loss(out := m(given), torch.zeros_like(out)))


def _classified(model: nn.Module, x: torch.Tensor, classes: int = 10) -> Task:
    y = torch.randint(0, classes, (len(x),))
    return Task(model, lambda m: F.cross_entropy(m(x), y))


def _over_words(kind: type[nn.RNNBase]) -> Task:
    x = torch.randint(0, 50, (8, 20))
    return Task(Recurrent(kind), lambda m: F.cross_entropy(m(x).flatten(0, 1), x.flatten()))


def _taught() -> Task:
    teacher = nn.Sequential(*(Block() for _ in range(4)))
    student = nn.Sequential(*(Block() for _ in range(4)))
    x = _rows()

    def step(m: Any) -> torch.Tensor:
        with torch.no_grad():
            target = teacher(x)
        return F.mse_loss(m(x), target)
    return Task(student, step)


def _penalised() -> Task:
    x = _rows().requires_grad_()

    def step(m: Any) -> torch.Tensor:
        grad, = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        return (grad.norm(dim=1) - 1).square().mean()
    return Task(nn.Sequential(*(Block() for _ in range(3)), nn.Linear(32, 1)), step)


def _against() -> Task:
    real, fake = _rows(), _rows()
    net = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(32, 1))
    return Task(net, lambda m: F.softplus(-m(real)).mean() + F.softplus(m(fake)).mean())


def _translated() -> Task:
    x, y = torch.randn(4, 12, 32), torch.randn(4, 8, 32)
    return Task(nn.Transformer(32, 4, 2, 2, 64, batch_first=True), lambda m: F.mse_loss(m(x, y), y))


def _inside(model: nn.Module, planned: str, step: Step) -> Task:
    return Task(model, step, model.get_submodule(planned))


def _every_other(change: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(*(change(nn.Linear(32, 32)) if k % 2 else Block() for k in range(6)))


def _part_of_a_step() -> Task:
    model = nn.ModuleDict({"trunk": nn.Sequential(*(Block() for _ in range(4))), "head": nn.Linear(32, 4)})
    x = _rows()
    return _inside(model, "trunk", lambda m: m["head"](m["trunk"](x)).square().mean())


def _torch(name: str, make: Callable[[], Task], lines: str = "model",
           **others: Any) -> Scenario:
    return Scenario("torch", name, lines, make, **others)


TORCH = (
    _torch("mlp", lambda: _squared(nn.Sequential(*(Block() for _ in range(4))))),
    _torch("a loss of several operations", lambda: Task(
        nn.Sequential(*(Block() for _ in range(4))), lambda m, x=_rows(): m(x).square().mean())),  # type: ignore[misc]
    _torch("dropout", lambda: _squared(nn.Sequential(*(Block(drop=0.1) for _ in range(4))))),
    _torch("convolutions", lambda: _classified(_images(), torch.randn(4, 3, 24, 24)), budget=0.9),
    _torch("channels last", lambda: _classified(
        _images(True), torch.randn(4, 3, 24, 24).to(memory_format=torch.channels_last)), budget=0.9),
    _torch("transformer encoder", lambda: _squared(nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 3, enable_nested_tensor=False),
        torch.randn(4, 16, 32))),
    _torch("transformer", _translated),
    _torch("lstm", lambda: _over_words(nn.LSTM), budget=0.9),
    _torch("gru", lambda: _over_words(nn.GRU), budget=0.9),
    _torch("checkpoint", lambda: _squared(Written(_checkpointed)), budget=1.0),
    _torch("autocast inside", lambda: _squared(Written(_in_bfloat16))),
    _torch("custom function", lambda: _squared(Written(_rounded))),
    _torch("torch.func.grad inside", lambda: _squared(Written(_forces)), budget=0.8),
    _torch("layer drop", lambda: _squared(Written(_dropped)), budget=0.8),
    _torch("a check of values", lambda: _squared(Written(_finite)), budget=0.8),
    _torch("experts that pick rows", lambda: _squared(Experts()), budget=0.9),
    _torch("experts, opaque", lambda: _squared(Experts()), budget=0.9, settings={"opaque": "auto"}),
    _torch("distillation", _taught),
    _torch("gradient penalty outside", _penalised, budget=1.0),
    _torch("discriminator, two calls", _against, budget=0.8),
    _torch("spectral norm", lambda: _squared(_every_other(nn.utils.parametrizations.spectral_norm))),
    _torch("weight norm", lambda: _squared(_every_other(nn.utils.parametrizations.weight_norm))),
    _torch("a part of a step", _part_of_a_step, "model.trunk", budget=0.8),
)


# -- others ----------------------------------------------------------------------------------------


def net(library: str, module: str, name: str, lines: str, make: Callable[[Any], Task],
         **others: Any) -> Scenario:
    """A model of a library that may be absent. `make`: gets the module of that name."""
    def made() -> Task:
        return make(importlib.import_module(module))
    with_torchvision = ("torchvision",) if library in ("timm", "segmentation_models_pytorch") else ()
    return Scenario(library, name, lines, made, (module.split(".")[0], *with_torchvision), **others)


def graph(layer: Callable[[], Any]) -> Task:
    """Three layers over a random graph."""
    x, edges = torch.randn(60, 16), torch.randint(0, 60, (2, 240))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layers = nn.Linear(16, 16), nn.ModuleList(layer() for _ in range(3))

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = F.relu(layer(x, edges))
            return x
    return Task(Net(), lambda m: F.mse_loss(m(x, edges), torch.zeros(60, 16)))


def volume(model: nn.Module) -> Task:
    """A network over a volume."""
    x = torch.randn(1, 1, 16, 16, 16)

    def step(m: Any) -> torch.Tensor:
        out = m(x)
        out = out[0] if isinstance(out, (list, tuple)) else out
        return F.mse_loss(out, torch.zeros_like(out))
    return Task(model, step)


def _pictured(timm: Any, name: str, size: int, options: dict[str, Any]) -> Task:
    model = timm.create_model(name, num_classes=10, **options).train()
    return _classified(model, torch.randn(2, 3, size, size))


TIMM: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("resnet10t", 64, {}), ("mobilenetv3_small_050", 64, {}), ("convnext_atto", 64, {}),
    ("vit_tiny_patch16_224", 224, {"depth": 2}))

OTHERS = (
    *(net("timm", "timm", name, f'timm.create_model("{name}")', functools.partial(
        _pictured, name=name, size=size, options=options), budget=0.8) for name, size, options in TIMM),
    net("torch_geometric", "torch_geometric.nn", "gcn", "GCN", lambda pyg: graph(
        lambda: pyg.GCNConv(16, 16)), budget=0.9),
    net("torch_geometric", "torch_geometric.nn", "gat", "GAT", lambda pyg: graph(
        lambda: pyg.GATConv(16, 8, heads=2)), budget=0.9),
    net("torch_geometric", "torch_geometric.nn", "sage", "GraphSAGE", lambda pyg: graph(
        lambda: pyg.SAGEConv(16, 16)), budget=0.9),
    net("monai", "monai.networks.nets", "unet", "UNet", lambda nets: volume(nets.UNet(
        3, 1, 2, (8, 16, 32), (2, 2), num_res_units=1)), budget=0.9),
    net("monai", "monai.networks.nets", "segresnet", "SegResNet", lambda nets: volume(nets.SegResNet(
        3, 8, 1, 2, blocks_down=(1, 1), blocks_up=(1,))), budget=0.9),
    net("segmentation_models_pytorch", "segmentation_models_pytorch", "unet", "smp.Unet",
         lambda smp: _squared(smp.Unet("resnet18", encoder_weights=None), torch.randn(1, 3, 64, 64)),
         budget=0.9),
)

SCENARIOS: tuple[Scenario, ...] = (*TORCH, *TRANSFORMERS, *PEFT, *DIFFUSERS, *OTHERS)
