"""Further scenarios of `field.py`: newer adapters, adapters that change while they train, more trainers of
trl and Lightning, loops of diffusers, and monai's networks with its losses."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from field_architectures import (
    COMMON,
    losses_of,
    preferred,
    step_of,
    text_of,
    tokenizer,
    training,
    trl_task,
    written,
)
from field_scenarios import (
    BATCHES,
    CONDITIONED,
    DECODER,
    ENCODER,
    RESNET,
    TARGETS,
    Block,
    Scenario,
    Task,
    adapted,
    adapted_llama,
    calling,
    denoised,
    ids,
    loss_of,
    made,
    net,
)
from torch import nn
from torch.nn import functional as F

# -- Adapters --------------------------------------------------------------------------------------

NAMED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Hira", {"r": 4, **TARGETS}), ("Lily", {"r": 4, **TARGETS}), ("Psoft", {"r": 4, **TARGETS}),
    ("Pvera", {"r": 4, **TARGETS}), ("TinyLora", {"r": 2, **TARGETS}), ("UniLora", {"r": 4, **TARGETS}),
    ("Glora", {"r": 4, **TARGETS}), ("Peanut", TARGETS), ("Adamss", TARGETS), ("Deft", TARGETS),
    ("Beft", {}), ("Supertuning", {}), ("Shadow", {}),
    ("AdaptionPrompt", {"adapter_len": 4, "adapter_layers": 2}))


def _base() -> Any:
    return made("LlamaForCausalLM", "Llama", DECODER)


def _lora(**options: Any) -> Any:
    import peft

    return peft.LoraConfig(task_type="CAUSAL_LM", **{"r": 4, **TARGETS, **options})


def _changing(make: Callable[[], Any], before: Callable[[Any, int], Any] = lambda m, k: None,
              after: Callable[[Any, int], Any] = lambda m, k: None) -> Task:
    """A loop in which something happens to the adapters before and after each step."""
    model = make()
    batch = {"input_ids": (words := ids()), "labels": words.clone()}

    def train(m: Any) -> list[float]:
        losses = []
        for number in range(6):
            before(model, number)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
            loss = loss_of(m(**batch))
            loss.backward()
            optimizer.step()
            after(model, number)
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses
    return Task(model, lambda m: loss_of(m(**batch)), train=train)


def _two_adapters() -> Any:
    import peft

    model = peft.get_peft_model(_base(), _lora(), adapter_name="first").train()
    model.add_adapter("second", _lora(r=8))
    return model


def _merged(model: Any, number: int) -> None:
    if number == 2:
        model.merge_adapter()
        model.unmerge_adapter()


def _another(model: Any, number: int) -> None:
    if number == 2:
        model.add_adapter("other", _lora(r=8))
        model.set_adapter("other")
        model.delete_adapter("default")


def _allocated() -> Task:
    import peft

    return _changing(lambda: peft.get_peft_model(_base(), peft.AdaLoraConfig(
        task_type="CAUSAL_LM", target_r=2, init_r=4, total_step=8, tinit=1, tfinal=2, deltaT=1,
        **TARGETS)).train(), after=lambda m, k: m.base_model.update_and_allocate(k))


def _in_turn(model: Any, number: int) -> None:
    for k, layer in enumerate(model.model.layers):
        layer.requires_grad_(k == number // 2 % 3)


def _thawed(model: Any, number: int) -> None:
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    for layer in list(model.model.layers)[::-1][:number // 2]:
        layer.requires_grad_(True)


def _taught_by_average() -> Task:
    """The moving average of an adapter, a second one of the same model, is the teacher."""
    model, words = _two_adapters(), ids()

    def step(m: Any) -> torch.Tensor:
        with torch.no_grad():
            model.set_adapter("second")
            target = m(input_ids=words).logits.softmax(-1)
        model.set_adapter("first")
        return -(target * m(input_ids=words).logits.log_softmax(-1)).sum(-1).mean()
    return Task(model, step)


def _adapted_images(**options: Any) -> Task:
    import peft

    model = peft.get_peft_model(made("ResNetForImageClassification", "ResNet", RESNET), peft.LoraConfig(
        r=4, target_modules=["convolution"], modules_to_save=["classifier"], **options))
    return calling(model.train(), BATCHES["image"]())


def _adapted_experts() -> Task:
    import peft

    model = made("MixtralForCausalLM", "Mixtral", {
        **DECODER, "num_local_experts": 4, "num_experts_per_tok": 2})
    return step_of(peft.get_peft_model(model, _lora(
        target_parameters=["experts.gate_up_proj", "experts.down_proj"])).train())


def _adapters(name: str, make: Callable[[], Task], lines: str = "get_peft_model(model, LoraConfig(...))"
              ) -> Scenario:
    return Scenario("peft", name, lines, make, ("transformers", "peft"), 0.6)


ADAPTERS = (
    *(adapted(name.lower(), f"{name}Config", options, budget=0.6) for name, options in NAMED),
    adapted("dora, dropout, all linear", "LoraConfig", {
        "r": 4, "use_dora": True, "lora_dropout": 0.1, "target_modules": "all-linear"}, budget=0.6),
    adapted("lora, layer replication", "LoraConfig", {
        "r": 4, "layer_replication": [[0, 2], [1, 3]], **TARGETS}, budget=0.6),
    adapted("lora, trainable tokens", "LoraConfig", {
        "r": 4, "trainable_token_indices": {"embed_tokens": [5, 6]}, **TARGETS}, budget=0.6),
    _adapters("adapters in turn", lambda: _changing(
        _two_adapters, before=lambda m, k: m.set_adapter(("first", "second")[k % 2]))),
    _adapters("merged and unmerged", lambda: _changing(adapted_llama, after=_merged)),
    _adapters("one deleted, another added", lambda: _changing(adapted_llama, after=_another)),
    _adapters("adalora, allocation in the loop", _allocated, "get_peft_model(model, AdaLoraConfig(...))"),
    _adapters("an average of the adapter teaches", _taught_by_average),
    _adapters("lora on convolutions", _adapted_images),
    _adapters("dora on convolutions", lambda: _adapted_images(use_dora=True)),
    _adapters("lora on experts' parameters", _adapted_experts),
    _adapters("layers in turn", lambda: _changing(_base, before=_in_turn), "model"),
    _adapters("layers thawed one by one", lambda: _changing(_base, before=_thawed), "model"),
)


# -- Trainers --------------------------------------------------------------------------------------


def _asked() -> dict[str, Any]:
    return {"prompt": text_of(6), "completion": " " + text_of(6)}


def _judged() -> dict[str, Any]:
    return {**_asked(), "label": bool(torch.rand(()) < 0.5)}


def _rewarded() -> Task:
    """A reward model."""
    import datasets
    import trl

    data = datasets.Dataset.from_list([{"chosen": text_of(), "rejected": text_of()} for _ in range(12)])
    words = ids()

    def train(model: Any) -> list[float]:
        arguments = trl.RewardConfig(tempfile.mkdtemp(), **{
            **COMMON, "gradient_checkpointing": False, "bf16": False, "max_length": 24})
        return losses_of(trl.RewardTrainer(model=model, args=arguments, train_dataset=data,
                                           processing_class=tokenizer()))
    return Task(made("LlamaForSequenceClassification", "Llama", {**DECODER, "num_labels": 1}),
                lambda m: m(input_ids=words).logits.square().mean(), train=train)


def _lit(*, by_hand: bool = False, **options: Any) -> Task:
    """A module of Lightning. `by_hand`: steps, clipping and accumulation of its own."""
    import lightning

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(32, 4)), []
            self.automatic_optimization = not by_hand

        def forward(self, x: torch.Tensor) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, number: int) -> torch.Tensor | None:
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.log("loss", loss)
            self.losses.append(loss.item())
            if not by_hand:
                return loss
            optimizer = self.optimizers()
            self.manual_backward(loss / 2)
            if number % 2:
                self.clip_gradients(optimizer, 1.0, "norm")
                optimizer.step()
                optimizer.zero_grad()
            return None

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("valid", F.cross_entropy(self(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), 0.01)
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]

    x, y = torch.randn(192, 32), torch.randint(0, 4, (192,))
    mixed = options.get("precision") == "bf16-mixed"

    def train(model: Any) -> list[float]:
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 32)
        lightning.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False,
                          enable_model_summary=False, enable_checkpointing=False, **options).fit(
            model, loader, loader)
        return list(model.losses)

    def step(model: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            return F.cross_entropy(model(x[:32].to(next(model.parameters()).dtype)), y[:32])
    return Task(Lit(), step, train=train)


def _averaging() -> Task:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    return _lit(callbacks=[StochasticWeightAveraging(1e-2, swa_epoch_start=1)])


SFT: dict[str, dict[str, Any]] = {
    "dft loss": {"loss_type": "dft"}, "loss in chunks": {"loss_type": "chunked_nll"},
    "noise, accumulation": {"neftune_noise_alpha": 5, "gradient_accumulation_steps": 2,
                            "per_device_train_batch_size": 2}}
DPO: dict[str, dict[str, Any]] = {
    "ipo": {"loss_type": ["ipo"]}, "precomputed reference": {"precompute_ref_log_probs": True},
    "several losses": {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}}
TRAINERS = (
    *(training("trl", f"sft, {name}", "model", lambda options=options: trl_task(  # type: ignore[misc]
        "SFT", written, max_length=24, **options), "datasets", budget=0.6) for name, options in SFT.items()),
    *(training("trl", f"dpo, {name}", "get_peft_model(model, LoraConfig(...))",
               lambda options=options: trl_task(  # type: ignore[misc]
                   "DPO", preferred, adapted_llama, max_length=24, **options), "datasets", "peft", budget=0.6)
      for name, options in DPO.items()),
    training("trl", "sft, completions alone", "model", lambda: trl_task(
        "SFT", _asked, max_length=24, completion_only_loss=True), "datasets", budget=0.6),
    training("trl", "kto", "get_peft_model(model, LoraConfig(...))", lambda: trl_task(
        "KTO", _judged, adapted_llama, max_length=24), "datasets", "peft", budget=0.6),
    training("trl", "reward", "model", _rewarded, "datasets", budget=0.6),
    training("lightning", "accumulation, a schedule, validation", "module",
             lambda: _lit(accumulate_grad_batches=2, gradient_clip_val=1.0), budget=0.6),
    training("lightning", "steps by hand, clipping", "module", lambda: _lit(by_hand=True), budget=0.6),
    training("lightning", "bf16-mixed", "module", lambda: _lit(precision="bf16-mixed"), budget=0.6),
    training("lightning", "bf16-true", "module", lambda: _lit(precision="bf16-true"), budget=0.6),
    training("lightning", "stochastic weight averaging", "module", _averaging, budget=0.6),
)


# -- Diffusion -------------------------------------------------------------------------------------


def _diffused(prediction: str) -> Task:
    """The step of text to image, with losses weighted by signal to noise."""
    import diffusers
    from diffusers.training_utils import compute_snr

    schedule = diffusers.DDPMScheduler(100, prediction_type=prediction)
    x, words = torch.randn(4, 4, 16, 16), torch.randn(4, 5, 16)

    def step(m: Any) -> torch.Tensor:
        noise, times = torch.randn_like(x), torch.randint(0, 100, (4,))
        by_speed = prediction == "v_prediction"
        target = schedule.get_velocity(x, noise, times) if by_speed else noise
        found = m(schedule.add_noise(x, noise, times), times, words, return_dict=False)[0]
        ratio = compute_snr(schedule, times)
        losses = F.mse_loss(found.float(), target.float(), reduction="none").flatten(1).mean(1)
        return (losses * ratio.clamp(max=5) / (ratio + by_speed)).mean()
    return Task(diffusers.UNet2DConditionModel(**CONDITIONED).train(), step)


def _with_text() -> Task:
    """DreamBooth with its text encoder."""
    import diffusers

    text = made("CLIPTextModel", "CLIPText", {
        **ENCODER, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2})
    model = nn.ModuleDict({"text": text, "unet": diffusers.UNet2DConditionModel(**CONDITIONED).train()})
    words, x = ids(8), torch.randn(4, 4, 16, 16)
    return Task(model, lambda m: F.mse_loss(
        m["unet"](x, torch.arange(4), m["text"](words)[0]).sample, x))


def _consistent() -> Task:
    """Consistency distillation: the teacher's step, and a slow copy as the target."""
    import diffusers

    student = diffusers.UNet2DConditionModel(**CONDITIONED).train()
    teacher, slow = (copy.deepcopy(student).requires_grad_(False) for _ in range(2))
    x, words = torch.randn(2, 4, 16, 16), torch.randn(2, 5, 16)

    def step(m: Any) -> torch.Tensor:
        times = torch.randint(20, 100, (2,))
        found = m(x, times, words).sample
        with torch.no_grad():
            told, untold = teacher(x, times, words).sample, teacher(x, times, 0 * words).sample
            target = slow(x - 0.1 * (told + 3 * (told - untold)), times - 20, words).sample
            for one, other in zip(slow.parameters(), student.parameters(), strict=True):
                one.lerp_(other, 0.05)
        return ((found - target).square() + 1e-6).sqrt().mean() - 1e-3
    return Task(student, step)


