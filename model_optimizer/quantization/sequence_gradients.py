"""Weight gradients of whole sequences, seen one layer at a time during a single backward pass over several sequences.

Under labels that are drawn from the model's own prediction, the squares of these gradients estimate the true Fisher
information. No gradient is ever stored: a layer's outputs' gradient and its inputs meet, are handed on, and are freed.

Shape letters: B sequences, T tokens of one sequence, V vocabulary, O output features, I input features, F formats.
"""

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from model_optimizer.errors import UnsupportedError

Consume = Callable[[str, torch.Tensor], None]
"""(layer, gradient_BOI): the gradient of each sequence's part of the objective."""
Objective = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits_BTV, is_token_BT) -> the scalar whose gradient is meant; a sum over sequences."""


def visit_gradients(
    model: PreTrainedModel, layers: Sequence[str], sequences: Sequence[tuple[int, ...]], seeds: Sequence[int], consume: Consume
) -> None:
    """Give `consume` every layer's gradient per sequence of its summed log-likelihood under labels drawn from the model.

    `seeds[b]` draws the labels of sequence b, the same on every device and in every batch.

    Raises:
        UnsupportedError: a layer does not see its tokens sequence by sequence.
    """
    visit_objective(model, layers, sequences, lambda logits, mask: log_likelihood(logits, mask, seeds), consume)


def visit_objective(
    model: PreTrainedModel, layers: Sequence[str], sequences: Sequence[tuple[int, ...]], objective: Objective, consume: Consume
) -> None:
    """Run one forward and one backward over the sequences and give `consume` every layer's gradient per sequence.

    Raises:
        UnsupportedError: a layer does not see its tokens sequence by sequence.
    """
    inputs: dict[str, torch.Tensor] = {}
    entrance = model.get_input_embeddings().register_forward_hook(lambda _, arguments, output: output.requires_grad_(True))
    handles = [entrance, *(_watch(model, name, len(sequences), inputs, consume) for name in layers)]
    try:
        tokens_BT, is_token_BT = padded(sequences, model.device)
        objective(model(input_ids=tokens_BT, use_cache=False).logits, is_token_BT).backward()
    finally:
        for handle in handles:
            handle.remove()


def log_likelihood(logits_BTV: torch.Tensor, is_token_BT: torch.Tensor, seeds: Sequence[int]) -> torch.Tensor:
    """Return the summed log-likelihood of one label per token, drawn from the prediction; padding counts nothing."""
    log_probs_BTV = torch.log_softmax(logits_BTV.float(), dim=-1)
    labels_BT = torch.stack([_draw(row_TV, seed) for row_TV, seed in zip(log_probs_BTV.detach(), seeds, strict=True)])
    chosen_BT = log_probs_BTV.gather(-1, labels_BT[..., None])[..., 0]
    return (chosen_BT * is_token_BT).sum()


def _draw(log_probs_TV: torch.Tensor, seed: int) -> torch.Tensor:
    """Return one label per row by inverting the cumulated probabilities: the same uniform numbers on every device."""
    cumulated_TV = log_probs_TV.double().exp().cumsum(-1)
    uniform_T1 = torch.rand(len(log_probs_TV), 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    positions_T1 = uniform_T1.to(log_probs_TV.device) * cumulated_TV[:, -1:]
    return torch.searchsorted(cumulated_TV, positions_T1, right=True)[:, 0].clamp_(max=log_probs_TV.shape[-1] - 1)


def padded(sequences: Sequence[tuple[int, ...]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens [B, T] filled up on the right, where causal attention cannot see it, and which are tokens."""
    longest = max(map(len, sequences))
    tokens_BT = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens in sequences], device=device)
    lengths_B1 = torch.tensor([[len(tokens)] for tokens in sequences], device=device)
    return tokens_BT, torch.arange(longest, device=device) < lengths_B1


def _watch(
    model: PreTrainedModel, name: str, num_sequences: int, inputs: dict[str, torch.Tensor], consume: Consume
) -> torch.utils.hooks.RemovableHandle:
    """Keep a layer's inputs until the gradient of its outputs arrives, then hand on their product."""

    def forward(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...], outputs: torch.Tensor) -> None:
        if outputs.ndim != 3 or outputs.shape[0] != num_sequences:
            raise UnsupportedError(
                f"{name} sees its tokens as {tuple(arguments[0].shape)}, not as {num_sequences} sequences of them; "
                "the sensitivity of such layers cannot be measured yet: name the layer in quantization.skip_layers"
            )
        inputs[name] = arguments[0].detach()
        outputs.register_hook(backward)

    def backward(gradient_BTO: torch.Tensor) -> None:
        consume(name, gradient_BTO.detach().transpose(1, 2).float() @ inputs.pop(name).float())

    return model.get_submodule(name).register_forward_hook(forward)


def projections(gradient_BOI: torch.Tensor, errors_OIF: torch.Tensor) -> torch.Tensor:
    """Return <gradient, error> of every output row, [F, B, O]."""
    return (gradient_BOI.transpose(0, 1) @ errors_OIF).permute(2, 1, 0)
