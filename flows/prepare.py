"""Everything that can be found wrong with a profile before anything is written or started."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from flows.target import aim
from model_optimizer.compilation.target_framework import Loader, refuse_architecture
from model_optimizer.errors import ConfigError
from model_optimizer.profile import DeploymentProfile, load_profile

FULL_BITS, HIGHEST_BITS, LOWEST_BITS = 32, 8, 2
"""What `strategy.space` makes recipes of; said here too because importing that loads torch."""


@dataclass(frozen=True)
class Request:
    """A checked profile and where its files lie."""

    profile: DeploymentProfile
    base: Path
    """The profile's folder; relative paths start here."""
    golden_sets: tuple[Path, ...]
    num_parameters: int
    """As the shard headers tell; 0 for a model that is still to be imported or fetched."""
    loader: Loader | None = None
    """What will load the result, where the profile says."""


def read_request(path: Path, overrides: tuple[str, ...] = ()) -> Request:
    """Read a profile and look at every file that it names; nothing is written, and torch is not loaded (about a second).

    Raises:
        ConfigError: the profile, its model, calibration file or a golden set is missing, empty or wrong, they contradict
            each other, or a calibration text holds a golden item.
        UnsupportedError: the profile's hardware is not this machine, its limits cannot be met by this model, or its target
            framework is not there or does not run what the scan would make.
    """
    from model_optimizer.hardware.catalogue import probe_kind
    from model_optimizer.models.resolve import check_reference
    from model_optimizer.quantization.calibration import CalibrationSource, check_calibration
    from model_optimizer.runtimes.registry import RUNTIMES

    profile = load_profile(path, overrides)
    base = path.resolve().parent
    profile, loader = aim(profile)
    for runtime in profile.scan.runtimes:
        RUNTIMES.get(runtime)
    probe_kind(profile.target.hardware)
    directory = check_reference(profile.model, base)
    _lowest_bits(profile)
    if directory and loader is not None:
        refuse_architecture(loader.target.name, directory)
    num_parameters = _check_demands(profile, directory) if directory else 0
    texts: tuple[str, ...] = ()
    if not profile.calibration.is_self:  # what the model is still to write cannot be looked at
        texts = check_calibration(CalibrationSource.of(profile.calibration, base), directory)
    return Request(profile, base, _check_golden_sets(profile, base, texts), num_parameters, loader)


def _check_demands(profile: DeploymentProfile, directory: Path) -> int:
    """Set the profile against the model's headers; return its parameters."""
    from model_optimizer.models.headers import read_headers
    from model_optimizer.profiling.demands import refuse_impossible, refuse_unmatched

    quantization = profile.quantization
    refuse_impossible(profile.sla, _lowest_bits(profile), directory)
    named = (*quantization.skip_layers, *(name for override in quantization.layer_overrides for name in override.layers))
    refuse_unmatched(named, directory)
    if quantization.layer_overrides:
        from model_optimizer.formats.registry import FORMATS  # loads torch

        for override in quantization.layer_overrides:
            FORMATS.get(override.precision)
    return sum(tensor.num_parameters for tensor in read_headers(directory).values())


def _lowest_bits(profile: DeploymentProfile) -> float:
    """Return the fewest bits that a linear layer may get; refuse a scan that has nothing to compare with or no such format."""
    if profile.quantization.default_precision != "auto":
        from model_optimizer.formats.registry import FORMATS  # loads torch

        return FORMATS.get(profile.quantization.default_precision).bits
    bits = profile.scan.bits
    if FULL_BITS not in bits or any(not LOWEST_BITS <= value <= HIGHEST_BITS for value in bits if value != FULL_BITS):
        raise ConfigError(
            f"scan.bits is {list(bits)}; it must hold 32, the unquantized baseline of every ratio; known besides: "
            f"{LOWEST_BITS} to {HIGHEST_BITS}"
        )
    return min(bits)


def _check_golden_sets(profile: DeploymentProfile, base: Path, texts: tuple[str, ...]) -> tuple[Path, ...]:
    """Read every set, and refuse two of one name and calibration texts that hold an item; return their folders."""
    from model_optimizer.verification.golden import find_golden_set, load_golden_set
    from model_optimizer.verification.leakage import refuse_leakage

    folders = tuple(find_golden_set(name, base) for name in profile.verify.golden_sets)
    sets = tuple(load_golden_set(folder) for folder in folders)
    names = [golden.card.name for golden in sets]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"verify.golden_sets: two sets are called {twice[0]!r}, and every item would count twice; name one once"
        )
    refuse_leakage(texts, sets)
    return folders


def source_commit(folder: Path) -> str:
    """Return the commit of the checkout that the profile's folder belongs to, or `unknown` outside git."""
    if commit := os.environ.get("GITHUB_SHA"):
        return commit
    done = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
