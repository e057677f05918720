"""How ONNX Runtime engines keep their cache: a new one beside the old at each step, or one that is written in place.

Shape letters: B rows, S new tokens, P cached plus new tokens, C columns that there is room for, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from model_optimizer.runtimes.decoder_model import ModelInput, stack_columns

if TYPE_CHECKING:
    import onnxruntime

CACHE = "cache"
"""Metadata key of the engine: how it keeps keys and values; left out: each step gives a new cache."""
IN_PLACE = "in_place"
MAX_POSITION = "max_position"
"""Metadata key of the engine: number of positions that it knows."""
DEVICE, CPU, CUDA = "device", "cpu", "cuda"
"""Metadata key of the engine and its values: what it is opened on; left out: the CPU."""
CUDA_COLUMNS = 256
"""Columns by which a cache on a GPU grows at least: what moves goes through this process's memory, so it shall move seldom."""
Cache = tuple["onnxruntime.OrtValue", ...]
"""Key and value of every layer in turn, each [B, KV heads, columns, head dimension]."""
_PAST, _PRESENT = "past_key_values.", "present."
_FLOAT16 = "tensor(float16)"


class _Session:
    """What both ways share: names and sizes of a session's tensors."""

    def __init__(self, session: "onnxruntime.InferenceSession", weight_bytes: int, device: str = CPU):
        """Take a session; its cache lies on `device`."""
        self._session = session
        self._weight_bytes = weight_bytes
        self._device = device
        self._past = [tensor.name for tensor in session.get_inputs() if tensor.name.startswith(_PAST)]
        self._present = [_PRESENT + name.removeprefix(_PAST) for name in self._past]
        shapes = {tensor.name: tensor.shape for tensor in session.get_inputs()}
        kinds = {tensor.type for tensor in session.get_inputs() if tensor.name in self._past}
        self._dtype = np.dtype(np.float16 if kinds == {_FLOAT16} else np.float32)
        self._heads = [(int(shapes[name][1]), int(shapes[name][3])) for name in self._past]
        self._vocab_size = int(next(tensor.shape[2] for tensor in session.get_outputs() if tensor.name == "logits"))

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def weight_bytes(self) -> int:
        return self._weight_bytes

    def close(self) -> None:
        """Drop session and weights."""
        self._session = cast("onnxruntime.InferenceSession", None)

    def _value(self, array: NDArray[np.generic]) -> "onnxruntime.OrtValue":
        """Return an array as a part of the cache."""
        return placed(array, self._device)

    def _zeros(self, rows: int, columns: int) -> Cache:
        """Return a cache of zeros."""
        return tuple(self._value(np.zeros((rows, heads, columns, dim), self._dtype)) for heads, dim in self._heads)

    def _bytes(self, parts: Cache) -> int:
        return sum(self._dtype.itemsize * int(np.prod(part.shape())) for part in parts)


class OrtModel(_Session):
    """An inference session with its own tensors as cache, a new one at each step."""

    def forward(self, batch: ModelInput, cache: Cache | None) -> tuple[NDArray[np.float32], Cache]:
        """Return logits from `logits_from` on and the grown cache."""
        past = self._zeros(len(batch.input_ids_BS), 0) if cache is None else cache
        feeds = {
            "input_ids": placed(batch.input_ids_BS),
            "attention_mask": placed(batch.attention_mask_BP),
            "position_ids": placed(batch.position_ids_BS),
            "logits_from": placed(np.array([batch.logits_from], np.int64)),
            **dict(zip(self._past, past, strict=True)),
        }
        logits, *present = self._session.run_with_ort_values(["logits", *self._present], feeds)
        return cast("NDArray[np.float32]", logits.numpy()), tuple(present)

    def select(self, cache: Cache, rows: Sequence[int], first_column: int) -> Cache:
        """Keep rows and the columns from `first_column` on."""
        return tuple(self._value(part.numpy()[list(rows), :, first_column:]) for part in cache)

    def join(self, caches: Sequence[Cache]) -> Cache:
        """Stack rows, padding shorter caches on the left with zeros."""
        return tuple(self._value(stack_columns([part.numpy() for part in parts])) for parts in zip(*caches, strict=True))

    def cache_bytes(self, cache: Cache) -> int:
        return self._bytes(cache)


class BoundOrtModel(OrtModel):
    """The same with each step's tensors bound to places, so that the cache stays on the device. No input may have a default."""

    def forward(self, batch: ModelInput, cache: Cache | None) -> tuple[NDArray[np.float32], Cache]:
        """Return logits from `logits_from` on and the grown cache."""
        past = self._zeros(len(batch.input_ids_BS), 0) if cache is None else cache
        binding = self._session.io_binding()
        for name, array in {
            "input_ids": batch.input_ids_BS,
            "attention_mask": batch.attention_mask_BP,
            "position_ids": batch.position_ids_BS,
            "logits_from": np.array([batch.logits_from], np.int64),
        }.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(array))
        for name, part in zip(self._past, past, strict=True):
            binding.bind_ortvalue_input(name, part)
        binding.bind_output("logits")
        for name in self._present:
            binding.bind_output(name, self._device)
        self._session.run_with_iobinding(binding)
        logits, *present = binding.get_outputs()
        return cast("NDArray[np.float32]", logits.numpy()), tuple(present)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Buffers:
    """Key and value of every layer in turn, each [B, KV heads, C, head dimension]; row b holds `lengths[b]` tokens from 0 on."""

    parts: Cache
    lengths: tuple[int, ...]

    @property
    def room(self) -> int:
        """Return the number of columns."""
        return int(self.parts[0].shape()[2])


