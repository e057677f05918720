"""What `model-optimizer soak` is asked for, made into a job: the source is read, nothing is opened or written."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from flows.bootstrap import home
from model_optimizer.artifacts.base import Frozen, tree_digest
from model_optimizer.errors import ConfigError
from model_optimizer.hardware.fingerprint import fingerprint
from model_optimizer.paths import data_directory
from model_optimizer.quantization.calibration import texts
from model_optimizer.quantization.calibration_source import CalibrationSource
from model_optimizer.quantization.config import CalibrationConfig
from model_optimizer.serving.config import ServeConfig
from model_optimizer.serving.source import Source, read_source
from model_optimizer.verification.config import Duration, SoakConfig
from model_optimizer.verification.golden import load_golden_set
from model_optimizer.verification.soak import Stress
from model_optimizer.verification.soak_profile import SoakProfile, load_soak_profile
from model_optimizer.verification.soak_report import JOURNAL, SoakInputs, key_of
from model_optimizer.verification.soak_twin import Opener
from model_optimizer.verification.soak_worker import SoakJob, Stops

SOAKS = "soaks"
BUILTIN_TEXT = Path("builtin:general")
SEED = 0
MAX_TEXT_TOKENS = 20_000
MAX_DRIFT_TEXTS, MAX_DRIFT_TOKENS = 64, 128
DEADLINE_FACTOR, DEADLINE_SLACK_S = 1.5, 900.0
"""A soak that takes so much longer than asked, e.g. because its segments hang, is given up."""


class SoakOptions(Frozen):
    """What the command line says."""

    target: str
    profile: str = "24h"
    duration: str | None = None
    requests_per_minute: int | None = None
    concurrency: int | None = None
    control: bool = True
    output: str | None = None
    allow_unsigned: bool = False


@dataclass(frozen=True, slots=True)
class SoakRequest:
    """A soak that may begin."""

    name: str
    inputs: SoakInputs
    config: SoakConfig
    required_s: float
    folder: Path
    job: SoakJob


def read_soak_request(options: SoakOptions) -> SoakRequest:
    """Return the job, with where it will lie.

    Raises:
        ConfigError: an option, the profile or the target is wrong.
        IntegrityError: a bundle does not verify.
    """
    profile = _stated(options)
    serving = ServeConfig(allow_unsigned=options.allow_unsigned)
    source = read_source(Path(options.target), serving)
    stress = _stress(source, profile)
    inputs = SoakInputs(
        engine_digest=tree_digest(source.engine_directory),
        text_digest=hashlib.sha256(repr((stress.text_tokens, stress.golden)).encode()).hexdigest(),
        runtime=source.engine.runtime,
        kv=source.kv,
        traffic=profile.traffic,
        concurrency=profile.concurrency,
        segment_s=profile.soak.segment,
        requests_per_segment=profile.soak.requests_per_segment,
        drift_every_s=profile.soak.drift_every,
        with_control=options.control,
        seed=SEED,
        machine=_machine(),
    )
    key = key_of(inputs)
    folder = Path(options.output).absolute() if options.output else home() / SOAKS / f"{source.name}-{key[:8]}"
    job = SoakJob(
        opener=Opener(source.engine, source.engine_directory, source.kv),
        stress=stress,
        config=profile.soak,
        journal=folder / JOURNAL,
        key=key,
        stops=Stops(folder=folder, deadline_unix_s=0.0),
        with_control=options.control,
    )
    return SoakRequest(source.name, inputs, profile.soak, profile.required, folder, job)


def _stated(options: SoakOptions) -> SoakProfile:
    """Return the profile with what the command line changes."""
    profile = load_soak_profile(options.profile)
    soak = profile.soak.model_dump(mode="json")
    if options.duration is not None:
        try:
            soak["duration"] = TypeAdapter(Duration).validate_python(options.duration)
        except ValidationError as error:
            raise ConfigError(f"--duration {options.duration!r} is no time; write e.g. 90s, 30min or 24h") from error
    if options.requests_per_minute is not None:
        soak |= {"requests_per_segment": options.requests_per_minute, "segment": 60.0}
    if options.concurrency is not None and not 1 <= options.concurrency <= 1024:
        raise ConfigError(f"--concurrency is {options.concurrency}; 1 to 1024 is allowed")
    changed = {"soak": SoakConfig.model_validate(soak), "concurrency": options.concurrency or profile.concurrency}
    return profile.model_copy(update=changed)


def _stress(source: Source, profile: SoakProfile) -> Stress:
    """Return the load, its prompts cut from the built-in texts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.model, local_files_only=True)
    tokens: list[int] = []
    for text in texts(CalibrationSource.of(CalibrationConfig(path=BUILTIN_TEXT), Path.cwd())):
        tokens += tokenizer.encode(text)
        if len(tokens) >= MAX_TEXT_TOKENS:
            break
    sets = [load_golden_set(_golden_folder(name)) for name in profile.golden_sets]
    prompts = [item.prompt for golden in sets for item in golden.items][:MAX_DRIFT_TEXTS]
    drift = tuple(tuple(tokenizer.encode(prompt)[:MAX_DRIFT_TOKENS]) for prompt in prompts)
    longest = source.kv.max_model_len
    return Stress(profile.traffic, tuple(tokens), profile.concurrency, longest, SEED, drift)


def _golden_folder(name: str) -> Path:
    return Path(name) if Path(name).is_dir() else data_directory("golden_sets") / name


def _machine() -> str:
    """Return what outputs depend on beside the engine, to the last bit."""
    import torch

    return f"{fingerprint()[:16]}, {torch.get_num_threads()} threads"
