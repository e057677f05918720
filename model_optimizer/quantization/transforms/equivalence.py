"""Proof on a few tokens that a transformed checkpoint computes what the original does, block by block.

Anatomy is read from names and shapes; an architecture that wires the same names otherwise is found here, before anything is
built on it. Memory holds one block.

Shape letters: D hidden features, T tokens, V vocabulary.
"""

from pathlib import Path

import torch

from model_optimizer.errors import UnsupportedError
from model_optimizer.models.headers import read_headers
from model_optimizer.models.weights import read_rows, read_tensor
from model_optimizer.quantization.blocks import StreamedModel, find_stack, run_block
from model_optimizer.quantization.layers import read_layers
from model_optimizer.quantization.transforms.anatomy import Anatomy

NUM_TOKENS = 24
NUM_WORDS = 512
"""Rows of the head that are compared."""
FLOAT32_TOLERANCE = 1e-3
"""Root mean square of the logits' change over that of the logits. Source: 30 blocks of SmolLM2-135M in float32 leave 1e-5."""
HALF_TOLERANCE = 0.05
"""The same where rotated embeddings are stored in 16 bits: each value is off by up to 2^-9 of itself."""


def logits_error_ratio(source: Path, folded: Path, anatomy: Anatomy) -> float:
    """Return the root mean square difference of the logits of both models over that of the source's."""
    before_TV, after_TV = (_logits(directory, anatomy) for directory in (source, folded))
    return ((after_TV - before_TV).square().mean().sqrt() / before_TV.square().mean().sqrt()).item()


def require_equivalent(error_ratio: float, transform: str, source: Path) -> None:
    """Refuse a fold that changed the function.

    Raises:
        UnsupportedError: says how far the logits are off.
    """
    halves = any(header.dtype in ("F16", "BF16") for header in read_headers(source).values())
    tolerance = HALF_TOLERANCE if halves else FLOAT32_TOLERANCE
    if not error_ratio <= tolerance:
        raise UnsupportedError(
            f"{transform} changes the logits of {source} by {error_ratio:.2g} of their size (at most {tolerance:g} is rounding): "
            "the architecture joins its modules in another way than their names say; use method rtn or gptq without rotation"
        )


@torch.no_grad()
def _logits(directory: Path, anatomy: Anatomy) -> torch.Tensor:
    stack = find_stack(read_layers(directory).linears)
    model = StreamedModel(directory, stack)
    headers = read_headers(directory)
    num_words = headers[f"{anatomy.embedding}.weight"].shape[0]
    tokens = tuple((7919 * place + 17) % num_words for place in range(NUM_TOKENS))
    entering: list[torch.Tensor] = []
    (calls,) = model.capture([tokens], lambda _, hidden: entering.append(hidden))
    (hidden_1TD,) = entering
    for number, call in enumerate(calls):
        with model.resident(number) as block:
            hidden_1TD = run_block(block, hidden_1TD, call)
    gain_D = anatomy.final_norm.offset + read_tensor(headers[anatomy.final_norm.weight]).float()
    head = headers.get(f"{anatomy.head}.weight") or headers[f"{anatomy.embedding}.weight"]
    normed_TD = hidden_1TD[0] * hidden_1TD[0].square().mean(-1, keepdim=True).rsqrt() * gain_D
    return normed_TD @ read_rows(head, NUM_WORDS).float().T
