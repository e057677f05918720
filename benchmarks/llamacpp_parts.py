"""llama.cpp through its C interface, for benchmarks and tests: loads a GGUF file, tokenizes, gives logits, decodes rows.

`LLAMA_CPP_LIBRARY` names a folder with libllama and libggml: that of an installed llama-cpp-python, of a build, `bin` of the
wheel in `benchmarks/peers/llamacpp`, or `bins/linux-x64` of the npm package @node-llama-cpp/linux-x64.

Shape letters: B rows of a batch, T tokens, V vocabulary.
"""

import ctypes
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

LIBRARY = "LLAMA_CPP_LIBRARY"
PROMPT, NEW_TOKENS = 64, 48
VOCABULARY = 256
"""Prompts are random tokens below it."""
THREADS = 2


class _Batch(ctypes.Structure):
    """Source: llama.h, struct llama_batch."""

    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


class _Parameters(ctypes.Structure):
    """Parameters of a model or a context, larger than any version's: passed by value and last, so that the rest is not read.

    Source: llama.h, struct llama_context_params, for the fields at its beginning.
    """

    _fields_ = [
        ("n_ctx", ctypes.c_uint32),
        ("n_batch", ctypes.c_uint32),
        ("n_ubatch", ctypes.c_uint32),
        ("n_seq_max", ctypes.c_uint32),
        ("rest", ctypes.c_uint8 * 1008),
    ]


_AS_STATED = (512, 2048, 512, 1)
"""Source: llama.cpp, src/llama-context.cpp, llama_context_default_params: the first four fields."""


class LlamaFile:
    """One loaded GGUF file."""

    def __init__(self, llama: ctypes.CDLL, model: int):
        self._llama = llama
        self._model = ctypes.c_void_p(model)
        self._vocabulary = ctypes.c_void_p(llama.llama_model_get_vocab(self._model))
        self.num_tokens = int(llama.llama_vocab_n_tokens(self._vocabulary))

    def logits(self, tokens: Sequence[int], threads: int = 1) -> NDArray[np.float32]:
        """Return the logits [T, V] of every position of one row of at most 512 tokens."""
        with self._context(_AS_STATED[0], 1, threads) as context:
            return self._decode(context, [(tuple(tokens), 0, True)])

    def decode_rate(self, prompts_BT: NDArray[np.int64], num_new: int, threads: int) -> float:
        """Return tokens per second over all rows that greedy decoding gives once the prompts are read."""
        num_rows, length = prompts_BT.shape
        with self._context(num_rows * 2 ** (length + num_new).bit_length(), num_rows, threads) as context:
            logits_BV = self._decode(context, [(tuple(row), 0, False) for row in prompts_BT.tolist()])
            start = time.perf_counter()
            for position in range(length, length + num_new - 1):
                logits_BV = self._decode(context, [((int(row.argmax()),), position, False) for row in logits_BV])
            return float(num_rows * (num_new - 1) / (time.perf_counter() - start))

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens, with what the file says begins and ends a text; special tokens in the text are parsed."""
        raw = text.encode()
        room = (ctypes.c_int32 * (len(raw) + 8))()
        count = self._llama.llama_tokenize(self._vocabulary, raw, len(raw), room, len(room), True, True)
        return list(room[:count])

    def close(self) -> None:
        self._llama.llama_model_free(self._model)

    @contextmanager
    def _context(self, length: int, num_rows: int, threads: int) -> Iterator[ctypes.c_void_p]:
        """Yield a context of `length` tokens that `num_rows` share; keys and values in float16, as llama.cpp does by itself."""
        stated = self._llama.llama_context_default_params()
        if (found := (stated.n_ctx, stated.n_batch, stated.n_ubatch, stated.n_seq_max)) != _AS_STATED:
            raise SystemExit(
                f"this llama.cpp begins its parameters with {found}, not with {_AS_STATED}: its interface has changed"
            )
        stated.n_ctx, stated.n_seq_max = length, num_rows
        context = ctypes.c_void_p(self._llama.llama_init_from_model(self._model, stated))
        if not context:
            raise SystemExit(f"llama.cpp made no context of {length} tokens")
        self._llama.llama_set_n_threads(context, threads, threads)
        try:
            yield context
        finally:
            self._llama.llama_free(context)

    def _decode(self, context: ctypes.c_void_p, rows: Sequence[tuple[tuple[int, ...], int, bool]]) -> NDArray[np.float32]:
        """Read (tokens, first position, logits of all) of each row; return the logits of all tokens, or of each row's last."""
        batch = self._llama.llama_batch_init(sum(len(tokens) for tokens, _, _ in rows), 0, 1)
        at, wanted = 0, []
        for row, (tokens, first, every) in enumerate(rows):
            for offset, token in enumerate(tokens):
                batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.seq_id[at][0] = token, first + offset, 1, row
                batch.logits[at] = every or offset == len(tokens) - 1
                if batch.logits[at]:
                    wanted.append(at)
                at += 1
        batch.n_tokens = at
        status = self._llama.llama_decode(context, batch)
        if status != 0:
            raise SystemExit(f"llama.cpp did not read {at} tokens: llama_decode returned {status}")
        found = [np.ctypeslib.as_array(self._llama.llama_get_logits_ith(context, it), (self.num_tokens,)) for it in wanted]
        logits_TV = np.stack(found)
        self._llama.llama_batch_free(batch)
        return logits_TV


