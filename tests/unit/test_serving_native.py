"""serve.yaml's `native:` section reaches the engine: a draft and packed weights change speed and size, never a token."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from native_fixtures import generate, kv_plan, quantize_by_rounding
from serving_fixtures import Running, running, until

from model_optimizer.artifacts.compiled import Engine
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.errors import ConfigError
from model_optimizer.models.tiny import write_byte_tokenizer
from model_optimizer.protocols import GenerationRequest
from model_optimizer.runtimes.options import RuntimeOptions
from model_optimizer.runtimes.torch.config import NativeOptions
from model_optimizer.runtimes.torch.engine import open_native
from model_optimizer.serving.config import ServeConfig, load_config
from model_optimizer.serving.text import TextCodec
from model_optimizer.serving.wire import Open

PROMPTS = ("river lamp seven", "a", "bread window", "x" * 40)
NUM_TOKENS = 30
RULES = {"enabled": True, "num_batches": 2, "hold_s": 0, "quiet_s": 0}
YAML = """\
engine: native
native:
  draft: {draft}
  num_drafts: 3
  keep_packed: true
  max_prefill_tokens: 8
  max_prefills: 2
  initial_pages: 12
  dtype: float32
  device: cpu
  resize: {{enabled: true, num_batches: 2, hold_s: 0, quiet_s: 0}}
  debug: true
kv: {{max_batch: 4, max_model_len: 128}}
"""


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    directory = quantize_by_rounding(tiny_llama, tmp_path_factory.mktemp("native") / "small", ("int4-g32", "int8-channel"))
    write_byte_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def server(quantized: Path, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = tmp_path_factory.mktemp("native-serve") / "serve.yaml"
    path.write_text(YAML.format(draft=tiny_llama))
    with running(quantized, load_config(path)) as server:
        yield server


def test_tokens_through_the_server_are_those_of_the_unpacked_model_without_a_draft(server: Running, quantized: Path) -> None:
    codec = TextCodec.read(quantized)
    requests = [GenerationRequest(tuple(codec.encode(prompt)), NUM_TOKENS, codec.ends) for prompt in PROMPTS]
    plain = generate(open_native(quantized, kv_plan(num_pages=128)), requests)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
    for prompt, tokens in zip(PROMPTS, plain, strict=True):
        answer = client.completions.create(model="small", prompt=prompt, max_tokens=NUM_TOKENS)
        assert answer.choices[0].text == codec.decode([token for token in tokens if token not in codec.ends])
        assert answer.usage is not None and answer.usage.completion_tokens == len(tokens)
    notes = " ".join(server.card.notes)
    assert "stay packed" in notes and "3 tokens at a time are guessed by a draft model" in notes


def test_the_card_tells_where_the_bytes_go(server: Running) -> None:
    card, table = server.card, server.card.memory
    lines = {line.part: line.num_bytes for line in table.budget}
    assert lines["kv_reservation"] == table.kv.pool_bytes == 4 * 8 * 16 * 512  # requests x pages x tokens x bytes
    assert 0 < lines["weights"] < 500_000  # two tiny models, one packed
    assert table.attention == "GQA: 2 layers" and table.fits
    assert lines["margin"] == table.usable_bytes - sum(size for part, size in lines.items() if part != "margin")
    assert (table.capacity_requests, table.tokens_per_request) == (4, 128)
    text = card.text()
    assert "fits: 4 requests of 128 tokens at once" in text and "activations" in text and "workspace" in text


def test_pages_are_given_back_by_an_idle_server(server: Running) -> None:
    def held() -> float:
        return server.gauge("kv_held_bytes")

    for prompt in PROMPTS:
        server.post("/v1/completions", model="small", prompt=prompt, max_tokens=80)
    until(lambda: held() > 0)
    high = held()
    until(lambda: 0 < held() < high or high <= 2 * 8 * 16 * 512)  # both models' pages, down to one longest request


def test_only_what_is_stated_travels_to_the_engine() -> None:
    engine = Engine(runtime="torch", directory=".", num_bytes=1, framework_version="1")
    plan = KvPlan(page_tokens=4, num_pages=8, bytes_per_token=2, max_batch=1, max_model_len=16)
    wanted = Open(engine=engine, directory="m", kv=plan, options=RuntimeOptions(native=NativeOptions(keep_packed=True)))
    there = Open.model_validate_json(wanted.line())
    assert there == wanted and there.options.native is not None
    assert there.options.native.model_fields_set == {"keep_packed"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "native: {keep_paked: true}",
            r":1: native.keep_paked: unknown field; did you mean 'keep_packed'\? allowed: max_prefill",
        ),
        ("native: {resize: {enable: true}}", r":1: native.resize.enable: unknown field; did you mean 'enabled'\?"),
        ("native: {dtype: int4}", r":1: native.dtype: Input should be 'float32', 'bfloat16' or 'float16'; seen: 'int4'"),
        ("native: {device: tpu}", r":1: native.device: .*; seen: 'tpu'"),
        ("kv: {max_batch: 2}\nnative:\n  num_drafts: 0\n", r":3: native.num_drafts: .* greater than or equal to 1; seen: 0"),
        ("managed: {comand: /bin/vllm}", r":1: managed.comand: unknown field; did you mean 'command'\?"),
        ("engine: {runtme: vllm}", r":1: engine.runtme: unknown field; did you mean 'runtime'\?"),
    ],
)
def test_load_config_refuses_unknown_keys_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "serve.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(tmp_path / "serve.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"engine": "onnxruntime", "native": {}}, "native: this section is for engine native, and the engine is onnxruntime"),
        ({"native": {"draft": "/nowhere"}}, "native.draft /nowhere holds no config.json; name the directory"),
    ],
)
def test_a_section_for_another_engine_is_refused(quantized: Path, stated: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words), running(quantized, ServeConfig.model_validate(stated)):
        pass


def test_the_engine_may_be_named_by_one_word() -> None:
    assert ServeConfig.model_validate({"engine": "native"}).engine.runtime == "torch"
    assert ServeConfig.model_validate({"engine": {"runtime": "vllm"}}).engine.runtime == "vllm"
