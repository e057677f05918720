"""Compare the digests of the images in compose.yaml and images/*.Dockerfile with their registries; `--write` moves the pins.

Needs docker with buildx, and the network. A tag that was built anew has another digest: moving a pin is a change to review.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PINNED = re.compile(r"(?P<reference>[a-z0-9][a-z0-9./_-]*:[A-Za-z0-9._-]+)@(?P<digest>sha256:[0-9a-f]{64})")
TIMEOUT_S = 60


def files() -> list[Path]:
    """Return the files that pin images."""
    return [HERE / "compose.yaml", *sorted((HERE / "images").glob("*.Dockerfile"))]


def digest_now(reference: str) -> str:
    """Return the digest of the index that a tag names now, over all platforms.

    Raises:
        RuntimeError: docker cannot tell.
    """
    command = ["docker", "buildx", "imagetools", "inspect", reference, "--format", "{{.Manifest.Digest}}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{reference}: docker does not run: {error}") from error
    digest = done.stdout.strip()
    if done.returncode or not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise RuntimeError(f"{reference}: {' '.join((done.stderr or done.stdout).split()) or 'no digest'}")
    return digest


def main(arguments: list[str]) -> int:
    """Return 0 where every pin is what its tag names, 1 where one is not, 2 where that cannot be found out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the new digests into the files")
    write = parser.parse_args(arguments).write
    changed: dict[Path, str] = {}
    for path in files():
        text = path.read_text(encoding="utf-8")
        for pin in PINNED.finditer(text):
            try:
                now = digest_now(pin["reference"])
            except RuntimeError as error:
                print(error, file=sys.stderr)
                return 2
            if now != pin["digest"]:
                print(f"{path.name}: {pin['reference']}: {pin['digest']} -> {now}")
                changed[path] = changed.get(path, text).replace(pin[0], f"{pin['reference']}@{now}")
    if write:
        for path, text in changed.items():
            path.write_text(text, encoding="utf-8")
    return 1 if changed and not write else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
