"""Calibration text that the model writes itself, where the user has none: seeded, so that it is the same every time.

Source: data-free calibration by generation, LLM-QAT (Liu et al. 2023, section 2.2): a random first token gives variety,
the rest is sampled from the model's own distribution.

Shape letters: B sequences written at once, L tokens so far, V vocabulary.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from model_optimizer.disk import explained
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.quantization.calibration_source import SelfSampling
from model_optimizer.store import write_atomically

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BATCH = 32


def write_self_samples(sampling: SelfSampling, path: Path) -> None:
    """Let the model write text and store it as JSONL; the whole model is loaded in float32."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(sampling.model.path)
    model = load_dequantized(sampling.model.path)
    generator = torch.Generator().manual_seed(sampling.seed)
    lines = []
    for begin in range(0, sampling.num_sequences, BATCH):
        starts_BL = _starts(tokenizer, model, min(BATCH, sampling.num_sequences - begin), generator)
        for tokens in write_sequences(model, starts_BL, sampling.num_tokens, _special_ids(tokenizer, model), generator):
            lines.append(json.dumps({"text": tokenizer.decode(tokens, skip_special_tokens=True)}, ensure_ascii=False))
    with explained(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, ("\n".join(lines) + "\n").encode())


@torch.inference_mode()
def write_sequences(
    model: "PreTrainedModel", starts_BL: torch.Tensor, num_tokens: int, forbidden: list[int], generator: torch.Generator
) -> list[list[int]]:
    """Return `num_tokens` token ids per start, the start included, drawn at temperature 1; `forbidden` ids are never drawn."""
    tokens_BL, entering_BL, cache = starts_BL, starts_BL, None
    while tokens_BL.shape[1] < num_tokens:
        output = model(input_ids=entering_BL, past_key_values=cache, use_cache=True)
        logits_BV = output.logits[:, -1].float()
        logits_BV[:, forbidden] = -torch.inf
        entering_BL = torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)
        tokens_BL, cache = torch.cat([tokens_BL, entering_BL], dim=1), output.past_key_values
    return [list(map(int, row)) for row in tokens_BL]


def _starts(
    tokenizer: "PreTrainedTokenizerBase", model: "PreTrainedModel", count: int, generator: torch.Generator
) -> torch.Tensor:
    """Return what each sequence begins with: the special tokens that plain text gets, and one random token."""
    prefix = [token for token in tokenizer("")["input_ids"] if token != tokenizer.eos_token_id]
    weights_V = torch.ones(model.config.vocab_size)
    weights_V[_special_ids(tokenizer, model)] = 0
    first_BL = torch.multinomial(weights_V, count, replacement=True, generator=generator)[:, None]
    return torch.cat([torch.tensor([prefix] * count, dtype=torch.long).reshape(count, -1), first_BL], dim=1)


def _special_ids(tokenizer: "PreTrainedTokenizerBase", model: "PreTrainedModel") -> list[int]:
    """Return ids that are no text: special tokens, and rows beyond the vocabulary that pad the embedding."""
    special = {number for number in tokenizer.all_special_ids if number < model.config.vocab_size}
    return sorted(special | set(range(len(tokenizer), model.config.vocab_size)))
