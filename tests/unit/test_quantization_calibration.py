"""Calibration: every record is accounted for, encodings do not matter, and the held-out share never calibrates."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from model_optimizer.errors import ConfigError
from model_optimizer.quantization.calibration import CalibrationSource, Prepared, prepare, texts
from model_optimizer.quantization.config import CalibrationConfig


def write_lines(path: Path, *records: object) -> Path:
    path.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return path


def read(path: Path, tokenizer: Path, **settings: float) -> Prepared:
    config = CalibrationConfig.model_validate({"path": path.name, **settings})
    return prepare(CalibrationSource.of(config, path.parent), tokenizer)


def sentences(count: int) -> list[dict[str, str]]:
    return [{"text": f"Shepherd number {index} counts {index * 7} sheep before the sun goes down."} for index in range(count)]


def test_prepare_counts_add_up_when_most_records_are_unusable(tiny_llama: Path, tmp_path: Path) -> None:
    valid = sentences(4)
    path = write_lines(
        tmp_path / "c.jsonl",
        *valid,
        {"text": ""},
        {"text": ""},
        {"text": " "},
        {"text": "abc"},
        {"text": f"  {valid[0]['text']}\n"},
        {"no": 1},
    )
    prepared = read(path, tiny_llama, num_samples=128, min_length=16)
    report = prepared.report
    assert (report.num_requested, report.num_read) == (128, 10)
    assert (report.num_empty, report.num_short, report.num_duplicate, report.num_bad) == (3, 1, 1, 1)
    assert (report.num_used, report.num_held_out, report.num_unused) == (3, 1, 0)
    assert report.num_read == 3 + 1 + 1 + 1 + 3 + 1 + 0
    assert any("line 10" in warning for warning in prepared.warnings)
    assert any("3 samples, 128 were asked for" in warning for warning in prepared.warnings)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_prepare_accepts_a_byte_order_mark_and_any_line_end(newline: str, tiny_llama: Path, tmp_path: Path) -> None:
    records = [json.dumps(record) for record in sentences(3)]
    (tmp_path / "plain.jsonl").write_text("\n".join(records))
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + newline.join([*records, ""]).encode())
    plain, marked = (read(tmp_path / name, tiny_llama) for name in ("plain.jsonl", "bom.jsonl"))
    assert (marked.samples, marked.held_out, marked.report) == (plain.samples, plain.held_out, plain.report)
    assert marked.report.num_read == 3 and marked.report.num_bad == 0


def test_prepare_keeps_line_separators_inside_a_text(tiny_llama: Path, tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "c.jsonl", *[json.dumps({"text": f"first\u2028second line of sample {n}"}, ensure_ascii=False) for n in "ab"]
    )
    assert read(path, tiny_llama).report.num_read == 2


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ("{broken", "not JSON"),
        ("[1]", "not a JSON object"),
        ({"text": 5}, "text"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ],
)
def test_prepare_says_what_is_wrong_with_a_bad_record(record: object, reason: str, tiny_llama: Path, tmp_path: Path) -> None:
    prepared = read(write_lines(tmp_path / "c.jsonl", *sentences(2), record), tiny_llama)
    assert prepared.report.num_bad == 1
    assert any(f"line 3: {reason}" in warning for warning in prepared.warnings)


def test_prepare_renders_the_chat_template_once(tiny_llama: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "How many sheep?"}, {"role": "assistant", "content": "Seven."}]
    prepared = read(write_lines(tmp_path / "c.jsonl", {"messages": messages}), tiny_llama)
    rendered = "<|im_start|>user\nHow many sheep?<|im_end|>\n<|im_start|>assistant\nSeven.<|im_end|>\n"
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    assert prepared.samples == (tuple(tokenizer(rendered, add_special_tokens=False)["input_ids"]),)
    assert prepared.samples[0][0] == 1 and prepared.samples[0].count(1) == 2


def add_bos(source: Path, target: Path, template: str) -> Path:
    """Write a tokenizer that puts BOS before every text by post-processor."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(target)
    return target


