"""What an engine answered to golden items, and how far it got: the records of a golden run's journal."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from model_optimizer.artifacts.base import Frozen
from model_optimizer.errors import ConfigError


class ItemScore(Frozen):
    """One item's answer: log p of every choice in nats, or the text that was written."""

    golden_set: str
    item: str
    log_probs: tuple[float, ...] = ()
    text: str = ""
    num_tokens: int = 0
    """Tokens written, the one that ended the answer included."""


class Shard(Frozen):
    """One journal record: the items answered together."""

    scores: tuple[ItemScore, ...]


Scores = Mapping[tuple[str, str], ItemScore]
"""By name of the set and id of the item."""


class Tokenizer(Protocol):
    """What is needed of a Hugging Face tokenizer."""

    name_or_path: str
    bos_token_id: int | None
    eos_token_id: int | None
    chat_template: str | None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...
    def apply_chat_template(self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool) -> str: ...


def end_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end an answer: the tokenizer's own, and those of generation_config.json beside it."""
    import json

    ends = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    path = Path(tokenizer.name_or_path) / "generation_config.json"
    if path.is_file():
        try:
            stated = json.loads(path.read_bytes()).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"{path} is unreadable: {error}; save the model's generation config again") from error
        ends |= {token for token in (stated if isinstance(stated, list) else [stated]) if isinstance(token, int)}
    return tuple(sorted(ends))
