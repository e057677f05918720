"""A model as a row of decoder blocks of which one at a time has weights; the rest is shapes only.

The skeleton is built without weights. What lies before the blocks runs once to learn how they are called, with only
those rows of the embedding that the text uses. A block's weights come from the shards when it is entered and go when it
is left, so that memory does not grow with depth.

Shape letters: T tokens of one sequence, D hidden features, V vocabulary.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from model_optimizer.errors import UnsupportedError
from model_optimizer.formats.model_config import read_config
from model_optimizer.models.headers import TensorHeader, read_headers
from model_optimizer.models.linear_form import linear_form
from model_optimizer.models.weights import read_tensor
from model_optimizer.quantization.layers import LinearLayer

CPU = torch.device("cpu")
_BLOCK = re.compile(r"^(?P<list>.+?)\.(?P<index>\d+)\.")


@dataclass(frozen=True, slots=True)
class Stack:
    """Where the decoder blocks lie, and in which of them each linear layer does."""

    name: str
    numbers: dict[str, int]
    """Layer -> block; layers outside the stack are absent."""

    @property
    def num_blocks(self) -> int:
        return 1 + max(self.numbers.values())


@dataclass(frozen=True, slots=True)
class Call:
    """How the model calls one block for one sequence, the hidden states aside."""

    positional: tuple[object, ...]
    named: dict[str, object]


def find_stack(layers: Sequence[LinearLayer]) -> Stack:
    """Return the module list that holds most layers.

    Raises:
        UnsupportedError: no layer lies in a numbered list of blocks.
    """
    found = [(match["list"], layer.name, int(match["index"])) for layer in layers if (match := _BLOCK.match(layer.name))]
    if not found:
        raise UnsupportedError(f"{layers[0].name} lies in no stack of decoder blocks, which input moments need; use method rtn")
    (stack, _), *_ = Counter(name for name, _, _ in found).most_common(1)
    return Stack(stack, {layer: number for name, layer, number in found if name == stack})


class StreamedModel:
    """The skeleton of a plain checkpoint whose blocks get their weights one at a time, as float32."""

    def __init__(self, directory: Path, stack: Stack):
        """Build the skeleton; no weight is read.

        Raises:
            UnsupportedError: a tensor of the decoder is not stored under its module's name; it is named.
        """
        from accelerate import init_empty_weights
        from transformers import AutoModelForCausalLM

        self.device = walking_device()
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(read_config(directory), dtype=torch.float32)
        self._transposed = frozenset(f"{layer}.weight" for layer in linear_form(model))
        self.decoder: nn.Module = model.eval().requires_grad_(False).base_model
        self._embedding: nn.Module = model.get_input_embeddings()
        self._headers = read_headers(directory)
        self._prefixes = {module: f"{name}." if name else "" for name, module in model.named_modules()}
        self._stack = stack
        self.blocks = tuple(model.get_submodule(stack.name).children())
        self._require_names()

    def _require_names(self) -> None:
        prefix = self._prefixes[self.decoder]
        absent = [prefix + key for key in self.decoder.state_dict() if prefix + key not in self._headers]
        if absent:
            raise UnsupportedError(
                f"the checkpoint does not store {absent[0]} under its module's name ({len(absent)} such tensors); "
                "renamed checkpoints cannot be walked block by block: save the model again with transformers, or use method rtn"
            )

    def header(self, parameter: str) -> TensorHeader:
        """Return where a parameter of this name lies."""
        return self._headers[parameter]

    @contextmanager
    def resident(self, number: int) -> Iterator[nn.Module]:
        """Give block `number` its weights while the body runs."""
        block = self.blocks[number]
        self._materialise(block, device=self.device)
        torch.nn.Module.to(block, self.device)  # what is computed and not stored
        try:
            yield block
        finally:
            _forget(block)

    def layer(self, block: nn.Module, name: str) -> nn.Module:
        """Return the linear layer `name` of `block`."""
        return block.get_submodule(name.removeprefix(self._prefixes[block]))

    def local_name(self, block: nn.Module, name: str) -> str:
        """Return what `block` itself calls the weight of the linear layer `name`."""
        return f"{name.removeprefix(self._prefixes[block])}.weight"

    @torch.no_grad()
    def capture(self, sequences: Sequence[tuple[int, ...]], take: Callable[[int, torch.Tensor], None]) -> list[tuple[Call, ...]]:
        """Return each block's call for every sequence, [sequence][block]; `take(index, hidden)` gets [1, T, D] before block 0.

        Every block stands aside while what surrounds the stack runs. Sequences whose calls are equal share one.
        """
        for module in self.decoder.modules():
            if module is not self._embedding and module not in self.blocks and not self._in_blocks(module):
                self._materialise(module, recurse=False)
        self._materialise_rows(sorted({token for tokens in sequences for token in tokens}))
        found: list[tuple[Call, ...]] = []
        by_length: dict[int, list[tuple[Call, ...]]] = {}
        for index, tokens in enumerate(sequences):
            calls, hidden = self._calls_of(tokens)
            take(index, hidden)
            known = by_length.setdefault(len(tokens), [])
            twin = next((other for other in known if all(map(_same_call, other, calls))), None)
            if twin is None:
                known.append(calls)
            found.append(twin or calls)
        _forget(self.decoder)
        return found

    def _calls_of(self, tokens: tuple[int, ...]) -> tuple[tuple[Call, ...], torch.Tensor]:
        calls: list[Call] = []
        entering: list[torch.Tensor] = []

        def stand_in(hidden: torch.Tensor, *positional: object, **named: object) -> torch.Tensor:
            entering.append(hidden)
            places = {name: _moved(it, self.device) for name, it in named.items()}
            calls.append(Call(tuple(_moved(it, self.device) for it in positional), places))
            return hidden

        with _replaced(dict.fromkeys(self.blocks, stand_in)):
            self.decoder(input_ids=torch.tensor([tokens]), use_cache=False)
        return tuple(calls), entering[0]

    def _in_blocks(self, module: nn.Module) -> bool:
        return self._prefixes[module].startswith(f"{self._stack.name}.")

    def _materialise(self, module: nn.Module, *, recurse: bool = True, device: torch.device = CPU) -> None:
        """Load every stored tensor of a module, persistent buffers included."""
        prefix = self._prefixes[module]
        keys = [key for key in module.state_dict() if recurse or "." not in key]
        state = {key: self._read(prefix + key, device) for key in keys}
        module.load_state_dict(state, strict=recurse, assign=True)

    def _read(self, name: str, device: torch.device) -> torch.Tensor:
        """Return a stored tensor as the module of that name holds it."""
        tensor = read_tensor(self._headers[name]).to(device)
        if not tensor.is_floating_point():
            return tensor
        return tensor.float().T.contiguous() if name in self._transposed else tensor.float()

    def _materialise_rows(self, tokens: Sequence[int]) -> None:
        """Load the embedding's rows of `tokens`; the other rows are address space that nothing touches."""
        assert isinstance(self._embedding, nn.Embedding), "causal language models embed with torch.nn.Embedding"
        stored_VD = read_tensor(self._headers[f"{self._prefixes[self._embedding]}weight"])
        weight_VD = torch.empty(stored_VD.shape)
        weight_VD[list(tokens)] = stored_VD[list(tokens)].float()
        self._embedding.load_state_dict({"weight": weight_VD}, strict=False, assign=True)


