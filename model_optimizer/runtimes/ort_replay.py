"""Steps of one token per row on a GPU, recorded once for each number of rows and columns and replayed from then on.

Launching some 300 kernels one by one takes the CPU longer than the GPU needs for them. What is recorded reads and writes the same
places each time, so every recording owns a cache, inputs and logits, and a cache that comes from elsewhere moves in. The mask is
as wide as the cache, so that shapes stay, too.
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from model_optimizer.runtimes.decoder_model import ModelInput
from model_optimizer.runtimes.ort_models import CUDA, Buffers, Cache, InPlaceOrtModel, placed, with_room

if TYPE_CHECKING:
    import onnxruntime

GRAPH = "gpu_graph_id"
"""Entry of a run's options: which recording is made or replayed; `UNRECORDED`: none. Source: ONNX Runtime, CUDA provider."""
UNRECORDED = "-1"
MOST_RECORDINGS = 16
"""Beyond it the one that was used least lately goes, if no cache lives in it: each holds a cache's memory."""


@dataclass(slots=True, eq=False)
class _Recording:
    """One recorded step: what is bound, and which cache lives in `parts` now."""

    binding: "onnxruntime.IOBinding"
    options: "onnxruntime.RunOptions"
    parts: Cache
    input_ids: "onnxruntime.OrtValue"
    mask: "onnxruntime.OrtValue"
    logits: "onnxruntime.OrtValue"
    kept: tuple["onnxruntime.OrtValue", ...] = ()
    """Bound and never changed."""
    owner: "weakref.ref[Buffers] | None" = field(default=None)

    @property
    def shape(self) -> tuple[int, int]:
        """Return rows and columns."""
        rows, _, room, _ = self.parts[0].shape()
        return int(rows), int(room)

    @property
    def free(self) -> bool:
        """Say whether no cache lives here any more."""
        return self.owner is None or self.owner() is None


class ReplayedOrtModel(InPlaceOrtModel):
    """A session on a GPU whose decode steps are recorded; prompts run as they do everywhere."""

    def __init__(self, session: "onnxruntime.InferenceSession", weight_bytes: int, page_tokens: int, device: str = CUDA):
        """Take a session that was opened for recordings."""
        super().__init__(session, weight_bytes, page_tokens, device)
        self._recordings: list[_Recording] = []
        """Latest use last."""
        self._numbers: Iterator[int] = count(1)
        self._options = _options(UNRECORDED)

    def forward(self, batch: ModelInput, cache: Buffers | None) -> tuple[NDArray[np.float32], Buffers]:
        """Return logits from `logits_from` on and the same buffers, longer; those of a recording after one token per row."""
        rows, new = batch.input_ids_BS.shape
        if cache is None or new > 1:
            logits, held = super().forward(batch, cache)
            for recording in (it for it in self._recordings if it.parts is held.parts):
                recording.owner = weakref.ref(held)
            return logits, held
        grown = tuple(length + 1 for length in cache.lengths)
        recording = self._recording(rows, max(self._rounded(max(grown)), cache.room), cache)
        recording.input_ids.update_inplace(np.ascontiguousarray(batch.input_ids_BS))
        room = int(recording.parts[0].shape()[2])
        recording.mask.update_inplace((np.arange(room) < np.array(grown)[:, None]).astype(np.int64))
        self._session.run_with_iobinding(recording.binding, recording.options)
        held = Buffers(recording.parts, grown)
        recording.owner = weakref.ref(held)
        return cast("NDArray[np.float32]", recording.logits.numpy()), held

    def close(self) -> None:
        """Drop session, bindings, recordings and weights."""
        self._recordings.clear()
        super().close()

    def _recording(self, rows: int, room: int, cache: Buffers) -> _Recording:
        """Return the recording in which the cache lives; it moves in where it does not live in one yet."""
        fitting = [it for it in self._recordings if it.shape == (rows, room)]
        found = next((it for it in fitting if it.parts is cache.parts), None)
        if found is None:
            found = next((it for it in fitting if it.free), None) or self._new(rows, room)
            for place, part in zip(found.parts, cache.parts, strict=True):
                place.update_inplace(np.ascontiguousarray(with_room(part.numpy(), room)))
        kept = [it for it in self._recordings if it is not found]
        surplus = next((it for it in kept if it.free), None) if len(kept) >= MOST_RECORDINGS else None
        self._recordings = [it for it in kept if it is not surplus] + [found]
        return found

    def _new(self, rows: int, room: int) -> _Recording:
        binding, parts = self._session.io_binding(), self._zeros(rows, room)
        input_ids, mask, positions = (placed(np.zeros((rows, width), np.int64), self._device) for width in (1, room, 1))
        first, logits = placed(np.zeros(1, np.int64)), placed(np.zeros((rows, 1, self._vocab_size), np.float32), self._device)
        for name, value in {
            "input_ids": input_ids,
            "attention_mask": mask,
            "position_ids": positions,
            "logits_from": first,
        }.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output("logits", logits)
        for past, present, part in zip(self._past, self._present, parts, strict=True):
            binding.bind_ortvalue_input(past, part)
            binding.bind_ortvalue_output(present, part)
        options = _options(str(next(self._numbers)))
        return _Recording(binding, options, parts, input_ids, mask, logits, (positions, first))


def _options(graph: str) -> "onnxruntime.RunOptions":
    import onnxruntime

    options = onnxruntime.RunOptions()
    options.add_run_config_entry(GRAPH, graph)
    return options
