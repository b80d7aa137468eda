"""Further scenarios of `field.py`: more architectures of transformers, and the trainers of libraries."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from field_scenarios import (
    BATCHES,
    BOTH,
    DECODER,
    ENCODER,
    SPEECH,
    TEXT,
    VISION,
    WORDS,
    Block,
    Scenario,
    Task,
    adapted_llama,
    calling,
    ids,
    made,
)
from torch import nn
from torch.nn import functional as F

# -- Architectures ---------------------------------------------------------------------------------

NEOX = {k: v for k, v in DECODER.items() if k != "num_key_value_heads"}
EXPERTS = {**DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SERIES = {"prediction_length": 4, "context_length": 12, "lags_sequence": [1, 2], "d_model": 32,
          "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
          "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
          "num_time_features": 2}
PATCHES = {"num_input_channels": 3, "context_length": 32, "patch_length": 8, "patch_stride": 8,
           "prediction_length": 8, "d_model": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
           "ffn_dim": 64, "num_layers": 2}
STAGES = {"embedding_size": 16, "hidden_sizes": [16, 24, 32], "depths": [1, 1, 1]}
SIGLIP = {"text_config": ENCODER, "vision_config": VISION}

BATCHES.update({
    "contrast of sigmoids": lambda: {"input_ids": ids(8), "pixel_values": torch.randn(4, 3, 32, 32),
                                     "return_loss": True},
    "asked of an image": lambda: {"input_ids": ids(8), "pixel_values": torch.randn(4, 3, 32, 32),
                                  "labels": torch.rand(4, 3)},
    "spectrogram": lambda: {"input_values": torch.randn(4, 64, 16), "labels": torch.randint(0, 2, (4,))},
    "forecast": lambda: {"past_values": torch.randn(4, 14), "past_time_features": torch.randn(4, 14, 2),
                         "past_observed_mask": torch.ones(4, 14), "future_values": torch.randn(4, 4),
                         "future_time_features": torch.randn(4, 4, 2)},
    "patches": lambda: {"past_values": torch.randn(4, 32, 3), "future_values": torch.randn(4, 8, 3)},
    "depth": lambda: {"pixel_values": torch.randn(2, 3, 32, 32)},
    "trajectory": lambda: {
        "states": torch.randn(4, 8, 6), "actions": torch.randn(4, 8, 3), "rewards": torch.randn(4, 8, 1),
        "returns_to_go": torch.randn(4, 8, 1), "timesteps": torch.arange(8).expand(4, 8),
        "attention_mask": torch.ones(4, 8), "return_dict": True},
})

ARCHITECTURES: tuple[tuple[str, str, str, dict[str, Any], str, float], ...] = (
    # Encoders.
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
    # Decoders.
    ("gpt-neo", "GPTNeoForCausalLM", "GPTNeo", {
        **TEXT, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64,
        "attention_types": [[["global", "local"], 1]], "window_size": 8, "use_cache": False},
     "labelled", 0.7),
    ("gpt-neox", "GPTNeoXForCausalLM", "GPTNeoX", NEOX, "labelled", 0.7),
    ("gpt-j", "GPTJForCausalLM", "GPTJ", {
        **TEXT, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "rotary_dim": 8,
        "use_cache": False}, "labelled", 0.7),
    ("opt", "OPTForCausalLM", "OPT", {**NEOX, "ffn_dim": 64, "word_embed_proj_dim": 32}, "labelled", 0.7),
    ("bloom", "BloomForCausalLM", "Bloom", {
        **TEXT, "hidden_size": 32, "n_layer": 3, "n_head": 4, "use_cache": False}, "labelled", 0.7),
    ("falcon", "FalconForCausalLM", "Falcon", NEOX, "labelled", 0.7),
    ("phi", "PhiForCausalLM", "Phi", DECODER, "labelled", 0.7),
    ("stablelm", "StableLmForCausalLM", "StableLm", DECODER, "labelled", 0.7),
    ("starcoder2", "Starcoder2ForCausalLM", "Starcoder2", DECODER, "labelled", 0.7),
    ("olmo2", "Olmo2ForCausalLM", "Olmo2", DECODER, "labelled", 0.7),
    ("cohere", "CohereForCausalLM", "Cohere", DECODER, "labelled", 0.7),
    ("granite", "GraniteForCausalLM", "Granite", DECODER, "labelled", 0.7),
    ("glm", "GlmForCausalLM", "Glm", {**DECODER, "head_dim": 8}, "labelled", 0.7),
    ("smollm3", "SmolLM3ForCausalLM", "SmolLM3", DECODER, "labelled", 0.7),
    ("llama, for classes", "LlamaForSequenceClassification", "Llama", DECODER, "sentence", 0.7),
    # Mixtures of experts, state spaces, recurrences.
    ("qwen2-moe", "Qwen2MoeForCausalLM", "Qwen2Moe", {
        **EXPERTS, "shared_expert_intermediate_size": 32}, "labelled", 0.7),
    ("qwen3-moe", "Qwen3MoeForCausalLM", "Qwen3Moe", {**EXPERTS, "head_dim": 8}, "labelled", 0.7),
    ("olmoe", "OlmoeForCausalLM", "Olmoe", EXPERTS, "labelled", 0.7),
    ("gpt-oss", "GptOssForCausalLM", "GptOss", {
        **DECODER, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}, "labelled", 0.8),
    ("mamba2", "Mamba2ForCausalLM", "Mamba2", {
        **TEXT, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8, "head_dim": 8,
        "n_groups": 1, "chunk_size": 8, "use_cache": False}, "labelled", 0.9),
    ("falcon mamba", "FalconMambaForCausalLM", "FalconMamba", {
        **TEXT, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "use_cache": False},
     "labelled", 0.8),
    ("recurrent gemma", "RecurrentGemmaForCausalLM", "RecurrentGemma", {
        **DECODER, "lru_width": 32, "attention_window_size": 16, "head_dim": 8}, "labelled", 0.9),
    # Encoders with decoders.
    ("mt5", "MT5ForConditionalGeneration", "MT5", {
        "vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 0, "use_cache": False}, "translated", 0.7),
    ("pegasus", "PegasusForConditionalGeneration", "Pegasus", BOTH, "translated", 0.7),
    ("marian", "MarianMTModel", "Marian", {**BOTH, "pad_token_id": 0}, "translated", 0.7),
    ("mbart", "MBartForConditionalGeneration", "MBart", BOTH, "translated", 0.7),
    ("m2m100", "M2M100ForConditionalGeneration", "M2M100", {
        **BOTH, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}, "translated", 0.7),
    # Images.
    ("deit", "DeiTForImageClassification", "DeiT", VISION, "image", 0.7),
    ("beit", "BeitForImageClassification", "Beit", VISION, "image", 0.7),
    ("regnet", "RegNetForImageClassification", "RegNet", {**STAGES, "groups_width": 8}, "image", 0.8),
    ("mobilenet v2", "MobileNetV2ForImageClassification", "MobileNetV2", {
        "image_size": 32, "depth_multiplier": 0.25}, "image", 0.9),
    ("poolformer", "PoolFormerForImageClassification", "PoolFormer", {
        "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}, "image", 0.8),
    ("focalnet", "FocalNetForImageClassification", "FocalNet", {
        "image_size": 32, "embed_dim": 16, "depths": [1, 1], "focal_levels": [2, 2], "focal_windows": [3, 3],
        "hidden_sizes": [16, 32]}, "image", 0.8),
    ("yolos", "YolosForObjectDetection", "Yolos", {
        **VISION, "image_size": [64, 64], "num_detection_tokens": 6, "num_labels": 5}, "boxes", 0.8),
    ("glpn", "GLPNForDepthEstimation", "GLPN", {
        "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 4, 4],
        "decoder_hidden_size": 16}, "depth", 0.8),
    # Images with text, sound, series.
    ("siglip", "SiglipModel", "Siglip", SIGLIP, "contrast of sigmoids", 0.7),
    ("vilt", "ViltForQuestionAnswering", "Vilt", {
        **ENCODER, **VISION, "num_labels": 3, "max_image_length": -1}, "asked of an image", 0.9),
    ("wavlm", "WavLMForSequenceClassification", "WavLM", {
        **SPEECH, "layerdrop": 0.0, "apply_spec_augment": False}, "sound", 0.8),
    ("sew", "SEWForSequenceClassification", "SEW", {
        **SPEECH, "layerdrop": 0.0, "apply_spec_augment": False, "squeeze_factor": 2}, "sound", 0.8),
    ("spectrogram transformer", "ASTForAudioClassification", "AST", {
        **VISION, "patch_size": 4, "frequency_stride": 4, "time_stride": 4, "max_length": 64,
        "num_mel_bins": 16}, "spectrogram", 0.7),
    ("time series", "TimeSeriesTransformerForPrediction", "TimeSeriesTransformer", SERIES, "forecast", 0.8),
    ("patchtst", "PatchTSTForPrediction", "PatchTST", PATCHES, "patches", 0.7),
    ("patchtsmixer", "PatchTSMixerForPrediction", "PatchTSMixer", PATCHES, "patches", 0.7),
    ("decision transformer", "DecisionTransformerModel", "DecisionTransformer", {
        "state_dim": 6, "act_dim": 3, "hidden_size": 32, "max_ep_len": 16, "n_layer": 2, "n_head": 4,
        "vocab_size": 1}, "trajectory", 0.8),
)
"""Name, model, configuration, its options, batch, budget."""


def architecture(name: str, model: str, config: str, options: dict[str, Any], batch: str,
                 budget: float) -> Scenario:
    """A model of transformers that trains on a batch."""
    def make() -> Task:
        torch.manual_seed(0)
        return calling(made(model, config, options), BATCHES[batch]())
    return Scenario("transformers", name, f"{model}(config)", make, ("transformers",), budget)


# -- Trainers --------------------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sentences with labels."""

    def __init__(self, count: int = 12) -> None:
        self.rows = ids(24, count)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[number], "labels": self.rows[number]}


