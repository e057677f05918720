"""A soak by itself: what it is of, its folder, and the report that follows from its journal.

The folder holds `inputs.json` (what was soaked), `soak.jsonl` (the journal) and `soak.json` (the report, made anew from the
journal whenever asked). A folder of other inputs is never continued, and says what differs.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from model_optimizer.artifacts.base import Frozen
from model_optimizer.artifacts.measure import Dimension, Measure, Origin, Verdict
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.artifacts.verification import SoakResult
from model_optimizer.errors import ConfigError
from model_optimizer.journal import Journal
from model_optimizer.spec import Traffic
from model_optimizer.store import write_atomically
from model_optimizer.verification.config import SoakConfig
from model_optimizer.verification.gates import combine
from model_optimizer.verification.resource import soak_use_measures
from model_optimizer.verification.robustness import robustness_measures, soak_measure
from model_optimizer.verification.soak import NOT_ACCELERATED
from model_optimizer.verification.soak_leak import MIN_POINTS
from model_optimizer.verification.soak_records import Segment
from model_optimizer.verification.soak_summary import summarise_soak

INPUTS, JOURNAL, REPORT = "inputs.json", "soak.jsonl", "soak.json"


class SoakInputs(Frozen):
    """What identifies a soak; how long it is does not, so that one of 24 hours can be made longer."""

    engine_digest: str
    text_digest: str
    """Of the tokens that prompts are cut from, and of the texts of the drift samples."""
    runtime: str
    kv: KvPlan
    traffic: Traffic
    concurrency: int
    segment_s: float
    requests_per_segment: int | None
    drift_every_s: float
    with_control: bool
    seed: int
    machine: str
    """Fingerprint of machine and libraries: on another one other bits are no fault."""


@dataclass(frozen=True, slots=True)
class Asked:
    """How long it was to be, and why it ended before."""

    config: SoakConfig
    required_s: float
    """What a final sign-off asks for, in real hours."""
    stopped_because: str = ""


class SoakReport(Frozen):
    """What a soak found."""

    subject: str
    engine: str
    machine: str
    inputs: SoakInputs
    soak: SoakResult
    measures: tuple[Measure, ...]
    verdict: Verdict
    level: str
    """`provisional` until the required hours were really run, else `final`."""
    required_s: float
    not_accelerated: tuple[str, ...]
    """What an accelerated soak does not bring forward; empty for a real one."""
    notes: tuple[str, ...] = ()


def claim_folder(folder: Path, inputs: SoakInputs) -> None:
    """Begin a soak in a folder, or continue the same one.

    Raises:
        ConfigError: it holds a soak of something else; the message names what differs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / INPUTS
    if not path.exists():
        write_atomically(path, inputs.model_dump_json(indent=1).encode())
        return
    try:
        held = SoakInputs.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ConfigError(f"{path} is not what a soak wrote; give another --output") from error
    mine, theirs = inputs.model_dump(mode="json"), held.model_dump(mode="json")
    if changed := [f"{name} (was {theirs[name]}, is {mine[name]})" for name in mine if mine[name] != theirs[name]]:
        raise ConfigError(
            f"{folder} holds a soak of other inputs: {'; '.join(changed)[:600]}; give another --output, or what it was begun with"
        )


def key_of(inputs: SoakInputs) -> str:
    """Return what the journal is filed under."""
    return hashlib.sha256(inputs.model_dump_json().encode()).hexdigest()


def build_report(folder: Path, subject: str, inputs: SoakInputs, asked: Asked) -> SoakReport:
    """Judge what the journal holds; the same journal gives the same report."""
    journal = Journal(folder / JOURNAL, key_of(inputs), Segment)
    soak = summarise_soak(journal.records, asked.config.duration)
    soak = soak.model_copy(update={"stopped_because": asked.stopped_because})
    measures = (
        *robustness_measures(soak, 0, 0, soak.peak_bytes),
        *_undecided(soak),
        soak_measure(soak, asked.required_s),
        *soak_use_measures(soak),
    )
    gating = [measure.verdict for measure in measures if measure.verdict and measure.dimension is Dimension.ROBUSTNESS]
    accelerated = asked.config.requests_per_segment is not None
    return SoakReport(
        subject=subject,
        engine=inputs.runtime,
        machine=inputs.machine,
        inputs=inputs,
        soak=soak,
        measures=measures,
        verdict=combine(gating),
        level="final" if soak.ran_s >= asked.required_s else "provisional",
        required_s=asked.required_s,
        not_accelerated=NOT_ACCELERATED if accelerated else (),
    )


def _undecided(soak: SoakResult) -> Iterator[Measure]:
    """Yield what a soak that ended too soon leaves open."""
    if not soak.growth:
        yield Measure(
            name="growth",
            dimension=Dimension.ROBUSTNESS,
            unit="bytes_per_hour",
            value=None,
            verdict=Verdict.INCONCLUSIVE,
            origin=Origin.NOT_MEASURED,
            reason=f"{soak.num_segments} readings bound no slope; after warm-up {MIN_POINTS} are needed",
        )
    if soak.equivalent_s < soak.requested_s:
        yield Measure(
            name="tested",
            dimension=Dimension.ROBUSTNESS,
            unit="s",
            value=soak.equivalent_s,
            limit=soak.requested_s,
            higher_is_better=True,
            verdict=Verdict.INCONCLUSIVE,
            reason=f"less than was asked for: {soak.stopped_because or 'interrupted; call it again and it goes on'}",
        )


def write_report(folder: Path, report: SoakReport) -> Path:
    """Write the report as JSON."""
    path = folder / REPORT
    write_atomically(path, report.model_dump_json(indent=1).encode())
    return path
