"""One measured, predicted or simulated value with everything that is needed to judge it."""

from enum import StrEnum
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Dimension(StrEnum):
    """The four dimensions of every decision and of the report."""

    ACCURACY = "accuracy"
    SPEED = "speed"
    RESOURCE = "resource"
    ROBUSTNESS = "robustness"


class Verdict(StrEnum):
    """What a gate answers; INCONCLUSIVE is never a pass."""

    ACCEPT = "ACCEPT"
    REJECT = "REJECT"
    INCONCLUSIVE = "INCONCLUSIVE"


class Origin(StrEnum):
    """Where a value comes from; everything but `measured` is marked wherever it is shown."""

    MEASURED = "measured"
    PREDICTED = "predicted"
    SIMULATED = "simulated"
    NOT_MEASURED = "not_measured"


class Interval(BaseModel):
    """A two-sided interval; 95 % unless `level` says otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lower: float
    upper: float
    level: float = Field(default=0.95, gt=0, lt=1)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.lower <= self.upper:
            raise ValueError(f"interval [{self.lower}, {self.upper}] is empty")
        return self


class Measure(BaseModel):
    """One figure of the report. `verdict` None means that it is shown and does not gate."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern="^[a-z][a-z0-9_]*$")
    dimension: Dimension
    unit: str = Field(pattern="^[a-z][a-z0-9_]*$")
    """e.g. `ms`, `bytes`, `tok_per_s`, `nats`, `ratio`, `count`."""
    value: float | None
    baseline: float | None = None
    interval: Interval | None = None
    limit: float | None = None
    higher_is_better: bool = False
    num_samples: int | None = Field(default=None, ge=0)
    mde: float | None = None
    """Minimum detectable effect, in the measure's unit."""
    samples_needed: int | None = Field(default=None, ge=0)
    """Samples still missing before the gate can decide."""
    verdict: Verdict | None = None
    origin: Origin = Origin.MEASURED
    reason: str = ""

    @model_validator(mode="after")
    def _honest(self) -> Self:
        if (self.value is None) != (self.origin is Origin.NOT_MEASURED):
            raise ValueError(f"{self.name}: a value is missing exactly when origin is not_measured")
        if self.origin is Origin.NOT_MEASURED and not self.reason:
            raise ValueError(f"{self.name}: say in `reason` why it was not measured")
        if self.verdict is Verdict.ACCEPT and self.origin is Origin.NOT_MEASURED:
            raise ValueError(f"{self.name}: what was not measured cannot be accepted")
        return self

    @property
    def metric(self) -> str:
        """Return the MLflow name, `<dimension>/<name>_<unit>` (the unit is not repeated)."""
        name = self.name if self.name.endswith(f"_{self.unit}") else f"{self.name}_{self.unit}"
        return f"{self.dimension}/{name}"
