"""Tiny random models with a tokenizer that llama.cpp reads, and llama.cpp itself where `LLAMA_CPP_LIBRARY` names its library."""

from contextlib import closing
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

from benchmarks.llamacpp_parts import LIBRARY, LlamaLibrary, find_library
from model_optimizer.models.tiny import CHAT_TEMPLATE, SPECIALS

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


class LlamaCpp:
    """llama.cpp on files that are opened for one question each."""

    def __init__(self, library: LlamaLibrary):
        self._library = library

    def logits(self, file: Path, tokens: list[int]) -> NDArray[np.float32]:
        """Return the logits [T, V] of every position."""
        with closing(self._library.open(file)) as opened:
            return opened.logits(tokens)

    def tokenize(self, file: Path, text: str) -> list[int]:
        """Return the tokens, with what the file says begins and ends a text; special tokens in the text are parsed."""
        with closing(self._library.open(file)) as opened:
            return opened.tokenize(text)

    def quantize(self, number: int, weight_RI: NDArray[np.float32], num_bytes: int) -> NDArray[np.uint8]:
        """Return llama.cpp's own rounding to a block type, all weights alike."""
        return self._library.quantize(number, weight_RI, num_bytes)


@pytest.fixture(scope="session", name="llama_cpp")
def provide_llama_cpp() -> LlamaCpp:
    """llama.cpp, or a skip that says how to have it."""
    if (folder := find_library()) is None:
        pytest.skip(f"{LIBRARY} names no llama.cpp library")
    return LlamaCpp(LlamaLibrary(folder))
