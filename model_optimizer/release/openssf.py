"""OpenSSF model signatures from digests that are known already, so that no file is read again to be signed or checked.

What the library would hash it asks its hashing configuration for; ours answers from a table. The stock `model_signing verify`
accepts the result. Importing this module loads the library, which takes seconds.
"""

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from model_signing import hashing, manifest, signing, verifying
from model_signing._hashing.hashing import Digest

_ALGORITHM = "sha256"
_MISMATCH = "Signature mismatch"
"""How the library begins when a signature is good and the files are others."""


class _Known(hashing.Config):
    """A hashing configuration that hashes nothing."""

    def __init__(self, name: str, sha256_by_path: Mapping[str, str], signature: str):
        super().__init__()  # type: ignore[no-untyped-call]
        items = [
            manifest.FileManifestItem(path=PurePosixPath(path), digest=Digest(_ALGORITHM, bytes.fromhex(sha256)))
            for path, sha256 in sha256_by_path.items()
        ]
        form = {"method": "files", "hash_type": _ALGORITHM, "allow_symlinks": False, "ignore_paths": [signature]}
        self._known = manifest.Manifest(name, items, manifest.SerializationType.from_args(form))

    def hash(self, model_path: hashing.PathLike, *, files_to_hash: Iterable[hashing.PathLike] | None = None) -> manifest.Manifest:
        """Return the known digests; `files_to_hash` is never given where unsigned files count."""
        return self._known


def sign(directory: Path, signature: str, sha256_by_path: Mapping[str, str], private_key: Path) -> None:
    """Write the file `signature` of `directory` over the files of the table."""
    signer = signing.Config()  # type: ignore[no-untyped-call]
    signer.use_elliptic_key_signer(private_key=private_key)
    signer.set_hashing_config(_Known(directory.name, sha256_by_path, signature)).sign(directory, directory / signature)


def check(content: bytes, signature: str, sha256_by_path: Mapping[str, str], public_key: Path) -> None:
    """Check the bytes of a signature file against the table.

    Raises:
        ValueError, KeyError, IndexError, TypeError, AttributeError, InvalidSignature: as the library, which reads damaged
            signatures without looking.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, signature)
        place.write_bytes(content)
        verifier = verifying.Config()  # type: ignore[no-untyped-call]
        verifier.use_elliptic_key_verifier(public_key=public_key)
        verifier.set_hashing_config(_Known(signature, sha256_by_path, signature))
        try:
            verifier.verify(Path(folder), place)
        except ValueError as error:
            if str(error).startswith(_MISMATCH):
                raise ValueError("it was made over other files, or other content, than are here") from error
            raise
