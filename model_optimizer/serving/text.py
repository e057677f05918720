"""Text to tokens and back: the chat template, and answers that grow token by token up to a stop string.

Reads the tokenizer's own files; loads neither torch nor transformers.
"""

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from tokenizers import Tokenizer

from model_optimizer.errors import ConfigError
from model_optimizer.models.tokenizer_files import TOKENIZER

REPLACEMENT = "\ufffd"
_MAX_PENDING = 16
"""Tokens that may wait for the rest of a character; more are no character. UTF-8 needs at most 4 bytes."""
_SPECIALS = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation."""

    role: str
    content: str


class TextCodec:
    """The tokenizer and chat template of one model directory."""

    def __init__(self, tokenizer: Tokenizer, template: jinja2.Template | None, specials: dict[str, str], ends: tuple[int, ...]):
        self._tokenizer = tokenizer
        self._template = template
        self._specials = specials
        self.ends = ends
        """Tokens that end an answer."""

    @classmethod
    def read(cls, directory: Path) -> "TextCodec":
        """Read tokenizer.json, tokenizer_config.json, the chat template and the ends of text.

        Raises:
            ConfigError: there is no tokenizer.json, or a file is damaged.
        """
        if not (directory / TOKENIZER).is_file():
            raise ConfigError(f"{directory} holds no {TOKENIZER}; save the tokenizer beside the model")
        try:
            tokenizer = Tokenizer.from_str((directory / TOKENIZER).read_text(encoding="utf-8"))
            config = _read(directory / "tokenizer_config.json")
            stated = _end_tokens(directory)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{directory}: a tokenizer file cannot be read: {error}") from error
        specials = {name: text for name in _SPECIALS if (text := _token_text(config.get(name))) is not None}
        own_end = tokenizer.token_to_id(specials["eos_token"]) if "eos_token" in specials else None
        ends = tuple(sorted({*stated, *([] if own_end is None else [own_end])}))
        return cls(tokenizer, _template(directory, config), specials, ends)

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with what the tokenizer puts before or after one."""
        return list(self._tokenizer.encode(text).ids)

    def encode_chat(self, turns: Sequence[Turn]) -> list[int]:
        """Return the tokens of a conversation up to where the assistant's answer begins.

        Raises:
            ConfigError: the model has no chat template, or the template refuses this conversation.
        """
        if self._template is None:
            raise ConfigError("this model has no chat template; use /v1/completions")
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        try:
            # templates were written for transformers, which names tools and documents even where there are none
            text = self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._specials
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise ConfigError(f"the model's chat template refuses these messages: {error}") from error
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens without special ones."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def token_text(self, token: int) -> str:
        """Return one token as text, special ones included; bytes that are no character give U+FFFD."""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))


class AnswerText:
    """The text of one growing answer.

    Law: the pieces joined are the same however the tokens were spread over time; nothing of a stop string
    is ever given out, nor anything after it.
    """

    def __init__(self, codec: TextCodec, stops: Sequence[str]):
        self._codec = codec
        self._stops = tuple(stops)
        self._tokens: list[int] = []
        self._before = self._read = 0
        """Tokens from `_before` on are decoded together, so that a tokenizer sees a word's beginning; to `_read` they are out."""
        self._held = ""
        self.stopped = False
        """Whether a stop string was reached."""

    def push(self, token: int) -> str:
        """Take one token and return what can be shown now."""
        self._tokens.append(token)
        shown = self._codec.decode(self._tokens[self._before : self._read])
        text = self._codec.decode(self._tokens[self._before :])
        if text.endswith(REPLACEMENT) and len(self._tokens) - self._read < _MAX_PENDING:
            return ""
        return self._advance(text[len(shown) :])

    def finish(self) -> str:
        """Return what was held back; call it once, after the last token."""
        if self.stopped:
            return ""
        shown = self._codec.decode(self._tokens[self._before : self._read])
        rest = self._advance(self._codec.decode(self._tokens[self._before :])[len(shown) :])
        held, self._held = self._held, ""  # nothing is held once a stop string was reached
        return rest + held

    def _advance(self, text: str) -> str:
        self._before, self._read = self._read, len(self._tokens)
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


def _read(path: Path) -> dict[str, object]:
    data = json.loads(path.read_bytes()) if path.is_file() else {}
    if not isinstance(data, dict):
        raise ValueError(f"{path.name} holds {type(data).__name__}, not an object")
    return data


def _end_tokens(directory: Path) -> set[int]:
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        stated = _read(directory / name).get("eos_token_id")
        found |= {it for it in (stated if isinstance(stated, list) else [stated]) if isinstance(it, int)}
    return found


def _token_text(stated: object) -> str | None:
    content = stated.get("content") if isinstance(stated, dict) else stated
    return content if isinstance(content, str) else None


def _template(directory: Path, config: dict[str, object]) -> jinja2.Template | None:
    """Return the compiled chat template: its own file, else what tokenizer_config.json holds."""
    own = directory / "chat_template.jinja"
    stated = own.read_text(encoding="utf-8") if own.is_file() else config.get("chat_template")
    if isinstance(stated, list):  # several by name
        stated = next((it.get("template") for it in stated if isinstance(it, dict) and it.get("name") == "default"), None)
    if not isinstance(stated, str):
        return None
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    try:
        return environment.from_string(stated)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"{directory}: the chat template cannot be read: {error}") from error


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks answers for training; for serving it is what stands inside."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
