"""What a model directory's tokenizer files say, read as plain JSON: what would fail or mislead later is told before any work."""

import json
from pathlib import Path

from model_optimizer.errors import ConfigError

TOKENIZER = "tokenizer.json"
_ANY = (TOKENIZER, "tokenizer.model", "vocab.json")
_TEMPLATES = ("chat_template.jinja", "chat_template.json")


def check_tokenizer(directory: Path, vocab_size: int) -> None:
    """Refuse a tokenizer that is absent, unreadable, larger than the model, or that never ends a text.

    Raises:
        ConfigError: says which.
    """
    if not any((directory / name).is_file() for name in _ANY):
        raise ConfigError(f"{directory} holds no tokenizer; expected {TOKENIZER} beside config.json")
    if (directory / TOKENIZER).is_file():
        highest = highest_token_id(_read(directory / TOKENIZER), directory / TOKENIZER)
        if highest >= vocab_size:
            raise ConfigError(
                f"{directory / TOKENIZER} has token ids up to {highest}, the model's vocab_size is {vocab_size}; "
                "take the tokenizer that belongs to these weights"
            )
    if not _names_an_end(directory):
        raise ConfigError(
            f"{directory}: no end-of-text token: eos_token_id in config.json or generation_config.json, or eos_token in "
            "tokenizer_config.json; without one no answer ever ends"
        )


def highest_token_id(tokenizer: dict[str, object], path: Path) -> int:
    """Return the largest id that a tokenizer.json can give."""
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens") or []
    if not isinstance(model, dict) or not isinstance(added, list):
        raise ConfigError(f"{path} describes no tokenizer (`model` is missing); fetch it again")
    vocabulary = model.get("vocab") or {}
    ids: list[int] = [entry["id"] for entry in added if isinstance(entry, dict) and isinstance(entry.get("id"), int)]
    if isinstance(vocabulary, dict):
        ids += [value for value in vocabulary.values() if isinstance(value, int)]
    elif isinstance(vocabulary, list):  # a unigram model lists its tokens in the order of their ids
        ids.append(len(vocabulary) - 1)
    if not ids:
        raise ConfigError(f"{path} has no tokens; fetch it again")
    return max(ids)


def has_chat_template(directory: Path) -> bool:
    """Return whether `messages` can be rendered."""
    if any((directory / name).is_file() for name in _TEMPLATES):
        return True
    return bool(_optional(directory / "tokenizer_config.json").get("chat_template"))


def _names_an_end(directory: Path) -> bool:
    configs = (_optional(directory / name) for name in ("config.json", "generation_config.json"))
    return any(config.get("eos_token_id") is not None for config in configs) or bool(
        _optional(directory / "tokenizer_config.json").get("eos_token")
    )


def _optional(path: Path) -> dict[str, object]:
    return _read(path) if path.is_file() else {}


def _read(path: Path) -> dict[str, object]:
    try:
        data = json.loads(path.read_bytes())
    except (UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"{path} is not JSON ({error}); fetch it again") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds {type(data).__name__}, not an object")
    return data
