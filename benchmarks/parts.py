"""Models that cannot be planned as a whole, or are trained through other methods than their forward: peak and
time at 60% and 40% of the plain peak, next to `torch.utils.checkpoint` around each layer: ``python
benchmarks/parts.py --models all --write``.

Steps differ (layers are dropped, spans masked at random), so a peak is the largest of several steps with the
same seeds as the plain ones. The first step, which runs as it is and is measured, is not among these. Times
are medians of steps taken in turn with plain ones.
"""

from __future__ import annotations

import functools
import logging
import re
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from beside import add_row, options_of, peak_of, read_rows, step, write_between
from field import Notices, seed_all
from scenarios.base import Task
from scenarios.diffusion import coded
from scenarios.images_and_text import TOWERS, by_features
from scenarios.models import DETR, SPEECH, WHISPER, calling, ids, made
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rkmate

PAGE = Path(__file__).parent.parent / "docs" / "recipes.md"
ROWS = Path(__file__).with_name("parts.jsonl")
BUDGETS = 0.6, 0.4
"""As shares of the plain peak."""
CHECKPOINT = "checkpoint"
"""The method of a row without rkmate."""
SEEDS = range(4)
"""Of the steps whose peaks are measured."""
_BEGIN, _END = "<!-- rows: python benchmarks/parts.py --write -->\n", "\n<!-- end of rows -->"


# -- Models ----------------------------------------------------------------------------------------


class Detector(nn.Module):
    """A detector like RetinaNet: a pyramid of features, heads that all of its levels share, anchors that are
    matched with the boxes of each image, and the losses inside."""

    def __init__(self, width: int = 32, classes: int = 5) -> None:
        super().__init__()
        stages = [3, width, 2 * width, 4 * width]
        self.stages = nn.ModuleList(nn.Sequential(
            nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU(), *(Residual(b) for _ in range(2)))
            for a, b in zip(stages, stages[1:], strict=False))
        self.across = nn.ModuleList(nn.Conv2d(c, width, 1) for c in stages[1:])
        self.classes, self.boxes = self._head(width, classes), self._head(width, 4)

    @staticmethod
    def _head(width: int, outputs: int) -> nn.Module:
        return nn.Sequential(*(m for _ in range(3) for m in (
            nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU())),
            nn.Conv2d(width, outputs, 3, padding=1))

    def forward(self, images: torch.Tensor, targets: Sequence[dict[str, torch.Tensor]]) -> torch.Tensor:
        """Return the loss."""
        x, levels = images, []
        for stage, across in zip(self.stages, self.across, strict=True):
            x = stage(x)
            levels.append(across(x))
        for k in range(len(levels) - 1, 0, -1):
            levels[k - 1] = levels[k - 1] + F.interpolate(levels[k], scale_factor=2.0)
        scores = torch.cat([self.classes(x).flatten(2) for x in levels], 2).transpose(1, 2)
        boxes = torch.cat([self.boxes(x).flatten(2) for x in levels], 2).transpose(1, 2)
        anchors = torch.cat([_anchors(x, 2 ** (k + 1)) for k, x in enumerate(levels)])
        losses = []
        for found, moved, target in zip(scores, boxes, targets, strict=True):
            near, which = _overlap(anchors, target["boxes"]).max(1)
            chosen = torch.where(near > 0.3)[0]
            wanted = torch.zeros_like(found)
            wanted[chosen, target["labels"][which[chosen]]] = 1
            wrong = F.binary_cross_entropy_with_logits(found, wanted, reduction="none")
            focal = (found.sigmoid() - wanted).abs().square() * wrong
            losses.append(focal.sum() / max(1, len(chosen))
                          + F.l1_loss(anchors[chosen] + moved[chosen], target["boxes"][which[chosen]]))
        return torch.stack(losses).mean()


class Residual(nn.Module):
    """A block of the detector's backbone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input and what the block adds."""
        found: torch.Tensor = F.relu(x + self.inner(x))
        return found


def _anchors(level: torch.Tensor, stride: int) -> torch.Tensor:
    y, x = (stride * (torch.arange(n) + 0.5) for n in level.shape[2:])
    middle = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1).flatten(0, 1)
    return torch.cat([middle - 2 * stride, middle + 2 * stride], 1)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    low, high = torch.maximum(one[:, None, :2], other[:, :2]), torch.minimum(one[:, None, 2:], other[:, 2:])
    common = (high - low).clamp(min=0).prod(-1)
    areas = [(b[:, 2:] - b[:, :2]).prod(-1) for b in (one, other)]
    return common / (areas[0][:, None] + areas[1] - common)