def test_prepare_adds_no_second_bos_when_the_template_brings_one(tiny_llama: Path, tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer = add_bos(tiny_llama, tmp_path / "tokenizer", template)
    path = write_lines(tmp_path / "c.jsonl", {"messages": [{"role": "user", "content": "a b c"}]}, {"text": "plain text"})
    prepared = read(path, tokenizer, min_length=2)
    sequences = (*prepared.samples, *prepared.held_out)
    assert sorted(len(tokens) for tokens in sequences) == [1 + 5, 1 + 10]
    assert all(tokens[0] == 0 and tokens[1] != 0 for tokens in sequences)


def test_prepare_warns_when_the_text_itself_brings_a_second_bos(tiny_llama: Path, tmp_path: Path) -> None:
    tokenizer = add_bos(tiny_llama, tmp_path / "tokenizer", "{{ messages }}")
    prepared = read(write_lines(tmp_path / "c.jsonl", {"text": "<|endoftext|>twice begun"}), tokenizer, min_length=2)
    assert any("two BOS tokens: line 1" in warning for warning in prepared.warnings)


def test_prepare_holds_out_the_asked_share_and_never_calibrates_on_it(tiny_llama: Path, tmp_path: Path) -> None:
    prepared = read(write_lines(tmp_path / "c.jsonl", *sentences(40)), tiny_llama, num_samples=10, held_out_ratio=0.25)
    assert (prepared.report.num_held_out, prepared.report.num_used, prepared.report.num_unused) == (10, 10, 20)
    assert not set(prepared.samples) & set(prepared.held_out)


def test_prepare_holds_out_the_same_records_when_the_file_is_reordered(tiny_llama: Path, tmp_path: Path) -> None:
    forward = read(write_lines(tmp_path / "a.jsonl", *sentences(20)), tiny_llama)
    backward = read(write_lines(tmp_path / "b.jsonl", *reversed(sentences(20))), tiny_llama)
    assert forward.held_out == backward.held_out and len(forward.held_out) == 5


def test_prepare_cuts_long_samples_and_reports_lengths(tiny_llama: Path, tmp_path: Path) -> None:
    lengths = [20, 30, 40, 500]
    records = [{"text": chr(97 + index) * length} for index, length in enumerate(lengths)]
    prepared = read(write_lines(tmp_path / "c.jsonl", *records), tiny_llama, max_length=64, held_out_ratio=0.01)
    used = sorted(len(tokens) for tokens in prepared.samples)
    assert max(len(tokens) for tokens in (*prepared.samples, *prepared.held_out)) == 64
    assert prepared.report.num_tokens == sum(used)
    assert prepared.report.length_percentiles == {"p50": used[1], "p90": used[2], "p99": used[2], "max": used[2]}


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n{"text": "a"}'])
def test_prepare_refuses_a_file_without_usable_sample(content: str, tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text(content)
    with pytest.raises(ConfigError, match="no usable sample"):
        read(tmp_path / "c.jsonl", tiny_llama)


def test_prepare_refuses_another_encoding(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_bytes('{"text": "café"}'.encode("latin-1"))
    with pytest.raises(ConfigError, match="not UTF-8"):
        read(tmp_path / "c.jsonl", tiny_llama)


def test_of_refuses_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl does not exist"):
        CalibrationSource.of(CalibrationConfig(path=Path("nowhere.jsonl")), tmp_path)


def test_of_identifies_by_content_not_by_place(tmp_path: Path) -> None:
    sources = []
    for name in ("a.jsonl", "b.jsonl"):
        write_lines(tmp_path / name, *sentences(2))
        sources.append(CalibrationSource.of(CalibrationConfig(path=Path(name)), tmp_path).model_dump())
    assert sources[0] == sources[1]


def test_texts_returns_the_words_without_template(tmp_path: Path) -> None:
    messages = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}
    path = write_lines(tmp_path / "c.jsonl", messages, "{bad", {"text": "three"})
    assert texts(CalibrationSource.of(CalibrationConfig(path=path), tmp_path)) == ("one\ntwo", "three")
