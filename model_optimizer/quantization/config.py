"""What a profile may say about calibration and quantization."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from model_optimizer.spec import Spec


class CalibrationConfig(Spec):
    """Which text calibrates, and how much of it."""

    path: Path = Field(description="JSONL with `text` or `messages` per line; relative to the profile")
    num_samples: int = Field(default=256, ge=1, le=1024)
    max_length: int = Field(default=2048, ge=8, description="tokens; longer samples are cut")
    min_length: int = Field(default=16, ge=2, description="tokens; shorter samples are left out and counted")
    held_out_ratio: float = Field(default=0.25, gt=0, lt=0.9, description="share kept for the scan's KL")


class LayerOverride(Spec):
    """Layers of which one of `layers` is a part of the name (`self_attn`, `layers.1`) get `precision` in any case."""

    layers: tuple[str, ...] = Field(min_length=1)
    precision: str = Field(examples=["float32", "int8-channel"])


class QuantizationConfig(Spec):
    """Bounds on what the allocation may choose."""

    default_precision: str = Field(
        default="auto",
        description="auto = the scan chooses; a format name pins every layer to it, and scan.bits is ignored",
        examples=["auto", "int4-g64"],
    )
    kl_breaker_nats: float = Field(default=0.15, gt=0, description="one layer alone; above it the layer stays in full precision")
    cosine_floor: float = Field(default=0.98, gt=0, le=1, description="below it a layer is a suspect")
    skip_layers: tuple[str, ...] = ()
    layer_overrides: tuple[LayerOverride, ...] = ()
    sensitivity_sequences: int = Field(default=32, ge=1, description="calibration samples that the sensitivity pass reads")
    sensitivity_tokens: int = Field(default=256, ge=8, description="leading tokens of each of them")
    moments_sequences: int = Field(default=64, ge=1, description="calibration samples whose layer inputs gptq weighs errors by")
    moments_tokens: int = Field(default=256, ge=8, description="leading tokens of each of them")
    error_propagation: Literal["none", "inputs"] = Field(
        default="none",
        description="what gptq measures a block on: none = the full model's states, shared by all recipes; inputs = those that "
        "the quantized blocks before it give",
    )
    seed: int = 0


class RepairConfig(Spec):
    """What happens when the accuracy gate rejects the scan's choice."""

    max_rounds: int = Field(
        default=3, ge=0, le=10, description="how often guilty layers are raised before the next frontier point is tried"
    )
