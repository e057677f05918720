"""A byte-level BPE tokenizer as GGUF states it: tokens, their types, merges, pre-tokenizer, special ids, chat template.

llama.cpp knows pre-tokenizers by name, so one is named only where tokenizer.json holds exactly its steps; what cannot be named
exactly is refused.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from model_optimizer.errors import UnsupportedError
from model_optimizer.models.tokenizer_files import TOKENIZER

if TYPE_CHECKING:
    from gguf import GGUFWriter

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Source: gguf.TokenType."""
_BYTES = ("ByteLevel", True)
_AFTER_SPLIT = ("ByteLevel", False)
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS: dict[tuple[tuple[str, object], ...], str] = {
    (_BYTES,): "gpt-2",
    (("Digits", True), _BYTES): "smollm",
    (("Split", _WORDS % r"\p{N}{1,3}"), _AFTER_SPLIT): "llama-bpe",
    (("Split", _WORDS % r"\p{N}"), _AFTER_SPLIT): "qwen2",
}
"""Steps -> name. Source: llama.cpp, src/llama-vocab.cpp, the expressions of each LLAMA_VOCAB_PRE_TYPE."""
WHOLE_WORDS_FIRST = ("llama-bpe",)
"""Pre-tokenizers for which a word that is a token is taken whole, whatever the merges say (`ignore_merges`)."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: str = "BPE"
    vocab: dict[str, int]
    merges: tuple[tuple[str, str] | str, ...]
    ignore_merges: bool = False
    byte_fallback: bool | None = False


class _Added(BaseModel):
    model_config = ConfigDict(extra="ignore")

    id: int
    content: str
    special: bool


class _Pattern(BaseModel):
    model_config = ConfigDict(extra="ignore")

    Regex: str | None = None


class _Step(BaseModel):
    """One pre-tokenizer, with the fields of every kind that a name depends on."""

    model_config = ConfigDict(extra="ignore")

    type: str
    pretokenizers: tuple["_Step", ...] = ()
    use_regex: bool = True
    add_prefix_space: bool = False
    individual_digits: bool = False
    pattern: _Pattern | None = None
    behavior: str = "Isolated"
    invert: bool = False

    def steps(self) -> tuple[tuple[str, object], ...]:
        """Return what is done in order, flat."""
        if self.type == "Sequence":
            return tuple(step for part in self.pretokenizers for step in part.steps())
        if self.type == "ByteLevel" and not self.add_prefix_space:
            return (("ByteLevel", self.use_regex),)
        if self.type == "Digits":
            return (("Digits", self.individual_digits),)
        if self.type == "Split" and self.pattern and self.behavior == "Isolated" and not self.invert:
            return (("Split", self.pattern.Regex),)
        return ((self.type, self.model_dump_json(exclude_defaults=True)),)


class _Tokenizer(BaseModel):
    model_config = ConfigDict(extra="ignore")

    model: _Model
    added_tokens: tuple[_Added, ...] = ()
    pre_tokenizer: _Step | None = None


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer's tables."""

    pre_tokenizer: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    special_ids: dict[str, int]
    """`bos`, `eos`, `pad`, `unk` where there is one."""
    adds_bos: bool
    adds_eos: bool
    chat_template: str | None


def read_vocabulary(directory: Path, num_rows: int) -> Vocabulary:
    """Return the tables of a model directory's tokenizer, filled up to the `num_rows` of its embedding.

    Raises:
        UnsupportedError: the tokenizer is no byte-level BPE, has no merges, or its pre-tokenizer has no exact name.
    """
    if not (directory / TOKENIZER).is_file():
        raise UnsupportedError(f"{directory} holds no {TOKENIZER}; the GGUF export reads no other tokenizer file")
    try:
        read = _Tokenizer.model_validate_json((directory / TOKENIZER).read_bytes())
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"]))
        raise UnsupportedError(
            f"{directory / TOKENIZER} is no byte-level BPE tokenizer ({place}: {error.errors()[0]['msg']}); "
            "the GGUF export covers no other"
        ) from error
    pre_tokenizer = _name(read, directory)
    words = {index: token for token, index in read.model.vocab.items()}
    kinds = dict.fromkeys(words, NORMAL)
    for added in read.added_tokens:
        words[added.id], kinds[added.id] = added.content, CONTROL if added.special else USER_DEFINED
    ids = range(max(num_rows, max(words) + 1))
    merges = tuple(it if isinstance(it, str) else f"{it[0]} {it[1]}" for it in read.model.merges)
    specials, adds_bos, adds_eos, template = _settings(directory)
    return Vocabulary(
        pre_tokenizer=pre_tokenizer,
        tokens=tuple(words.get(index, f"[PAD{index}]") for index in ids),
        types=tuple(kinds.get(index, UNUSED) for index in ids),
        merges=merges,
        special_ids=specials,
        adds_bos=adds_bos,
        adds_eos=adds_eos,
        chat_template=template,
    )


def _name(read: _Tokenizer, directory: Path) -> str:
    """Return llama.cpp's name of the steps before the merges."""
    file = directory / TOKENIZER
    if read.model.type != "BPE" or read.model.byte_fallback or read.pre_tokenizer is None:
        raise UnsupportedError(
            f"{file}: {read.model.type} with byte fallback is not covered by the GGUF export; covered: byte-level BPE"
        )
    if not read.model.merges:
        raise UnsupportedError(f"{file} has no merges, and llama.cpp reads no BPE tokenizer without; train it on some text")
    steps = read.pre_tokenizer.steps()
    if steps not in PRE_TOKENIZERS:
        shown = "; ".join(f"{kind} {detail}" for kind, detail in steps)
        raise UnsupportedError(
            f"{file}: the pre-tokenizer ({shown}) has no exact name in llama.cpp; known: {', '.join(PRE_TOKENIZERS.values())}"
        )
    name = PRE_TOKENIZERS[steps]
    if read.model.ignore_merges != (name in WHOLE_WORDS_FIRST):
        raise UnsupportedError(f"{file}: ignore_merges {read.model.ignore_merges} is not what llama.cpp does for {name!r}")
    return name


def _settings(directory: Path) -> tuple[dict[str, int], bool, bool, str | None]:
    """Return special ids, whether a text gets a first and a last token, and the chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    stated = json.loads((directory / "config.json").read_bytes())
    ids = {}
    for name in ("bos", "eos", "pad", "unk"):
        own = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
        value = own.get(name, tokenizer.unk_token_id)
        value = stated.get(f"{name}_token_id") if value is None else value
        value = value[0] if isinstance(value, list) else value
        if value is not None:
            ids[name] = int(value)
    encoded = tokenizer.encode("a")
    template = tokenizer.chat_template
    return ids, encoded[0] == ids.get("bos"), encoded[-1] == ids.get("eos"), template if isinstance(template, str) else None


def state(vocabulary: Vocabulary, writer: "GGUFWriter") -> None:
    """Add the fields that describe the tokenizer."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.pre_tokenizer)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types(list(vocabulary.types))
    writer.add_token_merges(list(vocabulary.merges))
    add = {
        "bos": writer.add_bos_token_id,
        "eos": writer.add_eos_token_id,
        "pad": writer.add_pad_token_id,
        "unk": writer.add_unk_token_id,
    }
    for name, index in vocabulary.special_ids.items():
        add[name](index)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(vocabulary.adds_eos)
    if vocabulary.chat_template is not None:
        writer.add_chat_template(vocabulary.chat_template)
