"""The options of `model-optimizer eval` and `golden`; what they do is imported when it is done."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from model_optimizer.errors import ConfigError

Json = Annotated[bool, typer.Option("--json", help="machine-readable output on stdout")]
Seed = Annotated[int, typer.Option("--seed", help="of samples and of the blinded order")]
EvalFolder = Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a finished `eval --against`", show_default=False)]


def evaluate(
    model: Annotated[
        str | None, typer.Argument(help="bundle, directory, gguf:FILE or package:NAME; left out with --predictions")
    ] = None,
    golden: Annotated[list[str] | None, typer.Option("--golden", metavar="SET", help="a folder, or a set that ships")] = None,
    against: Annotated[str | None, typer.Option("--against", metavar="MODEL", help="the baseline to judge it by")] = None,
    predictions: Annotated[Path | None, typer.Option("--predictions", help="answers by id, in place of a model")] = None,
    baseline_predictions: Annotated[Path | None, typer.Option("--baseline-predictions", "--baseline_predictions")] = None,
    margin: Annotated[
        float, typer.Option("--margin", help="loss that is still accepted, absolute; cards may tighten it")
    ] = 0.003,
    alpha: Annotated[float, typer.Option("--alpha")] = 0.05,
    power: Annotated[float, typer.Option("--power")] = 0.8,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="ask so many items of each set, drawn by --seed")] = None,
    seed: Seed = 0,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option("--dtype", help="of the native runtime")
    ] = "float32",
    max_batch: Annotated[int | None, typer.Option("--max-batch", "--max_batch", min=1, help="answers written at once")] = None,
    max_model_len: Annotated[int | None, typer.Option("--max-model-len", "--max_model_len", min=16)] = None,
    embedder: Annotated[Path | None, typer.Option("--embedder", help="model directory for embedding_similarity")] = None,
    ppl: Annotated[Path | None, typer.Option("--ppl", metavar="FILE", help="perplexity of a text, in place of --golden")] = None,
    max_length: Annotated[int, typer.Option("--max-length", "--max_length", help="tokens that --ppl reads at once")] = 512,
    stride: Annotated[int | None, typer.Option("--stride", help="of --ppl's windows; left out: half of --max-length")] = None,
    bos: Annotated[bool, typer.Option("--bos", help="--ppl puts the tokenizer's BOS before the text")] = False,
    output: Annotated[Path | None, typer.Option("--output", help="where it is kept; the same folder is continued")] = None,
    allow_unsigned: Annotated[bool, typer.Option("--allow-unsigned", "--allow_unsigned")] = False,
    as_json: Json = False,
) -> None:
    """Answer golden sets with a model and say how well; with --against, whether it may replace the baseline."""
    from flows.cli.eval import print_evaluation, print_perplexity
    from flows.golden_run import EngineOptions, EvalRequest
    from model_optimizer.verification.golden_statistics import Rule

    engine = EngineOptions(dtype, max_batch, max_model_len, allow_unsigned)
    if ppl is not None:
        if model is None or golden or against or predictions:
            raise ConfigError("--ppl takes a MODEL and no golden set, baseline or predictions")
        print_perplexity(
            model, ppl, (max_length, max(1, max_length // 2) if stride is None else stride, bos), engine, as_json=as_json
        )
        return
    if not golden:
        raise ConfigError("nothing to answer: give --golden SET, a folder or the name of a set that ships, or --ppl FILE")
    request = EvalRequest(
        model=model,
        against=against,
        golden=tuple(golden),
        predictions=(predictions, baseline_predictions),
        rule=Rule(margin, alpha, power),
        limit=limit,
        seed=seed,
        embedder=embedder,
        output=output,
        engine=engine,
    )
    print_evaluation(request, as_json=as_json)


golden_commands = typer.Typer(help="Golden sets: import, side by side, blinded review.", no_args_is_help=True)


@dataclass(frozen=True)
class ImportOptions:
    """What `golden import` was told."""

    source: str
    to: Path
    name: str | None
    licence: str
    provenance: str
    version: str
    language: tuple[str, ...]
    metric: str | None
    guards: tuple[str, ...]
    fields: tuple[str, ...]
    template: str | None
    first_answer: int | None
    max_new_tokens: int
    stop: tuple[str, ...]
    chat: bool


@golden_commands.command("import")
def import_set(
    source: Annotated[
        str, typer.Argument(metavar="FILE|lm-eval:TASK", help=".jsonl, .json, .csv, or a task", show_default=False)
    ],
    to: Annotated[Path, typer.Option("--to", help="a new directory")],
    licence: Annotated[str, typer.Option("--licence", "--license", help="of the items, e.g. MIT")],
    provenance: Annotated[str, typer.Option("--provenance", help="where the items come from and how they were chosen")],
    name: Annotated[str | None, typer.Option("--name", help="left out: the directory's")] = None,
    version: Annotated[str, typer.Option("--set-version", "--set_version")] = "1",
    language: Annotated[list[str] | None, typer.Option("--language", help="e.g. en, zh")] = None,
    metric: Annotated[str | None, typer.Option("--metric", help="needed unless items have choices")] = None,
    guards: Annotated[list[str] | None, typer.Option("--guard", metavar="METRIC=MARGIN", help="e.g. repetition=0.05")] = None,
    fields: Annotated[list[str] | None, typer.Option("--field", metavar="ROLE=COLUMN", help="e.g. prompt=question")] = None,
    template: Annotated[str | None, typer.Option("--template", help=r"the prompt, e.g. 'Question: {question}\nAnswer:'")] = None,
    first_answer: Annotated[int | None, typer.Option("--first-answer", "--first_answer", min=0, max=1)] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "--max_new_tokens", min=1)] = 64,
    stop: Annotated[list[str] | None, typer.Option("--stop", help=r"ends an answer, e.g. '\n\n'")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="ask through the model's chat template")] = False,
    as_json: Json = False,
) -> None:
    """Write a golden set, card and items, from a file or an lm-eval task; what could mean two things is refused."""
    from flows.cli.golden import import_golden

    options = ImportOptions(
        source=source,
        to=to,
        name=name,
        licence=licence,
        provenance=provenance,
        version=version,
        language=tuple(language or ("en",)),
        metric=metric,
        guards=tuple(guards or ()),
        fields=tuple(fields or ()),
        template=None if template is None else _unescaped(template),
        first_answer=first_answer,
        max_new_tokens=max_new_tokens,
        stop=tuple(map(_unescaped, stop or ())),
        chat=chat,
    )
    import_golden(options, as_json=as_json)


@golden_commands.command("replay")
def replay(
    run: EvalFolder,
    output: Annotated[Path, typer.Option("--output", help="a new HTML file")],
    items: Annotated[int, typer.Option("--items", min=1)] = 50,
    seed: Seed = 0,
) -> None:
    """Write a page with the answers of both engines side by side, the changed ones first."""
    from flows.cli.golden import write_replay

    write_replay(run, output, items, seed)


@golden_commands.command("review")
def review(
    run: EvalFolder,
    output: Annotated[Path, typer.Option("--output", help="a new directory: sheet.html for reviewers, key.json for you")],
    items: Annotated[int, typer.Option("--items", min=1)] = 500,
    seed: Seed = 0,
) -> None:
    """Write a blinded review sheet; which side is which stands in the key alone."""
    from flows.cli.golden import write_review

    write_review(run, output, items, seed)


@golden_commands.command("reviewed")
def reviewed(
    key: Annotated[Path, typer.Argument(help="key.json of the sheet", show_default=False)],
    results: Annotated[list[Path], typer.Argument(help="what the reviewers saved", show_default=False)],
    as_json: Json = False,
) -> None:
    """Unblind reviews: which engine was preferred, and how far reviewers agree with each other and with the metric."""
    from flows.cli.golden import print_reviews

    print_reviews(key, tuple(results), as_json=as_json)


def _unescaped(text: str) -> str:
    r"""Return a text with `\n` as a line end, which a shell does not write easily."""
    return text.replace("\\n", "\n")
