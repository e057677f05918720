"""The chat template is applied once and BOS comes once; what a template has rendered before is noticed."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from model_optimizer.quantization.calibration import CalibrationSource, Prepared, prepare
from model_optimizer.quantization.config import CalibrationConfig
from model_optimizer.quantization.encoding import encode_messages, encode_record, template_markup
from model_optimizer.quantization.records import Message, Record

VOCABULARY = {"<unk>": 0, "<s>": 1, "</s>": 2, "user": 3, ":": 4, "hi": 5, "assistant": 6}
TURNS = (
    "{% for m in messages %} {{ m['role'] }} : {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %} assistant :{% endif %}"
)
HI = (Message("user", "hi"),)


def word_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A word-level tokenizer that puts <s> before every text."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = template
    return fast


@pytest.mark.parametrize("template", ["{{ bos_token }}" + TURNS, TURNS], ids=["BOS in the template", "BOS by the tokenizer"])
def test_encode_messages_begins_with_one_bos_wherever_it_comes_from(template: str) -> None:
    assert encode_messages(word_tokenizer(template), HI) == (1, 3, 4, 5, 6, 4)


def test_encode_messages_adds_the_generation_prompt_only_where_an_answer_is_missing() -> None:
    tokenizer = word_tokenizer("{{ bos_token }}" + TURNS)
    assert encode_messages(tokenizer, (*HI, Message("assistant", "hi"))) == (1, 3, 4, 5, 6, 4, 5)


def test_encode_record_says_why_a_template_refuses() -> None:
    tokenizer = word_tokenizer("{{ raise_exception('roles must alternate') }}")
    refused = encode_record(tokenizer, (), Record(messages=HI))
    assert refused == "the chat template refuses it (roles must alternate)"


def test_template_markup_finds_the_models_own_marks(tiny_llama: Path) -> None:
    markup = template_markup(AutoTokenizer.from_pretrained(tiny_llama))
    assert {"<|im_start|>", "<|im_end|>", "[INST]"} <= set(markup) and "<|endoftext|>" not in markup


def read(path: Path, tokenizer: Path, *records: object) -> Prepared:
    path.write_text("\n".join(json.dumps(record) for record in records))
    return prepare(CalibrationSource.of(CalibrationConfig(path=path, min_length=2), path.parent), tokenizer)


def test_prepare_refuses_messages_that_were_rendered_before(tiny_llama: Path, tmp_path: Path) -> None:
    rendered = {"messages": [{"role": "user", "content": "<|im_start|>user\nhi<|im_end|>"}]}
    prepared = read(tmp_path / "c.jsonl", tiny_llama, {"text": "one"}, {"text": "two"}, rendered)
    assert prepared.report.num_bad == 1
    assert any("line 3: messages hold '<|im_end|>'" in warning for warning in prepared.warnings)


def test_prepare_takes_rendered_text_as_it_is_and_says_so(tmp_path: Path) -> None:
    tokenizer = word_tokenizer("{{ bos_token }}" + TURNS + "{# </s> #}")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    prepared = read(tmp_path / "c.jsonl", tmp_path / "tokenizer", {"text": "<s> user : hi </s>"}, {"text": "hi hi"})
    assert {*prepared.samples, *prepared.held_out} == {(1, 3, 4, 5, 2), (1, 5, 5)}
    assert any("taken as rendered: line 1" in warning for warning in prepared.warnings)
    assert not any("two BOS" in warning for warning in prepared.warnings)
