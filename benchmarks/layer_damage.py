"""Parts of the sensitivity benchmarks: texts by document, and the true KL of the final logits by leave-one-out and of mixes.

Needs a Llama-shaped model (decoder blocks, final norm, head), because leave-one-out starts at the block that it changes.

Shape letters: B sequences, T tokens of one sequence, V vocabulary, O output features, I input features.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoTokenizer, PreTrainedModel

from model_optimizer.formats.registry import FORMATS, FULL_PRECISION
from model_optimizer.quantization.logits_kl import kl_from_probs

HEADING = re.compile(r"^ = [^=].* = $")
Plan = Mapping[str, str]
"""Layer -> format name."""


def read_articles(path: Path) -> list[str]:
    """Return the articles of a WikiText file; a line ` = Title = ` begins one."""
    articles: list[list[str]] = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        if HEADING.match(line):
            articles.append([])
        if articles:
            articles[-1].append(line)
    return ["\n".join(lines) for lines in articles]


def write_calibration(text: Path, target: Path, *, num_words: int = 450) -> Path:
    """Write every article in pieces of `num_words` words, one JSON line each; remainders are left out."""
    pieces = []
    for article in read_articles(text):
        words = article.split(" ")
        pieces += [" ".join(words[start : start + num_words]) for start in range(0, len(words) - num_words + 1, num_words)]
    target.write_text("\n".join(json.dumps({"text": piece}) for piece in pieces), encoding="utf-8")
    return target


@dataclass(frozen=True)
class Documents:
    """Sequences of equal length, each a part of one document."""

    tokens_BT: torch.Tensor
    document_B: NDArray[np.int64]

    @classmethod
    def read(cls, text: Path, model: Path, *, length: int, most: int) -> "Documents":
        """Return up to `most` leading sequences of every article."""
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
        rows, owners = [], []
        for number, article in enumerate(read_articles(text)):
            ids = tokenizer(article)["input_ids"]
            for start in range(0, min(len(ids) // length, most) * length, length):
                rows.append(ids[start : start + length])
                owners.append(number)
        return cls(torch.tensor(rows), np.array(owners))

    def spread(self, count: int) -> torch.Tensor:
        """Return `count` sequences at equal distances."""
        return self.tokens_BT[torch.linspace(0, len(self.tokens_BT) - 1, count).round().long()]


class Damage:
    """The true damage of round-to-nearest formats on one model, on the device that the model lies on."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[str], formats: Sequence[str], *, batch: int):
        self.model, self.batch, self.layers, self.formats = model.requires_grad_(False), batch, layers, formats
        self._parameters = {name: model.get_parameter(f"{name}.weight") for name in layers}
        self._stored = {
            (name, it): FORMATS.get(it).round_trip(weight_OI)
            for name, weight_OI in self._parameters.items()
            for it in (*formats, FULL_PRECISION)
        }
        for name in layers:
            self._stored[name, FULL_PRECISION] = self._stored[name, FULL_PRECISION].clone()

    def rounded(self, layer: str, format_name: str) -> torch.Tensor:
        """Return the weight [O, I] as it comes back from a format."""
        return self._stored[layer, format_name]

    def apply(self, plan: Plan) -> None:
        """Put the plan's weights into the model; layers without a format get their own."""
        for name, parameter in self._parameters.items():
            parameter.data.copy_(self._stored[name, plan.get(name, FULL_PRECISION)])

    @torch.no_grad()
    def realised(self, plans: Sequence[Plan], tokens_BT: torch.Tensor) -> NDArray[np.float64]:
        """Return KL(original || plan) in nats per token, [plan, sequence]."""
        found = []
        for batch_BT in self._batches(tokens_BT):
            self.apply({})
            reference = _Reference(self.model(input_ids=batch_BT, use_cache=False).logits)
            rows = []
            for plan in plans:
                self.apply(plan)
                rows.append(reference.kl_B(self.model(input_ids=batch_BT, use_cache=False).logits))
            found.append(np.stack(rows))
        self.apply({})
        return np.concatenate(found, axis=1)

    @torch.no_grad()
    def leave_one_out(self, tokens_BT: torch.Tensor) -> dict[tuple[str, str], float]:
        """Return the mean KL in nats per token with one layer alone in one format, for every pair.

        Blocks in front of the layer are computed once; the figure is that of a whole forward pass.
        """
        sums = {(layer, it): 0.0 for layer in self.layers for it in self.formats}
        self.apply({})
        for batch_BT in self._batches(tokens_BT):
            tail = _Tail(self.model, batch_BT)
            for layer, it in sums:
                self._parameters[layer].data.copy_(self._stored[layer, it])
                sums[layer, it] += float(tail.kl_B(layer).sum())
                self._parameters[layer].data.copy_(self._stored[layer, FULL_PRECISION])
        return {key: value / len(tokens_BT) for key, value in sums.items()}

    def _batches(self, tokens_BT: torch.Tensor) -> Iterator[torch.Tensor]:
        for start in range(0, len(tokens_BT), self.batch):
            yield tokens_BT[start : start + self.batch].to(self.model.device)


class _Reference:
    """The original model's prediction for one batch, to take KL against."""

    def __init__(self, logits_BTV: torch.Tensor):
        self._logits_BTV = logits_BTV.float()
        self._probs_BTV = self._logits_BTV.softmax(-1)

    def kl_B(self, logits_BTV: torch.Tensor) -> NDArray[np.float64]:
        """Return the mean KL of each sequence."""
        return kl_from_probs(self._probs_BTV, self._logits_BTV, logits_BTV).mean(-1).cpu().numpy()


class _Tail:
    """How every block is called for one batch, so that a change in block b costs only what comes after it."""

    def __init__(self, model: PreTrainedModel, batch_BT: torch.Tensor):
        self._model = model
        self._blocks = list(model.get_submodule("model.layers").children())
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        handles = [
            block.register_forward_pre_hook(
                lambda _, arguments, named: self._calls.append((arguments, dict(named))), with_kwargs=True
            )
            for block in self._blocks
        ]
        self._reference = _Reference(model(input_ids=batch_BT, use_cache=False).logits)
        for handle in handles:
            handle.remove()

    def kl_B(self, layer: str) -> NDArray[np.float64]:
        """Return the KL of each sequence now that `layer` was changed."""
        first = int(layer.split(".")[2])
        hidden_BTD = self._calls[first][0][0]
        for block, ((_, *positional), named) in zip(self._blocks[first:], self._calls[first:], strict=True):
            result = block(hidden_BTD, *positional, **named)
            hidden_BTD = result if isinstance(result, torch.Tensor) else result[0]
        hidden_BTD = self._model.get_submodule("model.norm")(hidden_BTD)
        return self._reference.kl_B(self._model.get_submodule("lm_head")(hidden_BTD))
