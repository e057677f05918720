"""A release of a tiny model: the stage entries that it reads, and the call that packages it."""

import shutil
from pathlib import Path

from report_fixtures import (
    FLOAT,
    compiled,
    front,
    golden_trees,
    memory,
    quantized,
    samples,
    stored,
    target,
    verification,
    write_stage_files,
)

from model_optimizer.artifacts.base import Tree
from model_optimizer.artifacts.measure import Verdict
from model_optimizer.artifacts.release import Release
from model_optimizer.artifacts.strategy import Strategy
from model_optimizer.protocols import Quiet
from model_optimizer.release.config import ReleaseConfig, SignerConfig
from model_optimizer.release.stage import PackageInputs, package_release
from model_optimizer.spec import Sla, Traffic

DOCUMENTS = {"report.json": b'{"report_format":1}', "report.html": b"<!doctype html>", "report.md": b"# Report\n"}


def make_inputs(
    root: Path,
    checkpoint: Path,
    verdict: Verdict = Verdict.ACCEPT,
    *,
    strategy: Strategy | None = None,
    required_soak_s: float = 86400,
) -> PackageInputs:
    """Write the stage entries that a release reads and return its inputs."""
    root.mkdir(parents=True, exist_ok=True)
    engine = compiled() if strategy is None else compiled(strategy)
    (root / "quantize").mkdir()
    shutil.copytree(checkpoint, root / "quantize" / "checkpoint")
    (root / "memory").mkdir()
    (root / "memory" / "kv_cache_config.json").write_text('{"num_pages": 192}')
    (root / "verify").mkdir()
    (root / "verify" / "samples.parquet").write_bytes(b"PAR1PAR1")
    return PackageInputs(
        fingerprint="f" * 64,
        name="chat",
        model_ref="package:tiny",
        model=Tree.of(checkpoint),
        source_bytes=98_000_000,
        target=stored("profile", target()),
        front=stored("scan", front()),
        quantized=stored("quantize", quantized(2), root / "quantize"),
        engine=write_stage_files(root, checkpoint, engine, "compile"),
        baseline_engine=write_stage_files(root, checkpoint, compiled(FLOAT, 541_000_000), "compile-baseline"),
        memory=stored("memory", memory(), root / "memory"),
        verification=stored("verify", verification(verdict), root / "verify"),
        attempts=(),
        golden=golden_trees(root),
        calibration_digest="c" * 64,
        source_commit="0" * 40,
        sla=Sla(p95_latency_ms=1500),
        traffic=Traffic(),
        seeds={"calibration": 0, "verify": 7},
        required_soak_s=required_soak_s,
        config=ReleaseConfig(signer=SignerConfig(key=root / "keys" / "key.pem")),
    )


def package(inputs: PackageInputs, root: Path) -> Release:
    (root / "work").mkdir(exist_ok=True)
    return package_release(
        inputs, root / "work", bundles=root / "bundles", documents=DOCUMENTS, samples=samples(), progress=Quiet()
    )
