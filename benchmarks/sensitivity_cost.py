"""What the one-pass sensitivity costs and how well it ranks and allocates, against leave-one-out on evaluation text.

Leave-one-out is measured on the text that plans are judged on, which favours it; the estimate sees calibration text only.
"""

import time

import numpy as np
from scipy.stats import spearmanr
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.evidence import Figure, append
from benchmarks.layer_damage import Plan
from benchmarks.sensitivity_parts import FORMAT_NAMES, LIBRARIES, Damages, Setting, Subject, damages_of, estimate, ratio_interval

BUDGETS_BITS = (3.5, 4.25, 5.0, 6.0)


def cost_figures(setting: Setting, subject: Subject) -> tuple[list[Figure], Damages, Damages]:
    """Measure the estimate and leave-one-out; return what they cost, and both."""
    tokens_BT = subject.documents.spread(setting.loo_sequences)
    start = time.perf_counter()
    with FlopCounterMode(display=False) as counter:
        sensitivity = estimate(setting)
    ours_s = time.perf_counter() - start
    with FlopCounterMode(display=False) as forward:
        subject.damage.model(input_ids=tokens_BT[:1].to(subject.damage.model.device), use_cache=False)
    forward_flops = forward.get_total_flops() / setting.length * sensitivity.num_tokens
    equivalents = counter.get_total_flops() / forward_flops
    start = time.perf_counter()
    truth = subject.damage.leave_one_out(tokens_BT)
    loo_s = time.perf_counter() - start
    loo_forwards, n = len(truth) + 1, sensitivity.num_tokens
    spent_ratio = loo_forwards * tokens_BT.numel() / (equivalents * n)
    return (
        [
            Figure("ours", "forward_equivalents", equivalents, "count", n=n),
            Figure("same-batches", "cost_ratio_vs_loo", loo_forwards / equivalents, "ratio", n=len(truth)),
            Figure("as-run", "cost_ratio_vs_loo", spent_ratio, "ratio", n=len(truth)),
            Figure("ours", "wall_s", ours_s, "s", n=n),
            Figure("loo", "wall_s", loo_s, "s", n=tokens_BT.numel()),
        ],
        damages_of(sensitivity),
        truth,
    )


def rank_figures(ours: Damages, truth: Damages) -> list[Figure]:
    """Return rank correlations and the ratio of single layers' figures."""
    figures = []
    for case, names in {"all": FORMAT_NAMES, **{name: (name,) for name in FORMAT_NAMES}}.items():
        keys = [key for key in truth if key[1] in names]
        left, right = (np.array([it[key] for key in keys]) for it in (ours, truth))
        figures.append(Figure(case, "spearman_vs_loo", float(spearmanr(left, right).statistic), "correlation", n=len(keys)))
        figures.append(Figure(case, "median_layer_over_loo_ratio", float(np.median(left / right)), "ratio", n=len(keys)))
    return figures


def allocation_figures(subject: Subject, ours: Damages, truth: Damages) -> list[Figure]:
    """Return the realised KL of both allocations at every budget, of uniform formats, and our regret."""
    plans: dict[str, Plan] = {}
    for label, damages in (("ours", ours), ("loo", truth)):
        at = subject.allocator(damages)
        plans |= {f"{label}-{bits:g}bits": at(bits) for bits in BUDGETS_BITS}
    plans |= {f"uniform-{name}": subject.uniform(name) for name in FORMAT_NAMES}
    documents = subject.documents
    kl = dict(zip(plans, subject.damage.realised(list(plans.values()), documents.tokens_BT), strict=True))
    n = documents.tokens_BT.numel()
    figures = []
    for case, plan in plans.items():
        figures.append(Figure(case, "kl_nats", float(kl[case].mean()), "nats", n=n))
        figures.append(Figure(case, "true_bits", subject.true_bits(plan), "bits"))
    for bits in BUDGETS_BITS:
        ratio, lower, upper = ratio_interval(kl[f"ours-{bits:g}bits"], kl[f"loo-{bits:g}bits"], documents.document_B)
        figures.append(Figure(f"{bits:g}bits", "allocation_regret_ratio", ratio - 1, "ratio", lower - 1, upper - 1, n))
    return figures


def main() -> None:
    setting = Setting.parse(__doc__)
    subject = Subject.load(setting)
    figures, ours, truth = cost_figures(setting, subject)
    append(__file__, [*figures, *rank_figures(ours, truth), *allocation_figures(subject, ours, truth)], LIBRARIES)


if __name__ == "__main__":
    main()
