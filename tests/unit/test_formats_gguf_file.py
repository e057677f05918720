"""A whole GGUF file: read by transformers and by our import, by llama.cpp where it is at hand; mixture, resume, refusals."""

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from architecture_fixtures import FAMILIES, write_architecture
from gguf import GGUFReader
from gguf_fixtures import MODELS, TEXT, LlamaCpp, provide_llama_cpp, write_model  # noqa: F401  (a fixture)
from transformers import AutoModelForCausalLM, AutoTokenizer

from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.formats.gguf import writer
from model_optimizer.formats.gguf.architecture import paired_rows, read_decoder, rope_factors
from model_optimizer.formats.gguf.recipes import choose, recipe_named, takes_more_bits
from model_optimizer.formats.gguf.registry import BLOCKS
from model_optimizer.formats.gguf.vocabulary import read_vocabulary
from model_optimizer.formats.gguf.writer import GgufJob, planned_types, write_gguf
from model_optimizer.models.gguf_import import gguf_inputs, import_gguf, read_gguf
from model_optimizer.models.sources import CheckpointSource
from model_optimizer.protocols import Quiet, T

PROMPT = f"{TEXT}<|im_start|>user 42 Größe 模型"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_model(config, root / name) for name, config in MODELS.items()}


def job(model: Path, recipe: str) -> GgufJob:
    return GgufJob(model, CheckpointSource(model), "digest", recipe, "tiny")


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_transformers_reads_the_weights_that_were_stored(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    """Exactly the source in F32; in Q4_K_M the rows that our own reading gives, in the source's order."""
    headers = CheckpointSource(models[name])
    for recipe in ("f32", "q4_k_m"):
        summary = write_gguf(job(models[name], recipe), tmp_path / f"{recipe}.gguf", progress=Quiet())
        read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=f"{recipe}.gguf", dtype=torch.float32).state_dict()
        assert sum(summary.types.values()) == len(headers.headers)
        planned = {it.place.source: it for it in writer._plan(headers.headers, recipe_named(recipe), read_decoder(models[name]))}
        for source, tensor in planned.items():
            whole = headers.rows(source, 0, tensor.shape[0]).float().numpy()
            block = BLOCKS.get(tensor.choice.type)
            expected = block.dequantize(block.quantize(whole.reshape(-1, tensor.shape[-1]))).reshape(whole.shape)
            assert np.array_equal(read[source].numpy(), expected), (recipe, source, tensor.choice)


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_what_transformers_does(
    name: str, models: dict[str, Path], tmp_path: Path, llama_cpp: LlamaCpp
) -> None:
    tokens = AutoTokenizer.from_pretrained(models[name]).encode(PROMPT)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(models[name])(torch.tensor([tokens])).logits[0].log_softmax(-1)
    for recipe, bound in (("f32", 1e-5), ("q8_0", 0.02), ("q6_k", 0.1), ("q4_k_m", 0.8), ("q4_0", 1.0)):
        file = tmp_path / f"{recipe}.gguf"
        write_gguf(job(models[name], recipe), file, progress=Quiet())
        found = torch.from_numpy(llama_cpp.logits(file, tokens)).log_softmax(-1)
        assert float((expected.exp() * (expected - found)).sum(-1).mean()) < bound, recipe
        if recipe == "f32":
            assert torch.equal(expected.argmax(-1), found.argmax(-1))
            assert llama_cpp.tokenize(file, PROMPT) == tokens


