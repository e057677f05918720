"""Plausible stage results for release and reporting tests: three verdicts, real small files where needed."""

import math
from pathlib import Path
from typing import TypeVar

from model_optimizer.artifacts.base import Produced, StageArtifact, Stored, Tree
from model_optimizer.artifacts.compiled import CompiledModel, Engine, Parity
from model_optimizer.artifacts.front import Candidate, ParetoFront, Prediction
from model_optimizer.artifacts.measure import Dimension, Interval, Measure, Origin, Verdict
from model_optimizer.artifacts.memory import KvPlan, MemoryPlan
from model_optimizer.artifacts.quantized import CalibrationReport, Coverage, LayerPlan, QuantizedModel
from model_optimizer.artifacts.release import SampleOutput
from model_optimizer.artifacts.report import StageResults
from model_optimizer.artifacts.strategy import Strategy, WeightRecipe
from model_optimizer.artifacts.target import BudgetLine, DecisionRow, DeviceFacts, KvLayer, ModelFacts, Question, TargetProfile
from model_optimizer.artifacts.verification import GoldenResult, LatencyResult, SoakResult, Verification
from model_optimizer.decisions import Decision

A = TypeVar("A", bound=StageArtifact)

INT8 = Strategy(weights=WeightRecipe(method="rtn", formats=("int8-channel",)), runtime="onnxruntime")
FLOAT = Strategy(weights=WeightRecipe(), runtime="onnxruntime")
FLOAT_TORCH = Strategy(weights=WeightRecipe(), runtime="torch")
INT4 = Strategy(weights=WeightRecipe(method="rtn", formats=("int4-g64",)), runtime="onnxruntime")
MIXED = Strategy(weights=WeightRecipe(method="rtn", formats=("int4-g64", "int8-channel"), bits_budget=6.0), runtime="onnxruntime")
NUM_PARAMETERS = 134_515_008
MIB = 2**20


def stored(
    kind: str, artifact: A, directory: Path = Path("/nowhere"), *, cached: bool = False, wall_s: float = 12.0
) -> Stored[A]:
    """Wrap an artifact as if the store had returned it."""
    key = (kind.encode().hex() * 8)[:64].ljust(64, "0")
    produced = Produced(started_at="2026-11-29T20:00:00+00:00", wall_s=wall_s, peak_rss_bytes=900 * MIB)
    return Stored[A](kind=kind, key=key, artifact=artifact, directory=directory, produced=produced, cached=cached)


def target() -> TargetProfile:
    device = DeviceFacts(
        kind="cpu",
        name="Example Xeon",
        num_cores=2,
        instruction_sets=(),
        cache_bytes={"l2": 2 * MIB, "l3": 48 * MIB},
        memory_bytes=16 * 2**30,
        memory_free_bytes=12 * 2**30,
        copy_bytes_per_s=1.1e10,
        read_bytes_per_s=1.6e10,
        matmul_flop_per_s=1.5e11,
    )
    model = ModelFacts(
        architecture="LlamaForCausalLM",
        model_type="llama",
        num_parameters=NUM_PARAMETERS,
        num_linear_parameters=106_168_320,
        num_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49152,
        max_position=8192,
        tied_head=True,
        dtype="float32",
        parameters_by_part={"attention": 26_542_080, "ffn": 79_626_240, "embedding": 28_311_552},
        bytes_by_part={"attention": 106_168_320, "ffn": 318_504_960, "embedding": 113_246_208},
        flop_per_token=268_959_744,
        flop_per_token_per_context=69_120,
        kv=(KvLayer(layer_type="full_attention", num_layers=30, bytes_per_token=46_080),),
        source_grid="4-bit group 32 asymmetric",
    )
    return TargetProfile(
        device=device,
        model=model,
        budget=(BudgetLine(part="weights", num_bytes=538 * 10**6), BudgetLine(part="kv cache", num_bytes=90 * 10**6)),
        decision_table=(DecisionRow(metric="p95 latency", current="unknown", target="1500 ms", acceptable_cost="0.02 accuracy"),),
        questions=(
            Question(question="Is decoding bound by memory or by arithmetic?", answer="memory", numbers={"flop_per_byte": 0.5}),
        ),
    )


