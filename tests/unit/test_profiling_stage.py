"""The profile stage on a tiny model: figures against hand-made arithmetic, and limits that physics forbids."""

from pathlib import Path

import pytest
from profiling_fixtures import CPU, MODEL

from model_optimizer.artifacts.base import Tree
from model_optimizer.artifacts.measure import Origin
from model_optimizer.artifacts.target import TargetProfile
from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.models.facts import read_facts
from model_optimizer.profiling.budget import budget_lines, part_bytes, total_bytes
from model_optimizer.profiling.business import decision_table, questions
from model_optimizer.profiling.feasibility import RATE_HEADROOM, Ask, best_case, infeasible, kv_bytes
from model_optimizer.profiling.stage import ProfileInputs, profile_target
from model_optimizer.protocols import Quiet
from model_optimizer.spec import Cost, Lengths, Sla, Target, Traffic
from model_optimizer.store import stage_key

TRAFFIC = Traffic(prompt_tokens=Lengths(p50=64, p95=128, max=256), output_tokens=Lengths(p50=32, p95=64, max=128))


def ask(**sla: float) -> Ask:
    return Ask(device=CPU, model=MODEL, sla=Sla.model_validate({"max_model_len": 512, **sla}), traffic=TRAFFIC, run_bits=32)


@pytest.fixture(scope="module")
def profiled(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> TargetProfile:
    """The stage really run on the tiny model."""
    inputs = ProfileInputs(
        fingerprint="f", model=Tree.of(tiny_llama), target=Target(hardware="cpu"), sla=Sla(concurrency=4, max_model_len=256),
        traffic=TRAFFIC, cost=Cost(machine_usd_per_hour=0.1), source_bytes=12345,
    )  # fmt: skip
    return profile_target(inputs, tmp_path_factory.mktemp("profile"), progress=Quiet())


def test_profile_target_counts_model_and_budget(profiled: TargetProfile, tiny_llama: Path) -> None:
    assert profiled.model == read_facts(tiny_llama)
    assert profiled.model.source_grid is None
    assert part_bytes(profiled.budget, "weights") == profiled.model.num_parameters * 4
    assert part_bytes(profiled.budget, "kv_reservation") == 4 * 256 * (2 * 2 * 16 * 4 * 2)
    assert part_bytes(profiled.budget, "margin") == pytest.approx(total_bytes(profiled.budget) / 11, rel=1e-6)
    assert profiled.files == ()


def test_profile_target_marks_measured_and_predicted(profiled: TargetProfile) -> None:
    origins = {measure.metric: measure.origin for measure in profiled.measures}
    assert origins["speed/copy_bandwidth_bytes_per_s"] is Origin.MEASURED
    assert origins["speed/predicted_throughput_tok_per_s"] is Origin.PREDICTED
    assert len(origins) == len(profiled.measures)
    values = {measure.metric: measure.value for measure in profiled.measures}
    assert values["resource/source_file_bytes"] == 12345
    assert values["resource/kv_per_token_bytes"] == 512
    assert values["speed/copy_bandwidth_bytes_per_s"] == profiled.device.copy_bytes_per_s


def test_profile_target_answers_three_questions_with_numbers(profiled: TargetProfile) -> None:
    assert len(profiled.questions) == 3
    assert all(question.answer and question.numbers for question in profiled.questions)
    assert [row.metric for row in profiled.decision_table] == ["p95 latency", "throughput", "memory", "accuracy", "cost"]


def test_profile_target_ends_when_the_roofline_forbids_the_limit(tiny_llama: Path, tmp_path: Path) -> None:
    inputs = ProfileInputs(
        fingerprint="f", model=Tree.of(tiny_llama), target=Target(), sla=Sla(throughput_tok_per_s=1e12), traffic=TRAFFIC
    )
    with pytest.raises(UnsupportedError, match=r"throughput_tok_per_s 1e\+12 at concurrency 1, at best .* GB/s"):
        profile_target(inputs, tmp_path, progress=Quiet())


def test_profile_target_refuses_unknown_hardware_before_measuring(tiny_llama: Path, tmp_path: Path) -> None:
    inputs = ProfileInputs(fingerprint="f", model=Tree.of(tiny_llama), target=Target(hardware="tpu"), sla=Sla(), traffic=TRAFFIC)
    with pytest.raises(ConfigError, match="unknown device 'tpu'"):
        profile_target(inputs, tmp_path, progress=Quiet())


def test_stage_key_of_profile_inputs_ignores_where_the_model_lies(tiny_llama: Path) -> None:
    inputs = ProfileInputs(fingerprint="f", model=Tree.of(tiny_llama), target=Target(), sla=Sla(), traffic=TRAFFIC)
    moved = inputs.model_copy(update={"model": Tree(digest=inputs.model.digest, path=Path("elsewhere"))})
    other = inputs.model_copy(update={"sla": Sla(concurrency=2)})
    assert stage_key(inputs) == stage_key(moved) != stage_key(other)


def test_best_case_takes_four_bits_and_rates_with_headroom() -> None:
    bound = best_case(ask())
    cached_s, rest_s = 100_000 / (RATE_HEADROOM * 4e9), 400_000 / (RATE_HEADROOM * 1e9)
    assert bound.p50_latency_ms == pytest.approx(1000 * 32 * (cached_s + rest_s))
    assert bound.p95_latency_ms == pytest.approx(1000 * 64 * (cached_s + rest_s))
    assert bound.throughput_tok_per_s == pytest.approx(1 / (cached_s + (400_000 + 32 * 800) / (RATE_HEADROOM * 1e9)))
    assert bound.memory_bytes == 650_000 + 96 * 800


@pytest.mark.parametrize(
    ("limit", "named"),
    [
        ({"throughput_tok_per_s": 1e5}, "throughput_tok_per_s 100000"),
        ({"p50_latency_ms": 0.01}, "p50_latency_ms 0.01, at best"),
        ({"p95_latency_ms": 0.01}, "p95_latency_ms 0.01, at best"),
        ({"p99_latency_ms": 0.01}, "p99_latency_ms 0.01, at best"),
        ({"ttft_p95_ms": 0.01}, "ttft_p95_ms 0.01, at best"),
        ({"memory_gib": 0.0001}, "memory_gib 0.0001"),
    ],
)
def test_infeasible_names_the_limit_and_its_bound(limit: dict[str, float], named: str) -> None:
    reasons = infeasible(ask(**limit))
    assert named in reasons[0]
    assert reasons[-1].startswith("bound: 3 x measured 1 GB/s and 100 GFLOP/s")


def test_infeasible_accepts_what_lies_just_within_every_bound() -> None:
    bound = best_case(ask())
    limits = {"throughput_tok_per_s": bound.throughput_tok_per_s * 0.999, "p95_latency_ms": bound.p95_latency_ms * 1.001,
              "ttft_p95_ms": bound.ttft_p95_ms * 1.001, "memory_gib": bound.memory_bytes / 2**30 * 1.001}  # fmt: skip
    assert infeasible(ask(**limits)) == ()
    assert infeasible(ask()) == ()


def test_infeasible_sees_a_model_larger_than_the_machine() -> None:
    small = Ask(CPU.model_copy(update={"memory_bytes": 100_000}), MODEL, Sla(), TRAFFIC, 32)
    assert "the device has" in infeasible(small)[0]


def test_kv_bytes_stops_at_the_window_of_sliding_layers() -> None:
    full = MODEL.kv[0]
    sliding = full.model_copy(update={"layer_type": "sliding_attention", "max_tokens": 32})
    assert kv_bytes(MODEL.model_copy(update={"kv": (full, sliding)}), 100) == 800 * 100 + 800 * 32


@pytest.mark.parametrize(
    ("limit", "answer"),
    [
        ({"memory_gib": 0.5}, "it does not load"),
        ({"concurrency": 1024, "memory_gib": 0.7}, "it loads and overflows under concurrency"),
        ({"concurrency": 4}, "neither"),
    ],
)
def test_questions_tell_loading_from_overflowing(limit: dict[str, float], answer: str) -> None:
    asked = ask(**limit)
    assert questions(asked, budget_lines(asked))[0].answer.startswith(answer)


def test_decision_table_prices_requests_of_median_length() -> None:
    asked = ask(throughput_tok_per_s=100)
    rows = {row.metric: row for row in decision_table(asked, budget_lines(asked), Cost(machine_usd_per_hour=1.2))}
    tok_per_s = 1 / ((4e6 + 80 * 800) / 1e9)  # weights and the cache of 64 + 32 / 2 tokens at 1 GB/s
    assert rows["throughput"].current.startswith(f"{tok_per_s:.4g} tok/s (predicted, unquantized")
    assert rows["cost"].current.startswith(f"{1.2 / 3600 * 1000 * 32 / tok_per_s:.3g} USD")
    assert rows["throughput"].target == "at least 100 tok/s"
    assert "not stated" in rows["memory"].target