def walking_device() -> torch.device:
    """Return where blocks run: on the GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def coarse_products() -> Iterator[None]:
    """Let a GPU multiply float32 matrices with 10 bits of mantissa while the body runs: eight times faster on an H100 or H200.

    States and moments are means over thousands of tokens, to which GPTQ adds 3 % of damping.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def run_block(block: nn.Module, hidden: torch.Tensor, call: Call) -> torch.Tensor:
    """Return the hidden states [1, T, D] that leave a block."""
    with torch.no_grad():
        result = block(hidden, *call.positional, **call.named)
    left: torch.Tensor = result if isinstance(result, torch.Tensor) else result[0]
    return left


def _moved(argument: object, device: torch.device) -> object:
    """Return an argument of a call with its tensors on a device, plain containers included."""
    if isinstance(argument, torch.Tensor):
        return argument.to(device)
    if type(argument) is tuple:
        return tuple(_moved(it, device) for it in argument)
    if type(argument) is dict:
        return {key: _moved(it, device) for key, it in argument.items()}
    return argument


def _forget(module: nn.Module) -> None:
    """Turn parameters back into shapes; buffers stay, for most are computed and not stored."""
    empty = {name: torch.empty_like(parameter, device="meta") for name, parameter in module.named_parameters()}
    module.load_state_dict(empty, strict=False, assign=True)


@contextmanager
def _replaced(forwards: Mapping[nn.Module, object]) -> Iterator[None]:
    """Let modules compute something else for a while; their own `forward` is the class's and is found again after."""
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module in forwards:
            del module.__dict__["forward"]


def _same_call(left: Call, right: Call) -> bool:
    return _same(left.positional, right.positional) and _same(left.named, right.named)


def _same(left: object, right: object) -> bool:
    """Return whether two arguments are equal, tensors by value."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left, right)
    if isinstance(left, tuple | list):
        return isinstance(right, tuple | list) and len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, dict):
        return isinstance(right, dict) and left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return left is right or bool(left == right)
