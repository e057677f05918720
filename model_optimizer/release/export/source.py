"""A verified bundle as an export reads it, and the registry of forms that it is exported to."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import yaml
from pydantic import BaseModel, Field, ValidationError

from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.errors import ConfigError, IntegrityError
from model_optimizer.registry import Registry
from model_optimizer.release.downgrade import split_name
from model_optimizer.release.manifest import METADATA, REPORT
from model_optimizer.spec import Spec

KV_PLAN = "model/kv_cache_config.json"
_OWN_FILES = frozenset({"layout.json", "kv_cache_config.json", "metadata.json"})
"""Beside the checkpoint in model/, and not part of it."""
S = TypeVar("S", bound=Spec)


class _Device(BaseModel):
    kind: str


class Metadata(BaseModel):
    """What of model/metadata.json an export needs."""

    runtime: str
    engine: str
    """Relative to model/."""
    engine_bytes: int
    framework_version: str
    compute_capability: str | None = None
    device: _Device


class _Hardware(BaseModel):
    num_cores: int


class _Sla(BaseModel):
    memory_gib: float | None = None


class _Strategy(BaseModel):
    weights: WeightRecipe


class _Config(BaseModel):
    hardware: _Hardware
    strategy: _Strategy
    sla: _Sla = Field(default_factory=_Sla)


class _Named(BaseModel):
    name: str
    value: float | None = None


class _Report(BaseModel):
    measures: tuple[_Named, ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """A bundle that was verified; every part of it may be read."""

    bundle: Path
    manifest_sha256: str
    public_key: bytes
    metadata: Metadata
    plan: KvPlan
    weights: WeightRecipe
    num_cores: int
    memory_gib: float | None
    """What the profile allows the engine, where it says."""
    measured_bytes: Mapping[str, float]
    """Figures of the report by name."""

    @property
    def name(self) -> str:
        return self.bundle.name

    @property
    def family(self) -> str:
        return split_name(self.name)[0]

    @property
    def engine(self) -> Path:
        return self.bundle / "model" / self.metadata.engine

    def checkpoint_files(self) -> tuple[Path, ...]:
        """Return the files of the Hugging Face checkpoint."""
        return tuple(path for path in sorted((self.bundle / "model").iterdir()) if path.is_file() and path.name not in _OWN_FILES)


class Form(Protocol):
    """One form of export, e.g. a model repository of the Triton Inference Server."""

    def write(self, source: Source, target: Path, settings: Mapping[str, str]) -> tuple[str, ...]:
        """Write the form into an empty folder; return what its user must know.

        Raises:
            ConfigError: a setting is missing or wrong.
            UnsupportedError: the form has no place for this bundle's runtime or types.
        """


FORMS: Registry[Form] = Registry("export form", "model_optimizer.release.export.forms")


def read_source(bundle: Path, manifest_sha256: str, public_key: Path) -> Source:
    """Read what exports need of a verified bundle.

    Raises:
        IntegrityError: a file of the bundle says something else than this version reads.
    """
    try:
        metadata = Metadata.model_validate_json((bundle / METADATA).read_bytes())
        plan = KvPlan.model_validate_json((bundle / KV_PLAN).read_bytes(), extra="ignore")
        config = _Config.model_validate(yaml.safe_load((bundle / "config.yaml").read_bytes()))
        report = _Report.model_validate(json.loads((bundle / REPORT).read_bytes()))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise IntegrityError(f"{bundle.name}: it verifies, but this version does not read it: {_line(error)}") from error
    return Source(
        bundle=bundle,
        manifest_sha256=manifest_sha256,
        public_key=public_key.read_bytes(),
        metadata=metadata,
        plan=plan,
        weights=config.strategy.weights,
        num_cores=config.hardware.num_cores,
        memory_gib=config.sla.memory_gib,
        measured_bytes={measure.name: measure.value for measure in report.measures if measure.value is not None},
    )


def read_settings(model: type[S], given: Mapping[str, str]) -> S:
    """Return what `--set KEY=VALUE` said, as a form's own settings.

    Raises:
        ConfigError: names the setting, what was seen and what is allowed.
    """
    try:
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        known = ", ".join(model.model_fields)
        if first["type"] == "extra_forbidden":
            raise ConfigError(f"--set {key}: this form has no such setting; known: {known}") from error
        if first["type"] == "missing":
            told = model.model_fields[key].description
            raise ConfigError(f"--set {key}=VALUE is needed: {told}") from error
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"--set {key}: {message}; seen: {first['input']!r}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