class LlamaLibrary:
    """libllama and libggml of one folder."""

    def __init__(self, folder: Path):
        self._llama, self._base = _load(folder)

    @property
    def system(self) -> str:
        """Return what the library was built for, e.g. `AVX2 = 1`."""
        return bytes(self._llama.llama_print_system_info()).decode()

    def open(self, file: Path) -> LlamaFile:
        model = self._llama.llama_model_load_from_file(str(file).encode(), self._llama.llama_model_default_params())
        if not model:
            raise SystemExit(f"llama.cpp does not load {file}")
        return LlamaFile(self._llama, int(model))

    def quantize(self, number: int, weight_RI: NDArray[np.float32], num_bytes: int) -> NDArray[np.uint8]:
        """Return llama.cpp's own rounding to a block type, all weights alike."""
        stored = np.empty(num_bytes, dtype=np.uint8)
        rows, width = weight_RI.shape
        self._base.ggml_quantize_chunk(
            ctypes.c_int(number), ctypes.c_void_p(weight_RI.ctypes.data), ctypes.c_void_p(stored.ctypes.data), ctypes.c_int64(0),
            ctypes.c_int64(rows), ctypes.c_int64(width), None,
        )  # fmt: skip
        return stored.reshape(rows, -1)


@cache
def _load(folder: Path) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    base, ggml, llama = (
        ctypes.CDLL(str(sorted(folder.glob(pattern))[0]), ctypes.RTLD_GLOBAL)
        for pattern in ("libggml-base*.so*", "libggml.*so*", "libllama.*so*")
    )
    quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
    llama.quiet = quiet  # type: ignore[attr-defined]  # kept alive as long as the library
    llama.llama_log_set(quiet, None)
    llama.llama_model_default_params.restype = _Parameters
    llama.llama_context_default_params.restype = _Parameters
    llama.llama_batch_init.restype = _Batch
    llama.llama_model_load_from_file.restype = ctypes.c_void_p
    llama.llama_init_from_model.restype = ctypes.c_void_p
    llama.llama_model_get_vocab.restype = ctypes.c_void_p
    llama.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)
    llama.llama_print_system_info.restype = ctypes.c_char_p
    llama.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _Parameters]
    llama.llama_init_from_model.argtypes = [ctypes.c_void_p, _Parameters]
    llama.llama_decode.argtypes = [ctypes.c_void_p, _Batch]
    llama.llama_batch_free.argtypes = [_Batch]
    llama.llama_get_logits_ith.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    ggml.ggml_backend_load_all_from_path(str(folder).encode())
    llama.llama_backend_init()
    return llama, base


def find_library() -> Path | None:
    """Return the folder that LLAMA_CPP_LIBRARY names, if it names one."""
    folder = os.environ.get(LIBRARY)
    return Path(folder) if folder else None


def llamacpp_arm(gguf: Path) -> Callable[[int], float]:
    """Return the arm of llama.cpp on one file: batch size -> decoded tokens per second over all rows.

    Two threads, a prompt of 64 random tokens before the clock, 48 new ones, greedy; keys and values in float16.

    Raises:
        SystemExit: LLAMA_CPP_LIBRARY is not set, or its library does not load the file.
    """
    folder = find_library()
    if folder is None:
        raise SystemExit(f"{LIBRARY} names no llama.cpp library; see benchmarks/peers/llamacpp/requirements.txt")
    opened = LlamaLibrary(folder).open(gguf)

    def run(batch: int) -> float:
        prompts_BT = np.random.default_rng(batch).integers(0, VOCABULARY, (batch, PROMPT))
        return opened.decode_rate(prompts_BT, NEW_TOKENS, THREADS)

    return run
