"""Turn a GGUF file into a Hugging Face directory: float32 safetensors, config, tokenizer.

transformers reads the weights; the tokenizer is built here from the file's own tables, because what transformers makes of
them loses the pre-tokenizer. What the file does not state exactly is refused, never guessed.
"""

import importlib.util
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from model_optimizer.artifacts.base import StageInputs, Tree, tree_digest
from model_optimizer.artifacts.source import ImportedModel
from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.models.headers import read_headers
from model_optimizer.models.weights import refuse_not_finite
from model_optimizer.protocols import Progress
from model_optimizer.store import file_refs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LIBRARIES = ("gguf", "safetensors", "tokenizers", "torch", "transformers")
CONTROL_TOKEN = 3
"""Source: gguf.TokenType.CONTROL."""
DROPPED_FIELDS = ("quantization_config", "_name_or_path", "_model_name_or_path", "unk_token_id")


class GgufInputs(StageInputs):
    """What an import depends on; the fingerprint covers libraries only, since no device enters the result."""

    file: Tree


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """What the file says about itself."""

    architecture: str
    pre_tokenizer: str
    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    merges: tuple[str, ...]
    chat_template: str | None
    context_length: int
    bos_id: int | None
    eos_id: int
    pad_id: int
    unk_id: int | None
    tensor_types: dict[str, int]


def gguf_inputs(file: Path) -> GgufInputs:
    """Return the identity of an import.

    Raises:
        UnsupportedError: the extra `gguf` is not installed.
    """
    if importlib.util.find_spec("gguf") is None:
        raise UnsupportedError(
            "reading GGUF needs the extra `gguf`; install it with `pip install 'model-optimizer-pipeline[gguf]'`"
        )
    versions = ",".join(f"{name}=={version(name)}" for name in LIBRARIES)
    return GgufInputs(fingerprint=versions, file=Tree.of(file))


def check_gguf_magic(file: Path) -> None:
    """Refuse a file that does not begin as GGUF does; the rest is read when it is imported.

    Raises:
        ConfigError: it is something else.
    """
    with file.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        raise ConfigError(f"{file} is no readable GGUF file (it begins with {magic!r}, not b'GGUF'); fetch it again")


def import_gguf(inputs: GgufInputs, workspace: Path, *, progress: Progress) -> ImportedModel:
    """Write `workspace/model` from a GGUF file.

    Raises:
        ConfigError: the file is no GGUF file or lacks a field.
        UnsupportedError: its tokenizer or architecture is not one that can be rebuilt exactly.
    """
    file, directory = inputs.file.path, workspace / "model"
    facts = read_gguf(file)
    stored = ", ".join(f"{count} {name}" for name, count in sorted(facts.tensor_types.items(), key=lambda item: -item[1]))
    progress.note(f"importing {file.name} ({stored}) as float32; once, about half a minute for 100 MB")
    tokenizer = build_tokenizer(facts)
    _write_weights(file, facts, directory)
    tokenizer.save_pretrained(directory)
    for path in directory.iterdir():
        path.chmod(0o644)
    refuse_not_finite(read_headers(directory).values())
    return ImportedModel(
        files=file_refs(workspace, directory),
        directory="model",
        digest=tree_digest(directory),
        source=f"{file.name} (GGUF: {stored})",
        source_bytes=file.stat().st_size,
        tensor_types=facts.tensor_types,
    )


