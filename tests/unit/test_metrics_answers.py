"""Metrics of answers against independent references, and drift of a distribution."""

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from model_optimizer.errors import ConfigError
from model_optimizer.metrics.average_precision_50 import average_precision_50, overlap_ratio
from model_optimizer.metrics.classification_f1 import classification_f1
from model_optimizer.metrics.embedding_similarity import LocalEmbedder, embedding_similarity
from model_optimizer.metrics.exact_arithmetic import exact_arithmetic, last_number
from model_optimizer.metrics.exact_match import exact_match
from model_optimizer.metrics.key_fact_recall import key_fact_recall
from model_optimizer.metrics.long_tail_coverage import long_tail_coverage
from model_optimizer.metrics.long_tail_exposure import long_tail_exposure
from model_optimizer.metrics.perplexity import rolling_windows
from model_optimizer.metrics.population_stability import SamplePair, population_stability, stability_index
from model_optimizer.metrics.registry import METRICS, Answers
from model_optimizer.metrics.repetition import repeated_ratio
from model_optimizer.metrics.rouge_l import rouge_l
from model_optimizer.metrics.span_f1 import span_f1
from model_optimizer.metrics.token_f1 import token_f1
from model_optimizer.metrics.verbosity import excess_ratio
from model_optimizer.metrics.words import words


def answers(*pairs: tuple[str, tuple[str, ...]]) -> Answers:
    return Answers(tuple(output for output, _ in pairs), tuple(references for _, references in pairs))


GATING = [name for name in METRICS.names() if METRICS.get(name).statistic is not None]


@pytest.mark.parametrize("name", GATING)
def test_statistic_of_doubled_items_and_of_a_part_equals_the_metric_of_that_sample(name: str) -> None:
    metric = METRICS.get(name)
    if name == "choice_accuracy":
        pytest.skip("its observation is no Answers; test_verification_judging covers it")
    whole: Answers = metric.example(3)
    num, kept = len(whole.outputs_N), [0, 2, 3, 7, 8]
    part = Answers(tuple(whole.outputs_N[at] for at in kept), tuple(whole.references_N[at] for at in kept), whole.embed)
    weights_BN = np.vstack([np.ones(num), 2 * np.ones(num), np.isin(np.arange(num), kept)])
    assert metric.statistic is not None
    once, twice, some = metric.statistic(whole).weighted(weights_BN)
    assert once == pytest.approx(metric.compute(whole), abs=1e-12) == twice
    assert some == pytest.approx(metric.compute(part), abs=1e-12)


def test_words_part_chinese_by_character_and_join_width_and_case() -> None:
    assert words("Ｔhe 3 北京GPUs, ok_1") == ("the", "3", "北", "京", "gpus", "ok", "1")


def test_exact_match_and_token_f1_put_case_articles_and_punctuation_aside() -> None:
    asked = answers(
        ("The  Eiffel Tower.", ("eiffel tower",)), ("in Paris, France", ("Paris", "Lyon")), ("北京", ("北京市",)), ("", ("x",))
    )
    assert exact_match(asked).per_item_N.tolist() == [1, 0, 0, 0]
    assert token_f1(asked).per_item_N.tolist() == pytest.approx([1, 2 * 1 / (3 + 1), 2 * 2 / (2 + 3), 0])


def test_rouge_l_is_the_f_measure_of_the_longest_common_subsequence_in_any_script() -> None:
    # "police killed the gunman" / "police kill the gunman": subsequence of 3 of 4 and 4 words (Lin 2004, section 3.1)
    asked = answers(("police kill the gunman", ("police killed the gunman",)), ("我去北京", ("我在北京",)))
    assert rouge_l(asked).per_item_N.tolist() == pytest.approx([3 / 4, 3 / 4])


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("16 - 3 - 4 = 9\n#### 18", "18"),
        ("so she pays $1,250.50.", "1250.50"),
        ("it is -3", "-3"),
        ("that leaves 16-3", "3"),
        ("about 40% of 1,234,567", "1234567"),
        ("12.0", "12.0"),
        ("none", None),
        ("version 1.2.3 then 7 apples", "7"),
    ],
)
def test_last_number_reads_thousands_signs_and_decimals(text: str, number: str | None) -> None:
    found = last_number(text)
    assert (found is None) if number is None else (found is not None and str(found) == number)


