"""What a profile may say about verification."""

import re
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from model_optimizer.spec import Spec

_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600}
MAX_SEGMENT_S = 60.0


def _seconds(value: object) -> object:
    """Read `60s`, `5min`, `24h` or a plain number of seconds."""
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)", value.strip())):
        return float(match[1]) * _UNITS[match[2]]
    return value


Duration = Annotated[float, BeforeValidator(_seconds), Field(gt=0, examples=["60s", "24h"])]


class SoakConfig(Spec):
    duration: Duration = 86400.0
    segment: Duration = Field(default=60.0, description="what one journal record holds, a minute at most unless accelerated")
    drift_every: Duration = Field(default=3600.0, description="fixed texts are scored and extremes tried this often")
    requests_per_segment: int | None = Field(
        default=None, ge=1, description="accelerated: a segment ends after so many requests and stands for its whole time"
    )

    @model_validator(mode="after")
    def _records_are_short(self) -> Self:
        if self.requests_per_segment is None and self.segment > MAX_SEGMENT_S:
            raise ValueError(
                f"segment is {self.segment:g} s; a killed soak loses one, so {MAX_SEGMENT_S:g} s at most are allowed "
                "unless requests_per_segment accelerates it"
            )
        return self


class VerifyConfig(Spec):
    golden_sets: tuple[str, ...] = Field(min_length=1, description="names below golden_sets/, or paths relative to the profile")
    latency_requests: int = Field(default=40, ge=10, description="per engine")
    soak: SoakConfig = SoakConfig()
    required_soak: Duration = Field(default=86400.0, description="shorter soaks sign off as provisional only")
    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    power: float = Field(default=0.8, gt=0.5, lt=1)
    seed: int = 0
