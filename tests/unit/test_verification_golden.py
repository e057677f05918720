"""Golden sets: reading, scoring, journal, leakage."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from model_optimizer.artifacts.compiled import Engine
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.errors import ConfigError
from model_optimizer.journal import Journal
from model_optimizer.protocols import LogitsRuntime, Quiet, TokenBatch, TokenLogProbs
from model_optimizer.runtimes.registry import RUNTIMES, framework_version
from model_optimizer.verification import golden_scoring
from model_optimizer.verification.golden import Card, GoldenSet, Item, find_golden_set, load_golden_set
from model_optimizer.verification.golden_answers import Shard
from model_optimizer.verification.golden_scoring import score_items
from model_optimizer.verification.leakage import normalise, refuse_leakage

CARD = {
    "name": "tiny",
    "version": 1,
    "description": "d",
    "provenance": "p",
    "licence": "CC0-1.0",
    "languages": ["en", "zh"],
    "slices": {"hard": {"gates": True, "description": "hard ones"}},
}
ITEMS = [
    {
        "id": "en-1",
        "prompt": "The capital of France is",
        "choices": [" Paris", " Rome", " Oslo"],
        "answer": 0,
        "slices": ["hard"],
    },
    {"id": "zh-1", "prompt": "法国的首都是", "choices": ["巴黎", "罗马"], "answer": 0, "cluster": "c"},
    {"id": "en-2", "prompt": "Two plus two is", "choices": [" four", " five"], "answer": 0},
]


def write_set(directory: Path, card: dict[str, object] | None = None, items: list[dict[str, object]] | None = None) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "card.yaml").write_text(yaml.safe_dump(CARD if card is None else card))
    lines = [json.dumps(item, ensure_ascii=False) for item in (ITEMS if items is None else items)]
    (directory / "items.jsonl").write_text("\n".join(lines) + "\n")
    return directory


@pytest.fixture(scope="module")
def runtime(tiny_llama: Path) -> Iterator[LogitsRuntime]:
    plan = KvPlan(page_tokens=16, num_pages=64, bytes_per_token=512, max_batch=4, max_model_len=256)
    engine = Engine(runtime="torch", directory=".", num_bytes=0, framework_version=framework_version("torch"))
    opened = RUNTIMES.get("torch").open(engine, tiny_llama, plan)
    yield opened
    opened.close()


def test_load_golden_set_reads_card_and_items(tmp_path: Path) -> None:
    golden = load_golden_set(write_set(tmp_path / "tiny"))
    assert [item.id for item in golden.items] == ["en-1", "zh-1", "en-2"]
    assert golden.card.version == "1" and golden.card.slices["hard"].gates
    assert golden.chance_ratio == pytest.approx((1 / 3 + 1 / 2 + 1 / 2) / 3)
    assert golden.floor_ratio == pytest.approx(golden.chance_ratio + 0.05)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": "en-1"}, r"items.jsonl:4: id 'en-1' was used before"),
        ({"answer": 2}, r"items.jsonl:4: answer 2 is no index of 2 choices"),
        ({"answer": -1}, r"items.jsonl:4: answer: .*greater than or equal to 0"),
        ({"choices": [" a"]}, r"items.jsonl:4: choices"),
        ({"choices": [" a", " a"]}, r"items.jsonl:4: choices must be different"),
        ({"prompt": ""}, r"items.jsonl:4: prompt"),
        ({"colour": "red"}, r"items.jsonl:4: colour"),
    ],
)
def test_load_golden_set_names_the_line_of_a_bad_item(tmp_path: Path, change: dict[str, object], message: str) -> None:
    bad = {"id": "x", "prompt": "A", "choices": [" b", " c"], "answer": 0, **change}
    with pytest.raises(ConfigError, match=message):
        load_golden_set(write_set(tmp_path / "tiny", items=[*ITEMS, bad]))


def test_load_golden_set_names_a_missing_field_and_broken_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"items.jsonl:1: answer: Field required"):
        load_golden_set(write_set(tmp_path / "a", items=[{"id": "x", "prompt": "A", "choices": [" b", " c"]}]))
    broken = write_set(tmp_path / "b")
    (broken / "items.jsonl").write_text("{}}\n")
    with pytest.raises(ConfigError, match=r"items.jsonl:1: not JSON"):
        load_golden_set(broken)


def test_load_golden_set_refuses_no_items_no_card_and_an_empty_slice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no items"):
        load_golden_set(write_set(tmp_path / "a", items=[]))
    with pytest.raises(ConfigError, match=r"has no card\.yaml"):
        load_golden_set(tmp_path)
    with pytest.raises(ConfigError, match="slice 'rare' has no items"):
        load_golden_set(write_set(tmp_path / "b", card={**CARD, "slices": {"rare": {}}}))
    with pytest.raises(ConfigError, match="licence: Field required"):
        load_golden_set(write_set(tmp_path / "c", card={key: value for key, value in CARD.items() if key != "licence"}))


def test_find_golden_set_takes_a_path_first_and_names_the_known_sets(tmp_path: Path) -> None:
    assert find_golden_set("mine", tmp_path) if (write_set(tmp_path / "mine")) else None
    with pytest.raises(ConfigError, match="golden set 'absent'"):
        find_golden_set("absent", tmp_path)


def reference_log_prob(directory: Path, prompt: str, choice: str) -> float:
    """Score one choice with transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    head, tail = tokenizer.encode(prompt), tokenizer.encode(choice, add_special_tokens=False)
    with torch.no_grad():
        log_probs = torch.log_softmax(model(torch.tensor([head + tail])).logits[0].double(), dim=-1)
    return float(sum(log_probs[len(head) + index - 1, token] for index, token in enumerate(tail)))


