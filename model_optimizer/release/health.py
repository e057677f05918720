"""Does a release work on this machine: its device, and its own samples through its own engine.

The device part is the bundle's `health_check.sh`, which an operator runs too; the output part opens the
engine as a server would. Only verified releases may come here: their script is executed.
"""

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, Field

from model_optimizer.artifacts.compiled import Engine
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.errors import HealthCheckFailed, ModelOptimizerError, UnsupportedError
from model_optimizer.protocols import GenerationRequest, Runtime
from model_optimizer.release.manifest import METADATA
from model_optimizer.runtimes.registry import RUNTIMES

SCRIPT = "health_check.sh"
SAMPLE = "data/sample.json"
KV_PLAN = "model/kv_cache_config.json"
_DEVICE_FAILED = 10
"""Exit code of the script for an unfit device."""
_SCRIPT_TIMEOUT_S = 60
_SHOWN_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Health:
    """What a passed check established."""

    device: str
    num_samples: int
    """Samples whose greedy tokens came out equal; 0 where only the device was looked at."""
    elapsed_s: float


def check_device(release: Path) -> Health:
    """Run the release's script for the device alone.

    Raises:
        UnsupportedError: the device lacks what the release was measured with.
        HealthCheckFailed: the script cannot be run.
    """
    start = time.monotonic()
    command = ["sh", str(release / SCRIPT), "--device-only"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SCRIPT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HealthCheckFailed(f"{release.name}: {SCRIPT} did not run: {error}") from error
    said = " ".join((done.stdout + done.stderr).split())
    if done.returncode == _DEVICE_FAILED:
        raise UnsupportedError(f"{release.name} is not healthy here: {said}; deploy it on the hardware that it was made for")
    if done.returncode:
        raise HealthCheckFailed(f"{release.name}: {SCRIPT} ended with {done.returncode}: {said}")
    return Health(said, 0, time.monotonic() - start)


def check_health(release: Path) -> Health:
    """Check the device, then open the engine and compare every sample's greedy tokens, one sample at a time.

    Raises:
        UnsupportedError: this machine or its framework version cannot run the release.
        HealthCheckFailed: the engine does not open, or a sample comes out differently.
    """
    start = time.monotonic()
    device = check_device(release).device
    try:
        samples = _Samples.model_validate_json((release / SAMPLE).read_bytes()).samples
        runtime = _open(release)
    except ModelOptimizerError:
        raise
    except (OSError, ValueError, TypeError, LookupError, RuntimeError) as error:
        raise HealthCheckFailed(f"{release.name}: its engine does not open: {' '.join(str(error).split())[:300]}") from error
    try:
        for number, sample in enumerate(samples, start=1):
            seen = _greedy(runtime, sample)
            if seen != sample.tokens:
                fault = _difference(seen, sample.tokens)
                raise HealthCheckFailed(f"{release.name}: sample {number} of {len(samples)} {fault}")
    finally:
        runtime.close()
    return Health(device, len(samples), time.monotonic() - start)


class _Metadata(BaseModel):
    """What metadata.json says of the engine; its other fields are for people."""

    runtime: str
    engine: str
    engine_bytes: int
    framework_version: str


class _Sample(BaseModel):
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]


class _Samples(BaseModel):
    samples: tuple[_Sample, ...] = Field(min_length=1)


def _open(release: Path) -> Runtime:
    metadata = _Metadata.model_validate_json((release / METADATA).read_bytes())
    engine = Engine(
        runtime=metadata.runtime,
        directory=metadata.engine,
        num_bytes=metadata.engine_bytes,
        framework_version=metadata.framework_version,
    )
    plan = KvPlan.model_validate_json((release / KV_PLAN).read_bytes(), extra="ignore")
    return RUNTIMES.get(engine.runtime).open(engine, release / "model" / engine.directory, plan)


def _greedy(runtime: Runtime, sample: _Sample) -> tuple[int, ...]:
    runtime.submit(GenerationRequest(sample.prompt_tokens, len(sample.tokens)))
    tokens: list[int] = []
    while events := runtime.step():
        tokens += [event.token for event in events]
    return tuple(tokens)


def _difference(seen: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """Say where two token sequences part."""
    shared = min(len(seen), len(expected))
    at = next((at for at in range(shared) if seen[at] != expected[at]), shared)
    window = slice(at, at + _SHOWN_TOKENS)
    return f"differs from token {at} on: gave {list(seen[window])}, {SAMPLE} says {list(expected[window])}"
