"""From a record to token ids: the chat template exactly once, and one BOS."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2.exceptions import TemplateError

from model_optimizer.errors import ConfigError
from model_optimizer.quantization.records import Message, Record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARKUP = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|assistant|>", "[INST]", "<｜Assistant｜>")
"""What well-known chat templates put around a turn: ChatML, Llama 3, Gemma, Zephyr and Phi, Mistral, DeepSeek."""

Encode = Callable[[Record], tuple[int, ...] | str]
"""Record -> token ids, or why the record cannot be encoded."""


def token_encoder(tokenizer_directory: Path, *, plain_without_template: bool) -> tuple[Encode, "PreTrainedTokenizerBase"]:
    """Return how a model's tokenizer encodes records, and the tokenizer.

    `plain_without_template` says what becomes of messages where the model has no chat template: their words alone
    (for text that is not the user's own), or a ConfigError.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory)
    return partial(encode_record, tokenizer, template_markup(tokenizer), plain_without_template=plain_without_template), tokenizer


def encode_bytes(record: Record) -> tuple[int, ...]:
    """Return the UTF-8 bytes: where no model is known, no text has more tokens of its own than bytes."""
    return tuple(record.content().encode())


def encode_record(
    tokenizer: "PreTrainedTokenizerBase", markup: Sequence[str], record: Record, *, plain_without_template: bool = False
) -> tuple[int, ...] | str:
    """Return token ids, or why the chat template does not take the record.

    Text that a template has rendered before is taken as it is; messages that hold such text are refused, because
    rendering them would apply the template twice.

    Raises:
        ConfigError: messages without a chat template.
    """
    if record.messages is None:
        return _encode_rendered(tokenizer, record.text or "", rendered=bool(found_markup(record, markup)))
    if tokenizer.chat_template is None:
        if plain_without_template:
            return _encode_rendered(tokenizer, record.content(), rendered=False)
        raise ConfigError("the calibration file has `messages` but the model has no chat template; give `text` instead")
    if mark := found_markup(record, markup):
        return f"messages hold {mark!r}, so that a chat template was applied before; give the rendered text as `text`"
    try:
        return encode_messages(tokenizer, record.messages)
    except TemplateError as error:
        return f"the chat template refuses it ({' '.join(str(error).split())[:120]})"


def encode_messages(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]) -> tuple[int, ...]:
    """Return a conversation as the model is served it; without an answer at its end, the generation prompt follows.

    Law: where the template begins with BOS no second one is put before it; where it does not, the tokenizer's own rule holds.
    """
    turns = [{"role": message.role, "content": message.content} for message in messages]
    open_ended = not messages or messages[-1].role != "assistant"
    rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=open_ended)
    return _encode_rendered(tokenizer, str(rendered), rendered=True)


def _encode_rendered(tokenizer: "PreTrainedTokenizerBase", text: str, *, rendered: bool) -> tuple[int, ...]:
    begun = rendered and bool(tokenizer.bos_token) and text.startswith(str(tokenizer.bos_token))
    return tuple(tokenizer(text, add_special_tokens=not begun)["input_ids"])


def template_markup(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, ...]:
    """Return what betrays text that a chat template has rendered: well-known marks, and the model's own special tokens in it."""
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    special = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    own = {token for token in special if token in template}
    return tuple(sorted(own | set(MARKUP)))


def found_markup(record: Record, markup: Sequence[str]) -> str:
    """Return the first mark that a record's words hold, or an empty text."""
    content = record.content()
    return next((mark for mark in markup if mark in content), "")
