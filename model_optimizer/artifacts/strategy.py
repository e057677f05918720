"""What a candidate is: how the weights are stored and which runtime executes them."""

from typing import Literal, Self

from pydantic import Field, model_validator

from model_optimizer.artifacts.base import Frozen

FormatName = str
"""A weight format of `formats/`: `float32`, `int8-channel`, `int4-g64` (symmetric unless it says `asym`)."""


class WeightRecipe(Frozen):
    """How linear weights are stored: one format, or several under an average true-bits budget.

    `formats` holds the formats that a layer may get, cheapest first. One format = uniform.
    `bits_budget` counts payload, scales and padding over all quantizable weights.
    """

    method: Literal["none", "rtn", "rtn-mse", "rtn-percentile", "gptq", "awq", "smoothquant", "signround"] = "none"
    formats: tuple[FormatName, ...] = ("float32",)
    bits_budget: float | None = Field(default=None, gt=0)
    repairs: int = Field(default=0, ge=0)
    """How often layers were raised above these formats because an accuracy gate rejected; 0 = as the scan chose it."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.method == "none") != (self.formats == ("float32",)):
            raise ValueError(f"method {self.method!r} does not go with formats {self.formats}")
        if (len(self.formats) > 1) != (self.bits_budget is not None):
            raise ValueError("a bits_budget belongs to a mixed recipe, and only to one")
        if self.repairs and not self.quantized:
            raise ValueError("full precision has no layer to raise")
        return self

    @property
    def quantized(self) -> bool:
        return self.method != "none"

    @property
    def label(self) -> str:
        """Return a short name, e.g. `float32`, `int8-channel-rtn`, `mixed-6.0bits-rtn-repair1`."""
        if not self.quantized:
            return "float32"
        formats = f"mixed-{self.bits_budget}bits" if self.bits_budget else self.formats[0]
        return f"{formats}-{self.method}" + (f"-repair{self.repairs}" if self.repairs else "")


class Strategy(Frozen):
    """One candidate of the scan."""

    weights: WeightRecipe
    runtime: str
    """A name of the runtime registry."""

    @property
    def label(self) -> str:
        return f"{self.weights.label}/{self.runtime}"
