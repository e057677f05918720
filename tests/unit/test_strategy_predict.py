"""The roofline against numbers worked by hand, and pruning that leaves the unquantized alone."""

import pytest

from model_optimizer.artifacts.front import Prediction
from model_optimizer.artifacts.strategy import Strategy, WeightRecipe
from model_optimizer.artifacts.target import DeviceFacts, KvLayer, ModelFacts
from model_optimizer.spec import Lengths, Sla, Traffic
from model_optimizer.strategy.predict import LinearWeights, Load, load_of, predict, prune, streamed_bytes

FACTS = ModelFacts(
    architecture="LlamaForCausalLM",
    model_type="llama",
    num_parameters=1_000,
    num_linear_parameters=800,
    num_layers=2,
    hidden_size=8,
    intermediate_size=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=20,
    max_position=512,
    tied_head=True,
    dtype="float32",
    parameters_by_part={"attention": 300, "ffn": 500, "embedding": 160, "head": 0, "norm": 40, "other": 0},
    bytes_by_part={},
    flop_per_token=2_000,
    flop_per_token_per_context=64,
    kv=(KvLayer(layer_type="full_attention", num_layers=2, bytes_per_token=64),),
)
DEVICE = DeviceFacts(
    kind="cpu",
    name="test",
    num_cores=2,
    instruction_sets=(),
    cache_bytes={},
    memory_bytes=10**9,
    memory_free_bytes=10**9,
    copy_bytes_per_s=2e6,
    read_bytes_per_s=1e6,
    matmul_flop_per_s=1e9,
)
FLOAT = WeightRecipe()
INT8 = WeightRecipe(method="rtn", formats=("int8-channel",))


@pytest.mark.parametrize(
    ("recipe", "runtime", "resident", "streamed"),
    [
        # 1,000 float32 parameters; ONNX Runtime holds the tied 20 x 8 head twice
        (FLOAT, "torch", 4_000, 3_200 + 640),
        (FLOAT, "onnxruntime", 4_000 + 640, 3_200 + 640),
        (INT8, "onnxruntime", 820 + 200 * 4 + 640, 820 + 640),
        (INT8, "torch", 4_000, 3_200 + 640),
    ],
)
def test_predict_follows_what_the_runtime_holds_and_reads(
    recipe: WeightRecipe, runtime: str, resident: int, streamed: int
) -> None:
    strategy, weights = Strategy(weights=recipe, runtime=runtime), LinearWeights(820, 0.01)
    assert predict(strategy, weights, DEVICE, FACTS, Load(1, 0.0)).resident_bytes == resident
    assert streamed_bytes(strategy, FACTS, weights) == streamed


def test_predict_is_bound_by_memory_when_arithmetic_is_fast() -> None:
    strategy = Strategy(weights=INT8, runtime="onnxruntime")
    predicted = predict(strategy, LinearWeights(820, 0.01), DEVICE, FACTS, Load(4, 10.0))
    # (820 + 640 weights + 4 x 10 x 64 cache) / 1e6 B/s = 4.02 ms for 4 tokens
    assert predicted.decode_tok_per_s == pytest.approx(4 / 4.02e-3)
    assert predicted.kl_nats == 0.01


def test_predict_is_bound_by_arithmetic_when_memory_is_fast() -> None:
    device = DEVICE.model_copy(update={"read_bytes_per_s": 1e15, "matmul_flop_per_s": 1e6})
    predicted = predict(Strategy(weights=FLOAT, runtime="torch"), LinearWeights(0, 0.0), device, FACTS, Load(4, 10.0))
    # 4 x (2,000 + 10 x 64) FLOP / 1e6 = 10.56 ms for 4 tokens
    assert predicted.decode_tok_per_s == pytest.approx(4 / 10.56e-3)


def test_load_of_is_mean_prompt_and_half_the_mean_output() -> None:
    constant = Traffic(prompt_tokens=Lengths(p50=100, p95=100, max=100), output_tokens=Lengths(p50=40, p95=40, max=40))
    assert load_of(constant, Sla(concurrency=3)) == Load(3, 120.0)
    assert load_of(constant, Sla(concurrency=3, max_model_len=64)) == Load(3, 64.0)


GOOD = Prediction(decode_tok_per_s=100, resident_bytes=1000, kl_nats=0.01)


@pytest.mark.parametrize(
    ("worse", "pruned"),
    [
        ({"kl_nats": 0.02}, True),  # same cost, less accurate
        ({"kl_nats": 0.02, "decode_tok_per_s": 124.0}, True),  # faster, but within the predictor's 25 %
        ({"kl_nats": 0.02, "decode_tok_per_s": 126.0}, False),
        ({"kl_nats": 0.02, "resident_bytes": 951}, True),  # smaller, but within 5 %
        ({"kl_nats": 0.02, "resident_bytes": 949}, False),
        ({"kl_nats": 0.01, "decode_tok_per_s": 50.0}, False),  # never pruned by one that is no more accurate
    ],
)
def test_prune_needs_a_margin_beyond_the_predictors_error(worse: dict[str, float], pruned: bool) -> None:
    predictions = {"good": GOOD, "other": GOOD.model_copy(update=worse)}
    assert ("other" in prune(predictions, ["good", "other"])) is pruned


def test_prune_gives_numbers_and_spares_the_unquantized() -> None:
    slow = GOOD.model_copy(update={"kl_nats": 0.02, "decode_tok_per_s": 10.0})
    assert prune({"good": GOOD, "float32": slow}, ["good"]) == {}
    reason = prune({"good": GOOD, "slow": slow}, ["good", "slow"])["slow"]
    assert reason.startswith("predicted dominated by good: 10.0 against 100.0 tok/s")
    assert reason.endswith("KL 0.02 against 0.01 nats")


def test_prune_lets_only_a_lossless_candidate_beat_an_upper_guess() -> None:
    mended = GOOD.model_copy(update={"kl_nats": 0.3, "kl_upper_guess": "plain rounding's"})
    lossless = GOOD.model_copy(update={"kl_nats": 0.0})
    assert prune({"good": GOOD, "gptq": mended}, ["good", "gptq"]) == {}
    assert set(prune({"good": GOOD, "float32": lossless, "gptq": mended}, ["gptq"])) == {"gptq"}
    # the guess is an upper one, so what it beats is beaten
    assert set(prune({"gptq": mended, "rtn": GOOD.model_copy(update={"kl_nats": 0.31})}, ["gptq", "rtn"])) == {"rtn"}


@pytest.mark.parametrize(("method", "guess"), [("rtn", False), ("gptq", True)])
def test_predict_says_when_the_kl_is_no_more_than_an_upper_guess(method: str, guess: bool) -> None:
    strategy = Strategy(weights=WeightRecipe.model_validate({"method": method, "formats": ("int4-g64",)}), runtime="torch")
    predicted = predict(strategy, LinearWeights(820, 0.3), DEVICE, FACTS, Load(1, 0.0))
    assert predicted.kl_nats == 0.3
    assert ("gptq mends" in (predicted.kl_upper_guess or "")) is guess
