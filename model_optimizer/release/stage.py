"""Stage 7: write, sign and publish the bundle, with its baseline and its sign-off record.

A bundle appears under its public name only when it is complete. A killed call leaves nothing that a
later call cannot take up: the journal in the workspace names the bundle that was about to appear, so
that a rerun finds it and burns no version number.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from model_optimizer.artifacts.base import Stored, file_sha256
from model_optimizer.artifacts.compiled import CompiledModel
from model_optimizer.artifacts.measure import Dimension, Measure, Verdict
from model_optimizer.artifacts.release import Approver, Release, SampleOutput, SignOff, Terms
from model_optimizer.decisions import Decision
from model_optimizer.errors import ConfigError, IntegrityError
from model_optimizer.protocols import Progress
from model_optimizer.release.bom import BOM, bill_of_materials
from model_optimizer.release.bundle import Content, bundles_locked, fill, previous_release, publish, staging, versions
from model_optimizer.release.contents import Told, small_files
from model_optimizer.release.inputs import PackageInputs
from model_optimizer.release.loading import BASELINE, Loaded, load_in_target
from model_optimizer.release.manifest import MANIFEST, REPORT
from model_optimizer.release.model_card import CARD, model_card
from model_optimizer.release.provenance import PROVENANCE, provenance
from model_optimizer.release.sign import SigningKey, ensure_key, public_key_path, seal
from model_optimizer.release.signoff import Review, decide, gate_rows, read_record, record, record_path, write_record
from model_optimizer.release.version import optimizer_hash
from model_optimizer.release.writer import BundleWriter
from model_optimizer.store import canonical_json, write_atomically

__all__ = ["PackageInputs", "find_release_fault", "package_release"]

JOURNAL = "publishing.json"


@dataclass(frozen=True, slots=True)
class _Measured:
    """What was measured or drawn for this run; none of it is identity."""

    documents: Mapping[str, bytes]
    samples: tuple[SampleOutput, ...]
    key: SigningKey
    loaded: Loaded


def package_release(
    inputs: PackageInputs,
    workspace: Path,
    *,
    bundles: Path,
    documents: Mapping[str, bytes],
    samples: tuple[SampleOutput, ...],
    progress: Progress,
) -> Release:
    """Publish the next version of the release (and `-v0` before the first) and sign it off or refuse it.

    `documents` are the rendered reports by file name; `report.json` is the one that is signed off.

    Raises:
        ConfigError: no `report.json`, no sample, or a signing key or folder that cannot be used.
        UnsupportedError: the target framework does not load what is to be released; nothing was published.
    """
    if "report.json" not in documents or not samples:
        raise ConfigError(
            f"a release needs report.json and at least one sample; seen: {sorted(documents)}, {len(samples)} samples"
        )
    measured = _Measured(documents, samples, ensure_key(inputs.config.signer.key), load_in_target(inputs, progress))
    with bundles_locked(bundles, inputs.name):
        baseline = bundles / f"{inputs.name}-v0"
        if not baseline.exists():
            progress.note(f"writing the baseline bundle {baseline.name}")
            _make_baseline(inputs, bundles, measured)
        bundle = _find_published(workspace, bundles)
        if bundle is None:
            bundle = _make_release(inputs, workspace, bundles, measured)
    answer_by_policy(bundle, inputs, measured.key)
    progress.note(f"released {bundle.name}")
    return _release(bundle, baseline, measured)


def find_release_fault(release: Release, bundles: Path, key: Path) -> str | None:
    """Return why a stored release no longer stands (bundle gone or changed, another key), or None."""
    bundle, public_key = bundles / release.bundle, public_key_path(key)
    if not (bundle / MANIFEST).is_file() or file_sha256(bundle / MANIFEST) != release.manifest_sha256:
        return f"bundle {bundle} is gone or changed"
    if not public_key.is_file() or file_sha256(public_key) != release.public_key_sha256:
        return f"bundle {bundle} was signed with another key than {key}"
    try:  # it may have been answered since
        found = read_record(bundle, public_key)
    except IntegrityError as error:
        return f"the sign-off record of {bundle} is gone or changed ({error})"
    return None if found.bundle_manifest_sha256 == release.manifest_sha256 else f"the sign-off record of {bundle} is another's"


def answer_by_policy(bundle: Path, inputs: PackageInputs, key: SigningKey) -> SignOff:
    """Return a bundle's record after what needs no person: the gates decide where approval is automatic, and what nobody
    answered in time is refused."""
    request = read_record(bundle, key.public)
    if request.decision != "waiting" or request.terms is None:
        return request
    digests = (request.report_sha256, request.bundle_manifest_sha256)
    if request.terms.approval == "automatic":
        decision = decide(request.verdict or Verdict.REJECT, 0, 0)[0]
        identity = f"the gates decided, no person; signed with the release key {key.public_sha256[:16]}"
        return record(bundle, Review(decision, "policy: automatic", "automatic", identity, *digests), key, key.public)
    if datetime.now(UTC) > datetime.fromisoformat(request.terms.until):
        comment = f"nobody signed it off until {request.terms.until[:16]} UTC"
        identity = f"time ran out, no person decided; signed with the release key {key.public_sha256[:16]}"
        timed_out = Review("refused", "policy: wait_days", "automatic", identity, *digests, comment=comment)
        return record(bundle, timed_out, key, key.public)
    return request


def _find_published(workspace: Path, bundles: Path) -> Path | None:
    """Return the bundle that an earlier, killed call of this very release published, if it did."""
    if not (workspace / JOURNAL).is_file():
        return None
    journal = json.loads((workspace / JOURNAL).read_bytes())
    bundle = bundles / journal["bundle"]
    if not (bundle / MANIFEST).is_file() or not record_path(bundle).is_file():
        return None
    return bundle if file_sha256(bundle / MANIFEST) == journal["manifest_sha256"] else None


def _make_baseline(inputs: PackageInputs, bundles: Path, measured: _Measured) -> None:
    """Publish the unquantized baseline in the same format."""
    compiled = inputs.baseline_engine
    name = f"{inputs.name}-v0"
    latency = [result for result in inputs.verification.artifact.latency if result.strategy == compiled.artifact.strategy.label]
    summary = {
        "bundle": name,
        "strategy": compiled.artifact.strategy.label,
        "engine_bytes": compiled.artifact.engine.num_bytes,
        "parity": compiled.artifact.parity.model_dump(mode="json"),
        "latency": [result.model_dump(mode="json") for result in latency],
    }
    with staging(bundles, inputs.name, 0) as staged:
        writer = BundleWriter(staged)
        files = small_files(inputs, compiled.artifact, Told(name, measured.samples, None, Loaded(because=BASELINE)))
        fill(writer, Content(inputs.model.path, compiled, {**files, REPORT: canonical_json(summary)}, _copies(inputs, compiled)))
        unread = {"decision": "baseline", "verdict": None, "gates": (), "terms": None, "identity": "needs no sign-off"}
        write_record(
            bundles / name, _seal(writer, inputs, compiled.artifact, measured.key).model_copy(update=unread), measured.key
        )
        publish(staged, bundles)


def _make_release(inputs: PackageInputs, workspace: Path, bundles: Path, measured: _Measured) -> Path:
    """Publish the next version: bundle complete, journal, record, then the rename that makes it public."""
    version = max(versions(bundles, inputs.name)) + 1
    name = f"{inputs.name}-v{version}"
    quantized = inputs.quantized
    checkpoint = inputs.model.path
    if quantized.artifact.checkpoint is not None:
        checkpoint = quantized.directory / quantized.artifact.checkpoint
    verification = inputs.verification
    copies = _copies(inputs, inputs.engine)
    copies["metrics/samples.parquet"] = verification.directory / verification.artifact.samples
    told = Told(name, measured.samples, previous_release(bundles, inputs.name), measured.loaded)
    files = small_files(inputs, inputs.engine.artifact, told)
    files |= {f"metrics/{file}": data for file, data in measured.documents.items()}
    with staging(bundles, inputs.name, version) as staged:
        writer = BundleWriter(staged)
        fill(writer, Content(checkpoint, inputs.engine, files, copies))
        request = _seal(writer, inputs, inputs.engine.artifact, measured.key)
        write_atomically(workspace / JOURNAL, canonical_json({"bundle": name, "manifest_sha256": request.bundle_manifest_sha256}))
        write_record(bundles / name, request, measured.key)
        return publish(staged, bundles)


def _copies(inputs: PackageInputs, compiled: Stored[CompiledModel]) -> dict[str, Path]:
    """Return the files that stages made for the bundle, by their place in it."""
    return {
        "model/layout.json": compiled.directory / compiled.artifact.layout,
        "model/kv_cache_config.json": inputs.memory.directory / inputs.memory.artifact.config,
    }


def _seal(writer: BundleWriter, inputs: PackageInputs, compiled: CompiledModel, key: SigningKey) -> SignOff:
    """Write card, bill of materials, provenance, manifest and signature; return the request for their sign-off."""
    writer.write(CARD, model_card(inputs, compiled, writer.directory.name))
    written = {ref.path: ref for ref in writer.files}
    model_files = tuple(ref for path, ref in written.items() if path.startswith("model/"))
    writer.write(BOM, bill_of_materials(inputs, compiled, writer.directory.name, model_files))
    writer.write(PROVENANCE, provenance(inputs, model_files))
    manifest_sha256, signature_sha256 = seal(writer, key)
    now = datetime.now(UTC)
    return SignOff(
        bundle=writer.directory.name,
        bundle_manifest_sha256=manifest_sha256,
        signature_sha256=signature_sha256,
        report_sha256=written[REPORT].sha256,
        optimizer_hash=optimizer_hash(),
        gates=gate_rows(inputs.results),
        verdict=inputs.results.verdict(),
        decision="waiting",
        level="none",
        reviewer="",
        identity="nobody has decided yet",
        signed_at=now.isoformat(timespec="seconds"),
        terms=_terms(inputs, now),
    )


def _terms(inputs: PackageInputs, now: datetime) -> Terms:
    """Return who may sign off what is packaged now."""
    config = inputs.config
    return Terms(
        approval=config.approval,
        ways=config.open_ways,
        approvers=tuple(Approver(name=name, public_key=key) for name, key in config.approvers.items()),
        prevent_self_review=config.prevent_self_review,
        authors=inputs.authors,
        level=decide(Verdict.ACCEPT, inputs.verification.artifact.soak.ran_s, inputs.required_soak_s)[1],
        until=(now + timedelta(days=config.wait_days)).isoformat(timespec="seconds"),
    )


def _release(bundle: Path, baseline: Path, measured: _Measured) -> Release:
    """Describe a published bundle from what lies on disk."""
    found = SignOff.model_validate_json(record_path(bundle).read_bytes())
    num_bytes = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file())
    size = Measure(
        name="bundle_bytes",
        dimension=Dimension.RESOURCE,
        unit="bytes",
        value=num_bytes,
        baseline=sum(path.stat().st_size for path in baseline.rglob("*") if path.is_file()),
        num_samples=1,
        reason="all files of the bundle, checkpoint and engine together",
    )
    gates = found.unaccepted
    because = f"the verdict is {found.verdict}" + (f" ({', '.join(gates)})" if gates else "")
    decision = Decision(subject=bundle.name, choice=f"{found.decision}, level {found.level}", because=because)
    return Release(
        measures=(size, *measured.loaded.measures()),
        decisions=(decision, measured.loaded.decision()),
        warnings=measured.loaded.doubts,
        bundle=bundle.name,
        baseline_bundle=baseline.name,
        version=int(bundle.name.rpartition("-v")[2]),
        manifest_sha256=found.bundle_manifest_sha256,
        signoff_sha256=file_sha256(record_path(bundle)),
        decision=found.decision,
        level=found.level,
        public_key_sha256=measured.key.public_sha256,
    )
