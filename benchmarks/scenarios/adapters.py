"""Scenarios of `field.py`: adapters of peft, and models whose frozen parts change while they train."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from scenarios.base import Scenario, Task, looped, stepped, training
from scenarios.models import (
    BATCHES,
    DECODER,
    ENCODER,
    RESNET,
    T5,
    TARGETS,
    adapted_llama,
    calling,
    ids,
    llama,
    loss_of,
    made,
    step_of,
)

NAMED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Hira", {"r": 4, **TARGETS}), ("Lily", {"r": 4, **TARGETS}), ("Psoft", {"r": 4, **TARGETS}),
    ("Pvera", {"r": 4, **TARGETS}), ("TinyLora", {"r": 2, **TARGETS}), ("UniLora", {"r": 4, **TARGETS}),
    ("Glora", {"r": 4, **TARGETS}), ("Peanut", TARGETS), ("Adamss", TARGETS), ("Deft", TARGETS),
    ("Beft", {}), ("Supertuning", {}), ("Shadow", {}),
    ("AdaptionPrompt", {"adapter_len": 4, "adapter_layers": 2}))


def _scenario(name: str, make: Callable[[], Task], config: str = "LoraConfig", budget: float = 0.6
              ) -> Scenario:
    """`config`: of the adapters; empty: there are none."""
    lines = f"get_peft_model(model, {config}(...))" if config else "model"
    return Scenario("peft", name, lines, make, ("transformers", "peft"), budget)


def adapted(name: str, config: str, options: dict[str, Any], change: Callable[[Any], Any] = lambda m: None,
            budget: float = 0.7) -> Scenario:
    """A Llama with adapters."""
    def make() -> Task:
        import peft

        model = peft.get_peft_model(llama(), getattr(peft, config)(task_type="CAUSAL_LM", **options)).train()
        change(model)
        words = ids()
        words[:, 10:12] = torch.tensor([5, 6])
        return calling(model, {"input_ids": words, "labels": words.clone()})
    return _scenario(name, make, config, budget)


def _checkpointing(model: Any) -> None:
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()


def _elsewhere(model: tuple[str, str, dict[str, Any]], task: str, batch: str, name: str, config: str,
               options: dict[str, Any]) -> Scenario:
    """Adapters of a model other than a decoder."""
    def make() -> Task:
        import peft

        chosen = getattr(peft, config)(task_type=task, **options)
        return calling(peft.get_peft_model(made(*model), chosen).train(), BATCHES[batch]())
    return _scenario(name, make, config)


_of_t5 = functools.partial(
    _elsewhere, ("T5ForConditionalGeneration", "T5", T5), "SEQ_2_SEQ_LM", "translated")
_of_bert = functools.partial(
    _elsewhere, ("BertForSequenceClassification", "Bert", ENCODER), "SEQ_CLS", "sentence")


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

    model = peft.get_peft_model(llama(), _lora(), adapter_name="first").train()
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

    return _changing(lambda: peft.get_peft_model(llama(), peft.AdaLoraConfig(
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


def _adapted_later() -> Task:
    model, batch = llama(), BATCHES["labelled"]()

    def train(m: Any) -> list[float]:
        peft = importlib.import_module("peft")
        losses = stepped(m, lambda m, _: m(**batch).loss, 2)
        adapted = peft.get_peft_model(m, peft.LoraConfig(r=4, **TARGETS))
        losses += stepped(adapted, lambda m, _: m(**batch).loss, 3)
        merged = adapted.merge_and_unload().requires_grad_(True)
        return losses + stepped(merged, lambda m, _: m(**batch).loss, 2)
    return looped(model, lambda m, _: m(**batch).loss, train)


SCENARIOS: tuple[Scenario, ...] = (
    # A Llama.
    adapted("lora", "LoraConfig", {"r": 4, **TARGETS}),
    adapted("lora, dropout", "LoraConfig", {"r": 4, "lora_dropout": 0.1, **TARGETS}),
    adapted("lora, checkpointing", "LoraConfig", {"r": 4, **TARGETS}, _checkpointing, budget=1.0),
    adapted("dora", "LoraConfig", {"r": 4, "use_dora": True, **TARGETS}),
    adapted("alora", "LoraConfig", {"r": 4, "alora_invocation_tokens": [5, 6], **TARGETS}),
    adapted("alora, checkpointing", "LoraConfig", {"r": 4, "alora_invocation_tokens": [5, 6], **TARGETS},
            _checkpointing, budget=1.0),
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
    adapted("p-tuning", "PromptEncoderConfig", {"num_virtual_tokens": 4, "encoder_hidden_size": 16}),
    adapted("ln tuning", "LNTuningConfig", {"target_modules": ["input_layernorm"]}),
    adapted("fourierft", "FourierFTConfig", {"n_frequency": 8, **TARGETS}),
    adapted("hra", "HRAConfig", {"r": 4, **TARGETS}, budget=0.9),
    adapted("rslora, pissa", "LoraConfig", {
        "r": 4, "use_rslora": True, "init_lora_weights": "pissa", **TARGETS}),
    adapted("vb-lora", "VBLoRAConfig", {"r": 4, "num_vectors": 8, "vector_length": 8, "topk": 2, **TARGETS}),
    adapted("randlora", "RandLoraConfig", {"r": 4, **TARGETS}),
    adapted("trainable tokens", "TrainableTokensConfig", {
        "token_indices": [5, 6, 7], "target_modules": ["embed_tokens"]}),
    adapted("miss", "MissConfig", {"r": 4, **TARGETS}),
    adapted("c3a", "C3AConfig", {"block_size": 8, **TARGETS}),
    adapted("road", "RoadConfig", {"group_size": 8, **TARGETS}),
    adapted("delora", "DeloraConfig", {"r": 4, **TARGETS}),
    adapted("gralora", "GraloraConfig", {"r": 4, "gralora_k": 2, **TARGETS}),
    adapted("shira", "ShiraConfig", {"r": 4, **TARGETS}),
    adapted("waveft", "WaveFTConfig", {"n_frequency": 16, **TARGETS}),
    adapted("osf", "OSFConfig", {"effective_rank": 16, **TARGETS}),
    *(adapted(name.lower(), f"{name}Config", options, budget=0.6) for name, options in NAMED),
    adapted("frod", "FrodConfig", TARGETS, budget=0.9),
    adapted("cpt", "CPTConfig", {
        "cpt_token_ids": [3, 4, 5], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [2, 3, 4]}, budget=0.6),
    adapted("lora, olora", "LoraConfig", {"r": 4, "init_lora_weights": "olora", **TARGETS}, budget=0.6),
    adapted("lora, orthogonal", "LoraConfig", {
        "r": 4, "init_lora_weights": "orthogonal", **TARGETS}, budget=0.6),
    adapted("dora, dropout, all linear", "LoraConfig", {
        "r": 4, "use_dora": True, "lora_dropout": 0.1, "target_modules": "all-linear"}, budget=0.6),
    adapted("lora, layer replication", "LoraConfig", {
        "r": 4, "layer_replication": [[0, 2], [1, 3]], **TARGETS}, budget=0.6),
    adapted("lora, trainable tokens", "LoraConfig", {
        "r": 4, "trainable_token_indices": {"embed_tokens": [5, 6]}, **TARGETS}, budget=0.6),
    # A Llama whose adapters or layers change while it trains.
    _scenario("adapters in turn", lambda: _changing(
        _two_adapters, before=lambda m, k: m.set_adapter(("first", "second")[k % 2]))),
    _scenario("merged and unmerged", lambda: _changing(adapted_llama, after=_merged)),
    _scenario("one deleted, another added", lambda: _changing(adapted_llama, after=_another)),
    _scenario("adalora, allocation in the loop", _allocated, "AdaLoraConfig"),
    _scenario("an average of the adapter teaches", _taught_by_average),
    _scenario("layers in turn", lambda: _changing(llama, before=_in_turn), ""),
    _scenario("layers thawed one by one", lambda: _changing(llama, before=_thawed), ""),
    training("peft", "lora on a model with a budget, merged", "model", _adapted_later, "transformers"),
    # Other models.
    _scenario("lora on convolutions", _adapted_images),
    _scenario("dora on convolutions", lambda: _adapted_images(use_dora=True)),
    _scenario("lora on experts' parameters", _adapted_experts),
    _of_t5("t5, lora", "LoraConfig", {"r": 4, "lora_dropout": 0.1}),
    _of_t5("t5, ia3", "IA3Config", {}),
    _of_t5("t5, prefix tuning", "PrefixTuningConfig", {
        "num_virtual_tokens": 4, "prefix_projection": True, "encoder_hidden_size": 32}),
    _of_bert("bert, dora", "LoraConfig", {"r": 4, "use_dora": True}),
    _of_bert("bert, prompt tuning", "PromptTuningConfig", {"num_virtual_tokens": 4}),
    _of_bert("bert, vera", "VeraConfig", {"r": 4}),
)
