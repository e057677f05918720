"""Do the accuracy gates keep their promise? Monte Carlo of 10,000 trials per truth at the planned number of items.

The gate: paired binary items, margin 0.3 points, alpha 5 %, power 80 %; a share of items flips, the rest is equal for
both engines. Beside each Monte Carlo share stands the exact one (sum over all counts). Also: too few items, Welch's
unpaired numbers, two one-sided tests, the sequential gate looked at all the time beside the fixed test looked at as
often, and the coverage of the cluster bootstrap for F1.
"""

import time

import numpy as np
from numpy.typing import NDArray

from benchmarks.evidence import Figure, append
from model_optimizer.artifacts.measure import Verdict
from model_optimizer.verification.statistics import Flips, decide, tango_statistic
from model_optimizer.verification.statistics_clusters import ClusterSums, compare_clusters
from model_optimizer.verification.statistics_equivalence import judge_equivalence
from model_optimizer.verification.statistics_plan import Plan, exact_shares
from model_optimizer.verification.statistics_sequential import Monitor, log_evidence

SEED, NUM_TRIALS = 20261130, 10_000
PLAN = Plan(alpha=0.05, power=0.8, margin=0.003)
DISCORDANCES = (0.01, 0.02, 0.05)
MAIN = 0.02
NUM_CHECKED = 100
"""Trials per truth that are also judged by the product's own `decide`, whose bounds are found by bisection."""
NUM_LOOKS, HORIZON = 240, 4
"""Looks of the sequential gate, evenly over this many times the fixed number of items."""
NUM_DOCUMENTS, NUM_BOOTSTRAPS = 150, 1000


def draw(
    num_items: int, discordance: float, difference: float, size: tuple[int, ...], generator: np.random.Generator
) -> NDArray[np.int64]:
    """Return counts of gained, lost and equal items, [*size, 3]."""
    gained, lost = (discordance + difference) / 2, (discordance - difference) / 2
    return generator.multinomial(num_items, [gained, lost, 1 - gained - lost], size)


def scores(counts: NDArray[np.int64], difference: float) -> NDArray[np.float64]:
    """Return the score statistic of H0: the difference is `difference`."""
    flat = counts.reshape(-1, 3).astype(np.float64)
    return tango_statistic(flat[:, 0], flat[:, 1], flat.sum(axis=1), difference).reshape(counts.shape[:-1])


def share(case: str, metric: str, hits: NDArray[np.bool_]) -> Figure:
    """Return a share of trials with its Wilson interval."""
    from scipy.stats import binomtest

    bounds = binomtest(int(hits.sum()), hits.size).proportion_ci(method="wilson")
    return Figure(case, metric, float(hits.mean()), "ratio", bounds.low, bounds.high, hits.size)


def check_against_product(counts: NDArray[np.int64], statistic: NDArray[np.float64]) -> None:
    """Make sure that `decide` answers as the vectorised statistic does."""
    for (gained, lost, equal), value in zip(counts[:NUM_CHECKED].tolist(), statistic[:NUM_CHECKED], strict=True):
        found = decide(Flips(gained + lost + equal, gained, lost), PLAN.margin, alpha=PLAN.alpha, power=PLAN.power).verdict
        wanted = Verdict.ACCEPT if value > PLAN.z_alpha else Verdict.REJECT if value < -PLAN.z_alpha else Verdict.INCONCLUSIVE
        assert found is wanted, f"decide says {found} where the statistic {value:g} says {wanted}"


def gate_figures(case: str, num_items: int, discordance: float, generator: np.random.Generator) -> list[Figure]:
    """Return the shares of the three verdicts at a loss of the margin, none, and twice the margin."""
    figures = [Figure(case, "items", num_items, "count")]
    for name, difference in (("at_margin", -PLAN.margin), ("at_zero", 0.0), ("at_twice_margin", -2 * PLAN.margin)):
        counts = draw(num_items, discordance, difference, (NUM_TRIALS,), generator)
        statistic = scores(counts, -PLAN.margin)
        check_against_product(counts, statistic)
        accept, reject = statistic > PLAN.z_alpha, statistic < -PLAN.z_alpha
        exact = exact_shares(num_items, discordance, difference, PLAN)
        figures += [
            share(case, f"accept_{name}_ratio", accept),
            Figure(case, f"accept_{name}_exact_ratio", exact[0], "ratio"),
            share(case, f"reject_{name}_ratio", reject),
            Figure(case, f"reject_{name}_exact_ratio", exact[1], "ratio"),
            share(case, f"inconclusive_{name}_ratio", ~accept & ~reject),
        ]
    return figures


def welch_figures(num_paired: int, generator: np.random.Generator) -> list[Figure]:
    """Return what a test without pairing takes, checked by simulation, over what the paired one takes."""
    figures = []
    for score in (0.5, 0.7, 0.9):
        case, num_items = f"welch_p_{score:g}", PLAN.items_unpaired(score)
        means = generator.binomial(num_items, score, (2, NUM_TRIALS)) / num_items
        error = np.sqrt((means * (1 - means)).sum(axis=0) / num_items)
        accept = (means[1] - means[0] + PLAN.margin) / error > PLAN.z_alpha
        figures += [
            Figure(case, "items_per_arm", num_items, "count"),
            share(case, "accept_at_zero_ratio", accept),
            Figure(case, "paired_over_welch_items", num_paired / num_items, "ratio"),
        ]
    return figures


