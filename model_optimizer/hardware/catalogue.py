"""The device catalogue: profiles/hardware/*.yaml, one file per device, facts from vendors' sheets."""

from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, ValidationError

from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.hardware.cuda import nvml_names
from model_optimizer.paths import data_directory
from model_optimizer.spec import Spec

MEASURED_HERE: dict[str, Literal["auto", "cpu"]] = {"auto": "auto", "cpu": "cpu"}


class CatalogueEntry(Spec):
    """One device as its vendor describes it; dense rates, no sparsity."""

    name: str
    match: tuple[str, ...] = Field(min_length=1, description="parts of the name that the driver reports, all of which must occur")
    compute_capability: str = Field(pattern=r"^\d+\.\d$")
    num_sms: int = Field(gt=0)
    warp_size: Literal[32] = Field(description="32 on every NVIDIA GPU (X13)")
    shared_memory_per_block_kib: int = Field(gt=0, le=227)
    l2_mib: int = Field(gt=0)
    memory_gb: float = Field(gt=0)
    memory_gb_per_s: float = Field(gt=0)
    bf16_tflop_per_s: float = Field(gt=0)
    int8_top_per_s: float = Field(gt=0)
    fp8_tflop_per_s: float | None = Field(gt=0, description="null where the chip has none")
    pcie_gb_per_s: float = Field(gt=0, description="one direction (X20)")
    power_w: float = Field(gt=0)


def hardware_names(folder: Path | None = None) -> tuple[str, ...]:
    """Return what `target.hardware` may say."""
    return (*MEASURED_HERE, *sorted(path.stem for path in _folder(folder).glob("*.yaml")))


def read_entry(name: str, folder: Path | None = None) -> CatalogueEntry:
    """Return one device of the catalogue.

    Raises:
        ConfigError: no such device, or its file is wrong.
    """
    path = _folder(folder) / f"{name}.yaml"
    if name in MEASURED_HERE or name not in hardware_names(folder):
        raise ConfigError(f"target.hardware: unknown device {name!r}; known: {', '.join(hardware_names(folder))}")
    try:
        return CatalogueEntry.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, ValidationError) as error:
        raise ConfigError(f"{path} is no device description: {' '.join(str(error).split())}") from error


def probe_kind(hardware: str, folder: Path | None = None) -> Literal["auto", "cpu", "cuda"]:
    """Return what to probe for `target.hardware`.

    Raises:
        ConfigError: unknown device.
        UnsupportedError: a device of the catalogue that this machine does not have.
    """
    if hardware in MEASURED_HERE:
        return MEASURED_HERE[hardware]
    entry, present = read_entry(hardware, folder), nvml_names()
    if any(all(part in name for part in entry.match) for name in present):
        return "cuda"
    raise UnsupportedError(
        f"target.hardware {hardware!r} ({entry.name}) is not this machine (GPUs here: {'; '.join(present) or 'none'}); "
        "measure on that machine, or set target.hardware: auto"
    )


def _folder(folder: Path | None) -> Path:
    return folder or data_directory("profiles") / "hardware"