def candidate(strategy: Strategy, tok_per_s: float, kl_nats: float, engine_mb: float, **extra: object) -> Candidate:
    measures = (
        Measure(
            name="generation_throughput",
            dimension=Dimension.SPEED,
            unit="tok_per_s",
            value=tok_per_s,
            higher_is_better=True,
            interval=Interval(lower=tok_per_s * 0.94, upper=tok_per_s * 1.05),
        ),
        Measure(name="kl", dimension=Dimension.ACCURACY, unit="nats", value=kl_nats),
        Measure(name="engine", dimension=Dimension.RESOURCE, unit="bytes", value=engine_mb * 1e6),
    )
    prediction = Prediction(decode_tok_per_s=tok_per_s * 1.2, resident_bytes=int(engine_mb * 1.3e6), kl_nats=kl_nats * 0.8)
    return Candidate.model_validate({"strategy": strategy, "predicted": prediction, "measures": measures, **extra})


def front(*, faster: bool = True) -> ParetoFront:
    ratio = 1.51 if faster else 0.93
    chosen = candidate(
        INT8,
        26.5 * ratio,
        0.0021,
        218,
        speed_ratio=ratio,
        feasible=True,
        speed_ratio_interval=Interval(lower=ratio - 0.08, upper=ratio + 0.09),
    )
    baseline = candidate(
        FLOAT, 26.5, 0.0, 541, speed_ratio=1.0, speed_ratio_interval=Interval(lower=1.0, upper=1.0), feasible=True
    )
    int4 = candidate(
        INT4,
        52.0,
        0.092,
        141,
        speed_ratio=1.96,
        feasible=False,
        infeasible_because="KL 0.092 nats above 0.05",
        speed_ratio_interval=Interval(lower=1.8, upper=2.1),
    )
    mixed = candidate(MIXED, 38.0, 0.031, 176, feasible=True, dominated=False)
    slow = candidate(FLOAT_TORCH, 17.0, 0.0, 541, feasible=True, dominated=True, dominated_by=FLOAT.label)
    pruned = Candidate(
        strategy=Strategy(weights=INT8.weights, runtime="torch"),
        predicted=Prediction(decode_tok_per_s=15.0, resident_bytes=540 * MIB, kl_nats=0.002),
        pruned_because="predicted 15 tok/s: torch unpacks int8 weights to float32 at load",
    )
    because = (
        "fastest feasible candidate on the front" if faster else "smallest feasible candidate; none is faster than the baseline"
    )
    return ParetoFront(
        candidates=(chosen, baseline, int4, mixed, slow, pruned),
        choice=INT8,
        baseline=FLOAT,
        decisions=(
            Decision(subject="strategy", choice=INT8.label, because=because, numbers={"speed_ratio": ratio, "kl_nats": 0.0021}),
        ),
    )


def calibration() -> CalibrationReport:
    return CalibrationReport(
        num_requested=128,
        num_read=200,
        num_empty=2,
        num_short=3,
        num_duplicate=4,
        num_bad=1,
        num_held_out=40,
        num_unused=22,
        num_used=128,
        num_tokens=9216,
        length_percentiles={"p50": 64, "p90": 140, "p99": 220, "max": 256},
    )


def quantized(num_layers: int = 30, checkpoint: str | None = "checkpoint") -> QuantizedModel:
    parts = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
    plan = []
    for layer in range(num_layers):
        for index, part in enumerate(parts):
            kl = 2.5e-6 * (1 + 3 * math.exp(-layer / 4)) * (1 + index) * (40 if layer == 29 and index == 6 else 1)
            full = layer == 29 and index == 6
            plan.append(
                LayerPlan(
                    layer=f"model.layers.{layer}.{part}",
                    format="float32" if full else "int8-channel",
                    num_weights=884_736,
                    num_bytes=3_538_944 if full else 887_040,
                    predicted_kl_nats=kl,
                    output_cosine=0.9712 if full else 0.9999,
                    suspect=full,
                    reason="cosine 0.9712 below 0.98: kept in full precision" if full else "the only format of the recipe",
                )
            )
    return QuantizedModel(
        recipe=INT8.weights,
        checkpoint=checkpoint,
        plan=tuple(plan),
        coverage=Coverage(quantized_weights_ratio=0.9952, true_bits_per_weight=8.14, checkpoint_bytes=222_300_000),
        predicted_kl_nats=sum(layer.predicted_kl_nats for layer in plan),
        calibration=calibration(),
        decisions=(
            Decision(
                subject="model.layers.29.mlp.down_proj",
                choice="float32",
                because="its cosine is below the floor",
                numbers={"output_cosine": 0.9712},
            ),
        ),
    )


