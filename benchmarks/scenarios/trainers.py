"""Scenarios of `field.py`: what the trainers of transformers, trl, lightning, accelerate and
sentence_transformers train."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from scenarios.base import Scenario, Task, blocks, training
from scenarios.models import DECODER, ENCODER, WORDS, adapted_llama, ids, llama, made, step_of

COMMON: dict[str, Any] = {
    "max_steps": 3, "per_device_train_batch_size": 4, "use_cpu": True, "report_to": [], "logging_steps": 1,
    "disable_tqdm": True, "save_strategy": "no"}
"""Arguments of every trainer that is one of transformers'."""
ADAPTED = "get_peft_model(model, LoraConfig(...))"


def losses_of(trainer: Any) -> list[float]:
    """Train, and return the losses."""
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sentences with labels."""

    def __init__(self, count: int = 12) -> None:
        self.rows = ids(24, count)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[number], "labels": self.rows[number]}


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


def _written() -> dict[str, Any]:
    return {"text": text_of()}


def _preferred() -> dict[str, Any]:
    return {"prompt": text_of(6), "chosen": " " + text_of(6), "rejected": " " + text_of(6)}


def _asked() -> dict[str, Any]:
    return {"prompt": text_of(6), "completion": " " + text_of(6)}


def _judged() -> dict[str, Any]:
    return {**_asked(), "label": bool(torch.rand(()) < 0.5)}


def _told() -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text_of(6)} for role in ("user", "assistant")]}


def _talking() -> Any:
    words = tokenizer()
    words.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    return words


def _by_trl(name: str, kind: str, columns: Callable[[], dict[str, Any]], make: Callable[[], Any] = llama,
            budget: float = 0.6, *, library: str = "trl", given: Callable[[], dict[str, Any]] = dict,
            words: Callable[[], Any] = tokenizer, task: Callable[[Any], Task] = step_of,
            **options: Any) -> Scenario:
    """A trainer of trl, in the module `library`. `given`: what else it gets; `task`: a step alone."""
    def prepared() -> Task:
        import datasets

        def train(model: Any) -> list[float]:
            trl = importlib.import_module(library)
            arguments = getattr(trl, f"{kind}Config")(tempfile.mkdtemp(), **{
                **COMMON, "gradient_checkpointing": False, "bf16": False, **options})
            return losses_of(getattr(trl, f"{kind}Trainer")(
                model=model, args=arguments, train_dataset=data, processing_class=words(), **others))
        data = datasets.Dataset.from_list([columns() for _ in range(12)])
        found, others = task(make()), given()
        found.train = train
        return found
    with_adapters = make is adapted_llama
    return training("trl", name, ADAPTED if with_adapters else "model", prepared, "datasets",
                    *(["peft"] if with_adapters else []), budget=budget)


def _sft(name: str, columns: Callable[[], dict[str, Any]] = _written, make: Callable[[], Any] = llama,
         budget: float = 0.6, **options: Any) -> Scenario:
    return _by_trl(name, "SFT", columns, make, budget, max_length=24, **options)


def _preferring(name: str, kind: str, make: Callable[[], Any] = llama, budget: float = 0.6,
                **options: Any) -> Scenario:
    return _by_trl(name, kind, _preferred, make, budget, max_length=24,
                   library="trl" if kind == "DPO" else f"trl.experimental.{kind.lower()}", **options)


def _answering(name: str, kind: str, make: Callable[[], Any] = llama, budget: float = 0.6,
               **options: Any) -> Scenario:
    """Sampled answers, with the reward of a function."""
    return _by_trl(name, kind, lambda: {"prompt": text_of(6)}, make, budget, given=lambda: {
        "reward_funcs": lambda completions, **others: [float(len(c)) for c in completions]},
        num_generations=2, max_completion_length=8, **options)


def _scored(model: Any) -> Task:
    words = ids()
    return Task(model, lambda m: m(input_ids=words).logits.square().mean())


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


def _from_folder() -> Any:
    folder = tempfile.mkdtemp()
    llama().save_pretrained(folder)
    return importlib.import_module("transformers").AutoModelForCausalLM.from_pretrained(folder)


def _loader(*columns: torch.Tensor) -> Any:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*columns), 32)


def _fitted(model: Any, *columns: torch.Tensor, max_epochs: int = 1, valid: bool = False,
            **options: Any) -> list[float]:
    """Train a module of Lightning, and return the losses. `valid`: validate it, too."""
    import lightning

    lightning.Trainer(max_epochs=max_epochs, accelerator="cpu", logger=False, enable_progress_bar=False,
                      enable_model_summary=False, enable_checkpointing=False, **options).fit(
        model, _loader(*columns), _loader(*columns) if valid else None)
    return list(model.losses)


def _lightning() -> Task:
    import lightning

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = blocks(4, nn.Linear(32, 4))
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
    return Task(Lit(), lambda m: F.cross_entropy(m(x[:32]), y[:32]), train=lambda m: _fitted(m, x, y))


def _lit(*, by_hand: bool = False, **options: Any) -> Task:
    """A module of Lightning. `by_hand`: steps, clipping and accumulation of its own."""
    import lightning

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = blocks(4, nn.Linear(32, 4)), []
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

    def step(model: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            return F.cross_entropy(model(x[:32].to(next(model.parameters()).dtype)), y[:32])
    return Task(Lit(), step, train=lambda m: _fitted(m, x, y, max_epochs=2, valid=True, **options))


def _averaging() -> Task:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    return _lit(callbacks=[StochasticWeightAveraging(1e-2, swa_epoch_start=1)])


def _adversaries() -> Task:
    """Two networks and their optimizers, by hand."""
    import lightning

    class Adversaries(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.makes = blocks(3)
            self.judges = blocks(3, nn.Linear(32, 1))
            self.losses: list[float] = []

        def training_step(self, batch: Any, number: int) -> None:
            first, second = self.optimizers()
            fake = self.makes(torch.randn_like(batch[0]))
            for optimizer, loss in (
                    (first, lambda: F.softplus(-self.judges(fake)).mean()),
                    (second, lambda: (F.softplus(-self.judges(batch[0]))
                                      + F.softplus(self.judges(fake.detach()))).mean())):
                optimizer.zero_grad()
                found = loss()
                self.manual_backward(found)
                optimizer.step()
                self.losses.append(found.item())

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(m.parameters(), 0.01) for m in (self.makes, self.judges)]

    x = torch.randn(96, 32)
    return Task(Adversaries(), lambda m: F.softplus(-m.judges(m.makes(x[:32]))).mean(),
                train=lambda m: _fitted(m, x))


def _accelerate(**options: Any) -> Task:
    import accelerate

    x, y = torch.randn(96, 32), torch.randint(0, 4, (96,))

    def train(model: Any) -> list[float]:
        accelerator = accelerate.Accelerator(cpu=True, **options)
        prepared, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), 0.01), _loader(x, y))
        found = []
        for a, b in loader:
            with accelerator.accumulate(prepared):
                loss = F.cross_entropy(prepared(a), b)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.item())
        return found
    return Task(blocks(4, nn.Linear(32, 4)), lambda m: F.cross_entropy(m(x[:32]), y[:32]), train=train)


def sentences_task(loss: str, columns: tuple[str, ...], label: str = "", **options: Any) -> Task:
    """A model of sentences that a trainer trains. `label`: the type of a column of labels; `options`: of the
    loss."""
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
    labels = {"int": lambda k: {"label": k % 2}, "float": lambda k: {"label": k / 12}, "": lambda _: {}}
    data = datasets.Dataset.from_list([
        {**{c: text_of() for c in columns}, **labels[label](k)} for k in range(12)])
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


def _of_sentences(name: str, loss: str, *columns: str, **options: Any) -> Scenario:
    return training("sentence_transformers", name, "model", lambda: sentences_task(
        loss, ("anchor", "positive", *columns), **options), "datasets", budget=0.8)


SCENARIOS: tuple[Scenario, ...] = (
    training("transformers", "trainer", "model", _trainer),
    training("transformers", "trainer, accumulation", "model", lambda: _trainer(
        gradient_accumulation_steps=2, per_device_train_batch_size=2)),
    training("transformers", "trainer, checkpointing", "model", lambda: _trainer(
        gradient_checkpointing=True)),
    training("transformers", "trainer, bf16", "model", lambda: _trainer(bf16=True), budget=0.8),
    _sft("sft", budget=0.7),
    _sft("sft, packed", budget=0.8, packing=True),
    _sft("sft, packed without padding", packing=True, padding_free=True),
    _sft("sft, completions alone", _asked, completion_only_loss=True),
    _sft("sft, dft loss", loss_type="dft"),
    _sft("sft, loss in chunks", loss_type="chunked_nll"),
    _sft("sft, noise, accumulation", neftune_noise_alpha=5, gradient_accumulation_steps=2,
         per_device_train_batch_size=2),
    _sft("sft, adapters and checkpointing", make=adapted_llama, budget=1.0, gradient_checkpointing=True),
    _preferring("dpo", "DPO", adapted_llama, 0.7),
    _preferring("dpo, a whole reference model", "DPO", _from_folder, 0.7),
    _preferring("dpo, ipo", "DPO", adapted_llama, loss_type=["ipo"]),
    _preferring("dpo, precomputed reference", "DPO", adapted_llama, precompute_ref_log_probs=True),
    _preferring("dpo, several losses", "DPO", adapted_llama, loss_type=["sigmoid", "bco_pair", "sft"],
                loss_weights=[0.8, 0.2, 1.0]),
    _preferring("dpo, hinge, other reference", "DPO", adapted_llama, loss_type=["hinge"], beta=0.3,
                precompute_ref_log_probs=True, gradient_accumulation_steps=2, per_device_train_batch_size=2),
    training("trl", "dpo by hand", ADAPTED, _preferences, "peft"),
    _preferring("orpo", "ORPO", budget=0.7),
    _preferring("orpo, adapters", "ORPO", adapted_llama),
    _preferring("cpo", "CPO", budget=0.7),
    _preferring("cpo, simpo", "CPO", loss_type="simpo", cpo_alpha=0.0),
    _by_trl("kto", "KTO", _judged, adapted_llama, max_length=24),
    _by_trl("reward", "Reward", lambda: {"chosen": text_of(), "rejected": text_of()}, lambda: made(
        "LlamaForSequenceClassification", "Llama", {**DECODER, "num_labels": 1}), task=_scored,
        max_length=24),
    _answering("grpo", "GRPO", budget=0.7),
    _answering("grpo, adapters, kept close", "GRPO", adapted_llama, beta=0.1, num_iterations=2,
               loss_type="dr_grpo"),
    _answering("rloo", "RLOO", beta=0.0),
    _by_trl("gkd", "GKD", _told, library="trl.experimental.gkd", words=_talking,
            given=lambda: {"teacher_model": llama()}, max_new_tokens=8, lmbda=0.5),
    training("lightning", "a network inside", "module", _lightning),
    training("lightning", "two optimizers by hand", "module", _adversaries),
    training("lightning", "accumulation, a schedule, validation", "module",
             lambda: _lit(accumulate_grad_batches=2, gradient_clip_val=1.0), budget=0.6),
    training("lightning", "steps by hand, clipping", "module", lambda: _lit(by_hand=True), budget=0.6),
    training("lightning", "bf16-mixed", "module", lambda: _lit(precision="bf16-mixed"), budget=0.6),
    training("lightning", "bf16-true", "module", lambda: _lit(precision="bf16-true"), budget=0.6),
    training("lightning", "stochastic weight averaging", "module", _averaging, budget=0.6),
    training("accelerate", "prepared", "model", _accelerate),
    training("accelerate", "prepared, accumulation", "model", lambda: _accelerate(
        gradient_accumulation_steps=2)),
    _of_sentences("two columns", "MultipleNegativesRankingLoss"),
    _of_sentences("three columns", "TripletLoss", "negative"),
    _of_sentences("negatives of both sides", "MultipleNegativesSymmetricRankingLoss"),
    _of_sentences("online contrast", "OnlineContrastiveLoss", label="int"),
    _of_sentences("cosines", "CosineSimilarityLoss", label="float"),
    _of_sentences("ranked cosines", "CoSENTLoss", label="float"),
    _of_sentences("entailment", "SoftmaxLoss", label="int", num_labels=2, sentence_embedding_dimension=32),
    _of_sentences("cached negatives", "CachedMultipleNegativesRankingLoss", mini_batch_size=2),
)
