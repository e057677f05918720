"""Reports for the rendering tests: with rounds, rejected early, with long names; and a reader of the page."""

import dataclasses
import re
from html.parser import HTMLParser

from report_fixtures import INT4, INT8, MIXED, candidate, compiled, golden_row, results, stored

from model_optimizer.artifacts.measure import Dimension, Interval, Measure, Origin, Verdict
from model_optimizer.artifacts.repair import LayerRaise, RepairRound
from model_optimizer.artifacts.report import Report, StageResults
from model_optimizer.artifacts.strategy import Strategy, WeightRecipe
from model_optimizer.artifacts.verification import Verification
from model_optimizer.reporting.build import RunFacts, StoredStages, build_report
from model_optimizer.reporting.formats.html import render_html


def make_report(
    verdict: Verdict = Verdict.ACCEPT,
    *,
    faster: bool = True,
    found: StageResults | None = None,
    name: str = "chat",
    rounds: tuple[RepairRound, ...] = (),
) -> Report:
    found = found or results(verdict, faster=faster)
    stages = StoredStages(
        stored("profile", found.target),
        stored("scan", found.front, wall_s=245.0),
        stored("quantize", found.quantized, cached=True),
        stored("compile", found.compiled),
        stored("memory", found.memory),
        stored("verify", found.verification),
    )
    return build_report(RunFacts(name, "package:tiny", 98_000_000, {"torch": "2.13.0"}, {"verify": 0}), stages, rounds=rounds)


def repair_rounds(num_layers: int = 23) -> tuple[RepairRound, ...]:
    """Return three rounds: rejected at 4 bits, still rejected with `num_layers` raised, accepted after one layer more."""
    lifts = tuple(
        LayerRaise(
            layer=f"model.layers.{index}.mlp.down_proj",
            before="int4-g64",
            after="int8-channel",
            kl_before_nats=0.004 / (1 + index),
            kl_after_nats=0.00002 / (1 + index),
        )
        for index in range(num_layers)
    )
    last = LayerRaise(
        layer="model.layers.29.self_attn.v_proj", before="int8-channel", after="float32", kl_before_nats=3e-4, kl_after_nats=0
    )
    first = repair_round(
        0, INT4, (-0.061, 0.017), Verdict.REJECT, cause="the scan's choice: fastest feasible candidate on the front"
    )
    second = repair_round(
        1,
        repaired(INT4, 1),
        (-0.026, 0.012),
        Verdict.REJECT,
        cause=f"{num_layers} layers raised: the gate lay -0.041 beyond its margin",
    )
    third = repair_round(2, repaired(INT4, 2), (-0.006, 0.011), Verdict.ACCEPT, cause="1 layer raised")
    return first, second.model_copy(update={"raised": lifts}), third.model_copy(update={"raised": (last,)})


def repair_round(
    number: int, strategy: Strategy, difference: tuple[float, float], verdict: Verdict, *, cause: str
) -> RepairRound:
    """Return one round from its accuracy difference (estimate, half interval)."""
    estimate, half = difference
    return RepairRound(
        round=number,
        strategy=strategy.label,
        cause=cause,
        true_bits_per_weight=4.25 + 0.8 * number,
        predicted_kl_nats=0.092 / (1 + 3 * number),
        measured_kl_nats=None if number == 1 else 0.11 / (1 + 3 * number),
        difference=estimate,
        interval=Interval(lower=estimate - half, upper=estimate + half),
        margin=0.02,
        num_items=640,
        verdict=verdict,
    )


def repaired(strategy: Strategy, number: int) -> Strategy:
    return strategy.model_copy(update={"weights": strategy.weights.model_copy(update={"repairs": number})})


def rejected_early(found: Verification) -> Verification:
    """Return a verification that was rejected for accuracy, and hence neither timed nor soaked."""
    nothing = {"requested_s": 0.0, "ran_s": 0.0, "num_segments": 0, "num_requests": 0, "num_tokens": 0}
    flat = {"memory_slope_bytes_per_hour": 0.0, "memory_slope_interval": Interval(lower=0, upper=0), "p50_first_ms": 0.0}
    soak = found.soak.model_copy(update={**nothing, **flat, "p50_last_ms": 0.0})
    missing = tuple(
        Measure(name=name, dimension=dimension, unit=unit, value=None, origin=Origin.NOT_MEASURED, reason="accuracy was rejected")
        for name, dimension, unit in (
            ("throughput", Dimension.SPEED, "tok_per_s"),
            ("soak", Dimension.ROBUSTNESS, "s"),
        )
    )
    kept = tuple(measure for measure in found.measures if measure.dimension in (Dimension.ACCURACY, Dimension.RESOURCE))
    dimensions = {**found.dimensions, Dimension.SPEED: Verdict.INCONCLUSIVE, Dimension.ROBUSTNESS: Verdict.INCONCLUSIVE}
    return found.model_copy(update={"soak": soak, "latency": (), "measures": (*kept, *missing), "dimensions": dimensions})


class Page(HTMLParser):
    """Collects what a check of the page needs."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.headings: list[int] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words.append(data)


def parse(report: Report) -> Page:
    page = Page()
    page.feed(render_html(report).decode())
    return page


def replaced(found: StageResults, **changes: object) -> StageResults:
    return dataclasses.replace(found, **changes)  # type: ignore[arg-type]


def accepted_after_repair() -> Report:
    """Return a report whose third candidate, the first with 24 layers raised, was accepted."""
    found = replaced(results(), compiled=compiled(repaired(INT4, 2), 163_000_000))
    return make_report(found=found, rounds=repair_rounds())


def rejected_after_repair() -> Report:
    """Return a report of four rounds, the last a frontier point that was rejected for accuracy before it was timed."""
    found = results(Verdict.REJECT)
    found = replaced(found, compiled=compiled(MIXED, 176_000_000), verification=rejected_early(found.verification))
    undecided = repair_round(2, INT8, (-0.031, 0.02), Verdict.INCONCLUSIVE, cause="the next frontier point")
    last = repair_round(3, MIXED, (-0.047, 0.016), Verdict.REJECT, cause="the next frontier point")
    return make_report(found=found, rounds=(*repair_rounds(120)[:2], undecided, last), name="repair")


def crowded_report() -> Report:
    """Return a report with long and CJK names, 15 candidates and many slices."""
    found = results(Verdict.INCONCLUSIVE)
    formats = ("int4-g64-asymmetric-with-a-very-long-name", "int8-channel")
    crowd = [
        candidate(
            Strategy(
                weights=WeightRecipe(method="rtn", formats=formats, bits_budget=4.5 + index),
                runtime="onnxruntime-openvino-execution-provider",
            ),
            20 + 3 * index,
            0.002 + 0.0008 * index**2,
            150 + 9 * index,
            feasible=index % 3 != 0,
            infeasible_because=None if index % 3 else "KL above 0.05",
            speed_ratio=1.1,
        )
        for index in range(9)
    ]
    names = [
        "一个名字很长很长很长很长很长很长很长很长的切片",
        *(f"slice-{index}-with-a-name-that-goes-on" for index in range(11)),
    ]
    slices = [golden_row("everyday-facts", name, -0.004, 0.05, Verdict.INCONCLUSIVE, gates=False) for name in names]
    found = replaced(
        found,
        front=found.front.model_copy(update={"candidates": (*found.front.candidates, *crowd)}),
        verification=found.verification.model_copy(update={"golden": (*found.verification.golden, *slices)}),
    )
    return make_report(
        found=found, name="超长的模型名称—客服问答助手（华东区生产环境）Qwen3-8B-Instruct-2507-finetuned-v12-candidate"
    )
