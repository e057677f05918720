"""Before anybody else does it: deploy the baseline and the new bundle, go back and forward, in a scratch root.

The scratch root lies beside the bundles and holds hard links to their files, so it costs no space; every
file is hashed there all the same.
"""

import os
import shutil
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from model_optimizer.artifacts.measure import Dimension, Measure, Verdict
from model_optimizer.artifacts.release import Release
from model_optimizer.decisions import Decision
from model_optimizer.disk import explained
from model_optimizer.errors import HealthCheckFailed, IntegrityError, UnsupportedError
from model_optimizer.protocols import Progress
from model_optimizer.release.bundle import scratch_root
from model_optimizer.release.deploy import Checks, Transfer, copy_file, deploy, rollback, status
from model_optimizer.release.deployment_root import Reason
from model_optimizer.release.health import check_device, check_health
from model_optimizer.release.sign import SigningKey
from model_optimizer.release.signoff import read_record, record_path, write_record

NUM_ROUNDS = 10
ROLLBACK_LIMIT_MS = 100.0
_REASON = Reason("self-check", "deployable and revertible?", override="self-check of the mechanics in a scratch root")
_CHECKS = Checks(before=check_device, after=check_health)


def self_check(made: Release, bundles: Path, key: SigningKey, progress: Progress, checks: Checks = _CHECKS) -> Release:
    """Return the release with what deploying it and going back cost, in ms.

    A bundle that was refused is checked too: it is the mechanics that are looked at.

    Raises:
        HealthCheckFailed, UnsupportedError, IntegrityError: a bundle does not do here what it was signed with;
            the new one is then no longer signed off.
    """
    name = made.bundle.rpartition("-v")[0]
    progress.note(f"self-check: {made.baseline_bundle} and {made.bundle} are deployed in a scratch root")
    with _scratch(bundles, name) as scratch:
        transfer, warnings = _transfer(record_path(bundles / made.bundle), scratch.with_suffix(".probe"))
        try:
            num_samples = 0
            for bundle in (made.baseline_bundle, made.bundle):
                done = deploy(bundles / bundle, scratch, _REASON, public_key=key.public, checks=checks, transfer=transfer)
                num_samples += done.health.num_samples
            back_ms, forward_ms = _back_and_forward(scratch, made)
        except (HealthCheckFailed, UnsupportedError, IntegrityError):
            _withdraw(bundles / made.bundle, key)
            raise
    figures = {"rollback_ms": statistics.median(back_ms), "activation_ms": statistics.median(forward_ms)}
    decision = Decision(
        subject=made.bundle,
        choice="can be deployed and taken back",
        because=f"a scratch root went {made.baseline_bundle} -> {made.bundle} and back {NUM_ROUNDS} times, samples equal",
        numbers={**figures, "num_equal_samples": num_samples},
    )
    measures = (_measure("rollback", back_ms, ROLLBACK_LIMIT_MS), _measure("activation", forward_ms, None))
    return made.model_copy(
        update={
            "measures": made.measures + measures,
            "decisions": (*made.decisions, decision),
            "warnings": made.warnings + warnings,
        }
    )


def link_file(source: Path, destination: Path) -> None:
    """Give a file a second name on the same file system."""
    os.link(source, destination)


@contextmanager
def _scratch(bundles: Path, name: str) -> Iterator[Path]:
    """Yield where a scratch root may be made; what a killed call left there is cleared."""
    place = scratch_root(bundles, name)
    with explained(bundles), filelock.FileLock(bundles / f".{name}.self-check.lock"):
        shutil.rmtree(place, ignore_errors=True)
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _transfer(example: Path, probe: Path) -> tuple[Transfer, tuple[str, ...]]:
    """Return how files get into the scratch root: links, or copies with a warning where there are no links."""
    probe.unlink(missing_ok=True)
    try:
        link_file(example, probe)
    except OSError as error:
        return copy_file, (f"the self-check copied both bundles: no hard links beside them ({error.strerror})",)
    probe.unlink()
    return link_file, ()


def _back_and_forward(scratch: Path, made: Release) -> tuple[list[float], list[float]]:
    """Return the ms of every rollback to the baseline and of every move to the new bundle."""
    back_ms, forward_ms = [], []
    for _ in range(NUM_ROUNDS):
        back_ms.append(rollback(scratch, _REASON).elapsed_ms)
        _expect(scratch, made.baseline_bundle)
        forward_ms.append(rollback(scratch, _REASON, made.bundle).elapsed_ms)
        _expect(scratch, made.bundle)
    return back_ms, forward_ms


def _expect(scratch: Path, bundle: str) -> None:
    seen = status(scratch)
    if seen.current != bundle or seen.fault is not None:
        raise IntegrityError(f"self-check: {seen.current} is current ({seen.fault or 'complete'}) where {bundle} was asked for")


def _measure(name: str, samples_ms: list[float], limit_ms: float | None) -> Measure:
    return Measure(
        name=name,
        dimension=Dimension.ROBUSTNESS,
        unit="ms",
        value=statistics.median(samples_ms),
        limit=limit_ms,
        num_samples=len(samples_ms),
        reason=f"median over a scratch root, durable writes included; worst {max(samples_ms):.1f} ms",
    )


def _withdraw(bundle: Path, key: SigningKey) -> None:
    """Replace the record of a bundle that failed its self-check by one that refuses it."""
    record = read_record(bundle, key.public)
    row: dict[str, str | float | None] = {
        "name": "self_check",
        "dimension": Dimension.ROBUSTNESS.value,
        "unit": "count",
        "value": None,
        "limit": None,
        "verdict": Verdict.REJECT.value,
    }
    changes = {"decision": "refused", "level": "none", "verdict": Verdict.REJECT, "gates": (*record.gates, row)}
    write_record(bundle, record.model_copy(update=changes), key)