DIFFUSION = (
    denoised("unet, added embeddings", "UNet2DConditionModel", {
        **CONDITIONED, "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 64}, lambda: {
            "sample": torch.randn(2, 4, 16, 16), "timestep": torch.tensor([3, 5]),
            "encoder_hidden_states": torch.randn(2, 5, 16), "added_cond_kwargs": {
                "text_embeds": torch.randn(2, 16), "time_ids": torch.ones(2, 6)}}, budget=0.6),
    denoised("unet, classes", "UNet2DConditionModel", {**CONDITIONED, "num_class_embeds": 4}, lambda: {
        "sample": torch.randn(2, 4, 16, 16), "timestep": torch.tensor([3, 5]),
        "encoder_hidden_states": torch.randn(2, 5, 16), "class_labels": torch.tensor([1, 2])}, budget=0.6),
    *(Scenario("diffusers", name, "unet", make, ("diffusers",), 0.6) for name, make in (
        ("text to image, weighted", lambda: _diffused("epsilon")),
        ("text to image, velocities", lambda: _diffused("v_prediction")),
        ("consistency distillation", _consistent))),
    Scenario("diffusers", "unet and text encoder", "model", _with_text, ("diffusers", "transformers"), 0.6),
)


# -- Volumes ---------------------------------------------------------------------------------------


