"""What `profiles/soak/*.yaml` may say: how long, how much, what counts as final."""

from pathlib import Path

from pydantic import Field, ValidationError

from model_optimizer.errors import ConfigError
from model_optimizer.paths import data_directory
from model_optimizer.spec import Spec, Traffic
from model_optimizer.verification.config import Duration, SoakConfig
from model_optimizer.yaml_file import read_yaml

FOLDER = "soak"


class SoakProfile(Spec):
    """A soak without a model."""

    soak: SoakConfig = SoakConfig()
    required: Duration = Field(default=86400.0, description="real hours that a final verdict asks for")
    concurrency: int = Field(default=4, ge=1, le=1024, description="requests in flight; bursts submit twice as many at once")
    traffic: Traffic = Traffic()
    golden_sets: tuple[str, ...] = Field(
        default=(), description="whose prompts make the drift samples; none: windows of the built-in texts"
    )


def load_soak_profile(name: str) -> SoakProfile:
    """Read `24h`, `72h` or another name below profiles/soak, or a path.

    Raises:
        ConfigError: it is not there or says something wrong; the message names file, line and what is allowed.
    """
    folder = data_directory("profiles") / FOLDER
    path = Path(name)
    if not path.is_file():
        path = folder / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(it.stem for it in folder.glob("*.yaml")))
        raise ConfigError(f"--profile {name!r} is no file and no soak profile; known: {known}")
    document = read_yaml(path, "it must map names to values, e.g. `concurrency: 4`")
    try:
        return SoakProfile.model_validate(document.data)
    except ValidationError as error:
        raise document.fault(error, SoakProfile, "soak profile") from error
