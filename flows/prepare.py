"""Everything that can be found wrong with a profile before anything is written or started."""

import json
from dataclasses import dataclass
from pathlib import Path

from model_optimizer.errors import ConfigError
from model_optimizer.paths import data_directory
from model_optimizer.profile import DeploymentProfile, load_profile


@dataclass(frozen=True)
class Request:
    """A checked profile and where its files lie."""

    profile: DeploymentProfile
    base: Path
    """The profile's folder; relative paths start here."""
    calibration: Path
    golden_sets: tuple[Path, ...]


def read_request(path: Path, overrides: tuple[str, ...] = ()) -> Request:
    """Read a profile and look at every file that it names.

    Raises:
        ConfigError: the profile, its calibration file, a golden set or a local model is missing or empty.
    """
    profile = load_profile(path, overrides)
    base = path.resolve().parent
    calibration = base / profile.calibration.path.expanduser()
    if not calibration.is_file():
        raise ConfigError(f"calibration file {calibration} does not exist (calibration.path in {path})")
    if not calibration.read_bytes().strip():
        raise ConfigError(f"calibration file {calibration} is empty; it needs one JSON object per line with `text` or `messages`")
    golden_sets = tuple(_golden_set(name, base) for name in profile.verify.golden_sets)
    return Request(profile, base, calibration, golden_sets)


def _golden_set(name: str, base: Path) -> Path:
    """Return the folder of a golden set, by path or by name."""
    shipped = data_directory("golden_sets")
    for folder in (base / name, shipped / name):
        if (folder / "card.yaml").is_file():
            items = folder / "items.jsonl"
            if not items.is_file() or not any(_is_json(line) for line in items.read_text(encoding="utf-8-sig").splitlines()):
                raise ConfigError(f"golden set {folder} has no items; items.jsonl needs one JSON object per line")
            return folder
    known = ", ".join(sorted(card.parent.name for card in shipped.glob("*/card.yaml")))
    raise ConfigError(f"golden set {name!r} was not found beside the profile nor in {shipped}; known: {known}")


def _is_json(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
