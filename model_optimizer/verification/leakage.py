"""A golden item that calibrated the model cannot judge it: find it before anything is measured."""

import unicodedata
from collections.abc import Sequence

from model_optimizer.errors import ConfigError
from model_optimizer.verification.golden import GoldenSet, Item

MIN_PROMPT_BYTES, MIN_ITEM_BYTES = 32, 16
"""Shorter prompts stand in ordinary text by chance and are looked for with their answer; what is short even so
counts only where it is the whole text. In UTF-8 bytes, so that a Chinese character weighs three letters."""


def normalise(text: str) -> str:
    """Return the letters and digits of a text in one width and case: what two copies share whatever their layout."""
    return "".join(character for character in unicodedata.normalize("NFKC", text).casefold() if character.isalnum())


def refuse_leakage(texts: Sequence[str], sets: Sequence[GoldenSet]) -> None:
    """Refuse calibration text that holds a golden item: its prompt, or its prompt with the right answer where that is short.

    Raises:
        ConfigError: naming the text's number and the item.
    """
    normalised = [normalise(text) for text in texts]
    for golden in sets:
        for item in golden.items:
            if (number := _find(item, normalised)) is not None:
                raise ConfigError(
                    f"calibration text {number + 1} ({texts[number][:60]!r}) contains item {item.id!r} of golden set "
                    f"{golden.card.name!r}; what calibrated a model cannot judge it: remove the text from the calibration file"
                )


def _find(item: Item, texts: Sequence[str]) -> int | None:
    """Return the index of the first normalised text that holds the item."""
    prompt, whole = normalise(item.prompt), normalise(item.prompt + "".join(item.right_texts[:1]))
    needle = prompt if len(prompt.encode()) >= MIN_PROMPT_BYTES else whole
    if not needle:
        return None
    if len(needle.encode()) < MIN_ITEM_BYTES:
        return next((number for number, text in enumerate(texts) if text == needle), None)
    return next((number for number, text in enumerate(texts) if needle in text), None)
