"""A golden set from a task of EleutherAI's lm-evaluation-harness, read offline: prompts, examples and targets are its own.

A task may hold Python of its own, which lm-eval runs; import only tasks that you would run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.verification.golden import CHOICES, Generation, Item
from model_optimizer.verification.golden_import import CardDraft, Imported, write_golden_set

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.task import ConfigurableTask

METRICS_OF: dict[str, str] = {"acc": CHOICES, "exact_match": "exact_match", "f1": "token_f1", "rougeL": "rouge_l"}
"""lm-eval's metric -> ours."""
DEFAULT_NEW_TOKENS = 256
"""Where a task states none. Source: max_gen_toks of lm-eval's own models."""


@dataclass(frozen=True, slots=True)
class LmEvalTask:
    """A task by name, and the folder of its YAML where it is none of lm-eval's own."""

    name: str
    folder: Path | None

    @classmethod
    def read(cls, reference: str) -> LmEvalTask:
        """Return what `lm-eval:TASK` names: a task of lm-eval, or the path of a YAML file.

        Raises:
            ConfigError: the file is missing or names no task.
        """
        if not reference.endswith((".yaml", ".yml")):
            return cls(reference, None)
        path = Path(reference)
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"lm-eval task {path} cannot be read: {error.strerror}") from error
        names = [line.partition(":")[2].strip().strip("'\"") for line in text.splitlines() if line.startswith("task:")]
        if len(names) != 1 or not names[0]:
            raise ConfigError(f"{path} states no single `task: NAME`; groups of tasks are imported one by one")
        return cls(names[0], path.resolve().parent)


def import_task(task: LmEvalTask, directory: Path, draft: CardDraft) -> Imported:
    """Write a golden set with the items of a task into a new directory.

    Raises:
        UnsupportedError: lm-eval is not installed.
        ConfigError: the directory exists, there is no such task, its data are not here, or it is measured in a way that we lack.
    """
    if directory.exists():
        raise ConfigError(f"{directory} exists; --to must name a new directory")
    loaded = _load(task)
    kind = str(loaded.OUTPUT_TYPE)
    loaded.build_all_requests(limit=None, rank=0, world_size=1)
    groups: dict[int, list[Instance]] = {}
    for instance in loaded.instances:
        groups.setdefault(instance.doc_id, []).append(instance)
    if kind == "multiple_choice":
        items, generation = _choice_items(loaded, groups), draft.generation
    elif kind == "generate_until":
        items, generation = _text_items(loaded, groups), _generation(loaded.instances[0])
    else:
        raise ConfigError(
            f"lm-eval task {task.name!r} is of type {kind}; imported are multiple_choice and generate_until. The perplexity of a "
            "text is measured by `model-optimizer eval MODEL --ppl FILE`"
        )
    named = draft if draft.metric else replace(draft, metric=_metric(task.name, loaded))
    metric = write_golden_set(directory, replace(named, generation=generation), items, f"lm-eval task {task.name}")
    return Imported(directory, len(items), metric)


def _load(task: LmEvalTask) -> ConfigurableTask:
    try:
        from lm_eval.tasks import TaskManager, get_task_dict
    except ImportError as error:
        raise UnsupportedError(
            "lm-eval is not installed; run `pip install 'model-optimizer-pipeline[lm-eval]'`, or import a JSONL or CSV file"
        ) from error
    folder = None if task.folder is None else str(task.folder)
    manager = TaskManager(include_path=folder, include_defaults=folder is None)
    if task.name not in manager.all_tasks:
        raise ConfigError(f"lm-eval knows no task {task.name!r}; give one of `lm-eval ls tasks`, or the path of its YAML file")
    try:
        found = get_task_dict([task.name], manager)[task.name]
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"lm-eval task {task.name!r} cannot be loaded ({reason}); its data must lie here: dataset_path: json with data_files"
        ) from error
    loaded: ConfigurableTask = found
    return loaded


def _choice_items(task: ConfigurableTask, groups: dict[int, list[Instance]]) -> list[Item]:
    items = []
    for number, instances in sorted(groups.items()):
        ordered = sorted(instances, key=lambda instance: instance.idx)
        prompts = {str(instance.args[0]) for instance in ordered}
        if len(prompts) != 1:
            raise ConfigError(
                f"lm-eval task, document {number}: its choices stand behind different prompts, which our items cannot say"
            )
        target = task.doc_to_target(ordered[0].doc)
        choices = tuple(str(instance.args[1]) for instance in ordered)
        if isinstance(target, str):
            target = [choice.strip() for choice in choices].index(target.strip())
        if not isinstance(target, int):
            raise ConfigError(f"lm-eval task, document {number}: {type(target).__name__} is no index of the right choice")
        items.append(Item(id=f"{number:06}", prompt=prompts.pop(), choices=choices, answer=target))
    return items


def _text_items(task: ConfigurableTask, groups: dict[int, list[Instance]]) -> list[Item]:
    items = []
    for number, instances in sorted(groups.items()):
        target = task.doc_to_target(instances[0].doc)
        references: Sequence[object] = target if isinstance(target, list) else [target]
        prompt = str(instances[0].args[0])
        items.append(Item(id=f"{number:06}", prompt=prompt, references=tuple(str(it).strip() for it in references)))
    return items


def _generation(instance: Instance) -> Generation:
    """Return the stops and the length that a task asks for.

    Raises:
        ConfigError: it samples.
    """
    wanted = instance.args[1]
    if wanted.get("do_sample") and float(wanted.get("temperature", 1.0)) > 0:
        raise ConfigError("this lm-eval task samples its answers; golden answers are greedy, so that they can be repeated")
    until = wanted.get("until") or []
    return Generation(
        max_new_tokens=int(wanted.get("max_gen_toks", DEFAULT_NEW_TOKENS)),
        stop=tuple([until] if isinstance(until, str) else until),
    )


def _metric(name: str, task: ConfigurableTask) -> str:
    stated = [str(entry["metric"]) for entry in task.config.metric_list or []]
    known = [METRICS_OF[metric] for metric in stated if metric in METRICS_OF]
    if not known:
        raise ConfigError(
            f"lm-eval task {name!r} is measured by {', '.join(stated) or 'nothing'}; say which of ours with --metric; those that "
            f"follow by themselves: {', '.join(METRICS_OF)}"
        )
    return known[0]