def test_import_gives_back_weights_and_tokenizer(models: dict[str, Path], tmp_path: Path) -> None:
    write_gguf(job(models["llama"], "f32"), tmp_path / "tiny.gguf", progress=Quiet())
    facts = read_gguf(tmp_path / "tiny.gguf")
    assert (facts.pre_tokenizer, facts.bos_id, facts.eos_id, facts.pad_id, facts.context_length) == ("smollm", 0, 2, 3, 256)
    assert facts.tokens[310:] == tuple(f"[PAD{index}]" for index in range(310, 320)) and facts.token_types[:5] == (3, 3, 3, 3, 1)
    (tmp_path / "imported").mkdir()
    import_gguf(gguf_inputs(tmp_path / "tiny.gguf"), tmp_path / "imported", progress=Quiet())
    back = tmp_path / "imported" / "model"
    left, right = (AutoTokenizer.from_pretrained(directory) for directory in (models["llama"], back))
    assert left.encode(PROMPT) == right.encode(PROMPT) and left.chat_template == right.chat_template
    source, found = CheckpointSource(models["llama"]), CheckpointSource(back)
    assert source.headers.keys() == found.headers.keys()
    for name, header in source.headers.items():
        assert torch.equal(source.rows(name, 0, header.shape[0]), found.rows(name, 0, header.shape[0])), name


def test_write_gguf_states_what_the_mixture_is(models: dict[str, Path], tmp_path: Path) -> None:
    summary = write_gguf(job(models["mistral"], "q4_k_m"), tmp_path / "m.gguf", progress=Quiet())
    reader = GGUFReader(tmp_path / "m.gguf")
    fields = {name: reader.fields[name].contents() for name in reader.fields}
    assert (fields["general.file_type"], fields["general.architecture"], fields["llama.attention.key_length"]) == (
        15,
        "llama",
        32,
    )
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["output.weight"] == types["blk.2.ffn_down.weight"] == types["blk.2.attn_v.weight"] == "Q6_K"
    assert types["token_embd.weight"] == types["blk.0.ffn_down.weight"] == "Q4_K" and types["blk.0.attn_norm.weight"] == "F32"
    assert summary.warnings == ("3 tensors are Q5_0 instead of Q4_K: rows of 128 are not divisible by 256",)
    assert planned_types(models["mistral"], "q4_k_m")[1] == sum(int(tensor.n_bytes) for tensor in reader.tensors)


class Killed(BaseException):
    """Stands for SIGKILL."""


class KillAt(Quiet):
    """Stop the world before tensor `count`."""

    def __init__(self, count: int):
        self.count = count

    def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        for index, item in enumerate(items):
            if index == self.count:
                raise Killed
            yield item


