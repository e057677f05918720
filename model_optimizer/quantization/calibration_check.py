"""What can be told about calibration text before it calibrates anything: counts, lengths, faults, what it covers."""

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from model_optimizer.artifacts.base import Frozen
from model_optimizer.artifacts.quantized import CalibrationReport
from model_optimizer.quantization.calibration import Prepared, prepare, prepare_without_model
from model_optimizer.quantization.calibration_source import CalibrationSource
from model_optimizer.quantization.encoding import encode_bytes
from model_optimizer.quantization.expert_coverage import ExpertLoad, count_expert_tokens, coverage_warnings
from model_optimizer.quantization.traffic_coverage import LOW_SCORE, TrafficCoverage, cover

EXPERT_SEQUENCES, EXPERT_TOKENS = 32, 256
"""What a mixture's routers are shown: the defaults of the sensitivity pass."""


class CalibrationCheck(Frozen):
    """The findings about one calibration file or set."""

    name: str
    kind: str
    num_bytes: int
    byte_order_mark: bool
    unit: Literal["tokens", "bytes"]
    """What lengths are counted in; bytes where no model is known, and a text has at most that many tokens of its own."""
    report: CalibrationReport
    shortest: int
    coverage: TrafficCoverage | None
    """None where no traffic or no model is known."""
    experts: tuple[ExpertLoad, ...]
    warnings: tuple[str, ...]


def examine(
    source: CalibrationSource, model: Path | None, request_lengths: Sequence[int] = (), *, with_experts: bool = False
) -> CalibrationCheck:
    """Look at calibration text with the tokenizer of a model, or without one.

    `request_lengths` (tokens) are compared with the samples' where a model is given. `with_experts` loads its weights and runs
    the leading samples.

    Raises:
        ConfigError: no record is usable, or the file cannot be read.
    """
    prepared = prepare(source, model) if model else prepare_without_model(source, encode_bytes)
    lengths = [len(tokens) for tokens in prepared.samples]
    coverage = cover(lengths, request_lengths) if model and request_lengths else None
    experts = _experts(model, prepared) if model and with_experts else ()
    return CalibrationCheck(
        name=source.name,
        kind=source.kind,
        num_bytes=sum(path.stat().st_size for path in source.files()),
        byte_order_mark=any(_is_marked(path) for path in source.files()),
        unit="tokens" if model else "bytes",
        report=prepared.report,
        shortest=min(lengths),
        coverage=coverage,
        experts=experts,
        warnings=(*prepared.warnings, *_coverage_warnings(coverage), *coverage_warnings(experts)),
    )


def _experts(model: Path, prepared: Prepared) -> tuple[ExpertLoad, ...]:
    from model_optimizer.formats.loading import load_dequantized

    return count_expert_tokens(
        load_dequantized(model), [tokens[:EXPERT_TOKENS] for tokens in prepared.samples[:EXPERT_SEQUENCES]]
    )


def _coverage_warnings(coverage: TrafficCoverage | None) -> tuple[str, ...]:
    if coverage is None or not (gaps := coverage.gaps()):
        return ()
    low = f" (score {coverage.score_ratio:.2f}, below {LOW_SCORE})" if coverage.score_ratio < LOW_SCORE else ""
    return (f"calibration lengths lack what the traffic has{low}: {'; '.join(gaps)}",)


def _is_marked(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8
