"""Everything that can be found wrong with a profile before anything is written or started."""

from dataclasses import dataclass
from pathlib import Path

from model_optimizer.errors import ConfigError
from model_optimizer.profile import DeploymentProfile, load_profile


@dataclass(frozen=True)
class Request:
    """A checked profile and where its files lie."""

    profile: DeploymentProfile
    base: Path
    """The profile's folder; relative paths start here."""
    golden_sets: tuple[Path, ...]


def read_request(path: Path, overrides: tuple[str, ...] = ()) -> Request:
    """Read a profile and look at every file that it names; nothing is written.

    Raises:
        ConfigError: the profile, its model, calibration file or a golden set is missing, empty or wrong,
            or a calibration text holds a golden item.
        UnsupportedError: the profile's hardware is not this machine.
    """
    from model_optimizer.hardware.catalogue import probe_kind
    from model_optimizer.models.resolve import check_reference
    from model_optimizer.quantization.calibration import CalibrationSource, texts
    from model_optimizer.runtimes.registry import RUNTIMES
    from model_optimizer.verification.golden import find_golden_set, load_golden_set
    from model_optimizer.verification.leakage import refuse_leakage

    profile = load_profile(path, overrides)
    base = path.resolve().parent
    for runtime in profile.scan.runtimes:
        RUNTIMES.get(runtime)
    probe_kind(profile.target.hardware)
    check_reference(profile.model, base)
    calibration = CalibrationSource.of(profile.calibration, base)
    calibration_texts = texts(calibration)
    if not any(text.strip() for text in calibration_texts):
        raise ConfigError(
            f"calibration file {calibration.tree.path} has no usable line; give JSON with `text` or `messages` per line"
        )
    folders = tuple(find_golden_set(name, base) for name in profile.verify.golden_sets)
    refuse_leakage(calibration_texts, tuple(load_golden_set(folder) for folder in folders))
    return Request(profile, base, folders)
