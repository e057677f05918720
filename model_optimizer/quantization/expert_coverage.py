"""How many calibration tokens reach each expert of a mixture: an expert that none reaches is quantized blindly.

Counted at the routers, on the way that inference takes: no token is forced through an expert that it was not sent to.

Shape letters: T tokens, K experts per token, E experts, D hidden features.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from model_optimizer.artifacts.base import Frozen
from model_optimizer.errors import ConfigError, UnsupportedError

ROUTER = "Router"
"""What the class names of transformers' routers hold: MixtralTopKRouter, Qwen3MoeTopKRouter, ..."""
SHOWN = 8


class ExpertLoad(Frozen):
    """Tokens that a router sent to each expert."""

    router: str
    """Module name, e.g. `model.layers.0.mlp.gate`."""
    num_tokens: int
    tokens_per_expert: tuple[int, ...]

    def below(self, min_tokens: int) -> tuple[int, ...]:
        """Return the experts that fewer than `min_tokens` tokens reach."""
        return tuple(number for number, count in enumerate(self.tokens_per_expert) if count < min_tokens)

    @property
    def never_reached(self) -> tuple[int, ...]:
        return self.below(1)


@dataclass(slots=True)
class _Counter:
    """The running count of one router."""

    router: str
    counts_E: torch.Tensor
    num_tokens: int = 0

    def __call__(self, module: nn.Module, arguments: tuple[torch.Tensor, ...], output: object) -> None:
        chosen_TK = _chosen_experts(self.router, output)
        self.num_tokens += chosen_TK.shape[0]
        self.counts_E += torch.bincount(chosen_TK.flatten().cpu(), minlength=len(self.counts_E))


@contextmanager
def counted_experts(model: nn.Module) -> Iterator[Callable[[], tuple[ExpertLoad, ...]]]:
    """Count while the body runs `model`, a whole network or one block; the value returns the counts so far.

    A model without routers gives no counts.

    Raises:
        UnsupportedError: when a router runs that does not tell which experts it chose.
    """
    counters, handles = [], []
    for name, module in model.named_modules():
        if ROUTER in type(module).__name__:
            counter = _Counter(name, torch.zeros(_num_experts(module), dtype=torch.int64))
            counters.append(counter)
            handles.append(module.register_forward_hook(counter))

    def loads() -> tuple[ExpertLoad, ...]:
        return tuple(
            ExpertLoad(router=it.router, num_tokens=it.num_tokens, tokens_per_expert=tuple(map(int, it.counts_E)))
            for it in counters
        )

    try:
        yield loads
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def count_expert_tokens(model: nn.Module, sequences: Sequence[Sequence[int]]) -> tuple[ExpertLoad, ...]:
    """Run the sequences one by one and return what each router sent where; empty for a model without experts."""
    with counted_experts(model) as loads:
        for tokens in sequences:
            model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
        return loads()


def coverage_warnings(loads: Sequence[ExpertLoad]) -> tuple[str, ...]:
    """Return a warning that counts and names the experts that no token reached; empty where all were reached."""
    unreached = [f"{load.router} {number}" for load in loads for number in load.never_reached]
    if not unreached:
        return ()
    total = sum(len(load.tokens_per_expert) for load in loads)
    more = f" and {len(unreached) - SHOWN} more" if len(unreached) > SHOWN else ""
    return (
        f"calibration reaches {total - len(unreached)} of {total} experts; never reached: {', '.join(unreached[:SHOWN])}{more}; "
        "give more or more varied text",
    )


def require_expert_tokens(loads: Sequence[ExpertLoad], min_tokens: int) -> None:
    """Refuse calibration text of which an expert sees fewer than `min_tokens` tokens.

    Raises:
        ConfigError: counting and naming those experts.
    """
    starved = [
        f"{load.router} {number} ({load.tokens_per_expert[number]})" for load in loads for number in load.below(min_tokens)
    ]
    if starved:
        more = f" and {len(starved) - SHOWN} more" if len(starved) > SHOWN else ""
        raise ConfigError(
            f"{len(starved)} experts see fewer than {min_tokens} calibration tokens: {', '.join(starved[:SHOWN])}{more}; "
            "give more or more varied text, or ask for fewer"
        )


def _num_experts(router: nn.Module) -> int:
    """Return E: a router's weight is [E, D]."""
    weights = [parameter for name, parameter in router.named_parameters() if name.endswith("weight") and parameter.dim() == 2]
    if len(weights) != 1:
        raise UnsupportedError(
            f"{type(router).__name__} has {len(weights)} weight matrices, one is expected; its experts cannot be counted"
        )
    return int(weights[0].shape[0])


def _chosen_experts(router: str, output: object) -> torch.Tensor:
    """Return the indices [T, K]: the one tensor of whole numbers in a router's output."""
    parts = output if isinstance(output, tuple) else (output,)
    indices = [part for part in parts if isinstance(part, torch.Tensor) and not part.is_floating_point()]
    if len(indices) != 1:
        raise UnsupportedError(
            f"router {router} returns {len(indices)} tensors of whole numbers, one is expected; its experts cannot be counted"
        )
    return indices[0].reshape(-1, indices[0].shape[-1])
