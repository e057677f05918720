"""Export a bundle: verify it, read it, write it in another form into a new folder that appears complete or not at all."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from model_optimizer.disk import explained
from model_optimizer.errors import ConfigError
from model_optimizer.release.bundle import sync, sync_tree
from model_optimizer.release.config import SignerConfig
from model_optimizer.release.deploy import require_sign_off
from model_optimizer.release.export.source import FORMS, read_source
from model_optimizer.release.sign import public_key_path
from model_optimizer.release.verify import verify_bundle


def export(
    bundle: Path, target: Path, form: str, settings: Mapping[str, str], *, public_key: Path | None = None
) -> tuple[str, ...]:
    """Write a signed-off bundle in the form `form`; return what its user must know.

    Raises:
        IntegrityError: the bundle does not verify.
        ConfigError: no such form, a wrong setting, a bundle that is not signed off, or a folder that holds something.
        UnsupportedError: the form cannot hold this bundle.
        StorageError: the folder cannot be written.
    """
    writer = FORMS.get(form)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists; an export goes to a new or an empty folder")
    facts = verify_bundle(bundle, public_key=public_key)
    require_sign_off(facts)
    source = read_source(bundle.resolve(), facts.manifest_sha256, public_key or public_key_path(SignerConfig().key))
    staged = target.with_name(f".{target.name}.exporting")
    with explained(target.parent):
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        try:
            notes = writer.write(source, staged, settings)
            sync_tree(staged)
            if target.exists():
                target.rmdir()
            staged.rename(target)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        sync(target.parent)
    return notes
