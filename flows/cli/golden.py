"""`model-optimizer golden`: import a set, show answers side by side, have them reviewed blindly."""

import json
from pathlib import Path

import typer

from flows.cli.golden_options import ImportOptions
from flows.golden_run import read_finished
from model_optimizer.errors import ConfigError
from model_optimizer.store import write_atomically

LM_EVAL = "lm-eval:"
SHEET, KEY = "sheet.html", "key.json"


def import_golden(options: ImportOptions, *, as_json: bool) -> None:
    """Write a golden set and say how the columns were understood.

    Raises:
        ConfigError: an input is wrong or could mean two things.
        UnsupportedError: lm-eval is needed and not installed.
    """
    from model_optimizer.verification.golden import Generation
    from model_optimizer.verification.golden_import import CardDraft, Reading, import_file
    from model_optimizer.verification.golden_lm_eval import LmEvalTask, import_task

    draft = CardDraft(
        name=options.name or options.to.name,
        licence=options.licence,
        provenance=options.provenance,
        version=options.version,
        languages=options.language,
        metric=options.metric,
        guards=_guards(options.guards),
        generation=Generation(max_new_tokens=options.max_new_tokens, stop=options.stop, chat=options.chat),
    )
    if options.source.startswith(LM_EVAL):
        done = import_task(LmEvalTask.read(options.source.removeprefix(LM_EVAL)), options.to, draft)
    else:
        reading = Reading(_pairs("--field", options.fields), options.template, options.first_answer)
        done = import_file(Path(options.source), options.to, draft, reading)
    if as_json:
        facts = {"directory": str(done.directory), "num_items": done.num_items, "metric": done.metric}
        typer.echo(json.dumps(facts | {"columns": dict(done.columns), "unused": list(done.unused)}, indent=1))
        return
    understood = ", ".join(f"{role} from {column}" for role, column in done.columns.items())
    typer.echo(f"{done.directory}: {done.num_items:,} items, measured by {done.metric}{f'; {understood}' if understood else ''}")
    if done.unused:
        typer.echo(f"not read: {', '.join(done.unused)}")


def write_replay(run: Path, output: Path, num: int, seed: int) -> None:
    """Write the side-by-side page of a finished run.

    Raises:
        ConfigError: the file exists, or the run has no baseline.
    """
    from model_optimizer.reporting.side_by_side import render_side_by_side

    if output.exists():
        raise ConfigError(f"{output} exists; --output must name a new file")
    finished = read_finished(run)
    write_atomically(output, render_side_by_side(finished.answers, finished.names, num, seed))
    typer.echo(output)


def write_review(run: Path, output: Path, num: int, seed: int) -> None:
    """Write a blinded sheet and, apart from it, its key.

    Raises:
        ConfigError: the directory exists, or the run has no baseline.
    """
    from model_optimizer.reporting.review_sheet import render_review_sheet
    from model_optimizer.verification.golden_review import blind, sample_answers

    if output.exists():
        raise ConfigError(f"{output} exists; --output must name a new directory")
    finished = read_finished(run)
    answers = sample_answers(finished.answers, num, seed, changed_first=False)
    key = blind(answers, finished.names, seed)
    write_atomically(output / KEY, key.model_dump_json(indent=1).encode())
    write_atomically(output / SHEET, render_review_sheet(answers, key))
    typer.echo(f"{output / SHEET}: {len(answers)} pairs, for reviewers; keep {output / KEY} from them")


def print_reviews(key_path: Path, results: tuple[Path, ...], *, as_json: bool) -> None:
    """Print what reviewers preferred and how far they agree.

    Raises:
        ConfigError: key or results cannot be read, or do not belong together.
    """
    from pydantic import ValidationError

    from model_optimizer.verification.golden_review import ReviewKey, read_reviews, summarise_reviews

    try:
        key = ReviewKey.model_validate_json(key_path.read_bytes())
    except (OSError, ValidationError) as error:
        raise ConfigError(f"{key_path} is no key of a review: {' '.join(str(error).split())[:200]}") from error
    found = summarise_reviews(key, read_reviews(key, results))
    if as_json:
        typer.echo(found.model_dump_json(indent=1))
        return
    typer.echo(f"{found.num_reviewers} reviewers judged {found.num_items} of {found.num_in_sheet} pairs")
    for it in found.preferences:
        bounds = f" [{it.interval.lower:.3f}, {it.interval.upper:.3f}]" if it.interval else ""
        share = "nobody preferred one" if it.candidate_ratio is None else f"candidate preferred {it.candidate_ratio:.3f}{bounds}"
        typer.echo(
            f"{it.criterion:12} candidate {it.num_candidate}, baseline {it.num_baseline}, no difference {it.num_same}; {share}, "
            f"sign test p {it.sign_p:.2g}"
        )
    if found.agreement_ratio is not None and found.kappa is not None:
        typer.echo(f"reviewers agree on {found.agreement_ratio:.3f} of what both judged; Cohen's kappa {found.kappa:.3f}")
    if found.metric_agreement_ratio is not None:
        typer.echo(f"where both prefer one, the metric agrees with the reviewers on {found.metric_agreement_ratio:.3f}")


def _pairs(option: str, stated: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for pair in stated:
        name, equals, value = pair.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"{option} {pair!r} is no NAME=VALUE")
        found[name] = value
    return found


def _guards(stated: tuple[str, ...]) -> dict[str, float]:
    try:
        return {name: float(value) for name, value in _pairs("--guard", stated).items()}
    except ValueError as error:
        raise ConfigError(f"--guard: {error}; write METRIC=MARGIN, e.g. repetition=0.05") from error
