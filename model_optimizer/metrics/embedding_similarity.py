"""How near an answer's meaning comes to its reference: cosine of mean-pooled hidden states of a local model.

Shape letters: N texts, M references, B texts of a batch, L their tokens, X hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from model_optimizer.errors import ConfigError
from model_optimizer.metrics.registry import METRICS, Answers, Metric, Statistic, mean_statistic
from model_optimizer.metrics.words import example_answers, words

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BATCH = 16
MAX_TOKENS = 256
"""Of a text that are read; what stands behind does not change its vector."""


def embedding_similarity(answers: Answers) -> Statistic:
    """Return the cosine of every output with its nearest reference.

    Raises:
        ConfigError: no model was given that could tell meanings.
    """
    if answers.embed is None:
        raise ConfigError("embedding_similarity needs a local model that turns texts into vectors; name one with --embedder DIR")
    outputs_NX = answers.embed(answers.outputs_N)
    flat = [reference for references in answers.references_N for reference in references]
    references_MX, start, best = answers.embed(flat), 0, []
    for vector_X, references in zip(outputs_NX, answers.references_N, strict=True):
        best.append(float((references_MX[start : start + len(references)] @ vector_X).max()))
        start += len(references)
    return mean_statistic(np.clip(np.array(best, np.float64), -1.0, 1.0))


class LocalEmbedder:
    """Embeds texts with a model that lies in a directory; it is loaded at the first call."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._loaded: tuple[PreTrainedTokenizerBase, PreTrainedModel] | None = None

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the mean of the last hidden states of each text's tokens, of unit length; an empty text gives 0.

        Source: Reimers and Gurevych, Sentence-BERT, arXiv 1908.10084, section 3 (mean pooling).
        """
        tokenizer, model = self._loaded = self._loaded or _load(self._directory)
        tokens = [tokenizer.encode(text)[:MAX_TOKENS] for text in texts]
        vectors_NX = np.zeros((len(texts), int(model.config.get_text_config().hidden_size)), np.float32)
        order = sorted((index for index, found in enumerate(tokens) if found), key=lambda index: len(tokens[index]))
        for start in range(0, len(order), BATCH):
            rows = order[start : start + BATCH]
            vectors_NX[rows] = _pooled(model, [tokens[row] for row in rows])
        return vectors_NX


def _load(directory: Path) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    return tokenizer, AutoModel.from_pretrained(directory, local_files_only=True, dtype="float32").eval()


def _pooled(model: PreTrainedModel, tokens: list[list[int]]) -> NDArray[np.float32]:
    import torch

    longest = max(map(len, tokens))
    ids_BL = torch.tensor([[*row, *[0] * (longest - len(row))] for row in tokens])
    mask_BL = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in tokens])
    with torch.inference_mode():
        hidden_BLX = model(input_ids=ids_BL, attention_mask=mask_BL).last_hidden_state
    mean_BX = (hidden_BLX * mask_BL[..., None]).sum(1) / mask_BL.sum(1, keepdim=True)
    return np.asarray(torch.nn.functional.normalize(mean_BX, dim=-1).numpy(), dtype=np.float32)


def _bag(texts: Sequence[str]) -> NDArray[np.float32]:
    """Return vectors of word lengths: an embedder for examples, no meaning in it."""
    counts = np.array([[sum(len(word) == size for word in words(text)) for size in range(1, 9)] for text in texts], np.float32)
    lengths = np.linalg.norm(counts, axis=1, keepdims=True)
    return np.asarray(counts / np.maximum(1e-9, lengths), dtype=np.float32)


METRICS.register("embedding_similarity")(
    Metric[Answers](
        unit="ratio",
        higher_is_better=True,
        lower_bound=-1.0,
        upper_bound=1.0,
        compute=lambda answers: embedding_similarity(answers).value,
        example=lambda seed: Answers(*example_answers(seed), embed=_bag),
        statistic=embedding_similarity,
    )
)
