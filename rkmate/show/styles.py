"""Colours and fonts: the same in every picture and in the report."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence

from rkmate.show.replay import Kind

FONT = "Helvetica,Arial,DejaVu Sans,sans-serif"
INK = "#1f2933"
FAINT = "#7b8794"
"""Lines and frames."""
SOFT = "#52606d"
"""Text beside the point; dark enough to be read on white."""

KIND_COLOURS: dict[Kind, str] = {
    "kept": "#4c9f70", "back": "#26a8c9", "recomputed": "#f2a541", "gradients": "#8e6fb8",
    "buffers": "#5c7285", "temporaries": "#c8ccd1", "loss": "#8d99a6"}

FORWARD = "#cfe3f7"
FORWARD_LINE = "#3b7dbd"
BACKWARD = "#e5dbf3"
BACKWARD_LINE = "#8e6fb8"
AGAIN = "#f2a541"
AGAIN_TEXT = "#a35a00"
AGAIN_FILL = "#fdecd2"
KEPT = "#d5eedd"
KEPT_LINE = "#4c9f70"
AWAY = "#d2f0f7"
AWAY_LINE = "#26a8c9"
WAIT = "#d1495b"
"""Where the step waits for a copy."""
CONSTANT = "#eceff1"
LOSS = "#f8d7da"
LOSS_LINE = "#c0392b"
BUDGET = "#c0392b"
MEASURED = "#1f2933"
VIEW = "#ffffff"


def class_colours(labels: Sequence[str]) -> dict[str, str]:
    """A light colour for each class of blocks; identical blocks have the same."""
    result: dict[str, str] = {}
    for label in labels:
        if label not in result:
            hue = (0.57 + len(result) * 0.381966) % 1.0        # golden section: neighbours differ
            r, g, b = colorsys.hls_to_rgb(hue, 0.86, 0.62)
            result[label] = f"#{round(r * 255):02x}{round(g * 255):02x}{round(b * 255):02x}"
    return result
