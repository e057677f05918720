"""Golden sets whose answers are written: cards, generation, resuming, perplexity, files of predictions."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from model_optimizer.artifacts.compiled import Engine
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.errors import ConfigError
from model_optimizer.journal import Journal
from model_optimizer.protocols import GenerationRequest, LogitsRuntime, Quiet, RequestId, TokenEvent
from model_optimizer.runtimes.registry import RUNTIMES, framework_version
from model_optimizer.verification.golden import GoldenSet, load_golden_set
from model_optimizer.verification.golden_answers import ItemScore, Shard, end_tokens
from model_optimizer.verification.golden_run import Identity, claim_folder, read_predictions, score_sets, take_items
from model_optimizer.verification.golden_scoring import score_items
from model_optimizer.verification.leakage import refuse_leakage
from model_optimizer.verification.perplexity import Windowing, text_perplexity

CARD = {
    "name": "texts",
    "version": 1,
    "description": "d",
    "provenance": "p",
    "licence": "CC0-1.0",
    "languages": ["en"],
    "metric": "exact_match",
    "guards": {"repetition": 0.05},
    "generation": {"max_new_tokens": 6},
}
PROMPTS = ("river lamp", "seven", "a quiet window over the garden", "bread", "signal copper", "north", "ticket paper 3", "x")


def write_set(directory: Path, items: list[dict[str, object]] | None = None, **card: object) -> Path:
    directory.mkdir()
    (directory / "card.yaml").write_text(yaml.safe_dump({**CARD, **card}))
    stated = items or [{"id": f"t{n}", "prompt": prompt, "references": ["x"]} for n, prompt in enumerate(PROMPTS)]
    (directory / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in stated))
    return directory


def opened(directory: Path, max_batch: int = 2, max_model_len: int = 96) -> LogitsRuntime:
    plan = KvPlan(page_tokens=16, num_pages=64, bytes_per_token=512, max_batch=max_batch, max_model_len=max_model_len)
    engine = Engine(runtime="torch", directory=".", num_bytes=0, framework_version=framework_version("torch"))
    return RUNTIMES.get("torch").open(engine, directory, plan)


@pytest.fixture(scope="module")
def runtime(tiny_llama: Path) -> Iterator[LogitsRuntime]:
    found = opened(tiny_llama)
    yield found
    found.close()


def answer(runtime: LogitsRuntime, golden: GoldenSet, model: Path, journal: Path) -> dict[tuple[str, str], ItemScore]:
    return score_items(runtime, (golden,), AutoTokenizer.from_pretrained(model), Journal(journal, "k", Shard), Quiet())


def reference_text(model: Path, prompt: str, num: int) -> str:
    tokenizer, network = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    ids = torch.tensor([tokenizer.encode(prompt)])
    out = network.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num, do_sample=False, pad_token_id=3)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def test_score_items_writes_what_transformers_writes_greedily(tmp_path: Path, tiny_llama: Path, runtime: LogitsRuntime) -> None:
    golden = load_golden_set(write_set(tmp_path / "texts"))
    found = answer(runtime, golden, tiny_llama, tmp_path / "j.jsonl")
    assert [found["texts", f"t{n}"].text for n in range(4)] == [reference_text(tiny_llama, prompt, 6) for prompt in PROMPTS[:4]]
    assert all(1 <= score.num_tokens <= 6 for score in found.values())


def test_score_items_ends_an_answer_at_a_stop_string(tmp_path: Path, tiny_llama: Path, runtime: LogitsRuntime) -> None:
    long = {"max_new_tokens": 24}
    whole = answer(runtime, load_golden_set(write_set(tmp_path / "a", generation=long)), tiny_llama, tmp_path / "a.jsonl")
    text = whole["texts", "t2"].text
    stop = text[3:5]
    cut = {**long, "stop": [stop]}
    found = answer(runtime, load_golden_set(write_set(tmp_path / "b", generation=cut)), tiny_llama, tmp_path / "b.jsonl")
    assert found["texts", "t2"].text == text[: text.index(stop)]
    assert found["texts", "t2"].num_tokens < whole["texts", "t2"].num_tokens


def test_score_items_asks_through_the_chat_template_once(tmp_path: Path, tiny_llama: Path, runtime: LogitsRuntime) -> None:
    golden = load_golden_set(write_set(tmp_path / "texts", generation={"max_new_tokens": 4, "chat": True}))
    found = answer(runtime, golden, tiny_llama, tmp_path / "j.jsonl")
    prompt = "<|im_start|>user\nseven<|im_end|>\n<|im_start|>assistant\n"
    assert found["texts", "t1"].text == reference_text(tiny_llama, prompt, 4)


class Dying:
    """A real runtime that is gone after `num_steps` steps."""

    def __init__(self, inner: LogitsRuntime, num_steps: int):
        self.inner, self.left, self.num_requests = inner, num_steps, 0
        self.facts = inner.facts

    def submit(self, request: GenerationRequest) -> RequestId:
        self.num_requests += 1
        return self.inner.submit(request)

    def step(self) -> list[TokenEvent]:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        return self.inner.step()


def test_score_items_writes_the_same_after_a_kill_and_asks_no_finished_shard_again(tmp_path: Path, tiny_llama: Path) -> None:
    items = [{"id": f"t{n}", "prompt": f"{PROMPTS[n % 8]} {n}", "references": ["x"]} for n in range(20)]
    golden = load_golden_set(write_set(tmp_path / "texts", items))
    whole = answer(opened(tiny_llama), golden, tiny_llama, tmp_path / "whole.jsonl")
    path = tmp_path / "killed.jsonl"
    with pytest.raises(KeyboardInterrupt):
        answer(Dying(opened(tiny_llama), 30), golden, tiny_llama, path)  # type: ignore[arg-type]
    done = sum(len(shard.scores) for shard in Journal(path, "k", Shard).records)
    assert done in (8, 16)
    second = Dying(opened(tiny_llama), -1)
    assert answer(second, golden, tiny_llama, path) == whole  # type: ignore[arg-type]
    assert second.num_requests == 20 - done


def test_end_tokens_are_those_of_tokenizer_and_generation_config(tiny_llama: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    assert end_tokens(tokenizer) == (2,)
    tokenizer.name_or_path = str(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert end_tokens(tokenizer) == (2, 7)


@pytest.mark.parametrize(
    ("items", "card", "message"),
    [
        ([{"id": "a", "prompt": "p"}], {}, r"items.jsonl:1: references: Field required: exact_match, repetition"),
        ([{"id": "a", "prompt": "p", "references": ["x"], "choices": ["a", "b"], "answer": 0}], {}, "reads references"),
        ([{"id": "a", "references": ["x"]}], {}, r"items.jsonl:1: prompt: Field required"),
        ([{"id": "a", "prompt": "p", "references": ["no"]}], {"metric": "exact_arithmetic"}, r"items.jsonl:1: .*holds no number"),
        (None, {"metric": "kl_divergence"}, "judges no golden set; known: .*token_f1"),
        (None, {"guards": {"choice_accuracy": 0.1}}, "cannot be read from the answers"),
        (None, {"guards": {"long_tail_coverage": 0.05}}, "cannot be read from the answers"),
        (None, {"guards": {"repetition": 0.0}}, "the margin of repetition is 0"),
        (None, {"items_sha256": "0" * 64}, r"items.jsonl is not what card.yaml was written for"),
    ],
)
def test_load_golden_set_refuses_cards_and_items_that_do_not_fit(
    tmp_path: Path, items: list[dict[str, object]] | None, card: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_golden_set(write_set(tmp_path / "texts", items, **card))


def test_score_items_refuses_what_is_too_long_and_what_no_model_answers(
    tmp_path: Path, tiny_llama: Path, runtime: LogitsRuntime
) -> None:
    long = load_golden_set(write_set(tmp_path / "a", generation={"max_new_tokens": 90}))
    with pytest.raises(ConfigError, match=r"'t0' of 'texts' needs 10 \+ 90 tokens and the engine holds 96"):
        answer(runtime, long, tiny_llama, tmp_path / "a.jsonl")
    items: list[dict[str, object]] = [{"id": "u1"}]
    users = load_golden_set(write_set(tmp_path / "b", items, metric="long_tail_exposure", guards={}, references=["7"]))
    with pytest.raises(ConfigError, match="eval --predictions"):
        answer(runtime, users, tiny_llama, tmp_path / "b.jsonl")


def test_refuse_leakage_finds_a_short_prompt_with_its_reference(tmp_path: Path) -> None:
    items: list[dict[str, object]] = [{"id": "a", "prompt": "Who wrote Faust?", "references": ["Johann von Goethe"]}]
    golden = load_golden_set(write_set(tmp_path / "texts", items))
    with pytest.raises(ConfigError, match="contains item 'a'"):
        refuse_leakage(("Quiz: who wrote Faust? Johann von Goethe.",), (golden,))
    refuse_leakage(("who wrote faust? nobody knows",), (golden,))


def test_read_predictions_wants_one_answer_to_every_item(tmp_path: Path) -> None:
    golden = load_golden_set(write_set(tmp_path / "texts", [{"id": n, "prompt": "p", "references": ["x"]} for n in "ab"]))

    def read(*records: dict[str, object]) -> dict[tuple[str, str], ItemScore]:
        (tmp_path / "p.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return read_predictions(tmp_path / "p.jsonl", golden)

    found = read({"id": "a", "output": "x"}, {"id": "b", "output": [1]})
    assert found["texts", "b"].text == "[1]"
    scored = score_sets((golden,), found)
    assert [(score.metric, score.value) for score in scored] == [("exact_match", 0.5), ("repetition", 0.0)]
    for records, message in (
        ([{"id": "a", "output": "x"}], "lacks an answer to 1 items of 'texts', e.g. 'b'"),
        ([{"id": "a", "output": "x"}, {"id": "a", "output": "y"}], "record 2: a second answer to item 'a'"),
        ([{"id": "c", "output": "x"}], "has no item 'c'"),
        ([{"id": "a", "output": "x", "text": "y"}], "must hold `id` and one of"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(*records)


def test_take_items_keeps_order_and_drops_slices_without_items(tmp_path: Path) -> None:
    items: list[dict[str, object]] = [
        {"id": f"i{n}", "prompt": "p", "references": ["x"], "slices": ["hard" if n == 9 else "plain"]} for n in range(10)
    ]
    golden = load_golden_set(write_set(tmp_path / "texts", items, slices={"hard": {"gates": True}, "plain": {}}))
    taken = take_items(golden, 3, seed=1)
    assert taken == take_items(golden, 3, seed=1) and len(taken.items) == 3
    numbers = [int(item.id[1:]) for item in taken.items]
    assert numbers == sorted(numbers) and ("hard" in taken.card.slices) == (9 in numbers)
    assert take_items(golden, None, 0) is golden


def test_claim_folder_names_what_changed(tmp_path: Path) -> None:
    first = Identity(parts={"model": "a", "golden set g": "b"})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".run.json.x.partial").write_text("killed while claim")
    assert claim_folder(tmp_path / "run", first) is None
    assert claim_folder(tmp_path / "run", first) is None
    with pytest.raises(ConfigError, match=r"another golden set g, model; undo the change"):
        claim_folder(tmp_path / "run", Identity(parts={"model": "x", "golden set g": "y"}))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds something else"):
        claim_folder(tmp_path / "other", first)


@pytest.fixture(scope="module")
def uniform(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Iterator[LogitsRuntime]:
    """A Llama of 256 tokens whose head is zero: every token has the probability 1/256."""
    directory = tmp_path_factory.mktemp("uniform")
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    weights["lm_head.weight"].zero_()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    found = opened(directory)
    yield found
    found.close()


@pytest.mark.parametrize("stride", [1, 2, 4])
@pytest.mark.parametrize(("bos", "num_scored"), [(None, 9), (7, 10)])
def test_text_perplexity_scores_every_token_once_at_any_stride(
    uniform: LogitsRuntime, stride: int, bos: int | None, num_scored: int
) -> None:
    found = text_perplexity(uniform, range(10, 20), Windowing(4, stride, bos), Quiet())
    assert found.num_scored == num_scored
    assert found.perplexity == pytest.approx(256.0, abs=1e-3)
    assert (found.max_length, found.stride, found.bos) == (4, stride, bos)


def test_text_perplexity_refuses_a_stride_that_skips_tokens_and_windows_too_long(uniform: LogitsRuntime) -> None:
    for stride in (0, 5):
        with pytest.raises(ConfigError, match=f"stride {stride}"):
            text_perplexity(uniform, range(10, 20), Windowing(4, stride), Quiet())
    with pytest.raises(ConfigError, match="lower --max-length"):
        text_perplexity(uniform, list(range(200)), Windowing(100, 50), Quiet())