def compiled(strategy: Strategy = INT8, num_bytes: int = 218_000_000) -> CompiledModel:
    parity = Parity(
        max_abs_logit_difference=0.0012,
        mean_kl_nats=3e-6,
        top1_agreement_ratio=1.0,
        greedy_tokens_equal=True,
        num_tokens=512,
        tolerance_kl_nats=0.002,
        passed=True,
    )
    version = "2.13.0" if strategy.runtime == "torch" else "1.32.0"
    return CompiledModel(
        strategy=strategy,
        engine=Engine(runtime=strategy.runtime, directory="engine", num_bytes=num_bytes, framework_version=version),
        parity=parity,
        level=1,
        layout="layout.json",
        reproduce=None,
        build_s=41.0,
    )


def memory() -> MemoryPlan:
    return MemoryPlan(
        kv=KvPlan(page_tokens=16, num_pages=192, bytes_per_token=46_080, max_batch=4, max_model_len=2048),
        budget=(
            BudgetLine(part="weights", num_bytes=232_000_000),
            BudgetLine(part="kv cache", num_bytes=141_557_760, note="4 requests of 768 tokens"),
            BudgetLine(part="activations", num_bytes=38_000_000),
            BudgetLine(part="runtime", num_bytes=210_000_000, note="libraries and process"),
            BudgetLine(part="margin", num_bytes=690_000_000),
        ),
        planned_concurrency=4,
        capacity_requests=9,
        ran_concurrency=4,
        predicted_peak_bytes=621_000_000,
        measured_peak_bytes=655_000_000,
        config="kv_cache_config.json",
        decisions=(Decision(subject="KV cache", choice="192 pages of 16 tokens", because="4 requests of p95 length must fit"),),
    )


def golden_row(
    name: str, slice_name: str | None, difference: float, half: float, verdict: Verdict, *, gates: bool = True
) -> GoldenResult:
    return GoldenResult(
        golden_set=name,
        slice=slice_name,
        metric="choice_accuracy",
        num_items=640 if slice_name is None else 120,
        baseline_ratio=0.612,
        candidate_ratio=0.612 + difference,
        difference=difference,
        interval=Interval(lower=difference - half, upper=difference + half),
        num_gained=5,
        num_lost=9,
        margin=0.02,
        mde=half * 1.4,
        samples_needed=0 if verdict is not Verdict.INCONCLUSIVE else 410,
        gates=gates,
        verdict=verdict,
        reason="" if gates else "slice: informative only",
    )


def verification(verdict: Verdict = Verdict.ACCEPT) -> Verification:
    """Return a verification whose accuracy gate answers `verdict`."""
    difference, half = {Verdict.ACCEPT: (-0.006, 0.011), Verdict.REJECT: (-0.047, 0.016), Verdict.INCONCLUSIVE: (-0.012, 0.021)}[
        verdict
    ]
    golden = (
        golden_row("everyday-facts", None, difference, half, verdict),
        golden_row("everyday-facts", "hard", difference * 1.5, half * 2, Verdict.INCONCLUSIVE, gates=False),
        golden_row("everyday-facts", "chinese <zh>", difference, half * 2.2, Verdict.INCONCLUSIVE, gates=False),
        golden_row("sentence-sense", None, 0.002, 0.010, Verdict.ACCEPT),
    )
    robustness = {Dimension.SPEED: Verdict.ACCEPT, Dimension.RESOURCE: Verdict.ACCEPT, Dimension.ROBUSTNESS: Verdict.ACCEPT}
    return Verification(
        golden=golden,
        latency=(latency(INT8, 1.0), latency(FLOAT, 1.5)),
        soak=SoakResult(
            requested_s=60,
            ran_s=60.4,
            num_segments=6,
            num_requests=118,
            num_failed=0,
            num_non_finite=0,
            num_wrong_canaries=0,
            memory_slope_bytes_per_hour=1.2e6,
            memory_slope_interval=Interval(lower=-3e6, upper=5e6),
            p50_first_ms=701,
            p50_last_ms=706,
        ),
        dimensions={Dimension.ACCURACY: verdict, **robustness},
        verdict=verdict,
        samples="samples.parquet",
        measures=verified_measures(verdict, difference, half),
        warnings=("the soak lasted 60 s of the 86400 s that final sign-off needs",),
    )


