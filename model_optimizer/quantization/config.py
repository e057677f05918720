"""What a profile may say about calibration and quantization."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from model_optimizer.spec import Spec

FieldRole = Literal["text", "messages", "system", "prompt", "input", "response"]
"""What a column of a calibration file can be."""
SELF = Path("self")
"""Calibration text that the model writes itself."""


class CalibrationConfig(Spec):
    """Which text calibrates, and how much of it."""

    path: Path = Field(
        description="JSON, JSONL, plain text or Parquet, relative to the profile; or `builtin:general`, `builtin:code`, "
        "`builtin:dialogue`, `builtin:all`; or `self`, sampled from the model"
    )
    fields: dict[FieldRole, str] = Field(
        default={}, description="role -> column; left out: found by name", examples=[{"prompt": "question", "response": "answer"}]
    )
    seed: int = Field(default=0, ge=0, description="of the text that `self` samples")
    num_samples: int = Field(default=256, ge=1, le=1024)
    max_length: int = Field(default=2048, ge=8, description="tokens; longer samples are cut")
    min_length: int = Field(default=16, ge=2, description="tokens; shorter samples are left out and counted")
    held_out_ratio: float = Field(default=0.25, gt=0, lt=0.9, description="share kept for the scan's KL")

    @property
    def is_self(self) -> bool:
        """Whether the model writes the text itself."""
        return self.path == SELF

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        """A record is a text, a list of messages, or a prompt with what belongs to it."""
        roles = set(self.fields)
        if roles and not (roles in ({"text"}, {"messages"}) or ("prompt" in roles and not roles & {"text", "messages"})):
            raise ValueError(
                f"fields names {', '.join(sorted(roles))}; allowed: text alone, messages alone, or prompt with any of "
                "response, input, system"
            )
        return self


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
    kl_budget_nats: float | None = Field(
        default=None, gt=0, description="all layers together, predicted; above it layers are raised, at last to full precision"
    )
    cosine_floor: float = Field(default=0.98, gt=0, le=1, description="below it a layer is a suspect")
    skip_layers: tuple[str, ...] = ()
    layer_overrides: tuple[LayerOverride, ...] = ()
    sensitivity_sequences: int = Field(default=32, ge=1, description="pieces of samples that the sensitivity pass reads")
    sensitivity_tokens: int = Field(
        default=256, ge=8, description="tokens of a piece; the beginnings of all samples come first, then what follows them"
    )
    reallocation_sequences: int = Field(
        default=16,
        ge=0,
        description="pieces of the second look at a mixed budget that does much harm, for method rtn; 0 = no second look",
    )
    moments_sequences: int = Field(default=64, ge=1, description="calibration samples whose layer inputs gptq weighs errors by")
    moments_tokens: int = Field(default=256, ge=8, description="leading tokens of each of them")
    error_propagation: Literal["none", "inputs"] = Field(
        default="none",
        description="what gptq measures a block on: none = the full model's states, shared by all recipes; inputs = those that "
        "the quantized blocks before it give",
    )
    rotation: Literal["none", "heads", "residual"] = Field(
        default="none",
        description="folded into the weights before rounding: heads = attention's values, residual = the residual stream too "
        "(a tied head leaves its tie where the final norm asks for it)",
    )
    rotation_seeds: int = Field(default=4, ge=1, le=64, description="random rotations of which the best is taken")
    smoothing_ratio: float = Field(
        default=0.5, ge=0, le=1, description="share of the activations' outliers that smoothquant moves into weights"
    )
    tuning_steps: int = Field(default=200, ge=1, description="steps in which signround learns the rounding of each block")
    tuning_batch: int = Field(default=4, ge=1, description="pieces of samples that one step reads")
    tuning_sequences: int = Field(default=128, ge=1, description="pieces of samples that steps choose from")
    tuning_tokens: int = Field(default=256, ge=8, description="tokens of a piece")
    distill_steps: int = Field(default=0, ge=0, description="steps that train the scales of the rounded model; 0 = none")
    distill_learning_rate: float = Field(default=3e-3, gt=0, description="of the logarithm of a scale")
    distill_sequences: int = Field(default=64, ge=2, description="calibration samples that scales are trained on and judged by")
    distill_tokens: int = Field(default=256, ge=8, description="leading tokens of each of them")
    activation_percentile: float = Field(
        default=100,
        gt=50,
        le=100,
        description="share of input magnitudes that the frozen steps of fp8-static and w8a8-int8-static reach; 100 = the largest",
    )
    seed: int = 0


class RepairConfig(Spec):
    """What happens when the accuracy gate rejects the scan's choice."""

    max_rounds: int = Field(
        default=3, ge=0, le=10, description="how often guilty layers are raised before the next frontier point is tried"
    )
