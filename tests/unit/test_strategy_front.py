"""From figures to front: flags, ratios, choice and picture on rows worked by hand."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from model_optimizer.artifacts.front import ParetoFront, Prediction
from model_optimizer.artifacts.strategy import Strategy, WeightRecipe
from model_optimizer.spec import Sla
from model_optimizer.store import file_refs
from model_optimizer.strategy.config import ScanConfig
from model_optimizer.strategy.damage import Damage
from model_optimizer.strategy.figures import Figures, SpeedRows
from model_optimizer.strategy.front import Scanned, assemble
from model_optimizer.strategy.space import Space

FLOAT = WeightRecipe()
INT8 = WeightRecipe(method="rtn", formats=("int8-channel",))
INT4 = WeightRecipe(method="rtn", formats=("int4-g64",))
MIB = 2**20


def figures(recipe: WeightRecipe, runtime: str, speeds: tuple[float, ...], resident: int, kl: float) -> Figures:
    strategy = Strategy(weights=recipe, runtime=runtime)
    return Figures(
        strategy=strategy,
        predicted=Prediction(decode_tok_per_s=speeds[0] * 1.1, resident_bytes=resident, kl_nats=kl),
        damage=Damage(
            label=strategy.label,
            kl_nats=(kl, kl),
            window_tokens=(100, 100),
            num_flips=round(200 * kl),
            weight_bytes=resident,
            growth_bytes=resident,
            open_s=1.0,
        ),
        speed=SpeedRows(tok_per_s=speeds, latency_ms=(100.0, 200.0), num_failed=0),
        engine_bytes=resident,
        kv_bytes=10 * MIB,
    )


MEASURED = (
    figures(FLOAT, "torch", (40, 41, 42), 500 * MIB, 0.0),
    figures(FLOAT, "onnxruntime", (100, 102, 104), 500 * MIB, 1e-7),
    figures(INT8, "onnxruntime", (150, 153, 156), 230 * MIB, 0.004),
    figures(INT4, "onnxruntime", (160, 163.2, 166.4), 180 * MIB, 0.12),
)
PRUNED = Strategy(weights=INT8, runtime="torch")


@pytest.fixture
def front(tmp_path: Path) -> ParetoFront:
    space = Space((*(it.strategy for it in MEASURED), PRUNED), {}, ())
    predictions = {it.label: it.predicted for it in MEASURED} | {PRUNED.label: MEASURED[0].predicted}
    scanned = Scanned(space, predictions, {PRUNED.label: "predicted dominated by float32/torch: ..."}, MEASURED)
    return assemble(scanned, Sla(concurrency=4, memory_gib=4), ScanConfig(), tmp_path)


def test_assemble_flags_domination_and_feasibility_apart(front: ParetoFront) -> None:
    flags = {it.strategy.label: (it.dominated_by, it.infeasible_because) for it in front.candidates}
    assert flags["float32/torch"] == ("float32/onnxruntime", None)  # 1e-7 nats are no difference in accuracy
    assert flags["float32/onnxruntime"] == (None, None)
    assert flags["int8-channel-rtn/onnxruntime"] == (None, None)
    assert flags["int4-g64-rtn/onnxruntime"] == (None, "kl 0.12 nats is above the limit 0.05")


def test_assemble_chooses_the_best_feasible_and_keeps_the_fastest_unquantized_as_baseline(front: ParetoFront) -> None:
    assert front.choice == Strategy(weights=INT8, runtime="onnxruntime")
    assert front.baseline == Strategy(weights=FLOAT, runtime="onnxruntime")
    assert front.candidate(front.baseline).score_ratio == pytest.approx(0.2, abs=1e-5)


def test_assemble_gives_ratios_of_rounds_against_the_baseline(front: ParetoFront) -> None:
    chosen = front.candidate(front.choice)
    assert chosen.speed_ratio == pytest.approx(1.5)
    assert chosen.speed_ratio_interval is not None and chosen.speed_ratio_interval.lower == pytest.approx(1.5)
    values = {measure.metric: measure.value for measure in chosen.measures}
    assert values["speed/generation_throughput_tok_per_s"] == 153
    assert values["speed/time_per_token_ms"] == pytest.approx(1000 / 153)
    assert values["accuracy/kl_nats"] == pytest.approx(0.004)
    assert values["accuracy/flips_ratio"] == pytest.approx(1 / 200)
    assert values["resource/resident_bytes"] == values["resource/engine_bytes"] == 230 * MIB


def test_assemble_counts_what_was_measured_and_how_wrong_the_predictor_was(front: ParetoFront) -> None:
    values = {measure.name: measure.value for measure in front.measures}
    assert (values["candidates"], values["measured"], values["pruned"]) == (5, 4, pytest.approx(0.2))
    # predicted 1.1 x the first round; medians are 41/40, 1.02, 1.02, 1.02 of it
    assert values["predictor_speed_error"] == pytest.approx(1.1 / 1.02 - 1)
    assert values["predictor_memory_error"] == 0


def test_assemble_logs_every_candidate(front: ParetoFront) -> None:
    assert {decision.subject for decision in front.decisions} == {it.strategy.label for it in front.candidates}
    assert front.candidate(PRUNED).pruned_because == "predicted dominated by float32/torch: ..."
    assert front.candidate(PRUNED).measures == ()


def test_assemble_draws_an_accessible_picture(front: ParetoFront, tmp_path: Path) -> None:
    assert front.picture == "pareto.svg"
    assert front.files == file_refs(tmp_path, tmp_path / "pareto.svg")
    root = ET.fromstring((tmp_path / "pareto.svg").read_text())
    space = "{http://www.w3.org/2000/svg}"
    assert root.get("role") == "img" and root.get("width") is None and root.get("viewBox") == "0 0 576 360"
    description = root.findtext(f"{space}desc") or ""
    assert "int8-channel-rtn/onnxruntime: 153.0 tokens per second, KL 0.004 nats, 230 MiB resident, chosen" in description
    assert "int4-g64-rtn/onnxruntime: 163.2 tokens per second, KL 0.12 nats, 180 MiB resident, infeasible" in description
    words = " ".join(node.text or "" for node in root.iter(f"{space}text"))
    for word in ("chosen", "infeasible", "dominated", "KL limit 0.05 nats"):
        assert word in words


def test_assemble_draws_the_same_bytes_twice(front: ParetoFront, tmp_path: Path) -> None:
    from model_optimizer.strategy.picture import draw

    assert draw(front, 0.05) == (tmp_path / "pareto.svg").read_text()


def test_assemble_warns_when_rounds_were_unsteady(tmp_path: Path) -> None:
    unsteady = figures(FLOAT, "torch", (40, 80, 120), 500 * MIB, 0.0)
    scanned = Scanned(Space((unsteady.strategy,), {}, ()), {unsteady.label: unsteady.predicted}, {}, (unsteady,))
    front = assemble(scanned, Sla(), ScanConfig(), tmp_path)
    assert any(warning.startswith("float32/torch: throughput varied") for warning in front.warnings)
    assert front.choice == unsteady.strategy


def test_assemble_warns_when_the_pinned_precision_breaks_a_limit(tmp_path: Path) -> None:
    measured = (MEASURED[1], MEASURED[3])
    space = Space(tuple(it.strategy for it in measured), {}, (), pinned="int4-g64")
    scanned = Scanned(space, {it.label: it.predicted for it in measured}, {}, measured)
    front = assemble(scanned, Sla(concurrency=4), ScanConfig(), tmp_path)
    assert front.choice == MEASURED[3].strategy and not front.candidate(front.choice).feasible
    assert front.warnings == (
        "the profile pins int4-g64; int4-g64-rtn/onnxruntime was taken although kl 0.12 nats is above the limit 0.05",
    )
