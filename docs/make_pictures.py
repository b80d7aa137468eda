"""Draw every picture of the documentation: ``python docs/make_pictures.py``.

``--measure`` adds a point for torch.utils.checkpoint to the curve: only on a machine that does nothing
else, because it compares measured times.

Needs matplotlib, transformers and Graphviz; the screenshot of the report also needs Chromium.
"""

from __future__ import annotations

import copy
import datetime
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rkmate
from rkmate.cli.main import main
from rkmate.cli.targets import make_demo

IMAGES = Path(__file__).parent / "images"
COSTS = "analytic"
"""Estimated times: the pictures are the same on every machine."""
DATE = datetime.date(2026, 1, 1)
"""Of the reports: their pictures are the same on every day."""


def small_gpt2() -> tuple[nn.Module, dict[str, Any]]:
    """Two layers, as in the paper's figures 8, 10 and 11."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=256, n_positions=64, bos_token_id=0,
                        eos_token_id=0)
    ids = torch.randint(0, 256, (4, 64))
    model: Any = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"
    return model, {"input_ids": ids, "labels": ids, "use_cache": False}


def seconds_of(steps: list[Callable[[], Any]]) -> list[float]:
    """The fastest of fifteen runs of each, taken in turns: least disturbed by what else runs."""
    best = [float("inf")] * len(steps)
    for turn in range(16):
        for k, step in enumerate(steps):
            begin = time.perf_counter()
            step()
            if turn:                    # the first turn warms up
                best[k] = min(best[k], time.perf_counter() - begin)
    return best


def readme() -> None:
    """The README's picture, as its command makes it (with estimated times)."""
    if main(["draw", "gpt2", str(IMAGES / "memory.svg"), "--budget", "50%", "--what", "memory",
             "--analytic", "--quiet"]):
        sys.exit("memory.svg was not drawn")


def graphs() -> None:
    """The model as a graph: captured, simplified, as a chain, one block, one block's schedule; a deeper one,
    folded."""
    model, kwargs = small_gpt2()
    plan = rkmate.plan(model, (), kwargs, budget=0.5, progress=False, settings=rkmate.Settings(costs=COSTS))
    plan.draw(IMAGES / "forward.svg", "forward", whole=True)
    plan.draw(IMAGES / "simplified.svg", "simplified")
    plan.draw(IMAGES / "chain.svg", "chain")
    redoes = {b.label: b for b in plan.blocks}
    plan.draw(IMAGES / "block.svg", "block", list(redoes)[2])
    plan.draw(IMAGES / "schedule.svg", "schedule", list(redoes)[2])
    deep, args, kwargs = make_demo("gpt2")
    rkmate.plan(deep, args, kwargs, budget=1.0, progress=False, settings=rkmate.Settings(costs=COSTS)).draw(
        IMAGES / "folded.svg", "forward")


def copies() -> None:
    """Both clocks of a GPT-2 at a fifth of its peak that sends to a disk, whose rates are stated."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=4, n_embd=384, n_head=8, vocab_size=256, n_positions=256, bos_token_id=0,
                        eos_token_id=0)
    ids = torch.randint(0, 256, (4, 256))
    model: Any = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"
    with tempfile.TemporaryDirectory() as folder:
        rkmate.plan(model, (), {"input_ids": ids, "labels": ids, "use_cache": False}, budget=0.2,
                    progress=False, settings=rkmate.Settings(costs=COSTS),
                    offload=folder).draw(IMAGES / "copies.png", "copies")


def memory_and_time(measure: bool) -> None:
    """The timeline with a measured step on top, the curve, and the report."""
    model, args, kwargs = make_demo("gpt2")

    def step(module: nn.Module) -> Callable[[], None]:
        def run() -> None:
            module(*args, **kwargs).loss.backward()
        return run

    curve = rkmate.tradeoff(model, args, kwargs, progress=False, settings=rkmate.Settings(costs=COSTS))
    if measure:
        other: Any = copy.deepcopy(model)
        enable = getattr(other, "activation_checkpointing_enable", other.gradient_checkpointing_enable)
        enable()
        peak = rkmate.measure_step(other, step(other), timeline=False).peak
        plain, slower = seconds_of([step(model), step(other)])
        base = curve[0].baseline_seconds
        curve = curve.with_point("torch.utils.checkpoint, per layer", peak, slower / plain * base)
    wrapped = rkmate.wrap(model, args, kwargs, budget=0.5, progress=False,
                          settings=rkmate.Settings(costs=COSTS))
    measured = rkmate.measure_step(wrapped, step(wrapped))
    wrapped.plan.plot(IMAGES / "timeline.svg", measured=measured)
    curve.plot(IMAGES / "curve.svg", here=wrapped.plan, title="GPT-2, four layers")
    screenshot(wrapped.plan, curve, IMAGES / "report.png", 1280, 1500)
    screenshot(wrapped.plan, curve, IMAGES / "report-400.png", 400, 1750, dark=True)


_POINTER = """<script>
setTimeout(() => {
  const picture = document.querySelector("#chart svg");
  const box = picture.getBoundingClientRect();
  picture.dispatchEvent(new PointerEvent("pointermove",
    {clientX: box.left + 0.72 * box.width, clientY: box.top + 99}));
}, 1500);
</script>"""


def screenshot(plan: rkmate.Plan, curve: rkmate.Curve, path: Path, width: int, height: int,
               dark: bool = False) -> None:
    """Save a picture of the top of the report, as a browser shows it in a window of this size in pixels. The
    pointer is on the memory curve."""
    from PIL import Image

    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit(f"{path.name} was not drawn: install Chromium")
    with tempfile.TemporaryDirectory() as folder:
        page = plan.report(Path(folder) / "report.html", curve=curve, date=DATE)
        text = page.read_text(encoding="utf-8").replace("</head>", f"{_POINTER}</head>")
        page.write_text(text, encoding="utf-8")
        subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                        f"--user-data-dir={folder}/profile", "--virtual-time-budget=4000",
                        *(["--blink-settings=preferredColorScheme=0"] if dark else []),
                        f"--window-size={width},{height}", f"--screenshot={path}",
                        page.as_uri()], check=True, capture_output=True)
    with Image.open(path) as picture:
        # An octree keeps the rare colours, which are those of the lines.
        few = picture.convert("RGB").quantize(128, Image.Quantize.FASTOCTREE)
    few.save(path, optimize=True)


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    readme()
    graphs()
    copies()
    memory_and_time("--measure" in sys.argv[1:])
    print(*sorted(str(p.relative_to(Path.cwd())) if p.is_relative_to(Path.cwd()) else str(p)
                  for p in IMAGES.rglob("*.*")), sep="\n")
