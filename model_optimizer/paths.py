"""Where packaged data lies: the repository root in a checkout, beside the package when installed."""

from pathlib import Path

from model_optimizer.errors import ConfigError

PACKAGE_ROOT = Path(__file__).resolve().parent
REPOSITORY_ROOT = PACKAGE_ROOT.parent


def data_directory(name: str) -> Path:
    """Return the folder `name` (`profiles`, `golden_sets`) that ships with the project.

    Raises:
        ConfigError: neither the package nor the checkout holds it.
    """
    for root in (PACKAGE_ROOT / "data", REPOSITORY_ROOT):
        if (root / name).is_dir():
            return root / name
    raise ConfigError(f"the folder {name!r} was found neither in {PACKAGE_ROOT / 'data'} nor in {REPOSITORY_ROOT}")