def latency(strategy: Strategy, factor: float) -> LatencyResult:
    percentiles = {
        "p50": 702.0,
        "p95": 1233.0,
        "p99": 1510.0,
        "ttft_p50": 81.0,
        "ttft_p95": 170.0,
        "itl_p50": 24.0,
        "itl_p95": 31.0,
    }
    scaled = {name: value * factor for name, value in percentiles.items()}
    intervals = {
        name: Interval(lower=value * 0.93, upper=value * 1.09) for name, value in scaled.items() if not name.startswith("itl")
    }
    return LatencyResult(
        strategy=strategy.label,
        concurrency=2,
        num_requests=40,
        num_failed=0,
        throughput_tok_per_s=61.0 / factor,
        percentiles_ms=scaled,
        intervals_ms=intervals,
    )


def verified_measures(verdict: Verdict, difference: float, half: float) -> tuple[Measure, ...]:
    accuracy, speed, resource, robustness = Dimension.ACCURACY, Dimension.SPEED, Dimension.RESOURCE, Dimension.ROBUSTNESS
    return (
        Measure(
            name="everyday_facts_difference",
            dimension=accuracy,
            unit="ratio",
            value=difference,
            limit=-0.02,
            num_samples=640,
            interval=Interval(lower=difference - half, upper=difference + half),
            higher_is_better=True,
            verdict=verdict,
            mde=half * 1.4,
            samples_needed=410 if verdict is Verdict.INCONCLUSIVE else 0,
        ),
        Measure(name="perplexity_ratio", dimension=accuracy, unit="ratio", value=1.004, baseline=1.0),
        Measure(
            name="p50_latency", dimension=speed, unit="ms", value=702, baseline=1053, interval=Interval(lower=660, upper=750)
        ),
        Measure(
            name="p95_latency",
            dimension=speed,
            unit="ms",
            value=1233,
            baseline=1850,
            interval=Interval(lower=1147, upper=1344),
            limit=1500,
            verdict=Verdict.ACCEPT,
            num_samples=40,
        ),
        Measure(name="ttft_model", dimension=speed, unit="ms", value=66, origin=Origin.PREDICTED, reason="roofline"),
        Measure(
            name="peak_memory",
            dimension=resource,
            unit="bytes",
            value=655e6,
            baseline=1.02e9,
            limit=2**31,
            verdict=Verdict.ACCEPT,
        ),
        Measure(
            name="energy_per_token",
            dimension=resource,
            unit="j",
            value=None,
            origin=Origin.NOT_MEASURED,
            reason="this machine exposes no energy counter",
        ),
        Measure(
            name="queue_wait", dimension=robustness, unit="ms", value=3.5, origin=Origin.SIMULATED, reason="M/G/c at the p95 load"
        ),
        Measure(
            name="failed_requests", dimension=robustness, unit="count", value=0, limit=0, num_samples=118, verdict=Verdict.ACCEPT
        ),
    )


def results(verdict: Verdict = Verdict.ACCEPT, *, faster: bool = True) -> StageResults:
    return StageResults(target(), front(faster=faster), quantized(), compiled(), memory(), verification(verdict))


def samples() -> tuple[SampleOutput, ...]:
    return (
        SampleOutput(
            prompt="The sky is",
            prompt_tokens=(10, 11, 12),
            tokens=(20, 21),
            text=" blue.",
            baseline_tokens=(20, 22),
            baseline_text=" blue!",
        ),
        SampleOutput(
            prompt="数一数：一、二、", prompt_tokens=(13,), tokens=(30,), text="三", baseline_tokens=(30,), baseline_text="三"
        ),
    )


def write_stage_files(root: Path, checkpoint: Path, compiled_model: CompiledModel, name: str) -> Stored[CompiledModel]:
    """Write an engine entry's small files below `root` and return it as stored."""
    directory = root / name
    (directory / "engine").mkdir(parents=True)
    (directory / "engine" / "model.onnx").write_bytes(bytes(range(256)) * 4)
    (directory / "layout.json").write_text('{"ops": []}')
    return stored(name, compiled_model, directory)


def golden_trees(root: Path) -> tuple[Tree, ...]:
    (root / "golden" / "everyday-facts").mkdir(parents=True)
    (root / "golden" / "everyday-facts" / "items.jsonl").write_text('{"question": "?"}\n')
    return (Tree.of(root / "golden" / "everyday-facts"),)