def _segmented(model: nn.Module, size: tuple[int, ...], **options: Any) -> Task:
    """A network with a loss of monai. `options`: the loss, and what it is given."""
    import monai.losses

    name = options.pop("loss", "DiceCELoss")
    loss = getattr(monai.losses, name)(to_onehot_y=True, softmax=True, **options)
    x, y = torch.randn(2, 1, *size), torch.randint(0, 2, (2, 1, *size))
    return Task(model.train(), lambda m: loss(m(x), y))


def _masked(model: nn.Module) -> Task:
    x = torch.randn(2, 1, 16, 16, 16)

    def step(m: Any) -> torch.Tensor:
        found, mask = m(x)
        return (found.square().mean(-1) * mask).sum() / mask.sum()
    return Task(model.train(), step)


def _variational(model: nn.Module) -> Task:
    x = torch.rand(4, 1, 32, 32)

    def step(m: Any) -> torch.Tensor:
        found, mean, spread, _ = m(x)
        return F.mse_loss(found, x) - (1 + spread - mean.square() - spread.exp()).mean() / 2
    return Task(model.train(), step)


VIT: dict[str, Any] = {"hidden_size": 48, "mlp_dim": 64, "num_layers": 2, "num_heads": 4}
VOLUMES = (
    net("monai", "monai.networks.nets", "unet, distances of surfaces", "UNet", lambda nets: _segmented(
        nets.UNet(2, 1, 2, (8, 16, 32), (2, 2), num_res_units=1), (32, 32), loss="HausdorffDTLoss"),
        budget=0.7),
    net("monai", "monai.networks.nets", "flexible unet", "FlexibleUNet", lambda nets: _segmented(
        nets.FlexibleUNet(1, 2, "resnet10", decoder_channels=(32, 16, 8, 8, 8), spatial_dims=2), (64, 64)),
        budget=0.9),
    net("monai", "monai.networks.nets", "highresnet", "HighResNet", lambda nets: _segmented(
        nets.HighResNet(3, 1, 2, dropout_prob=0.1), (8, 8, 8)), budget=0.7),
    net("monai", "monai.networks.nets", "variational autoencoder", "VarAutoEncoder",
        lambda nets: _variational(nets.VarAutoEncoder(2, (1, 32, 32), 1, 8, (8, 16), (2, 2))), budget=0.7),
    net("monai", "monai.networks.nets", "masked autoencoder", "MaskedAutoEncoderViT", lambda nets: _masked(
        nets.MaskedAutoEncoderViT(1, (16,) * 3, (4,) * 3, **VIT, **{
            f"decoder_{k}": v for k, v in VIT.items()})), budget=0.7),
)

SCENARIOS: tuple[Scenario, ...] = (*ADAPTERS, *TRAINERS, *DIFFUSION, *VOLUMES)