class InPlaceOrtModel(_Session):
    """A session that writes new keys and values into the cache that it reads: rows start at column 0, nothing is copied.

    What the mask says of padding on the left is what the cache knows of each row's length, so the mask is not read.
    """

    def __init__(self, session: "onnxruntime.InferenceSession", weight_bytes: int, page_tokens: int, device: str = CPU):
        """Take a session; room grows by `page_tokens` columns at a time, on a GPU by `CUDA_COLUMNS` at least."""
        super().__init__(session, weight_bytes, device)
        self._page_tokens = page_tokens if device == CPU else -(-CUDA_COLUMNS // page_tokens) * page_tokens
        self._binding = session.io_binding()
        self._bound: Cache | None = None
        self._options: onnxruntime.RunOptions | None = None

    def forward(self, batch: ModelInput, cache: Buffers | None) -> tuple[NDArray[np.float32], Buffers]:
        """Return logits from `logits_from` on and the same buffers, longer; new ones where the room did not suffice.

        Rows that get several tokens at once have the same length, as prompts and pieces of scored texts have.
        """
        rows, new = batch.input_ids_BS.shape
        held = cache or Buffers(self._zeros(rows, self._rounded(new)), (0,) * rows)
        assert new == 1 or len(set(held.lengths)) == 1, f"rows of {held.lengths} tokens get {new} tokens at once"
        grown = tuple(length + new for length in held.lengths)
        parts = held.parts if max(grown) <= held.room else self._moved(held.parts, range(rows), self._rounded(max(grown)))
        ones_BP = (np.arange(max(grown)) < np.array(grown)[:, None]).astype(np.int64)
        self._bind(parts)
        for name, array in {
            "input_ids": batch.input_ids_BS,
            "attention_mask": ones_BP,
            "position_ids": batch.position_ids_BS,
            "logits_from": np.array([batch.logits_from], np.int64),
        }.items():
            self._binding.bind_cpu_input(name, np.ascontiguousarray(array))
        self._binding.bind_output("logits")
        self._session.run_with_iobinding(self._binding, self._options)
        logits = self._binding.get_outputs()[0].numpy()
        return cast("NDArray[np.float32]", logits), Buffers(parts, grown)

    def select(self, cache: Buffers, rows: Sequence[int], first_column: int) -> Buffers:
        """Keep rows; there is no padding on the left to cut off."""
        lengths = tuple(cache.lengths[row] for row in rows)
        return Buffers(self._moved(cache.parts, rows, self._rounded(max(lengths))), lengths)

    def join(self, caches: Sequence[Buffers]) -> Buffers:
        """Stack rows, each with as much room as the longest needs."""
        room = max(cache.room for cache in caches)
        parts = tuple(
            self._value(np.concatenate([with_room(part.numpy(), room) for part in layer]))
            for layer in zip(*[cache.parts for cache in caches], strict=True)
        )
        return Buffers(parts, sum((cache.lengths for cache in caches), ()))

    def cache_bytes(self, cache: Buffers) -> int:
        """Return the bytes of the buffers, their room included."""
        return self._bytes(cache.parts)

    def close(self) -> None:
        """Drop session, bindings and weights."""
        super().close()
        self._binding, self._bound = cast("onnxruntime.IOBinding", None), None

    def _bind(self, parts: Cache) -> None:
        """Say that the buffers are both read and written, unless they are bound already."""
        if parts is self._bound:
            return
        self._binding.clear_binding_outputs()
        self._binding.bind_output("logits")
        for past, present, part in zip(self._past, self._present, parts, strict=True):
            self._binding.bind_ortvalue_input(past, part)
            self._binding.bind_ortvalue_output(present, part)
        self._bound = parts

    def _rounded(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_tokens) * self._page_tokens

    def _moved(self, parts: Cache, rows: Sequence[int], room: int) -> Cache:
        return tuple(self._value(with_room(part.numpy()[list(rows)], room)) for part in parts)


def with_room(part: NDArray[np.float32], room: int) -> NDArray[np.float32]:
    """Return rows with `room` columns: cut, or filled with zeros."""
    kept = part[:, :, :room]
    return np.pad(kept, ((0, 0), (0, 0), (0, room - kept.shape[2]), (0, 0)))


def placed(array: NDArray[np.generic], device: str = CPU) -> "onnxruntime.OrtValue":
    """Return an array as a tensor on a device."""
    import onnxruntime

    return onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array), device, 0)
