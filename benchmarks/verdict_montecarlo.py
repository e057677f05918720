"""The six figures by which the verdict's statistics are judged; `statistics_gates` and `statistics_intervals` hold all others.

Gates at 2 % flips with the planned number of items; intervals and the steady-state detector on autocorrelated streams.
"""

from dataclasses import replace

import numpy as np

from benchmarks import statistics_gates as gates
from benchmarks import statistics_intervals as intervals
from benchmarks.evidence import Figure, append

HEADLINES = {
    (f"flips_{gates.MAIN:g}", "accept_at_margin_ratio"): "false_pass_ratio",
    (f"flips_{gates.MAIN:g}", "accept_at_zero_ratio"): "accept_at_zero_ratio",
    (f"flips_{gates.MAIN:g}", "reject_at_twice_margin_ratio"): "reject_at_twice_ratio",
    ("welch_p_0.5", "paired_over_welch_items"): "samples_ratio_vs_welch",
    ("welch_p_0.7", "paired_over_welch_items"): "samples_ratio_vs_welch",
    ("welch_p_0.9", "paired_over_welch_items"): "samples_ratio_vs_welch",
    ("1000_streams_mixed", "coverage_ratio"): "interval_coverage_ratio",
    ("all_streams", "detector_wrong_ratio"): "steady_state_error_ratio",
}
"""Case and metric of the scripts above -> the metric here."""


def main() -> None:
    generator, planned = np.random.default_rng(gates.SEED), gates.PLAN.items(gates.MAIN)
    found = gates.gate_figures(f"flips_{gates.MAIN:g}", planned, gates.MAIN, generator)
    found += gates.welch_figures(planned, generator)
    generator = np.random.default_rng(intervals.SEED)
    found += [*intervals.detector_figures(generator), *intervals.coverage_figures(generator)]
    told: list[Figure] = []
    for (case, metric), headline in HEADLINES.items():
        figure = next(figure for figure in found if (figure.case, figure.metric) == (case, metric))
        told.append(replace(figure, metric=headline))
    append(__file__, told, ("numpy", "scipy"))


if __name__ == "__main__":
    main()
