"""The deployment profile: one YAML that states model, target, limits and every stage's bounds.

Reading one loads no torch. Errors name file, line, the value seen, what is allowed.
"""

import difflib
from pathlib import Path
from typing import Self

import yaml
from pydantic import Field, ValidationError, model_validator

from model_optimizer.compilation.config import CompileConfig
from model_optimizer.errors import ConfigError
from model_optimizer.memory.config import MemoryConfig
from model_optimizer.quantization.config import CalibrationConfig, QuantizationConfig, RepairConfig
from model_optimizer.release.config import ReleaseConfig
from model_optimizer.spec import Cost, ModelRef, Sla, Spec, Target, Traffic
from model_optimizer.strategy.config import ScanConfig
from model_optimizer.verification.config import VerifyConfig


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
    try:
        text = path.read_text(encoding="utf-8-sig")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    _refuse_twice(path, node)
    if not isinstance(data, dict):
        raise ConfigError(f"{path}:1: a profile maps at least `name`, `model`, `calibration`, `verify`; seen: {data!r}")
    for override in overrides:
        _apply(data, override)
    try:
        return DeploymentProfile.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_describe(path, node, error)) from error


def _refuse_twice(path: Path, node: yaml.Node | None) -> None:
    """Refuse a key that occurs twice in one section; YAML readers keep the last one silently."""
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in seen:
                raise ConfigError(f"{path}:{line}: {key.value}: stated twice (first in line {seen[key.value]}); keep one")
            seen[str(key.value)] = line
            _refuse_twice(path, value)


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


def _describe(path: Path, root: yaml.Node | None, error: ValidationError) -> str:
    """Turn the first validation error into `file:line: field: what is wrong; seen: value`."""
    first, more = error.errors()[0], error.error_count() - 1
    field = ".".join(str(part) for part in first["loc"]) or "profile"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        message = "this field is required"
    elif first["type"] == "extra_forbidden":
        allowed = _allowed_fields(first["loc"][:-1])
        close = difflib.get_close_matches(str(first["loc"][-1]), allowed, n=1)
        message = f"unknown field; {f'did you mean {close[0]!r}? ' if close else ''}allowed: {', '.join(allowed)}"
    told = first["type"] in ("missing", "extra_forbidden") or (
        first["type"] == "value_error" and isinstance(first["input"], dict)
    )
    seen = "" if told else f"; seen: {first['input']!r}"
    rest = f" (and {more} more)" if more else ""
    return f"{path}:{_line(root, first['loc'])}: {field}: {message}{seen}{rest}"


def _allowed_fields(location: tuple[int | str, ...]) -> list[str]:
    """Return the field names of the section at `location`."""
    model: type = DeploymentProfile
    for part in location:
        fields = getattr(model, "model_fields", {})
        if part in fields and isinstance(fields[part].annotation, type):
            model = fields[part].annotation
    return list(getattr(model, "model_fields", {}))


def _line(node: yaml.Node | None, location: tuple[int | str, ...]) -> int:
    """Return the line of the deepest part of `location` that the document holds."""
    line = 1 if node is None else node.start_mark.line + 1
    for part in location:
        if isinstance(node, yaml.MappingNode):
            pair = next(((key, value) for key, value in node.value if key.value == part), None)
            if pair is None:
                return line
            line, node = pair[0].start_mark.line + 1, pair[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            return line
    return line
