"""What differs from the last run of a profile in this folder. Nothing is mixed, for every result is known by its inputs; this
says in one line why a run that somebody meant to continue makes things anew."""

import hashlib
import json
from pathlib import Path

from pydantic import RootModel, ValidationError

from flows.compose import Composer
from model_optimizer.code_version import code_version
from model_optimizer.protocols import Progress
from model_optimizer.store import write_atomically

FOLDER = "inputs"
MOST_NAMED = 8


class _Held(RootModel[dict[str, str]]):
    """Name of an input -> its value in JSON, or its digest."""


def tell_changes(compose: Composer, root: Path, progress: Progress) -> tuple[str, ...]:
    """Note what differs from the last run, and keep this one's inputs for the next; return the names of what differs."""
    path = root / FOLDER / f"{compose.request.profile.name}.json"
    now = inputs_of(compose)
    try:
        before = _Held.model_validate_json(path.read_bytes()).root
    except (OSError, ValidationError):  # the first run, or an older form: nothing to compare with
        before = now
    changed = tuple(sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name)))
    if changed:
        more = f" and {len(changed) - MOST_NAMED} more" if len(changed) > MOST_NAMED else ""
        named = ", ".join(changed[:MOST_NAMED])
        progress.note(f"changed since the last run of {path.stem}: {named}{more}; what depends on it is made anew")
    if changed or not path.exists():
        write_atomically(path, json.dumps(now, indent=1, sort_keys=True).encode())
    return changed


def inputs_of(compose: Composer) -> dict[str, str]:
    """Return everything that decides what a run makes: the profile by section and field, files by content, machine and code."""
    request = compose.request
    sections = request.profile.model_dump(mode="json", exclude={"name", "notify"})
    found = {
        f"{section}.{field}": json.dumps(value, sort_keys=True)
        for section, fields in sections.items()
        for field, value in fields.items()
    }
    found |= {f"golden set {tree.path.name}": tree.digest for tree in compose.golden}
    if not request.profile.calibration.is_self:  # that text is made from the model, later
        found["calibration text"] = compose.calibration.tree.digest
    code = hashlib.sha256(code_version("profile").encode()).hexdigest()
    return found | {"model": compose.model.tree.digest, "machine or libraries": compose.fingerprint, "code": code}