def test_exact_arithmetic_compares_values_not_digits() -> None:
    asked = answers(("The answer is 18.", ("<<9*2=18>>\n#### 18",)), ("12.0", ("12",)), ("17", ("18",)), ("many", ("18",)))
    assert exact_arithmetic(asked).per_item_N.tolist() == [1, 1, 0, 0]
    with pytest.raises(ConfigError, match="holds no number"):
        METRICS.get("exact_arithmetic").check(("many",))


def test_repetition_counts_four_grams_that_stood_before() -> None:
    assert repeated_ratio("a b c d a b c d") == pytest.approx(1 / 5)
    assert repeated_ratio("no no") == 0.0
    assert repeated_ratio("go on " * 20) == pytest.approx(1 - 2 / 37)


def test_verbosity_is_the_share_beyond_the_longest_reference() -> None:
    assert excess_ratio("one two three four", ("one", "one two three")) == pytest.approx(1 / 4)
    assert excess_ratio("one", ("one two",)) == 0.0 == excess_ratio("", ("one",))


def test_key_fact_recall_finds_whole_words_in_any_wording() -> None:
    asked = answers(("Paris has 13 parks.", ("Paris | Lutetia", "3")), ("北京有故宫", ("故宫",)))
    assert key_fact_recall(asked).value == pytest.approx(2 / 3)


def test_classification_f1_equals_scikit_learn() -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    example: Answers = METRICS.get("classification_f1").example(1)
    truth = [references[0] for references in example.references_N]
    outputs = [f"{output.upper()}.\nBecause ..." for output in example.outputs_N[:-1]] + ["no idea"]
    expected = sklearn.f1_score(truth, [*example.outputs_N[:-1], "?"], labels=sorted(set(truth)), average="macro")
    assert classification_f1(Answers(tuple(outputs), example.references_N)).value == pytest.approx(float(expected), abs=1e-12)


def test_span_f1_wants_type_and_borders_and_reads_lists_inside_prose() -> None:
    wanted = ('{"label": "person", "start": 0, "end": 2}', '{"label": "place", "start": 5, "end": 6}')
    half = 'Found: [{"label": "person", "start": 0, "end": 2}, {"label": "person", "start": 5, "end": 6}] ok'
    asked = answers((half, wanted), ("no list [here", wanted), ("[]", ()))
    assert span_f1(asked).value == pytest.approx(2 * 1 / (2 + 2 + 0 + 2))
    assert math.isnan(span_f1(asked).per_item_N[2])
    named = answers(('[{"label": "p", "text": "ADA"}]', ('[{"label": "p", "text": "Ada"}, {"label": "p", "text": "Ada"}]',)))
    assert span_f1(named).value == pytest.approx(2 * 1 / 3)


def test_span_f1_gives_the_exact_claim_its_span_though_an_overlapping_one_comes_first() -> None:
    wanted = ('{"label": "p", "start": 0, "end": 4}',)
    claims = '[{"label": "p", "start": 2, "end": 6}, {"label": "p", "start": 0, "end": 4}]'
    assert span_f1(answers((claims, wanted))).value == pytest.approx(2 * 1 / 3)


def test_unreadable_references_are_refused_with_what_is_allowed() -> None:
    for name, reference in (("span_f1", '{"label": "p"}'), ("average_precision_50", '{"box": 1}'), ("span_f1", "Ada")):
        with pytest.raises(ConfigError, match="is unreadable"):
            METRICS.get(name).check((reference,))


def test_long_tail_exposure_and_coverage() -> None:
    tail = ("7", "8", "9")
    asked = answers(("[1, 2, 7]", tail), ("[1, 7, 8]", tail))
    assert long_tail_exposure(asked).value == pytest.approx(3 / 6)
    assert long_tail_coverage(asked).value == pytest.approx(2 / 3)