def read_gguf(file: Path) -> GgufFacts:
    """Read a GGUF file's metadata; no weight is touched."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
    except (ValueError, OSError, IndexError) as error:
        raise ConfigError(f"{file} is no readable GGUF file ({error})") from error

    def field(name: str) -> object:
        return reader.fields[name].contents() if name in reader.fields else None

    def required(name: str) -> object:
        if name not in reader.fields:
            raise ConfigError(f"{file} lacks the GGUF field {name}; it cannot be imported")
        return reader.fields[name].contents()

    architecture = str(required("general.architecture"))
    if required("tokenizer.ggml.model") != "gpt2":
        raise UnsupportedError(
            f"{file}: tokenizer {field('tokenizer.ggml.model')!r} cannot be rebuilt exactly; known: 'gpt2' (BPE)"
        )
    eos_id = int(str(required("tokenizer.ggml.eos_token_id")))
    return GgufFacts(
        architecture=architecture,
        pre_tokenizer=str(required("tokenizer.ggml.pre")),
        tokens=_strings(required("tokenizer.ggml.tokens")),
        token_types=tuple(int(value) for value in _strings(required("tokenizer.ggml.token_type"))),
        merges=_strings(required("tokenizer.ggml.merges")),
        chat_template=None if (template := field("tokenizer.chat_template")) is None else str(template),
        context_length=int(str(required(f"{architecture}.context_length"))),
        bos_id=_token_id(field("tokenizer.ggml.bos_token_id")),
        eos_id=eos_id,
        pad_id=eos_id if (pad := _token_id(field("tokenizer.ggml.padding_token_id"))) is None else pad,
        unk_id=_token_id(field("tokenizer.ggml.unknown_token_id")),
        tensor_types=dict(sorted(Counter(tensor.tensor_type.name for tensor in reader.tensors).items())),
    )


def _strings(value: object) -> tuple[str, ...]:
    return tuple(str(item) for item in value) if isinstance(value, list) else ()


def _token_id(value: object) -> int | None:
    return None if value is None else int(str(value))


def build_tokenizer(facts: GgufFacts) -> "PreTrainedTokenizerFast":
    """Build the byte-level BPE tokenizer that the tables describe.

    Raises:
        UnsupportedError: the pre-tokenizer is not known.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # Source: llama.cpp, src/llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM and _GPT2.
    known = {"smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level]), "gpt-2": level}
    if facts.pre_tokenizer not in known:
        raise UnsupportedError(f"GGUF pre-tokenizer {facts.pre_tokenizer!r} cannot be rebuilt exactly; known: {', '.join(known)}")
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in facts.merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(facts.tokens)}, merges=merges))
    tokenizer.pre_tokenizer = known[facts.pre_tokenizer]
    tokenizer.decoder = decoders.ByteLevel()
    controls = [token for token, kind in zip(facts.tokens, facts.token_types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in controls])
    names = {"bos_token": facts.bos_id, "eos_token": facts.eos_id, "pad_token": facts.pad_id, "unk_token": facts.unk_id}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=facts.context_length,
        padding_side="left",
        **{name: facts.tokens[index] for name, index in names.items() if index is not None},
    )
    fast.chat_template = facts.chat_template
    return fast


def _write_weights(file: Path, facts: GgufFacts, directory: Path) -> None:
    """Dequantize with transformers and save float32 safetensors, config and generation config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

    with _without_bars():
        read = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(gguf_file=file.name, dequantize=True),
        )
        stated = {key: value for key, value in read.config.to_dict().items() if key not in DROPPED_FIELDS}
        config = AutoConfig.for_model(**stated)
        model = AutoModelForCausalLM.from_config(config)  # rebuilt: the one that was read still carries its quantizer
        keys = model.load_state_dict(read.state_dict(), strict=False)
        if wrong := [*keys.unexpected_keys, *(key for key in keys.missing_keys if key != "lm_head.weight")]:
            raise UnsupportedError(f"{file}: {len(wrong)} tensors do not fit {facts.architecture}, e.g. {wrong[0]}")
        model.tie_weights()
        for settings in (model.config, model.generation_config):
            settings.bos_token_id, settings.eos_token_id, settings.pad_token_id = facts.bos_id, facts.eos_id, facts.pad_id
        model.save_pretrained(directory)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Keep transformers' own progress bars off while the body runs; `Progress` tells what is going on."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