def _detected() -> Task:
    images, targets = torch.randn(2, 3, 96, 96), []
    for count in (2, 3):
        corner = 60 * torch.rand(count, 2)
        targets.append({"boxes": torch.cat([corner, corner + 8 + 24 * torch.rand(count, 2)], 1),
                        "labels": torch.randint(0, 5, (count,))})
    return Task(Detector(), lambda m: m(images, targets))


def _heard() -> Task:
    model = made("WhisperForConditionalGeneration", "Whisper", {
        **WHISPER, "d_model": 64, "encoder_layers": 6, "decoder_layers": 6, "encoder_ffn_dim": 256,
        "decoder_ffn_dim": 256, "encoder_layerdrop": 0.1, "decoder_layerdrop": 0.1,
        "apply_spec_augment": True, "mask_time_length": 2, "max_source_positions": 128})
    return calling(model, {"input_features": torch.randn(4, 16, 256), "labels": ids(32, 4)})


def _spoken() -> Task:
    model = made("Wav2Vec2ForCTC", "Wav2Vec2", {**SPEECH, "hidden_size": 64, "num_hidden_layers": 8,
                                                "intermediate_size": 256})
    return calling(model, {"input_values": torch.randn(4, 2400), "labels": ids(16, 4)})


def _seen() -> Task:
    model = made("DetrForObjectDetection", "Detr", {
        **DETR, "d_model": 64, "encoder_layers": 4, "decoder_layers": 4, "encoder_ffn_dim": 256,
        "decoder_ffn_dim": 256})
    return calling(model, {"pixel_values": torch.randn(2, 3, 192, 192), "labels": [
        {"class_labels": torch.randint(0, 5, (n,)), "boxes": 0.3 + 0.2 * torch.rand(n, 4)} for n in (2, 3)]})


