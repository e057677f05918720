"""Importing golden sets: columns by name, refusals, digests, lm-eval tasks."""

import json
from pathlib import Path

import pytest
import yaml

from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.verification.golden import Generation, load_golden_set
from model_optimizer.verification.golden_import import CardDraft, Imported, Reading, import_file
from model_optimizer.verification.golden_lm_eval import LmEvalTask, import_task

DRAFT = CardDraft(name="mine", licence="MIT", provenance="made up")
TEXTS = CardDraft(name="mine", licence="MIT", provenance="made up", metric="exact_match")


def put(path: Path, *records: dict[str, object]) -> Path:
    path.write_text("\ufeff" + "".join(json.dumps(record, ensure_ascii=False) + "\r\n" for record in records), encoding="utf-8")
    return path


def imported(path: Path, draft: CardDraft = TEXTS, reading: Reading | None = None) -> Imported:
    return import_file(path, path.parent / "set", draft, reading or Reading())


def test_import_file_reads_worked_problems_with_a_template(tmp_path: Path) -> None:
    source = put(
        tmp_path / "maths.jsonl",
        {"question": "2 and 2?", "answer": "2+2=<<2+2=4>>4\n#### 4", "level": "easy"},
        {"question": "北京 3?", "answer": "#### 3", "level": "hard"},
    )
    draft = CardDraft(
        name="maths",
        licence="MIT",
        provenance="p",
        metric="exact_arithmetic",
        generation=Generation(max_new_tokens=9, stop=("\n",)),
    )
    done = import_file(source, tmp_path / "set", draft, Reading({"slices": "level"}, "Question: {question}\nAnswer:"))
    assert (done.num_items, done.metric, done.unused) == (2, "exact_arithmetic", ())
    assert done.columns == {"references": "answer", "slices": "level"}
    golden = load_golden_set(tmp_path / "set")
    assert golden.items[1].prompt == "Question: 北京 3?\nAnswer:" and golden.items[1].references == ("#### 3",)
    assert golden.card.generation == Generation(max_new_tokens=9, stop=("\n",))
    assert {name: piece.gates for name, piece in golden.card.slices.items()} == {"easy": False, "hard": True}
    assert golden.card.items_sha256 == golden.digest
    (tmp_path / "set" / "items.jsonl").open("a").write("\n")
    with pytest.raises(ConfigError, match=r"is not what card\.yaml was written for"):
        load_golden_set(tmp_path / "set")


def test_import_file_reads_choices_from_csv(tmp_path: Path) -> None:
    source = tmp_path / "quiz.csv"
    source.write_text("id,question,options,answer\nq1,The sky is,blue|green,A\nq2,首都是,北京|上海,北京\n", encoding="utf-8")
    assert imported(source, DRAFT).metric == "choice_accuracy"
    one, two = load_golden_set(tmp_path / "set").items
    assert (one.id, one.choices, one.answer) == ("q1", (" blue", " green"), 0)
    assert (two.choices, two.answer) == (("北京", "上海"), 0)


@pytest.mark.parametrize(("numbers", "first", "expected"), [((0, 1), None, [0, 1]), ((1, 3), None, [0, 2]), ((1, 2), 1, [0, 1])])
def test_import_file_counts_answers_from_zero_or_one(
    tmp_path: Path, numbers: tuple[int, ...], first: int | None, expected: list[int]
) -> None:
    source = put(tmp_path / "a.jsonl", *({"prompt": "p", "choices": ["x", "y", "z"], "answer": number} for number in numbers))
    imported(source, DRAFT, Reading(first_answer=first))
    assert [item.answer for item in load_golden_set(tmp_path / "set").items] == expected


