"""llama.cpp's own server behind our runtime, where one is at hand: its answers held against transformers', and its refusals.

`llama-server` is taken from the folder that `LLAMA_CPP_LIBRARY` names, else from PATH.
"""

import shutil
from pathlib import Path

import pytest
import torch
from gguf_fixtures import MODELS, TEXT, write_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.llamacpp_parts import LIBRARY, find_library
from model_optimizer.artifacts.base import Tree
from model_optimizer.artifacts.compiled import Engine
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.errors import UnsupportedError
from model_optimizer.formats.gguf.writer import GgufJob, write_gguf
from model_optimizer.models.sources import CheckpointSource
from model_optimizer.protocols import GenerationRequest, LogitsRuntime, Quiet, RequestId
from model_optimizer.runtimes.managed.spelling import held_tokens, read_spellings
from model_optimizer.runtimes.options import TUNABLES, ManagedOptions, RuntimeOptions

PLAN = KvPlan(page_tokens=16, num_pages=64, bytes_per_token=1, max_batch=2, max_model_len=128)
ENGINE = Engine(runtime="llamacpp", directory=".", num_bytes=1, framework_version="as installed")


@pytest.fixture(scope="module")
def program() -> Path:
    """llama-server, or a skip that says how to have it."""
    folder = find_library()
    if folder is not None and (folder / "llama-server").is_file():
        return folder / "llama-server"
    if (found := shutil.which("llama-server")) is None:
        pytest.skip(f"no llama-server in PATH or where {LIBRARY} points")
    return Path(found)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with config, weights and one GGUF file, whose greedy answers are ASCII: the server ends others early."""
    directory = write_model(MODELS["mistral"], tmp_path_factory.mktemp("llamacpp") / "model")
    weights = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with torch.no_grad():
        for token in range(weights.config.vocab_size):
            text = tokenizer.decode([token])
            if not (text.isascii() and text.isprintable()) or token < 4 or token >= 310:
                weights.lm_head.weight[token] = 0
    weights.save_pretrained(directory)
    job = GgufJob(directory, CheckpointSource(directory), Tree.of(directory).digest, "f32", "tiny")
    write_gguf(job, directory / "tiny-f32.gguf", progress=Quiet())
    return directory


def opened(directory: Path, options: ManagedOptions) -> LogitsRuntime:
    return TUNABLES.get("llamacpp").tuned(RuntimeOptions(managed=options)).open(ENGINE, directory, PLAN)


def test_the_server_gives_the_greedy_tokens_and_log_probabilities_of_transformers(model: Path, program: Path) -> None:
    tokens = AutoTokenizer.from_pretrained(model).encode(TEXT)
    asked = {0: (tokens[:20], 12), 1: (tokens[3:10], 9)}
    runtime = opened(model, ManagedOptions(command=program, arguments=("--threads", "1")))
    try:
        names = {runtime.submit(GenerationRequest(tuple(prompt), count)): key for key, (prompt, count) in asked.items()}
        answers: dict[int, list[tuple[int, float]]] = {0: [], 1: []}
        while events := runtime.step():
            for event in events:
                answers[names[RequestId(event.request)]].append((event.token, event.log_prob))
        assert runtime.facts.name == "llamacpp" and runtime.facts.version != "unknown"
        assert runtime.memory().process_bytes > 10_000_000
    finally:
        runtime.close()
    reference = AutoModelForCausalLM.from_pretrained(model)
    for key, (prompt, count) in asked.items():
        found = [token for token, _ in answers[key]]
        assert len(found) == count
        with torch.inference_mode():
            logits_TV = reference(torch.tensor([prompt + found])).logits[0, len(prompt) - 1 : -1]
        assert logits_TV.argmax(-1).tolist() == found
        expected = logits_TV.log_softmax(-1)[torch.arange(count), found]
        assert (expected - torch.tensor([log_prob for _, log_prob in answers[key]])).abs().max() < 0.01  # 0.004 seen


def test_tokens_that_the_server_holds_back_until_a_character_is_whole_are_told(program: Path, tmp_path: Path) -> None:
    """A chain of bigrams: each token's embedding is a direction of its own, and nothing but the head reads it."""
    directory = write_model(MODELS["mistral"], tmp_path / "chain")
    chain = AutoTokenizer.from_pretrained(directory).encode("a😀é", add_special_tokens=False)
    assert len(chain) == 1 + 4 + 2  # bytes: none was merged
    weights = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        for name, parameter in weights.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight", "lm_head.weight")):
                parameter.zero_()
        for at, token in enumerate(chain):
            weights.model.embed_tokens.weight[token, at] = 1
            weights.lm_head.weight[chain[(at + 1) % len(chain)], at] = 1
    weights.save_pretrained(directory)
    job = GgufJob(directory, CheckpointSource(directory), Tree.of(directory).digest, "f32", "chain")
    write_gguf(job, directory / "chain.gguf", progress=Quiet())
    runtime = opened(directory, ManagedOptions(command=program, arguments=("--threads", "1")))
    try:
        for count in (1, 3, 4, 5, 13):  # ends within, at the end of and after a character
            runtime.submit(GenerationRequest((chain[0],), count))
            events = []
            while found := runtime.step():
                events += found
            assert [event.token for event in events] == [chain[(1 + at) % len(chain)] for at in range(count)]
            assert [event.finished for event in events] == [False] * (count - 1) + [True]
    finally:
        runtime.close()


def test_held_tokens_spell_what_comes_before_the_last() -> None:
    smiley = "😀".encode()
    spellings = {smiley[:2]: 10813, smiley[2:3]: 242, smiley[3:]: 218, smiley[:1]: 7, b"a": 81}
    assert held_tokens(smiley, 218, 2, spellings) == (10813, 242)
    assert held_tokens(b"a" + smiley, 218, 3, spellings) == (81, 10813, 242)
    assert held_tokens(smiley, 218, 2, spellings | {smiley[1:3]: 8}) == (10813, 242)  # the longer first token
    assert held_tokens(smiley, 218, 1, spellings) is None and held_tokens(smiley, 5, 2, spellings) is None


def test_read_spellings_gives_every_token_by_its_bytes(model: Path) -> None:
    spellings, tokenizer = read_spellings(model), AutoTokenizer.from_pretrained(model)
    for text in ("the quiet river", "1234 tickets;\n", "é😀中"):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        by_token = {token: spelled for spelled, token in spellings.items()}
        assert b"".join(by_token[token] for token in tokens) == text.encode()
    assert len(spellings) == 306  # 310 without the special ones
    assert read_spellings(model.parent) == {}


def test_a_file_that_is_no_gguf_ends_with_what_the_server_said(program: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(UnsupportedError, match=r"llama-server ended with \d+; its last words: .*; see managed.log"):
        opened(tmp_path, ManagedOptions(command=program))


def test_no_program_names_what_to_install_and_where_to_say_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        UnsupportedError,
        match=r"llama-server is not in PATH; build it \(`cmake .*`.*\) or take .*, and name it in managed.command",
    ):
        opened(tmp_path, ManagedOptions())
    with pytest.raises(UnsupportedError, match=r"managed.command /nowhere/llama-server is no file; build it"):
        opened(tmp_path, ManagedOptions(command=Path("/nowhere/llama-server")))
