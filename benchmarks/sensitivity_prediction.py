"""Whether the predicted figure of a whole plan may be shown as its KL: predicted against measured over random mixes.

Mixes draw every fused group's format at random, for mean widths evenly spread over 3.5 to 7.5 bits. Formats of at least 3
bits are mixed in `mixes`; `mixes-with-int2` adds 2 bits at random places, which no allocation would do. `-sum` is the
plain sum over layers, without the growth that the pass measures.
"""

import numpy as np
from numpy.typing import NDArray

from benchmarks.evidence import Figure, append
from benchmarks.sensitivity_parts import FORMAT_NAMES, LIBRARIES, Setting, Subject, damages_of, estimate
from model_optimizer.formats.registry import FORMATS

LEAST_BITS, MOST_BITS = 3.5, 7.5


def figures_of(setting: Setting) -> list[Figure]:
    subject, sensitivity = Subject.load(setting), estimate(setting)
    damages = damages_of(sensitivity)
    usual = tuple(name for name in FORMAT_NAMES if FORMATS.get(name).bits >= 3)
    widths = np.linspace(LEAST_BITS, MOST_BITS, setting.num_mixes)
    figures = [Figure("ours", "growth_per_nat", sensitivity.growth_per_nat, "1/nats")]
    for case, formats in (("mixes", usual), ("mixes-with-int2", FORMAT_NAMES)):
        plans = [subject.random_plan(formats, bits, seed) for seed, bits in enumerate(widths)]
        measured = subject.damage.realised(plans, subject.documents.tokens_BT).mean(1)
        sums = np.array([sum(damages[key] for key in plan.items()) for plan in plans])
        figures += agreement(case, np.array([sensitivity.total_kl_nats(it) for it in sums]), measured)
        figures += agreement(f"{case}-sum", sums, measured)
        figures.append(Figure(case, "largest_kl_nats", float(measured.max()), "nats"))
    return figures


def agreement(case: str, predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> list[Figure]:
    """Return the share of the measured variance that the prediction itself explains, unfitted, and the typical ratio."""
    missed = np.square(measured - predicted).sum() / np.square(measured - measured.mean()).sum()
    ratio = float(np.median(predicted / measured))
    return [
        Figure(case, "r2_predicted_measured", float(1 - missed), "ratio", n=len(measured)),
        Figure(case, "median_predicted_over_measured_ratio", ratio, "ratio", n=len(measured)),
    ]


def main() -> None:
    append(__file__, figures_of(Setting.parse(__doc__)), LIBRARIES)


if __name__ == "__main__":
    main()
