"""What a profile may say about verification."""

import re
from typing import Annotated

from pydantic import BeforeValidator, Field

from model_optimizer.spec import Spec

_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600}


def _seconds(value: object) -> object:
    """Read `60s`, `5min`, `24h` or a plain number of seconds."""
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)", value.strip())):
        return float(match[1]) * _UNITS[match[2]]
    return value


Duration = Annotated[float, BeforeValidator(_seconds), Field(gt=0, examples=["60s", "24h"])]


class SoakConfig(Spec):
    duration: Duration = 86400.0
    segment: Duration = 60.0


class VerifyConfig(Spec):
    golden_sets: tuple[str, ...] = Field(min_length=1, description="names below golden_sets/, or paths relative to the profile")
    latency_requests: int = Field(default=40, ge=10, description="per engine")
    soak: SoakConfig = SoakConfig()
    required_soak: Duration = Field(default=86400.0, description="shorter soaks sign off as provisional only")
    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    power: float = Field(default=0.8, gt=0.5, lt=1)
    seed: int = 0
