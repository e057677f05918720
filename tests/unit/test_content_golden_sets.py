"""The data that ship with the quickstart: golden sets, calibration text, profile. Read as plain files, as a user would."""

import json
import unicodedata
from collections import Counter
from itertools import chain, permutations
from pathlib import Path
from typing import TypedDict

import pytest
import yaml

from model_optimizer.profile import load_profile

ROOT = Path(__file__).parents[2]
GOLDEN_SETS = ROOT / "golden_sets"
CALIBRATION = ROOT / "profiles" / "calibration" / "quickstart.jsonl"
NAMES = sorted(path.parent.name for path in GOLDEN_SETS.glob("*/card.yaml"))
MAX_PROMPT_CHARACTERS = {"en": 120, "zh": 32}
MIN_SLICE_ITEMS = {"en": 60, "zh": 40}
CHI_SQUARE_LIMIT = {1: 10.83, 2: 13.82, 3: 16.27}
"""The 99.9 % quantile of chi-square by degrees of freedom."""


class _Item(TypedDict):
    id: str
    prompt: str
    choices: list[str]
    answer: int
    slices: list[str]
    cluster: str


class _Slice(TypedDict):
    gates: bool
    description: str


class _Card(TypedDict):
    name: str
    licence: str
    languages: list[str]
    floor_ratio: float
    ceiling_ratio: float
    slices: dict[str, _Slice]


def _items(name: str) -> list[_Item]:
    lines = (GOLDEN_SETS / name / "items.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _card(name: str) -> _Card:
    card: _Card = yaml.safe_load((GOLDEN_SETS / name / "card.yaml").read_text(encoding="utf-8"))
    return card


def _letters(text: str) -> str:
    return "".join(character for character in unicodedata.normalize("NFKC", text).casefold() if character.isalnum())


def _calibration_texts() -> list[str]:
    records = [json.loads(line) for line in CALIBRATION.read_text(encoding="utf-8").splitlines()]
    return [
        record["text"] if "text" in record else "\n".join(turn["content"] for turn in record["messages"]) for record in records
    ]


def test_quickstart_sets_hold_600_items_in_both_languages() -> None:
    sizes = {language: len(_items(f"quickstart-{language}")) for language in ("en", "zh")}
    assert sizes["en"] >= 400
    assert sizes["zh"] >= 200
    assert sum(sizes.values()) >= 600


@pytest.mark.parametrize("name", NAMES)
def test_items_are_unique(name: str) -> None:
    items = _items(name)
    for key in (
        [item["id"] for item in items],
        [_letters(item["prompt"] + item["choices"][item["answer"]]) for item in items],
    ):
        assert [value for value, count in Counter(key).items() if count > 1] == []


@pytest.mark.parametrize("name", NAMES)
def test_choices_are_distinct_and_the_answer_is_one_of_them(name: str) -> None:
    for item in _items(name):
        choices = [choice.strip() for choice in item["choices"]]
        assert 2 <= len(choices) <= 4, item
        assert len(set(choices)) == len(choices), item
        assert all(choices), item
        assert 0 <= item["answer"] < len(choices), item


@pytest.mark.parametrize("name", NAMES)
def test_no_choice_continues_another(name: str) -> None:
    """A longer text is never more likely than its own beginning, so such a pair would test nothing."""
    for item in _items(name):
        pairs = permutations(item["choices"], 2)
        assert not any(_continues(longer, shorter) for longer, shorter in pairs), item


def _continues(longer: str, shorter: str) -> bool:
    """Chinese is continued by any character, English by a further word."""
    separator = "" if not shorter.startswith(" ") else " "
    return longer.startswith(shorter + separator)


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_balanced_over_the_positions(name: str) -> None:
    items = _items(name)
    for num_choices in {len(item["choices"]) for item in items}:
        counts = Counter(item["answer"] for item in items if len(item["choices"]) == num_choices)
        expected = sum(counts.values()) / num_choices
        chi_square = sum((counts[position] - expected) ** 2 / expected for position in range(num_choices))
        assert chi_square < CHI_SQUARE_LIMIT[num_choices - 1], (num_choices, counts)


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_short_and_tidy(name: str) -> None:
    limit = MAX_PROMPT_CHARACTERS[_card(name)["languages"][0]]
    for item in _items(name):
        prompt = item["prompt"]
        assert 1 <= len(prompt) <= limit, item
        assert prompt == " ".join(prompt.split()), item
        assert all(len(choice) <= 40 for choice in item["choices"]), item


@pytest.mark.parametrize("name", NAMES)
def test_card_and_items_name_the_same_slices(name: str) -> None:
    card, items = _card(name), _items(name)
    counts = Counter(chain.from_iterable(item["slices"] for item in items))
    assert set(counts) == set(card["slices"])
    least = MIN_SLICE_ITEMS[card["languages"][0]]
    assert counts["hard"] >= least
    assert counts["long-tail"] >= least
    assert all(part["description"] for part in card["slices"].values())


@pytest.mark.parametrize("name", NAMES)
def test_card_states_name_licence_and_bounds_that_leave_room(name: str) -> None:
    card, items = _card(name), _items(name)
    chance_ratio = sum(1 / len(item["choices"]) for item in items) / len(items)
    assert card["name"] == name
    assert card["licence"] == "Apache-2.0"
    assert chance_ratio < card["floor_ratio"] < card["ceiling_ratio"] < 1


def test_calibration_holds_no_golden_item() -> None:
    texts = [_letters(text) for text in _calibration_texts()]
    for item in chain.from_iterable(_items(name) for name in NAMES):
        prompt = _letters(item["prompt"])
        answered = prompt + _letters(item["choices"][item["answer"]])
        assert not any(answered in text for text in texts), item
        assert len(prompt) < 24 or not any(prompt in text for text in texts), item


def test_calibration_records_are_many_and_all_different() -> None:
    texts = _calibration_texts()
    sentences = [line.strip() for text in texts for line in text.split(". ") if len(line.strip()) > 60]
    assert len(texts) >= 200
    assert len(set(map(_letters, texts))) == len(texts)
    assert [sentence for sentence, count in Counter(sentences).items() if count > 1] == []
    assert sum(any("\u4e00" <= character <= "\u9fff" for character in text) for text in texts) >= 15


def test_quickstart_profile_uses_these_sets_and_this_text() -> None:
    path = ROOT / "profiles" / "quickstart.yaml"
    profile = load_profile(path)
    assert set(profile.verify.golden_sets) <= set(NAMES)
    assert (path.parent / profile.calibration.path).samefile(CALIBRATION)
    assert profile.calibration.num_samples <= len(_calibration_texts())
    assert profile.traffic.prompt_tokens.max + profile.traffic.output_tokens.max <= profile.sla.max_model_len
