"""A text as comparable words, in scripts with and without spaces."""

import re
import unicodedata

_WORD = re.compile(r"[⺀-鿿豈-﫿぀-ヿ가-힯]|[^\W_]+")
"""One Chinese, Japanese or Korean character, or a run of letters and digits of other scripts."""
_ARTICLES = frozenset({"a", "an", "the"})


def words(text: str) -> tuple[str, ...]:
    """Return the words of a text in one width and case, punctuation dropped."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return tuple(word for run in _WORD.findall(folded) for word in _split(run))


def answer_words(text: str) -> tuple[str, ...]:
    """Return the words of a short answer: apostrophes join, English articles do not count.

    Source: the normalisation of SQuAD's evaluation (Rajpurkar et al. 2016), with characters as words where nothing separates
    them, as CMRC 2018 does for Chinese.
    """
    return tuple(word for word in words(text.replace("'", "").replace("’", "")) if word not in _ARTICLES)


def _split(run: str) -> tuple[str, ...]:
    """Return a run of letters with the characters of scripts without spaces taken apart."""
    return tuple(part for part in re.split(r"([⺀-鿿豈-﫿぀-ヿ가-힯])", run) if part)


def example_answers(seed: int) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return seeded outputs and references that share some words."""
    import random

    generator = random.Random(seed)
    vocabulary = ("river", "lamp", "seven", "quiet", "bread", "3", "12", "signal", "the", "北京")
    references = tuple((" ".join(generator.choices(vocabulary, k=6)),) for _ in range(12))
    outputs = tuple(
        reference if generator.random() < 0.4 else " ".join(generator.choices(vocabulary, k=8)) for (reference,) in references
    )
    return outputs, references
