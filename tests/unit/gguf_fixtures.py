"""Tiny random models with a tokenizer that llama.cpp reads, and llama.cpp itself where its library is named.

`LLAMA_CPP_LIBRARY` names a folder with libllama and libggml: that of an installed llama-cpp-python, of a build, or
`bins/linux-x64` of the npm package @node-llama-cpp/linux-x64.
"""

import ctypes
import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from model_optimizer.models.tiny import CHAT_TEMPLATE, SPECIALS

LIBRARY = "LLAMA_CPP_LIBRARY"
TEXT = "the quiet river carries seven copper lamps past the garden window; bread and paper wait in the north, 1234 tickets.\n"
SIZES = {
    "vocab_size": 320, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 3, "bos_token_id": 0, "eos_token_id": 2,
    "initializer_range": 0.1,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama3": LlamaConfig(**SIZES, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE, attention_bias=True),
    "mistral": MistralConfig(**SIZES, tie_word_embeddings=False, head_dim=32, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=False),
}


def write_model(config: PreTrainedConfig, directory: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write a random checkpoint whose norms and biases are no identities, and a trained byte-level BPE tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            elif name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.2)
    model.to(dtype).save_pretrained(directory)
    write_bpe_tokenizer(directory)
    return directory


def write_bpe_tokenizer(directory: Path) -> None:
    """Write a tokenizer of 310 tokens in SmolLM's manner, of which the first four are special."""
    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=310, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|im_end|>", pad_token="<pad>", model_max_length=256
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)


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
    """Parameters of a model or a context, larger than any version's: only defaults are passed through, by value and last."""

    _fields_ = [("content", ctypes.c_uint8 * 1024)]


class LlamaCpp:
    """llama.cpp through its C interface: loads a file, tokenizes, gives logits."""

    def __init__(self, folder: Path):
        self._llama, self.ggml = _load(folder)

    def logits(self, file: Path, tokens: list[int]) -> NDArray[np.float32]:
        """Return the logits [T, V] of every position."""
        model = self._model(file)
        context = self._llama.llama_init_from_model(ctypes.c_void_p(model), self._llama.llama_context_default_params())
        assert context, "llama.cpp made no context"
        self._llama.llama_set_n_threads(ctypes.c_void_p(context), 1, 1)
        batch = self._llama.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for at, token in enumerate(tokens):
            batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.logits[at] = token, at, 1, 1
            batch.seq_id[at][0] = 0
        assert self._llama.llama_decode(ctypes.c_void_p(context), batch) == 0
        width = self._llama.llama_vocab_n_tokens(ctypes.c_void_p(self._llama.llama_model_get_vocab(ctypes.c_void_p(model))))
        rows = [self._llama.llama_get_logits_ith(ctypes.c_void_p(context), at) for at in range(len(tokens))]
        found = np.stack([np.ctypeslib.as_array(row, (width,)).copy() for row in rows])
        self._llama.llama_free(ctypes.c_void_p(context))
        self._llama.llama_model_free(ctypes.c_void_p(model))
        return found

    def tokenize(self, file: Path, text: str) -> list[int]:
        """Return the tokens, with what the file says begins and ends a text; special tokens in the text are parsed."""
        model, raw = self._model(file), text.encode()
        vocabulary = ctypes.c_void_p(self._llama.llama_model_get_vocab(ctypes.c_void_p(model)))
        room = (ctypes.c_int32 * (len(raw) + 8))()
        count = self._llama.llama_tokenize(vocabulary, raw, len(raw), room, len(room), True, True)
        self._llama.llama_model_free(ctypes.c_void_p(model))
        return list(room[:count])

    def _model(self, file: Path) -> int:
        model = self._llama.llama_model_load_from_file(str(file).encode(), self._llama.llama_model_default_params())
        assert model, f"llama.cpp does not load {file}"
        return int(model)

    def quantize(self, number: int, weight_RI: NDArray[np.float32], num_bytes: int) -> NDArray[np.uint8]:
        """Return llama.cpp's own rounding to a block type, all weights alike."""
        stored = np.empty(num_bytes, dtype=np.uint8)
        rows, width = weight_RI.shape
        self.ggml.ggml_quantize_chunk(
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
    llama.quiet = quiet  # kept alive as long as the library
    llama.llama_log_set(quiet, None)
    ggml.ggml_backend_load_all_from_path(str(folder).encode())
    for name, kind in {
        "llama_model_default_params": _Parameters,
        "llama_context_default_params": _Parameters,
        "llama_batch_init": _Batch,
        "llama_model_load_from_file": ctypes.c_void_p,
        "llama_init_from_model": ctypes.c_void_p,
        "llama_model_get_vocab": ctypes.c_void_p,
        "llama_get_logits_ith": ctypes.POINTER(ctypes.c_float),
    }.items():
        getattr(llama, name).restype = kind
    llama.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _Parameters]
    llama.llama_init_from_model.argtypes = [ctypes.c_void_p, _Parameters]
    llama.llama_decode.argtypes = [ctypes.c_void_p, _Batch]
    llama.llama_get_logits_ith.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    llama.llama_backend_init()
    return llama, base


@pytest.fixture(scope="session", name="llama_cpp")
def provide_llama_cpp() -> LlamaCpp:
    """llama.cpp, or a skip that says how to have it."""
    if not (folder := os.environ.get(LIBRARY)):
        pytest.skip(f"{LIBRARY} names no llama.cpp library")
    return LlamaCpp(Path(folder))
