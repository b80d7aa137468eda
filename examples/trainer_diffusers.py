"""A diffusion model of diffusers inside a budget; one line differs from the plain script.

Usage: python examples/trainer_diffusers.py [--plain]
"""

from __future__ import annotations

import sys
import tempfile

import torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from torch import nn

import rkmate

STEPS, BATCH, SIZE = 3, 2, 16


def main(plain: bool) -> nn.Module:
    """Train for a few steps on random pictures, save, load and sample; returns the trained model."""
    torch.manual_seed(0)
    model = UNet2DModel(sample_size=SIZE, in_channels=3, out_channels=3, layers_per_block=1,
                        norm_num_groups=8, block_out_channels=(16, 32),
                        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8)
    scheduler = DDPMScheduler(num_train_timesteps=20)
    if not plain:
        rkmate.apply(model, budget=0.6, progress=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pictures = torch.randn(STEPS, BATCH, 3, SIZE, SIZE)

    def batch(clean: torch.Tensor) -> tuple[torch.Tensor, ...]:
        noise, times = torch.randn_like(clean), torch.randint(0, 20, (BATCH,))
        return scheduler.add_noise(clean, noise, times), times, noise

    def step(noisy: torch.Tensor, times: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        # Not mse_loss: its result keeps as much memory as it sums up, through the whole backward.
        loss = (model(noisy, times).sample - noise).square().mean()
        loss.backward()
        return loss.detach()

    losses = []
    for clean in pictures:
        losses.append(step(*batch(clean)).item())
        optimizer.step()
        optimizer.zero_grad()
    shown = rkmate.applied(model)
    if shown is not None:
        inputs = [t.clone() for t in (pictures[0], torch.zeros(BATCH, dtype=torch.long), pictures[1])]
        peak = rkmate.measure_step(model, lambda: step(*inputs)).peak
        print(f"{peak:,} bytes measured in a budget of {shown.plan.budget_bytes:,} "
              f"({shown.plan.baseline_peak_bytes:,} without)")
        optimizer.zero_grad()
    with tempfile.TemporaryDirectory() as folder:
        DDPMPipeline(model, scheduler).save_pretrained(folder)
        loaded = DDPMPipeline.from_pretrained(folder)
    loaded.set_progress_bar_config(disable=True)
    sample = loaded(num_inference_steps=2, generator=torch.Generator().manual_seed(0),
                    output_type="np").images
    print(f"losses {', '.join(f'{v:.6f}' for v in losses)}; loaded again, sampled: {sample.mean():.6f}")
    return model


if __name__ == "__main__":
    main("--plain" in sys.argv)
