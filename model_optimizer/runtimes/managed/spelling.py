"""Which tokens a server held back: it tells the last token of a character and the character's bytes, not those before.

    bytes of the text = bytes of the held tokens, in order, and bytes of the told one

Byte-level vocabularies have one token for a string of bytes, so that few ways to cut two or three bytes remain, mostly one.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from model_optimizer.models.tokenizer_files import TOKENIZER

_FIRST_SHIFTED = 256
_PRINTABLE = (range(ord("!"), ord("~") + 1), range(ord("¡"), ord("¬") + 1), range(ord("®"), ord("ÿ") + 1))
"""Bytes that stand for themselves in byte-level vocabularies. Source: GPT-2, encoder.py, bytes_to_unicode."""


@cache
def _byte_of() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for."""
    found = {chr(byte): byte for span in _PRINTABLE for byte in span}
    rest = [byte for byte in range(256) if byte not in found.values()]
    return found | {chr(_FIRST_SHIFTED + at): byte for at, byte in enumerate(rest)}


def read_spellings(directory: Path) -> dict[bytes, int]:
    """Return token by the bytes that it spells, without added ones; {} where the directory holds no tokenizer.json."""
    from tokenizers import Tokenizer

    path = directory / TOKENIZER
    if not path.is_file():
        return {}
    stated = json.loads(path.read_bytes())
    byte_level = any("ByteLevel" in json.dumps(stated.get(part)) for part in ("decoder", "pre_tokenizer"))
    tokenizer = Tokenizer.from_file(str(path))
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    return {_spelled(token, byte_level): number for token, number in vocabulary.items() if number not in added}


def _spelled(token: str, byte_level: bool) -> bytes:
    if byte_level:
        letters = _byte_of()
        return bytes(letters[letter] for letter in token) if all(letter in letters for letter in token) else token.encode()
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace("▁", " ").encode()


def held_tokens(spelled: bytes, last: int, count: int, spellings: Mapping[bytes, int]) -> tuple[int, ...] | None:
    """Return the `count` tokens that come before `last` in a text; None where they do not follow from it.

    Of several ways the one whose first token is longest is taken, as byte pair encoding does.
    """
    ends = [key for key, number in spellings.items() if number == last and key and spelled.endswith(key)]
    if not ends:
        return None
    return next(_cuts(spelled[: len(spelled) - len(ends[0])], count, spellings), None)


def _cuts(text: bytes, count: int, spellings: Mapping[bytes, int]) -> Iterator[tuple[int, ...]]:
    """Yield every way to spell a text with so many tokens, longest first tokens first."""
    if count == 0:
        if not text:
            yield ()
        return
    for length in range(len(text) - count + 1, 0, -1):
        if (token := spellings.get(text[:length])) is not None:
            for rest in _cuts(text[length:], count - 1, spellings):
                yield (token, *rest)