def _read() -> Task:
    text = {"vocab_size": 200, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 6,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
            "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
    model = made("Qwen2VLForConditionalGeneration", "Qwen2VL", {
        "text_config": text, "vision_config": {
            "depth": 4, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3},
        "image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8})
    words = torch.randint(10, 200, (2, 96))
    words[:, 2], words[:, 3:67], words[:, 67] = 7, 5, 8
    return calling(model, {
        "input_ids": words, "labels": words.masked_fill(words == 5, -100),
        "pixel_values": torch.randn(512, 96), "image_grid_thw": torch.tensor([[1, 16, 16], [1, 16, 16]]),
        "mm_token_type_ids": (words == 5).int()})


def _compared() -> Task:
    wider = {"hidden_size": 64, "num_hidden_layers": 6, "intermediate_size": 256}
    towers = {**TOWERS, **{k: {**TOWERS[k], **wider} for k in ("text_config", "vision_config")}}
    return by_features(made("CLIPModel", "CLIP", towers), {
        "input_ids": ids(32), "pixel_values": torch.randn(4, 3, 32, 32)})


@dataclass(frozen=True)
class Model:
    """A model, and what stands in the table."""

    title: str
    make: Callable[[], Task]
    layers: tuple[str, ...]
    """Classes of the layers that are checkpointed."""


MODELS = {
    "whisper": Model("`WhisperForConditionalGeneration`, layer drop and masked spans", _heard,
                     ("WhisperEncoderLayer", "WhisperDecoderLayer")),
    "wav2vec2": Model("`Wav2Vec2ForCTC`, default layer drop and masked spans", _spoken,
                      ("Wav2Vec2EncoderLayer",)),
    "qwen2-vl": Model("`Qwen2VLForConditionalGeneration`", _read,
                      ("Qwen2VLDecoderLayer", "Qwen2VLVisionBlock")),
    "detr": Model("`DetrForObjectDetection` with its loss", _seen,
                  ("DetrEncoderLayer", "DetrDecoderLayer", "ResNetBasicLayer")),
    "retinanet": Model("a RetinaNet with its losses", _detected, ("Residual",)),
    "vae": Model("`AutoencoderKL` by `encode`, `decode`", coded,
                 ("DownEncoderBlock2D", "UpDecoderBlock2D", "UNetMidBlock2D")),
    "clip": Model("`CLIPModel` by `get_text_features`, `get_image_features`", _compared,
                  ("CLIPEncoderLayer",)),
}


# -- Rows ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One model with one method. Memory as a share of the plain peak."""

    model: str
    method: str
    """``checkpoint``, or the share that is the budget."""
    budget: float
    """The share that was asked for, or the smallest one where that cannot be met; 1 without a budget."""
    peak: float
    """The largest of several steps."""
    time: float | None
    """As a multiple of a plain step's; None: not taken."""
    planned: float
    """The share of what a step keeps for its backward that is planned."""


class Bench:
    """One model and its copies."""

    def __init__(self, name: str, repeats: int) -> None:
        self.name, self.repeats = name, repeats
        self.plain = self._made()
        self.peak = self._peak(self.plain)

    def rows(self) -> list[Row]:
        """Measure each method."""
        task = self._made()
        for module in task.model.modules():
            if type(module).__name__ in MODELS[self.name].layers:
                own = functools.partial(checkpoint, module.forward, use_reentrant=False)
                module.forward = own                                    # type: ignore[method-assign]
        peak = self._peak(task)
        return [Row(self.name, CHECKPOINT, 1.0, peak / self.peak, self._time(task), 0.0),
                *(self._planned(budget) for budget in BUDGETS)]

    def _planned(self, share: float) -> Row:
        budget, seen = int(share * self.peak), Notices()
        logging.getLogger("rkmate").addHandler(seen)
        try:
            for _ in range(3):
                task = self._made()
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore", rkmate.RkmateWarning)
                        rkmate.apply(task.model, budget=budget, progress=False)
                        peak = self._peak(task)
                    break
                except rkmate.InfeasibleBudget as error:
                    budget = error.minimum_bytes
            else:
                raise AssertionError(f"{self.name}: a budget that an error named was refused")
        finally:
            logging.getLogger("rkmate").removeHandler(seen)
        assert peak <= budget, f"{self.name}: {peak} bytes of {budget}"
        shares = [found[1] for t in seen.texts if (found := re.search(r"That is (\d+)% of", t))]
        return Row(self.name, f"{share:g}", budget / self.peak, peak / self.peak, self._time(task),
                   int(shares[-1]) / 100 if shares else 1.0)

    def _made(self) -> Task:
        seed_all(0)
        task = MODELS[self.name].make()
        for p in task.model.parameters():
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        return task

    def _peak(self, task: Task) -> int:
        for seed in SEEDS:                      # the first is measured by rkmate, the second plans
            step(_forward(task, seed), task.model)
        return max(peak_of(_forward(task, seed), task.model) for seed in SEEDS)

    def _time(self, task: Task) -> float | None:
        both = self.plain, task
        pairs = [[step(_forward(t, seed), t.model) for t in both] for seed in range(self.repeats)]
        plain, own = (statistics.median(seconds) for seconds in zip(*pairs, strict=True)) if pairs else (1, 0)
        return own / plain or None


def _forward(task: Task, seed: int) -> Callable[[], torch.Tensor]:
    def forward() -> torch.Tensor:
        seed_all(seed)
        return task.step(task.model)
    return forward


def table(rows: Sequence[Row]) -> str:
    """Return the rows in Markdown, a line for each model."""
    known = {(r.model, r.method): r for r in rows}
    lines = ["| model | planned | checkpointing of each layer | "
             + " | ".join(f"budget {b:.0%}" for b in BUDGETS) + " |",
             "|---|---:|---|" + "---|" * len(BUDGETS)]
    for name, model in MODELS.items():
        found = [known.get((name, m)) for m in (CHECKPOINT, *(f"{b:g}" for b in BUDGETS))]
        mine = [r for r in found if r is not None]
        if len(mine) == len(found):
            lines.append(f"| {model.title} | {mine[-1].planned:.0%} | " + " | ".join(map(_cell, mine)) + " |")
    return "\n".join(lines)


def _cell(row: Row) -> str:
    asked = "" if row.method == CHECKPOINT or round(row.budget, 2) <= float(row.method) else \
        f" (smallest: {row.budget:.1%})"
    return f"{row.peak:.1%}{asked}" + ("" if row.time is None else f", {row.time:.2f} times")


def main() -> None:
    """Measure models, or write the page."""
    options, asked = options_of(__doc__, MODELS, ROWS, PAGE)
    for name in asked:
        for row in Bench(name, options.repeats).rows():
            add_row(row, options.rows)
    if options.write:
        latest = {(row.model, row.method): row for row in read_rows(Row, options.rows)}
        write_between(PAGE, _BEGIN, _END, table(list(latest.values())))


if __name__ == "__main__":
    main()
