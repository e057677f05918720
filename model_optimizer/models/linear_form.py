"""Models in which every matrix that can be quantized is a torch.nn.Linear, under the name that checkpoints give it.

transformers computes with other forms of some: the experts of a layer as two 3-D parameters, GPT-2's matrices as Conv1D,
which holds them the other way round. Calibration, sensitivity and rounding know linear layers only.

An expert sees its tokens as [B, P, D], sequence by sequence, filled up with zeros to the sequence that sends it most: what
watches a layer finds the sequences apart, and zeros add nothing to a gradient or a moment. An expert without tokens is
called with P = 0.

Shape letters: B sequences, T tokens of one, P tokens of one that an expert gets, N = B x T, K experts per token, E experts,
D hidden features, O output features, I input features.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

COVERED = ("gemma3_text", "gpt2", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe")
"""Model types that are quantized end to end in tests; others may compute with a matrix in ways that nobody looked at."""
TRANSPOSED = ("gpt2",)
"""Model types that store the weight of their quantizable layers as [I, O]."""


@dataclass(frozen=True, slots=True)
class _ExpertNames:
    """How checkpoints name what transformers fuses. Source: transformers' conversion_mapping of the model type."""

    block: str
    gate: str
    up: str
    down: str


_EXPERTS = {
    "mixtral": _ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": _ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
}


class RoutedExperts(nn.Module):
    """A router and the experts that it sends each token to, every one a gated feed-forward of three linear layers."""

    def __init__(self, router: nn.Module, experts: nn.ModuleList):
        super().__init__()
        self.gate = router
        self.experts = experts

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Return each token's experts' outputs, weighted by the router and summed."""
        shape_BT, width = hidden_BTD.shape[:2], hidden_BTD.shape[2]
        _, scores_NK, chosen_NK = self.gate(hidden_BTD.reshape(-1, width))
        mixed_BTD = torch.zeros_like(hidden_BTD)
        for number, expert in enumerate(self.experts):
            hits_NK = chosen_NK == number
            share_BT = (scores_NK * hits_NK).sum(-1).reshape(shape_BT)
            places_BP, is_token_BP = _gathered(hits_NK.any(-1).reshape(shape_BT))
            places_BPD = places_BP[..., None].expand(-1, -1, width)
            entering_BPD = hidden_BTD.gather(1, places_BPD) * is_token_BP[..., None]
            leaving_BPD = expert(entering_BPD) * (share_BT.gather(1, places_BP) * is_token_BP)[..., None]
            mixed_BTD = mixed_BTD.scatter_add(1, places_BPD, leaving_BPD.to(mixed_BTD.dtype))
        return mixed_BTD


def _gathered(hit_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places [B, P] of the hits of each sequence in order, and which of them are hits and no filling."""
    counts_B1 = hit_BT.sum(1, keepdim=True)
    longest = int(counts_B1.max().item())
    places_BP = hit_BT.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :longest]
    return places_BP, torch.arange(longest, device=hit_BT.device) < counts_B1


class _Expert(nn.Module):
    """down(act(gate(x)) * up(x)), its layers under the names of the checkpoint."""

    def __init__(self, names: _ExpertNames, matrices: tuple[torch.Tensor, ...], activation: nn.Module):
        super().__init__()
        self._names = names
        for name, weight_OI in zip((names.gate, names.up, names.down), matrices, strict=True):
            self.add_module(name, _linear(weight_OI, None))
        self.activation = activation

    def forward(self, entering: torch.Tensor) -> torch.Tensor:
        gate, up, down = (self.get_submodule(name) for name in (self._names.gate, self._names.up, self._names.down))
        left: torch.Tensor = down(self.activation(gate(entering)) * up(entering))
        return left


def linear_form(model: PreTrainedModel) -> frozenset[str]:
    """Rebuild a model of a covered type in place; return the layers whose stored weight is the transpose of the module's.

    Weights are shared with the fused form where that is possible, and may be on the meta device. Names of parameters are
    those of the checkpoint afterwards.
    """
    transposed = [name for name, module in model.named_modules() if isinstance(module, Conv1D)]
    for name in transposed:
        conv = model.get_submodule(name)
        assert isinstance(conv, Conv1D), "named_modules said so"
        model.set_submodule(name, _linear(conv.weight.detach().T.contiguous(), conv.bias))
    names = _EXPERTS.get(model.config.model_type)
    if names is not None:
        for parent in list(model.modules()):
            for attribute, block in list(parent.named_children()):
                if "experts" in dict(block.named_children()) and not isinstance(block, RoutedExperts):
                    _replace(parent, attribute, names, _routed(block, names))
    return frozenset(transposed)


def _routed(block: nn.Module, names: _ExpertNames) -> RoutedExperts:
    fused = block.get_submodule("experts")
    gate_up_EOI, down_EOI = fused.get_parameter("gate_up_proj").detach(), fused.get_parameter("down_proj").detach()
    activation = fused.get_submodule("act_fn")
    pairs = zip(gate_up_EOI, down_EOI, strict=True)
    experts = [_Expert(names, (*gate_up_OI.chunk(2), down_OI), activation) for gate_up_OI, down_OI in pairs]
    return RoutedExperts(block.get_submodule("gate"), nn.ModuleList(experts))


def _replace(parent: nn.Module, attribute: str, names: _ExpertNames, routed: RoutedExperts) -> None:
    """Register the block under its stored name alone; the parent's own code still finds it under the old one."""
    delattr(parent, attribute)
    parent.add_module(names.block, routed)
    if names.block != attribute:
        parent.__dict__[attribute] = routed


def _linear(weight_OI: torch.Tensor, bias_O: nn.Parameter | None) -> nn.Linear:
    """Return a layer around given tensors."""
    layer = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=bias_O is not None, device="meta")
    layer.weight = nn.Parameter(weight_OI, requires_grad=weight_OI.is_floating_point())
    layer.register_parameter("bias", bias_O)
    return layer
