"""What the one-pass sensitivity costs and how well it ranks and allocates, against leave-one-out on evaluation text.

Leave-one-out is measured on the text that plans are judged on, which favours it; the estimate sees calibration text only.
`ours` is the engine's allocation with its second look at the mix, `first` the one before that. `--recorded FOLDER` takes the
estimate and the truth of an earlier run (made on an H200, commit e600853) and measures the allocations alone: a CPU can do that.
"""

import json
import time
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.evidence import Figure, append
from benchmarks.layer_damage import Plan
from benchmarks.sensitivity_parts import FORMAT_NAMES, LIBRARIES, Damages, Setting, Subject, damages_of, estimate, ratio_interval
from model_optimizer.artifacts.quantized import Sensitivity

BUDGETS_BITS = (3.5, 4.25, 5.0, 6.0)


def read_recorded(folder: Path) -> tuple[Sensitivity, Damages]:
    """Return the estimate and the leave-one-out truth of an earlier run."""
    sensitivity = Sensitivity.model_validate_json((folder / "smollm2_sensitivity.json").read_text())
    truth = json.loads((folder / "smollm2_leave_one_out.json").read_text())
    return sensitivity, {(layer, name): value for layer, row in truth.items() for name, value in row.items()}


def cost_figures(setting: Setting, subject: Subject) -> tuple[list[Figure], Sensitivity, Damages]:
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
        sensitivity,
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


def allocation_figures(setting: Setting, subject: Subject, sensitivity: Sensitivity, truth: Damages) -> list[Figure]:
    """Return the realised KL of the allocations at every budget, and our regret against that of leave-one-out."""
    plans: dict[str, Plan] = {}
    for label, damages in (("first", damages_of(sensitivity)), ("loo", truth)):
        at = subject.allocator(damages)
        plans |= {f"{label}-{bits:g}bits": at(bits) for bits in BUDGETS_BITS}
    for bits in BUDGETS_BITS:
        plans[f"ours-{bits:g}bits"] = subject.second_look(setting, sensitivity, bits)
    if setting.recorded is None:
        plans |= {f"uniform-{name}": subject.uniform(name) for name in FORMAT_NAMES}
    documents = subject.documents
    kl = dict(zip(plans, subject.damage.realised(list(plans.values()), documents.tokens_BT), strict=True))
    n = documents.tokens_BT.numel()
    figures = []
    for case, plan in plans.items():
        figures.append(Figure(case, "kl_nats", float(kl[case].mean()), "nats", n=n))
        figures.append(Figure(case, "true_bits", subject.true_bits(plan), "bits"))
    for bits in BUDGETS_BITS:
        for label in ("first", "ours"):
            ratio, lower, upper = ratio_interval(kl[f"{label}-{bits:g}bits"], kl[f"loo-{bits:g}bits"], documents.document_B)
            case = f"{bits:g}bits" if label == "ours" else f"{bits:g}bits-{label}"
            figures.append(Figure(case, "allocation_regret_ratio", ratio - 1, "ratio", lower - 1, upper - 1, n))
    return figures


def main() -> None:
    setting = Setting.parse(__doc__)
    subject = Subject.load(setting)
    if setting.recorded is None:
        figures, sensitivity, truth = cost_figures(setting, subject)
    else:
        figures, (sensitivity, truth) = [], read_recorded(setting.recorded)
    ranks = rank_figures(damages_of(sensitivity), truth)
    append(__file__, [*figures, *ranks, *allocation_figures(setting, subject, sensitivity, truth)], LIBRARIES)


if __name__ == "__main__":
    main()
