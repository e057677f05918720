"""Rounding of a layer's input as a format demands it, in float32 arithmetic on any device.

    step = absmax / 127.5 (int8) or absmax / 448 (float8_e4m3fn), of each token, or frozen for the whole tensor
    x ~ round_to_grid(x / step) x step

Integers are cut to -128 .. 127 and floats to +-448: what lies beyond a frozen step's range becomes the outermost code.
Source: compressed-tensors (calculate_qparams, compute_dynamic_scales_and_zp), which transformers runs; vLLM's kernels divide
a token's absmax by 127 instead of 127.5.
"""

from collections.abc import Callable, Mapping

import torch

from model_optimizer.errors import IntegrityError, UnsupportedError
from model_optimizer.formats.base import WeightFormat
from model_optimizer.formats.registry import FORMATS

REACH = {torch.int8: 127.5, torch.float8_e4m3fn: 448.0}
"""Steps from zero to the largest magnitude, by the type of the codes."""
_SMALLEST_STEP = torch.finfo(torch.float32).eps


def round_activation(hidden: torch.Tensor, weight_format: WeightFormat, input_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Return the input [..., I] as it comes back from the format's 8 bits; unchanged where the format rounds no inputs.

    Raises:
        UnsupportedError: the format wants a frozen step, and `input_scale` is None.
    """
    if weight_format.activation is None:
        return hidden
    if weight_format.activation == "dynamic-token":
        step = hidden.abs().amax(-1, keepdim=True).float() / REACH[weight_format.code_dtype]
        step = torch.where(step == 0, _SMALLEST_STEP, step)
    elif input_scale is None:
        raise UnsupportedError(f"{weight_format.name} wants a frozen step of the layer's input, and there is none")
    else:
        step = input_scale.to(hidden.device)
    scaled = hidden.float() / step
    if weight_format.code_dtype.is_floating_point:
        codes = scaled.clamp_(-REACH[torch.float8_e4m3fn], REACH[torch.float8_e4m3fn]).to(torch.float8_e4m3fn).float()
    else:
        codes = torch.round(scaled.clamp_(-128, 127))
    return (codes * step).to(hidden.dtype)


def round_inputs(model: torch.nn.Module, plan: Mapping[str, str], input_scales: Mapping[str, torch.Tensor]) -> None:
    """Let the layers of `plan` (layer -> format name) round what enters them from now on.

    Raises:
        IntegrityError: the model has no such layer of its own.
    """
    modules = dict(model.named_modules())
    for layer, name in plan.items():
        weight_format = FORMATS.get(name)
        if weight_format.activation is None:
            continue
        if layer not in modules:
            raise IntegrityError(f"{layer} is no module of its own here, so its inputs cannot be rounded as {name} demands")
        modules[layer].register_forward_pre_hook(_rounding(weight_format, input_scales.get(layer)))


def _rounding(
    weight_format: WeightFormat, input_scale: torch.Tensor | None
) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
    def rounded(_: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (round_activation(arguments[0], weight_format, input_scale), *arguments[1:])

    return rounded
