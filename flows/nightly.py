"""The nightly soak: the newest bundle that was signed off, under load; the run is red where the soak finds a fault."""

import logging
from collections.abc import Iterator
from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run
from pydantic import ValidationError

from flows.bootstrap import home, run_file
from flows.notify import telling
from flows.outcome import write_document
from flows.soak import soak
from flows.soak_page import PAGE, conclude, write_page
from flows.soak_request import SOAKS, SoakOptions
from model_optimizer.artifacts.measure import Verdict
from model_optimizer.artifacts.release import SignOff
from model_optimizer.errors import ConfigError
from model_optimizer.spec import Notify
from model_optimizer.verification.soak_report import SoakReport

log = logging.getLogger(__name__)

RECORD = ".signoff.json"


@flow(name="nightly-soak", persist_result=False)
def nightly_soak(name: str = "", profile: str = "24h", duration: str = "", notify: Notify = Notify()) -> dict[str, object]:
    """Soak the newest signed-off bundle.

    Args:
        name: of this profile only, e.g. `chat`; left out: the newest of all.
        profile: `24h`, `72h`, `24h-accelerated`, or a file.
        duration: e.g. `8h`; left out: the soak profile's.
        notify: who is told how it ended.

    Raises:
        ConfigError: no bundle is signed off.
        GateFailed: the soak found a fault, or was too short to decide.
    """
    run_id = str(flow_run.get_id())
    with telling(name or "nightly-soak", notify):
        bundle = newest_signed_off(home() / "bundles", name)
        folder = home() / SOAKS / f"{bundle.name}-{run_id[:8]}"  # a Retry of this run goes on here, another night begins anew
        options = SoakOptions(target=str(bundle), profile=profile, duration=duration or None, output=str(folder))
        report = soak(options)
        write_page(report, folder)
        document = soak_document(report, folder / PAGE)
        write_document(run_file(run_id), document)
        conclude(report, folder / PAGE)
    return document


def newest_signed_off(bundles: Path, name: str = "") -> Path:
    """Return the bundle that was signed off last; whether its files and signature still hold is for the reader to verify.

    Raises:
        ConfigError: there is none.
    """
    records = {record.bundle: record for record in _records(bundles) if record.decision == "signed-off"}
    found = [record for record in records.values() if not name or record.bundle.rpartition("-v")[0] == name]
    if not found:
        wanted = f"of {name!r} " if name else ""
        raise ConfigError(
            f"no bundle {wanted}in {bundles} is signed off (signed off: {', '.join(sorted(records)) or 'none'}); "
            "`model-optimizer approve` signs one off"
        )
    return bundles / max(found, key=lambda record: (record.signed_at, record.bundle)).bundle


def _records(bundles: Path) -> Iterator[SignOff]:
    for path in sorted(bundles.glob(f"*{RECORD}")):
        try:
            record = SignOff.model_validate_json(path.read_bytes())
        except ValidationError as error:
            log.warning("%s is no sign-off record and counts as none: %s", path, error.errors()[0]["msg"])
            continue
        if f"{record.bundle}{RECORD}" == path.name and (bundles / record.bundle).is_dir():
            yield record


def soak_document(report: SoakReport, page: Path) -> dict[str, object]:
    """Return the machine-readable outcome."""
    gates = [measure for measure in report.measures if measure.verdict is not None]
    passed = sum(measure.verdict is Verdict.ACCEPT for measure in gates)
    return {
        "name": report.subject,
        "verdict": report.verdict.value,
        "headline": f"{report.soak.ran_s / 3600:.2f} h of soak, {report.soak.num_requests:,} requests, "
        f"{passed} of {len(gates)} gates accept",
        "level": report.level,
        "report": str(page),
    }
