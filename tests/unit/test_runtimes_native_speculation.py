"""A draft model changes how many steps a request takes, never its tokens."""

from pathlib import Path

import pytest
import torch
from native_fixtures import generate, greedy, kv_plan
from safetensors.torch import load_file, save_file

from model_optimizer.errors import ConfigError
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.models.tiny import write_tiny_llama
from model_optimizer.protocols import GenerationRequest, Sampling
from model_optimizer.runtimes.torch.config import NativeOptions
from model_optimizer.runtimes.torch.engine import NativeRuntime, open_native

PROMPTS = ((5, 6, 7), (100,), tuple(range(10, 40)), (9, 8, 7, 6, 5, 4, 3, 2))


@pytest.fixture(scope="module")
def near(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model itself with a little noise: often right, not always."""
    directory = tmp_path_factory.mktemp("near")
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(tiny_llama / "model.safetensors")
    noisy = {name: tensor * (1 + 0.1 * torch.randn(tensor.shape, generator=generator)) for name, tensor in tensors.items()}
    save_file(noisy, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_bytes((tiny_llama / "config.json").read_bytes())
    return directory


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model that knows nothing of the other."""
    return write_tiny_llama(tmp_path_factory.mktemp("stranger"), seed=7, num_layers=1, hidden_size=32)


def open_speculating(directory: Path, draft: Path, num_pages: int = 64, num_drafts: int = 3) -> NativeRuntime:
    options = NativeOptions(debug=True, draft=draft, num_drafts=num_drafts, max_prefill_tokens=16)
    return open_native(directory, kv_plan(num_pages=num_pages), options)


@pytest.mark.parametrize("num_pages", [14, 64])
@pytest.mark.parametrize("draft", ["tiny_llama", "near", "stranger"])
def test_tokens_equal_those_without_a_draft(tiny_llama: Path, draft: str, num_pages: int, request: pytest.FixtureRequest) -> None:
    reference = load_dequantized(tiny_llama)
    runtime = open_speculating(tiny_llama, request.getfixturevalue(draft), num_pages)
    requests = [GenerationRequest(prompt, 17, shares_prefix=True) for prompt in PROMPTS]
    expected = [greedy(reference, prompt, 17) for prompt in PROMPTS]
    assert [generate(runtime, [one])[0] for one in requests] == expected
    assert generate(runtime, requests * 2) == expected * 2
    activity = runtime.activity()
    assert activity.pool.num_used == 0
    assert (activity.num_preemptions > 0) == (num_pages == 14)


def test_drawn_tokens_equal_those_without_a_draft(tiny_llama: Path, near: Path) -> None:
    sampling = [Sampling(temperature=0.8, top_k=40, seed=seed) for seed in range(4)]
    requests = [GenerationRequest(prompt, 20, sampling=how) for prompt, how in zip(PROMPTS, sampling, strict=True)]
    assert generate(open_speculating(tiny_llama, near), requests) == generate(open_native(tiny_llama, kv_plan()), requests)


def test_a_perfect_draft_is_accepted_whole_and_saves_steps(tiny_llama: Path) -> None:
    runtime = open_speculating(tiny_llama, tiny_llama)
    runtime.submit(GenerationRequest(PROMPTS[0], 13))
    counts = []
    while events := runtime.step():
        counts.append(len(events))
    assert counts == [1, 4, 4, 4]  # the prompt's token, then three guesses and the model's own, three times
    activity = runtime.activity()
    assert (activity.num_drafted, activity.num_accepted) == (9, 9)


def test_a_near_draft_is_accepted_in_part(tiny_llama: Path, near: Path) -> None:
    runtime = open_speculating(tiny_llama, near)
    generate(runtime, [GenerationRequest(prompt, 40) for prompt in PROMPTS])
    activity = runtime.activity()
    assert 0.1 < activity.num_accepted / activity.num_drafted < 0.95


def test_a_stop_token_among_accepted_guesses_ends_the_request(tiny_llama: Path) -> None:
    expected = greedy(load_dequantized(tiny_llama), PROMPTS[0], 12)
    stop = expected[6]
    runtime = open_speculating(tiny_llama, tiny_llama, num_drafts=8)
    assert generate(runtime, [GenerationRequest(PROMPTS[0], 12, stop_tokens=(stop,))]) == [expected[: expected.index(stop) + 1]]
    assert runtime.activity().pool.num_used == 0


def test_open_native_refuses_a_draft_of_another_vocabulary(tiny_llama: Path, tmp_path: Path) -> None:
    from architecture_fixtures import SIZES, write_architecture
    from transformers import LlamaConfig

    other = write_architecture(LlamaConfig(**(SIZES | {"vocab_size": 300})), tmp_path / "other")
    with pytest.raises(ConfigError, match="the draft has 300 tokens and the model 260"):
        open_speculating(tiny_llama, other)


def test_open_native_refuses_a_draft_on_pages_with_scales(tiny_llama: Path) -> None:
    plan = kv_plan().model_copy(update={"precision": "int8"})
    with pytest.raises(ConfigError, match="needs pages of plain floats, these are int8"):
        open_native(tiny_llama, plan, NativeOptions(draft=tiny_llama))
