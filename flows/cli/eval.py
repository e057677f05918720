"""`model-optimizer eval`: golden sets and perplexity, printed."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import typer

from flows.golden_run import EngineOptions, EvalRequest, evaluate, find_arm, opened
from flows.progress import TerminalProgress, terminal
from model_optimizer.artifacts.measure import Verdict
from model_optimizer.artifacts.verification import GoldenResult
from model_optimizer.errors import ConfigError, GateFailed, Inconclusive
from model_optimizer.verification.golden_run import RESULT, GoldenRun

SHORTEST_ENGINE = 16
"""Tokens that any engine is opened for."""


def print_evaluation(request: EvalRequest, *, as_json: bool) -> None:
    """Answer, judge, print.

    Raises:
        ConfigError: an input is wrong.
        GateFailed: the engine was rejected, or (`Inconclusive`) the items do not decide.
    """
    done = evaluate(request, TerminalProgress(terminal()))
    run, place = done.run, done.folder / RESULT
    if as_json:
        typer.echo(json.dumps(run.model_dump(mode="json") | {"folder": str(done.folder)}, indent=1, ensure_ascii=False))
    else:
        typer.echo("\n".join(_lines(run, done.folder)))
    if run.verdict is Verdict.REJECT:
        raise GateFailed(f"{run.engine} loses too much against {run.baseline}; see {place}", place)
    if run.verdict is Verdict.INCONCLUSIVE:
        raise Inconclusive(f"the items do not decide whether {run.engine} may replace {run.baseline}; see {place}", place)


def print_perplexity(model: str, text: Path, cut: tuple[int, int, bool], options: EngineOptions, *, as_json: bool) -> None:
    """Print the perplexity of a text file; `cut` is the longest window, the stride and whether a BOS goes first.

    Raises:
        ConfigError: an input is wrong, or the tokenizer has no BOS.
    """
    from model_optimizer.verification.perplexity import Windowing, text_perplexity

    max_length, stride, with_bos = cut
    if not 1 <= stride <= max_length:
        raise ConfigError(f"--stride is {stride}; allowed: 1 to --max-length, which is {max_length}")
    try:
        content = text.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--ppl {text} cannot be read as UTF-8: {error}") from error
    progress = TerminalProgress(terminal())
    arm = find_arm(model, progress)
    wanted = replace(options, max_model_len=options.max_model_len or max(SHORTEST_ENGINE, max_length + 1))
    with opened(arm, (), wanted) as (runtime, tokenizer):
        bos = tokenizer.bos_token_id if with_bos else None
        if with_bos and bos is None:
            raise ConfigError(f"--bos: the tokenizer of {model} has no BOS token")
        tokens = tokenizer.encode(content, add_special_tokens=False)
        found = text_perplexity(runtime, tokens, Windowing(max_length, stride, bos), progress)
    if as_json:
        typer.echo(json.dumps(found.model_dump() | {"model": model, "text": str(text)}, indent=1))
        return
    start = "no BOS, the first token is context only" if bos is None else f"BOS {bos} first"
    typer.echo(
        f"perplexity {found.perplexity:.4f}: {found.num_scored:,} tokens scored once each in {found.num_windows:,} windows of up "
        f"to {max_length} tokens, stride {stride}; {start}"
    )


def _lines(run: GoldenRun, folder: Path) -> Iterator[str]:
    for facts in run.sets:
        sample = ", a sample" if facts.is_sample else ""
        yield f"{facts.name} {facts.version} ({facts.num_items:,} items{sample}; items {facts.items_sha256[:12]})"
    yield ""
    for score in run.scores:
        name = f"{score.golden_set}{f' / {score.slice}' if score.slice else ''}"
        bounds = "" if score.interval is None else f"  [{score.interval.lower:.4f}, {score.interval.upper:.4f}]"
        yield f"{name:44} {score.metric:22} {score.value:.4f}{bounds}  {score.num_items:,} items"
    if run.items_per_s is not None:
        yield f"{run.items_per_s:.1f} answers/s, {run.num_tokens_written:,} tokens written"
    if run.verdict is not None:
        yield ""
        yield f"{run.verdict}: {run.engine} against {run.baseline}"
        yield from map(_result_line, run.results)
    yield f"kept in {folder}"


def _result_line(row: GoldenResult) -> str:
    name = f"{row.golden_set}{f' / {row.slice}' if row.slice else ''} ({row.metric})"
    verdict = str(row.verdict) if row.gates else f"({row.verdict}, shown)"
    return (
        f"  {name:54} {row.baseline_ratio:.4f} -> {row.candidate_ratio:.4f}  change {row.difference:+.4f} "
        f"[{row.interval.lower:+.4f}, {row.interval.upper:+.4f}] against {-row.margin:+g}: {verdict}"
    )
