"""The bundle's directory: version numbers, what lies where, and publication in one rename."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import filelock

from model_optimizer.artifacts.base import Stored
from model_optimizer.artifacts.compiled import CompiledModel
from model_optimizer.artifacts.release import SignOff
from model_optimizer.errors import ConfigError, IntegrityError
from model_optimizer.release.signoff import record_path
from model_optimizer.release.writer import BundleWriter, files_below

TORCH = "torch"
"""The runtime whose engine is the checkpoint itself."""
RELEASES, INCOMING = "releases", ".deploy.incoming"
"""Where a deployment root holds a bundle, and where it receives one."""
_CHECKPOINT_SUFFIXES = frozenset({".json", ".safetensors", ".model", ".jinja", ".txt", ".tiktoken"})
"""What a checkpoint needs to load; pickles and notes of its author stay behind."""


@dataclass(frozen=True, slots=True)
class Content:
    """Where the parts of one bundle come from, and its small files by path."""

    checkpoint: Path
    engine: Stored[CompiledModel]
    files: dict[str, bytes]
    copies: dict[str, Path]


@contextmanager
def bundles_locked(bundles: Path, name: str) -> Iterator[None]:
    """Hold the right to number and publish bundles of `name`; clear what killed calls left half made."""
    try:
        bundles.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the bundles folder {bundles} cannot be made: {error.strerror}") from error
    with filelock.FileLock(bundles / f".{name}.lock"):
        shutil.rmtree(_staging_place(bundles, name), ignore_errors=True)
        yield


def _staging_place(bundles: Path, name: str) -> Path:
    return bundles / f".{name}.publishing"


def scratch_root(bundles: Path, name: str) -> Path:
    """Return where the self-check of bundles of `name` deploys them, as hard links."""
    return bundles / f".{name}.self-check"


def versions(bundles: Path, name: str) -> tuple[int, ...]:
    """Return the published versions of `name`, rising."""
    pattern = re.compile(rf"{re.escape(name)}-v(\d+)")
    matches = (pattern.fullmatch(path.name) for path in bundles.iterdir() if path.is_dir())
    return tuple(sorted(int(match[1]) for match in matches if match))


def previous_release(bundles: Path, name: str) -> Path:
    """Return the newest signed-off bundle of `name`, or its baseline where none was signed off."""
    for version in reversed(versions(bundles, name)):
        bundle = bundles / f"{name}-v{version}"
        if version and record_path(bundle).is_file():
            record = SignOff.model_validate_json(record_path(bundle).read_bytes())
            if record.decision == "signed-off":
                return bundle
    return bundles / f"{name}-v0"


@contextmanager
def staging(bundles: Path, name: str, version: int) -> Iterator[Path]:
    """Yield a new directory called as the bundle will be, on the same file system; gone afterwards if not published.

    Only who holds `bundles_locked` may call this.
    """
    place = _staging_place(bundles, name)
    bundle = place / f"{name}-v{version}"
    bundle.mkdir(parents=True)
    try:
        yield bundle
    finally:
        shutil.rmtree(place)


def fill(writer: BundleWriter, content: Content) -> None:
    """Write checkpoint, engine, copies and small files into a bundle directory.

    For the torch runtime the checkpoint is the engine and is stored once.
    """
    sources = checkpoint_files(content.checkpoint)
    compiled = content.engine.artifact
    if compiled.engine.runtime != TORCH:
        sources |= files_below(engine_place(compiled), content.engine.directory / compiled.engine.directory)
    writer.copy(sources | content.copies)
    for place, data in content.files.items():
        writer.write(place, data)


def engine_place(compiled: CompiledModel) -> str:
    """Return where the engine lies in its bundle, relative to the bundle."""
    runtime = compiled.engine.runtime
    return "model" if runtime == TORCH else f"model/engines/{runtime}"


def checkpoint_files(source: Path) -> dict[str, Path]:
    """Return config, weights and tokenizer of a Hugging Face directory by their place in a bundle.

    Raises:
        IntegrityError: it has no config.json or no safetensors.
    """
    files = [path for path in sorted(source.iterdir()) if path.is_file() and path.suffix in _CHECKPOINT_SUFFIXES]
    names = {path.name for path in files}
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        raise IntegrityError(f"checkpoint {source}: missing: config.json and *.safetensors are needed; seen: {sorted(names)}")
    return {f"model/{path.name}": path for path in files}


def publish(staged: Path, bundles: Path) -> Path:
    """Move a finished bundle to its public name in one rename, durably.

    Raises:
        ConfigError: that name is taken; a published bundle is never overwritten.
    """
    final = bundles / staged.name
    if final.exists():
        raise ConfigError(f"bundle {final} exists and is never overwritten; remove it or release a new version")
    sync_tree(staged)
    staged.rename(final)
    sync(bundles)
    return final


def sync_tree(root: Path) -> None:
    """Make every file and folder below `root` durable."""
    for directory, _, names in os.walk(root):
        for name in names:
            sync(Path(directory, name))
        sync(Path(directory))


def sync(path: Path) -> None:
    """Make one file or folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
