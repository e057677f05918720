"""Text and settings of the server: templates as transformers renders them, growing answers, faults of serve.yaml."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from model_optimizer.errors import ConfigError
from model_optimizer.serving.config import load_config
from model_optimizer.serving.text import AnswerText, TextCodec, Turn


@pytest.fixture(scope="module")
def codec(tiny_llama: Path) -> TextCodec:
    return TextCodec.read(tiny_llama)


TURNS = [Turn("system", "be \u00e9xact"), Turn("user", "a\n b"), Turn("assistant", "\u4e2d"), Turn("user", "")]
TEMPLATES = [
    "{% for message in messages %}{{ bos_token }}{{ message['role'] }}: {{ message['content'] | trim }}\n{% endfor %}\n",
    "{%- for message in messages %}\n    {%- if loop.first and message.role == 'system' %}"
    "\n        {%- continue %}\n    {%- endif %}"
    "\n    {{- message | tojson }}{{ eos_token }}\n{%- endfor %}\n{% if add_generation_prompt %}>>{% endif %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ m.content[::-1] }}{% endfor %}",
]


@pytest.mark.parametrize("template", [None, *TEMPLATES])
def test_encode_chat_equals_transformers(tiny_llama: Path, tmp_path: Path, template: str | None) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    messages = [{"role": turn.role, "content": turn.content} for turn in TURNS]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    codec = TextCodec.read(tmp_path)
    assert codec.encode_chat(TURNS) == list(expected)
    assert codec.encode("a b") == list(tokenizer("a b").input_ids) and codec.ends == (2,)


def test_encode_chat_tells_what_a_template_refuses(tiny_llama: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="roles must alternate"):
        TextCodec.read(tmp_path).encode_chat(TURNS)
    tokenizer.chat_template = "{{ messages.append(1) }}{{ ''.__class__.__mro__ }}"
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="refuses"):
        TextCodec.read(tmp_path).encode_chat(TURNS)


@given(
    st.text(st.sampled_from("ab\u00e9\u4e2d\U0001f600 "), max_size=30),
    st.lists(st.text("ab \u00e9", min_size=1, max_size=3), max_size=3),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_answer_text_is_the_text_before_the_first_stop(codec: TextCodec, text: str, stops: list[str]) -> None:
    answer, shown = AnswerText(codec, stops), ""
    for token in codec.encode(text):
        shown += answer.push(token)
        assert not any(stop in shown for stop in stops)
        if answer.stopped:
            break
    shown += answer.finish()
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert answer.stopped == bool(found)
    # cut at the stop that was complete first; of those complete at once, at the one that begins first
    assert shown == (text[: min(found)[1]] if found else text)


def test_answer_text_shows_bytes_that_are_no_character(codec: TextCodec) -> None:
    broken = codec.encode("\u4e2d")[:2] + codec.encode("x")
    answer = AnswerText(codec, ())
    assert "".join([answer.push(token) for token in broken]) + answer.finish() == codec.decode(broken)
    lonely = AnswerText(codec, ())
    pieces = [lonely.push(codec.encode("\u4e2d")[0]) for _ in range(40)]
    assert "".join(pieces) and len("".join(pieces) + lonely.finish()) == 40


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port: 8000", r"serve.yaml:1: port: unknown field; allowed: model_path, "),
        ("limits:\n  max_waitng: 3", r"serve.yaml:2: limits.max_waitng: unknown field; did you mean 'max_waiting'\? allowed: "),
        ("limits:\n  max_waiting: -3", r"serve.yaml:2: limits.max_waiting: .*greater than or equal to 0; seen: -3"),
        ("kv: {max_batch: many}", r"serve.yaml:1: kv.max_batch: .*integer.*; seen: 'many'"),
        ("host: a\nhost: b", r"serve.yaml:2: host: stated twice \(first in line 1\)"),
        ("- a", "must map names to values"),
        ("a: [", "is not YAML"),
        ("kv: {memory_gib: .nan}", "serve.yaml:1: kv.memory_gib"),
        (None, "cannot be read"),
    ],
)
def test_load_config_says_where_a_fault_is(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "serve.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=words) as fault:
        load_config(path)
    assert "\n" not in str(fault.value)


def test_load_config_keeps_defaults_where_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text("kv: {max_batch: 3}\nsampling: {temperature: 0.5}\n")
    config = load_config(tmp_path / "serve.yaml")
    assert (config.kv.max_batch, config.sampling.temperature, config.limits.max_waiting) == (3, 0.5, 64)
    (tmp_path / "serve.yaml").write_text("")
    assert load_config(tmp_path / "serve.yaml") == load_config(None)