def naive_ap(images: list[tuple[list[tuple[list[float], float]], list[list[float]]]]) -> float:
    """Return AP of one class by the definition: every cut of the score order, recall by recall."""
    total = sum(len(boxes) for _, boxes in images)
    points = []
    for threshold in sorted({score for claims, _ in images for _, score in claims}, reverse=True):
        hits = claimed = 0
        for claims, boxes in images:
            free = list(boxes)
            for box, score in sorted(claims, key=lambda claim: -claim[1]):
                if score < threshold:
                    continue
                claimed += 1
                near = [other for other in free if overlap_ratio(tuple(other), tuple(box)) >= 0.5]  # type: ignore[arg-type]
                if near:
                    free.remove(max(near, key=lambda other: overlap_ratio(tuple(other), tuple(box))))  # type: ignore[arg-type]
                    hits += 1
        points.append((hits / total, hits / claimed))
    steps = pairwise([(0.0, 0.0), *points])
    return sum((after[0] - before[0]) * max(p for r, p in points if r >= after[0]) for before, after in steps)


def test_average_precision_50_equals_the_definition() -> None:
    for seed in range(4):
        example: Answers = METRICS.get("average_precision_50").example(seed)
        images = [
            ([(it["box"], it["score"]) for it in json.loads(output)], [json.loads(it)["box"] for it in references])
            for output, references in zip(example.outputs_N, example.references_N, strict=True)
        ]
        assert average_precision_50(example).value == pytest.approx(naive_ap(images), abs=1e-9)


def test_average_precision_50_means_over_classes_and_leaves_ignored_objects_out() -> None:
    references = (
        '{"label": "car", "box": [0, 0, 10, 10]}',
        '{"label": "car", "box": [50, 50, 90, 90], "ignore": true}',
        '{"label": "dog", "box": [20, 20, 30, 30]}',
    )
    claims = [
        {"label": "car", "box": [50, 50, 90, 90], "score": 0.9},
        {"label": "car", "box": [0, 0, 10, 10], "score": 0.5},
    ]
    assert average_precision_50(answers((json.dumps(claims), references))).value == pytest.approx((1.0 + 0.0) / 2)


def test_embedding_similarity_is_the_cosine_of_mean_pooled_states(tiny_llama: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(tiny_llama), AutoModel.from_pretrained(tiny_llama)
    texts = ("a lamp", "seven copper lamps", "the river")
    with torch.no_grad():
        vectors = [model(torch.tensor([tokenizer.encode(text)])).last_hidden_state[0].mean(0) for text in texts]
    expected = max(float(torch.cosine_similarity(vectors[0], vectors[at], dim=0)) for at in (1, 2))
    asked = Answers((texts[0],), (texts[1:],), LocalEmbedder(tiny_llama))
    assert embedding_similarity(asked).value == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ConfigError, match="--embedder"):
        embedding_similarity(Answers(("a",), (("b",),)))


@pytest.mark.parametrize(("num_tokens", "length"), [(10, 4), (2, 4), (9, 8), (33, 5)])
def test_rolling_windows_score_every_token_once_whatever_the_stride(num_tokens: int, length: int) -> None:
    for stride in range(1, length + 1):
        found = rolling_windows(num_tokens, length, stride)
        scored = [position for start, end, first in found for position in range(start + first, end)]
        assert scored == list(range(1, num_tokens))
        assert all(first >= 1 and end - 1 - start <= length for start, end, first in found)
    for stride in (0, length + 1):
        with pytest.raises(ConfigError, match=rf"stride {stride}"):
            rolling_windows(num_tokens, length, stride)


def test_stability_index_is_finite_and_symmetric_with_empty_bins() -> None:
    reference, current = np.array([50.0, 50, 0]), np.array([50.0, 40, 10])
    assert stability_index(reference, current) == pytest.approx(0.7124, abs=5e-5) == stability_index(current, reference)


def test_population_stability_of_constants_few_samples_nan_and_values_outside() -> None:
    five, seven = np.full(300, 5.0), np.full(300, 7.0)
    assert population_stability(SamplePair(five, five)).index == 0.0
    moved = population_stability(SamplePair(five, seven))
    assert moved.drifted and moved.index is not None and math.isfinite(moved.index)
    short = population_stability(SamplePair(five, np.full(8, 9.0)))
    assert short.insufficient and not short.drifted and short.num_current == 8
    generator = np.random.default_rng(0)
    reference, current = generator.normal(0, 1, 1000), np.r_[generator.normal(0, 1, 1000), 1e9, -np.inf, np.nan]
    outside = population_stability(SamplePair(reference, current))
    assert outside.num_nan_current == 1 and outside.num_current == 1002 and not outside.drifted
    assert outside.index == population_stability(SamplePair(current, reference)).index
    assert population_stability(SamplePair(reference, reference + 1)).drifted