def equivalence_figures(generator: np.random.Generator) -> list[Figure]:
    """Return the share that two one-sided tests call equivalent at no change and at either margin."""
    num_items, case = PLAN.items_equivalence(MAIN), "equivalence"
    figures = [Figure(case, "items", num_items, "count")]
    for name, difference in (("at_zero", 0.0), ("at_minus_margin", -PLAN.margin), ("at_plus_margin", PLAN.margin)):
        counts = draw(num_items, MAIN, difference, (NUM_TRIALS,), generator)
        accept = (scores(counts, -PLAN.margin) > PLAN.z_alpha) & (scores(counts, PLAN.margin) < -PLAN.z_alpha)
        for (gained, lost, equal), wanted in zip(counts[:NUM_CHECKED].tolist(), accept[:NUM_CHECKED], strict=True):
            found = judge_equivalence(Flips(gained + lost + equal, gained, lost), PLAN)
            assert (found.verdict is Verdict.ACCEPT) == wanted
        figures.append(share(case, f"accept_{name}_ratio", accept))
    return figures


def sequential_figures(fixed: int, generator: np.random.Generator) -> list[Figure]:
    """Return errors and stopping times of the sequential gate at 240 looks, and the fixed test's error at the same looks."""
    step = HORIZON * fixed // NUM_LOOKS
    values, case, figures = np.array([1.0, -1.0, 0.0]), "sequential", list[Figure]()
    truths = {"at_margin": -PLAN.margin, "at_zero": 0.0, "at_twice_margin": -2 * PLAN.margin, "at_one_point_lost": -0.01}
    for name, difference in truths.items():
        counts = np.cumsum(draw(step, MAIN, difference, (NUM_TRIALS, NUM_LOOKS), generator), axis=1)
        limit = -np.log(PLAN.alpha)
        evidence = [
            np.concatenate([log_evidence(sign * values, part, -sign * PLAN.margin) for part in np.array_split(counts, 50)])
            for sign in (1, -1)
        ]
        ever = [found >= limit for found in evidence]
        figures += [
            share(case, f"{word}_ever_{name}_ratio", row.any(axis=1))
            for word, row in zip(("accept", "reject"), ever, strict=True)
        ]
        if name == "at_margin":
            peeked = scores(counts[:, 9:], -PLAN.margin)  # from the tenth look on: earlier ones no one would take
            figures += [
                share("fixed_test_at_the_same_looks", f"{word}_ever_{name}_ratio", row.any(axis=1))
                for word, row in (("accept", peeked > PLAN.z_alpha), ("reject", peeked < -PLAN.z_alpha))
            ]
            continue
        decided = ever[0] if name == "at_zero" else ever[1]
        stopped = np.where(decided.any(axis=1), (decided.argmax(axis=1) + 1) * step, HORIZON * fixed)
        figures.append(Figure(case, f"median_items_{name}", float(np.median(stopped)), "count", n=NUM_TRIALS))
        figures.append(Figure(case, f"mean_items_{name}_over_fixed", float(stopped.mean()) / fixed, "ratio", n=NUM_TRIALS))
    check_monitor(generator)
    return figures


def check_monitor(generator: np.random.Generator) -> None:
    """Make sure that the monitor fed item by item holds the capital that the counts give."""
    items = generator.choice([1.0, -1.0, 0.0], 5000, p=[0.01, 0.013, 0.977])
    counts = np.array([(items == value).sum() for value in (1.0, -1.0, 0.0)])
    accept = float(log_evidence(np.array([1.0, -1.0, 0.0]), counts, -PLAN.margin))
    assert abs(np.log(Monitor(PLAN).after(items[:1234]).after(items[1234:]).evidence[0]) - accept) < 1e-9


def bootstrap_figures(generator: np.random.Generator) -> list[Figure]:
    """Return the coverage of the paired change of corpus F1 over documents of very different length and difficulty."""
    sizes, rates = (1, 40), (0.80, 0.78)
    truth, hits = rates[1] - rates[0], []
    for trial in range(NUM_BOOTSTRAPS):
        expected_C = generator.integers(*sizes, NUM_DOCUMENTS).astype(np.float64)
        shift_C = generator.beta(8, 2, NUM_DOCUMENTS) - 0.8
        found = []
        for rate in rates:  # 2 TP / (predicted + expected) with predicted = expected: the share found
            right_C = generator.binomial(expected_C.astype(int), np.clip(rate + shift_C, 0, 1)).astype(np.float64)
            found.append(ClusterSums(2 * right_C, 2 * expected_C))
        interval = compare_clusters(found[0], found[1], PLAN, seed=trial).interval
        hits.append(interval.lower <= truth <= interval.upper)
    return [share("cluster_bootstrap_f1", "coverage_ratio", np.array(hits))]


def main() -> None:
    begun = time.perf_counter()
    generator = np.random.default_rng(SEED)
    figures = list[Figure]()
    for discordance in DISCORDANCES:
        figures += gate_figures(f"flips_{discordance:g}", PLAN.items(discordance), discordance, generator)
    planned = PLAN.items(MAIN)
    for divisor in (4, 20, 100):
        figures += gate_figures(f"flips_{MAIN:g}_items_over_{divisor}", planned // divisor, MAIN, generator)
    figures += welch_figures(planned, generator)
    figures += equivalence_figures(generator)
    figures += sequential_figures(planned, generator)
    figures += bootstrap_figures(generator)
    figures.append(Figure("all", "wall_s", time.perf_counter() - begun, "s"))
    append(__file__, figures, ("numpy", "scipy"))


if __name__ == "__main__":
    main()
