"""Whether figures of two runs say the same: what differs in strategy and surroundings, and what that forbids."""

from dataclasses import dataclass

from model_optimizer.artifacts.report import Report
from model_optimizer.reporting.text import duration, number, size

SPEED_LIBRARIES = ("torch", "onnxruntime", "transformers")
MOST_LAYERS = 4
"""So many layers are named; the others are counted."""


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that a run was or became, in words."""

    name: str
    left: str
    right: str

    @property
    def same(self) -> bool:
        return self.left == self.right


def strategy_facts(left: Report, right: Report) -> tuple[Fact, ...]:
    """Return how the two candidates are stored and run."""
    sides = []
    for report in (left, right):
        weights = report.compiled.strategy.weights
        sides.append(
            (
                ("runtime", report.compiled.strategy.runtime),
                ("method", weights.method),
                ("formats", ", ".join(weights.formats)),
                ("bits budget", number(weights.bits_budget) if weights.bits_budget else "none"),
                ("repairs", str(weights.repairs)),
                ("bits per weight", number(report.quantized.coverage.true_bits_per_weight)),
                ("pages of KV memory", f"{report.memory.kv.num_pages} of {report.memory.kv.page_tokens} tokens"),
            )
        )
    facts = [Fact(name, mine, other) for (name, mine), (_, other) in zip(*sides, strict=True)]
    return (*facts, _layer_fact(left, right))


def _layer_fact(left: Report, right: Report) -> Fact:
    """Return the layers that are stored in another format."""
    plans = [{it.layer: it.format for it in report.quantized.plan} for report in (left, right)]
    differing = [layer for layer in plans[0] if plans[0][layer] != plans[1].get(layer)]
    differing += [layer for layer in plans[1] if layer not in plans[0]]
    if not differing:
        return Fact("layers in another format", "none", "none")
    more = f" and {len(differing) - MOST_LAYERS} more" if len(differing) > MOST_LAYERS else ""
    return Fact(
        f"layers in another format ({len(differing)})",
        *("; ".join(f"{layer} {plan.get(layer, 'unquantized')}" for layer in differing[:MOST_LAYERS]) + more for plan in plans),
    )


def environment_facts(left: Report, right: Report) -> tuple[Fact, ...]:
    """Return what the two runs ran on and with."""
    sides = []
    for report in (left, right):
        device = report.target.device
        sides.append(
            {
                "device": f"{device.name}, {device.num_cores} cores",
                "memory": size(device.memory_bytes),
                "instruction sets": ", ".join(device.instruction_sets) or "none that matter here",
                "driver": device.driver or "none",
                "bandwidth": f"{size(device.read_bytes_per_s)}/s read (measured)",
                "golden sets": _golden_words(report),
                "soak": duration(report.verification.soak.ran_s),
                "requests at once": str(_concurrency(report)),
                **report.versions,
                "seeds": ", ".join(f"{name} {seed}" for name, seed in sorted(report.seeds.items())),
            }
        )
    names = dict.fromkeys((*sides[0], *sides[1]))
    return tuple(Fact(name, *(side.get(name, "–") for side in sides)) for name in names)


def doubts(left: Report, right: Report) -> tuple[str, ...]:
    """Return why figures of the two runs do not say the same, the gravest first."""
    found = []
    if left.model_ref != right.model_ref:
        found.append(f"other models ({left.model_ref} and {right.model_ref}): no figure of one says anything of the other")
    if _golden_words(left) != _golden_words(right):
        found.append(f"other golden sets ({_golden_words(left)} and {_golden_words(right)}): accuracies are not comparable")
    mine, other = left.target.device, right.target.device
    if (mine.name, mine.num_cores, mine.kind) != (other.name, other.num_cores, other.kind):
        words = f"{mine.name} with {mine.num_cores} cores and {other.name} with {other.num_cores}"
        found.append(f"other machines ({words}): speed, memory and energy are not comparable")
    elif (mine.driver, mine.instruction_sets) != (other.driver, other.instruction_sets):
        found.append("another driver or instruction set on the same device: speed may differ for that alone")
    if _concurrency(left) != _concurrency(right):
        found.append(f"{_concurrency(left)} and {_concurrency(right)} requests at once: latencies are not comparable")
    if left.front.baseline != right.front.baseline:
        words = f"{left.front.baseline.label} and {right.front.baseline.label}"
        found.append(f"other baselines ({words}): ratios against the baseline are not comparable")
    libraries = [name for name in SPEED_LIBRARIES if left.versions.get(name) != right.versions.get(name)]
    if libraries:
        found.append(f"other versions of {', '.join(libraries)}: speed may differ for that alone")
    return tuple(found)


def _golden_words(report: Report) -> str:
    sets = {row.golden_set: row.num_items for row in report.verification.golden if row.slice is None}
    return ", ".join(f"{name} ({num_items} items)" for name, num_items in sorted(sets.items())) or "none"


def _concurrency(report: Report) -> int:
    return report.verification.latency[0].concurrency if report.verification.latency else report.memory.planned_concurrency