def test_write_gguf_continues_after_a_kill_with_the_same_bytes(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = job(models["qwen2"], "q6_k")
    write_gguf(wanted, tmp_path / "whole.gguf", progress=Quiet())
    with pytest.raises(Killed):
        write_gguf(wanted, tmp_path / "cut.gguf", progress=KillAt(7))
    assert not (tmp_path / "cut.gguf").exists()
    part = tmp_path / "cut.gguf.part"
    content = bytearray(part.read_bytes())
    content[-40] ^= 255  # damage in the last finished tensor
    part.write_bytes(content)
    made: list[str] = []
    pieces = writer._pieces
    monkeypatch.setattr(writer, "_pieces", lambda job, tensor: made.append(tensor.place.name) or pieces(job, tensor))
    write_gguf(wanted, tmp_path / "cut.gguf", progress=Quiet())
    assert len(made) == len(wanted.source.headers) - 6
    assert (tmp_path / "cut.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.gguf", "whole.gguf"]


def test_importance_changes_only_the_layers_it_names(models: dict[str, Path], tmp_path: Path) -> None:
    layer = "model.layers.1.mlp.up_proj"
    importance = {layer: np.linspace(0.01, 4, 256, dtype=np.float32)}
    plain = job(models["llama"], "q4_k_m")
    for name, wanted in (("plain", plain), ("weighed", replace(plain, importance=importance))):
        write_gguf(wanted, tmp_path / f"{name}.gguf", progress=Quiet())
    left, right = (GGUFReader(tmp_path / f"{name}.gguf").tensors for name in ("plain", "weighed"))
    changed = [one.name for one, other in zip(left, right, strict=True) if not np.array_equal(one.data, other.data)]
    assert changed == ["blk.1.ffn_up.weight"]


def test_choose_follows_llama_cpp_in_a_model_of_32_blocks() -> None:
    more = [block for block in range(32) if takes_more_bits(block, 32)]
    assert more == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    recipe = recipe_named("Q4_K_M")
    shape = (1024, 4096)
    assert [choose(recipe, f"blk.{block}.ffn_down.weight", shape, 32, False).type for block in (3, 4)] == ["Q6_K", "Q4_K"]
    assert choose(recipe, "blk.40.attn_v.weight", shape, 80, False).type == "Q5_K"
    assert choose(recipe, "blk.0.attn_q.weight", shape, 32, False).type == "Q4_K"
    assert choose(recipe, "token_embd.weight", shape, 32, True).type == "Q6_K"
    assert choose(recipe_named("q4_0"), "output.weight", shape, 32, False).type == "Q6_K"


@pytest.mark.parametrize(
    ("wanted", "width", "expected"),
    [("blk.9.ffn_up.weight", 576, "Q5_0"), ("output.weight", 576, "Q8_0"), ("blk.9.ffn_up.weight", 100, "F16")],
)
def test_choose_falls_back_when_rows_do_not_fit(wanted: str, width: int, expected: str) -> None:
    assert choose(recipe_named("q4_k_m"), wanted, (64, width), 30, False).type == expected


def test_rope_factors_equal_those_of_transformers(models: dict[str, Path]) -> None:
    factors = rope_factors(read_decoder(models["llama3"]))
    model = AutoModelForCausalLM.from_pretrained(models["llama3"])
    plain = 10000.0 ** (-np.arange(0, 64, 2) / 64)
    assert factors == pytest.approx(plain / model.model.rotary_emb.inv_freq.numpy(), rel=1e-5)
    assert factors is not None and factors[0] == 1 and factors[-1] == pytest.approx(8)
    assert rope_factors(read_decoder(models["llama"])) is None


def test_paired_rows_turns_halves_into_neighbours() -> None:
    assert paired_rows(8, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_sliding_window_limits_the_context(models: dict[str, Path], tmp_path: Path) -> None:
    model = shutil.copytree(models["mistral"], tmp_path / "m")
    config = json.loads((model / "config.json").read_bytes()) | {"sliding_window": 100}
    (model / "config.json").write_text(json.dumps(config))
    summary = write_gguf(job(model, "q8_0"), tmp_path / "m.gguf", progress=Quiet())
    assert read_gguf(tmp_path / "m.gguf").context_length == 100 and "stated as 100" in summary.warnings[0]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            '"individual_digits": true',
            '"individual_digits": false',
            r"\(Digits False; ByteLevel True\) has no exact name",
        ),
        ('"ignore_merges": false', '"ignore_merges": true', "ignore_merges True is not what llama.cpp does for 'smollm'"),
        ('"type": "BPE"', '"type": "WordPiece"', "WordPiece"),
    ],
)
def test_read_vocabulary_refuses_what_has_no_exact_name(
    old: str, new: str, message: str, models: dict[str, Path], tmp_path: Path
) -> None:
    text = (models["llama"] / "tokenizer.json").read_text(encoding="utf-8")
    text = json.dumps(json.loads(text), ensure_ascii=False)
    assert old in text
    (tmp_path / "tokenizer.json").write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(UnsupportedError, match=message):
        read_vocabulary(tmp_path, 320)


@pytest.mark.parametrize(
    ("family", "message"), [("gemma3", "gemma3_text.*covered: llama, mistral, qwen2, qwen3"), ("llama", "no merges")]
)
def test_write_gguf_refuses_before_it_writes(family: str, message: str, tmp_path: Path) -> None:
    model = write_architecture(FAMILIES[family](True), tmp_path / "model")
    (tmp_path / "out").mkdir()
    with pytest.raises(UnsupportedError, match=message):
        write_gguf(job(model, "q8_0"), tmp_path / "out" / "m.gguf", progress=Quiet())
    assert not [path for path in (tmp_path / "out").iterdir() if path.suffix in (".gguf", ".part")]


def test_write_gguf_names_the_known_recipes(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown GGUF recipe 'q9'; known: f16, f32, q4_0, q4_k_m, q6_k, q8_0"):
        write_gguf(job(models["llama"], "q9"), tmp_path / "m.gguf", progress=Quiet())