def open_journal(path: Path, key: str = "k") -> Journal[Shard]:
    return Journal(path, key, Shard)


def test_score_items_equals_transformers(tmp_path: Path, tiny_llama: Path, runtime: LogitsRuntime) -> None:
    golden = load_golden_set(write_set(tmp_path / "tiny"))
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    scores = score_items(runtime, (golden,), tokenizer, open_journal(tmp_path / "j.jsonl"), Quiet())
    for item in golden.items:
        expected = [reference_log_prob(tiny_llama, item.prompt, choice) for choice in item.choices]
        assert scores["tiny", item.id].log_probs == pytest.approx(expected, abs=1e-3)


class Dying:
    """A real runtime that is gone after `num_calls` calls of score."""

    def __init__(self, inner: LogitsRuntime, num_calls: int):
        self.inner, self.left, self.num_scored = inner, num_calls, 0
        self.facts = inner.facts

    def score(self, batch: TokenBatch) -> list[TokenLogProbs]:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        self.num_scored += len(batch.tokens)
        return self.inner.score(batch)


def many_items(num: int) -> GoldenSet:
    items = tuple(Item(id=f"i{n}", prompt=f"item {n} " * (1 + n % 5), choices=(" a", " bb"), answer=0) for n in range(num))
    return GoldenSet(Card.model_validate({**CARD, "slices": {}}), items)


def test_score_items_continues_after_a_kill(
    tmp_path: Path, tiny_llama: Path, runtime: LogitsRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(golden_scoring, "SHARD_TOKENS", 200)
    tokenizer, golden = AutoTokenizer.from_pretrained(tiny_llama), many_items(40)
    whole = score_items(runtime, (golden,), tokenizer, open_journal(tmp_path / "whole.jsonl"), Quiet())
    path = tmp_path / "killed.jsonl"
    with pytest.raises(KeyboardInterrupt):
        score_items(Dying(runtime, 3), (golden,), tokenizer, open_journal(path), Quiet())  # type: ignore[arg-type]
    path.write_bytes(path.read_bytes() + b'{"scores": [{"golden_set": "ti')  # killed while writing
    done = sum(len(shard.scores) for shard in open_journal(path).records)
    assert 0 < done < 40
    second = Dying(runtime, -1)
    resumed = score_items(second, (golden,), tokenizer, open_journal(path), Quiet())  # type: ignore[arg-type]
    assert second.num_scored == 2 * (40 - done)
    assert resumed == whole


def test_journal_keeps_non_finite_scores(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j.jsonl")
    journal.append(
        Shard.model_validate({"scores": [{"golden_set": "g", "item": "i", "log_probs": [float("nan"), float("-inf")]}]})
    )
    values = open_journal(tmp_path / "j.jsonl").records[0].scores[0].log_probs
    assert str(values) == "(nan, -inf)"


def test_normalise_joins_width_case_and_punctuation() -> None:
    assert normalise("Ｔhe Capital, of\n法国 is…") == normalise("the capital of 法国 is")


@pytest.mark.parametrize(
    "text",
    [
        "Quiz: the CAPITAL of France is Paris, of course.",
        "……法国的首都是巴黎。",
    ],
)
def test_refuse_leakage_names_text_and_item(tmp_path: Path, text: str) -> None:
    golden = load_golden_set(write_set(tmp_path / "tiny"))
    with pytest.raises(ConfigError, match=r"calibration text 2 .* of golden set 'tiny'"):
        refuse_leakage(("clean text", text), (golden,))


def test_refuse_leakage_lets_a_short_prompt_without_its_answer_pass(tmp_path: Path) -> None:
    golden = load_golden_set(write_set(tmp_path / "tiny"))
    refuse_leakage(("They asked what the capital of France is called.", "two plus two", ""), (golden,))
