"""The deployment profile: one YAML that states model, target, limits and every stage's bounds.

Reading one loads no torch. Errors name file, line, the value seen, what is allowed.
"""

from pathlib import Path
from typing import Self

import yaml
from pydantic import Field, ValidationError, model_validator

from model_optimizer.compilation.config import CompileConfig
from model_optimizer.errors import ConfigError
from model_optimizer.memory.config import MemoryConfig
from model_optimizer.quantization.config import CalibrationConfig, QuantizationConfig, RepairConfig
from model_optimizer.release.config import ReleaseConfig
from model_optimizer.spec import Cost, ModelRef, Notify, Sla, Spec, Target, Traffic
from model_optimizer.strategy.config import ScanConfig
from model_optimizer.verification.config import VerifyConfig
from model_optimizer.yaml_file import read_yaml


class DeploymentProfile(Spec):
    """Everything that a user states; composes `spec` and every stage's Config."""

    name: str = Field(pattern="^[a-z0-9][a-z0-9.-]{0,62}$", description="names the bundles: lower case, digits, dots, dashes")
    model: ModelRef
    target: Target = Target()
    sla: Sla = Sla()
    traffic: Traffic = Traffic()
    calibration: CalibrationConfig
    scan: ScanConfig = ScanConfig()
    quantization: QuantizationConfig = QuantizationConfig()
    compile: CompileConfig = CompileConfig()
    memory: MemoryConfig = MemoryConfig()
    verify: VerifyConfig
    repair: RepairConfig = RepairConfig()
    release: ReleaseConfig = ReleaseConfig()
    cost: Cost = Cost()
    notify: Notify = Notify()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Refuse traffic that the stated context cannot hold; only what lies beyond p95 is cut."""
        prompt, output = self.traffic.prompt_tokens.p95, self.traffic.output_tokens.p95
        if prompt + output > self.sla.max_model_len:
            raise ValueError(
                f"sla.max_model_len {self.sla.max_model_len} is smaller than traffic's p95 prompt {prompt} + p95 output {output} "
                f"= {prompt + output} tokens; raise it or state shorter traffic"
            )
        return self


def load_profile(path: Path, overrides: tuple[str, ...] = ()) -> DeploymentProfile:
    """Read and check a profile; `overrides` are `section.key=value` pairs whose values are YAML.

    Raises:
        ConfigError: one line that names file, line, field, the value seen and what is allowed.
    """
    if path.is_dir():
        raise ConfigError(f"profile {path} is a folder; name a YAML file")
    if not path.is_file():
        raise ConfigError(f"profile {path} does not exist; `model-optimizer init` writes one")
    expected = "a profile maps at least `name`, `model`, `calibration`, `verify`"
    document = read_yaml(path, expected)
    data = document.data
    if not data:
        raise ConfigError(f"{path}:1: {expected}; the file is empty")
    for override in overrides:
        _apply(data, override)
    try:
        return DeploymentProfile.model_validate(data)
    except ValidationError as error:
        raise document.fault(error, DeploymentProfile, "profile") from error


def _apply(data: dict[str, object], override: str) -> None:
    """Set one `a.b.c=value` in the raw mapping."""
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set takes key=value, e.g. sla.concurrency=4; seen: {override!r}")
    *sections, last = key.split(".")
    for section in sections:
        inner = data.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {override}: {section!r} is not a section")
        data = inner
    try:
        data[last] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override}: the value is not YAML") from error