@pytest.mark.parametrize(
    ("record", "draft", "reading", "message"),
    [
        ({"question": "q", "input": "i", "answer": "a"}, TEXTS, Reading(), "question and input could each be the prompt"),
        ({"prompt": "q", "answer": "a", "target": "b"}, TEXTS, Reading(), "answer and target could each be the references"),
        ({"body": "q", "answer": "a"}, TEXTS, Reading(), r"no column for prompt .* among body, answer; --field prompt=COLUMN"),
        ({"prompt": "q"}, TEXTS, Reading(), "no column for references"),
        ({"prompt": "q", "answer": "a"}, DRAFT, Reading(), "say which with --metric"),
        (
            {"prompt": "q", "answer": "a"},
            TEXTS,
            Reading({"prompt": "nope"}),
            "--field prompt=nope: no such column; there are: prompt",
        ),
        ({"prompt": "q", "answer": "a"}, TEXTS, Reading({"colour": "prompt"}), "--field colour: no such role"),
        ({"prompt": "q", "answer": "a"}, TEXTS, Reading(template="{body}"), "--template names {body}"),
        ({"prompt": "q", "answer": "a"}, TEXTS, Reading(template="{body"), "--template '{body'"),
        ({"prompt": "q", "choices": ["a", "b", "c"], "answer": 1}, DRAFT, Reading(), "could count from 0 or from 1; say which"),
        ({"prompt": "q", "choices": ["a", "b"], "answer": "c"}, DRAFT, Reading(), "record 1: answer 'c' means no choice of 2"),
        ({"prompt": "q", "choices": ["2", "0"], "answer": 0}, DRAFT, Reading(), "means more than one choice"),
        ({"prompt": ["q"], "answer": "a"}, TEXTS, Reading(), "record 1: prompt is list, not text"),
        (
            {"prompt": "q", "answer": "none"},
            CardDraft(name="mine", licence="MIT", provenance="p", metric="exact_arithmetic"),
            Reading(),
            "holds no number",
        ),
        (
            {"prompt": "q", "answer": "none"},
            CardDraft(name="Mine!", licence="MIT", provenance="p", metric="exact_match"),
            Reading(),
            "name: String should match pattern",
        ),
    ],
)
def test_import_file_refuses_what_is_ambiguous_and_leaves_nothing(
    tmp_path: Path, record: dict[str, object], draft: CardDraft, reading: Reading, message: str
) -> None:
    source = put(tmp_path / "a.jsonl", record)
    with pytest.raises(ConfigError, match=message):
        imported(source, draft, reading)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "{}}\n", r"a.jsonl:1: not JSON"),
        ("a.jsonl", "", "holds no records"),
        ("a.json", "[1]", "holds no records"),
        ("a.csv", "id,prompt\n1\n", "more or fewer values"),
        ("a.txt", "x", r"are read from \.jsonl, \.json or \.csv"),
    ],
)
def test_import_file_refuses_files_without_records(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        imported(tmp_path / name)


def test_import_file_keeps_an_existing_directory_and_repeated_ids_out(tmp_path: Path) -> None:
    source = put(tmp_path / "a.jsonl", {"id": "x", "prompt": "q", "answer": "a"}, {"id": "x", "prompt": "r", "answer": "b"})
    with pytest.raises(ConfigError, match="id 'x' was used before"):
        imported(source)
    (tmp_path / "set").mkdir()
    with pytest.raises(ConfigError, match="--to must name a new directory"):
        imported(source)


def test_import_task_names_the_extra_where_lm_eval_is_missing(tmp_path: Path) -> None:
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        with pytest.raises(UnsupportedError, match=r"\[lm-eval\]"):
            import_task(LmEvalTask("boolq", None), tmp_path / "set", DRAFT)
    else:
        pytest.skip("lm-eval is installed here")


def test_lm_eval_task_is_named_by_its_yaml_file(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text("task: toy\noutput_type: multiple_choice\n")
    assert LmEvalTask.read(str(tmp_path / "t.yaml")) == LmEvalTask("toy", tmp_path)
    assert LmEvalTask.read("boolq") == LmEvalTask("boolq", None)
    (tmp_path / "g.yaml").write_text("group: many\n")
    with pytest.raises(ConfigError, match="states no single `task: NAME`"):
        LmEvalTask.read(str(tmp_path / "g.yaml"))


@pytest.mark.parametrize("kind", ["multiple_choice", "generate_until", "loglikelihood_rolling"])
def test_import_task_takes_prompts_targets_and_stops_of_an_offline_task(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("lm_eval")
    put(tmp_path / "d.jsonl", {"q": "2+2?", "o": ["3", "4"], "g": 1}, {"q": "1+2?", "o": ["3", "4"], "g": 0})
    task: dict[str, object] = {
        "task": f"toy_{kind}",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "d.jsonl")}},
        "output_type": kind,
        "test_split": "test",
        "doc_to_text": "" if kind == "loglikelihood_rolling" else "Question: {{q}}\nAnswer:",
        "metric_list": [{"metric": {"multiple_choice": "acc", "generate_until": "exact_match"}.get(kind, "word_perplexity")}],
    }
    if kind == "multiple_choice":
        task |= {"doc_to_choice": "{{o}}", "doc_to_target": "g"}
    else:
        task |= {"doc_to_target": "{{o[g]}}"}
    if kind == "generate_until":
        task["generation_kwargs"] = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
    (tmp_path / "t.yaml").write_text(yaml.safe_dump(task))
    named = LmEvalTask.read(str(tmp_path / "t.yaml"))
    if kind == "loglikelihood_rolling":
        with pytest.raises(ConfigError, match="--ppl FILE"):
            import_task(named, tmp_path / "set", DRAFT)
        return
    done = import_task(named, tmp_path / "set", DRAFT)
    golden = load_golden_set(tmp_path / "set")
    assert done.num_items == 2 and golden.items[0].prompt == "Question: 2+2?\nAnswer:"
    if kind == "multiple_choice":
        assert (done.metric, golden.items[0].choices, golden.items[0].answer) == ("choice_accuracy", (" 3", " 4"), 1)
    else:
        assert (done.metric, golden.items[1].references) == ("exact_match", ("3",))
        assert golden.card.generation == Generation(max_new_tokens=8, stop=("\n",))