def llama() -> Any:
    """A Llama with random weights."""
    return made("LlamaForCausalLM", "Llama", DECODER)


def step_of(model: Any) -> Task:
    """A step that calls a language model."""
    return calling(model, BATCHES["labelled"]())


def losses_of(trainer: Any) -> list[float]:
    """Train, and return the losses."""
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


COMMON: dict[str, Any] = {
    "max_steps": 3, "per_device_train_batch_size": 4, "use_cpu": True, "report_to": [], "logging_steps": 1,
    "disable_tqdm": True, "save_strategy": "no"}


def _trainer(**options: Any) -> Task:
    import transformers

    def train(model: Any) -> list[float]:
        arguments = transformers.TrainingArguments(tempfile.mkdtemp(), **{**COMMON, **options})
        return losses_of(transformers.Trainer(model, arguments, train_dataset=rows))
    rows = Rows()
    task = step_of(llama())
    task.train = train
    return task


def tokenizer() -> Any:
    """A tokenizer of words."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(WORDS - 4))]
    found = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=found, pad_token="<pad>", eos_token="</s>",
                                                bos_token="<s>", unk_token="<unk>")


def text_of(length: int = 12) -> str:
    """A sentence."""
    return " ".join(f"w{i}" for i in torch.randint(0, WORDS - 4, (length,)).tolist())


def trl_task(kind: str, columns: Callable[[], dict[str, Any]], make: Callable[[], Any] = llama,
             library: str = "trl", **options: Any) -> Task:
    """A model that a trainer of trl trains. `library`: the module that has the trainer."""
    import datasets

    def train(model: Any) -> list[float]:
        trl = importlib.import_module(library)
        arguments = getattr(trl, f"{kind}Config")(tempfile.mkdtemp(), **{
            **COMMON, "gradient_checkpointing": False, "bf16": False, **options})
        return losses_of(getattr(trl, f"{kind}Trainer")(
            model=model, args=arguments, train_dataset=data, processing_class=tokenizer()))
    data = datasets.Dataset.from_list([columns() for _ in range(12)])
    task = step_of(make())
    task.train = train
    return task


def written() -> dict[str, Any]:
    """A row of text."""
    return {"text": text_of()}


def preferred() -> dict[str, Any]:
    """A row of two answers."""
    return {"prompt": text_of(6), "chosen": " " + text_of(6), "rejected": " " + text_of(6)}


def _lightning() -> Task:
    import lightning

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(32, 4))
            self.losses: list[float] = []

        def forward(self, x: torch.Tensor) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    x, y = torch.randn(96, 32), torch.randint(0, 4, (96,))

    def train(model: Any) -> list[float]:
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 32)
        lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False,
                          enable_model_summary=False, enable_checkpointing=False).fit(model, loader)
        return list(model.losses)
    return Task(Lit(), lambda m: F.cross_entropy(m(x[:32]), y[:32]), train=train)


def _accelerate(**options: Any) -> Task:
    import accelerate

    x, y = torch.randn(96, 32), torch.randint(0, 4, (96,))

    def train(model: Any) -> list[float]:
        accelerator = accelerate.Accelerator(cpu=True, **options)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 32)
        prepared, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), 0.01), loader)
        found = []
        for a, b in loader:
            with accelerator.accumulate(prepared):
                loss = F.cross_entropy(prepared(a), b)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.item())
        return found
    return Task(nn.Sequential(*(Block() for _ in range(4)), nn.Linear(32, 4)),
                lambda m: F.cross_entropy(m(x[:32]), y[:32]), train=train)


def sentences_task(loss: str, columns: tuple[str, ...], **options: Any) -> Task:
    """A model of sentences that a trainer trains. `options`: of the loss."""
    import datasets
    import sentence_transformers as st
    from sentence_transformers import losses
    from sentence_transformers.sentence_transformer import modules
    from transformers import BertConfig, BertModel

    folder = tempfile.mkdtemp()
    tokenizer().save_pretrained(folder)
    BertModel(BertConfig(**ENCODER)).save_pretrained(folder)
    model = st.SentenceTransformer(modules=[modules.Transformer(folder, max_seq_length=32),
                                            modules.Pooling(32)], device="cpu")
    data = datasets.Dataset.from_list([{c: text_of() for c in columns} for _ in range(12)])
    words = ids(12)

    def train(model: Any) -> list[float]:
        arguments = st.SentenceTransformerTrainingArguments(tempfile.mkdtemp(), **COMMON)
        found = getattr(losses, loss)(model, **options)
        return losses_of(st.SentenceTransformerTrainer(model, arguments, train_dataset=data, loss=found))

    def step(m: Any) -> torch.Tensor:
        given = {"input_ids": words, "attention_mask": torch.ones_like(words)}
        out: torch.Tensor = m(given)["sentence_embedding"].square().mean()
        return out
    return Task(model, step, train=train)


def _averaged() -> Task:
    """A student next to the moving average of itself."""
    x = torch.randn(64, 32)
    student = nn.Sequential(*(Block() for _ in range(4)))
    teacher = nn.Sequential(*(Block() for _ in range(4))).requires_grad_(False)

    def step(m: Any) -> torch.Tensor:
        with torch.no_grad():
            for p, q in zip(teacher.parameters(), student.parameters(), strict=True):
                p.lerp_(q, 0.1)
            target = teacher(x).softmax(-1)
        return -(target * m(x).log_softmax(-1)).sum(-1).mean()
    return Task(student, step)


def _preferences() -> Task:
    """DPO by hand: log-probabilities of two answers, with adapters switched off for the reference."""
    model = adapted_llama()
    good, bad = ids(), ids()

    def score(m: Any, words: torch.Tensor) -> torch.Tensor:
        logits = m(input_ids=words).logits[:, :-1].log_softmax(-1)
        return logits.gather(-1, words[:, 1:, None]).squeeze(-1).sum(-1)

    def step(m: Any) -> torch.Tensor:
        with torch.no_grad(), m.disable_adapter():
            before = score(m, good) - score(m, bad)
        return -F.logsigmoid(0.1 * (score(m, good) - score(m, bad) - before)).mean()
    return Task(model, step)


def training(library: str, name: str, lines: str, make: Callable[[], Task], *needs: str,
              **others: Any) -> Scenario:
    """A scenario that a library trains."""
    return Scenario(library, name, lines, make, (library, *needs), **others)


TRAINERS = (
    training("transformers", "trainer", "model", _trainer),
    training("transformers", "trainer, accumulation", "model", lambda: _trainer(
        gradient_accumulation_steps=2, per_device_train_batch_size=2)),
    training("transformers", "trainer, checkpointing", "model", lambda: _trainer(
        gradient_checkpointing=True)),
    training("transformers", "trainer, bf16", "model", lambda: _trainer(bf16=True), budget=0.8),
    training("trl", "sft", "model", lambda: trl_task("SFT", written, max_length=24), "datasets"),
    training("trl", "sft, packed", "model", lambda: trl_task("SFT", written, max_length=24, packing=True),
              "datasets", budget=0.8),
    training("trl", "dpo", "get_peft_model(model, LoraConfig(...))", lambda: trl_task(
        "DPO", preferred, adapted_llama, max_length=24), "datasets", "peft"),
    training("trl", "dpo by hand", "get_peft_model(model, LoraConfig(...))", _preferences, "peft"),
    training("lightning", "a network inside", "module", _lightning),
    training("accelerate", "prepared", "model", _accelerate),
    training("accelerate", "prepared, accumulation", "model", lambda: _accelerate(
        gradient_accumulation_steps=2)),
    *(training("sentence_transformers", name, "model", lambda loss=loss, columns=columns: sentences_task(  # type: ignore[misc]
        loss, columns), "datasets", budget=0.8) for name, loss, columns in (
        ("two columns", "MultipleNegativesRankingLoss", ("anchor", "positive")),
        ("three columns", "TripletLoss", ("anchor", "positive", "negative")))),
    training("torch", "a moving average", "model", _averaged),
)

SCENARIOS: tuple[Scenario, ...] = (*(architecture(*row) for row in ARCHITECTURES), *TRAINERS)
