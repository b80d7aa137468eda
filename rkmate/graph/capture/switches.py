"""What a user can change where a value stops a trace: a switch of the module's library, or another form.

One table. Each way out is looked for in the module and in the line that the trace has stopped at.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import nn

_DRAWN = re.compile(r"rand|bernoulli|layer_?drop|drop_?path|dropout_probability|skip_the_layer")
"""In lines that branch on a drawn number."""
_DROPS = re.compile(r"layer_?drop$")
_FUSED = "FusedMovingAvgObsFakeQuantize"


def way_out(model: nn.Module, place: str, text: str) -> str:
    """A sentence that names what to change, with a blank before it.

    `place`: where the trace has stopped, with the source line. `text`: of the error.
    """
    return next((f" {found}" for rule in RULES if (found := rule(model, place, text))), "")


def _layers_dropped(model: nn.Module, place: str, text: str) -> str:
    if not _DRAWN.search(place):
        return ""
    names: dict[str, None] = {}
    for path, module in model.named_modules():
        # Some modules keep a copy of what their configuration says, others read it in each forward.
        holder = next((h for h in (vars(module), vars(module).get("config")) if _dropping(h)), None)
        where = [path] * bool(path) + ["config"] * (holder is not vars(module))
        names |= {".".join([*where, name]): None for name in _dropping(holder)}
    if names:
        return (f"Layers are left out at random: set {' and '.join(f'{n} = 0' for n in list(names)[:3])} on "
                "the module, and a plan can be made.")
    return ("A random number decides: multiply by a drawn mask instead of a branch, or set its probability "
            "to 0, and a plan can be made.")


def _dropping(holder: object) -> list[str]:
    """Names of the probabilities above 0 with which an object leaves layers out."""
    values = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
    return [k for k, v in values.items() if _DROPS.search(k) and isinstance(v, (int, float)) and v > 0]


def _fake_quantized(model: nn.Module, place: str, text: str) -> str:
    found = [path or "the module" for path, m in model.named_modules()
             if type(m).__name__ == "FakeQuantize" and type(m).__module__.startswith(("torch.ao", "torchao"))]
    if not found:
        return ""
    return (f"{found[0]} is a FakeQuantize, which reads its switches from buffers in each forward, after "
            f"disable_observer, too: {_FUSED} (what get_default_qat_qconfig gives) reads them in its kernel, "
            "and is planned; or run without it (nn.Identity) while its ranges do not count.")


def _spectrum_masked(model: nn.Module, place: str, text: str) -> str:
    config = getattr(model, "config", None)
    masked = getattr(config, "apply_spec_augment", False) and (
        getattr(config, "mask_time_prob", 0) > 0 or getattr(config, "mask_feature_prob", 0) > 0)
    if not masked or "nonzero" not in text:
        return ""
    return "Spans are masked at random: set config.apply_spec_augment = False, and a plan can be made."


def _numpy(model: nn.Module, place: str, text: str) -> str:
    if ".numpy()" not in text:
        return ""
    return "The forward hands a tensor to numpy, which a plan cannot repeat: compute it with torch."


def _value_decides(model: nn.Module, place: str, text: str) -> str:
    if "rkmate.dtr" not in text:
        return ""
    return ("Or write it without the value: torch.where for a branch, a mask or padding for a size; or "
            "decide outside, and pass what was decided as a plain argument.")


RULES: tuple[Callable[[nn.Module, str, str], str], ...] = (
    _layers_dropped, _fake_quantized, _spectrum_masked, _numpy, _value_decides)
"""In the order in which they are asked; the first that applies is told."""
